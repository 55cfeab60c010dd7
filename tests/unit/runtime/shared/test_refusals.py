"""Every refusal of the Python loader has a twin in a shared object, with the same words; nothing reaches the driver."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import attnres_aot
from attnres_aot.errors import AttnResError
from attnres_aot.runtime import api
from attnres_aot.spec.variants import ConsumerKey

HIDDEN = 1024
BF16 = torch.bfloat16
VARIANTS = (
    "nb2-delta", "nb2-delta-write2", "nb2-delta-ring8", "nb2-delta-aux", "nb2-delta-stats", "nb0-write0",
    "nb2-delta-final",
)  # fmt: skip


@pytest.fixture
def bundle(stub, bundles):
    return api.load(bundles.write(VARIANTS, producers=("statistics-nb2", "publish")))


def told(call: Callable[[], Any]) -> tuple[str, str]:
    """Returns kind and text of the error of a call, without what differs by nature: paths and devices."""
    with pytest.raises(AttnResError) as caught:
        call()
    text = re.sub(r"bundle: .* \(", "bundle: PATH (", str(caught.value))
    text = re.sub(r"the bundle at \S+", "the bundle at PATH", text)
    return type(caught.value).__name__, text.replace("cuda:0", "cpu")


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def misaligned(*shape: int) -> torch.Tensor:
    return torch.zeros(math.prod(shape) + 1, dtype=BF16)[1:].view(shape)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A change of good operands that is refused."""

    name: str
    change: Callable[[Any], dict[str, Any]]


def shifted(given: Any) -> dict[str, Any]:
    memory = zeros(4, HIDDEN)
    return {"delta": memory[:3], "prefix": memory[1:]}


RUN_CASES = (
    Case(name="fp32", change=lambda given: {"delta": given.delta.float()}),
    Case(name="fp16 and int", change=lambda given: {"out": given.out.half(), "prefix": given.prefix.int()}),
    Case(name="not a tensor", change=lambda given: {"delta": 3}),
    Case(name="none", change=lambda given: {"out": None}),
    Case(name="rank", change=lambda given: {"delta": zeros(HIDDEN), "blocks": given.delta}),
    Case(name="row length", change=lambda given: {"out": zeros(3, 512)}),
    Case(name="transposed", change=lambda given: {"delta": zeros(HIDDEN, 3).t()}),
    Case(name="few blocks", change=lambda given: {"blocks": given.blocks[:, :1]}),
    Case(name="row stride", change=lambda given: {"delta": zeros(3, HIDDEN + 4)[:, :HIDDEN]}),
    Case(name="block stride", change=lambda given: {"blocks": zeros(3, 4, HIDDEN + 4)[:, :, :HIDDEN]}),
    Case(name="rows", change=lambda given: {"delta": zeros(2, HIDDEN), "prefix": zeros(4, HIDDEN)}),
    Case(name="expanded output", change=lambda given: {"out": zeros(1, HIDDEN).expand(3, HIDDEN)}),
    Case(name="alignment", change=lambda given: {"delta": misaligned(3, HIDDEN), "out": misaligned(3, HIDDEN)}),
    Case(name="same output", change=lambda given: {"out": given.prefix}),
    Case(name="output in blocks", change=lambda given: {"out": given.blocks[:, 1]}),
    Case(name="prefix over blocks", change=lambda given: {"prefix": given.blocks[:, 0]}),
    Case(name="shifted source", change=shifted),
    Case(name="all at once", change=lambda given: {"delta": 1, "prefix": given.prefix.float(), "out": zeros(3, 8)}),
)


@pytest.mark.parametrize("case", RUN_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("warm", [False, True], ids=["first", "after a good launch"])
def test_operands(stub, bundle, make, weights, key, operands, helpers, case, warm):  # noqa: PLR0917 - fixtures
    given = operands(rows=3)
    python, consumer = attnres_aot.PreparedAttnRes(weights, key, (1e-5, 1e-6), bundle), make(weights, key)
    if warm:
        python.run(*given.ordinary)
        consumer.run(*map(helpers.gpu, given.ordinary))
    wrong = given.replace(**case.change(given)).ordinary
    before = stub.launch_count()
    assert told(lambda: python.run(*wrong)) == told(lambda: consumer.run(*map(helpers.gpu, wrong)))
    assert told(lambda: python.run(*wrong)) == told(lambda: consumer.plan_run(*map(helpers.gpu, wrong))(
        0, *[tensor.data_ptr() for tensor in wrong]
    ))  # fmt: skip
    assert stub.launch_count() == before


def test_bound_memory_that_operands_touch(stub, bundle, make, weights, key, operands, helpers):
    given, mailbox = operands(rows=3), attnres_aot.new_mailbox(8, 64, HIDDEN, "cpu")
    statistics = zeros(64, HIDDEN, dtype=torch.float32), zeros(64, 2, dtype=torch.float32)
    python, consumer = attnres_aot.PreparedAttnRes(weights, key, (1e-5, 1e-6), bundle), make(weights, key)
    python.bind_ring(mailbox)
    consumer.bind_ring(helpers.gpu(mailbox))
    python.bind_statistics(*statistics, [1])
    consumer.bind_statistics(*map(helpers.gpu, statistics), [1])
    for out in (mailbox[0, :3], mailbox[7, 2:5], statistics[0].view(BF16)[:3, :HIDDEN], weights[0].view(1, HIDDEN)):
        rows = out.shape[0]
        wrong = operands(rows=rows).replace(out=out).ordinary
        assert told(lambda: python.run(*wrong)) == told(lambda: consumer.run(*map(helpers.gpu, wrong)))  # noqa: B023
    wrong = (mailbox[0, :3], *given.ring)
    python.run(*wrong)
    consumer.run(*map(helpers.gpu, wrong))  # what is only read may lie there
    assert stub.launch_count() == 2


def test_random_overlaps_are_judged_alike(stub, bundle, make, weights, helpers):
    """Views of one memory at random places: both launch, or both refuse with the same words."""
    import random

    chance = random.Random(5)
    key = ConsumerKey(nb=2, has_delta=True, write=2)
    python, consumer = attnres_aot.PreparedAttnRes(weights, key, (1e-5, 1e-6), bundle), make(weights, key)
    memory = zeros(120 * HIDDEN)
    refused = 0
    for _ in range(300):
        rows = chance.choice((1, 2, 3))

        def view(*sizes: int) -> torch.Tensor:
            inner = [HIDDEN]
            for size in reversed(sizes):
                inner.insert(0, inner[0] * size if len(inner) > 1 else HIDDEN * chance.choice((1, 1, 2, 3)))
            strides = (*(step for step in inner[1 - len(inner) - 1 : -1]), 1)[-len(sizes) - 1 :]
            start = 8 * chance.randrange(60 * HIDDEN // 8)
            return memory.as_strided((*sizes, HIDDEN), strides, start)

        given = view(rows), view(rows), view(rows, 4), view(rows)
        answers = []
        for run in (lambda: python.run(*given), lambda: consumer.run(*map(helpers.gpu, given))):  # noqa: B023
            try:
                run()
                answers.append("launched")
            except AttnResError as error:
                answers.append(str(error))
        assert answers[0] == answers[1]
        refused += answers[0] != "launched"
    assert 30 < refused < 290


def test_no_mailbox_no_aux_and_too_many_rows(stub, bundle, make, weights, key, operands, helpers):
    given = operands(rows=65)
    python, consumer = attnres_aot.PreparedAttnRes(weights, key, (1e-5, 1e-6), bundle), make(weights, key)
    gpu = [helpers.gpu(tensor) for tensor in given.ordinary]
    assert told(lambda: python.run_ring(*given.ring)) == told(lambda: consumer.run_ring(*gpu[1:]))
    assert told(lambda: python.run(*given.ordinary, given.aux)) == told(
        lambda: consumer.run(*gpu, helpers.gpu(given.aux))
    )
    mailbox = attnres_aot.new_mailbox(8, 64, HIDDEN, "cpu")
    python.bind_ring(mailbox)
    consumer.bind_ring(helpers.gpu(mailbox))
    assert told(lambda: python.run_ring(*given.ring)) == told(lambda: consumer.run_ring(*gpu[1:]))
    for call in (consumer.run, consumer.run_ring):
        with pytest.raises(
            TypeError, match=r"takes \((delta, )?prefix, blocks, out, aux=None\); 1 arguments were given"
        ):
            call(gpu[0])
    assert stub.launch_count() == 0


WEIGHTS = (
    lambda one: (one.float(), one, one),
    lambda one: (one, one[:512], one),
    lambda one: (one, one, zeros(2 * HIDDEN)[::2]),
    lambda one: (misaligned(HIDDEN), one, one),
    lambda one: (one, 4, None),
    lambda one: (one.view(1, HIDDEN), one, one),
    lambda one: (zeros(2, HIDDEN), one.double() if False else one.int(), one),
)


@pytest.mark.parametrize("number", range(len(WEIGHTS)))
def test_weights(bundle, make, weights, key, number):
    wrong = WEIGHTS[number](weights[0])
    assert told(lambda: attnres_aot.PreparedAttnRes(wrong, key, (1e-5, 1e-6), bundle)) == told(lambda: make(wrong, key))


def test_a_projection_of_one_row_is_taken(stub, bundle, make, weights, key, operands, helpers):
    matrix = (weights[0], weights[1].view(1, HIDDEN), weights[2])
    make(matrix, key).run(*map(helpers.gpu, operands(rows=2).ordinary))
    assert stub.launch().arguments()["query"] == weights[1].data_ptr()


@pytest.mark.parametrize(
    "eps", [(0.0, 1e-5), (1e-5, -1.0), (math.nan, 1e-5), (1e-5, math.inf), (True, 1e-5), (1e-31, 1.5)]
)
def test_epsilons(bundle, make, weights, key, eps):
    assert told(lambda: attnres_aot.PreparedAttnRes(weights, key, eps, bundle)) == told(lambda: make(weights, key, eps))


@pytest.mark.parametrize("pdl", [1, 0, None, "on", "Early"])
def test_launch_modes(bundle, make, module, weights, key, pdl, helpers):
    assert told(lambda: attnres_aot.PreparedAttnRes(weights, key, (1e-5, 1e-6), bundle, pdl=pdl)) == told(
        lambda: make(weights, key, pdl=pdl)
    )
    mailbox = attnres_aot.new_mailbox(8, 64, HIDDEN, "cpu")
    assert told(lambda: attnres_aot.PreparedPublish(mailbox, 0, bundle, pdl=pdl)) == told(
        lambda: module.prepare_publish(helpers.gpu(mailbox), 0, pdl)
    )


@pytest.mark.parametrize(
    "key",
    [(3, True, None, False), (2, True, 5, False), (17, True, None, False), (2, False, 2, True), (8, True, -1, False)],
)
def test_keys_that_the_bundle_lacks(bundle, make, weights, key):
    assert told(lambda: attnres_aot.PreparedAttnRes(weights, key, (1e-5, 1e-6), bundle)) == told(
        lambda: make(weights, key)
    )


@pytest.mark.parametrize("key", [("2", True, None, False), (2.0, True, None, False), (2, True, 1.5, False)])
def test_keys_that_are_none(bundle, make, weights, key):
    assert told(lambda: attnres_aot.PreparedAttnRes(weights, key, (1e-5, 1e-6), bundle)) == told(
        lambda: make(weights, key)
    )


def test_mailboxes(bundle, make, weights, key, helpers):
    python, consumer = attnres_aot.PreparedAttnRes(weights, key, (1e-5, 1e-6), bundle), make(weights, key)
    good = attnres_aot.new_mailbox(8, 64, HIDDEN, "cpu")
    beside = zeros(8 * 64 * HIDDEN + HIDDEN)
    for mailbox, budget in (
        (zeros(8, 64, 512), 0),
        (zeros(8, HIDDEN), 0),
        (zeros(8, 64, HIDDEN, dtype=torch.float32), 0),
        (zeros(8, 0, HIDDEN), 0),
        (zeros(8, 64, 2 * HIDDEN)[:, :, ::2], 0),
        (misaligned(8, 64, HIDDEN), 0),
        (zeros(5, 64, HIDDEN), 0),
        (zeros(17, 1, HIDDEN), 0),
        (None, 3),
        (good, -1),
        (good, 1 << 31),
        (good, 2.5),
        (good, True),
        (good, "7"),
    ):
        assert told(lambda: python.bind_ring(mailbox, spin_budget=budget)) == told(  # noqa: B023 - called at once
            lambda: consumer.bind_ring(helpers.gpu(mailbox), budget)  # noqa: B023
        )
    inside = (weights[0], weights[1], beside[HIDDEN // 2 : HIDDEN // 2 + HIDDEN])
    python, consumer = attnres_aot.PreparedAttnRes(inside, key, (1e-5, 1e-6), bundle), make(inside, key)
    mailbox = beside[: 8 * 64 * HIDDEN].view(8, 64, HIDDEN)
    assert told(lambda: python.bind_ring(mailbox)) == told(lambda: consumer.bind_ring(helpers.gpu(mailbox)))


def test_statistics_that_cannot_be_bound(bundle, make, weights, key, helpers):
    python, consumer = attnres_aot.PreparedAttnRes(weights, key, (1e-5, 1e-6), bundle), make(weights, key)
    mixture, scal = zeros(64, HIDDEN, dtype=torch.float32), zeros(64, 2, dtype=torch.float32)
    for given in (
        (zeros(64, HIDDEN), scal, [1]),
        (mixture, zeros(64, 3, dtype=torch.float32), [1]),
        (mixture[:5], scal, [1]),
        (mixture, scal, [0]),
        (mixture, scal, [65, 70, -1, 3]),
        (mixture, scal, ["a", None, 2.5, 99]),
        (mixture, scal, 5),
        (mixture, scal, None),
        (mixture, None, [1]),
        (mixture, mixture.view(-1)[: 64 * 2].view(64, 2), [1]),
        (zeros(64, 2 * HIDDEN, dtype=torch.float32)[:, ::2], scal, [1]),
    ):
        assert told(lambda: python.bind_statistics(*given)) == told(  # noqa: B023 - called at once
            lambda: consumer.bind_statistics(*map(helpers.gpu, given))  # noqa: B023
        )


def test_what_cannot_be_bound_for_want_of_a_variant(bundle, make, weights, helpers):
    key = ConsumerKey(nb=2, has_delta=True, final=True)
    python, consumer = attnres_aot.PreparedAttnRes(weights, key, (1e-5, 1e-6), bundle), make(weights, key)
    statistics = zeros(64, HIDDEN, dtype=torch.float32), zeros(64, 2, dtype=torch.float32)
    mailbox = attnres_aot.new_mailbox(8, 64, HIDDEN, "cpu")
    assert told(python.bind_aux) == told(consumer.bind_aux)
    assert told(lambda: python.bind_ring(mailbox)) == told(lambda: consumer.bind_ring(helpers.gpu(mailbox)))
    assert told(lambda: python.bind_statistics(*statistics, [1])) == told(
        lambda: consumer.bind_statistics(*map(helpers.gpu, statistics), [1])
    )
    nothing = ConsumerKey(nb=0, has_delta=False, write=0)
    python, consumer = attnres_aot.PreparedAttnRes(weights, nothing, (1e-5, 1e-6), bundle), make(weights, nothing)
    assert told(lambda: python.bind_statistics(*statistics, [1])) == told(
        lambda: consumer.bind_statistics(*map(helpers.gpu, statistics), [1])
    )


def test_a_variant_that_is_missing_at_launch(bundle, make, weights, operands, helpers):
    key, given = ConsumerKey(nb=2, has_delta=True), operands(rows=3)
    python, consumer = attnres_aot.PreparedAttnRes(weights, key, (1e-5, 1e-6), bundle), make(weights, key)
    python.bind_aux()
    consumer.bind_aux()
    mailbox = attnres_aot.new_mailbox(8, 64, HIDDEN, "cpu")
    python.bind_ring(mailbox)
    consumer.bind_ring(helpers.gpu(mailbox))
    tensors = (*given.ring, given.aux)
    assert told(lambda: python.run_ring(*tensors)) == told(lambda: consumer.run_ring(*map(helpers.gpu, tensors)))


def test_producers(stub, bundle, module, weights, operands, helpers):
    gpu, given = helpers.gpu, operands(rows=3)
    mixture, scal = zeros(64, HIDDEN, dtype=torch.float32), zeros(64, 2, dtype=torch.float32)
    good = [*weights[:2], 1e-5, mixture, scal, 2]
    for at, wrong in (
        (0, weights[0].float()), (1, zeros(5)), (2, 0.0), (2, "x"), (3, zeros(64, HIDDEN)), (3, mixture[:4]), (4, None),
        (5, 3), (5, 17), (5, 2.5), (5, "2"),
    ):  # fmt: skip
        taken = [*good[:at], wrong, *good[at + 1 :]]
        assert told(
            lambda: attnres_aot.PreparedStatistics(*taken[:5], nb=taken[5], bundle=bundle)  # noqa: B023
        ) == told(lambda: module.load_table(0).prepare_statistics(*map(gpu, taken)))  # noqa: B023 - called at once
    overlapping = [*good[:3], mixture, mixture.view(-1)[:128].view(64, 2), 2]
    assert told(lambda: attnres_aot.PreparedStatistics(*overlapping[:5], nb=2, bundle=bundle)) == told(
        lambda: module.prepare_statistics(*map(gpu, overlapping))
    )
    python = attnres_aot.PreparedStatistics(*good[:5], nb=2, bundle=bundle)
    twin = module.prepare_statistics(*map(gpu, good))
    for blocks in (
        zeros(65, 2, HIDDEN), given.blocks.float(), given.blocks[:, :1], given.delta, misaligned(3, 2, HIDDEN),
        mixture.view(BF16).view(64, 2, HIDDEN), 5,
    ):  # fmt: skip
        assert told(lambda: python.run(blocks)) == told(lambda: twin.run(gpu(blocks)))  # noqa: B023
    mailbox = attnres_aot.new_mailbox(8, 64, HIDDEN, "cpu")
    for box, slot in ((mailbox, 8), (mailbox, -1), (mailbox, 1.5), (zeros(8, 64), 0), (zeros(8, 0, HIDDEN), "a")):
        assert told(lambda: attnres_aot.PreparedPublish(box, slot, bundle)) == told(  # noqa: B023
            lambda: module.load_table(0).prepare_publish(gpu(box), slot)  # noqa: B023
        )
    python, twin = attnres_aot.PreparedPublish(mailbox, 2, bundle), module.prepare_publish(gpu(mailbox), 2)
    for rows in (zeros(65, HIDDEN), zeros(3, 512), mailbox[2, :3], mailbox[2, 1:3], misaligned(3, HIDDEN)):
        assert told(lambda: python.run(rows)) == told(lambda: twin.run(gpu(rows)))  # noqa: B023
    assert stub.launch_count() == 0


def test_what_is_elsewhere(stub, bundle, module, make, weights, key, operands, helpers):
    stub.machine(devices=2)
    other = [helpers.gpu(weight, 1) for weight in weights]
    table, good = module.load_table(0), (2, True, -1, False, 1e-5, 1e-5)
    errors = helpers.errors
    with pytest.raises(errors.OperandError, match=r"weights: on cuda:1, but the bundle was loaded for cuda:0"):
        table.prepare_consumer(*other, *good)
    mixed = [helpers.gpu(weights[0]), other[1], other[2]]
    with pytest.raises(errors.OperandError, match=r"the weights are on cuda:0, cuda:1, cuda:1; one device is wanted"):
        table.prepare_consumer(*mixed, *good)
    consumer, given = make(weights, key), operands(rows=2)
    tensors = [helpers.gpu(given.delta, 1), *map(helpers.gpu, given.ring)]
    with pytest.raises(errors.OperandError, match=r"delta is .* on cuda:1; a tensor on cuda:0 is wanted"):
        consumer.run(*tensors)
    with pytest.raises(errors.UsageError, match=r"device 'cpu' is a cpu device; the kernels run on CUDA devices only"):
        module.prepare_consumer(*weights, *good)
    with pytest.raises(errors.OperandError, match=r"delta is .* on cpu; a tensor on cuda:0 is wanted"):
        consumer.run(given.delta, *map(helpers.gpu, given.ring))
    with pytest.raises(errors.OperandError, match=r"mailbox: on cuda:1, whose memory cuda:0 cannot access"):
        table.prepare_publish(helpers.gpu(attnres_aot.new_mailbox(8, 64, HIDDEN, "cpu"), 1), 0)
    assert stub.launch_count() == 0


def test_a_library_of_two_devices_launches_on_each(stub, bundle, module, weights, operands, helpers):
    stub.machine(devices=2)
    for device in (0, 1):
        consumer = module.prepare_consumer(*[helpers.gpu(w, device) for w in weights], 2, True, -1, False, 1e-5, 1e-5)
        consumer.run(*[helpers.gpu(tensor, device) for tensor in operands(rows=2).ordinary])
        assert stub.launch().device == device


def test_deployments_that_the_bundle_does_not_serve(bundle, module):
    table = module.load_table(0)
    for given in ((4, 1), (8, 8)):
        assert told(lambda: bundle.statistics_rows(*given)) == told(lambda: table.statistics_rows(*given))  # noqa: B023
        assert told(lambda: bundle.preload(tp=given[0], dcp=given[1])) == told(lambda: table.preload(*given))  # noqa: B023


def test_a_refused_launch_says_what_the_driver_said(stub, bundle, make, weights, key, operands, helpers):
    given = operands(rows=3)
    python, consumer = attnres_aot.PreparedAttnRes(weights, key, (1e-5, 1e-6), bundle), make(weights, key)
    for status in (1, 2, 700, 719, 901, 12345):
        stub.fail("cuLaunchKernelEx", status)
        assert told(lambda: python.run(*given.ordinary)) == told(
            lambda: consumer.run(*map(helpers.gpu, given.ordinary))
        )


def test_every_pair_of_operands_may_not_be_one(stub, bundle, make, weights, key, operands, helpers):
    """All ways in which two operands are the very same view."""
    python, consumer = attnres_aot.PreparedAttnRes(weights, key, (1e-5, 1e-6), bundle), make(weights, key)
    names = ("delta", "prefix", "out")
    for one, other in itertools.permutations(names, 2):
        given = operands(rows=3)
        wrong = given.replace(**{one: getattr(given, other)}).ordinary
        if "delta" in (one, other):
            python.run(*wrong)
            consumer.run(*map(helpers.gpu, wrong))
        else:
            assert told(lambda: python.run(*wrong)) == told(lambda: consumer.run(*map(helpers.gpu, wrong)))  # noqa: B023

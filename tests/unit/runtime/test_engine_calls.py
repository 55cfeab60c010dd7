"""Calls as engines write them for the JIT version of this surface: unchanged, in a capture, with nothing preloaded."""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from attnres_aot import (
    ConsumerKey,
    DriverError,
    OperandError,
    PreparedAttnRes,
    UsageError,
    VariantMissError,
    compile_consumer,
    new_mailbox,
    statistics_blocks,
    statistics_rows,
)
from attnres_aot.runtime import api, consumer
from attnres_aot.runtime.cuda import device as torch_device
from attnres_aot.runtime.find.loaded import LoadedBundle
from attnres_aot.spec.variants import consumer_key

from .conftest import ALL_VARIANTS, CAPTURED, HIDDEN, LOADING

EPS, OUT_EPS = 1e-5, 1e-6
ROWS = 3


@pytest.fixture(autouse=True)
def found(stub, bundles, monkeypatch) -> LoadedBundle:
    """The bundle that every call finds by itself."""
    monkeypatch.setenv("ATTNRES_AOT_BUNDLE", str(bundles.write(ALL_VARIANTS, producers=("publish",))))
    return api.load()


@pytest.fixture
def captured(stub) -> Iterator[None]:
    with stub.capture():
        yield


@pytest.fixture
def layer(weights) -> SimpleNamespace:
    norm, query, out_norm = weights
    return SimpleNamespace(
        self_attention_res_norm=SimpleNamespace(weight=norm, variance_epsilon=EPS),
        self_attention_res_proj=SimpleNamespace(weight=query.view(1, HIDDEN)),
        input_layernorm=SimpleNamespace(weight=out_norm, variance_epsilon=OUT_EPS),
        prev_valid_blocks=2,
        block_write_idx=2,
        is_block_write_layer=True,
    )


@pytest.fixture
def ring() -> torch.Tensor:
    return new_mailbox(8, 64, HIDDEN, "cpu")


@pytest.fixture
def stats() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(64, HIDDEN), torch.zeros(64, 2)


def loads(stub) -> list[int]:
    return [stub.calls(name) for name in LOADING]


# The object


def test_a_plain_tuple_is_a_key(stub, captured, weights, operands):
    norm, query, out_norm = weights
    given = operands(rows=ROWS)
    prepared = PreparedAttnRes((norm, query, out_norm), (2, True, -1, False), (EPS, OUT_EPS))
    assert prepared.run(*given.ordinary) is given.out
    writing = PreparedAttnRes((norm, query, out_norm), (2, True, 2, False), (EPS, OUT_EPS))
    assert writing.run(*given.ordinary) is given.out
    assert [stub.launch(i).arguments()["write"] for i in range(2)] == [-1, 2]
    assert prepared.key == ConsumerKey(nb=2, has_delta=True)
    assert writing.key == ConsumerKey(nb=2, has_delta=True, write=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """What is given as a key, and which it is."""

    given: object
    key: ConsumerKey


KEYS = [
    Key(given=(2, True, -1, False), key=ConsumerKey(nb=2, has_delta=True)),
    Key(given=(2, True, None, False), key=ConsumerKey(nb=2, has_delta=True)),
    Key(given=[2, 1, -1, 0], key=ConsumerKey(nb=2, has_delta=True)),
    Key(given=(torch.tensor(2), 0, torch.tensor(2), 1), key=ConsumerKey(nb=2, has_delta=False, write=2, final=True)),
    Key(given=ConsumerKey(nb=2, has_delta=True, write=-1), key=ConsumerKey(nb=2, has_delta=True)),
]


@pytest.mark.parametrize("case", KEYS, ids=str)
def test_a_key_is_made_of_what_engines_have(case):
    found = consumer_key(case.given)
    assert found == case.key
    assert {type(found.has_delta), type(found.final)} == {bool}


@pytest.mark.parametrize(
    "wrong", [(2, True), "nb2-delta", None, (2.0, True, -1, False), (2, True, "2", False)], ids=repr
)
def test_what_is_no_key_is_refused(weights, wrong):
    with pytest.raises(UsageError, match=r"is not a consumer key; .*\(nb, has_delta, write, final\)"):
        PreparedAttnRes(weights, wrong, EPS)


def test_a_tuple_that_the_bundle_lacks_names_the_variant(weights):
    with pytest.raises(VariantMissError, match="no variant 'nb7-delta'"):
        PreparedAttnRes(weights, (7, True, -1, False), EPS)


def test_a_layer_is_a_target(stub, captured, layer, operands):
    given = operands(rows=ROWS)
    prepared = PreparedAttnRes.for_target(target=layer, final=False, has_delta=True)
    assert prepared.run(*given.ordinary) is given.out
    assert prepared.key == ConsumerKey(nb=2, has_delta=True, write=2)
    assert stub.launch().arguments()["query"] == layer.self_attention_res_proj.weight.data_ptr()


def test_what_is_bound_can_be_read(captured, weights, ring, stats):
    prepared = PreparedAttnRes(weights, (2, True, -1, False), (EPS, OUT_EPS))
    assert (prepared.device, prepared.eps) == (torch.device("cpu"), (EPS, OUT_EPS))
    assert (prepared.ring, prepared.aux, prepared.stats) == (None, False, None)
    prepared.bind_ring(ring).bind_aux().bind_statistics(*stats, {1, ROWS})
    assert prepared.ring is ring
    assert prepared.aux is True
    assert prepared.stats[0] is stats[0]
    assert prepared.stats[1] is stats[1]


def test_launches_return_the_very_out(captured, weights, ring, stats, operands):
    prepared = PreparedAttnRes(weights, (2, True, -1, False), (EPS, OUT_EPS))
    prepared.bind_ring(ring).bind_aux().bind_statistics(*stats, {ROWS})
    for rows in (0, 1, ROWS):
        for _ in range(2):
            given = operands(rows=rows)
            assert prepared.run(*given.ordinary) is given.out
            assert prepared.run(*given.ordinary, given.aux) is given.out
            assert prepared.run_ring(*given.ring) is given.out
            assert prepared.run_ring(*given.ring, aux=given.aux) is given.out


def test_a_partial_call_of_run_ring(stub, captured, weights, ring, operands):
    given = operands(rows=ROWS)
    prepared = PreparedAttnRes(weights, (2, True, -1, False), (EPS, OUT_EPS)).bind_ring(ring).bind_aux()
    launch = functools.partial(prepared.run_ring, given.prefix, given.blocks, aux=given.aux)
    assert launch(given.out) is given.out
    assert launch(out=given.out) is given.out
    assert stub.launch().arguments()["aux"] == given.aux.data_ptr()


def test_tables_are_frozensets():
    assert statistics_rows(8, 1) == frozenset({1, 2, 4})
    assert statistics_blocks(8, 1) == frozenset(range(1, 9))
    assert statistics_rows(3, 1, missing="empty") == frozenset()
    assert statistics_blocks(3, 1, missing="empty") == frozenset()
    assert isinstance(statistics_rows(8, 1), frozenset)
    with pytest.raises(UsageError, match="serves no deployment"):
        statistics_rows(3, 1)


# compile_consumer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """Arguments of compile_consumer behind nb and has_delta, and the variant that they name."""

    arguments: tuple[object, ...]
    variant: str

    @property
    def code(self) -> Callable[..., torch.Tensor]:
        return compile_consumer(2, True, *self.arguments)


CALLS = [
    Call(arguments=(-1, False, 0, 0, "sm_90a"), variant="nb2-delta"),
    Call(arguments=(2, False, 0, 0, "sm_90a", True), variant="nb2-delta-write2-aux"),
    Call(arguments=(-1, True, 0, 64, "sm_90a", False, 1), variant="nb2-delta-final-stats"),
    Call(arguments=(-1, False, 8, 64, "sm_90a"), variant="nb2-delta-ring8"),
    Call(arguments=(-1, False, 8, 64, "sm_90a", True), variant="nb2-delta-ring8-aux"),
    Call(arguments=(2, False, 8, 64, "sm_90a", True, 1), variant="nb2-delta-write2-ring8-aux-stats"),
]


@pytest.fixture
def call(weights, ring, stats) -> Callable[..., torch.Tensor]:
    def call(code, given, *stream, layer=weights, mailbox=ring, taken=stats, eps=EPS):
        variant = code.variant
        source = mailbox if variant.slots else given.delta
        rest = [*(taken if variant.stats else ()), *((given.aux,) if variant.aux else ()), *stream]
        return code(source, given.prefix, given.blocks, *layer, given.out, eps, OUT_EPS, *rest)

    return call


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.variant)
def test_everything_is_passed_by_position(stub, call, captured, weights, ring, stats, operands, case):
    code, given = case.code, operands(rows=ROWS)
    assert str(code.variant) == case.variant
    before = loads(stub)
    for _ in range(2):
        assert call(code, given, 0x99) is given.out
    assert loads(stub) == before
    arguments, launch = stub.launch().arguments(), stub.launch()
    assert (stub.launch_count(), launch.stream, launch.pdl) == (2, 0x99, 0)
    tensors = {"prefix": given.prefix, "blocks": given.blocks, "out": given.out}
    tensors |= dict(zip(("norm", "query", "out_norm"), weights, strict=True))
    tensors["source"] = ring if code.variant.slots else given.delta
    expected = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    expected["aux"] = given.aux.data_ptr() if code.variant.aux else 0
    expected |= dict.fromkeys(("mixture", "scal"), 0)
    if code.variant.stats:
        expected |= dict(zip(("mixture", "scal"), [tensor.data_ptr() for tensor in stats], strict=True))
    expected |= {"rows": ROWS, "write": case.arguments[0], "fault": 0, "spin_budget": 0}
    assert {name: arguments[name] for name in expected} == expected
    assert (arguments["eps"], arguments["out_eps"]) == (pytest.approx(EPS), pytest.approx(OUT_EPS))


class CUstream:
    """As cuda.bindings' class: `int` gives the handle."""

    def __init__(self, handle):
        self.handle = handle

    def __int__(self):
        return self.handle


class Protocol:
    """As objects of the `__cuda_stream__` protocol."""

    def __cuda_stream__(self):
        return (0, 0x42)


STREAMS = {
    "none": ((None,), CAPTURED),
    "left out": ((), CAPTURED),
    "handle": ((0x42,), 0x42),
    "default": ((0,), 0),
    "torch": ((SimpleNamespace(cuda_stream=0x42),), 0x42),
    "CUstream": ((CUstream(0x42),), 0x42),
    "protocol": ((Protocol(),), 0x42),
}


@pytest.mark.parametrize(("stream", "handle"), STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize("case", [CALLS[0], CALLS[-1]], ids=lambda case: case.variant)
def test_the_stream_comes_last(stub, call, captured, operands, case, stream, handle):
    for _ in range(2):
        call(case.code, operands(rows=ROWS), *stream)
        assert stub.launch().stream == handle


@pytest.mark.parametrize("stream", [True, -1, 1 << 64, 1.5j, "5", torch.zeros(2), object()], ids=lambda s: str(type(s)))
def test_what_is_no_stream_is_refused(stub, call, operands, stream):
    with pytest.raises(OperandError, match=r"stream is .*; a torch stream, a handle, .* or None"):
        call(CALLS[0].code, operands(rows=ROWS), stream)
    assert stub.launch_count() == 0


def test_a_stream_of_another_device_is_refused(stub, monkeypatch):
    class Elsewhere:
        device = torch.device("cuda", 1)
        cuda_stream = 5

    monkeypatch.setattr(torch_device.torch, "Stream", Elsewhere)
    with pytest.raises(OperandError, match="stream is on cuda:1, but the bundle was loaded for cpu"):
        torch_device.stream_handle(Elsewhere(), stub.device())


def test_equal_arguments_give_the_same_object(stub):
    first = compile_consumer(2, True, -1, False, 8, 64, "sm_90a")
    assert compile_consumer(2, 1, None, 0, 8, 64, "sm_90", aux=False, stats=0) is first
    assert compile_consumer(nb=2, has_delta=True, write=-1, final=False, slots=8, cap=64, arch=None) is first
    assert compile_consumer(2, True, -1, False, 8, 32, "sm_90a") is not first
    assert compile_consumer(2, True, -1, False, 0, 64, "sm_90a") is compile_consumer(2, True, -1, False, 0, 0, "sm_90a")
    before = loads(stub)
    with ThreadPoolExecutor(8) as pool:
        barrier = threading.Barrier(8)
        made = list(
            pool.map(lambda _: (barrier.wait(60) and 0) or compile_consumer(2, True, 2, False, 16, 64, None), range(8))
        )
    assert len(set(made)) == 1
    assert loads(stub)[0] == before[0] + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arch:
    """A bundle, a device and an arch that is asked for."""

    bundle: str
    capability: tuple[int, int]
    asked: str
    fits: bool


ARCHS = [
    Arch(bundle="sm_90", capability=(9, 0), asked="sm_90a", fits=True),
    Arch(bundle="sm_90a", capability=(9, 0), asked="sm_90", fits=True),
    Arch(bundle="sm_100", capability=(10, 3), asked="sm_103a", fits=True),
    Arch(bundle="sm_100", capability=(10, 3), asked="sm_100", fits=True),
    Arch(bundle="sm_100", capability=(10, 3), asked="sm_100a", fits=False),
    Arch(bundle="sm_90", capability=(9, 0), asked="sm_100a", fits=False),
    Arch(bundle="sm_90", capability=(9, 0), asked="sm_100", fits=False),
]


@pytest.mark.parametrize("case", ARCHS, ids=str)
def test_the_a_form_of_the_device_is_served_and_others_are_refused(stub, bundles, case):
    stub.machine(capability=case.capability)
    loaded = api.load(bundles.write(["nb2-delta"], name="other", arch=case.bundle))
    if case.fits:
        assert compile_consumer(2, True, -1, False, 0, 0, case.asked, bundle=loaded).bundle is loaded
        return
    with pytest.raises(UsageError, match=f"asked for '{case.asked}', but .* is for '{case.bundle}'.*build --arch"):
        compile_consumer(2, True, -1, False, 0, 0, case.asked, bundle=loaded)


def test_a_mailbox_without_rows_is_refused():
    with pytest.raises(UsageError, match=r"a mailbox of 0 rows"):
        compile_consumer(2, True, None, False, 8, 0, "sm_90")


def test_a_variant_that_the_bundle_lacks_is_refused():
    with pytest.raises(VariantMissError, match="no variant 'nb7-delta'"):
        compile_consumer(7, True, None, False, 0, 0, None)


def test_too_few_and_too_many_arguments_are_refused(weights, ring, stats, operands):
    given, code = operands(rows=ROWS), CALLS[-1].code
    start = (ring, given.prefix, given.blocks, *weights, given.out, EPS, OUT_EPS)
    for rest in ((), (*stats,), (*stats, given.aux, None, None)):
        with pytest.raises(
            OperandError, match=f"{len(rest)} arguments follow .* takes mixture, scal, aux, stream there"
        ):
            code(*start, *rest)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrong:
    """A position among the arguments of the richest variant, what is put there, and a part of the refusal."""

    at: int
    value: object
    says: str


WRONG = [
    Wrong(at=0, value=torch.zeros(8, 32, HIDDEN, dtype=torch.bfloat16), says=r"a mailbox \[8, 64, 1024\] is wanted"),
    Wrong(at=0, value=None, says="mailbox is NoneType"),
    Wrong(at=3, value=torch.ones(HIDDEN), says="weights.norm is torch.float32"),
    Wrong(at=4, value="query", says="weights.query is str"),
    Wrong(at=5, value=torch.ones(8, dtype=torch.bfloat16), says=r"weights.out_norm is \[8\]"),
    Wrong(at=6, value=torch.zeros(2, HIDDEN, dtype=torch.bfloat16), says="rows, but out has 2"),
    Wrong(at=7, value=0.0, says="eps is"),
    Wrong(at=8, value=None, says="eps is"),
    Wrong(at=9, value=torch.zeros(2, HIDDEN), says="mixture holds 2 rows, but scal 64"),
    Wrong(at=11, value=torch.zeros(ROWS, HIDDEN), says="aux is torch.float32"),
    Wrong(at=3, value=torch.ones(HIDDEN, dtype=torch.bfloat16, device="meta"), says="meta"),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: f"{case.at}-{case.says[:20]}")
@pytest.mark.parametrize("warm", [False, True], ids=["first", "later"])
def test_wrong_operands_are_refused(stub, weights, ring, stats, operands, case, warm):
    given, code = operands(rows=ROWS), CALLS[-1].code
    right = [ring, given.prefix, given.blocks, *weights, given.out, EPS, OUT_EPS, *stats, given.aux]
    if warm:
        code(*right)
    before = stub.launch_count()
    wrong = [*right[: case.at], case.value, *right[case.at + 1 :]]
    with pytest.raises(OperandError, match=case.says):
        code(*wrong)
    assert stub.launch_count() == before
    code(*right)


def test_operands_that_overlap_are_refused_whenever_addresses_change(stub, call, operands):
    given, code = operands(rows=ROWS), CALLS[0].code
    call(code, given)
    with pytest.raises(OperandError, match="overlaps"):
        call(code, given.replace(out=given.prefix))
    assert stub.launch_count() == 1


def test_the_same_address_with_another_type_is_looked_at_again(stub, call, weights, operands):
    given, code = operands(rows=ROWS), CALLS[0].code
    call(code, given)
    with pytest.raises(OperandError, match=r"weights\.norm is torch\.float16"):
        call(code, given, layer=(weights[0].view(torch.float16), *weights[1:]))


def test_many_layers_share_one_code_and_are_checked_once(stub, call, operands, monkeypatch):
    checked = []
    check = consumer.check_weights
    monkeypatch.setattr(consumer, "check_weights", lambda *given: checked.append(1) or check(*given))
    layers = [tuple(torch.ones(HIDDEN, dtype=torch.bfloat16) for _ in range(3)) for _ in range(9)]
    given, code = operands(rows=ROWS), CALLS[3].code
    for _ in range(3):
        for layer in layers:
            call(code, given, layer=layer)
            assert stub.launch().arguments()["norm"] == layer[0].data_ptr()
    assert (len(checked), stub.launch_count()) == (9, 27)


def test_layouts_and_row_counts_in_turn_keep_their_plans(stub, call, operands, monkeypatch):
    checked = []
    check = consumer.check_weights
    monkeypatch.setattr(consumer, "check_weights", lambda *given: checked.append(1) or check(*given))
    code, sets = CALLS[0].code, [operands(rows=rows, blocks=blocks) for rows in (1, ROWS) for blocks in (2, 4)]
    for _ in range(3):
        for given in sets:
            call(code, given)
            arguments = stub.launch().arguments()
            assert (arguments["rows"], arguments["blocks"]) == (len(given.out), given.blocks.data_ptr())
    assert len(checked) == 4
    call(code, sets[0], eps=1e-4)
    assert stub.launch().arguments()["eps"] == pytest.approx(1e-4)


def test_what_is_remembered_is_bounded(stub, call, operands, monkeypatch):
    monkeypatch.setattr(consumer, "_MAX_CALLS", 4)
    code = CALLS[0].code
    for rows in range(1, 12):
        call(code, operands(rows=rows))
    assert stub.launch_count() == 11
    assert len(code._calls) <= 4


def test_nothing_is_kept_alive(call, stats, operands):
    layer = tuple(torch.ones(HIDDEN, dtype=torch.bfloat16) for _ in range(3))
    mailbox, code = new_mailbox(8, 64, HIDDEN, "cpu"), CALLS[-1].code
    taken = tuple(tensor.clone() for tensor in stats)
    call(code, operands(rows=ROWS), layer=layer, mailbox=mailbox, taken=taken)
    left = [StorageWeakRef(tensor.untyped_storage()) for tensor in (*layer, mailbox, *taken)]
    assert not any(each.expired() for each in left)
    del layer, mailbox, taken
    gc.collect()
    assert all(each.expired() for each in left)


def test_no_rows_launch_nothing(stub, call, operands):
    for case in CALLS:
        given = operands(rows=0)
        for _ in range(2):
            assert call(case.code, given) is given.out
    assert stub.launch_count() == 0


def test_dependent_launches_are_asked_for_by_name(stub, weights, operands):
    given = operands(rows=ROWS)
    code = CALLS[0].code
    for pdl in (True, False, True):
        code(given.delta, given.prefix, given.blocks, *weights, given.out, EPS, OUT_EPS, None, pdl=pdl)
        assert stub.launch().pdl == pdl


def test_a_forked_child_launches_nothing(stub, call, operands):
    given, code = operands(rows=ROWS), CALLS[0].code
    call(code, given)
    child = os.fork()
    if child == 0:
        try:
            call(code, given)
        except DriverError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_consumer_says_what_it_is():
    assert repr(CALLS[0].code).startswith("<Consumer nb2-delta of <bundle tiny for sm_90")

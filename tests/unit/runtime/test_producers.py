"""Producers: what reaches the driver, what is refused, and what a bundle without them says."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

import attnres_aot
from attnres_aot import (
    ConsumerKey,
    DriverError,
    OperandError,
    PreparedPublish,
    PreparedStatistics,
    UsageError,
    VariantMissError,
)
from attnres_aot.runtime import api
from attnres_aot.runtime.cuda import device as torch_device
from attnres_aot.runtime.cuda.device import open_memory_of
from attnres_aot.runtime.find.loaded import LoadedBundle
from attnres_aot.spec.params import PUBLISH_PARAMS, STATISTICS_PARAMS

from .conftest import HIDDEN

CAPACITY = 8
VARIANTS = ("nb2-delta", "nb2-delta-stats", "nb2-delta-ring2")


@pytest.fixture
def bundle(stub, bundles) -> LoadedBundle:
    return api.load(bundles.write(VARIANTS, producers=("statistics-nb2", "publish")))


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """What the statistics producer takes."""

    norm: torch.Tensor
    query: torch.Tensor
    mixture: torch.Tensor
    scal: torch.Tensor
    eps: object = 1e-5
    nb: int = 2

    def prepare(self, bundle: LoadedBundle, **options) -> PreparedStatistics:
        return PreparedStatistics(
            self.norm, self.query, self.eps, self.mixture, self.scal, nb=self.nb, bundle=bundle, **options
        )


@pytest.fixture
def tensors() -> Tensors:
    return Tensors(
        norm=torch.ones(HIDDEN, dtype=torch.bfloat16),
        query=torch.ones((1, HIDDEN), dtype=torch.bfloat16),
        mixture=torch.zeros((CAPACITY, HIDDEN)),
        scal=torch.zeros((CAPACITY, 2)),
    )


@pytest.fixture
def mailbox() -> torch.Tensor:
    return attnres_aot.new_mailbox(3, CAPACITY, HIDDEN, device="cpu")


def blocks_of(rows: int, blocks: int = 3) -> torch.Tensor:
    return torch.zeros((rows, blocks + 1, HIDDEN), dtype=torch.bfloat16)[:, :blocks]


def rows_of(rows: int) -> torch.Tensor:
    return torch.zeros((rows, HIDDEN + 8), dtype=torch.bfloat16)[:, :HIDDEN]


def test_statistics_reach_the_driver(stub, bundle, tensors):
    blocks = blocks_of(3)
    stub.streams[0] = 77
    assert tensors.prepare(bundle).run(blocks) == (tensors.mixture, tensors.scal)
    launch = stub.launch()
    assert (tuple(launch.grid), tuple(launch.block), tuple(launch.cluster)) == ((3, 1, 1), (128, 1, 1), (1, 1, 1))
    assert (launch.stream, launch.pdl) == (77, 0)
    arguments = launch.arguments(STATISTICS_PARAMS)
    assert arguments.pop("eps") == pytest.approx(1e-5)
    assert arguments == {
        "blocks": blocks.data_ptr(),
        "norm": tensors.norm.data_ptr(),
        "query": tensors.query.data_ptr(),
        "mixture": tensors.mixture.data_ptr(),
        "scal": tensors.scal.data_ptr(),
        "blocks_row_stride": 4 * HIDDEN // 8,
        "blocks_block_stride": HIDDEN // 8,
        "rows": 3,
    }


def test_published_rows_reach_the_driver(stub, bundle, mailbox):
    rows = rows_of(4)
    PreparedPublish(mailbox, 2, bundle, pdl=True).run(rows)
    launch = stub.launch()
    assert (tuple(launch.grid), launch.pdl) == ((4, 1, 1), 1)
    assert launch.arguments(PUBLISH_PARAMS) == {
        "source": rows.data_ptr(),
        "mailbox": mailbox[2].data_ptr(),
        "source_row_stride": (HIDDEN + 8) // 8,
        "rows": 4,
    }


def test_producers_have_no_early_mode(bundle, mailbox):
    with pytest.raises(UsageError, match=r"pdl is 'early'; a producer allows False and True: it always waits"):
        PreparedPublish(mailbox, 2, bundle, pdl="early")


def test_the_functions_bind_and_launch_at_once(stub, bundle, tensors, mailbox):
    found = attnres_aot.statistics(
        blocks_of(2), tensors.norm, tensors.query, (1e-6, 1e-5), tensors.mixture, tensors.scal, nb=2, bundle=bundle
    )
    assert found == (tensors.mixture, tensors.scal)
    assert stub.launch().arguments(STATISTICS_PARAMS)["eps"] == pytest.approx(1e-6)
    rows = rows_of(2)
    assert attnres_aot.publish(rows, mailbox, 0, bundle=bundle, pdl=True) is rows
    assert stub.launch().arguments(PUBLISH_PARAMS)["mailbox"] == mailbox.data_ptr()
    assert stub.launch().pdl == 1
    assert stub.launch_count() == 2


def test_other_rows_and_addresses_reuse_what_was_bound(stub, bundle, mailbox):
    prepared = PreparedPublish(mailbox, 0, bundle)
    many, few = rows_of(4), rows_of(1)
    for rows in (many, few, many, rows_of(4)):
        prepared.run(rows)
        arguments = stub.launch().arguments(PUBLISH_PARAMS)
        assert (arguments["source"], arguments["rows"]) == (rows.data_ptr(), rows.shape[0])
    assert stub.calls("cuLibraryLoadData") == 1


def test_no_rows_launch_nothing(stub, bundle, tensors, mailbox):
    tensors.prepare(bundle).run(blocks_of(0))
    PreparedPublish(mailbox, 0, bundle).run(rows_of(0))
    assert stub.launch_count() == 0


def test_preload_loads_the_producers_that_a_deployment_needs(stub, bundle):
    assert bundle.preload(tp=8, dcp=1) == len(VARIANTS) + 2
    assert stub.calls("cuLibraryLoadData") == len(VARIANTS) + 2
    assert bundle.preload(tp=16, dcp=16) == 0


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """A change that binding or launching must refuse, and a part of the reason."""

    name: str
    says: str
    change: Callable[[Tensors], Tensors] = lambda tensors: tensors
    blocks: Callable[[Tensors], object] = lambda _: blocks_of(2)


def of(**changes: Callable[[Tensors], object]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: dataclasses.replace(tensors, **{name: make(tensors) for name, make in changes.items()})


WRONG = [
    Wrong(name="norm_type", change=of(norm=lambda t: t.norm.float()), says="norm is torch.float32"),
    Wrong(name="norm_nothing", change=of(norm=lambda _: None), says="norm is NoneType"),
    Wrong(name="query_shape", change=of(query=lambda t: t.query[:, 8:]), says=f"query is [1, {HIDDEN - 8}]"),
    Wrong(name="mixture_type", change=of(mixture=lambda t: t.mixture.double()), says="mixture is torch.float64"),
    Wrong(name="scal_rows", change=of(scal=lambda t: t.scal[1:]), says="mixture holds 8 rows, but scal 7"),
    Wrong(name="eps", change=of(eps=lambda _: -1.0), says="eps is -1.0"),
    Wrong(name="too_many_rows", blocks=lambda _: blocks_of(9), says="blocks has 9 rows, but mixture holds 8"),
    Wrong(name="too_few_blocks", blocks=lambda _: blocks_of(2, 1), says="holds 1 blocks per row; at least 2"),
    Wrong(name="rank", blocks=lambda _: rows_of(2), says="a tensor [rows, B, 1024] is wanted"),
    Wrong(name="type", blocks=lambda _: blocks_of(2).float(), says="torch.bfloat16 is wanted"),
    Wrong(name="nothing", blocks=lambda _: None, says="blocks is NoneType"),
    Wrong(
        name="stride",
        blocks=lambda _: torch.zeros((2, 3, HIDDEN + 4), dtype=torch.bfloat16)[:, :, :HIDDEN],
        says="elements between rows; a multiple of 8",
    ),
    Wrong(
        name="unaligned",
        blocks=lambda _: torch.zeros((2, 3, HIDDEN + 8), dtype=torch.bfloat16)[:, :, 4 : HIDDEN + 4],
        says="it must be aligned to 16 bytes",
    ),
    Wrong(
        name="overlap",
        blocks=lambda t: t.mixture.view(torch.bfloat16)[:4].view(2, 4, HIDDEN),
        says="blocks overlaps mixture",
    ),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.name)
def test_wrong_operands_of_statistics_are_refused(stub, bundle, tensors, case):
    changed = case.change(tensors)
    with pytest.raises(OperandError) as caught:
        changed.prepare(bundle).run(case.blocks(changed))
    assert case.says in str(caught.value)
    assert stub.launch_count() == 0


@dataclass(frozen=True, kw_only=True)
class WrongPublish:
    """What publishing must refuse, and a part of the reason."""

    name: str
    says: str
    slot: int = 0
    mailbox: Callable[[torch.Tensor], object] = lambda mailbox: mailbox
    rows: Callable[[torch.Tensor], object] = lambda _: rows_of(2)


WRONG_PUBLISH = [
    WrongPublish(name="slot", slot=3, says="slot is 3; 0 to 2 are the slots"),
    WrongPublish(name="negative_slot", slot=-1, says="slot is -1"),
    WrongPublish(name="mailbox_type", mailbox=torch.Tensor.float, says="mailbox is torch.float32"),
    WrongPublish(name="mailbox_rank", mailbox=lambda mailbox: mailbox[0], says=f"mailbox is [8, {HIDDEN}]"),
    WrongPublish(name="mailbox_strides", mailbox=lambda mailbox: mailbox[:, :4], says="it must be contiguous"),
    WrongPublish(name="elsewhere", mailbox=lambda mailbox: mailbox.to("meta"), says="mailbox: on meta, but"),
    WrongPublish(name="too_many_rows", rows=lambda _: rows_of(9), says="rows has 9 rows, but a slot of the mailbox"),
    WrongPublish(name="rank", rows=lambda _: blocks_of(2), says="a tensor [rows, 1024] is wanted"),
    WrongPublish(name="overlap", rows=lambda mailbox: mailbox[0, 1:3], says="rows overlaps the mailbox"),
]


@pytest.mark.parametrize("case", WRONG_PUBLISH, ids=lambda case: case.name)
def test_wrong_operands_of_publish_are_refused(stub, bundle, mailbox, case):
    with pytest.raises(OperandError) as caught:
        PreparedPublish(case.mailbox(mailbox), case.slot, bundle).run(case.rows(mailbox))
    assert case.says in str(caught.value)
    assert stub.launch_count() == 0


def test_rows_of_another_slot_may_be_published(stub, bundle, mailbox):
    PreparedPublish(mailbox, 1, bundle).run(mailbox[0, :2])
    assert stub.launch_count() == 1


def test_without_checks_addresses_are_trusted_but_geometry_is_not(stub, bundle, mailbox):
    prepared = PreparedPublish(mailbox, 0, bundle)
    prepared.checks = False
    prepared.run(mailbox[0, 1:3])
    assert stub.launch_count() == 1
    with pytest.raises(OperandError, match="rows has 9 rows"):
        prepared.run(rows_of(9))
    prepared.checks = True
    with pytest.raises(OperandError, match="overlaps the mailbox"):
        prepared.run(mailbox[0, 1:3])


def test_a_missing_producer_says_what_would_add_it(stub, bundles, tensors, mailbox):
    bare = api.load(bundles.write(VARIANTS, producers=("statistics-nb3",)))
    with pytest.raises(VariantMissError) as caught:
        tensors.prepare(bare)
    for part in (
        "no producer 'statistics-nb2'",
        "present: statistics-nb3",
        'in a deployment attn_stats_blocks has "2:1"',
        "attnres-aot build --arch sm_90 --config FILE",
    ):
        assert part in str(caught.value)
    with pytest.raises(VariantMissError, match=r"no producer 'publish'[^$]*variants.ring is true"):
        PreparedPublish(mailbox, 0, bare)


def test_a_refused_launch_names_the_producer(stub, bundle, mailbox):
    stub.fail("cuLaunchKernelEx", 719)
    with pytest.raises(DriverError, match="launch publish for 2 rows on cpu"):
        PreparedPublish(mailbox, 0, bundle).run(rows_of(2))


def test_a_forked_child_launches_nothing(stub, bundle, mailbox):
    prepared, rows = PreparedPublish(mailbox, 0, bundle), rows_of(2)
    prepared.run(rows)
    child = os.fork()
    if child == 0:
        try:
            prepared.run(rows)
        except DriverError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_they_say_what_they_are(stub, bundle, tensors, mailbox):
    assert repr(tensors.prepare(bundle)) == "<PreparedStatistics of 2 blocks, up to 8 rows>"
    assert repr(PreparedPublish(mailbox, 1, bundle)) == f"<PreparedPublish into slot 1 of [3, 8, {HIDDEN}] on cpu>"


def test_a_mailbox_of_a_peer_is_opened_or_refused(stub, monkeypatch, mailbox):
    elsewhere = dataclasses.replace(stub.device(), tensor_index=0)
    asked, capturing = [], []
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *devices: bool(asked.append(devices)))
    monkeypatch.setattr(torch_device, "is_capturing", lambda ordinal, _: ordinal in capturing)
    with pytest.raises(OperandError, match="mailbox: on cpu, whose memory cpu cannot access; use two devices"):
        open_memory_of("mailbox", mailbox, elsewhere)
    assert asked == [(0, -1)]
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    for number in elsewhere.ordinal, mailbox.get_device():
        capturing[:] = [number]
        with pytest.raises(
            DriverError, match=r"which a stream capture forbids; make one publisher .* before capturing"
        ):
            open_memory_of("mailbox", mailbox, elsewhere)
    capturing.clear()
    open_memory_of("mailbox", mailbox, elsewhere)
    capturing[:] = [elsewhere.ordinal]
    open_memory_of("mailbox", mailbox, elsewhere)  # opened already, so there is nothing to copy


def test_whether_a_stream_is_captured_is_asked_without_harm(stub):
    stub.streams[0] = 5
    with stub.capture(stream=5):
        assert torch_device.is_capturing(0, stub.streams.__getitem__)
    assert not torch_device.is_capturing(0, stub.streams.__getitem__)
    stub.fail("cuStreamIsCapturing", 906)  # what the legacy stream answers beside a captured one
    assert torch_device.is_capturing(0, stub.streams.__getitem__)
    stub.fail("cuStreamIsCapturing", 400)
    with pytest.raises(DriverError, match="tell whether the current stream of device 0 is being captured"):
        torch_device.is_capturing(0, stub.streams.__getitem__)


def test_opcheck_passes(bundle, tensors, mailbox):
    statistics, publisher = tensors.prepare(bundle), PreparedPublish(mailbox, 1, bundle)
    operators = torch.ops.attnres_aot
    torch.library.opcheck(operators.statistics, (statistics.handle, blocks_of(3), tensors.mixture, tensors.scal))
    torch.library.opcheck(operators.publish, (publisher.handle, rows_of(3), publisher.token))


def test_producers_compile_into_one_graph_with_the_consumers_of_what_they_make(stub, bundle, tensors, mailbox):
    weights = (tensors.norm, tensors.query, tensors.norm)
    statistics, publisher = tensors.prepare(bundle), PreparedPublish(mailbox[:2], 1, bundle)
    taker = attnres_aot.PreparedAttnRes(weights, ConsumerKey(nb=2, has_delta=True), 1e-5, bundle)
    taker.bind_statistics(tensors.mixture, tensors.scal, [3])
    ring = attnres_aot.PreparedAttnRes(weights, ConsumerKey(nb=2, has_delta=True), 1e-5, bundle).bind_ring(mailbox[:2])

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(delta, prefix, blocks, out):
        statistics.run(blocks)
        taker.run(delta, prefix, blocks, out)
        published = publisher.run(out * 2)
        return ring.run_ring(prefix, blocks, out, after=published) * 1

    model(rows_of(3), rows_of(3), blocks_of(3), rows_of(3))
    launched = [bytes(stub.launch(index).symbol).decode() for index in range(stub.launch_count())]
    images = {image.name: image.symbol for image in bundle.bundle.manifest.images}
    assert launched == [
        images[f"h{HIDDEN}-statistics-nb2"],
        images[f"h{HIDDEN}-stats-delta"],
        images[f"h{HIDDEN}-publish"],
        images[f"h{HIDDEN}-nb2-delta-ring2"],
    ]


def test_a_publisher_stays_in_a_graph_whose_result_does_not_need_it(stub, bundle, mailbox):
    publisher = PreparedPublish(mailbox, 0, bundle)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(rows):
        publisher.run(rows)
        return rows + 1

    model(rows_of(3))
    assert stub.launch_count() == 1


def test_a_handle_of_another_object_is_refused(bundle, tensors, mailbox):
    publisher = PreparedPublish(mailbox, 0, bundle)
    with pytest.raises(UsageError, match=f"handle {publisher.handle} names no PreparedStatistics"):
        torch.ops.attnres_aot.statistics(publisher.handle, blocks_of(3), tensors.mixture, tensors.scal)

"""A bundle's shared object beside the cubins that it embeds: the same bits, whoever launches.

The library is ATTNRES_AOT_LIBRARY, or the one of this machine's kind in the bundle under test. Tensors go to it as
torch has them, through TVM-FFI. `test_all_variants.py` holds it against the fp64 reference, where ATTNRES_AOT_BUNDLE is
the library.
"""

import os
import platform
import threading

import pytest
import torch

import attnres_aot
from attnres_aot.errors import OperandError
from attnres_aot.runtime.shared.library import open_library
from attnres_aot.selftest.suite import bundle_variants
from attnres_aot.spec.variants import parse_producer

tvm_ffi = pytest.importorskip("tvm_ffi")
EPS = (1e-5, 1e-6)
ROWS = (1, 5, 33)


@pytest.fixture(scope="module")
def cubins():
    loaded = attnres_aot.load()
    if loaded.plans:
        pytest.skip("the bundle under test is itself a library; these tests compare one with cubins")
    return loaded


@pytest.fixture(scope="module")
def module(cubins):
    path = os.environ.get("ATTNRES_AOT_LIBRARY")
    if not path:
        records = [each for each in cubins.bundle.manifest.libraries if each.host == platform.machine()]
        if not records:
            pytest.skip("the bundle holds no library for this machine: build it with --format so")
        path = cubins.bundle.path / records[0].file
    return open_library(path)


def normal(*shape):
    values = torch.randn(shape, device="cuda").to(torch.bfloat16)
    return values.add_(0.0)  # makes -0.0, which no mailbox takes, +0.0


def prepare(module, weights, key, **options):
    return module.prepare_consumer(*weights, key.nb, key.has_delta, key.write, key.final, *EPS, *options.values())


class Twins:
    """A consumer of the loader and one of the library, bound alike."""

    def __init__(self, cubins, module, variant):
        self.cubins, self.variant = cubins, variant
        self.weights = (normal(cubins.hidden), normal(cubins.hidden), normal(cubins.hidden))
        self.python = attnres_aot.PreparedAttnRes(self.weights, variant.key, EPS, cubins)
        self.twin = prepare(module, self.weights, variant.key)
        self.mailboxes = []
        if variant.slots:
            self.mailboxes = [attnres_aot.new_mailbox(variant.slots, 64, cubins.hidden, "cuda") for _ in range(2)]
            self.python.bind_ring(self.mailboxes[0])
            self.twin.bind_ring(self.mailboxes[1])
        if variant.aux:
            self.python.bind_aux()
            self.twin.bind_aux()

    def bind_statistics(self, blocks):
        outputs = (
            torch.zeros(64, self.cubins.hidden, device="cuda"),
            torch.zeros(64, 2, device="cuda"),
        )
        nb, rows = self.variant.key.nb, blocks.shape[0]
        attnres_aot.PreparedStatistics(*self.weights[:2], EPS, *outputs, nb=nb, bundle=self.cubins).run(blocks)
        self.python.bind_statistics(*outputs, [rows])
        self.twin.bind_statistics(*outputs, [rows])
        self.outputs = outputs  # the library does not keep them

    def launch(self, consumer, operands):
        tensors = operands if self.variant.aux else operands[:-1]
        if self.variant.slots:
            consumer.run_ring(*tensors[1:])
        else:
            consumer.run(*tensors)

    def compare(self, rows):
        key, hidden = self.variant.key, self.cubins.hidden
        blocks = max(key.nb, -1 if key.write is None else key.write) + 1
        given = [normal(rows, hidden), normal(rows, hidden), normal(rows, blocks, hidden), normal(rows, hidden)]
        sets = [[tensor.clone() for tensor in given] + [torch.zeros_like(given[0])] for _ in range(2)]
        if self.variant.stats:
            self.bind_statistics(given[2])
        if self.variant.slots:
            source = normal(self.variant.slots, rows, hidden)
            for mailbox in self.mailboxes:
                mailbox[:, :rows] = source
        self.launch(self.python, sets[0])
        self.launch(self.twin, sets[1])
        for name, one, other in zip(("delta", "prefix", "blocks", "out", "aux"), *sets, strict=True):
            assert torch.equal(one.view(torch.int16), other.view(torch.int16)), f"{self.variant}, {rows} rows: {name}"
        if self.mailboxes:
            assert torch.equal(*[mailbox.view(torch.int32) for mailbox in self.mailboxes])


def test_every_variant_has_the_bits_of_the_cubin_path(cubins, module):
    torch.manual_seed(11)
    variants = bundle_variants(cubins.bundle.manifest)
    assert variants
    for variant in variants:
        twins = Twins(cubins, module, variant)
        for rows in ROWS:
            twins.compare(rows)


def test_every_producer_has_the_bits_of_the_cubin_path(cubins, module):
    hidden = cubins.hidden
    weights = (normal(hidden), normal(hidden))
    for record in cubins.bundle.manifest.producers:
        producer = parse_producer(record.name)
        for rows in ROWS:
            if producer.nb is None:
                mailboxes = [attnres_aot.new_mailbox(8, 64, hidden, "cuda") for _ in range(2)]
                source = normal(rows, hidden)
                attnres_aot.PreparedPublish(mailboxes[0], 3, cubins).run(source)
                module.prepare_publish(mailboxes[1], 3).run(source)
                assert torch.equal(*[mailbox.view(torch.int32) for mailbox in mailboxes])
            else:
                made = [[torch.zeros(64, hidden, device="cuda"), torch.zeros(64, 2, device="cuda")] for _ in range(2)]
                blocks = normal(rows, producer.nb, hidden)
                attnres_aot.PreparedStatistics(*weights, 1e-5, *made[0], nb=producer.nb, bundle=cubins).run(blocks)
                module.prepare_statistics(*weights, 1e-5, *made[1], producer.nb).run(blocks)
                assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))


def simple(module, cubins, rows=3):
    """A consumer with the operands of a launch."""
    hidden = cubins.hidden
    variant = next(each for each in bundle_variants(cubins.bundle.manifest) if str(each) == "nb2-delta")
    weights = (normal(hidden), normal(hidden), normal(hidden))
    operands = [normal(rows, hidden), normal(rows, hidden), normal(rows, 2, hidden), normal(rows, hidden)]
    return prepare(module, weights, variant.key), weights, operands


def test_a_graph_replays_launches_that_were_prepared_while_it_was_captured(cubins, module):
    consumer, weights, operands = simple(module, cubins)
    eager = [tensor.clone() for tensor in operands]
    consumer.run(*eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = module.prepare_consumer(*weights, 2, True, -1, False, *EPS)
        made.run(*operands)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(eager[3].view(torch.int16), operands[3].view(torch.int16))


def test_threads_launch_one_consumer_on_their_own_streams(cubins, module):
    consumer, _, operands = simple(module, cubins)
    wanted = [tensor.clone() for tensor in operands]
    consumer.run(*wanted)
    torch.cuda.synchronize()
    results = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(200):
                mine = [tensor.clone() for tensor in operands]
                consumer.run(*mine)
                torch.cuda.current_stream().synchronize()
                results.append(torch.equal(mine[3].view(torch.int16), wanted[3].view(torch.int16)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 800


@pytest.mark.parametrize("change", ["dtype", "rows", "device", "alignment", "overlap", "stride"])
def test_a_wrong_tensor_never_reaches_the_driver(cubins, module, change):
    consumer, _, operands = simple(module, cubins)
    delta, prefix, blocks, out = operands
    wrong = {
        "dtype": [delta.float(), prefix, blocks, out],
        "rows": [delta[:2], prefix, blocks, out],
        "device": [delta.cpu(), prefix, blocks, out],
        "alignment": [
            torch.zeros(3 * cubins.hidden + 1, dtype=torch.bfloat16, device="cuda")[1:].view(3, -1),
            prefix,
            blocks,
            out,
        ],
        "overlap": [delta, prefix, blocks, prefix],
        "stride": [
            delta,
            prefix,
            blocks,
            torch.zeros(3, cubins.hidden + 4, dtype=torch.bfloat16, device="cuda")[:, :-4],
        ],
    }[change]
    before = [tensor.clone() for tensor in wrong]
    with pytest.raises(OperandError) as caught:
        consumer.run(*wrong)
    torch.cuda.synchronize()
    assert all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        for one, other in zip(before, wrong, strict=True)
        if one.is_contiguous()
    )
    python = attnres_aot.PreparedAttnRes(simple(module, cubins)[1], (2, True, None, False), EPS, cubins)
    with pytest.raises(OperandError) as same:
        python.run(*wrong)
    assert str(same.value) == str(caught.value)


def test_the_loader_launches_through_the_library(cubins, module):
    path = os.environ.get("ATTNRES_AOT_LIBRARY") or next(iter(cubins.bundle.path.glob(f"*.{platform.machine()}.so")))
    loaded = attnres_aot.load(path)
    assert loaded.plans
    _, weights, operands = simple(module, cubins)
    twin = [tensor.clone() for tensor in operands]
    attnres_aot.PreparedAttnRes(weights, (2, True, None, False), EPS, cubins).run(*operands)
    attnres_aot.PreparedAttnRes(weights, (2, True, None, False), EPS, loaded).run(*twin)
    assert torch.equal(operands[3].view(torch.int16), twin[3].view(torch.int16))

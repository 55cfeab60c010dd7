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


def test_every_variant_has_the_bits_of_the_cubin_path(cubins, module):
    hidden, torch_seed = cubins.hidden, torch.manual_seed(11)
    del torch_seed
    weights = (normal(hidden), normal(hidden), normal(hidden))
    checked = 0
    for variant in bundle_variants(cubins.bundle.manifest):
        key = variant.key
        python = attnres_aot.PreparedAttnRes(weights, key, EPS, cubins)
        twin = prepare(module, weights, key)
        mailboxes = []
        if variant.slots:
            mailboxes = [attnres_aot.new_mailbox(variant.slots, 64, hidden, "cuda") for _ in range(2)]
            python.bind_ring(mailboxes[0])
            twin.bind_ring(mailboxes[1])
        if variant.aux:
            python.bind_aux()
            twin.bind_aux()
        for rows in ROWS:
            blocks = max(key.nb, -1 if key.write is None else key.write) + 1
            given = [normal(rows, hidden), normal(rows, hidden), normal(rows, blocks, hidden), normal(rows, hidden)]
            sets = [[tensor.clone() for tensor in given] + [torch.zeros_like(given[0])] for _ in range(2)]
            if variant.stats:
                statistics = [torch.zeros(64, hidden, device="cuda"), torch.zeros(64, 2, device="cuda")]
                attnres_aot.PreparedStatistics(*weights[:2], EPS, *statistics, nb=key.nb, bundle=cubins).run(given[2])
                python.bind_statistics(*statistics, [rows])
                twin.bind_statistics(*statistics, [rows])
            if variant.slots:
                source = normal(variant.slots, rows, hidden)
                for mailbox in mailboxes:
                    mailbox[:, :rows] = source
            for run, run_ring, operands in (
                (python.run, python.run_ring, sets[0]),
                (twin.run, twin.run_ring, sets[1]),
            ):
                tensors = operands if variant.aux else operands[:-1]
                (run_ring if variant.slots else run)(*(tensors[1:] if variant.slots else tensors))
            for name, one, other in zip(("delta", "prefix", "blocks", "out", "aux"), *sets, strict=True):
                assert torch.equal(one.view(torch.int16), other.view(torch.int16)), f"{variant}, {rows} rows: {name}"
            if mailboxes:
                assert torch.equal(*[mailbox.view(torch.int32) for mailbox in mailboxes])
            checked += 1
    assert checked == len(ROWS) * len(cubins.bundle.manifest.variants)


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

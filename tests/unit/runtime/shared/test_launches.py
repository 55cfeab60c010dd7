"""Every launch of a shared object is the one that the Python loader makes: parameters, grid, attributes, stream."""

from __future__ import annotations

import itertools

import pytest
import torch

import attnres_aot
from attnres_aot.runtime import api
from attnres_aot.spec.params import KERNEL_PARAMS
from attnres_aot.spec.variants import parse_variant

HIDDEN = 1024
PRODUCERS = ("statistics-nb2", "publish")
KEYS = ("nb2-delta", "nb2-delta-write2", "nb2", "nb2-delta-final")
ALL_VARIANTS = (
    "nb0-write0",
    "nb0-write0-aux",
    *(
        f"{key}{ring}{aux}{stats}"
        for key in KEYS
        for ring in ("", "-ring1", "-ring8", "-ring16")
        for aux in ("", "-aux")
        for stats in ("", "-stats")
    ),
)


@pytest.fixture
def bundle(stub, bundles):
    return api.load(bundles.write(ALL_VARIANTS, producers=PRODUCERS))


def seen(stub, index=-1):
    """Everything that reached the driver for a launch."""
    launch = stub.launch(index)
    kernel = (
        "publish" if b"publish" in launch.symbol else "statistics" if b"statistics" in launch.symbol else "consumer"
    )
    return {
        "arguments": launch.arguments(KERNEL_PARAMS[kernel]),
        "symbol": launch.symbol,
        "shape": [list(launch.grid), list(launch.block), list(launch.cluster), launch.smem],
        "bytes": launch.parameter_bytes,
        "pdl": launch.pdl,
        "device": launch.device,
    }


def same(stub, python, shared):
    """Launches by both and compares."""
    before = stub.launch_count()
    python()
    shared()
    assert stub.launch_count() == before + 2
    assert seen(stub, before) == seen(stub, before + 1)


@pytest.mark.parametrize("name", ALL_VARIANTS)
@pytest.mark.parametrize("pdl", [False, True, "early"])
def test_every_variant_reaches_the_driver_as_from_python(stub, bundle, make, weights, operands, helpers, name, pdl):
    variant, gpu = parse_variant(name), helpers.gpu
    python = attnres_aot.PreparedAttnRes(weights, variant.key, (1e-5, 1e-6), bundle, pdl=pdl)
    consumer = make(weights, variant.key, pdl=pdl)
    for rows in (1, 3, 64):
        given = operands(rows=rows)
        extra = []
        if variant.slots:
            mailbox = attnres_aot.new_mailbox(variant.slots, 64, HIDDEN, "cpu")
            python.bind_ring(mailbox)
            consumer.bind_ring(gpu(mailbox))
        if variant.stats:
            statistics = torch.zeros(64, HIDDEN), torch.zeros(64, 2)
            python.bind_statistics(*statistics, [rows])
            consumer.bind_statistics(*map(gpu, statistics), [rows])
        if variant.aux:
            python.bind_aux()
            consumer.bind_aux()
            extra = [given.aux]
        tensors = (*(given.ring if variant.slots else given.ordinary), *extra)
        run = (python.run_ring, consumer.run_ring) if variant.slots else (python.run, consumer.run)
        same(stub, lambda: run[0](*tensors), lambda: run[1](*map(gpu, tensors)))  # noqa: B023 - called at once


@pytest.mark.parametrize("pdl", [False, True])
def test_producers_reach_the_driver_as_from_python(stub, bundle, module, weights, operands, helpers, pdl):
    gpu, given = helpers.gpu, operands(rows=3)
    outputs = torch.zeros(64, HIDDEN), torch.zeros(64, 2)
    python = attnres_aot.PreparedStatistics(*weights[:2], 1e-5, *outputs, nb=2, bundle=bundle, pdl=pdl)
    made = module.prepare_statistics(*map(gpu, weights[:2]), 1e-5, *map(gpu, outputs), 2, pdl)
    same(stub, lambda: python.run(given.blocks), lambda: made.run(gpu(given.blocks)))
    mailbox = attnres_aot.new_mailbox(8, 64, HIDDEN, "cpu")
    for slot in (0, 7):
        publisher = attnres_aot.PreparedPublish(mailbox, slot, bundle, pdl=pdl)
        twin = module.prepare_publish(gpu(mailbox), slot, pdl)
        same(stub, lambda: publisher.run(given.delta), lambda: twin.run(gpu(given.delta)))  # noqa: B023 - at once


def test_strides_are_those_of_the_tensors(stub, bundle, make, weights, key, helpers):
    wide = torch.zeros(3, 4 * HIDDEN, dtype=torch.bfloat16)
    tensors = (
        torch.zeros(1, HIDDEN, dtype=torch.bfloat16).expand(3, HIDDEN),
        wide[:, :HIDDEN],
        torch.zeros(5, 3, HIDDEN, dtype=torch.bfloat16).transpose(0, 1),
        wide[:, 2 * HIDDEN : 3 * HIDDEN],
        torch.zeros(3, HIDDEN + 8, dtype=torch.bfloat16)[:, :HIDDEN],
    )
    python = attnres_aot.PreparedAttnRes(weights, key, (1e-5, 1e-6), bundle).bind_aux()
    consumer = make(weights, key)
    consumer.bind_aux()
    same(stub, lambda: python.run(*tensors), lambda: consumer.run(*map(helpers.gpu, tensors)))


def test_the_source_may_be_the_very_view_that_is_written(stub, bundle, make, weights, key, operands, helpers):
    given = operands(rows=3)
    python = attnres_aot.PreparedAttnRes(weights, key, (1e-5, 1e-6), bundle)
    consumer = make(weights, key)
    for twin in (given.prefix, given.out):
        tensors = (twin, given.prefix, given.blocks, given.out)
        same(stub, lambda: python.run(*tensors), lambda: consumer.run(*map(helpers.gpu, tensors)))  # noqa: B023


def test_a_spin_budget_names_the_launch(stub, make, module, weights, key, operands, helpers):
    mailbox = attnres_aot.new_mailbox(8, 64, HIDDEN, "cpu")
    consumer = make(weights, key)
    consumer.bind_ring(helpers.gpu(mailbox), 77)
    consumer.run_ring(*map(helpers.gpu, operands(rows=3).ring))
    arguments = stub.launch().arguments()
    assert arguments["spin_budget"] == 77
    assert arguments["fault"]
    assert module.ring_fault() is None
    import ctypes

    record = (ctypes.c_int32 * 4).from_address(arguments["fault"])
    record[:] = [arguments["fault_tag"], 2, 5, 3]
    text = module.ring_fault(0)
    assert text == (
        "ring consumer nb2-delta-ring8 of tiny-sm_90 gave up on cuda:0 after 77 polls: slot 5, row 2, elements 24 to "
        "31 of its mailbox were not published"
    )
    assert module.ring_fault(1) is None
    stub.fail("cuLaunchKernelEx", 719)
    with pytest.raises(attnres_aot.errors.DriverError, match=r"What failed: ring consumer nb2-delta-ring8"):
        consumer.run_ring(*map(helpers.gpu, operands(rows=3).ring))
    record[:] = [0, 0, 0, 0]


def test_planned_launches_take_addresses_and_a_stream(stub, make, weights, key, operands, helpers):
    given, other = operands(rows=3), operands(rows=3)
    consumer = make(weights, key)
    launch = consumer.plan_run(*map(helpers.gpu, given.ordinary))
    for tensors, stream in itertools.product((given, other), (0x5000, 0x6000)):
        launch(stream, *[tensor.data_ptr() for tensor in tensors.ordinary])
        arguments = stub.launch().arguments()
        assert [arguments[n] for n in ("source", "prefix", "blocks", "out")] == [t.data_ptr() for t in tensors.ordinary]
        assert stub.launch().stream == stream
    before = stub.launch_count()
    with pytest.raises(TypeError, match=r"a planned launch takes a stream and 4 addresses; 2 arguments were given"):
        launch(0, 1)
    with pytest.raises(attnres_aot.errors.OperandError, match=r"delta has no memory"):
        launch(0, 0, *[tensor.data_ptr() for tensor in given.ring])
    with pytest.raises(attnres_aot.errors.OperandError, match=r"prefix overlaps out"):
        launch(0, given.delta.data_ptr(), given.prefix.data_ptr(), given.blocks.data_ptr(), given.prefix.data_ptr())
    assert stub.launch_count() == before


def test_no_rows_launch_nothing(stub, make, module, weights, key, operands, helpers):
    given, consumer = operands(rows=0), make(weights, key)
    consumer.bind_ring(helpers.gpu(attnres_aot.new_mailbox(8, 64, HIDDEN, "cpu")))
    consumer.run(*map(helpers.gpu, given.ordinary))
    consumer.run_ring(*map(helpers.gpu, given.ring))
    consumer.plan_run(*map(helpers.gpu, given.ordinary))(0, 0, 0, 0, 0)
    assert stub.launch_count() == 0


def test_launches_go_to_the_stream_of_the_environment(stub, make, weights, key, operands, helpers):
    import tvm_ffi

    consumer, given = make(weights, key), operands(rows=2)
    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda:0"), 0x7000):
        consumer.run(*map(helpers.gpu, given.ordinary))
    assert stub.launch().stream == 0x7000


def test_nothing_is_loaded_in_a_launch_and_all_in_binding(stub, link, bundles, weights, key, operands, helpers):
    from attnres_aot.runtime.shared.library import open_library

    module = open_library(link(bundles.write(ALL_VARIANTS, producers=PRODUCERS, name="fresh")))
    consumer = module.prepare_consumer(*map(helpers.gpu, weights), 2, True, -1, False, 1e-5, 1e-5)
    assert stub.calls("cuLibraryLoadData") == 1
    consumer.bind_ring(helpers.gpu(attnres_aot.new_mailbox(8, 64, HIDDEN, "cpu")))
    assert stub.calls("cuLibraryLoadData") == 3  # the ring variant's, and the publisher's
    consumer.bind_statistics(helpers.gpu(torch.zeros(64, HIDDEN)), helpers.gpu(torch.zeros(64, 2)), [1])
    loaded = stub.calls("cuLibraryLoadData")
    assert loaded == 5
    for rows in (1, 2):
        consumer.run(*map(helpers.gpu, operands(rows=rows).ordinary))
        consumer.run_ring(*map(helpers.gpu, operands(rows=rows).ring))
    assert stub.calls("cuLibraryLoadData") == loaded
    table = module.load_table(0)
    assert table.preload() == len(bundle_images(link, bundles))
    assert (list(table.statistics_rows(8, 1)), list(table.statistics_blocks(8, 1))) == ([1, 2, 4], [*range(1, 9)])
    assert list(table.statistics_rows(16, 16)) == []


def bundle_images(link, bundles):
    import json

    return json.loads((bundles.folder / "fresh-sm_90" / "manifest.json").read_text())["images"]


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_binding_during_a_capture_loads_and_ends_no_capture(stub, link, bundles, weights, operands, helpers, mode):
    from attnres_aot.runtime.shared.library import open_library

    module = open_library(link(bundles.write(ALL_VARIANTS, producers=PRODUCERS, name=f"captured_{mode}")))
    module.load_table(0)
    with stub.capture(mode):
        consumer = module.prepare_consumer(*map(helpers.gpu, weights), 2, True, -1, False, 1e-5, 1e-5)
        consumer.bind_ring(helpers.gpu(attnres_aot.new_mailbox(8, 64, HIDDEN, "cpu")), 5)
        consumer.run(*map(helpers.gpu, operands(rows=2).ordinary))
        module.prepare_publish(helpers.gpu(attnres_aot.new_mailbox(8, 64, HIDDEN, "cpu")), 0)
    assert stub.launch_count() == 1
    assert stub.lib.stub_capture_mode() == 0


def test_other_contexts_are_put_aside_and_none_gets_the_primary_one(stub, make, weights, key, operands, helpers):
    consumer, given = make(weights, key), operands(rows=2)
    stub.lib.stub_make_none_current()
    consumer.run(*map(helpers.gpu, given.ordinary))
    assert (stub.launch().device, stub.lib.stub_current()) == (0, 0)
    stub.lib.stub_make_current(5)
    consumer.run(*map(helpers.gpu, given.ordinary))
    assert (stub.launch().device, stub.lib.stub_current()) == (0, 5)


def test_many_geometries_are_launched_right(stub, make, weights, key, operands, helpers):
    consumer = make(weights, key)
    for rows in (*range(1, 300), *range(1, 300)):
        consumer.run(*map(helpers.gpu, operands(rows=rows, blocks=2).ordinary))
    found = [stub.launch(index).arguments()["rows"] for index in range(stub.launch_count())]
    assert found == [*range(1, 300)] * 2


def test_a_method_can_be_taken_as_a_function(stub, module, make, weights, key, operands, helpers):
    consumer, given = make(weights, key), operands(rows=2)
    run = module.method(consumer, "run")
    del consumer
    run(*map(helpers.gpu, given.ordinary))
    assert stub.launch_count() == 1
    with pytest.raises(attnres_aot.errors.UsageError, match=r"a Table has no method 'run'"):
        module.method(module.load_table(0), "run")
    with pytest.raises(attnres_aot.errors.UsageError, match=r"object is int; what this library has made is wanted"):
        module.method(3, "run")

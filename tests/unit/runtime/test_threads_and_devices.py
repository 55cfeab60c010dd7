"""Many threads on one object, several devices, and threads without a context."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import attnres_aot
from attnres_aot.errors import DriverError
from attnres_aot.runtime import api
from attnres_aot.runtime.find.loaded import LoadedBundle

THREADS = 8
LAUNCHES = 300


@pytest.fixture
def prepared(bundle, weights, key):
    return attnres_aot.PreparedAttnRes(weights, key, 1e-5, bundle)


def test_threads_never_mix_their_arguments(stub, prepared, operands):
    sets = [operands(rows=1 + number % 3) for number in range(THREADS)]
    barrier = threading.Barrier(THREADS)

    def work(number):
        stub.lib.stub_make_current(0)
        barrier.wait()
        for _ in range(LAUNCHES):
            prepared.run(*sets[number].ordinary)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))
    assert stub.launch_count() == THREADS * LAUNCHES
    expected = {(*(tensor.data_ptr() for tensor in given.ordinary), len(given.out)) for given in sets}
    seen = {}
    for index in range(stub.launch_count()):
        arguments = stub.launch(index).arguments()
        launch = tuple(arguments[name] for name in ("source", "prefix", "blocks", "out", "rows"))
        seen[launch] = seen.get(launch, 0) + 1
    assert seen == dict.fromkeys(expected, LAUNCHES)
    assert stub.calls("cuLibraryLoadData") == 1


def test_launch_memory_is_reused(prepared, operands):
    for _ in range(100):
        prepared.run(*operands().ordinary)
    assert len(prepared._ordinary.plan.idle) == 1


def test_thread_without_a_context_gets_one(stub, prepared, operands):
    given = operands()
    prepared.run(*given.ordinary)

    def work():
        assert stub.lib.stub_current() == -1
        prepared.run(*given.ordinary)
        assert stub.lib.stub_current() == 0

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
    assert stub.launch_count() == 2


def test_invalid_context_beside_a_current_one_is_reported(stub, prepared, operands):
    stub.fail("cuLaunchKernelEx", 201)
    with pytest.raises(DriverError, match=r"CUDA_ERROR_INVALID_CONTEXT; make the device current"):
        prepared.run(*operands().ordinary)


def test_device_that_is_not_current_is_launched_on_and_left_uncurrent(stub, bundles, weights, key, operands):
    stub.machine(devices=2)
    found = api.load(bundles.write(["nb2-delta"])).bundle
    prepared = [
        attnres_aot.PreparedAttnRes(weights, key, 1e-5, LoadedBundle(found, stub.device(ordinal, several=True)))
        for ordinal in (0, 1)
    ]
    stub.streams.update({0: 0xA0, 1: 0xB0})
    for current in (0, 1):
        stub.current_device = current
        stub.lib.stub_make_current(current)
        for consumer in (*prepared, *prepared):
            consumer.run(*operands().ordinary)
            assert stub.lib.stub_current() == current
    launches = [(stub.launch(i).device, stub.launch(i).stream) for i in range(stub.launch_count())]
    assert launches == [(0, 0xA0), (1, 0xB0)] * 4
    assert (stub.calls("cuLibraryLoadData"), stub.calls("cuKernelGetFunction")) == (1, 2)

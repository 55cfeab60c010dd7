"""Making and binding put on the device what launches need, in captures too; launches load and allocate nothing."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import attnres_aot
from attnres_aot import ConsumerKey, PreparedAttnRes, PreparedPublish, PreparedStatistics
from attnres_aot.bundle.manifest import Choice
from attnres_aot.errors import DriverError
from attnres_aot.runtime import api
from attnres_aot.runtime.cuda import device as torch_device
from attnres_aot.runtime.cuda import driver
from attnres_aot.runtime.cuda import modules as library
from attnres_aot.runtime.find.loaded import LoadedBundle

from .conftest import ALL_VARIANTS, CAPTURE_MODES, HIDDEN, LOADING

THREADS = 6
LIMIT_S = 60.0
"""Far more than any of this takes; bounds a hang."""


@pytest.fixture
def bundle(stub, bundles) -> LoadedBundle:
    return api.load(bundles.write(ALL_VARIANTS, producers=("statistics-nb2", "publish")))


@pytest.fixture
def found(stub, bundles, monkeypatch) -> None:
    """A bundle that `load()` finds."""
    path = bundles.write(ALL_VARIANTS, producers=("statistics-nb2", "publish"))
    monkeypatch.setenv("ATTNRES_AOT_BUNDLE", str(path))


@pytest.fixture
def mailbox() -> torch.Tensor:
    return attnres_aot.new_mailbox(8, 64, HIDDEN, "cpu")


@pytest.fixture
def statistics() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(64, HIDDEN), torch.zeros(64, 2)


def loads(stub) -> list[int]:
    return [stub.calls(name) for name in LOADING]


def images(bundle) -> set[str]:
    """Names of the images on the device."""
    return set(bundle._kernels)


def in_a_thread(work):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(LIMIT_S)


def bind_in_order(prepared, order, mailbox, statistics):
    bind = {
        "r": lambda: prepared.bind_ring(mailbox, spin_budget=1 << 20),
        "a": prepared.bind_aux,
        "s": lambda: prepared.bind_statistics(*statistics, rows=[2, 4]),
    }
    for letter in order:
        bind[letter]()


def launch_all_ways(prepared, operands):
    """Launches in every way that is bound, with row counts that take statistics and others."""
    for rows in (1, 2, 64):
        given = operands(rows=rows)
        for aux in (None, given.aux)[: 1 + prepared.aux]:
            prepared.run(*given.ordinary, aux)
            if prepared.ring is not None:
                prepared.run_ring(*given.ring, aux)


ORDERS = [order for count in range(4) for order in itertools.permutations("ras", count)]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "".join(order) or "nothing")
def test_a_launch_loads_and_allocates_nothing_whatever_is_bound(
    stub, bundle, weights, key, operands, mailbox, statistics, order
):
    prepared = PreparedAttnRes(weights, key, 1e-5, bundle)
    bind_in_order(prepared, order, mailbox, statistics)
    before = loads(stub)
    assert before[0] > 0
    with stub.capture():
        launch_all_ways(prepared, operands)
    assert stub.launch_count() > 0
    assert loads(stub) == before


def test_only_what_is_bound_is_loaded(bundle, weights, key, mailbox, statistics):
    prepared = PreparedAttnRes(weights, key, 1e-5, bundle)
    names = [f"h{HIDDEN}-{name}" for name in ("nb2-delta", "nb2-delta-ring8", "stats-delta", "stats-delta-ring8")]
    assert images(bundle) == set(names[:1])
    prepared.bind_aux()
    assert images(bundle) == set(names[:1])  # the same code writes the copy
    prepared.bind_ring(mailbox)
    publisher = f"h{HIDDEN}-publish"  # which the consumer may be waiting for when it is first launched
    assert images(bundle) == {*names[:2], publisher}
    prepared.bind_statistics(*statistics, rows=[])
    assert images(bundle) == {*names[:2], publisher}  # which no launch would take
    prepared.bind_statistics(*statistics, rows=[1])
    assert images(bundle) == {*names, publisher}


def test_every_image_that_some_row_count_takes_is_loaded(stub, bundles, weights, key, operands):
    def by_rows(manifest):
        first, second = manifest.variants
        choices = (Choice(image=second.choices[0].image, max_rows=4), first.choices[0])
        return dataclasses.replace(manifest, variants=(dataclasses.replace(first, choices=choices), second))

    loaded = bundles.load_changed(["nb2-delta", "nb2"], by_rows)
    prepared = PreparedAttnRes(weights, key, 1e-5, loaded)
    before = loads(stub)
    assert before[0] == 2
    for rows in (4, 5):
        prepared.run(*operands(rows=rows).ordinary)
    assert loads(stub) == before


def test_each_image_is_loaded_once_for_many_consumers(stub, bundle, weights, key, mailbox, statistics):
    for order in ("ras", "sar"):
        for _ in range(20):
            bind_in_order(PreparedAttnRes(weights, key, 1e-5, bundle), order, mailbox, statistics)
    assert loads(stub) == [5, 5, 5, 1, 0]


@pytest.mark.parametrize("mode", CAPTURE_MODES)
@pytest.mark.parametrize("where", ["here", "another thread"])
@pytest.mark.usefixtures("found")
def test_everything_can_be_made_and_bound_during_a_capture(
    stub, weights, key, operands, mailbox, statistics, mode, where
):
    def work():
        bundle = api.load()
        prepared = PreparedAttnRes(weights, key, 1e-5, bundle)
        bind_in_order(prepared, "ras", mailbox, statistics)
        publisher = PreparedPublish(mailbox, 0, bundle)
        producer = PreparedStatistics(weights[0], weights[1], 1e-5, *statistics, nb=2, bundle=bundle)
        before = loads(stub)
        launch_all_ways(prepared, operands)
        publisher.run(operands().delta)
        producer.run(operands().blocks)
        assert loads(stub) == before
        assert bundle.preload() > 0

    with stub.capture(mode):
        work() if where == "here" else in_a_thread(work)
    assert stub.launch_count() > 0
    assert stub.lib.stub_capture_mode() == 0  # given back


def test_the_stand_in_ends_a_capture_in_which_something_is_loaded(stub, bundle, monkeypatch):
    """So that the tests above can fail."""
    monkeypatch.setattr(driver.Relaxed, "_exchange", lambda _: None)
    with pytest.raises(AssertionError, match="the capture was ended"), stub.capture():  # noqa: SIM117
        with pytest.raises(DriverError, match="CAPTURE_UNSUPPORTED"):
            bundle.preload()


def test_a_first_publisher_beside_a_consumer_that_waits_loads_nothing(stub, bundle, weights, key, mailbox, operands):
    PreparedAttnRes(weights, key, 1e-5, bundle).bind_ring(mailbox).run_ring(*operands().ring)
    attnres_aot.compile_consumer(2, False, None, False, 8, 64, None, bundle=bundle)
    before = loads(stub)
    PreparedPublish(mailbox, 0, bundle).run(operands().delta)
    assert loads(stub) == before


def test_producers_load_when_they_are_made(stub, bundle, weights, mailbox, statistics, operands):
    publisher = PreparedPublish(mailbox, 0, bundle)
    producer = PreparedStatistics(weights[0], weights[1], 1e-5, *statistics, nb=2, bundle=bundle)
    before = loads(stub)
    assert before[:3] == [2, 2, 2]
    for rows in (1, 64):
        publisher.run(operands(rows=rows).delta)
        producer.run(operands(rows=rows).blocks)
    producer.with_outputs(*[tensor.clone() for tensor in statistics]).run(operands().blocks)
    assert loads(stub) == before


def test_what_cannot_be_loaded_is_not_bound(stub, bundle, weights, key, mailbox, statistics):
    prepared = PreparedAttnRes(weights, key, 1e-5, bundle)
    stub.fail("cuFuncLoad", 2)
    with pytest.raises(DriverError, match="OUT_OF_MEMORY"):
        prepared.bind_ring(mailbox)
    with pytest.raises(DriverError, match="OUT_OF_MEMORY"):
        prepared.bind_statistics(*statistics, rows=[1])
    assert (prepared.ring, prepared.stats) == (None, None)
    stub.mend("cuFuncLoad")
    assert prepared.bind_ring(mailbox).ring is mailbox


def test_a_fallback_replaces_what_is_missing_and_the_rest_is_loaded(stub, bundles, weights, key, operands, mailbox):
    loaded = api.load(bundles.write(["nb2-delta-ring8"]))
    missed = []
    prepared = PreparedAttnRes(weights, key, 1e-5, loaded, fallback=missed.append).bind_ring(mailbox).bind_aux()
    before = loads(stub)
    given = operands()
    with stub.capture():
        prepared.run(*given.ordinary)
        prepared.run_ring(*given.ring)
        prepared.run_ring(*given.ring, given.aux)
    assert [str(each.variant) for each in missed] == ["nb2-delta", "nb2-delta-ring8-aux"]
    assert (stub.launch_count(), loads(stub)) == (1, before)


def test_a_launch_that_finds_no_code_refuses_and_loads_nothing(stub, bundle, weights, key, operands):
    prepared = PreparedAttnRes(weights, key, 1e-5, bundle)
    bundle._kernels.clear()
    before = loads(stub)
    with pytest.raises(DriverError, match=r"nb2-delta needs, is not on cpu, and a launch loads nothing; .*preload"):
        prepared.run(*operands().ordinary)
    assert (loads(stub), stub.launch_count()) == (before, 0)


def test_preload_makes_the_record_of_a_spin_budget_too(stub, bundle, weights, key, mailbox):
    bundle.preload(tp=8, dcp=1)
    before = loads(stub)
    assert before[3] == 1
    PreparedAttnRes(weights, key, 1e-5, bundle).bind_ring(mailbox, spin_budget=5)
    assert loads(stub) == before


def test_threads_without_a_context_load_what_another_has_loaded(stub, bundles):
    path = bundles.write(ALL_VARIANTS, producers=("publish",))
    count = api.load(path).preload()
    barrier = threading.Barrier(THREADS)

    def work(_):
        assert stub.lib.stub_current() == -1
        barrier.wait(LIMIT_S)
        return api.load(path).preload()

    with ThreadPoolExecutor(THREADS) as pool:
        assert list(pool.map(work, range(THREADS), timeout=LIMIT_S)) == [count] * THREADS
    assert stub.calls("cuLibraryLoadData") == count


def test_what_is_loaded_is_used_while_a_load_hangs(stub, bundle, weights, key, operands, mailbox, monkeypatch):
    """A load may wait for a kernel that waits for a publisher, which must not have to wait for the load."""
    prepared = PreparedAttnRes(weights, key, 1e-5, bundle).bind_ring(mailbox)
    publisher = PreparedPublish(mailbox, 0, bundle)
    loading, published = threading.Event(), threading.Event()
    read = library.read_image

    def slow(*arguments):
        loading.set()
        assert published.wait(LIMIT_S)
        return read(*arguments)

    monkeypatch.setattr(library, "read_image", slow)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(PreparedAttnRes, weights, ConsumerKey(nb=2, has_delta=False), 1e-5, bundle)
        assert loading.wait(LIMIT_S)
        try:
            publisher.run(operands().delta)
            PreparedPublish(mailbox, 1, bundle).run(operands().delta)
            prepared.run_ring(*operands().ring)
            PreparedAttnRes(weights, key, 1e-5, LoadedBundle(bundle.bundle, bundle.device)).run(*operands().ordinary)
        finally:
            published.set()
        late.result(LIMIT_S)
    assert stub.launch_count() == 4


FOREIGN = 40
"""Stands for a context that is no device's primary one."""


@pytest.mark.parametrize("status", [400, 201, 709])
def test_another_context_is_put_aside_for_the_launch(stub, bundle, weights, key, operands, mailbox, status):
    prepared = PreparedAttnRes(weights, key, 1e-5, bundle).bind_ring(mailbox).bind_aux()
    given = operands()
    stub.lib.stub_make_current(FOREIGN)
    for launch in (
        lambda: prepared.run(*given.ordinary),
        lambda: prepared.run_ring(*given.ring),
        lambda: prepared.run(*given.ordinary, given.aux),
    ):
        before = stub.launch_count()
        if status != 400:  # which the stand-in answers by itself
            stub.fail_once("cuLaunchKernelEx", status)
        launch()
        assert stub.launch_count() == before + 1
        assert stub.launch().device == 0
        assert stub.lib.stub_current() == FOREIGN


def test_everything_is_made_while_another_context_is_current(stub, bundle, weights, key, operands, mailbox, statistics):
    stub.lib.stub_make_current(FOREIGN)
    prepared = PreparedAttnRes(weights, key, 1e-5, bundle)
    bind_in_order(prepared, "ras", mailbox, statistics)
    PreparedPublish(mailbox, 0, bundle).run(operands().delta)
    launch_all_ways(prepared, operands)
    assert {stub.launch(i).device for i in range(stub.launch_count())} == {0}
    assert stub.lib.stub_current() == FOREIGN


def test_a_handle_that_is_wrong_in_the_right_context_is_refused_with_advice(stub, bundle, weights, key, operands):
    prepared = PreparedAttnRes(weights, key, 1e-5, bundle)
    stub.fail("cuLaunchKernelEx", 400)
    with pytest.raises(DriverError, match="INVALID_HANDLE; the stream belongs to another device or context"):
        prepared.run(*operands().ordinary)


def test_a_child_forked_after_others_initialised_cuda_is_told_about_forks(stub, bundles):
    stub.fail("cuInit", 3)  # what it answers there
    with pytest.raises(DriverError, match=r"forked after its parent had initialised CUDA.*'spawn'"):
        api.load(bundles.write(["nb2-delta"]))


def test_a_token_belongs_to_no_graph(stub, bundle, mailbox, monkeypatch):
    modes = []
    empty = torch.empty

    def allocate(size, *rest, **options):
        made = empty(size, *rest, **options)
        if made.numel():  # a handle's tensor has no memory
            modes.append(stub.lib.stub_capture_mode())
        return made

    monkeypatch.setattr(torch_device.torch, "empty", allocate)
    with stub.capture():
        PreparedPublish(mailbox, 0, bundle)
    assert modes == [2]

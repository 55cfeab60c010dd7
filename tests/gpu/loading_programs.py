"""Programs that need a process in which nothing has been loaded yet: loading_programs.py NAME BUNDLE [ARGUMENT ...].

Each checks numbers, prints `right` with what it checked, and exits with 0; test_binding_loads.py and
test_engine_calls.py run them. None of them calls `preload` before a capture.
"""

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch

import attnres_aot
from attnres_aot import PreparedAttnRes, PreparedPublish, PreparedStatistics, new_mailbox
from attnres_aot.errors import DriverError
from attnres_aot.selftest import reference
from attnres_aot.selftest.arena import DENSE
from attnres_aot.selftest.cases import Case, Prepared, draw_banks, prepare, refill
from attnres_aot.selftest.check import judge
from attnres_aot.selftest.loaded import LoadedConsumer
from attnres_aot.selftest.suite import bundle_variants, wait
from attnres_aot.spec.variants import Variant

EPS, OUT_EPS = 1e-5, 1e-6
ROWS = 3
THREADS = 6
PATIENCE = 1 << 24
"""Polls, some ten seconds, after which a consumer whose rows never come ends in a named fault instead of a hang."""
THREAD_S = 60.0
PROMPT_S = 5.0
"""Far more than a launch takes, and less than PATIENCE."""

KINDS: dict[str, Callable[[Variant], bool]] = {
    "ordinary": lambda v: not (v.slots or v.stats or v.key.final) and v.key.has_delta and v.key.write is None,
    "write": lambda v: not v.slots and not v.stats and v.key.write is not None and v.aux,
    "final": lambda v: not v.slots and not v.stats and v.key.final,
    "ring-of-one": lambda v: v.slots == 1 and not v.stats and v.key.has_delta,
    "ring": lambda v: v.slots > 1 and not v.stats and v.key.has_delta,
    "statistics": lambda v: not v.slots and v.stats,
    "ring-statistics": lambda v: v.slots > 1 and v.stats,
}


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A bundle of which nothing is loaded, and cases of every kind that it holds."""

    path: str
    consumer: LoadedConsumer
    items: dict[str, Prepared]

    @property
    def device(self) -> torch.device:
        return self.consumer.device


def open_bench(path: str, rows: int = ROWS) -> Bench:
    torch.cuda.set_device(0)
    consumer = LoadedConsumer.open(path)
    manifest = consumer.bundle.manifest
    banks = draw_banks(manifest.model.hidden, manifest.mailbox.capacity, 1, consumer.device)
    items = {}
    for name, condition in KINDS.items():
        fitting = [variant for variant in bundle_variants(manifest) if condition(variant)]
        if fitting:
            variant = max(fitting, key=lambda v: (v.key.nb, v.aux))
            case = Case(variant=variant, rows=rows, layout=DENSE, eps=EPS, out_eps=OUT_EPS, steep=False, start=0)
            items[name] = prepare(case, banks)
    assert {"ordinary", "ring"} <= items.keys(), f"{path} has no ordinary or no mailbox variant"
    assert not consumer.loaded._kernels, "something has been loaded already"
    torch.cuda.synchronize()
    return Bench(path=path, consumer=consumer, items=items)


def check(item: Prepared) -> None:
    problems = judge(item).problems
    assert not problems, "\n".join(problems)


def in_a_thread(work: Callable[[], object]) -> None:
    """Does `work` on a new thread, which has no CUDA context, and fails if it fails or takes too long."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(THREAD_S)
    assert not thread.is_alive(), "the thread hangs"
    if failed:
        raise failed[0]


class Step:
    """Launches of every kind of consumer and of both producers, and what they must have done."""

    def __init__(self, bench: Bench) -> None:
        hidden = bench.consumer.bundle.manifest.model.hidden
        self.bench, self.views = bench, bench.items["ordinary"].arena.views
        self.mailbox = new_mailbox(2, 8, hidden, bench.device)
        self.rows = bench.items["ordinary"].before.views.source.clone()
        self.statistics = torch.zeros(8, hidden, device=bench.device), torch.zeros(8, 2, device=bench.device)
        stats = {item.case.variant.key.nb for item in bench.items.values() if item.case.variant.stats}
        self.nb = max(stats, default=0)
        """Saved blocks of which the bundle makes statistics; 0 if it makes none."""
        self.launches: list[Callable[[], object]] = []

    def bind(self) -> None:
        """Makes and binds everything, consumers of mailboxes with a spin budget."""
        loaded, views = self.bench.consumer.loaded, self.views
        for item in self.bench.items.values():
            self.launches.append(self.bench.consumer.bind(item.case, item.arena.views))
        self.launches.append(partial(PreparedPublish(self.mailbox, 1, loaded).run, self.rows))
        if self.nb:
            producer = PreparedStatistics(views.norm, views.query, EPS, *self.statistics, nb=self.nb, bundle=loaded)
            self.launches.append(partial(producer.run, views.blocks))

    def refill(self) -> None:
        for item in self.bench.items.values():
            refill(item)
        reference.arm(self.mailbox)
        torch.cuda.synchronize()

    def check(self) -> None:
        for item in self.bench.items.values():
            check(item)
        published = torch.empty_like(self.mailbox[:1, :ROWS])
        reference.publish(published, 0, self.rows)
        assert torch.equal(self.mailbox[1, :ROWS].view(torch.int16), published[0].view(torch.int16))
        if self.nb:
            mixture, _ = reference.statistics(self.views.blocks[:1], self.nb, self.views.norm, self.views.query, EPS)
            assert torch.allclose(self.statistics[0][:1], mixture, rtol=1e-2, atol=1e-3)


def capture(path: str, mode: str, where: str) -> None:
    """Captures launches of every kind; binds `before` the capture, `inside` it, or on another `thread` during it."""
    bench = open_bench(path)
    step, counter = Step(bench), torch.zeros(8, device=bench.device)
    if where == "before":
        step.bind()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        counter += 1
        if where == "inside":
            step.bind()
        elif where == "thread":
            in_a_thread(step.bind)
            in_a_thread(lambda: attnres_aot.load(path, device=bench.device).preload())
        for launch in step.launches:
            launch()
        counter += 1
    for _ in range(2):
        step.refill()
        graph.replay()
        wait(bench.device, "a replay")
        step.check()
    assert counter[0].item() == 4, counter
    print("right:", mode, where, *bench.items)


def beside_a_spinning_consumer(path: str, made: str) -> None:
    """Publishers that have never been launched start while a consumer spins, and end its waiting.

    They are made `before` it is launched, or `beside` it.
    """
    bench = open_bench(path, rows=1)
    ring = bench.items["ring"]
    views, slots = ring.arena.views, ring.case.variant.slots
    sources = ring.bank.slots[:slots, ring.rows].clone()
    waiting = bench.consumer.bind(ring.case, views, spin_budget=PATIENCE)
    make = partial(PreparedPublish, views.source, bundle=bench.consumer.loaded)
    publishers = [make(slot) for slot in range(slots)] if made == "before" else []
    reference.arm(views.source[:, :1])
    spinning, publishing = torch.cuda.Stream(bench.device), torch.cuda.Stream(bench.device)
    ended = torch.cuda.Event()
    torch.cuda.synchronize()

    def publish() -> None:
        torch.cuda.set_device(0)
        with torch.cuda.stream(publishing):
            for publisher, source in zip(publishers or map(make, range(slots)), sources, strict=True):
                assert not ended.query(), "the consumer has not waited"
                publisher.run(source)
            wait(bench.device, "publishers beside a consumer that spins", PROMPT_S)

    with torch.cuda.stream(spinning):
        waiting()
        ended.record(spinning)
    in_a_thread(publish)
    with torch.cuda.stream(spinning):
        wait(bench.device, "the consumer that was waiting")
    check(ring)
    print("right: published beside a spinning consumer,", made)


def threads(path: str) -> None:
    """Threads without a CUDA context load, preload, bind and launch what another thread has loaded."""
    bench = open_bench(path)
    count = bench.consumer.loaded.preload()
    items = list(bench.items.values())[:THREADS]
    start, failed = threading.Barrier(THREADS), []

    def work(number: int) -> None:
        try:
            start.wait(THREAD_S)
            loaded = attnres_aot.load(path)
            assert loaded.preload() == count
            if number < len(items):
                LoadedConsumer(loaded).bind(items[number].case, items[number].arena.views)()
        except BaseException as error:  # noqa: BLE001 - reported below
            failed.append(repr(error))

    workers = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(THREADS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(THREAD_S)
    assert not any(worker.is_alive() for worker in workers), "a thread hangs"
    assert not failed, failed
    wait(bench.device, "launches of threads")
    for item in items:
        check(item)
    print("right: launched from threads without a context")


class ForeignContext:
    """A context of the driver that is not the primary one, current within a `with` block."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL("libcuda.so.1")
        self.handle = ctypes.c_void_p()

    def __enter__(self) -> Callable[[], bool]:
        """Returns what tells whether the context is still current."""
        assert self.lib.cuCtxCreate_v2(ctypes.byref(self.handle), 0, 0) == 0
        return self.is_current

    def __exit__(self, *_: object) -> None:
        popped = ctypes.c_void_p()
        assert self.lib.cuCtxPopCurrent_v2(ctypes.byref(popped)) == 0
        assert popped.value == self.handle.value
        assert self.lib.cuCtxDestroy_v2(self.handle) == 0

    def is_current(self) -> bool:
        found = ctypes.c_void_p()
        assert self.lib.cuCtxGetCurrent(ctypes.byref(found)) == 0
        return found.value == self.handle.value


def another_context(path: str) -> None:
    """Everything is bound and launched on torch's default stream while another library's context is current."""
    bench = open_bench(path)
    items = bench.items
    assert torch.cuda.current_stream().cuda_stream == 0
    early = bench.consumer.bind(items["ordinary"].case, items["ordinary"].arena.views)
    with ForeignContext() as is_current:
        early()
        assert is_current(), "the context that was current has been replaced"
        for name, item in items.items():
            if name != "ordinary":
                bench.consumer.bind(item.case, item.arena.views)()
            assert is_current(), name
    wait(bench.device, "launches beside another context")
    for item in items.values():
        check(item)
    side = torch.cuda.Stream(bench.device)
    for item in items.values():
        refill(item)
    torch.cuda.synchronize()
    launches = [bench.consumer.bind(item.case, item.arena.views) for item in items.values()]
    with torch.cuda.stream(side), ForeignContext():
        for launch in launches:
            launch()
    side.synchronize()
    for item in items.values():
        check(item)
    print("right: launched beside another context")


def fork(path: str) -> None:
    """Torch has initialised CUDA, this package has not been used; a forked child is told about forks."""
    torch.zeros(1, device="cuda").item()
    child = os.fork()
    if child == 0:
        try:
            attnres_aot.load(path)
        except DriverError as error:
            os._exit(0 if "fork" in str(error) and "spawn" in str(error) else 3)
        except BaseException:  # noqa: BLE001 - the parent says so
            os._exit(4)
        os._exit(5)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, f"the child ended with {status}: 3 another error of ours, 4 another error, 5 no error"
    bench = open_bench(path)
    bench.consumer.bind(bench.items["ordinary"].case, bench.items["ordinary"].arena.views)()
    check(bench.items["ordinary"])
    print("right: the child was refused, the parent goes on")


class CUstream:
    """As cuda.bindings' class: `int` gives the handle."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __int__(self) -> int:
        return self.handle


def take_code(variant: Variant, capacity: int) -> attnres_aot.Consumer:
    """Returns a consumer as engines ask for it, with the `a` form of the device's arch."""
    key = variant.key
    major, minor = torch.cuda.get_device_capability()
    write = -1 if key.write is None else key.write
    facts = (key.nb, key.has_delta, write, key.final, variant.slots, capacity if variant.slots else 0)
    return attnres_aot.compile_consumer(*facts, f"sm_{major}{minor}a", aux=variant.aux, stats=int(variant.stats))


def call_code(item: Prepared, stream: object) -> None:
    """Calls a consumer as engines do, everything by position."""
    variant, views = item.case.variant, item.arena.views
    code = take_code(variant, views.source.shape[1])
    assert take_code(variant, views.source.shape[1]) is code
    rest = [*((views.mixture, views.scal) if variant.stats else ()), *((views.aux,) if variant.aux else ()), stream]
    weights = (views.norm, views.query, views.out_norm)
    found = code(views.source, views.prefix, views.blocks, *weights, views.out, EPS, OUT_EPS, *rest)
    assert found is views.out


def bind_as_engines_do(item: Prepared) -> PreparedAttnRes:
    variant, views, key = item.case.variant, item.arena.views, item.case.variant.key
    facts = (key.nb, key.has_delta, -1 if key.write is None else key.write, key.final)
    prepared = PreparedAttnRes((views.norm, views.query, views.out_norm), facts, (EPS, OUT_EPS))
    if variant.slots:
        prepared.bind_ring(views.source)
    if variant.aux:
        prepared.bind_aux()
    if views.mixture is not None and views.scal is not None:
        prepared.bind_statistics(views.mixture, views.scal, frozenset({item.case.rows}))
    assert (prepared.eps, prepared.aux) == ((EPS, OUT_EPS), variant.aux)
    assert prepared.device == views.out.device
    assert (prepared.ring is not None, prepared.stats is not None) == (bool(variant.slots), variant.stats)
    return prepared


def run_as_engines_do(item: Prepared) -> None:
    prepared, views = bind_as_engines_do(item), item.arena.views
    if item.case.variant.slots:
        found = prepared.run_ring(views.prefix, views.blocks, views.out, aux=views.aux)
    else:
        found = prepared.run(views.source, views.prefix, views.blocks, views.out, aux=views.aux)
    assert found is views.out


def engine_calls(path: str, way: str) -> None:
    """Makes and launches every kind by the calls of the JIT surface, inside a capture, with nothing loaded before."""
    os.environ["ATTNRES_AOT_BUNDLE"] = path
    bench = open_bench(path)
    items = list(bench.items.values())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        current = torch.cuda.current_stream()
        streams = [None, current, current.cuda_stream, CUstream(current.cuda_stream)]
        for number, item in enumerate(items):
            if way == "code":
                call_code(item, streams[number % len(streams)])
            else:
                run_as_engines_do(item)
    for _ in range(2):
        for item in items:
            refill(item)
        torch.cuda.synchronize()
        graph.replay()
        wait(bench.device, "a replay")
        for item in items:
            check(item)
    print("right:", way, *bench.items)


def engine_streams(path: str, _: str) -> None:
    """A consumer goes to the stream that is named last, not to the current one; a layer is read off by name."""
    os.environ["ATTNRES_AOT_BUNDLE"] = path
    bench = open_bench(path)
    item = bench.items["ordinary"]
    side = torch.cuda.Stream(bench.device)
    call_code(item, None)  # loads
    for named in (side, side.cuda_stream, CUstream(side.cuda_stream)):
        item.arena.views.source.fill_(1.0)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            refill(item)
        call_code(item, named)  # the current stream is empty: there it would read what refill has not put in place
        side.synchronize()
        check(item)
    views, key = item.arena.views, item.case.variant.key
    layer = SimpleNamespace(
        self_attention_res_norm=SimpleNamespace(weight=views.norm, variance_epsilon=EPS),
        self_attention_res_proj=SimpleNamespace(weight=views.query),
        input_layernorm=SimpleNamespace(weight=views.out_norm, variance_epsilon=OUT_EPS),
        prev_valid_blocks=key.nb, block_write_idx=0, is_block_write_layer=False,
    )  # fmt: skip
    refill(item)
    prepared = PreparedAttnRes.for_target(target=layer, final=False, has_delta=True)
    if item.case.variant.aux:
        prepared.bind_aux()
    prepared.run(views.source, views.prefix, views.blocks, views.out, views.aux)
    check(item)
    print("right: on the stream that was named")


PROGRAMS: dict[str, Callable[..., None]] = {
    "capture": capture,
    "beside": beside_a_spinning_consumer,
    "threads": threads,
    "context": another_context,
    "fork": fork,
    "engine_calls": engine_calls,
    "engine_streams": engine_streams,
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])

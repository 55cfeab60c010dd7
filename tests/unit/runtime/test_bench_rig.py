"""Measuring with a stand-in driver: what the rig launches, bare launches, the soak, whole runs of the command."""

from __future__ import annotations

import gc
import json
import mmap
import threading
import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from attnres_aot.bench import command, host, measure, soak
from attnres_aot.bench.bare import Shape, bare_launch
from attnres_aot.bench.clock import Call
from attnres_aot.bench.gpu import GpuFacts, host_bytes
from attnres_aot.bench.points import Selection
from attnres_aot.bench.results import COLD, WARM
from attnres_aot.bench.rig import EPS, Job, Rig, Sets, traffic
from attnres_aot.cli import entry
from attnres_aot.errors import UsageError
from attnres_aot.runtime import api
from attnres_aot.runtime.cuda.driver import open_driver
from attnres_aot.runtime.find.loaded import LoadedBundle
from attnres_aot.spec.variants import parse_variant

HIDDEN = 1024
L2_BYTES = 1 << 20


@dataclass
class FakeTimer:
    """Runs every call once and says how many there were."""

    calls: list[int] = field(default_factory=list)

    def __call__(self, calls: list[Call]) -> float:
        for call in calls:
            call()
        self.calls.append(len(calls))
        return float(len(self.calls))


@pytest.fixture
def timer() -> FakeTimer:
    return FakeTimer()


@pytest.fixture
def rig(bundle: LoadedBundle, timer: FakeTimer) -> Rig:
    return Rig(bundle, timer, L2_BYTES)


def job(name: str, rows: int = 3, **changes: bool) -> Job:
    return Job(variant=parse_variant(name), rows=rows, **{"pdl": False, **changes})


def test_a_warm_job_launches_one_consumer_on_one_set(rig: Rig, stub) -> None:
    rig.time_us(job("nb2-delta-write2-aux", pdl=True))
    assert stub.launch_count() == 1
    launch = stub.launch()
    arguments = launch.arguments()
    assert (launch.pdl, arguments["rows"], arguments["write"], arguments["aux"] != 0) == (1, 3, 2, True)
    assert arguments["eps"] == pytest.approx(EPS)


def test_a_cold_job_takes_turns_on_more_memory_than_the_l2_holds(rig: Rig, stub, timer: FakeTimer) -> None:
    cold = job("nb2-delta", rows=1, cold=True)
    rig.time_us(cold)
    count = timer.calls[-1]
    assert count * traffic(cold, HIDDEN).touched >= 2 * L2_BYTES
    launches = [stub.launch(index).arguments() for index in range(count)]
    for name in ("source", "prefix", "blocks", "out", "norm", "query", "out_norm"):
        assert len({arguments[name] for arguments in launches}) == count, name


def test_a_large_cold_job_still_takes_turns(rig: Rig) -> None:
    assert rig.set_count(job("nb2-delta", rows=4096, cold=True)) == 2


def test_a_ring_job_fills_the_mailbox_before_the_consumer(rig: Rig, stub) -> None:
    ring = job("nb2-delta-ring8", rows=2)
    sets = rig.make_sets(ring)
    rig.call(ring, sets, 0)()
    assert torch.equal(sets.mailbox[0, :, :2], sets.source[0])
    assert not (sets.source.view(torch.int16) == -0x8000).any()
    assert (sets.mailbox[0, :, 2:].contiguous().view(torch.int32) == -0x80000000).all()
    assert stub.launch().arguments()["source"] == sets.mailbox.data_ptr()


def test_the_publisher_fills_the_mailbox_where_asked(stub, bundles) -> None:
    loaded = api.load(bundles.write(["nb2-delta-ring1"], producers=["publish"]))
    rig = Rig(loaded, FakeTimer(), L2_BYTES)
    published = job("nb2-delta-ring1", rows=2, publish=True, pdl=True)
    sets = rig.make_sets(published)
    rig.call(published, sets, 0)()
    assert stub.launch_count() == 2
    assert stub.launch(0).pdl == 1
    assert stub.launch(1).arguments()["source"] == sets.mailbox.data_ptr()
    assert (sets.mailbox.view(torch.int32) == -0x80000000).all()  # nothing but the publisher would fill it


def test_without_the_consumer_only_the_copy_is_left(rig: Rig, stub) -> None:
    rig.time_us(job("nb2-delta-ring1", consumer=False))
    assert stub.launch_count() == 0


def test_statistics_consumers_take_what_is_bound(rig: Rig, stub) -> None:
    rig.time_us(job("nb2-delta-stats"))
    arguments = stub.launch().arguments()
    assert arguments["mixture"] != 0
    assert arguments["scal"] != 0


def test_the_bare_launch_is_the_loaders_launch(rig: Rig, stub) -> None:
    ways = host.ways_to_launch(rig, lambda mailbox: lambda: None)
    records = []
    for name in (host.BARE, host.RUN, host.RUN_UNCHECKED):
        ways[name]()
        records.append(stub.launch())
    bare, *others = records
    for other in others:
        assert bytes(bare)[8:132] == bytes(other)[8:132]  # stream, shape, attributes, symbol
        differing = {name for name, value in bare.arguments().items() if other.arguments()[name] != value}
        assert all(name.endswith("row_stride") for name in differing)  # which one row does not use


def test_a_bare_launch_keeps_its_operands_alive(rig: Rig, stub, monkeypatch) -> None:
    outs = []
    make_sets = rig.make_sets

    def watched(job: Job) -> Sets:
        sets = make_sets(job)
        outs.append(weakref.ref(sets.out))
        return sets

    monkeypatch.setattr(rig, "make_sets", watched)
    bare = host.ways_to_launch(rig, lambda mailbox: lambda: None)[host.BARE]
    gc.collect()
    assert [out() is not None for out in outs] == [True, False, False]  # the others are of other ways
    assert bare() == 0
    assert stub.launch().arguments()["out"] == outs[0]().data_ptr()


def test_every_way_of_launching_launches_once(rig: Rig, stub) -> None:
    ways = host.ways_to_launch(rig, lambda mailbox: mailbox.zero_)
    launches = {}
    for name, call in ways.items():
        before = stub.launch_count()
        call()
        launches[name] = stub.launch_count() - before
    assert launches == {name: name not in (host.TORCH, host.FILL) for name in ways}
    assert set(host.LIMITS) <= set(ways)


def test_other_tensors_take_turns(rig: Rig, stub) -> None:
    ways = host.ways_to_launch(rig, lambda mailbox: lambda: None)
    outs = []
    for _ in range(4):
        ways[host.RUN_MOVING]()
        outs.append(stub.launch().arguments()["out"])
    assert outs[0] != outs[1]
    assert outs[:2] == outs[2:]


def test_a_bare_launch_can_ask_for_pdl(rig: Rig, stub) -> None:
    kernel = rig.loaded.kernel(parse_variant("nb2-delta"), 1)
    parameters = host.pack_parameters(kernel, {"rows": 5})
    shape = Shape(grid=6, threads=128, cluster=2, shared_bytes=16, pdl=True)
    launch = bare_launch(open_driver(), kernel.function, shape, 77, parameters)
    assert launch() == 0
    found = stub.launch()
    assert (found.pdl, found.stream, list(found.grid), list(found.cluster), found.smem) == (
        1,
        77,
        [6, 1, 1],
        [2, 1, 1],
        16,
    )
    assert found.arguments()["rows"] == 5


def test_early_is_measured_for_mailboxes_alone(rig: Rig, stub) -> None:
    selection = Selection(globs=("nb2-delta-ring1", "nb2-delta"), rows=(4,), pdl=(True, "early"), cold=(False,))
    shown: list[str] = []
    _, timings = measure.measure_gpu(rig, selection, shown.append)
    assert [(t.variant, t.pdl) for t in timings] == [
        ("nb2-delta", True),
        ("nb2-delta-ring1", True),
        ("nb2-delta-ring1", "early"),
    ]
    assert stub.launch().arguments()["early"] == 1
    assert any("PDL early, warm L2" in line for line in shown)


def test_points_of_a_mailbox_leave_the_copy_out(rig: Rig, timer: FakeTimer) -> None:
    selection = Selection(globs=("nb2-delta-ring1", "nb2-delta"), rows=(1, 4), pdl=(True, False), cold=(False,))
    shown: list[str] = []
    context, timings = measure.measure_gpu(rig, selection, shown.append)
    assert [(t.variant, t.rows, t.pdl, t.l2) for t in timings] == [
        (name, rows, pdl, WARM) for pdl in (True, False) for name in ("nb2-delta", "nb2-delta-ring1") for rows in (1, 4)
    ]
    ring = [timing for timing in timings if timing.with_copy_us is not None]
    assert len(ring) == 4
    assert all(timing.us == timing.with_copy_us - timing.copy_us for timing in ring)
    assert ring[0].copy_us == ring[2].copy_us  # timed once, as it does not depend on PDL
    assert context.notes[0].startswith("the empty kernel was not measured: ")  # the stand-in compiles no PTX
    text = "\n".join(shown)
    assert "GPU time, us; PDL on, warm L2" in text
    assert "Copy into the mailbox + consumer, less the copy alone, us; PDL off, warm L2" in text
    assert all(timing.floor_us > 0 for timing in timings)


@dataclass
class FakeMachine:
    """The CPU in place of a GPU, with the memory that a test says is in use."""

    used: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    drains: int = 0

    def on_stream(self, index: int) -> AbstractContextManager[object]:
        assert 0 <= index < soak.STREAMS
        return nullcontext()

    def drain(self) -> None:
        self.drains += 1

    def memory(self) -> tuple[int, int]:
        return self.used.pop(0) if len(self.used) > 1 else self.used[0]


LAUNCHES = 4000


def test_a_soak_launches_all_it_was_asked_for(rig: Rig, stub) -> None:
    stub.lib.stub_record(0)
    machine = FakeMachine()
    found = soak.soak(rig, machine, LAUNCHES, 60, print)
    assert found.problems == ()
    assert (found.launches, found.threads, found.streams) == (LAUNCHES, 8, 2)
    assert machine.drains >= 2 * soak.THREADS
    assert (found.host_growth_bytes, found.device_growth_bytes) == (0, 0)


def test_a_soak_launches_every_kind(rig: Rig) -> None:
    kinds = soak.kinds(rig)
    for has in (lambda v: v.slots, lambda v: v.stats, lambda v: v.aux, lambda v: v.key.write is not None):
        assert any(map(has, kinds))
        assert not all(map(has, kinds))


def test_a_soak_reports_what_a_launch_raises(rig: Rig, stub) -> None:
    stub.fail("cuLaunchKernelEx", 700, after=LAUNCHES // 2)
    found = soak.soak(rig, FakeMachine(), LAUNCHES, 60, print)
    assert any("DriverError" in problem and "CUDA_ERROR_ILLEGAL_ADDRESS" in problem for problem in found.problems)
    assert found.launches < LAUNCHES


def test_a_soak_ends_at_its_time_limit_and_says_so(rig: Rig, stub) -> None:
    stub.lib.stub_record(0)
    found = soak.soak(rig, FakeMachine(), 10**9, 0.3, print)
    (problem,) = found.problems
    assert f"{found.launches} of 1000000000 launches within 0.3 s" in problem
    assert "--soak-seconds" in problem
    assert found.launches > 0
    assert found.seconds < 20


def test_a_soak_reports_threads_that_hang_in_a_launch(rig: Rig, stub, monkeypatch: pytest.MonkeyPatch) -> None:
    stub.lib.stub_record(0)
    monkeypatch.setattr(soak, "DRAIN_SECONDS", 0.2)
    released = threading.Event()

    class Stuck(FakeMachine):
        def drain(self) -> None:
            if threading.current_thread().name == "soak-3":
                released.wait(20)

    found = soak.soak(rig, Stuck(), LAUNCHES, 0.3, print)
    released.set()
    assert [problem for problem in found.problems if problem.startswith("1 threads hang in a launch")]


def test_a_soak_reports_a_device_that_cannot_be_looked_at(rig: Rig, stub) -> None:
    stub.lib.stub_record(0)

    class Lost(FakeMachine):
        looks = 0

        def memory(self) -> tuple[int, int]:
            self.looks += 1
            if self.looks == 3:
                raise RuntimeError("launch failure")
            return 0, 0

    found = soak.soak(rig, Lost(), LAUNCHES, 60, print)
    assert found.problems == ("looking at memory: RuntimeError: launch failure",)


def test_a_soak_says_how_far_it_is(rig: Rig, stub, monkeypatch: pytest.MonkeyPatch) -> None:
    stub.lib.stub_record(0)
    monkeypatch.setattr(soak, "_SAY_SECONDS", 0.0)
    said: list[str] = []
    soak.soak(rig, FakeMachine(), LAUNCHES, 60, said.append)
    assert any(f"of {LAUNCHES} launches after" in line for line in said)


def test_a_soak_fills_mailboxes_with_the_publisher_of_the_bundle(stub, bundles) -> None:
    loaded = api.load(bundles.write(["nb2-delta-ring1", "nb2-delta"], producers=["publish"]))
    rig = Rig(loaded, FakeTimer(), L2_BYTES)
    loads = {load.job.variant.slots: load for load in soak.thread_loads(rig, 0)}
    for slots, launches in ((0, 1), (1, 2)):
        before = stub.launch_count()
        loads[slots].call()
        assert stub.launch_count() - before == loads[slots].launches == launches


def test_a_soak_reports_growth(rig: Rig, stub) -> None:
    stub.lib.stub_record(0)
    leak = soak.HOST_SLACK_BYTES + 1
    found = soak.soak(rig, FakeMachine(used=[(0, 0), (0, 0), (100, 5), (100 + leak, 5)]), LAUNCHES, 60, print)
    assert (found.host_growth_bytes, found.device_growth_bytes) == (leak, 0)
    assert [problem for problem in found.problems if "host memory grew by" in problem] == list(found.problems)
    assert soak.growth_problems(0, soak.DEVICE_SLACK_BYTES + 1)[0].startswith("device memory grew by")
    assert soak.growth_problems(soak.HOST_SLACK_BYTES, soak.DEVICE_SLACK_BYTES) == []


def test_a_soak_reports_bits_that_change(rig: Rig, stub, monkeypatch: pytest.MonkeyPatch) -> None:
    stub.lib.stub_record(0)
    load_class = soak.Load
    count = iter(range(1 << 30))
    monkeypatch.setattr(load_class, "checked", lambda self: torch.tensor(next(count)))
    found = soak.soak(rig, FakeMachine(), LAUNCHES, 60, print)
    assert "gives other bits after the soak than before" in found.problems[0]
    assert "thread 0: nb2" in found.problems[0] or "thread 0: nb0" in found.problems[0]


def test_resident_memory_is_read() -> None:
    before = host_bytes()
    with mmap.mmap(-1, 32 << 20) as block:  # straight from the system: torch may reuse what it has
        block.write(b"x" * len(block))
        assert host_bytes() - before > 16 << 20


@pytest.fixture
def machine_without_gpu(monkeypatch: pytest.MonkeyPatch, timer: FakeTimer) -> None:
    facts = GpuFacts(name="stand-in", l2_bytes=L2_BYTES, driver="1", torch="2")
    monkeypatch.setattr(command, "gpu_facts", lambda device: facts)
    monkeypatch.setattr(command, "graph_time_us", lambda calls, effort, device: timer(calls))


ARGUMENTS = ("--part", "gpu", "--variants", "nb2-delta", "--rows", "1,4")


@pytest.mark.usefixtures("machine_without_gpu")
class TestCommand:
    def bench(self, bundle: LoadedBundle, *arguments: str) -> int:
        return entry.main(["bench", str(bundle.bundle.path), *ARGUMENTS, *arguments])

    def test_saves_and_compares(
        self, bundle: LoadedBundle, tmp_path: Path, capsys: pytest.CaptureFixture[str], timer: FakeTimer
    ) -> None:
        old = tmp_path / "old.json"
        assert self.bench(bundle, "--save", str(old)) == 0
        saved = json.loads(old.read_text())
        assert [(t["rows"], t["pdl"], t["l2"]) for t in saved["timings"]] == [
            (rows, pdl, l2) for l2 in (WARM, COLD) for pdl in (True, False) for rows in (1, 4)
        ]
        assert "on stand-in, driver 1" in capsys.readouterr().out
        timer.calls.clear()
        assert self.bench(bundle, "--compare", str(old)) == 0
        assert "0 slower by more than 5%" in capsys.readouterr().out
        for timing in saved["timings"]:
            timing["us"] /= 2
        old.write_text(json.dumps(saved))
        timer.calls.clear()
        assert self.bench(bundle, "--compare", str(old)) == 1
        assert "SLOWER consumer nb2-delta" in capsys.readouterr().out
        timer.calls.clear()
        assert self.bench(bundle, "--compare", str(old), "--threshold", "150") == 0
        capsys.readouterr()
        assert self.bench(bundle, "--load", str(old), "--compare", str(old), "--json") == 0
        assert [found["slower"] for found in json.loads(capsys.readouterr().out)["comparisons"].values()] == [[]]

    def test_json_is_all_that_is_printed(
        self, bundle: LoadedBundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.bench(bundle, "--json", "--quick") == 0
        result = json.loads(capsys.readouterr().out)
        assert result["schema"] == 1
        assert {(t["pdl"], t["l2"]) for t in result["timings"]} == {(True, WARM)}

    def test_wrong_arguments_are_misuse(self, bundle: LoadedBundle, capsys: pytest.CaptureFixture[str]) -> None:
        for arguments, text in (
            (("--rows", "0"), "--rows '0': row counts from 1 to 4096"),
            (("--soak", "-1"), "Invalid value for '--soak': -1 is not in the range 0<=x<="),
            (("--soak-seconds", "0"), "Invalid value for '--soak-seconds': 0.0 is not in the range 0<x<="),
            (("--threshold", "-5"), "Invalid value for '--threshold': -5.0 is not in the range 0<=x<=1000"),
            (("--threshold", "nan"), "Invalid value for '--threshold': nan is not in the range"),
            (("--variants", "nb9*"), "--variants 'nb9*' matches none"),
            (("--compare", "gone.json"), "gone.json: cannot be read"),
            (("--load", "gone.json"), "add --compare FILE"),
        ):
            assert self.bench(bundle, *arguments) == 2
            assert text in capsys.readouterr().err


def test_a_bundle_with_nothing_to_launch_says_so(stub, bundles) -> None:
    loaded = api.load(bundles.write(["nb2-delta-aux"]))
    with pytest.raises(UsageError, match="has no ordinary variant to launch"):
        host.ways_to_launch(Rig(loaded, FakeTimer(), L2_BYTES), lambda mailbox: lambda: None)

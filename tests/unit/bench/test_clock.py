"""Taking times, with a made-up GPU whose replays take made-up times."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from attnres_aot.bench import clock
from attnres_aot.bench.clock import Effort, graph_time_us, host_times_us

DEVICE = torch.device("cuda")


class FakeGpu:
    """Records what is captured and replayed; replay n of a graph takes n milliseconds."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now_ms = 0.0
        self.replays = 0

    def stream(self, device=None):
        return self

    def wait_stream(self, other) -> None:
        self.log.append("wait")

    def synchronize(self, device=None) -> None:
        self.log.append("drain")


class FakeGraph:
    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu

    def capture_begin(self) -> None:
        self.gpu.log.append("begin")

    def capture_end(self) -> None:
        self.gpu.log.append("end")

    def replay(self) -> None:
        self.gpu.replays += 1
        self.gpu.now_ms += self.gpu.replays


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu

    def record(self) -> None:
        self.at = self.gpu.now_ms

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end) -> float:
        return end.at - self.at


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gpu = FakeGpu()
    monkeypatch.setattr(torch.cuda, "Stream", gpu.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", gpu.stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(gpu))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: FakeEvent(gpu))
    return gpu


def test_median_of_replays_over_the_calls_of_the_graph(gpu: FakeGpu) -> None:
    us = graph_time_us([lambda: gpu.log.append("call")], Effort(launches=20, replays=5), DEVICE)
    begin, end = gpu.log.index("begin"), gpu.log.index("end")
    assert gpu.log[:begin].count("call") == 2  # whatever must be loaded is loaded before the capture
    assert gpu.log[begin - 1] == "drain"
    assert gpu.log[begin:end].count("call") == 20
    assert us == pytest.approx((5 + 3) * 1e3 / 20)  # replays 6..10 are timed, after 5 to warm up


@pytest.mark.parametrize(("sets", "captured"), [(3, 21), (20, 20), (50, 50)])
def test_calls_take_whole_turns(gpu: FakeGpu, sets: int, captured: int) -> None:
    calls = [lambda name=f"call {index}": gpu.log.append(name) for index in range(sets)]
    graph_time_us(calls, Effort(launches=20, replays=1), DEVICE)
    inside = gpu.log[gpu.log.index("begin") + 1 : gpu.log.index("end")]
    assert inside == [f"call {index % sets}" for index in range(captured)]


def test_ways_of_launching_take_turns_and_never_meet_a_full_queue(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(1000))
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(now) ** 2 * 1e-6)
    calls = {name: lambda name=name: gpu.log.append(name) for name in ("bare", "run")}
    found = host_times_us(calls, Effort(host_calls=10, host_rounds=3), DEVICE)
    timed = gpu.log[gpu.log.index("drain") :]
    assert timed == ["drain", *(["bare"] * 10 + ["drain"] + ["run"] * 10 + ["drain"]) * 3]
    # starts and ends are the squares of 0, 1, 2, ...: bare took 1, 9, 17 us for 10 calls, run 5, 13, 21
    assert found == pytest.approx({"bare": 0.9, "run": 1.3})

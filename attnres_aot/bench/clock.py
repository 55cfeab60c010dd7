"""Takes times: GPU time of calls in a replayed CUDA graph, and host time of calls in a tight loop.

The method is the one by which the kernels' numbers are compared: launches stand back to back in one graph, so that
overlap by programmatic dependent launch counts, and the time of a call is the median over replays.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]
"""Puts something on the current stream."""
_WARM_REPLAYS = 5
_US = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How often things are run."""

    launches: int = 20
    """Calls in one graph, at least; every call given is in it."""
    replays: int = 50
    """Timed replays of a graph."""
    host_calls: int = 400
    """Calls of one timed host loop: few enough that the launch queue never fills."""
    host_rounds: int = 15
    """Rounds of host loops; the ways of launching take turns within each."""


STANDARD = Effort()
QUICK = Effort(replays=10, host_rounds=5)


def graph_time_us(calls: Sequence[Call], effort: Effort, device: torch.device) -> float:
    """Returns the GPU time of one call, in microseconds.

    Args:
      calls: what is captured, in turn, as often as needed to reach `effort.launches`; each must be safe to repeat.
      effort: launches and replays.
      device: whose work it is.
    """
    count = -(-effort.launches // len(calls)) * len(calls)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.stream(stream):
        for call in calls:  # loads code and makes plans, which a capture forbids
            call()
            call()
        torch.cuda.synchronize(device)
        graph.capture_begin()
        for call in itertools.islice(itertools.cycle(calls), count):
            call()
        graph.capture_end()
        for _ in range(_WARM_REPLAYS):
            graph.replay()
        torch.cuda.synchronize(device)
        times = [_replay_ms(graph) for _ in range(effort.replays)]
    return statistics.median(times) * 1e3 / count


def host_times_us(calls: dict[str, Call], effort: Effort, device: torch.device) -> dict[str, float]:
    """Returns the host time of one call of each kind, in microseconds: medians over rounds in which all take turns.

    The queue is drained before each loop, so that no loop waits for the GPU.
    """
    for call in calls.values():
        for _ in range(100):
            call()
    torch.cuda.synchronize(device)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(effort.host_rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(effort.host_calls):
                call()
            times[name].append((time.perf_counter() - start) * _US / effort.host_calls)
            torch.cuda.synchronize(device)
    return {name: statistics.median(found) for name, found in times.items()}


def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    start, end = _event(), _event()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    elapsed: float = start.elapsed_time(end)
    return elapsed


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

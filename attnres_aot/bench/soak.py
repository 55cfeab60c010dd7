"""Soak: many launches from many threads on a few streams, while this process's memory is watched."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from attnres_aot.bench.clock import Call
from attnres_aot.bench.gpu import device_bytes, host_bytes
from attnres_aot.bench.results import Soak
from attnres_aot.bench.rig import Job, Rig, Sets
from attnres_aot.variants import Variant, parse_variant

THREADS, STREAMS = 8, 2
ROWS = (1, 5, 16)
"""Row counts of the launches."""
HOST_SLACK_BYTES = 8 << 20
"""Growth of resident memory that is no leak: caches of the interpreter and of the allocator."""
DEVICE_SLACK_BYTES = 2 << 20
"""Growth of device memory that is no leak: one granule of an allocator."""

_WARM_SHARE = 0.2
_DRAIN = 500  # launches of one thread between waits for the GPU


class Machine(Protocol):
    """What a soak needs of the machine."""

    def on_stream(self, index: int) -> AbstractContextManager[object]:
        """Makes one of the streams current."""

    def drain(self) -> None:
        """Waits for the current stream."""

    def memory(self) -> tuple[int, int]:
        """Returns bytes in use on host and device, with nothing in flight."""


class CudaMachine:
    """The GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(STREAMS)]  # type: ignore[no-untyped-call]

    def on_stream(self, index: int) -> AbstractContextManager[object]:
        """Makes one of the streams current."""
        return torch.cuda.stream(self._streams[index])

    def drain(self) -> None:
        """Waits for the current stream."""
        torch.cuda.current_stream(self._device).synchronize()

    def memory(self) -> tuple[int, int]:
        """Returns bytes in use on host and device, with nothing in flight."""
        torch.cuda.synchronize(self._device)
        return host_bytes(), device_bytes(self._device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One consumer that a thread launches."""

    job: Job
    """What it is."""
    sets: Sets
    """Its memory, which no other thread uses."""
    call: Call
    """Launches it."""
    prefix: torch.Tensor
    """What the prefix holds before a checked launch."""
    blocks: torch.Tensor
    """What the blocks hold before a checked launch."""

    def checked(self) -> torch.Tensor:
        """Launches on the first inputs and returns a copy of the output."""
        self.sets.prefix.copy_(self.prefix)
        self.sets.blocks.copy_(self.blocks)
        self.call()
        return self.sets.out.clone()


def soak(rig: Rig, machine: Machine, launches: int) -> Soak:
    """Launches `launches` times from THREADS threads, checks on, and says what went wrong.

    Before and after, each consumer is launched on the same inputs, and must give the same bits.
    """
    loads = [thread_loads(rig, thread) for thread in range(THREADS)]
    machine.memory()
    before = [[load.checked() for load in mine] for mine in loads]
    machine.memory()
    crew = _Crew(machine, loads, launches)
    started = time.monotonic()
    crew.run()
    seconds = time.monotonic() - started
    problems = list(crew.problems)
    if not problems:
        problems += _differences(loads, before)
        problems += growth_problems(crew.host_growth, crew.device_growth)
    return Soak(
        launches=crew.launched,
        threads=THREADS,
        streams=STREAMS,
        seconds=seconds,
        host_growth_bytes=crew.host_growth,
        device_growth_bytes=crew.device_growth,
        problems=tuple(problems),
    )


def growth_problems(host: int, device: int) -> list[str]:
    """Says which memory grew by more than its slack."""
    found = [("host", host, HOST_SLACK_BYTES), ("device", device, DEVICE_SLACK_BYTES)]
    return [
        f"{name} memory grew by {grown} bytes after the warm-up; {slack} are allowed: something leaks"
        for name, grown, slack in found
        if grown > slack
    ]


def thread_loads(rig: Rig, thread: int) -> list[Load]:
    """Binds what one thread launches: a consumer of each kind, at row counts that differ between threads."""
    loads = []
    for index, variant in enumerate(kinds(rig)):
        job = Job(variant=variant, rows=ROWS[(thread + index) % len(ROWS)], pdl=False)
        sets = rig.make_sets(job)
        call = rig.call(job, sets, 0)
        loads.append(Load(job=job, sets=sets, call=call, prefix=sets.prefix.clone(), blocks=sets.blocks.clone()))
    return loads


def kinds(rig: Rig) -> list[Variant]:
    """Returns one variant of each kind that the bundle has: with and without mailbox, statistics, aux and a write."""
    chosen: dict[tuple[bool, bool, bool, bool], Variant] = {}
    for record in rig.loaded.bundle.manifest.variants:
        variant = parse_variant(record.name)
        kind = (variant.slots > 0, variant.stats, variant.aux, variant.key.write is not None)
        best = chosen.get(kind)
        if best is None or (variant.key.nb, -variant.slots) > (best.key.nb, -best.slots):
            chosen[kind] = variant
    return list(chosen.values())


class _Crew:
    """The threads, which stop half-way once so that memory can be looked at."""

    def __init__(self, machine: Machine, loads: Sequence[Sequence[Load]], launches: int) -> None:
        self._machine, self._loads = machine, loads
        each = -(-launches // len(loads))
        self._shares = (int(each * _WARM_SHARE), each - int(each * _WARM_SHARE))
        self._gate = threading.Barrier(len(loads) + 1)
        self.problems: list[str] = []
        self.launched = 0
        self.host_growth = self.device_growth = 0
        self._lock = threading.Lock()

    def run(self) -> None:
        threads = [
            threading.Thread(target=self._work, args=(index,), name=f"soak-{index}", daemon=True)
            for index in range(len(self._loads))
        ]
        for thread in threads:
            thread.start()
        try:
            host, device = self._at_gate()
            host_end, device_end = self._at_gate()
            self.host_growth, self.device_growth = host_end - host, device_end - device
        except threading.BrokenBarrierError:
            self.problems = self.problems or ["a thread did not come to its end"]
        for thread in threads:
            thread.join()

    def _at_gate(self) -> tuple[int, int]:
        """Waits until every thread has stopped, measures, and lets them go on."""
        self._gate.wait()
        memory = self._machine.memory()
        self._gate.wait()
        return memory

    def _work(self, index: int) -> None:
        calls = [load.call for load in self._loads[index]]
        try:
            with self._machine.on_stream(index % STREAMS):
                for share in self._shares:
                    self._launch(calls, share)
                    self._gate.wait()
                    self._gate.wait()
        except threading.BrokenBarrierError:
            return
        except Exception as error:  # noqa: BLE001 - whatever a launch raises is a finding
            with self._lock:
                self.problems.append(f"thread {index}: {type(error).__name__}: {error}")
            self._gate.abort()

    def _launch(self, calls: Sequence[Call], count: int) -> None:
        done = 0
        while done < count:
            batch = min(_DRAIN, count - done)
            for i in range(batch):
                calls[i % len(calls)]()
            done += batch
            self._machine.drain()
        with self._lock:
            self.launched += done


def _differences(loads: Sequence[Sequence[Load]], before: Sequence[Sequence[torch.Tensor]]) -> list[str]:
    return [
        f"thread {thread}: {load.job.variant} for {load.job.rows} rows gives other bits after the soak than before"
        for thread, (mine, outs) in enumerate(zip(loads, before, strict=True))
        for load, out in zip(mine, outs, strict=True)
        if not torch.equal(load.checked(), out)
    ]

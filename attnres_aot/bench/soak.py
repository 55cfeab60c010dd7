"""Soak: many launches from many threads on a few streams, while this process's memory is watched.

Nothing here can wait for ever. What fills a mailbox stands before its consumer in the same stream and thread, ring
consumers have a spin budget, threads wait for the GPU with a time limit, and the main thread for threads.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from attnres_aot.bench.clock import Call
from attnres_aot.bench.gpu import device_bytes, host_bytes
from attnres_aot.bench.points import holds
from attnres_aot.bench.results import Soak
from attnres_aot.bench.rig import Job, Rig, Sets
from attnres_aot.errors import DriverError
from attnres_aot.spec.variants import PUBLISH, Producer, Variant, parse_variant

THREADS, STREAMS = 8, 2
ROWS = (1, 5, 16)
"""Row counts of the launches."""
HOST_SLACK_BYTES = 8 << 20
"""Growth of resident memory that is no leak: caches of the interpreter and of the allocator."""
DEVICE_SLACK_BYTES = 2 << 20
"""Growth of device memory that is no leak: one granule of an allocator."""

DRAIN_SECONDS = 60.0
"""Longest wait for the launches of one thread between two looks; they take milliseconds."""

_WARM_SHARE = 0.2
_DRAIN = 500  # calls of one thread between waits for the GPU
_POLL_SECONDS = 1e-4
_LOOK_SECONDS = 0.05
_SAY_SECONDS = 5.0

Echo = Callable[[str], object]
"""Takes a line about progress."""


class Machine(Protocol):
    """What a soak needs of the machine."""

    def on_stream(self, index: int) -> AbstractContextManager[object]:
        """Makes one of the streams current."""

    def drain(self) -> None:
        """Waits for the current stream, at most DRAIN_SECONDS."""

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
        """Waits for the current stream, and lets other threads run meanwhile.

        Raises:
          DriverError: it did not come to its end.
        """
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        deadline = time.monotonic() + DRAIN_SECONDS
        while not event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                raise DriverError(f"the GPU did not finish {_DRAIN} calls within {DRAIN_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)

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

    @property
    def launches(self) -> int:
        """Launches through the loader that one call makes."""
        return 2 if self.job.publish else 1

    def checked(self) -> torch.Tensor:
        """Launches on the first inputs and returns a copy of the output."""
        self.sets.prefix.copy_(self.prefix)
        self.sets.blocks.copy_(self.blocks)
        self.call()
        return self.sets.out.clone()


def soak(rig: Rig, machine: Machine, launches: int, seconds: float, echo: Echo) -> Soak:
    """Launches `launches` times from THREADS threads, checks on, and says what went wrong.

    Before and after, each consumer is launched on the same inputs, and must give the same bits.

    Args:
      rig: the bundle.
      machine: where it runs.
      launches: launches through the loader, those of publishers included.
      seconds: time limit; fewer launches within it are a problem.
      echo: takes lines about progress.
    """
    loads = [thread_loads(rig, thread) for thread in range(THREADS)]
    machine.memory()
    before = [[load.checked() for load in mine] for mine in loads]
    machine.memory()
    crew = _Crew(machine, loads, launches, seconds, echo)
    started = time.monotonic()
    crew.run()
    taken = time.monotonic() - started
    problems = list(crew.problems)
    if not problems:
        problems += _differences(loads, before)
        problems += growth_problems(crew.host_growth, crew.device_growth)
    return Soak(
        launches=crew.launched,
        threads=THREADS,
        streams=STREAMS,
        seconds=taken,
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
    published = holds(rig.loaded.bundle.manifest, Producer(kernel=PUBLISH))
    for index, variant in enumerate(kinds(rig)):
        rows = ROWS[(thread + index) % len(ROWS)]
        job = Job(variant=variant, rows=rows, pdl=False, publish=published and variant.slots == 1)
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
    """The threads, which stop once after the warm-up so that memory can be looked at."""

    def __init__(
        self, machine: Machine, loads: Sequence[Sequence[Load]], launches: int, seconds: float, echo: Echo
    ) -> None:
        self._machine, self._loads, self._wanted = machine, loads, launches
        self._seconds, self._echo = seconds, echo
        each = -(-launches // len(loads))
        self._shares = (int(each * _WARM_SHARE), each - int(each * _WARM_SHARE))
        self._gate = threading.Barrier(len(loads) + 1)
        self.problems: list[str] = []
        self.launched = 0
        self.host_growth = self.device_growth = 0
        self._lock = threading.Lock()

    def run(self) -> None:
        """Starts the threads and waits for their end, or for the time limit."""
        self._started = time.monotonic()
        self._said = self._started
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
        except Exception as error:  # noqa: BLE001 - whatever the machine says belongs into the result
            self._fail(f"looking at memory: {type(error).__name__}: {error}")
        deadline = time.monotonic() + DRAIN_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self.launched < self._wanted and not self.problems:
            each = (time.monotonic() - self._started) * 1e6 / max(1, self.launched)
            self.problems.append(
                f"{self.launched} of {self._wanted} launches within {self._seconds:g} s, {each:.1f} us each: "
                "launching is slow here; allow more time with --soak-seconds"
            )

    def _at_gate(self) -> tuple[int, int]:
        """Waits until every thread has stopped, measures, and lets them go on."""
        while self._gate.n_waiting < len(self._loads) and not self._gate.broken:
            time.sleep(_LOOK_SECONDS)
            now = time.monotonic()
            if now - self._said > _SAY_SECONDS:
                self._said = now
                self._echo(f"soak: {self.launched} of {self._wanted} launches after {now - self._started:.0f} s")
            if now - self._started > self._seconds + 2 * DRAIN_SECONDS:
                missing = len(self._loads) - self._gate.n_waiting
                self._fail(f"{missing} threads hang in a launch: they are {2 * DRAIN_SECONDS:g} s over the time limit")
        self._gate.wait()
        memory = self._machine.memory()
        self._gate.wait()
        return memory

    def _work(self, index: int) -> None:
        try:
            with self._machine.on_stream(index % STREAMS):
                for share in self._shares:
                    self._launch(self._loads[index], share)
                    self._gate.wait()
                    self._gate.wait()
        except threading.BrokenBarrierError:
            return
        except Exception as error:  # noqa: BLE001 - whatever a launch raises is a finding
            self._fail(f"thread {index}: {type(error).__name__}: {error}")

    def _fail(self, problem: str) -> None:
        with self._lock:
            self.problems.append(problem)
        self._gate.abort()

    def _launch(self, loads: Sequence[Load], count: int) -> None:
        """Launches at least `count` times, unless the time is over or another thread has failed."""
        pairs = [(load.call, load.launches) for load in loads]
        done = 0
        while done < count and not self.problems and time.monotonic() - self._started < self._seconds:
            before = done
            for call, launches in itertools.islice(itertools.cycle(pairs), _DRAIN):
                if done >= count:
                    break
                call()
                done += launches
            self._machine.drain()
            with self._lock:
                self.launched += done - before


def _differences(loads: Sequence[Sequence[Load]], before: Sequence[Sequence[torch.Tensor]]) -> list[str]:
    return [
        f"thread {thread}: {load.job.variant} for {load.job.rows} rows gives other bits after the soak than before"
        for thread, (mine, outs) in enumerate(zip(loads, before, strict=True))
        for load, out in zip(mine, outs, strict=True)
        if not torch.equal(load.checked(), out)
    ]

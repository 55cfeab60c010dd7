"""Compiling many images in worker processes: who compiles what when, and what happens when a worker dies or hangs.

Rules:
- The longest jobs go first, so that the workers end together.
- A job that raises has failed; trying again would give the same.
- A job whose worker dies is tried once more in a fresh worker (the machine may have been short of memory), then failed.
- A job that runs over its time limit has failed and its worker is killed; trying again would double the wait.
- A worker that dies before it is ready is replaced once; then the whole build fails, as nothing can be compiled here.
- A worker is replaced after a number of jobs, because the compiler leaks thread pools.
"""

from __future__ import annotations

import base64
import heapq
import selectors
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from attnres_aot.builder.image import FinishedImage, decode_image
from attnres_aot.builder.process import WorkerProcess
from attnres_aot.bundle.manifest import to_json
from attnres_aot.errors import CompileError
from attnres_aot.spec.arch import Arch
from attnres_aot.spec.variants import ConsumerSpec, ImageSpec, StatisticsSpec

_LONGEST_WAIT = 3600.0  # seconds; the system's own limit on one wait is some 24 days


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One image to compile."""

    name: str
    """Image name."""
    kernel: str
    """Which kernel."""
    key: str
    """Build key."""
    spec: ImageSpec
    """What to compile."""

    @property
    def weight(self) -> int:
        """Relative compile time: the code grows with the vectors that one thread holds, slots and saved blocks."""
        spec = self.spec
        if isinstance(spec, ConsumerSpec):
            return 2 + spec.slots + (3 if spec.nb is None else spec.nb)
        return 1 + spec.nb if isinstance(spec, StatisticsSpec) else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What the workers of a pool are started for."""

    compiler: str
    """Dotted name of the module that compiles."""
    arch: Arch
    """What it compiles for."""
    flavour: str
    """Which of the compiler's libraries compiles, e.g. `cu12`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFailure:
    """An image that could not be compiled or proven."""

    name: str
    """Image name."""
    reason: str
    """What happened, in one sentence."""
    output: str = ""
    """The end of what the compiler printed."""

    def __str__(self) -> str:
        text = f"{self.name}: {self.reason}"
        return text + "".join(f"\n    | {line}" for line in self.output.splitlines())


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """How to compile."""

    workers: int
    """Processes at the same time."""
    job_seconds: float = 120.0
    """Time limit of one image, infinity for none; they take 0.1-0.4 s on the slowest machine seen."""
    start_seconds: float = 120.0
    """Time limit of a worker's start."""
    jobs_per_worker: int = 64
    """Jobs after which a worker is replaced; a start costs about as much as three images."""
    attempts: int = 2
    """Times that a job whose worker dies is tried."""


class Watcher(Protocol):
    """Who wants to know how the compiling goes."""

    def started(self, name: str) -> None:
        """An image is being compiled."""

    def finished(self, name: str, image: FinishedImage, seconds: float) -> None:
        """An image has been compiled in `seconds`; raising CompileError refuses it, which fails the job."""

    def failed(self, failure: JobFailure) -> None:
        """An image has failed for good."""


@dataclass(slots=True, kw_only=True)
class _Seat:
    """A running worker and what it is at."""

    process: WorkerProcess
    deadline: float
    ready: bool = False
    retiring: bool = False
    job: Job | None = None
    jobs_done: int = 0
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reply:
    """A worker's reply to a job: an image, or the reason why there is none."""

    peak_bytes: int
    image: FinishedImage | None = None
    seconds: float = 0.0
    reason: str = ""


class Pool:
    """Compiles jobs for one arch. Use `compile_all` once."""

    def __init__(
        self, target: Target, scratch: Path, settings: PoolSettings, watcher: Watcher, *, keep_going: bool
    ) -> None:
        """Prepares a pool whose workers compile for `target` and put their files into `scratch`."""
        self.peak_bytes = 0
        """Largest memory seen: the sum of the peaks of the workers that lived at the same time."""
        self.compile_seconds = 0.0
        """Sum of the images' own compile times."""
        self.failures: list[JobFailure] = []
        """Images that failed for good."""
        self._target, self._scratch = target, scratch
        self._settings, self._watcher, self._keep_going = settings, watcher, keep_going
        self._queue: list[tuple[int, int, Job]] = []
        self._attempts: dict[str, int] = {}
        self._seats: list[_Seat] = []
        self._started = 0
        self._requeued = 0
        self._false_starts = 0
        self._selector = selectors.DefaultSelector()

    def compile_all(self, jobs: Iterable[Job]) -> None:
        """Compiles all jobs, or stops after the first failure unless asked to keep going; leaves no process behind.

        Raises:
          CompileError: workers cannot even start.
        """
        self._queue = [(-job.weight, index, job) for index, job in enumerate(jobs)]
        heapq.heapify(self._queue)
        try:
            while not self._is_over():
                self._fill_seats()
                self._wait()
        finally:
            for seat in list(self._seats):
                self._vacate(seat)
            self._selector.close()

    def _is_over(self) -> bool:
        if self.failures and not self._keep_going:
            return True
        return not self._queue and all(seat.job is None for seat in self._seats)

    def _fill_seats(self) -> None:
        for seat in list(self._seats):
            if seat.ready and seat.job is None and not seat.retiring:
                self._assign(seat)
        idle = sum(1 for seat in self._seats if seat.job is None and not seat.retiring)
        busy = sum(1 for seat in self._seats if seat.job is not None)
        wanted = min(len(self._queue) - idle, self._settings.workers - idle - busy)
        for _ in range(wanted):
            self._started += 1
            target, folder = self._target, self._scratch / f"worker{self._started}"
            process = WorkerProcess(target.compiler, target.arch, target.flavour, folder)
            seat = _Seat(process=process, deadline=time.monotonic() + self._settings.start_seconds)
            self._seats.append(seat)
            self._selector.register(process.fileno(), selectors.EVENT_READ, seat)

    def _assign(self, seat: _Seat) -> None:
        if not self._queue or seat.jobs_done >= self._settings.jobs_per_worker:
            seat.retiring = True
            seat.deadline = time.monotonic() + self._settings.start_seconds
            seat.process.retire()
            return
        _, _, job = heapq.heappop(self._queue)
        seat.job = job
        seat.deadline = time.monotonic() + self._settings.job_seconds
        self._attempts[job.name] = self._attempts.get(job.name, 0) + 1
        seat.process.send({"kernel": job.kernel, "key": job.key, "spec": to_json(job.spec)})
        self._watcher.started(job.name)

    def _wait(self) -> None:
        nearest = min((seat.deadline for seat in self._seats), default=0.0)
        for key, _ in self._selector.select(min(max(0.0, nearest - time.monotonic()), _LONGEST_WAIT)):
            self._listen(key.data)
        now = time.monotonic()
        for seat in [seat for seat in self._seats if seat.deadline <= now]:
            self._expire(seat)

    def _listen(self, seat: _Seat) -> None:
        try:
            replies = seat.process.receive()
            if replies is None:
                self._lose(seat, f"the worker {seat.process.how_it_ended()}")
                return
            read = [_read(reply, seat.job) for reply in replies]
        except (ValueError, KeyError, TypeError) as error:
            self._lose(seat, f"the worker sent a reply that cannot be read ({error})")
            return
        for reply in read:
            self._take(seat, reply)

    def _take(self, seat: _Seat, reply: _Reply | None) -> None:
        job = seat.job
        if reply is None or job is None:
            seat.ready = True
            self._assign(seat)
            return
        seat.peak_bytes = reply.peak_bytes
        self.peak_bytes = max(self.peak_bytes, sum(other.peak_bytes for other in self._seats))
        if reply.image is None:
            self._fail(JobFailure(name=job.name, reason=reply.reason, output=seat.process.output()))
        else:
            self.compile_seconds += reply.seconds
            try:
                self._watcher.finished(job.name, reply.image, reply.seconds)
            except CompileError as error:
                self._fail(JobFailure(name=job.name, reason=str(error)))
        seat.job = None
        seat.jobs_done += 1
        if not self._is_over():
            self._assign(seat)

    def _lose(self, seat: _Seat, what: str) -> None:
        """Deals with a worker that is gone or cannot be trusted."""
        output = seat.process.output()
        job, ready = seat.job, seat.ready
        self._vacate(seat)
        if job is not None:
            attempts = self._attempts[job.name]
            if attempts < self._settings.attempts:
                self._requeued += 1
                heapq.heappush(self._queue, (-job.weight, -self._requeued, job))
            else:
                self._fail(JobFailure(name=job.name, reason=f"{what}, {attempts} times in a row", output=output))
        elif not ready:
            self._false_starts += 1
            if self._false_starts >= self._settings.attempts:
                lines = "".join(f"\n    | {line}" for line in output.splitlines())
                raise CompileError(
                    f"cannot start a compiler process for {self._target.arch}: {what} before it was ready; check that "
                    f"`python -c 'import cutlass'` works in this environment{lines}"
                )

    def _expire(self, seat: _Seat) -> None:
        job = seat.job
        if job is None:
            if seat.retiring:
                self._vacate(seat)
            else:
                self._lose(seat, f"the worker took more than {self._settings.start_seconds:g} s to start")
            return
        reason = f"took more than the time limit of {self._settings.job_seconds:g} s; the worker was killed"
        output = seat.process.output()
        self._vacate(seat)
        self._fail(JobFailure(name=job.name, reason=reason, output=output))

    def _vacate(self, seat: _Seat) -> None:
        if seat in self._seats:
            self._seats.remove(seat)
            self._selector.unregister(seat.process.fileno())
            seat.process.stop()

    def _fail(self, failure: JobFailure) -> None:
        self.failures.append(failure)
        self._watcher.failed(failure)


def _read(reply: dict[str, Any], job: Job | None) -> _Reply | None:
    """Reads a worker's reply to `job`; None when it says that it is ready.

    Raises:
      ValueError, KeyError, TypeError: that is no reply to the job.
    """
    event = reply["event"]
    if (event == "ready") != (job is None):
        raise ValueError(f"{event!r} at the wrong time")
    if job is None:
        return None
    peak_bytes = int(reply["peak_bytes"])
    if event == "failed":
        return _Reply(peak_bytes=peak_bytes, reason=str(reply["reason"]))
    image = decode_image(base64.b64decode(reply["image"], validate=True))
    if image is None or image.key != job.key:
        raise ValueError("not the image that was asked for")
    return _Reply(peak_bytes=peak_bytes, image=image, seconds=float(reply["seconds"]))

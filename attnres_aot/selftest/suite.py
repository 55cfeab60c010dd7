"""Running cases: every variant and producer asked for, into results that survive a failing kernel."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from attnres_aot.bundle.manifest import Manifest
from attnres_aot.errors import AttnResError, DriverError
from attnres_aot.runtime.cuda.fault import read_fault
from attnres_aot.selftest.arena import Arena
from attnres_aot.selftest.cases import Banks, Case, cases_for, prepare
from attnres_aot.selftest.check import Verdict, judge, ulp_limit
from attnres_aot.selftest.producers import ProducerCase, judge_producer, prepare_producer, producer_cases
from attnres_aot.selftest.reference import Operands
from attnres_aot.spec.variants import Producer, Variant, parse_producer, parse_variant

LAUNCH_SECONDS = 20.0
"""Longest time that one launch may take; a ring kernel that waits for a row that never comes takes for ever."""
MAX_PROBLEMS = 12
"""Problems kept per variant or producer."""

Subject = Variant | Producer
"""What is checked."""


class Launcher(Protocol):
    """Whatever launches cases on the current stream: the loader on a GPU, or a simulation."""

    def launch(self, case: Case, views: Operands) -> None:
        """Launches a consumer; the inputs are in `views`, and so must be the results."""

    def produce(self, case: ProducerCase, arena: Arena) -> None:
        """Launches a producer; the inputs are in `arena`, see `prepare_producer`, and so must be the results."""


class DeviceLostError(DriverError):
    """The GPU can run nothing more in this process; later variants cannot be checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What was found out about one variant or producer."""

    subject: Subject
    """Which one."""
    launches: int
    """Launches checked."""
    elements: int
    """Output elements compared."""
    worst_ulp: int
    """Largest distance of a well-conditioned output element from the rounded fp64 result; 0 for a producer."""
    relative_error: float
    """Largest relative error of a case over its typical rows; 0 for published rows."""
    fp32_limited: int
    """Output elements over the limit, but within what fp32 arithmetic can reach; 0 for a producer."""
    problems: tuple[str, ...]
    """What is wrong, each with its case; empty when everything is right."""

    @property
    def ulp_limit(self) -> int | None:
        """What the contract allows; None for a producer, whose output is no bf16 or is compared bit for bit."""
        return ulp_limit(self.subject) if isinstance(self.subject, Variant) else None


def result_of(subject: Subject, verdicts: Sequence[Verdict], problems: tuple[str, ...]) -> Result:
    """Sums up the verdicts on one variant or producer."""
    return Result(
        subject=subject,
        launches=len(verdicts),
        elements=sum(verdict.elements for verdict in verdicts),
        worst_ulp=max((verdict.worst_ulp for verdict in verdicts), default=0),
        relative_error=max((verdict.relative_error or 0.0 for verdict in verdicts), default=0.0),
        fp32_limited=sum(verdict.fp32_limited for verdict in verdicts),
        problems=problems,
    )


def check_subject(
    subject: Subject, launcher: Launcher, banks: Banks, row_counts: Sequence[int], salt: int = 0
) -> Result:
    """Checks one variant or producer on all its cases; one that cannot be launched is a problem, and the next follows.

    Args:
      subject: which one.
      launcher: what launches its cases.
      banks: input values.
      row_counts: row counts of the cases.
      salt: moves the rows of the banks that are used.

    Raises:
      DeviceLostError: a launch hung or broke the device.
    """
    cases: Iterable[Case | ProducerCase] = (
        cases_for(subject, row_counts, salt)
        if isinstance(subject, Variant)
        else producer_cases(subject, row_counts, salt)
    )
    verdicts: list[Verdict] = []
    problems: list[str] = []
    for case in cases:
        try:
            verdicts.append(check_case(case, launcher, banks))
        except DeviceLostError:
            raise
        except AttnResError as error:
            problems.append(f"{case}: {type(error).__name__}: {error}")
            continue
        problems += [f"{case}: {problem}" for problem in verdicts[-1].problems]
    hidden = max(0, len(problems) - MAX_PROBLEMS)
    kept = (*problems[:MAX_PROBLEMS], *([f"and {hidden} more"] if hidden else []))
    return result_of(subject, verdicts, kept)


def check_case(case: Case | ProducerCase, launcher: Launcher, banks: Banks) -> Verdict:
    """Prepares, launches and judges one case.

    Raises:
      DeviceLostError: the launch hung or broke the device.
    """
    with naming_device_failures(str(case)):
        if isinstance(case, ProducerCase):
            arena = prepare_producer(case, banks)
            before = arena.clone()
            launcher.produce(case, arena)
            wait(banks.device, str(case))
            return judge_producer(case, banks, arena, before)
        prepared = prepare(case, banks)
        launcher.launch(case, prepared.arena.views)
        wait(banks.device, str(case))
        return judge(prepared)


def check_all(
    subjects: Iterable[Subject], launcher: Launcher, banks: Banks, row_counts: Sequence[int]
) -> Iterator[Result]:
    """Checks one after another; a lost device ends the run with a result that says so."""
    before: Counter[type] = Counter()  # so that neither kind's inputs depend on how many there are of the other
    for subject in subjects:
        try:
            result = check_subject(subject, launcher, banks, row_counts, before[type(subject)])
        except DeviceLostError as error:
            yield lost(subject, error)
            return
        before[type(subject)] += 1
        yield result


def lost(subject: Subject, error: DeviceLostError) -> Result:
    """Returns the result of a variant or producer whose launch lost the device."""
    return result_of(subject, (), (f"{error}; nothing after it can be checked in this process",))


def wait(device: torch.device, what: str, seconds: float = LAUNCH_SECONDS) -> None:
    """Waits for the device's current stream, but not for ever.

    Raises:
      DeviceLostError: the stream did not come to its end within `seconds`, or the device failed; says which ring
        consumer gave up, if one did.
    """
    if device.type != "cuda":
        return
    deadline = time.monotonic() + seconds
    with naming_device_failures(what):
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        while not event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                raise DeviceLostError(f"{what}: the launch did not finish within {seconds:g} s")


@contextlib.contextmanager
def naming_device_failures(what: str) -> Iterator[None]:
    """Says what was being done when torch reported that an earlier launch broke the device.

    Raises:
      DeviceLostError: torch did; says which ring consumer gave up, if one did.
    """
    try:
        yield
    except AttnResError:
        raise
    except RuntimeError as error:
        raise DeviceLostError(f"{what}: {read_fault() or f'the device failed: {error}'}") from error


def bundle_variants(manifest: Manifest) -> list[Variant]:
    """Lists every variant of a bundle, in the manifest's order."""
    return [parse_variant(record.name) for record in manifest.variants]


def bundle_producers(manifest: Manifest) -> list[Producer]:
    """Lists every producer of a bundle, in the manifest's order."""
    return [parse_producer(record.name) for record in manifest.producers]


def image_variants(manifest: Manifest) -> list[Variant]:
    """Picks variants that together reach every image of a bundle: for each, those with the most outputs."""

    def outputs(name: str) -> tuple[bool, bool]:
        variant = parse_variant(name)
        return (variant.aux, variant.key.write is not None)

    chosen: dict[str, str] = {}
    for record in manifest.variants:
        for choice in record.choices:
            best = chosen.get(choice.image)
            if best is None or outputs(record.name) > outputs(best):
                chosen[choice.image] = record.name
    wanted = set(chosen.values())
    return [variant for variant in bundle_variants(manifest) if str(variant) in wanted]

"""Running cases: every variant asked for, through a consumer, into results that survive a failing kernel."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from attnres_aot.bundle.manifest import Manifest
from attnres_aot.errors import AttnResError, DriverError
from attnres_aot.runtime.cuda.fault import read_fault
from attnres_aot.selftest.cases import Banks, Case, cases_for, prepare
from attnres_aot.selftest.check import Verdict, judge, ulp_limit
from attnres_aot.selftest.reference import Operands
from attnres_aot.spec.variants import Variant, parse_variant

LAUNCH_SECONDS = 20.0
"""Longest time that one launch may take; a ring kernel that waits for a row that never comes takes for ever."""
MAX_PROBLEMS = 12
"""Problems kept per variant."""


class Consumer(Protocol):
    """Whatever launches a case: the loader on a GPU, or a simulation."""

    def launch(self, case: Case, views: Operands) -> None:
        """Launches `case` on the current stream; the inputs are in `views`, and so must be the results."""


class Judged(Protocol):
    """What was found out about one case."""

    @property
    def problems(self) -> Sequence[str]:
        """What is wrong; empty when everything is right."""


_Case = TypeVar("_Case")
_Verdict = TypeVar("_Verdict", bound=Judged)


class DeviceLostError(DriverError):
    """The GPU can run nothing more in this process; later variants cannot be checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantResult:
    """What was found out about one variant."""

    variant: Variant
    """Which consumer."""
    cases: int
    """Launches checked."""
    elements: int
    """Output elements compared."""
    worst_ulp: int
    """Largest distance of a well-conditioned output element from the rounded fp64 result."""
    ulp_limit: int
    """What the contract allows."""
    relative_error: float
    """Largest relative error of a case over its typical rows."""
    ill_conditioned: int
    """Output elements over the limit, but within what fp32 arithmetic can reach."""
    problems: tuple[str, ...]
    """What is wrong, each with its case; empty when everything is right."""


def check_variant(
    variant: Variant, consumer: Consumer, banks: Banks, row_counts: Sequence[int], salt: int = 0
) -> VariantResult:
    """Checks one variant on all its cases.

    Raises:
      DeviceLostError: a launch hung or broke the device.
    """
    cases = cases_for(variant, row_counts, salt)
    verdicts, problems = check_cases(cases, lambda case: check_case(case, consumer, banks))
    return VariantResult(
        variant=variant,
        cases=len(verdicts),
        elements=sum(verdict.elements for verdict in verdicts),
        worst_ulp=max((verdict.worst_ulp for verdict in verdicts), default=0),
        ulp_limit=ulp_limit(variant),
        relative_error=max((verdict.relative_error or 0.0 for verdict in verdicts), default=0.0),
        ill_conditioned=sum(verdict.ill_conditioned for verdict in verdicts),
        problems=problems,
    )


def check_cases(cases: Iterable[_Case], check: Callable[[_Case], _Verdict]) -> tuple[list[_Verdict], tuple[str, ...]]:
    """Checks cases one after another; one that cannot be launched is a problem, and the next one is still checked.

    Args:
      cases: what to check; `str(case)` names it.
      check: launches and judges a case.

    Returns:
      The verdicts, and the problems of all cases, the first MAX_PROBLEMS of them in words.

    Raises:
      DeviceLostError: a launch hung or broke the device.
    """
    verdicts: list[_Verdict] = []
    problems: list[str] = []
    for case in cases:
        try:
            with naming_device_failures(str(case)):
                verdict = check(case)
        except DeviceLostError:
            raise
        except AttnResError as error:
            problems.append(f"{case}: {type(error).__name__}: {error}")
            continue
        verdicts.append(verdict)
        problems += [f"{case}: {problem}" for problem in verdict.problems]
    hidden = max(0, len(problems) - MAX_PROBLEMS)
    return verdicts, (*problems[:MAX_PROBLEMS], *([f"and {hidden} more"] if hidden else []))


def check_case(case: Case, consumer: Consumer, banks: Banks) -> Verdict:
    """Prepares, launches and judges one case.

    Raises:
      DeviceLostError: the launch hung or broke the device.
    """
    with naming_device_failures(str(case)):
        prepared = prepare(case, banks)
        consumer.launch(case, prepared.arena.views)
        wait(banks.device, str(case))
        return judge(prepared)


def check_variants(
    variants: Iterable[Variant],
    consumer: Consumer,
    banks: Banks,
    row_counts: Sequence[int],
) -> Iterator[VariantResult]:
    """Checks variants one after another; a lost device ends the run with a result that says so.

    Args:
      variants: which consumers.
      consumer: what launches them.
      banks: input values.
      row_counts: row counts of the cases.
    """
    for salt, variant in enumerate(variants):
        try:
            result = check_variant(variant, consumer, banks, row_counts, salt)
        except DeviceLostError as error:
            yield lost(variant, error)
            return
        yield result


def lost(variant: Variant, error: DeviceLostError) -> VariantResult:
    """Returns the result of a variant whose launch lost the device."""
    return VariantResult(
        variant=variant,
        cases=0,
        elements=0,
        worst_ulp=0,
        ulp_limit=ulp_limit(variant),
        relative_error=0.0,
        ill_conditioned=0,
        problems=(f"{error}; nothing after it can be checked in this process",),
    )


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

"""Decides which bundle serves a device: a pure choice over gathered candidates, with a trace of every reason.

The rules, in order (`docs/finding_bundles.md` has them with examples):

1. The first place with a bundle that fits decides; a place that the caller named is the only one.
2. A bundle fits when its manifest is readable and of this package's schema, its configuration is the one asked for
   (any, if none was), its arch runs on the device by `Arch.runs_on`, and the driver is new enough for its code.
3. Bundles of different configurations in the deciding place are an error: an arch must not select a model.
4. Of one configuration, the exact arch wins, then the closest by `Arch.distance`.
5. The bundle taken is then read in full. If that fails it is an error: no other bundle takes its place.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Literal

from attnres_aot.bundle.manifest import SCHEMA
from attnres_aot.bundle.reader import Bundle, read_bundle
from attnres_aot.bundle.shared_object import is_library, read_library
from attnres_aot.config.advice import build_command
from attnres_aot.errors import BundleError, UsageError, did_you_mean
from attnres_aot.runtime.find import driver_need
from attnres_aot.runtime.find.archs import arch_to_build, dotted, fitting_archs
from attnres_aot.runtime.find.places import ENVIRONMENT_VARIABLE, Candidate, Place, search_order
from attnres_aot.spec.arch import BUILDABLE, parse_arch
from attnres_aot.spec.toolkits import Cuda, parse_cuda

Status = Literal["accepted", "fits", "refused"]
"""`accepted`: the one to use; `fits`: would do, but another was preferred; `refused`: cannot be used."""


_SHOWN_PROBLEMS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a bundle must serve."""

    capability: tuple[int, int]
    """Compute capability of the device, (major, minor)."""
    name: str | None = None
    """Configuration name, or None for any."""
    driver: Cuda | None = None
    """CUDA version that the machine's driver serves, or None to leave it out of the choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one candidate, and why."""

    candidate: Candidate
    """The candidate."""
    status: Status
    """Accepted, fits or refused."""
    reason: str
    """Why, as a phrase."""
    driver_too_old: bool = False
    """It would fit beside a newer driver."""

    def __str__(self) -> str:
        reason = self.reason.replace("\n", "\n    ")
        origin = f" ({self.candidate.origin})" if self.candidate.origin else ""
        return f"{self.status:<8} {self.candidate.path}{origin}: {reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One place of the search, with a verdict per candidate."""

    place: Place
    """The place."""
    verdicts: tuple[Verdict, ...]
    """One per candidate, in the place's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """The outcome of a search: the choice and how it came about."""

    request: Request
    """What was asked."""
    chosen: Candidate | None
    """The bundle to use, or None."""
    trace: tuple[Visit, ...]
    """Every place visited, in order."""
    problem: str = ""
    """Why there is no choice; empty when there is one."""
    next_step: str = ""
    """What to do about it; empty when there is a choice."""

    def lines(self) -> list[str]:
        """Formats the trace, one line per place and, indented, per candidate."""
        lines = []
        for visit in self.trace:
            lines.append(f"{visit.place.label}: {visit.place.note or _count(visit.verdicts)}")
            lines += [f"  {verdict}" for verdict in visit.verdicts]
        return lines

    def error(self) -> BundleError:
        """Returns the error for a search without a choice: the problem, the trace and the next step."""
        trace = "".join(f"\n  {line}" for line in self.lines())
        return BundleError(f"{self.problem}; searched in this order:{trace}\nNext step: {self.next_step}")


def find_bundle(
    path: str | os.PathLike[str] | None,
    capability: tuple[int, int],
    *,
    name: str | None = None,
    driver: Cuda | None = None,
) -> Bundle:
    """Finds and reads the bundle that serves a device.

    Args:
      path: a bundle or a folder of bundles; None searches the environment variable, the installed packages and
        `./artifacts`.
      capability: compute capability of the device, (major, minor).
      name: configuration name, e.g. `kimi_k3`; None takes any, and fails if the deciding place has several.
      driver: CUDA version that the driver serves; None does not ask whether it is new enough.

    Raises:
      BundleError: nothing fits, several fit, or the one chosen is damaged; carries the whole trace.
    """
    resolution, bundle = locate(Request(capability=capability, name=name, driver=driver), search_order(path))
    if bundle is None:
        raise resolution.error()
    return bundle


def locate(request: Request, places: Iterable[Place]) -> tuple[Resolution, Bundle | None]:
    """Resolves a request and reads the chosen bundle in full; a choice that cannot be read becomes a refusal."""
    resolution = resolve(request, places)
    chosen = resolution.chosen
    if chosen is None:
        return resolution, None
    try:
        bundle = _read(chosen)
    except BundleError as error:
        return _refuse_chosen(resolution, chosen, str(error)), None
    return resolution, bundle


def resolve(request: Request, places: Iterable[Place]) -> Resolution:
    """Chooses a bundle, visiting places only as far as needed. Pure if `places` is.

    Args:
      request: what the bundle must serve.
      places: places in search order; a lazy iterable is not advanced beyond the deciding place.
    """
    trace: list[Visit] = []
    for place in places:
        verdicts = tuple(judge(request, candidate) for candidate in place.candidates)
        if any(verdict.status == "fits" for verdict in verdicts):
            return _choose(request, trace, place, verdicts)
        trace.append(Visit(place=place, verdicts=verdicts))
        if place.binding:
            break
    return Resolution(
        request=request,
        chosen=None,
        trace=tuple(trace),
        problem=f"No bundle {_asked(request)}",
        next_step=_driver_step(request, trace) or _build_step(request, trace),
    )


def judge(request: Request, candidate: Candidate) -> Verdict:
    """Judges one candidate by itself: `fits` or `refused`."""
    refusal = unusable(candidate)
    if not refusal and request.name is not None and candidate.name != request.name:
        hint = did_you_mean(request.name, [candidate.name])
        refusal = f"holds configuration {candidate.name!r}, asked for {request.name!r}{hint}"
    if refusal:
        return Verdict(candidate=candidate, status="refused", reason=refusal)
    arch = parse_arch(candidate.arch)
    if not arch.runs_on(request.capability):
        reason = f"built for {arch}, which runs on {arch.rule()}; the device is {dotted(request.capability)}"
        return Verdict(candidate=candidate, status="refused", reason=reason)
    too_old = driver_need.refusal(candidate.oldest_driver, request.driver)
    if too_old:
        return Verdict(candidate=candidate, status="refused", reason=too_old, driver_too_old=True)
    if arch.capability == request.capability:
        reason = f"{candidate.name} for {arch}, exactly the device's {dotted(request.capability)}"
    else:
        reason = f"{candidate.name} for {arch}, which runs on {arch.rule()}; the device is {dotted(request.capability)}"
    return Verdict(candidate=candidate, status="fits", reason=reason)


def unusable(candidate: Candidate) -> str:
    """Says why a candidate serves no device at all; empty if it may serve one."""
    if candidate.trouble:
        return candidate.trouble
    if type(candidate.schema) is not int or candidate.schema != SCHEMA:
        return f"manifest schema {candidate.schema!r}, but this attnres-aot reads schema {SCHEMA}"
    if parse_cuda(candidate.oldest_driver) is None:
        return f"the manifest's oldest driver {candidate.oldest_driver!r:.80} is not a CUDA version"
    if not candidate.name or not candidate.arch:
        return "the manifest names no " + ("configuration" if not candidate.name else "arch")
    try:
        parse_arch(candidate.arch)
    except UsageError as error:
        return f"the manifest's arch: {error}"
    return ""


def _choose(request: Request, trace: Sequence[Visit], place: Place, verdicts: Sequence[Verdict]) -> Resolution:
    """Chooses among the candidates of the deciding place, at least one of which fits."""
    fitting = [verdict.candidate for verdict in verdicts if verdict.status == "fits"]
    names = sorted({candidate.name for candidate in fitting})
    distances = {id(c): parse_arch(c.arch).distance(request.capability) for c in fitting}
    best = min(fitting, key=lambda candidate: distances[id(candidate)])
    equals = [c for c in fitting if distances[id(c)] == distances[id(best)] and not _same(c, best)]
    problem = next_step = ""
    if len(names) > 1:
        problem = f"Bundles of {len(names)} configurations fit compute capability {dotted(request.capability)}"
        picks = " or ".join(f"name={name!r}" for name in names)
        next_step = f"say which: pass {picks}, or the path of one bundle."
    elif equals:
        problem = f"Different bundles of {best.name!r} for the same arch {best.arch} fit, and nothing prefers one"
        next_step = f"pass the path of one, {best.path!r} or {equals[0].path!r}, or remove the other."
    if problem:
        visit = Visit(place=place, verdicts=tuple(verdicts))
        return Resolution(request=request, chosen=None, trace=(*trace, visit), problem=problem, next_step=next_step)
    visit = Visit(place=place, verdicts=tuple(_ranked(verdict, best) for verdict in verdicts))
    return Resolution(request=request, chosen=best, trace=(*trace, visit))


def _ranked(verdict: Verdict, best: Candidate) -> Verdict:
    candidate = verdict.candidate
    if verdict.status == "refused":
        return verdict
    if candidate is best:
        return replace(verdict, status="accepted")
    if _same(candidate, best) and candidate.arch == best.arch:
        return replace(verdict, reason=f"the same bundle as {best.path}")
    return replace(verdict, reason=f"{verdict.reason}; {best.arch} is closer")


def _same(one: Candidate, other: Candidate) -> bool:
    """Tells whether two candidates are one bundle: a manifest pins every other file by digest."""
    return one.real_path == other.real_path or one.manifest_sha256 == other.manifest_sha256


def _read(candidate: Candidate) -> Bundle:
    """Reads a bundle with every image file, so that damage shows now and not at some later launch."""
    bundle = _read_at(candidate)
    name, arch = bundle.manifest.name, bundle.manifest.arch.proven
    if (name, arch) != (candidate.name, candidate.arch):
        raise BundleError(
            f"the manifest changed during the search: {candidate.name!r} {candidate.arch} is now {name!r} {arch}"
        )
    if bundle.damage:
        raise BundleError("\n".join(islice(bundle.damage.values(), _SHOWN_PROBLEMS)))
    return bundle


def _read_at(candidate: Candidate) -> Bundle:
    """Reads a bundle folder, or the bundle for the candidate's arch in a shared object."""
    if not is_library(Path(candidate.path)):
        return read_bundle(candidate.path)
    inside = read_library(candidate.path)
    return next((bundle for bundle in inside if bundle.manifest.arch.proven == candidate.arch), inside[0])


def _refuse_chosen(resolution: Resolution, chosen: Candidate, reason: str) -> Resolution:
    *earlier, last = resolution.trace
    verdicts = tuple(
        replace(verdict, status="refused", reason=reason) if verdict.candidate is chosen else verdict
        for verdict in last.verdicts
    )
    command = build_command(chosen.arch, chosen.name, force=True)
    return replace(
        resolution,
        chosen=None,
        trace=(*earlier, replace(last, verdicts=verdicts)),
        problem=f"The bundle to use for compute capability {dotted(resolution.request.capability)} is damaged",
        next_step=f"copy it again from where it was built, or build it again with {command}.",
    )


def _asked(request: Request) -> str:
    wanted = f"of configuration {request.name!r} " if request.name is not None else ""
    return f"{wanted}runs on this device, compute capability {dotted(request.capability)}"


def _driver_step(request: Request, trace: Sequence[Visit]) -> str:
    refused = [verdict.candidate for visit in trace for verdict in visit.verdicts if verdict.driver_too_old]
    return driver_need.next_step(refused[0], request.driver) if refused and request.driver else ""


def _build_step(request: Request, trace: Sequence[Visit]) -> str:
    arch = arch_to_build(request.capability)
    if arch is None:
        oldest = [
            min(arch for arch in BUILDABLE if arch.major == major) for major in sorted({a.major for a in BUILDABLE})
        ]
        devices = "; ".join(arch.rule() for arch in oldest)
        return f"use another GPU: bundles can be built for {devices}."
    archs = " or ".join(map(str, fitting_archs(request.capability)))
    where = f"give its folder as the path, or in {ENVIRONMENT_VARIABLE}"
    if trace and trace[-1].place.binding:
        where += "; a place that was named is the only one searched"
    return f"{build_command(str(arch), request.name)} builds one ({archs} would do); then {where}."


def _count(verdicts: Sequence[Verdict]) -> str:
    return f"{len(verdicts)} candidate{'s' if len(verdicts) != 1 else ''}"

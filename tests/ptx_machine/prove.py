"""Checks every image of a configuration on the machine, for every arch.

    python tests/ptx_machine/prove.py [--config FILE] [--arch sm_90 ...] [--only PATTERN] [--schedules N]

Images of the first arch are run; those of the others are run only where their PTX differs in more than the name of the
arch. Each image gets rows of all input families in three memory layouts, through the variants with most and with least
outputs, again with approximate functions as far off as they may be, and N random schedules of one row, in which
mailboxes are published while they are polled.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import torch

from attnres_aot.config.reader import load_config
from attnres_aot.errors import AttnResError
from attnres_aot.plan.plan import Plan, plan
from attnres_aot.selftest.cases import Banks, cases_for, draw_banks
from attnres_aot.selftest.inputs import FAMILIES
from attnres_aot.selftest.suite import check_case, check_subject
from attnres_aot.spec.arch import parse_arch
from attnres_aot.spec.variants import ConsumerSpec, ImageSpec, Producer, Variant
from ptx_machine.images import CompiledImages, compile_ptx
from ptx_machine.program import PtxError, body_of, parse

EVERY_IMAGE = Path(__file__).parents[2] / "configs" / "kimi_k3_all.yaml"
"""The shipped configuration with everything turned on."""
ARCHES = ("sm_90", "sm_100", "sm_103", "sm_120")
SEED = 8
"""Of the input banks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was found out about one image."""

    launches: int
    """Launches judged."""
    elements: int
    """Output elements compared."""
    worst_ulp: int
    """Largest bf16 distance from the rounded fp64 result."""
    fp32_limited: int
    """Elements further off than the contract's ulps, but within what fp32 arithmetic can reach."""
    relative_error: float
    """Largest of a launch."""
    problems: tuple[str, ...]
    """What is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One image and how to launch it."""

    spec: ImageSpec
    """The image."""
    users: tuple[Variant | Producer, ...]
    """What is launched with it: the producer, or the variants with most and least outputs."""


def planned(arch: str, config: Path = EVERY_IMAGE) -> Plan:
    """The plan of a configuration."""
    return plan(load_config(config), parse_arch(arch))


def jobs(whole: Plan) -> Iterator[Job]:
    """Yields a job for every image of a plan."""

    def outputs(variant: Variant) -> tuple[bool, bool]:
        return (variant.key.write is not None, variant.aux)

    producers = {each.spec: each.producer for each in whole.producers}
    for spec in whole.images:
        if not isinstance(spec, ConsumerSpec):
            yield Job(spec=spec, users=(producers[spec],))
            continue
        users = [
            each.variant for each in whole.variants if any(choice.spec == spec for choice in each.choices)
        ]  # statistics: those with few blocks come first, so take the last of the best
        most = max(reversed(users), key=outputs)
        least = min(users, key=outputs)
        yield Job(spec=spec, users=(most,) if most == least else (most, least))


def check(
    job: Job,
    ptx: str,
    banks: Banks,
    row_counts: Sequence[int],
    salt: int = 0,
    *,
    schedules: int = 0,
    inexact: bool = False,
) -> Finding:
    """Launches one image on all its cases.

    Args:
      job: the image and how to launch it.
      ptx: its text.
      banks: input values.
      row_counts: rows of the launches.
      salt: moves the rows of the banks that are used.
      schedules: launches of one row in random order.
      inexact: launches once more with approximate functions as far off as they may be.
    """
    images = CompiledImages(programs={job.spec: parse(ptx)}, spec=job.spec)
    plain = [_check(user, images, banks, row_counts, salt + i) for i, user in enumerate(job.users)]
    if isinstance(job.spec, ConsumerSpec) and job.spec.slots:
        plain.append(_check(job.users[0], replace(images, early=True), banks, row_counts, salt + 3))
    random = [
        _check(
            job.users[0],
            replace(images, seed=seed, late=seed, early=seed % 2 == 1),
            banks,
            (1,),
            salt + 21 * seed,
            seed % 3,
        )
        for seed in range(schedules)
    ]
    everything = plain + random
    if inexact:
        everything.append(_check(job.users[0], replace(images, error_seed=salt), banks, row_counts, salt + 5))
    return Finding(
        launches=sum(each.launches for each in everything),
        elements=sum(each.elements for each in everything),
        worst_ulp=max(each.worst_ulp for each in everything),
        fp32_limited=sum(each.fp32_limited for each in everything),
        relative_error=max(each.relative_error for each in everything),
        problems=tuple(problem for each in everything for problem in each.problems),
    )


def _check(
    user: Variant | Producer,
    images: CompiledImages,
    banks: Banks,
    row_counts: Sequence[int],
    salt: int,
    only: int | None = None,
) -> Finding:
    if isinstance(user, Producer):
        try:
            result = check_subject(user, images, banks, row_counts, salt)
        except PtxError as error:
            return _failed(f"{user} {images.seed}: {error}")
        return Finding(
            launches=result.launches,
            elements=result.elements,
            worst_ulp=0,
            fp32_limited=0,
            relative_error=result.relative_error,
            problems=result.problems,
        )
    verdicts, problems = [], []
    for i, case in enumerate(cases_for(user, row_counts, salt)):
        if only is not None and i % 3 != only:
            continue
        try:
            verdicts.append(check_case(case, images, banks))
        except (PtxError, AttnResError) as error:
            problems.append(f"{case}, seed {images.seed}: {type(error).__name__}: {error}")
            continue
        problems += [f"{case}, seed {images.seed}: {problem}" for problem in verdicts[-1].problems]
    if not verdicts:
        return _failed(*problems)
    return Finding(
        launches=len(verdicts),
        elements=sum(verdict.elements for verdict in verdicts),
        worst_ulp=max(verdict.worst_ulp for verdict in verdicts),
        fp32_limited=sum(verdict.fp32_limited for verdict in verdicts),
        relative_error=max(verdict.relative_error or 0.0 for verdict in verdicts),
        problems=tuple(problems),
    )


def _failed(*problems: str) -> Finding:
    return Finding(launches=0, elements=0, worst_ulp=0, fp32_limited=0, relative_error=0.0, problems=problems)


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", action="append", help=f"default: {', '.join(ARCHES)}")
    parser.add_argument("--config", type=Path, default=EVERY_IMAGE, help="default: %(default)s")
    parser.add_argument("--only", default="*", help="pattern of image names")
    parser.add_argument("--rows", type=int, default=len(FAMILIES), help="rows of a launch (default: %(default)d)")
    parser.add_argument("--schedules", type=int, default=2, help="random schedules per image (default: %(default)d)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hidden = load_config(arguments.config).model.hidden_size
    banks = draw_banks(hidden, 64, SEED, torch.device("cpu"))
    known: dict[ImageSpec, set[str]] = {}
    findings: list[Finding] = []
    for arch in arguments.arch or ARCHES:
        work = [job for job in jobs(planned(arch, arguments.config)) if fnmatch.fnmatch(str(job.spec), arguments.only)]
        same = 0
        for salt, (job, ptx) in enumerate(zip(work, compile_ptx([job.spec for job in work], arch), strict=True)):
            if body_of(ptx) in known.setdefault(job.spec, set()):
                same += 1
                continue
            known[job.spec].add(body_of(ptx))
            start = time.perf_counter()
            finding = check(job, ptx, banks, (arguments.rows,), salt, schedules=arguments.schedules, inexact=True)
            findings.append(finding)
            print(
                f"{arch} {job.spec!s:<30} {finding.launches:>3} launches  worst {finding.worst_ulp} ulp  "
                f"relative error {finding.relative_error:.3e}  fp32-limited {finding.fp32_limited:>5}  "
                f"{time.perf_counter() - start:5.1f} s  {'FAILED' if finding.problems else 'ok'}",
                *finding.problems, sep="\n    ", flush=True,
            )  # fmt: skip
        print(f"{arch}: {len(work)} images, {same} of them the same PTX as before but for the arch's name", flush=True)
    failed = sum(bool(finding.problems) for finding in findings)
    print(
        f"{len(findings)} images run, {sum(finding.launches for finding in findings)} launches, "
        f"{sum(finding.elements for finding in findings)} elements, worst "
        f"{max(finding.worst_ulp for finding in findings)} ulp; {failed} FAILED"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""`attnres-aot build`: a configuration into one bundle per GPU architecture."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from attnres_aot.builder.builder import BuildRequest, Preview, build, preview, refused_report
from attnres_aot.builder.inventory import Source
from attnres_aot.builder.keys import BuildFacts, gather_facts
from attnres_aot.builder.pool import PoolSettings
from attnres_aot.builder.progress import Progress, choose_progress
from attnres_aot.builder.quotas import usable_cores, usable_memory
from attnres_aot.builder.report import BuildReport
from attnres_aot.builder.unfailing import UnfailingProgress
from attnres_aot.bundle.manifest import to_json
from attnres_aot.cli.library_options import LibraryOptions, library_options
from attnres_aot.cli.options import Number, arch_option, config_option, json_option, selection_options
from attnres_aot.cli.streams import Teller, tell
from attnres_aot.cli.wording import count, error_text, megabytes
from attnres_aot.config.reader import load_config
from attnres_aot.errors import AttnResError
from attnres_aot.launcher.fat import make_fat
from attnres_aot.plan.plan import Selection, plan
from attnres_aot.spec.arch import Arch
from attnres_aot.spec.toolkits import DEFAULT_FLAVOUR, FLAVOURS

MOST_JOBS = 16
"""Compiler processes that are started unless more are asked for."""
JOB_BYTES = 400_000_000
"""Memory that a compiler process is counted with; they take about 300 MB."""


@click.command("build")
@arch_option
@config_option
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("artifacts"),
    metavar="DIR",
    help="Folder for bundles; each becomes DIR/NAME-ARCH. artifacts when left out.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Compiler processes at a time; when left out, as many as the cores and the memory that may be used are enough "
    f"for, at most {MOST_JOBS}. A container's limits count.",
)
@click.option(
    "--force", is_flag=True, help="Compile everything again, and replace what is there though something is lost."
)
@click.option("--keep-going", is_flag=True, help="After a failure go on, and list all failures at the end.")
@click.option("--dry-run", is_flag=True, help="Show what would be compiled and why; change nothing.")
@click.option(
    "--time-limit",
    type=Number(min=0, min_open=True),
    default=PoolSettings(workers=1).job_seconds,
    show_default=True,
    metavar="SECONDS",
    help="Longest that one image may take to compile; inf for no limit.",
)
@click.option(
    "--flavour",
    type=click.Choice(list(FLAVOURS)),
    default=DEFAULT_FLAVOUR,
    show_default=True,
    help="Which of the compiler's libraries compiles, by the CUDA version of its assembler; code of cu13 needs a "
    "driver for CUDA 13.0 or later.",
)
@library_options
@selection_options
@json_option
def command(
    archs: tuple[Arch, ...],
    config_path: Path,
    selection: Selection,
    libraries: LibraryOptions,
    *,
    dry_run: bool,
    as_json: bool,
    flavour: str,
    **options: Any,
) -> int:
    """Compile a configuration into one bundle per GPU architecture, and prove what was compiled.

    Needs no GPU. What an earlier build has left is used: unchanged images of an existing bundle, and finished images
    of a build that was interrupted. A bundle is replaced in one step, once its images are all there and proven.
    With --tp, --dcp or --only the bundle holds that part alone; it replaces none that holds more, unless forced.
    With --format so the bundle also holds a shared object of the same images, for C++, Rust, JAX and others.
    """
    libraries.check(archs)
    hosts = () if libraries.fat else libraries.hosts
    requests = _requests(archs, config_path, selection, hosts=hosts, **options)
    facts = gather_facts(flavour)
    if dry_run:
        return _show_previews(requests, facts, as_json=as_json)
    signal.signal(signal.SIGTERM, _interrupt)
    reports: list[BuildReport] = []
    fat: list[str] = []
    progress = UnfailingProgress(choose_progress())
    teller = Teller()
    try:
        for request in requests:
            report = _build(request, facts, progress)
            reports.append(report)
            _show(report, None if as_json else teller)
            if not report.done and not request.keep_going:
                break
        if libraries.fat and len(reports) == len(requests) and all(report.done for report in reports):
            for path in make_fat([request.path for request in requests], libraries.hosts, requests[0].out):
                fat.append(str(path))
                if not as_json:
                    teller.say(f"{path}: {', '.join(map(str, archs))}, {megabytes(path.stat().st_size)}")
    finally:  # also after Ctrl-C: what is built is told
        if as_json:
            shown = {"bundles": [to_json(report) for report in reports], **({"fat": fat} if libraries.fat else {})}
            teller.say(json.dumps(shown, indent=1))
        teller.close()
    return 0 if all(report.done for report in reports) else 1


def _build(request: BuildRequest, facts: BuildFacts, progress: Progress) -> BuildReport:
    """Builds one bundle; a refusal becomes a report, so that it takes neither those before nor those after with it."""
    try:
        return build(request, facts, progress)
    except AttnResError as error:
        return refused_report(request, str(error))


def _requests(
    archs: Sequence[Arch],
    config_path: Path,
    selection: Selection,
    *,
    hosts: tuple[str, ...],
    out: Path,
    jobs: int | None,
    force: bool,
    keep_going: bool,
    time_limit: float,
) -> list[BuildRequest]:
    config = load_config(config_path)
    workers = jobs or default_jobs()
    return [
        BuildRequest(
            plan=plan(config, arch, selection=selection),
            out=out,
            pool=PoolSettings(workers=workers, job_seconds=time_limit),
            force=force,
            keep_going=keep_going,
            hosts=hosts,
        )
        for arch in archs
    ]


def default_jobs() -> int:
    """Returns how many compiler processes this machine, or its container, has cores and memory for; at least 1."""
    return max(1, min(usable_cores(), usable_memory() // JOB_BYTES, MOST_JOBS))


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Treats the end of a CI job (SIGTERM) like Ctrl-C: workers are killed, finished images stay."""
    del number, frame
    raise KeyboardInterrupt


def _show(report: BuildReport, teller: Teller | None) -> None:
    """Shows what was done through `teller`, if there is one, and what went wrong on standard error."""
    for warning in report.warnings:
        tell(f"warning: {warning}")
    if report.reason:
        tell(error_text(report.reason))
    elif report.failures:
        kept = "What did compile is kept for the next build; no" if report.compiled else "No"
        tell(
            f"{report.path}: {count(len(report.failures), 'image')} of {report.images} failed:\n"
            + "".join(f"  {failure}\n" for failure in report.failures)
            + f"{kept} bundle was written."
        )
    elif teller is None:
        return
    elif report.status == "unchanged":
        teller.say(
            f"{report.path}: unchanged ({count(report.images, 'image')}, {megabytes(report.size_bytes)}, "
            f"checked in {report.wall_seconds:.2f} s)"
        )
    else:
        teller.say(
            f"{report.path}: {count(report.variants, 'variant')}, {count(report.producers, 'producer')}, "
            f"{count(report.images, 'image')}, {megabytes(report.size_bytes)}\n"
            f"  {len(report.compiled)} compiled, {len(report.reused)} reused, in {report.wall_seconds:.1f} s with "
            f"{count(report.jobs, 'job')}; peak memory {megabytes(report.peak_memory_bytes)}\n"
            f"  the images' own compile times add up to {report.compile_seconds:.1f} s"
        )


def _show_previews(requests: Sequence[BuildRequest], facts: BuildFacts, *, as_json: bool) -> int:
    previews: list[tuple[BuildRequest, Preview]] = []
    refused: list[BuildReport] = []
    for request in requests:
        try:
            previews.append((request, preview(request, facts)))
        except AttnResError as error:
            refused.append(refused_report(request, str(error)))
            tell(error_text(str(error)))
            if not request.keep_going:
                break
    if as_json:
        shown = [_preview_json(*each) for each in previews]
        shown += [{"path": each.path, "arch": each.arch, "refused": each.reason} for each in refused]
        click.echo(json.dumps({"bundles": shown}, indent=1))
        return 1 if refused else 0
    for request, seen in previews:
        missing = [step for step in seen.steps if step.source is Source.COMPILER]
        reused = len(seen.steps) - len(missing)
        what = "nothing to do" if seen.unchanged else f"{count(len(missing), 'image')} to compile, {reused} to reuse"
        click.echo(f"{request.path}: {what}")
        for reason in dict.fromkeys(step.reason for step in missing):
            names = [step.wanted.name for step in missing if step.reason == reason]
            click.echo(f"  compile {count(len(names), 'image')}: {reason}")
            for name in names:
                click.echo(f"    {name}")
        for source in (Source.BUNDLE, Source.STORE):
            found = sum(step.source is source for step in seen.steps)
            if found:
                click.echo(f"  reuse {count(found, 'image')} of {source.value}")
    return 1 if refused else 0


def _preview_json(request: BuildRequest, seen: Preview) -> dict[str, Any]:
    return {
        "path": str(request.path),
        "arch": str(request.plan.arch),
        "unchanged": seen.unchanged,
        "images": [
            {
                "name": step.wanted.name,
                "action": "compile" if step.source is Source.COMPILER else "reuse",
                "source": step.source.name.lower(),
                "reason": step.reason,
                "build_key": step.wanted.key,
            }
            for step in seen.steps
        ],
    }

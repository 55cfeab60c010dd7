"""The command `attnres-aot bench`: measures a bundle on this machine's GPU.

Needs torch and this package, nothing else, so that it runs in a deployment image.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from attnres_aot.bench import show
from attnres_aot.bench.clock import QUICK, STANDARD, Effort, graph_time_us, host_times_us
from attnres_aot.bench.cold_start import measure_cold_start
from attnres_aot.bench.compare import compare, comparison_json
from attnres_aot.bench.gpu import GpuFacts, gpu_facts
from attnres_aot.bench.host import measure_host
from attnres_aot.bench.measure import measure_gpu
from attnres_aot.bench.points import MAX_ROWS, QUICK_ROWS, Selection
from attnres_aot.bench.results import COLD, WARM, Report, Setting, numbers, read_report, report_json, write_atomically
from attnres_aot.bench.rig import Rig
from attnres_aot.bench.soak import CudaMachine, soak
from attnres_aot.errors import UsageError
from attnres_aot.runtime.api import load
from attnres_aot.runtime.find.loaded import LoadedBundle
from attnres_aot.runtime.launch.pdl import EARLY, Pdl
from attnres_aot.spec.row_counts import parse_rows

PARTS = ("gpu", "host", "cold-start")
"""What a run measures unless told otherwise."""
_MODES: dict[str, tuple[Pdl, ...]] = {"on": (True,), "early": (EARLY,), "off": (False,), "all": (True, EARLY, False)}
_L2 = {WARM: (False,), COLD: (True,), "both": (False, True)}
_MAX_SOAK = 10**9

Echo = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a run is asked for."""

    bundle: str | None
    """A bundle or a folder of bundles; None searches as `attnres_aot.load` does."""
    device: str | None
    """CUDA device; None is torch's current one."""
    parts: tuple[str, ...]
    """Which of PARTS."""
    selection: Selection
    """Points of the GPU part."""
    effort: Effort
    """Launches, replays, rounds."""
    processes: int
    """Processes of the cold-start part."""
    soak: int
    """Launches of a soak; 0: none."""
    soak_seconds: float
    """Time limit of the soak."""
    save: Path | None
    """Where the result is written as JSON."""
    compare: tuple[Path, ...]
    """Saved results to compare with."""
    threshold: float
    """By how much a ratio may exceed 1."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("bundle", nargs="?", help="bundle or folder of bundles (default: search like load() does)")
    parser.add_argument("--device", help="CUDA device, e.g. cuda:1 (default: the current one)")
    parser.add_argument(
        "--part",
        action="append",
        choices=(*PARTS, "none"),
        help="measure only this; may be repeated; 'none' leaves just the soak (default: all)",
    )
    parser.add_argument(
        "--variants",
        action="append",
        default=[],
        metavar="GLOB",
        help="GPU time of the variants whose whole names match, e.g. 'nb8-*'; may be repeated (default: a few that "
        "stand for the model)",
    )
    parser.add_argument("--rows", help=f"row counts, 1 to {MAX_ROWS}, e.g. 1,16,64 (default: 1 to 64)")
    parser.add_argument(
        "--pdl",
        choices=tuple(_MODES),
        default="all",
        help="launch modes; early is one of its own for mailboxes only (default: %(default)s)",
    )
    parser.add_argument(
        "--l2",
        choices=tuple(_L2),
        default="both",
        help="warm: every launch on the same memory; cold: on memory that the L2 no longer holds (default: both)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="few row counts and repeats, PDL on and warm L2 only unless asked for"
    )
    parser.add_argument("--soak", type=int, default=0, metavar="N", help="also launch N times from 8 threads")
    parser.add_argument(
        "--soak-seconds",
        type=float,
        default=120.0,
        metavar="S",
        help="time limit of the soak; fewer launches within it are a failure (default: %(default)g)",
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the result to FILE, as JSON")
    parser.add_argument(
        "--compare",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="show ratios to a result saved before; may be repeated",
    )
    parser.add_argument("--load", type=Path, metavar="FILE", help="measure nothing: compare the result saved in FILE")
    parser.add_argument(
        "--threshold", type=float, default=5.0, metavar="PERCENT", help="what counts as slower (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON only")


def run(args: argparse.Namespace) -> int:
    """Runs the command: 1 if the soak found a problem or a compared number has become slower, else 0."""
    request = read_request(args)
    echo: Echo = _silent if args.json else args.echo
    old = {str(path): numbers(read_report(path), str(path)) for path in request.compare}
    if args.load is not None:
        result = read_report(args.load)
    else:
        result = report_json(measure(load(request.bundle, request.device), request, echo))
        if request.save is not None:
            write_atomically(request.save, json.dumps(result, indent=1) + "\n")
    new = numbers(result, str(args.load or "this run"))
    found = {name: compare(new, then, request.threshold) for name, then in old.items()}
    for name, comparison in found.items():
        _show(echo, show.comparison_lines(comparison, name, request.threshold))
    if args.json:
        comparisons = {name: comparison_json(comparison) for name, comparison in found.items()}
        args.echo(json.dumps({**result, "comparisons": comparisons}, indent=1))
    slower = any(comparison.slower for comparison in found.values())
    return 1 if slower or (result.get("soak") or {}).get("problems") else 0


def read_request(args: argparse.Namespace) -> Request:
    """Turns parsed arguments into a request.

    Raises:
      UsageError: an argument is out of range.
    """
    if not 0 <= args.soak <= _MAX_SOAK:
        raise UsageError(f"--soak {args.soak}: a number of launches from 0 to {_MAX_SOAK} is wanted")
    if not 0 < args.soak_seconds <= _MAX_SOAK:
        raise UsageError(f"--soak-seconds {args.soak_seconds:g}: a time above 0 is wanted, at most {_MAX_SOAK} s")
    if not 0 <= args.threshold <= 1000:
        raise UsageError(f"--threshold {args.threshold:g}: percent from 0 to 1000 are wanted")
    if args.load is not None and not args.compare:
        raise UsageError("--load measures nothing, so there must be something to compare with: add --compare FILE")
    pdl, l2 = ("on", WARM) if args.quick and (args.pdl, args.l2) == ("all", "both") else (args.pdl, args.l2)
    rows = parse_rows(args.rows, MAX_ROWS) if args.rows is not None else QUICK_ROWS if args.quick else ()
    parts = tuple(part for part in PARTS if args.part is None or part in args.part)
    return Request(
        bundle=args.bundle,
        device=args.device,
        parts=parts,
        selection=Selection(globs=tuple(args.variants), rows=rows, pdl=_MODES[pdl], cold=_L2[l2]),
        effort=QUICK if args.quick else STANDARD,
        processes=1 if args.quick else 3,
        soak=args.soak,
        soak_seconds=args.soak_seconds,
        save=args.save,
        compare=tuple(args.compare),
        threshold=args.threshold / 100,
    )


def measure(loaded: LoadedBundle, request: Request, echo: Echo) -> Report:
    """Measures everything that a request asks for."""
    device, facts = loaded.device.device, gpu_facts(loaded.device.device)
    report = Report(setting=describe(loaded, facts, request.effort))
    echo(show.setting_line(report.setting))
    rig = Rig(loaded, partial(graph_time_us, effort=request.effort, device=device), facts.l2_bytes)
    if "gpu" in request.parts:
        context, timings = measure_gpu(rig, request.selection, echo)
        report = replace(report, context=context, timings=timings)
    if "host" in request.parts:
        host = measure_host(rig, partial(host_times_us, effort=request.effort, device=device))
        report = replace(report, host=host)
    if request.soak:
        report = replace(report, soak=soak(rig, CudaMachine(device), request.soak, request.soak_seconds, echo))
    if "cold-start" in request.parts:
        torch.cuda.empty_cache()
        cold = measure_cold_start(loaded.bundle.path, str(device), request.processes)
        report = replace(report, cold_start=cold)
    _show(echo, show.report_lines(report))
    return report


def describe(loaded: LoadedBundle, facts: GpuFacts, effort: Effort) -> Setting:
    """Gathers what a report says about the circumstances of a run."""
    manifest = loaded.bundle.manifest
    return Setting(
        bundle=f"{manifest.name}-{manifest.arch.requested}",
        manifest_sha256=loaded.bundle.manifest_sha256,
        gpu=facts.name,
        driver=facts.driver,
        torch=facts.torch,
        date=dt.datetime.now(dt.timezone.utc).date().isoformat(),
        launches=effort.launches,
        replays=effort.replays,
    )


def _show(echo: Echo, lines: list[str]) -> None:
    for line in lines:
        echo(line)


def _silent(_: str) -> None:
    """Prints nothing: with --json, stdout is for JSON only."""

"""What `attnres-aot bench` does: measures a bundle on this machine's GPU.

Needs torch and this package, nothing else, so that it runs in a deployment image.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from attnres_aot.bench import show
from attnres_aot.bench.clock import Effort, graph_time_us, host_times_us
from attnres_aot.bench.cold_start import measure_cold_start
from attnres_aot.bench.compare import compare, comparison_json
from attnres_aot.bench.gpu import GpuFacts, gpu_facts
from attnres_aot.bench.host import measure_host
from attnres_aot.bench.measure import measure_gpu
from attnres_aot.bench.points import Selection
from attnres_aot.bench.results import COLD, WARM, Report, Setting, numbers, read_report, report_json, write_atomically
from attnres_aot.bench.rig import Rig
from attnres_aot.bench.soak import CudaMachine, soak
from attnres_aot.runtime.api import load
from attnres_aot.runtime.find.loaded import LoadedBundle
from attnres_aot.runtime.launch.pdl import EARLY, Pdl

PARTS = ("gpu", "host", "cold-start")
"""What a run measures unless told otherwise."""
MODES: dict[str, tuple[Pdl, ...]] = {"on": (True,), "early": (EARLY,), "off": (False,), "all": (True, EARLY, False)}
"""Launch modes by the name of what is measured."""
L2 = {WARM: (False,), COLD: (True,), "both": (False, True)}
"""Whether the memory is cold, by the name of what is measured."""

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
    load: Path | None
    """A saved result to compare, in place of measuring."""
    compare: tuple[Path, ...]
    """Saved results to compare with."""
    threshold: float
    """By how much a ratio may exceed 1."""


def run(request: Request, echo: Echo, *, as_json: bool) -> int:
    """Measures, shows and compares: 1 if the soak found a problem or a compared number has become slower, else 0."""
    say: Echo = (lambda _: None) if as_json else echo
    old = {str(path): numbers(read_report(path), str(path)) for path in request.compare}
    if request.load is not None:
        result = read_report(request.load)
    else:
        result = report_json(measure(load(request.bundle, request.device), request, say))
        if request.save is not None:
            write_atomically(request.save, json.dumps(result, indent=1) + "\n")
    new = numbers(result, str(request.load or "this run"))
    found = {name: compare(new, then, request.threshold) for name, then in old.items()}
    for name, comparison in found.items():
        _show(say, show.comparison_lines(comparison, name, request.threshold))
    if as_json:
        comparisons = {name: comparison_json(comparison) for name, comparison in found.items()}
        echo(json.dumps({**result, "comparisons": comparisons}, indent=1))
    slower = any(comparison.slower for comparison in found.values())
    return 1 if slower or (result.get("soak") or {}).get("problems") else 0


def measure(loaded: LoadedBundle, request: Request, echo: Echo) -> Report:
    """Measures everything that a request asks for."""
    device, facts = loaded.device.device, gpu_facts(loaded.device.device)
    report = Report(setting=describe(loaded, facts, request.effort))
    echo(show.setting_line(report.setting))
    rig = make_rig(loaded, facts, request.effort)
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


def make_rig(loaded: LoadedBundle, facts: GpuFacts, effort: Effort) -> Rig:
    """Returns the rig for a bundle on its GPU."""
    return Rig(loaded, partial(graph_time_us, effort=effort, device=loaded.device.device), facts.l2_bytes)


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

"""What `attnres-aot tune` does: measures where precomputed statistics and launch shapes pay, and writes the tables.

Needs torch and this package; with PyYAML, what it writes is read back and checked before it replaces anything.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from attnres_aot.bench.clock import Effort
from attnres_aot.bench.command import describe, make_rig
from attnres_aot.bench.gpu import gpu_facts
from attnres_aot.bench.results import write_atomically
from attnres_aot.bench.rig import Rig
from attnres_aot.bundle.manifest import to_json
from attnres_aot.config import shipped
from attnres_aot.config.source import MAX_BYTES, read_source
from attnres_aot.errors import UsageError
from attnres_aot.runtime.api import load
from attnres_aot.runtime.find.loaded import LoadedBundle
from attnres_aot.tune import show
from attnres_aot.tune.decide import RULES, Cell, Decision, decide
from attnres_aot.tune.measure import check_bundle, deployments, measure_cell
from attnres_aot.tune.shapes import ShapeTimes, best_choices, time_shapes, variants_with_choice
from attnres_aot.tune.yaml_tables import replace_deployments

Echo = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a run is asked for."""

    bundle: str | None
    """A bundle or a folder of bundles; None searches as `attnres_aot.load` does."""
    device: str | None
    """CUDA device; None is torch's current one."""
    rows: tuple[int, ...]
    """Row counts that are measured, ascending."""
    rule: str
    """What decides: a key of RULES."""
    margin: float
    """By how much statistics must win, as a share."""
    pdl: bool
    """Launch with programmatic stream serialization."""
    effort: Effort
    """Launches and replays."""
    config: Path | None
    """The configuration whose tables are replaced; None for the one that ships under the bundle's name."""
    out: Path | None
    """Where the new configuration is written; None: nowhere."""
    save: Path | None
    """Where every measured time is written, as JSON; None: nowhere."""


def run(request: Request, show_line: Echo, *, as_json: bool) -> int:
    """Measures, decides, shows, and writes what was asked for.

    Raises:
      UsageError: more rows than the bundle's mailboxes hold, or there is no configuration to put tables into.
    """
    loaded = load(request.bundle, request.device)
    config = _checked_config(request, loaded)
    text = None if request.out is None else read_config_text(config)
    echo: Echo = (lambda _: None) if as_json else show_line
    facts = gpu_facts(loaded.device.device)
    setting = describe(loaded, facts, request.effort)
    serves = deployments(loaded)
    rig = make_rig(loaded, facts, request.effort)
    cells = measure_statistics(rig, request, echo)
    by_rule = {
        rule: {pair: decide(cells, slots, rule, request.margin) for pair, slots in serves.items()} for rule in RULES
    }
    decisions = by_rule[request.rule]
    for line in show.decision_lines(by_rule, request.rule, request.margin):
        echo(line)
    shapes = measure_shapes(rig, request, echo)
    if text is not None and request.out is not None:
        comment = show.comment_lines(cells, decisions, setting, request.rule, request.margin, pdl=request.pdl)
        written = replace_deployments(text, decisions, comment, str(config))
        checked = check_config(text, written, decisions, str(config))
        write_atomically(request.out, written)
        echo(f"\nwrote {request.out}" + ("" if checked else "; not read back, as PyYAML is not installed here"))
    data = json.dumps(to_data(cells, by_rule, shapes, setting, request), indent=1)
    if request.save is not None:
        write_atomically(request.save, data + "\n")
    if as_json:
        show_line(data)
    return 0


def _checked_config(request: Request, loaded: LoadedBundle) -> Path:
    """Returns the configuration whose tables are replaced; it must be there if it is to be written anew."""
    manifest = loaded.bundle.manifest
    if request.rows[-1] > manifest.mailbox.capacity:
        raise UsageError(
            f"--rows {','.join(map(str, request.rows))}: the bundle's mailboxes hold {manifest.mailbox.capacity} rows; "
            "ask for at most that"
        )
    config = request.config or shipped.FOLDER / f"{manifest.name}.yaml"
    if request.out is not None and not os.path.lexists(config):
        raise UsageError(
            f"{config}: there is no such configuration; name the one that the bundle was built from with --config"
        )
    return config


def measure_statistics(rig: Rig, request: Request, echo: Echo) -> list[Cell]:
    """Measures every number of saved blocks with every source, and shows the times.

    Raises:
      BundleError: the bundle lacks variants or the statistics kernel.
    """
    model = rig.loaded.bundle.manifest.model
    every_nb = range(1, -(-model.layers // model.block_size) + 1)
    sources = (0, *rig.loaded.bundle.manifest.mailbox.slots)
    check_bundle(rig.loaded, every_nb, sources)
    echo(show.PROGRESS_HEAD)
    cells: list[Cell] = []
    for slots in sources:
        for nb in every_nb:
            found = [measure_cell(rig, nb, slots, rows, pdl=request.pdl) for rows in request.rows]
            echo(show.progress_line(found))
            cells += found
    for line in show.cell_tables(cells, request.rule):
        echo(line)
    return cells


def measure_shapes(rig: Rig, request: Request, echo: Echo) -> list[list[ShapeTimes]]:
    """Times every image of the variants that have several, and shows which is best where."""
    variants = variants_with_choice(rig.loaded)
    if not variants:
        echo("\nLaunch shapes: the bundle has one image per variant, so there is none to choose")
    found = []
    for variant in variants:
        found.append(time_shapes(rig, variant, request.rows, pdl=request.pdl))
        for line in show.shape_lines(found[-1]):
            echo(line)
    return found


def read_config_text(path: Path) -> str:
    """Reads a configuration file as text.

    Raises:
      ConfigError: it cannot be read.
      UsageError: it is too large, or not text.
    """
    data = read_source(path)
    if len(data) > MAX_BYTES:
        raise UsageError(f"{path}: larger than {MAX_BYTES} bytes, the most that a configuration may have")
    try:
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error


def check_config(old: str, new: str, decisions: dict[tuple[int, int], Decision], where: str) -> bool:
    """Reads a rewritten configuration back and compares it with what it should hold; False without PyYAML.

    Raises:
      ConfigError: it does not parse.
      UsageError: the configuration serves other deployments than the bundle, or differs elsewhere.
    """
    if importlib.util.find_spec("yaml") is None:
        return False
    from attnres_aot.config.reader import parse_config

    before, after = parse_config(old.encode(), where), parse_config(new.encode(), f"{where} with measured tables")
    pairs = tuple(deployment.pair for deployment in before.deployments)
    if pairs != tuple(sorted(decisions)):
        raise UsageError(
            f"{where} has (tp, dcp) {', '.join(map(str, pairs))}, but the bundle serves "
            f"{', '.join(map(str, sorted(decisions)))}; tune a bundle of the whole configuration"
        )
    tables = {d.pair: (str(d.attn_stats), str(d.attn_stats_blocks)) for d in after.deployments}
    wanted = {pair: (found.attn_stats, found.attn_stats_blocks) for pair, found in decisions.items()}
    if tables != wanted or replace(after, deployments=before.deployments) != before:
        raise UsageError(f"{where}: its layout cannot be rewritten safely; put the tables shown above into it by hand")
    return True


def to_data(
    cells: list[Cell],
    by_rule: dict[str, dict[tuple[int, int], Decision]],
    shapes: list[list[ShapeTimes]],
    setting: object,
    request: Request,
) -> dict[str, object]:
    """Returns everything as plain JSON data."""
    return {
        "setting": to_json(setting),
        "rule": request.rule,
        "margin": request.margin,
        "pdl": request.pdl,
        "cells": [to_json(cell) for cell in cells],
        "tables": {
            rule: [{"tp": tp, "dcp": dcp, **to_json(found)} for (tp, dcp), found in sorted(decisions.items())]
            for rule, decisions in by_rule.items()
        },
        "shapes": [
            {"variant": times[0].variant, "us": {shape.image: shape.us for shape in times},
             "best": [to_json(choice) for choice in best_choices(times)]}
            for times in shapes
        ],
    }  # fmt: skip

"""What `tune` shows and writes as comments: measured times, decisions, launch shapes. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from attnres_aot.bench.results import Setting
from attnres_aot.columns import table
from attnres_aot.tune.decide import READY, RULES, Cell, Decision
from attnres_aot.tune.shapes import ShapeTimes, best_choices

_COMMENT_WIDTH = 116


def columns(rule: str) -> str:
    """Says what the numbers of a cell are under a rule."""
    return "without | with" if rule == READY else "without | with statistics | with statistics that were there before"


def cell_tables(cells: Sequence[Cell], rule: str) -> list[str]:
    """Shows what a rule compares: a table per source, a line per number of saved blocks."""
    lines: list[str] = []
    for slots in dict.fromkeys(cell.slots for cell in cells):
        mine = [cell for cell in cells if cell.slots == slots]
        rows = sorted({cell.rows for cell in mine})
        lines += ["", f"{source_name(slots)}, us: {columns(rule)}"]
        shown = [("rows", *map(str, rows))]
        for nb in sorted({cell.nb for cell in mine}):
            found = {cell.rows: _numbers(cell, rule) for cell in mine if cell.nb == nb}
            shown.append((f"nb {nb}", *(found.get(count, "") for count in rows)))
        lines += table(shown)
    return lines


PROGRESS_HEAD = (
    "Measured, us: plain | with statistics that are there | statistics kernel + plain | statistics kernel + "
    "consumer of its results"
)
"""Says what the numbers of `progress_line` are."""


def progress_line(cells: Sequence[Cell]) -> str:
    """Shows all times of one consumer and source, a group per row count."""
    groups = (
        f"{cell.rows}: {cell.plain_us:.2f}|{cell.ready_us:.2f}|{cell.beside_us:.2f}|{cell.chain_us:.2f}"
        for cell in cells
    )
    return f"nb {cells[0].nb}, {source_name(cells[0].slots)}, by rows  " + "  ".join(groups)


def source_name(slots: int) -> str:
    """Names a source."""
    return f"mailbox of {slots} slot{'s' * (slots != 1)}, less the copy into it" if slots else "ordinary source"


def decision_lines(
    by_rule: Mapping[str, Mapping[tuple[int, int], Decision]], decisive: str, margin: float
) -> list[str]:
    """Shows where statistics are turned on under each rule, the decisive one last."""
    lines = ["", f"Statistics are on where they win by more than {margin:.0%} with every source of a deployment."]
    for rule in sorted(by_rule, key=lambda rule: rule == decisive):
        lines += ["", f"Rule '{rule}'{' (decides)' if rule == decisive else ''}: {RULES[rule]}"]
        for (tp, dcp), found in sorted(by_rule[rule].items()):
            worst = f"; worst ratio there {found.worst:.3f}" if found.worst else "; nowhere"
            lines.append(
                f"  tp {tp}, dcp {dcp}: attn_stats {found.attn_stats!r}, attn_stats_blocks "
                f"{found.attn_stats_blocks!r}{worst}"
            )
    return lines


def shape_lines(times: Sequence[ShapeTimes]) -> list[str]:
    """Shows the images of one variant, and which is best where."""
    rows = sorted(times[0].us)
    shown = [("rows", *map(str, rows)), *((each.image, *(f"{each.us[n]:.2f}" for n in rows)) for each in times)]
    best = ", ".join(
        f"{choice.image} {'beyond' if choice.max_rows is None else f'up to {choice.max_rows} rows'}"
        for choice in best_choices(times)
    )
    return ["", f"{times[0].variant}, us per launch by image", *table(shown), f"best: {best}"]


def comment_lines(
    cells: Sequence[Cell],
    decisions: Mapping[tuple[int, int], Decision],
    setting: Setting,
    rule: str,
    margin: float,
    *,
    pdl: bool,
) -> list[str]:
    """Returns the comment that goes above measured tables: what was measured, where, when, and all the numbers."""
    where = (
        f"Measured by 'attnres-aot tune' on one {setting.gpu}, driver {setting.driver}, {setting.date}: torch "
        f"{setting.torch}; {setting.bundle}, manifest sha256 {setting.manifest_sha256[:16]}; PDL "
        f"{'on' if pdl else 'off'}, warm L2, CUDA graph of {setting.launches} launches, median of {setting.replays} "
        "replays."
    )
    how = (
        f"Statistics are on where they win by more than {margin:.0%} with every source of a deployment. Compared: "
        f"{RULES[rule]}." + ("" if any(found.worst for found in decisions.values()) else " They win nowhere.")
    )
    paragraphs = (
        "Batch tables: lo[-hi]:value,... where 1 is on and 0 is off; what is not mentioned is off.",
        where,
        how,
        f"Row counts between two measured ones are on only if both are. A cell is {columns(rule)}.",
    )
    prose = [line for text in paragraphs for line in textwrap.wrap(text, _COMMENT_WIDTH)]
    return [*prose, *cell_tables(cells, rule)]


def _numbers(cell: Cell, rule: str) -> str:
    found, without = cell.times(rule)
    shown = (without, found) if rule == READY else (without, found, cell.ready_us)
    return "|".join(f"{us:.2f}" if us < 9.995 else f"{us:.1f}" for us in shown)  # so that three fit a column

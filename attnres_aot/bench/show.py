"""Tables and sentences for people, from results. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from attnres_aot.bench.compare import Comparison, Ratio
from attnres_aot.bench.points import Series, label
from attnres_aot.bench.results import WARM, ColdStart, Context, HostCost, Key, Report, Setting, Soak, Timing
from attnres_aot.columns import line, table
from attnres_aot.runtime.launch.pdl import Pdl, pdl_name

_CELL = 8
_SHOWN = 20


def setting_line(setting: Setting) -> str:
    """Says in one line where and how a result is obtained."""
    return (
        f"{setting.bundle} (manifest {setting.manifest_sha256[:12]}) on {setting.gpu}, driver {setting.driver}, torch "
        f"{setting.torch}, {setting.date}; CUDA graph of {setting.launches} launches, median of {setting.replays} "
        "replays, microseconds per call"
    )


def table_head(title: str, rows: Sequence[int], width: int) -> list[str]:
    """Returns the title and head of a table with one column per row count."""
    return ["", title, _line("rows", map(str, rows), width)]


def table_line(name: str, values: Mapping[int, float], rows: Sequence[int], width: int, digits: int = 2) -> str:
    """Formats one line of a table; a row count without a value stays empty."""
    return _line(name, (f"{values[count]:.{digits}f}" if count in values else "" for count in rows), width)


def _line(name: str, cells: Iterable[str], width: int) -> str:
    shown = (name, *cells)
    return line(shown, [width, *[_CELL] * (len(shown) - 1)], gap="")


def group_title(*, ring: bool, pdl: Pdl, l2: str) -> str:
    """Names a table of GPU times."""
    what = "Copy into the mailbox + consumer, less the copy alone" if ring else "GPU time"
    return f"{what}, us; PDL {pdl_name(pdl)}, {l2} L2"


def name_width(lines: Iterable[Series]) -> int:
    """Returns the width of the first column for these lines."""
    return max(30, *(len(str(line)) + 2 for line in lines))


def context_lines(context: Context, rows: Sequence[int], width: int) -> list[str]:
    """Shows the floors."""
    memory, cached = context.memory_bytes_per_us / 1e6, context.l2_bytes_per_us / 1e6
    lines = [
        "",
        f"Device-to-device copy, read + written: {memory:.2f} TB/s from memory, {cached:.2f} TB/s within the L2",
    ]
    if context.empty:
        lines += table_head("Empty kernel in the consumer's launch shape, us", rows, width)
        for flag in dict.fromkeys(empty.pdl for empty in context.empty):
            values = {empty.rows: empty.us for empty in context.empty if empty.pdl == flag}
            lines.append(table_line(f"PDL {'on' if flag else 'off'}", values, rows, width))
    return lines + [f"note: {note}" for note in context.notes]


def floor_lines(timings: Sequence[Timing], rows: Sequence[int], width: int) -> list[str]:
    """Shows bytes moved, and the time of moving them at the measured bandwidth, once per kind of work and variant."""
    shown: dict[tuple[str, str], dict[int, Timing]] = {(timing.work, timing.variant): {} for timing in timings}
    for timing in timings:
        if timing.l2 == timings[0].l2:
            shown[timing.work, timing.variant][timing.rows] = timing
    if not shown:
        return []
    lines = table_head("Bytes moved per call, KiB", rows, width)
    for (work, variant), found in shown.items():
        values = {count: timing.bytes_moved / 1024 for count, timing in found.items()}
        lines.append(table_line(label(work, variant), values, rows, width, digits=0))
    lines += table_head(f"Floor: those bytes at the measured copy bandwidth, us; {timings[0].l2} L2", rows, width)
    for (work, variant), found in shown.items():
        values = {count: timing.floor_us for count, timing in found.items()}
        lines.append(table_line(label(work, variant), values, rows, width))
    return lines


def host_lines(costs: Sequence[HostCost]) -> list[str]:
    """Shows host costs."""
    rows = [("", "us", "x bare", "limit", "")]
    for cost in costs:
        limit = "" if cost.limit is None else f"{cost.limit:.1f}"
        rows.append((cost.name, f"{cost.us:.2f}", f"{cost.ratio:.2f}", limit, "OVER" if cost.over else ""))
    return ["", "Host cost of one launch", *table(rows)]


def cold_lines(cold: ColdStart) -> list[str]:
    """Shows the cold start."""
    phases = ", ".join(f"{name} {ms:.1f}" for name, ms in cold.phases_ms.items())
    total, alone = _limited(cold.total_ms, cold.limit_ms), _limited(cold.import_ms, cold.import_limit_ms)
    lines = [
        "",
        f"Cold start where torch and a CUDA context are there already, median of {cold.processes} processes",
        f"  {cold.consumers} consumers bound and one launched: {total}: {phases}",
        f"  loading every image of the bundle after that: {cold.preload_ms:.1f} ms",
        f"  import attnres_aot in a bare interpreter: {alone}",
        f"  other modules loaded: {', '.join(cold.foreign) or 'none'}",
    ]
    return lines if cold.bytecode else [*lines, "  note: the package has no bytecode here, which slows this down"]


def soak_lines(soak: Soak) -> list[str]:
    """Shows a soak."""
    each = soak.seconds * 1e6 / max(1, soak.launches)
    growth = f"host {soak.host_growth_bytes:+d} bytes, device {soak.device_growth_bytes:+d} bytes"
    lines = [
        "",
        f"Soak: {soak.launches} launches from {soak.threads} threads on {soak.streams} streams, {soak.seconds:.1f} s",
        f"  {each:.1f} us of wall time each; growth after the warm-up: {growth}",
    ]
    return lines + [f"  FAILED: {problem}" for problem in soak.problems]


def comparison_lines(comparison: Comparison, old: str, threshold: float) -> list[str]:
    """Shows a comparison: groups, every ratio, then what has become slower."""
    lines = ["", f"Compared with {old}: time now / time then"]
    if not comparison.groups:
        return [*lines, "nothing in common: no number of one result is in the other"]
    rows = [("", "points", "geo. mean", "not slower", "best", "worst")]
    for group in comparison.groups:
        ratios = [ratio.ratio for ratio in group.ratios]
        mean, best, worst = (f"{number:.3f}" for number in (group.mean, min(ratios), max(ratios)))
        rows.append((group.name, str(len(ratios)), mean, str(group.not_slower), best, worst))
    lines += table(rows)
    for group in comparison.groups:
        lines += ratio_table(group.name, group.ratios, threshold)
    lines += ["", f"{len(comparison.slower)} slower by more than {threshold:.0%}"]
    lines += [f"  SLOWER {_describe(ratio)}" for ratio in comparison.slower[:_SHOWN]]
    if len(comparison.slower) > _SHOWN:
        lines.append(f"  and {len(comparison.slower) - _SHOWN} more")
    if comparison.only_new or comparison.only_old:
        lines.append(f"not compared: {comparison.only_new} numbers only now, {comparison.only_old} only then")
    return lines


def ratio_table(name: str, ratios: Sequence[Ratio], threshold: float) -> list[str]:
    """Shows the ratios of one group, one line per variant; `!` marks those above 1 + threshold."""
    rows = sorted({ratio.key.rows for ratio in ratios})
    width = max(30, *(len(ratio.key.variant) + 2 for ratio in ratios))
    lines = table_head(f"Ratios: {name}", rows, width)
    for variant in dict.fromkeys(ratio.key.variant for ratio in ratios):
        cells = {ratio.key.rows: _cell(ratio.ratio, threshold) for ratio in ratios if ratio.key.variant == variant}
        lines.append(_line(variant, (cells.get(count, "") for count in rows), width))
    return lines


def report_lines(report: Report) -> list[str]:
    """Shows everything but the tables of GPU times, which are shown as they come."""
    lines: list[str] = []
    if report.host:
        lines += host_lines(report.host)
    if report.cold_start is not None:
        lines += cold_lines(report.cold_start)
    if report.soak is not None:
        lines += soak_lines(report.soak)
    return lines


def _cell(ratio: float, threshold: float) -> str:
    return f"{ratio:.3f}" + ("!" if ratio > 1 + threshold else "")


def _limited(ms: float, limit: float) -> str:
    return f"{ms:.1f} ms (limit {limit:g}{', OVER' if ms > limit else ''})"


def _describe(ratio: Ratio) -> str:
    key: Key = ratio.key
    if key.work == "host":
        return f"host, {key.variant}: {ratio.old_us:.2f} -> {ratio.new_us:.2f} us ({ratio.ratio:.2f}x)"
    state = "" if key.l2 == WARM else ", cold"
    return (
        f"{key.work} {key.variant}, {key.rows} rows, PDL {pdl_name(key.pdl)}{state}: "
        f"{ratio.old_us:.2f} -> {ratio.new_us:.2f} us ({ratio.ratio:.2f}x)"
    )

"""GPU time of points: which jobs make up a point, what remains of them, and the tables of a selection."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from attnres_aot.bench import show
from attnres_aot.bench.context import measure_context
from attnres_aot.bench.host import shape_of
from attnres_aot.bench.points import CHAIN, PUBLISHED, RING, Selection, Series, modes_for, rows_for, select
from attnres_aot.bench.results import COLD, WARM, Context, Timing
from attnres_aot.bench.rig import Job, Rig, traffic
from attnres_aot.bench.traffic import copy_traffic, floor_us
from attnres_aot.runtime.launch.pdl import Pdl


class PointTimer:
    """Times points on one rig; the copy into a mailbox is timed for each size, not for each point."""

    def __init__(self, rig: Rig, context: Context | None) -> None:
        """Takes the rig, and the floors measured before, if any."""
        self._rig, self._context = rig, context
        self._copies: dict[tuple[int, int, bool], float] = {}

    def time(self, series: Series, *, rows: int, pdl: Pdl, cold: bool) -> Timing:
        """Measures one point: a line of a table at a row count, in a launch mode, with a warm or a cold L2."""
        variant, work = series.variant, series.work
        chain, published = work == CHAIN, work == PUBLISHED
        job = Job(variant=variant, rows=rows, pdl=pdl, cold=cold, statistics_before=chain, publish=published)
        whole = self._rig.time_us(job)
        copy = self._copy_us(job) if work == RING else None
        moved = traffic(job, self._rig.hidden).moved
        if copy is not None:  # the copy's bytes are taken off like its time
            moved -= copy_traffic(variant.slots, rows, self._rig.hidden).moved
        return Timing(
            work=work,
            variant=str(variant),
            rows=rows,
            pdl=pdl,
            l2=COLD if cold else WARM,
            us=whole if copy is None else whole - copy,
            with_copy_us=None if copy is None else whole,
            copy_us=copy,
            bytes_moved=moved,
            floor_us=self._floor(moved, cold=cold),
        )

    def _copy_us(self, job: Job) -> float:
        key = (job.variant.slots, job.rows, job.cold)
        if key not in self._copies:
            self._copies[key] = self._rig.copy_us(job)
        return self._copies[key]

    def _floor(self, moved: int, *, cold: bool) -> float:
        if self._context is None:
            return 0.0
        return floor_us(moved, self._context.memory_bytes_per_us if cold else self._context.l2_bytes_per_us)


def measure_gpu(rig: Rig, selection: Selection, echo: Callable[[str], None]) -> tuple[Context, tuple[Timing, ...]]:
    """Measures floors and the GPU times of a selection.

    Args:
      rig: what measures.
      selection: which points.
      echo: gets every line of every table as soon as it is complete.

    Raises:
      UsageError: the selection matches nothing.
    """
    lines = select(rig.loaded.bundle.manifest, selection)
    rows = _columns(lines, selection, rig)
    width = show.name_width(lines)
    empty = dict.fromkeys(bool(pdl) for pdl in selection.pdl)
    context = measure_context(rig, shape_of(rig, lines[0].variant, rows[0]), rows, tuple(empty))
    for text in show.context_lines(context, rows, width):
        echo(text)
    timer = PointTimer(rig, context)
    timings: list[Timing] = []
    for title, group, pdl, cold in _tables(lines, selection):
        columns = _columns(group, selection, rig)
        for text in show.table_head(title, columns, width):
            echo(text)
        for line in group:
            counts = rows_for(line, selection, rig.capacity)
            found = [timer.time(line, rows=count, pdl=pdl, cold=cold) for count in counts]
            echo(show.table_line(str(line), {timing.rows: timing.us for timing in found}, columns, width))
            timings += found
    for text in show.floor_lines(timings, rows, width):
        echo(text)
    return context, tuple(timings)


def _tables(lines: Sequence[Series], selection: Selection) -> Iterator[tuple[str, list[Series], Pdl, bool]]:
    """Yields (title, lines, PDL, cold) of each table."""
    for cold in selection.cold:
        for pdl in selection.pdl:
            for ring in (False, True):
                group = [line for line in lines if (line.work == RING) == ring and pdl in modes_for(line, selection)]
                if group:
                    yield show.group_title(ring=ring, pdl=pdl, l2=COLD if cold else WARM), group, pdl, cold


def _columns(lines: Sequence[Series], selection: Selection, rig: Rig) -> list[int]:
    return sorted({count for line in lines for count in rows_for(line, selection, rig.capacity)})

"""Deciding from measured times where precomputed statistics are turned on. Pure.

A bundle's tables turn statistics on for a set of row counts and a set of saved-block counts, so what is on is every
pair of the two. Chosen are the two sets that save the most time, among those all of whose pairs win, with every
source that the deployment uses.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

EXPOSED, AFTER, READY = "exposed", "after", "ready"
"""Rules: what is compared with what (see RULES)."""
RULES = {
    EXPOSED: "statistics kernel + consumer that takes its results, against the plain consumer alone",
    AFTER: "consumer that takes statistics, against the plain consumer, each right after the statistics kernel",
    READY: "consumer whose statistics were there long before, against the plain consumer",
}
MARGIN = 0.05
"""By how much statistics must win: what is closer is a tie, and a tie leaves them off. Runs differ by 1 to 3 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Times of one consumer for one source and row count, in microseconds; a copy into a mailbox is taken off."""

    nb: int
    """Saved blocks."""
    slots: int
    """Mailbox slots; 0: ordinary source."""
    rows: int
    """Rows."""
    plain_us: float
    """The consumer that reads the blocks."""
    ready_us: float
    """The consumer that takes statistics, which are there."""
    chain_us: float
    """The statistics kernel, then the consumer that takes its results."""
    beside_us: float
    """The statistics kernel, then the consumer that reads the blocks all the same."""

    def times(self, rule: str) -> tuple[float, float]:
        """Returns the times (with, without) that a rule compares."""
        if rule == EXPOSED:
            return self.chain_us, self.plain_us
        if rule == AFTER:
            return self.chain_us, self.beside_us
        return self.ready_us, self.plain_us

    def wins(self, rule: str, margin: float) -> bool:
        """Tells whether statistics are faster by more than the margin."""
        found, without = self.times(rule)
        return found <= without * (1 - margin)

    def gain_us(self, rule: str) -> float:
        """Returns what statistics save."""
        found, without = self.times(rule)
        return without - found


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Where statistics are on, as batch tables; both empty where they are on nowhere."""

    attn_stats: str
    """Rows -> 1."""
    attn_stats_blocks: str
    """Saved blocks -> 1."""
    gain_us: float
    """Time saved, summed over the measured pairs that are on."""
    worst: float
    """Largest ratio of time with to time without among the measured pairs that are on; 0 where there is none."""


def decide(cells: Iterable[Cell], slots: Sequence[int], rule: str, margin: float) -> Decision:
    """Chooses the tables of a deployment.

    Args:
      cells: measured times.
      slots: sources that the deployment uses: 0 for an ordinary one, and slot counts.
      rule: a key of RULES.
      margin: by how much statistics must win, as a share.
    """
    grid: dict[tuple[int, int], list[Cell]] = {}
    for cell in cells:
        if cell.slots in slots:
            grid.setdefault((cell.nb, cell.rows), []).append(cell)
    every_nb, every_rows = sorted({nb for nb, _ in grid}), sorted({rows for _, rows in grid})
    won = {pair for pair, found in grid.items() if all(cell.wins(rule, margin) for cell in found)}
    best: tuple[float, tuple[int, ...], tuple[int, ...]] = (0.0, (), ())
    for count in range(1, len(every_nb) + 1):
        for blocks in itertools.combinations(every_nb, count):
            rows = tuple(row for row in every_rows if all((nb, row) in won for nb in blocks))
            gain = sum(cell.gain_us(rule) for nb in blocks for row in rows for cell in grid[nb, row])
            if rows and gain > best[0]:
                best = (gain, blocks, rows)
    gain, blocks, rows = best
    on = [cell for nb in blocks for row in rows for cell in grid[nb, row]]
    ratios = [found / without for found, without in (cell.times(rule) for cell in on)]
    return Decision(
        attn_stats=spans(rows, every_rows),
        attn_stats_blocks=spans(blocks, every_nb),
        gain_us=gain,
        worst=max(ratios, default=0.0),
    )


def spans(on: Iterable[int], measured: Sequence[int]) -> str:
    """Returns the batch table that turns on `on` and what lies between neighbours of it.

    A number between two measured ones is on only if both are; nothing beyond the measured ones is.
    """
    wanted = set(on)
    runs: list[list[int]] = []
    for number, before in zip(measured, [None, *measured], strict=False):
        if number not in wanted:
            continue
        if before in wanted:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}:1" if len(run) == 1 else f"{run[0]}-{run[-1]}:1" for run in runs)

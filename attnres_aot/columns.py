"""Lines of text whose cells line up: every table that a command prints is made of these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def widths(rows: Iterable[Sequence[str]]) -> list[int]:
    """Returns the width of each column of `rows`, which have equally many cells."""
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def line(cells: Sequence[str], columns: Sequence[int], words: int = 1, *, gap: str = "  ") -> str:
    """Lines up one row: the first `words` cells to the left, further ones to the right."""
    placed = [
        cell.ljust(width) if index < words else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(cells, columns, strict=True))
    ]
    return gap.join(placed).rstrip()


def table(rows: Sequence[Sequence[str]], words: int = 1) -> list[str]:
    """Lines up a whole table, its heading the first row."""
    columns = widths(rows)
    return [line(row, columns, words) for row in rows]

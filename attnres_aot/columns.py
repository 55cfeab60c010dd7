"""Lines of text whose cells line up: every table that a command prints is made of these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_NAME_WIDTH = 13  # characters of the names of facts


def line(cells: Sequence[str], widths: Sequence[int], words: int = 1, *, gap: str = "  ") -> str:
    """Lines up one row: the first `words` cells to the left, further ones to the right."""
    placed = [
        cell.ljust(width) if index < words else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return gap.join(placed).rstrip()


def table(rows: Sequence[Sequence[str]], words: int = 1, *, indent: str = "") -> list[str]:
    """Lines up a whole table, its heading the first row; a row that is one text stands at the margin as it is."""
    aligned = [row for row in rows if not isinstance(row, str)]
    widths = [max(map(len, column)) for column in zip(*aligned, strict=True)]
    return [row if isinstance(row, str) else indent + line(row, widths, words) for row in rows]


def facts(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Returns padded names and their values, to be shown one below the other; a name that follows itself is blank."""
    lines, before = [], ""
    for name, value in pairs:
        lines.append((("" if name == before else name).ljust(_NAME_WIDTH), value))
        before = name
    return lines

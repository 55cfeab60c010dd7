"""Batch tables: the grammar `lo[-hi]:value,...`, its parser and writer, and look-up by exact number.

A table maps numbers (row counts, or numbers of saved blocks) to values. Entries are comma-separated, a later entry
wins over an earlier one, and the empty string is the empty table:

    table = "" | entry { "," entry }
    entry = number [ "-" number ] ":" value
    value = number | number "." number { "." number } | name

Spaces around any part are ignored. Spans stay spans however long they are: nothing here expands them.
"""

from __future__ import annotations

import heapq
import itertools
import re

from attnres_aot.errors import UsageError
from attnres_aot.records import record

Value = int | tuple[int, ...] | str
"""What an entry maps to: an integer, a dotted tuple of integers, or a name."""

_ENTRY = r"\s*([0-9]{1,18})\s*(?:-\s*([0-9]{1,18})\s*)?:\s*([A-Za-z0-9_.-]+)\s*"
_NUMBER = r"[0-9]{1,18}"
_TUPLE = r"[0-9]{1,18}(?:\.[0-9]{1,18})+"
_NAME = r"[A-Za-z_][A-Za-z0-9_-]*"
_EXAMPLE = "1-8:1,64:0"


@record(frozen=True, slots=True, kw_only=True)
class Span:
    """One entry: the numbers `first`..`last` map to `value`."""

    first: int
    """Smallest number, inclusive."""
    last: int
    """Largest number, inclusive."""
    value: Value
    """What they map to."""

    def __str__(self) -> str:
        numbers = f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"
        return f"{numbers}:{format_value(self.value)}"


@record(frozen=True, slots=True, kw_only=True)
class BatchTable:
    """A table as written: its entries in order, which may overlap."""

    spans: tuple[Span, ...] = ()
    """Entries in the order written; the last that holds a number decides."""

    def __str__(self) -> str:
        return ",".join(map(str, self.spans))

    def get(self, number: int) -> Value | None:
        """Returns the value of exactly `number`, or None when no entry holds it."""
        for span in reversed(self.spans):
            if span.first <= number <= span.last:
                return span.value
        return None

    def canonical(self) -> BatchTable:
        """Returns the equal table in its one canonical form: disjoint, ascending, neighbours of one value joined."""
        joined: list[Span] = []
        for piece in _pieces(self.spans):
            if joined and joined[-1].last + 1 == piece.first and joined[-1].value == piece.value:
                joined.append(Span(first=joined.pop().first, last=piece.last, value=piece.value))
            else:
                joined.append(piece)
        return BatchTable(spans=tuple(joined))

    def switched_on(self) -> tuple[tuple[int, int], ...]:
        """Returns the disjoint ascending spans (first, last) of the numbers that map to 1, the value for "on"."""
        return tuple((span.first, span.last) for span in self.canonical().spans if span.value == 1)


EMPTY = BatchTable()
"""The table that holds nothing."""


def parse_table(text: str) -> BatchTable:
    """Parses a batch table.

    Raises:
      UsageError: one or more entries do not follow the grammar, or a span is reversed; names every one of them.
    """
    table, problems = scan_table(text)
    if problems:
        raise UsageError(f"batch table {text!r:.200}: " + "; ".join(problems))
    return table


def scan_table(text: str, example: str = _EXAMPLE) -> tuple[BatchTable, tuple[str, ...]]:
    """Parses what can be parsed of a batch table; returns it with one problem per bad entry.

    Args:
      text: the table.
      example: a table that is fit for where this one stands, for the problems.
    """
    spans: list[Span] = []
    problems: list[str] = []
    for entry in text.split(",") if text.strip() else ():
        span = _parse_entry(entry, example)
        if isinstance(span, Span):
            spans.append(span)
        else:
            problems.append(span)
    return BatchTable(spans=tuple(spans)), tuple(problems)


def overlaps(table: BatchTable) -> tuple[tuple[Span, Span], ...]:
    """Returns the pairs of entries, neighbours in ascending order, that hold a number in common."""
    found = []
    reach: Span | None = None
    for span in sorted(table.spans, key=lambda span: (span.first, span.last)):
        if reach is not None and span.first <= reach.last:
            found.append((reach, span))
        if reach is None or span.last > reach.last:
            reach = span
    return tuple(found)


def format_value(value: Value) -> str:
    """Writes a value as `parse_table` reads it."""
    return ".".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _parse_entry(entry: str, example: str) -> Span | str:
    """Returns the span of one entry, or what is wrong with it."""
    if not entry.strip():
        return "an entry between commas is empty; remove the extra comma"
    match = re.fullmatch(_ENTRY, entry)
    value = None if match is None else _parse_value(match[3])
    if match is None or value is None:
        return f"entry {entry.strip()!r:.80} is not understood; the form is lo[-hi]:value, e.g. '{example}'"
    first = int(match[1])
    last = first if match[2] is None else int(match[2])
    if last < first:
        return f"span {first}-{last} is reversed; write {last}-{first}"
    return Span(first=first, last=last, value=value)


def _parse_value(text: str) -> Value | None:
    if re.fullmatch(_NUMBER, text):
        return int(text)
    if re.fullmatch(_TUPLE, text):
        return tuple(map(int, text.split(".")))
    return text if re.fullmatch(_NAME, text) else None


def _pieces(spans: tuple[Span, ...]) -> list[Span]:
    """Cuts overlapping spans at every boundary and keeps, in ascending order, the piece of the latest one."""
    starts = sorted(range(len(spans)), key=lambda index: spans[index].first)
    edges = sorted({span.first for span in spans} | {span.last + 1 for span in spans})
    active: list[int] = []  # negated indices: the smallest is the latest entry
    pieces = []
    upcoming = 0
    for first, following in itertools.pairwise(edges):
        while upcoming < len(starts) and spans[starts[upcoming]].first <= first:
            heapq.heappush(active, -starts[upcoming])
            upcoming += 1
        while active and spans[-active[0]].last < first:
            heapq.heappop(active)
        if active:
            pieces.append(Span(first=first, last=following - 1, value=spans[-active[0]].value))
    return pieces

"""Checks the addresses of a launch: alignment, and memory that operands share where that would corrupt them.

A row is read before any of it is written by elements, not as a whole: each thread reads its part of the source and
of the prefix, and later writes the same part of prefix, aux and out. So the source may be the very view that prefix,
aux or out is. Any other sharing of bytes that one of the two operands writes is refused.

Intervals that do not touch are the rule, so that is tested first, in the order in which they lay last time. Each
consumer of a model tends to see the same order again.
"""

from __future__ import annotations

from collections.abc import Sequence

from attnres_aot.errors import OperandError
from attnres_aot.runtime.operands import ALIGNMENT, View, rows_touch

SOURCE = "delta"
"""Name of the operand that may be one view with an operand of MAY_BE_SOURCE."""
MAY_BE_SOURCE = frozenset({"prefix", "aux", "out"})
"""Operands that may be one view with the source."""
_REMEMBERED = 64


class AddressCheck:
    """Checks addresses for operands of one geometry; an instance may be used by several threads."""

    __slots__ = ("_before", "_extents", "_fixed", "_fixed_starts", "_harmless", "_order", "_views")

    def __init__(self, views: Sequence[View], fixed: Sequence[tuple[str, int, int]]) -> None:
        """Prepares the check.

        Args:
          views: operands whose addresses are given with each launch.
          fixed: (name, address, bytes) of memory that stays and that no operand may touch.
        """
        self._views = tuple(views)
        self._fixed = tuple(fixed)
        self._fixed_starts = tuple([address - address % ALIGNMENT for _, address, _ in fixed])
        self._extents = (
            *(view.extent for view in views),
            *(address % ALIGNMENT + size for _, address, size in fixed),
        )
        self._order = self._before = tuple(range(len(self._extents)))
        self._harmless: set[tuple[int, ...]] = set()

    def __call__(self, pointers: tuple[int, ...]) -> None:
        """Checks the operands' addresses.

        Raises:
          OperandError: an address is not aligned, or operands overlap; one line for every problem.
        """
        starts = pointers + self._fixed_starts
        if not self._apart(starts, self._order):
            self._look_closer(starts)

    def _apart(self, starts: tuple[int, ...], order: tuple[int, ...]) -> bool:
        """Tells whether everything is aligned and follows upon another in `order`."""
        extents, bits, end = self._extents, 0, 1
        for index in order:
            start = starts[index]
            if start < end:
                return False
            bits |= start
            end = start + extents[index]
        return not bits % ALIGNMENT

    def _look_closer(self, starts: tuple[int, ...]) -> None:
        order = self._before
        if not self._apart(starts, order):
            order = tuple(sorted(range(len(starts)), key=starts.__getitem__))
        if self._apart(starts, order):
            self._order, self._before = order, self._order
            return
        problems = self._misplaced(starts)
        distances = tuple([start - starts[0] for start in starts])
        if not problems and distances in self._harmless:
            return
        problems = problems or self._clashes(starts)
        if problems:
            raise OperandError("\n".join(problems))
        if len(self._harmless) >= _REMEMBERED:
            self._harmless = set()
        self._harmless.add(distances)

    def _misplaced(self, starts: tuple[int, ...]) -> list[str]:
        return [
            f"{view.expected.name} starts at {pointer:#x}; it must be aligned to {ALIGNMENT} bytes"
            if pointer
            else f"{view.expected.name} has no memory"
            for view, pointer in zip(self._views, starts, strict=False)
            if pointer % ALIGNMENT or not pointer
        ]

    def _clashes(self, starts: tuple[int, ...]) -> list[str]:
        problems = []
        for i, (one, start) in enumerate(zip(self._views, starts, strict=False)):
            for other, other_start in zip(self._views[i + 1 :], starts[i + 1 :], strict=False):
                if clash(one, start, other, other_start):
                    problems.append(_overlap(one.expected.name, start, other.expected.name, other_start))
            for name, address, size in self._fixed:
                if start < address + size and address < start + one.extent:
                    problems.append(_overlap(one.expected.name, start, name, address))
        return problems


def clash(one: View, start: int, other: View, other_start: int) -> bool:
    """Tells whether two operands share bytes in a way that would corrupt a result.

    Args:
      one: an operand.
      start: its address.
      other: another operand of the same launch.
      other_start: its address.
    """
    names = {one.expected.name, other.expected.name}
    same_view = start == other_start and one.row_stride == other.row_stride and None is one.expected.blocks
    if same_view and other.expected.blocks is None and SOURCE in names and names & MAY_BE_SOURCE:
        return False
    mine = {*one.expected.reads, *one.expected.writes}
    theirs = {*other.expected.reads, *other.expected.writes}
    pairs = [(a, b) for a in one.expected.writes for b in theirs]
    pairs += [(a, b) for a in mine for b in other.expected.writes]
    return any(rows_touch(one, start + one.offset(a), other, other_start + other.offset(b)) for a, b in pairs)


def _overlap(name: str, start: int, other: str, other_start: int) -> str:
    distance = other_start - start
    side = "after" if distance > 0 else "before"
    where = f"{abs(distance)} bytes {side} it" if distance else "at the same address"
    allowed = f"{SOURCE} may be one view with {', '.join(sorted(MAY_BE_SOURCE))}; nothing else may share memory"
    return f"{name} overlaps {other}, which starts {where}; {allowed}"

"""Checks the addresses of a launch: alignment, and memory that operands share where that would corrupt them.

A row is read before any of it is written by elements, not as a whole: each thread reads its part of the source and
of the prefix, and later writes the same part of prefix, aux and out. So the source may be the very view that prefix,
aux or out is. Any other sharing of bytes that one of the two operands writes is refused, of bytes of bound memory too.

Intervals that do not touch are the rule, so that is tested first, in the order in which they lay last time. Each
consumer of a model tends to see the same order again, and its operands between the same bound memory. A source that is
the very view of another operand was so last time, too, and is left out of the order.
"""

from __future__ import annotations

from collections.abc import Sequence

from attnres_aot.errors import OperandError
from attnres_aot.records import record
from attnres_aot.runtime.operands.geometry import ALIGNMENT, View, rows_touch
from attnres_aot.runtime.operands.progressions import Ranges, ranges_touch

SOURCE = "delta"
"""Name of the operand that may be one view with an operand of MAY_BE_SOURCE."""
MAY_BE_SOURCE = frozenset({"prefix", "aux", "out"})
"""Operands that may be one view with the source."""
_REMEMBERED = 64
_LAYOUTS = 8
_BEHIND_ALL = 1 << 64


@record(frozen=True, slots=True, kw_only=True, eq=False)
class Fixed:
    """Bound memory that stays where it is from launch to launch."""

    name: str
    """What messages call it."""
    address: int
    """Where it starts."""
    size: int
    """Bytes."""
    written: bool
    """The launch writes it, so that no operand may touch it; otherwise only operands that are written must not."""


class PlacedCheck:
    """Checks that operands have memory and are aligned, which is all that is checked of addresses with checks off."""

    __slots__ = ("_names",)

    def __init__(self, views: Sequence[View]) -> None:
        """Prepares the check for operands in this order."""
        self._names = tuple([view.expected.name for view in views])

    def __call__(self, pointers: tuple[int, ...]) -> None:
        """Checks the operands' addresses.

        Raises:
          OperandError: an address is 0 or not aligned; one line for every problem.
        """
        bits = 0
        for pointer in pointers:
            bits |= pointer
        if bits % ALIGNMENT or 0 in pointers:
            raise OperandError("\n".join(_misplaced(self._names, pointers)))


@record(frozen=True, slots=True, kw_only=True, eq=False)
class _Layout:
    """How operands lay in memory without touching."""

    twin: int
    """Operand that was one view with the first, which `order` then leaves out; 0: none."""
    order: tuple[int, ...]
    """Operands by address; where bound memory lies among them, that too, numbered behind the operands."""
    low: int
    """Address below which none of them may start: where the bound memory before them ends."""
    bound_among: bool
    """Bound memory lies among the operands."""
    high: int
    """Address behind which none of them may end: where the bound memory behind them starts."""

    def holds(self, starts: tuple[int, ...], extents: tuple[int, ...]) -> bool:
        """Tells whether everything at these addresses is aligned and lies like this."""
        bits, end = 0, self.low
        for index in self.order:
            start = starts[index]
            if start < end:
                return False
            bits |= start
            end = start + extents[index]
        return end <= self.high and not bits % ALIGNMENT and starts[0] == starts[self.twin]


class AddressCheck:
    """Checks addresses for operands of one geometry; an instance may be used by several threads."""

    __slots__ = ("_extents", "_fixed", "_fixed_starts", "_harmless", "_layouts", "_likely", "_twins", "_views")

    def __init__(self, views: Sequence[View], fixed: Sequence[Fixed]) -> None:
        """Prepares the check.

        Args:
          views: operands whose addresses are given with each launch.
          fixed: memory that stays.
        """
        self._views = tuple(views)
        self._fixed = tuple(fixed)
        self._fixed_starts = tuple([each.address - each.address % ALIGNMENT for each in fixed])
        self._extents = (
            *(view.extent for view in views),
            *(each.address % ALIGNMENT + each.size for each in fixed),
        )
        self._twins = tuple([index for index, view in enumerate(views) if may_be_one_view(views[0], view)])
        everything = tuple(range(len(self._extents)))
        self._likely = _Layout(twin=0, order=everything, bound_among=True, low=1, high=_BEHIND_ALL)
        self._layouts: tuple[_Layout, ...] = ()
        self._harmless: set[tuple[int, ...]] = set()

    def __call__(self, pointers: tuple[int, ...]) -> None:
        """Checks the operands' addresses.

        Raises:
          OperandError: an address is 0 or not aligned, or operands overlap; one line for every problem.
        """
        likely = self._likely
        starts = pointers + self._fixed_starts if likely.bound_among else pointers
        if not likely.holds(starts, self._extents):
            self._look_closer(pointers)

    def _look_closer(self, pointers: tuple[int, ...]) -> None:
        starts, extents = pointers + self._fixed_starts, self._extents
        for known in self._layouts:
            if known.holds(starts, extents):
                self._likely = known
                return
        found = self._layout(starts, len(pointers))
        if found.holds(starts, extents):
            self._likely, self._layouts = found, (found, *self._layouts[: _LAYOUTS - 1])
            return
        problems = _misplaced([view.expected.name for view in self._views], pointers)
        problems = problems or self._clashes(pointers) + self._clashes_with_fixed(pointers)
        if problems:
            raise OperandError("\n".join(problems))

    def _layout(self, starts: tuple[int, ...], operands: int) -> _Layout:
        """Returns how everything lies, which holds if nothing touches."""
        extents = self._extents
        twin = next((index for index in self._twins if starts[index] == starts[0]), 0)
        order = sorted(range(1 if twin else 0, operands), key=starts.__getitem__)
        first, behind = starts[order[0]], starts[order[-1]] + extents[order[-1]]
        bound = range(operands, len(starts))
        low = max([starts[index] + extents[index] for index in bound if starts[index] < first], default=1)
        high = min([starts[index] for index in bound if starts[index] >= first], default=_BEHIND_ALL)
        bound_among = first < low or high < behind
        if bound_among:
            order, low, high = sorted([*order, *bound], key=starts.__getitem__), 1, _BEHIND_ALL
        return _Layout(twin=twin, order=tuple(order), bound_among=bound_among, low=low, high=high)

    def _clashes(self, pointers: tuple[int, ...]) -> list[str]:
        """Lists operands that share memory as they must not; distances that were harmless once are so again."""
        distances = tuple([pointer - pointers[0] for pointer in pointers])
        if distances in self._harmless:
            return []
        problems = []
        for i, (one, start) in enumerate(zip(self._views, pointers, strict=True)):
            for other, other_start in zip(self._views[i + 1 :], pointers[i + 1 :], strict=True):
                if clash(one, start, other, other_start):
                    problems.append(_overlap(one.expected.name, start, other.expected.name, other_start))
        if not problems:
            if len(self._harmless) >= _REMEMBERED:
                self._harmless = set()
            self._harmless.add(distances)
        return problems

    def _clashes_with_fixed(self, pointers: tuple[int, ...]) -> list[str]:
        first = min(pointers)
        behind = max([start + extent for start, extent in zip(pointers, self._extents, strict=False)])
        return [
            _overlap(view.expected.name, start, fixed.name, fixed.address)
            for fixed in self._fixed
            if first < fixed.address + fixed.size and fixed.address < behind
            for view, start in zip(self._views, pointers, strict=True)
            if clash_with_fixed(view, start, fixed)
        ]


def may_be_one_view(source: View, other: View) -> bool:
    """Tells whether the first operand of a launch may be the very view that another is, if the addresses are one."""
    names = (source.expected.name, other.expected.name)
    rows_only = source.expected.blocks is None and other.expected.blocks is None
    return names[0] == SOURCE and names[1] in MAY_BE_SOURCE and rows_only and source.row_stride == other.row_stride


def clash(one: View, start: int, other: View, other_start: int) -> bool:
    """Tells whether two operands share bytes in a way that would corrupt a result.

    Args:
      one: an operand.
      start: its address.
      other: another operand of the same launch.
      other_start: its address.
    """
    if start == other_start and (may_be_one_view(one, other) or may_be_one_view(other, one)):
        return False
    if start + one.extent <= other_start or other_start + other.extent <= start:
        return False
    mine = {*one.expected.reads, *one.expected.writes}
    theirs = {*other.expected.reads, *other.expected.writes}
    pairs = {(a, b) for a in one.expected.writes for b in theirs} | {
        (a, b) for a in mine for b in other.expected.writes
    }
    return any(rows_touch(one, start + one.offset(a), other, other_start + other.offset(b)) for a, b in pairs)


def clash_with_fixed(view: View, start: int, fixed: Fixed) -> bool:
    """Tells whether an operand at `start` shares bytes of bound memory in a way that would corrupt either."""
    if start + view.extent <= fixed.address or fixed.address + fixed.size <= start or not view.rows:
        return False
    touched = {*view.expected.writes, *(view.expected.reads if fixed.written else ())}
    bound = Ranges(start=fixed.address, step=0, count=1, size=fixed.size)
    return any(ranges_touch(view.ranges(start + view.offset(block)), bound) for block in touched)


def _misplaced(names: Sequence[str], pointers: tuple[int, ...]) -> list[str]:
    return [
        f"{name} starts at {pointer:#x}; it must be aligned to {ALIGNMENT} bytes"
        if pointer
        else f"{name} has no memory"
        for name, pointer in zip(names, pointers, strict=True)
        if pointer % ALIGNMENT or not pointer
    ]


def _overlap(name: str, start: int, other: str, other_start: int) -> str:
    distance = other_start - start
    side = "after" if distance > 0 else "before"
    where = f"{abs(distance)} bytes {side} it" if distance else "at the same address"
    allowed = f"{SOURCE} may be one view with {', '.join(sorted(MAY_BE_SOURCE))}; nothing else may share memory"
    return f"{name} overlaps {other}, which starts {where}; {allowed}"

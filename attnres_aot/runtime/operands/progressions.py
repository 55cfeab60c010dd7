"""Tells whether two rows of equally spaced byte ranges share a byte, in a time that does not grow with their number.

Range i of one row starts at start + i * step, range j of the other at its start + j * its step. Two ranges [a, a + m)
and [b, b + n) share a byte where -m < a - b < n. For a fixed i that asks whether start + i * step comes close to a
multiple of the other step, which is a question about a remainder; for how many i it does is a difference of two sums of
floors, and such a sum is found as a greatest common divisor is (Graham, Knuth, Patashnik, Concrete Mathematics, 3.5).
"""

from __future__ import annotations

from attnres_aot.records import record


@record(frozen=True, slots=True, kw_only=True, eq=False)
class Ranges:
    """Byte ranges of one size at equal distances."""

    start: int
    """Address of the first."""
    step: int
    """Bytes from the start of one to the start of the next, 0 or more."""
    count: int
    """How many, at least 1."""
    size: int
    """Bytes of each, at least 1."""

    @property
    def end(self) -> int:
        """Address behind the last byte."""
        return self.start + (self.count - 1) * self.step + self.size


def ranges_touch(one: Ranges, other: Ranges) -> bool:
    """Tells whether any range of `one` shares a byte with any range of `other`."""
    if one.end <= other.start or other.end <= one.start:
        return False
    last, reach = one.count - 1, one.size + other.size - 2
    shifted = one.start - other.start + one.size - 1  # 0 <= shifted + i * step - j * other.step <= reach
    span = (other.count - 1) * other.step + reach
    if one.step:
        first = max(0, -(shifted // one.step))
        last = min(last, (span - shifted) // one.step)
    else:
        first = 0 if 0 <= shifted <= span else 1
        last = 0  # all lie in one place
    if first > last:
        return False
    if other.step <= reach + 1 or other.count == 1:  # no gap between its ranges is wide enough
        return True
    offset, count = shifted + first * one.step, last - first + 1
    hits = _floor_sum(count, other.step, one.step, offset)
    return hits > _floor_sum(count, other.step, one.step, offset - reach - 1)


def _floor_sum(count: int, modulus: int, factor: int, offset: int) -> int:
    """Returns the sum of (factor * i + offset) // modulus over 0 <= i < count."""
    total = 0
    while True:
        total += (factor // modulus) * (count * (count - 1) // 2) + (offset // modulus) * count
        factor, offset = factor % modulus, offset % modulus
        highest = factor * count + offset
        if highest < modulus:
            return total
        # Lattice points under a line, counted along the other axis.
        count, offset, modulus, factor = highest // modulus, highest % modulus, factor, modulus

"""Bytes that a launch has to move, from the contract alone: what a floor is computed from. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from attnres_aot.spec.variants import Variant

_BF16, _FP32 = 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes of one launch; weights count once, as rows share them."""

    read: int
    """Bytes read at least once."""
    written: int
    """Bytes written."""
    touched: int
    """Different bytes: what is read and then written in place counts once."""

    @property
    def moved(self) -> int:
        """Bytes read and bytes written."""
        return self.read + self.written

    def plus(self, other: Traffic) -> Traffic:
        """Returns the traffic of two launches one after the other."""
        return Traffic(
            read=self.read + other.read, written=self.written + other.written, touched=self.touched + other.touched
        )


def consumer_traffic(variant: Variant, rows: int, hidden: int) -> Traffic:
    """Returns what a consumer moves for `rows` rows of `hidden` elements."""
    key = variant.key
    row = rows * hidden * _BF16
    source = max(1, variant.slots) * row
    weights = (3 if key.nb else 1) * hidden * _BF16
    blocks = 0 if variant.stats else key.nb * row
    statistics = rows * (hidden + 2) * _FP32 if variant.stats else 0
    prefix = row if key.has_delta else 0
    copies = (key.write is not None) + variant.aux
    rearmed = source if variant.slots else 0
    read = source + weights + blocks + statistics + prefix
    written = (2 + copies) * row + rearmed  # prefix and out are always written
    return Traffic(read=read, written=written, touched=read + written - prefix - rearmed)


def statistics_traffic(nb: int, rows: int, hidden: int) -> Traffic:
    """Returns what computing the statistics of `nb` saved blocks moves."""
    read = nb * rows * hidden * _BF16 + 2 * hidden * _BF16
    written = rows * (hidden + 2) * _FP32
    return Traffic(read=read, written=written, touched=read + written)


def copy_traffic(slots: int, rows: int, hidden: int) -> Traffic:
    """Returns what a copy into the used rows of a mailbox moves."""
    size = slots * rows * hidden * _BF16
    return Traffic(read=size, written=size, touched=2 * size)


def floor_us(moved: int, bytes_per_us: float) -> float:
    """Returns the time that moving `moved` bytes takes at a bandwidth, in microseconds."""
    return moved / bytes_per_us

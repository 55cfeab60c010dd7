"""Guarded memory for one launch: every operand a view into one poisoned allocation, so that a stray access shows.

All memory that a launch must not read holds NaN patterns, and all memory that it must not write is compared afterwards:
guard zones around each operand, rows beyond the launch, the padding between rows and blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attnres_aot.selftest.reference import Operands
from attnres_aot.spec.variants import Variant

GUARD_BYTES = 4096
"""Poison between operands, at least."""
SPARE_ROWS = 2
"""Poisoned rows after the used rows of every operand."""
SPARE_BLOCKS = 1
"""Poisoned block slots beyond the last one that the launch reads or writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the operands of a launch lie in memory."""

    name: str
    """Short name for reports."""
    padding: int = 0
    """Vectors of 8 elements added to a row stride; each operand gets another multiple of it."""
    block_major: bool = False
    """Blocks lie one after another, each holding all rows, instead of row after row."""
    skew: int = 0
    """Bytes by which operands start beyond a 128-byte boundary; a multiple of 16."""
    spare_capacity: int | None = None
    """Mailbox and statistics rows beyond the used ones; None: the capacity that the bundle was planned for."""

    def capacity(self, rows: int, planned: int) -> int:
        """Returns how many rows a mailbox slot and the statistics have."""
        return planned if self.spare_capacity is None else rows + self.spare_capacity


DENSE = Layout(name="dense")
PADDED = Layout(name="padded", padding=1, skew=16, spare_capacity=3)
BLOCK_MAJOR = Layout(name="block-major", padding=2, block_major=True, skew=80, spare_capacity=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Where one operand lies in the allocation."""

    name: str
    """Field of `Operands`."""
    dtype: torch.dtype
    """Element type."""
    shape: tuple[int, ...]
    """Shape of the view that the launch gets."""
    strides: tuple[int, ...]
    """Strides in elements."""
    start: int
    """Byte offset of the first element."""
    end: int
    """Byte offset after the region, spare rows included."""


@dataclass(frozen=True, kw_only=True)
class Arena:
    """The memory of one launch: an allocation with operands in it, and poison everywhere else."""

    words: Tensor
    """The allocation, int32."""
    regions: tuple[Region, ...]
    """Operands in address order."""

    def tensor(self, name: str) -> Tensor:
        """Returns an operand as a view."""
        region = next(region for region in self.regions if region.name == name)
        return self.words.view(region.dtype).as_strided(
            region.shape, region.strides, region.start // region.dtype.itemsize
        )

    @cached_property
    def views(self) -> Operands:
        """The operands of a consumer's launch."""
        return Operands(**{region.name: self.tensor(region.name) for region in self.regions})

    def clone(self) -> Arena:
        """Copies the memory; the views of the copy lie in the copy."""
        return Arena(words=self.words.clone(), regions=self.regions)

    def locate(self, byte: int) -> str:
        """Says in words what lies at a byte offset: operand, index, or which gap."""
        for region in self.regions:
            if byte < region.start:
                return f"the guard zone before {region.name}"
            if byte < region.end:
                return _locate_in(region, byte)
        return f"the guard zone after {self.regions[-1].name}"


def build_arena(
    variant: Variant, *, rows: int, hidden: int, layout: Layout, capacity: int, device: torch.device
) -> Arena:
    """Allocates and poisons the memory of one launch.

    Args:
      variant: which consumer.
      rows: rows of the launch.
      hidden: row length in elements.
      layout: strides and alignment.
      capacity: rows of a mailbox slot and of the statistics, unless the layout says otherwise.
      device: where.
    """
    return place(_shapes(variant, rows, hidden, layout, layout.capacity(rows, capacity)), layout, device)


Shape = tuple[str, tuple[int, ...], tuple[int, ...], torch.dtype]
"""Name, shape, strides in elements, and type of an operand."""


def place(shapes: Sequence[Shape], layout: Layout, device: torch.device) -> Arena:
    """Allocates and poisons memory for operands, one after another with guard zones between."""
    position = 0
    regions = []
    for name, shape, strides, dtype in shapes:
        start = -(-(position + GUARD_BYTES) // 128) * 128 + layout.skew
        whole = (shape[0] + SPARE_ROWS, *shape[1:]) if len(shape) > 1 else shape
        span = 1 + sum((extent - 1) * stride for extent, stride in zip(whole, strides, strict=True))
        position = -(-(start + span * dtype.itemsize) // 16) * 16
        regions.append(Region(name=name, dtype=dtype, shape=shape, strides=strides, start=start, end=position))
    return Arena(words=_poison((position + GUARD_BYTES) // 4, device), regions=tuple(regions))


def vector(name: str, hidden: int) -> Shape:
    """Shapes weights [H]."""
    return name, (hidden,), (1,), torch.bfloat16


def mailbox(name: str, slots: int, capacity: int, hidden: int) -> Shape:
    """Shapes a mailbox [slots, capacity, H], which is never padded."""
    return name, (slots, capacity, hidden), (capacity * hidden, hidden, 1), torch.bfloat16


def statistics(capacity: int, hidden: int) -> list[Shape]:
    """Shapes mixture [capacity, H] and scal [capacity, 2], which are never padded."""
    return [(name, (capacity, width), (width, 1), torch.float32) for name, width in (("mixture", hidden), ("scal", 2))]


def matrix(name: str, rows: int, hidden: int, layout: Layout, order: int) -> Shape:
    """Shapes an operand [rows, H] whose rows are padded `order` times as far as the layout says."""
    return name, (rows, hidden), (hidden + 8 * layout.padding * order, 1), torch.bfloat16


def saved_blocks(rows: int, count: int, hidden: int, layout: Layout) -> Shape:
    """Shapes `count` blocks [rows, B, H]."""
    block_stride = hidden + 8 * layout.padding
    row_stride = count * block_stride + 8 * layout.padding
    if layout.block_major:
        row_stride, block_stride = block_stride, (rows + SPARE_ROWS) * block_stride + 8 * layout.padding
    return "blocks", (rows, count, hidden), (row_stride, block_stride, 1), torch.bfloat16


def _shapes(variant: Variant, rows: int, hidden: int, layout: Layout, capacity: int) -> list[Shape]:
    """Lists name, shape, strides and type of each operand that `variant` takes."""
    ring = mailbox("source", variant.slots, capacity, hidden)
    write = -1 if variant.key.write is None else variant.key.write
    count = max(variant.key.nb, write + 1) + SPARE_BLOCKS
    return [
        ring if variant.slots else matrix("source", rows, hidden, layout, 1),
        matrix("prefix", rows, hidden, layout, 2),
        saved_blocks(rows, count, hidden, layout),
        *(vector(name, hidden) for name in ("norm", "query", "out_norm")),
        matrix("out", rows, hidden, layout, 3),
        *([matrix("aux", rows, hidden, layout, 4)] if variant.aux else []),
        *(statistics(capacity, hidden) if variant.stats else []),
    ]


def _poison(count: int, device: torch.device) -> Tensor:
    """Returns `count` int32 words, each two bf16 NaNs and one fp32 NaN, not the same everywhere."""
    index = torch.arange(2 * count, device=device, dtype=torch.int32)
    return (index % 113 + 0x7F81).to(torch.int16).view(torch.int32)


def _locate_in(region: Region, byte: int) -> str:
    rest = (byte - region.start) // region.dtype.itemsize
    index = [0] * len(region.shape)
    for axis in sorted(range(len(region.shape)), key=lambda axis: -region.strides[axis]):
        index[axis], rest = divmod(rest, region.strides[axis])
    inside = all(i < extent for i, extent in zip(index, region.shape, strict=True))
    place = f"{region.name}[{', '.join(map(str, index))}]"
    return place if inside else f"{place}, outside its shape {list(region.shape)}"

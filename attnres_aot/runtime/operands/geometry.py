"""Checks the operands of a launch: geometry once per shape, addresses whenever they change.

A geometry (dtype, device, shape, strides) that passed is remembered by the caller, so these checks run once for each.
Every problem of one call is reported together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from attnres_aot.errors import OperandError
from attnres_aot.records import record
from attnres_aot.runtime.operands.memory import memory_problems
from attnres_aot.runtime.operands.progressions import Ranges, ranges_touch

ALIGNMENT = 16
"""Bytes to which every row must be aligned."""
VECTOR_ELEMS = 8
"""bf16 elements in 16 bytes, the unit of strides in kernel arguments."""
MAX_STRIDE = 2**31 - 1
"""Largest stride in a kernel argument, in vectors."""
_ELEM_BYTES = 2
_MAX_ROWS = 2**31 - 1


@record(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Expected:
    """What one operand of a consumer has to be."""

    name: str
    """What messages call it."""
    reads: tuple[int, ...] = ()
    """Blocks that the kernel reads; (0,) for an operand [rows, H] that it reads."""
    writes: tuple[int, ...] = ()
    """Blocks that the kernel writes."""
    blocks: int | None = None
    """None for an operand [rows, H]; n for [rows, B, H] with B >= n."""


@record(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class View:
    """Geometry of one operand that passed."""

    expected: Expected
    """What it was checked against."""
    rows: int
    """Rows."""
    row_stride: int
    """Elements between rows; 0 where there is at most one row."""
    block_stride: int
    """Elements between blocks of one row; 0 for an operand without blocks."""
    hidden: int
    """Elements of one row of one block."""

    @property
    def extent(self) -> int:
        """Bytes from the first element to behind the last that the kernel may touch."""
        touched = (*self.expected.reads, *self.expected.writes)
        if not touched:
            return 0
        last = max(touched)
        return ((self.rows - 1) * self.row_stride + last * self.block_stride + self.hidden) * _ELEM_BYTES

    def offset(self, block: int) -> int:
        """Returns the byte offset of a block within a row."""
        return block * self.block_stride * _ELEM_BYTES

    def ranges(self, start: int) -> Ranges:
        """Returns where the rows of a block lie that starts at `start` in the first row."""
        return Ranges(start=start, step=self.row_stride * _ELEM_BYTES, count=self.rows, size=self.hidden * _ELEM_BYTES)


def check_geometry(
    expected: Sequence[Expected], tensors: Sequence[torch.Tensor], *, hidden: int, tensor_index: int, device: str
) -> tuple[View, ...]:
    """Checks dtype, device, rank, row length, strides and row counts.

    Args:
      expected: what each operand must be; `out`, or else the first, gives the rows that the others are held to.
      tensors: the operands, in the same order.
      hidden: row length in elements.
      tensor_index: what `get_device()` returns for tensors on the right device.
      device: the right device, for messages.

    Raises:
      OperandError: one line for every problem.
    """
    problems: list[str] = []
    views = []
    for what, tensor in zip(expected, tensors, strict=True):
        found = _problems(what, tensor, hidden, tensor_index, device)
        problems += found
        if not found:
            views.append(_view(what, tensor))
    if not problems:
        problems = _row_problems(views)
    if problems:
        raise OperandError("\n".join(problems))
    return tuple(views)


def vector_problems(
    name: str, tensor: object, shape: Sequence[int], dtype: torch.dtype, *, alignment: int = ALIGNMENT
) -> list[str]:
    """Lists what is wrong with a contiguous tensor that is bound ahead of launches; empty when it will do.

    Args:
      name: what messages call it.
      tensor: the tensor.
      shape: wanted shape; -1 allows any length.
      dtype: wanted dtype.
      alignment: bytes to which it must be aligned.
    """
    if not isinstance(tensor, torch.Tensor):
        return [f"{name} is {type(tensor).__name__}; a torch tensor {list(shape)} of {dtype} is wanted"]
    if tensor.layout != torch.strided or tensor.is_nested:
        return [f"{name} is {describe(tensor)}; a dense tensor of {dtype} is wanted"]
    problems = []
    if tensor.dtype != dtype:
        problems.append(f"{name} is {tensor.dtype}; {dtype} is wanted")
    if not _has_shape(tensor, shape):
        wanted = ", ".join("any" if want < 0 else str(want) for want in shape)
        problems.append(f"{name} is {list(tensor.shape)}; [{wanted}] is wanted")
    elif not tensor.is_contiguous():
        problems.append(f"{name} has strides {tensor.stride()}; it must be contiguous")
    elif tensor.device.type != "meta":
        faults = memory_problems(name, tensor)
        if not faults and tensor.data_ptr() % alignment:
            faults = [f"{name} starts at {tensor.data_ptr():#x}; it must be aligned to {alignment} bytes"]
        problems += faults
    return problems


def _has_shape(tensor: torch.Tensor, shape: Sequence[int]) -> bool:
    found = tensor.shape
    if -1 not in shape:
        return found == shape
    return len(shape) == len(found) and not [0 for want, got in zip(shape, found, strict=True) if want not in (-1, got)]


def describe(tensor: object) -> str:
    """Describes a tensor for a message: dtype, shape, strides, device."""
    if not isinstance(tensor, torch.Tensor):
        return f"{type(tensor).__name__} {tensor!r:.60}"
    if tensor.is_nested:
        return f"a nested {tensor.dtype} tensor on {tensor.device}"
    strides = f" with strides {list(tensor.stride())}" if tensor.layout == torch.strided else f" ({tensor.layout})"
    return f"{tensor.dtype} {list(tensor.shape)}{strides} on {tensor.device}"


def _problems(what: Expected, tensor: object, hidden: int, tensor_index: int, device: str) -> list[str]:
    shape = f"[rows, {hidden}]" if what.blocks is None else f"[rows, B, {hidden}]"
    rank = 2 if what.blocks is None else 3
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_nested:
        return [f"{what.name} is {describe(tensor)}; a dense torch.bfloat16 tensor {shape} is wanted"]
    wanted = None
    if tensor.dtype != torch.bfloat16:
        wanted = "torch.bfloat16"
    elif tensor.dim() != rank or tensor.shape[-1] != hidden:
        wanted = f"a tensor {shape}"
    elif tensor.get_device() != tensor_index or tensor.device.type == "meta":
        wanted = f"a tensor on {device}"
    if wanted is not None:
        return [f"{what.name} is {describe(tensor)}; {wanted} is wanted"]
    return _layout_problems(what, tensor)


def _layout_problems(what: Expected, tensor: torch.Tensor) -> list[str]:
    problems = []
    if tensor.stride(-1) != 1:
        problems.append(f"{what.name} is {describe(tensor)}; its last stride must be 1")
    if what.blocks is not None and tensor.shape[1] < what.blocks:
        problems.append(f"{what.name} holds {tensor.shape[1]} blocks per row; at least {what.blocks} are wanted")
    for dim, unit in enumerate(("rows", "blocks")[: tensor.dim() - 1]):
        if tensor.shape[dim] > 1:  # a stride that is never followed may be anything
            problems += [
                f"{what.name} has {tensor.stride(dim)} elements between {unit}; {fault}"
                for fault in _stride_faults(tensor.stride(dim))
            ]
    if not problems and tensor.shape[0] > _MAX_ROWS:
        problems.append(f"{what.name} has {tensor.shape[0]} rows; at most {_MAX_ROWS} are allowed")
    return problems or _self_overlap(_view(what, tensor)) or memory_problems(what.name, tensor)


def _stride_faults(stride: int) -> Iterator[str]:
    if stride % VECTOR_ELEMS:
        yield f"a multiple of {VECTOR_ELEMS} ({ALIGNMENT} bytes) is wanted"
    elif stride // VECTOR_ELEMS > MAX_STRIDE:
        yield f"at most {MAX_STRIDE * VECTOR_ELEMS} are allowed"


def _self_overlap(view: View) -> list[str]:
    """Lists the problem of an operand that is written where another of its rows or blocks lies."""
    what = view.expected
    apart = view.rows < 2 or view.row_stride >= view.hidden
    for block in what.writes:
        others = [other for other in what.reads if other != block]
        if not apart or any(rows_touch(view, view.offset(block), view, view.offset(other)) for other in others):
            strides = [view.row_stride, view.block_stride][: 1 if what.blocks is None else 2]
            return [f"{what.name} is written, but rows or blocks of it overlap, with strides {strides}; copy it first"]
    return []


def rows_touch(one: View, start: int, other: View, other_start: int) -> bool:
    """Tells whether any row of one operand shares a byte with any row of another.

    Args:
      one: an operand.
      start: address of one block of its first row.
      other: another operand, or the same.
      other_start: address of one block of its first row.
    """
    return bool(one.rows and other.rows) and ranges_touch(one.ranges(start), other.ranges(other_start))


def _view(what: Expected, tensor: torch.Tensor) -> View:
    rows = tensor.shape[0]
    blocks = tensor.shape[1] if what.blocks is not None else 1
    return View(
        expected=what,
        rows=rows,
        row_stride=tensor.stride(0) if rows > 1 else 0,
        block_stride=tensor.stride(1) if blocks > 1 else 0,
        hidden=tensor.shape[-1],
    )


def _row_problems(views: Sequence[View]) -> list[str]:
    rows = next((view.rows for view in views if view.expected.name == "out"), views[0].rows)
    return [
        f"{view.expected.name} has {view.rows} rows, but out has {rows}; all operands of a launch need the same number"
        for view in views
        if view.rows != rows
    ]

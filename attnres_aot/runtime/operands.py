"""Checks the operands of a launch: geometry once per shape, addresses whenever they change.

A geometry (dtype, device, shape, strides) that passed is remembered by the caller, so these checks run once for each.
Every problem of one call is reported together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnres_aot.errors import OperandError

ALIGNMENT = 16
"""Bytes to which every row must be aligned."""
VECTOR_ELEMS = 8
"""bf16 elements in 16 bytes, the unit of strides in kernel arguments."""
_ELEM_BYTES = 2
_MAX_STRIDE = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
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

    def offsets(self, blocks: tuple[int, ...]) -> list[int]:
        """Returns the byte offset, within a row, of each of `blocks`."""
        return [block * self.block_stride * _ELEM_BYTES for block in blocks]


def check_geometry(
    expected: Sequence[Expected], tensors: Sequence[torch.Tensor], *, hidden: int, tensor_index: int, device: str
) -> tuple[View, ...]:
    """Checks dtype, device, rank, row length, strides and row counts.

    Args:
      expected: what each operand must be; one of them is `out`, which gives the rows that the others are held to.
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
    problems = []
    if tensor.dtype != dtype:
        problems.append(f"{name} is {tensor.dtype}; {dtype} is wanted")
    if len(shape) != tensor.dim() or any(want not in (-1, got) for want, got in zip(shape, tensor.shape, strict=True)):
        wanted = ", ".join("any" if want < 0 else str(want) for want in shape)
        problems.append(f"{name} is {list(tensor.shape)}; [{wanted}] is wanted")
    elif not tensor.is_contiguous():
        problems.append(f"{name} has strides {tensor.stride()}; it must be contiguous")
    elif tensor.device.type != "meta" and tensor.data_ptr() % alignment:
        problems.append(f"{name} starts at {tensor.data_ptr():#x}; it must be aligned to {alignment} bytes")
    return problems


def describe(tensor: object) -> str:
    """Describes a tensor for a message: dtype, shape, strides, device."""
    if not isinstance(tensor, torch.Tensor):
        return f"{type(tensor).__name__} {tensor!r:.60}"
    strides = f" with strides {list(tensor.stride())}" if tensor.layout == torch.strided else f" ({tensor.layout})"
    return f"{tensor.dtype} {list(tensor.shape)}{strides} on {tensor.device}"


def _problems(what: Expected, tensor: object, hidden: int, tensor_index: int, device: str) -> list[str]:
    shape = f"[rows, {hidden}]" if what.blocks is None else f"[rows, B, {hidden}]"
    rank = 2 if what.blocks is None else 3
    wanted = None
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        return [f"{what.name} is {describe(tensor)}; a dense torch.bfloat16 tensor {shape} is wanted"]
    if tensor.dtype != torch.bfloat16:
        wanted = "torch.bfloat16"
    elif tensor.dim() != rank or tensor.shape[-1] != hidden:
        wanted = f"a tensor {shape}"
    elif tensor.get_device() != tensor_index or tensor.device.type == "meta":
        wanted = f"a tensor on {device}"
    if wanted is not None:
        return [f"{what.name} is {describe(tensor)}; {wanted} is wanted"]
    problems = []
    if tensor.stride(-1) != 1:
        problems.append(f"{what.name} is {describe(tensor)}; its last stride must be 1")
    if what.blocks is not None and tensor.shape[1] < what.blocks:
        problems.append(f"{what.name} holds {tensor.shape[1]} blocks per row; at least {what.blocks} are wanted")
    for dim, unit in enumerate(("rows", "blocks")[: rank - 1]):
        stride = tensor.stride(dim)
        if tensor.shape[dim] < 2:  # a stride that is never followed may be anything
            continue
        if stride % VECTOR_ELEMS:
            problems.append(
                f"{what.name} has {stride} elements between {unit}; a multiple of {VECTOR_ELEMS} ({ALIGNMENT} bytes) "
                "is wanted"
            )
        elif stride // VECTOR_ELEMS > _MAX_STRIDE:
            most = _MAX_STRIDE * VECTOR_ELEMS
            problems.append(f"{what.name} has {stride} elements between {unit}; at most {most} are allowed")
        elif what.writes and stride < hidden and (dim == 0 or len({*what.reads, *what.writes}) > 1):
            problems.append(f"{what.name} has {stride} elements between {unit}, so its {unit} overlap; it is written")
    return problems


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
    rows = next(view.rows for view in views if view.expected.name == "out")
    return [
        f"{view.expected.name} has {view.rows} rows, but out has {rows}; all operands of a launch need the same number"
        for view in views
        if view.rows != rows
    ]

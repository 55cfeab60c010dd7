"""The parameter lists of the kernels: what the builder proves a binary has, and what a manifest records.

Every image of one kernel takes the same list, so a launch is prepared the same way for all of them; what an image
does not use is passed as 0. Offsets follow the C rule (each parameter aligned to its size), which is what the compiler
emits and what `cuKernelGetParamInfo` reports.

Strides count 16-byte vectors (8 bf16 elements), because every row must be 16-byte aligned anyway and 32 bits of
them reach 32 GiB. A kernel takes its list as one named tuple, so the names here are the only ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from attnres_aot.records import record

KIND_BYTES = {"pointer": 8, "i32": 4, "i64": 8, "f32": 4}
"""Bytes of one parameter, by kind."""
MIN_EPS = 1e-30
"""Smallest epsilon: a kernel takes reciprocal square roots of normal fp32 numbers only, and 1/256 of this is one."""


@record(frozen=True, slots=True, kw_only=True)
class Param:
    """One kernel parameter."""

    name: str
    """What the argument is; the loader fills arguments by this name."""
    kind: str
    """A key of KIND_BYTES."""
    offset: int
    """Byte offset in the parameter block."""
    size: int
    """Bytes."""


def lay_out(fields: Sequence[tuple[str, str]]) -> tuple[Param, ...]:
    """Places (name, kind) pairs one after another, each aligned to its size."""
    params = []
    offset = 0
    for name, kind in fields:
        size = KIND_BYTES[kind]
        offset = -(-offset // size) * size
        params.append(Param(name=name, kind=kind, offset=offset, size=size))
        offset += size
    return tuple(params)


CONSUMER_PARAMS = lay_out(
    [
        ("source", "pointer"),  # [rows, H] bf16, or the mailbox [slots, capacity, H] bf16
        ("prefix", "pointer"),  # [rows, H] bf16, updated in place
        ("blocks", "pointer"),  # [rows, B, H] bf16
        ("norm", "pointer"),  # [H] bf16
        ("query", "pointer"),  # [H] bf16
        ("out_norm", "pointer"),  # [H] bf16
        ("out", "pointer"),  # [rows, H] bf16
        ("aux", "pointer"),  # [rows, H] bf16, or 0: no copy
        ("mixture", "pointer"),  # [cap, H] fp32, contiguous; statistics only
        ("scal", "pointer"),  # [cap, 2] fp32, contiguous; statistics only
        ("fault", "pointer"),  # [4] u32 host-visible record of a spin that ran out, or 0: trap without a record
        ("source_row_stride", "i32"),  # vectors; a mailbox: H / 8
        ("source_slot_stride", "i32"),  # vectors between mailbox slots (capacity * H / 8); ordinary: 0
        ("prefix_row_stride", "i32"),  # vectors
        ("blocks_row_stride", "i32"),  # vectors between rows of blocks
        ("blocks_block_stride", "i32"),  # vectors between blocks of one row
        ("out_row_stride", "i32"),  # vectors
        ("aux_row_stride", "i32"),  # vectors
        ("write", "i32"),  # block that receives the updated prefix, or -1
        ("rows", "i32"),
        ("spin_budget", "i32"),  # polls before a ring kernel traps; 0: never
        ("fault_tag", "i32"),  # written to the fault record to name the launch
        ("early", "i32"),  # nonzero: a mailbox is polled, and everything written, before the dependency wait
        ("eps", "f32"),  # MIN_EPS or more, as out_eps
        ("out_eps", "f32"),
    ]
)
"""Parameters of every consumer image, in order."""

STATISTICS_PARAMS = lay_out(
    [
        ("blocks", "pointer"),  # [rows, B, H] bf16
        ("norm", "pointer"),  # [H] bf16
        ("query", "pointer"),  # [H] bf16
        ("mixture", "pointer"),  # [cap, H] fp32, contiguous, written
        ("scal", "pointer"),  # [cap, 2] fp32, contiguous, written
        ("blocks_row_stride", "i32"),  # vectors between rows of blocks
        ("blocks_block_stride", "i32"),  # vectors between blocks of one row
        ("rows", "i32"),
        ("eps", "f32"),
    ]
)
"""Parameters of every image of the statistics producer, in order."""

PUBLISH_PARAMS = lay_out(
    [
        ("source", "pointer"),  # [rows, H] bf16
        ("mailbox", "pointer"),  # one mailbox slot [capacity, H] bf16, contiguous, written
        ("source_row_stride", "i32"),  # vectors
        ("rows", "i32"),
    ]
)
"""Parameters of every image of the publisher, in order."""

KERNEL_PARAMS = {"consumer": CONSUMER_PARAMS, "statistics": STATISTICS_PARAMS, "publish": PUBLISH_PARAMS}
"""Kernel -> its parameter list; in a manifest a list goes by the kernel's name."""

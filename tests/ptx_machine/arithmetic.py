"""Arithmetic of PTX on tensors of registers: int32 and int64 words, bool predicates, one element per thread.

fp32 follows IEEE 754 with subnormals, fma rounds once. Approximate functions are modelled as correctly rounded, or as
off by any amount that they may be off by; `.ftz` flushes subnormal operands and results. An opcode that is not in
`OPERATIONS` does not exist for the machine.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF
SMALLEST_NORMAL = 2.0**-126
MAX_ERROR = 2.0**-22
"""Relative error that approximate functions are granted."""


def f32(word: Tensor) -> Tensor:
    """Words as fp32."""
    return word.view(torch.float32)


def unsigned(word: Tensor) -> Tensor:
    """Words as what they are without a sign, in int64."""
    return word.long() & MASK32


def low32(value: Tensor) -> Tensor:
    """The low halves of int64."""
    return ((value + 0x80000000) & MASK32).sub_(0x80000000).int()


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c, rounded once: exact product, sum in fp64 rounded to odd, which a second rounding cannot harm."""
    product, addend = f32(a).double() * f32(b).double(), f32(c).double()
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    inexact = (error.abs() > 0) & total.isfinite()
    bits = total.view(torch.int64)
    even = inexact & (bits & 1 == 0)
    bits = bits + torch.where(even, torch.where((error > 0) == (total > 0), 1, -1), 0)
    return bits.view(torch.float64).float().view(torch.int32)


def binary(operation: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """An operation on fp32 as one on words."""
    return lambda a, b: operation(f32(a), f32(b)).view(torch.int32)


def maximum(a: Tensor, b: Tensor) -> Tensor:
    """A NaN loses, and so does -0.0 against +0.0."""
    return torch.where(f32(a) == f32(b), a & b, torch.fmax(f32(a), f32(b)).view(torch.int32))


def flush(value: Tensor) -> Tensor:
    """Replaces subnormals by zeros of their sign."""
    return torch.where(value.abs() < SMALLEST_NORMAL, value * 0.0, value)


def approximate(
    operation: Callable[[Tensor], Tensor], *, ftz: bool, seed: int | None = None
) -> Callable[[Tensor], Tensor]:
    """A function of fp32, correctly rounded; or, with a seed, off by up to MAX_ERROR as a function of its operand."""

    def evaluate(word: Tensor) -> Tensor:
        value = f32(word)
        result = operation((flush(value) if ftz else value).double())
        if seed is not None:
            mixed = (word.long() * 0x9E3779B1 + seed * 0x85EBCA77) & MASK32
            mixed = ((mixed ^ mixed >> 15) * 0x2C1B3C6D & MASK32) >> 8
            result = result * (1 + MAX_ERROR * (mixed.double() / (1 << 23) - 1))
        result = result.float()
        return (flush(result) if ftz else result).view(torch.int32)

    return evaluate


def to_bf16(word: Tensor) -> Tensor:
    """Bits of fp32 rounded to nearest even bf16, in int64."""
    bits = unsigned(word)
    return torch.where(f32(word).isnan(), 0x7FFF, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


def pack_bf16(high: Tensor, low: Tensor) -> Tensor:
    """Two fp32 as one word of two bf16."""
    return low32(to_bf16(high) << 16 | to_bf16(low))


def add_bf16(a: Tensor, b: Tensor) -> Tensor:
    """Adds pairs of bf16: the sum in fp64, rounded to odd fp32, which a second rounding cannot harm."""

    def rounded(left: Tensor, right: Tensor) -> Tensor:
        total = f32(left).double() + f32(right).double()
        single = total.float()
        inexact = total.isfinite() & single.isfinite() & (single.double() != total)
        larger = inexact & (single.double().abs() > total.abs())
        return to_bf16(low32(unsigned(single.view(torch.int32)) - larger.long() | inexact.long()))

    return low32(rounded(a & -0x10000, b & -0x10000) << 16 | rounded(a << 16, b << 16))


def unordered_or(operation: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """A comparison of fp32 that NaN passes."""
    return lambda a, b: operation(f32(a), f32(b)) | f32(a).isnan() | f32(b).isnan()


def _shift(count: Tensor, width: int) -> Tensor:
    """A shift count, for the machine's own shifts, which do not go beyond the width."""
    assert int(count.min()) >= 0
    assert int(count.max()) < width
    return count


def approximations(seed: int | None = None) -> dict[str, Callable[..., Tensor]]:
    """The approximate functions, as `approximate` makes them."""
    return {
        "ex2.approx.f32": approximate(torch.exp2, ftz=False, seed=seed),
        "ex2.approx.ftz.f32": approximate(torch.exp2, ftz=True, seed=seed),
        "rsqrt.approx.ftz.f32": approximate(torch.rsqrt, ftz=True, seed=seed),
        "rcp.approx.ftz.f32": approximate(torch.reciprocal, ftz=True, seed=seed),
    }


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "add.s32": torch.add,
    "add.s64": torch.add,
    "sub.s32": torch.sub,
    "mul.lo.s32": torch.mul,
    "mul.lo.s64": torch.mul,
    "mul.hi.u32": lambda a, b: low32(unsigned(a) * unsigned(b) >> 32),
    "mul.wide.s32": lambda a, b: a.long() * b.long(),
    "mul.wide.u32": lambda a, b: unsigned(a) * unsigned(b),
    "mad.lo.s32": lambda a, b, c: a * b + c,
    "mad.lo.s64": lambda a, b, c: a * b + c,
    "and.b32": torch.bitwise_and,
    "or.b32": torch.bitwise_or,
    "and.pred": torch.logical_and,
    "or.pred": torch.logical_or,
    "shl.b32": lambda a, n: a << _shift(n, 32),
    "shl.b64": lambda a, n: a << _shift(n, 64).long(),
    "shr.u32": lambda a, n: low32(unsigned(a) >> _shift(n, 32)),
    "cvt.s64.s32": lambda a: a.long(),
    "cvt.u64.u32": unsigned,
    "selp.b32": lambda a, b, p: torch.where(p, a, b),
    "selp.f32": lambda a, b, p: torch.where(p, a, b),
    "setp.eq.b32": torch.eq,
    "setp.ne.b32": torch.ne,
    "setp.ne.s32": torch.ne,
    "setp.eq.b64": torch.eq,
    "setp.ne.s64": torch.ne,
    "setp.gt.s32": torch.gt,
    "setp.lt.s32": torch.lt,
    "setp.lt.u32": lambda a, b: unsigned(a) < unsigned(b),
    "setp.gt.u32": lambda a, b: unsigned(a) > unsigned(b),
    "setp.gt.f32": lambda a, b: f32(a) > f32(b),
    "setp.geu.f32": unordered_or(torch.ge),
    "setp.leu.f32": unordered_or(torch.le),
    "add.f32": binary(torch.add),
    "sub.f32": binary(torch.sub),
    "mul.f32": binary(torch.mul),
    "min.s32": torch.minimum,
    "max.f32": maximum,
    "fma.rn.f32": fma,
    "cvt.rn.bf16x2.f32": pack_bf16,
    "add.rn.bf16x2": add_bf16,
    "abs.f32": lambda a: a & 0x7FFFFFFF,
    "neg.f32": lambda a: a ^ -0x80000000,
    **approximations(),
}
"""Opcode -> its result from its operands."""

"""The fp64 reference of the consumer: what every kernel's result is compared with, on any torch device.

Written from the kernel contract alone and sharing no code with the kernels. Bit-exact parts (slot sum, updated
prefix) follow the contract's rounding points in fp32 and bf16; everything after the updated prefix is fp64.

The output comes with an interval, because correct fp32 arithmetic cannot always come within one bf16 ulp: where the
terms of an element cancel, or logits are large and close, a rounding error of fp32 size is many ulps of a small
result. `low` and `high` bound what a careful fp32 evaluation can return (see `_mix_error`).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from attnres_aot.spec.variants import Variant

ARMED_WORD = -0x80000000
"""An empty mailbox word as int32: the bf16 pair (low +0.0, high -0.0)."""
NEGATIVE_ZERO = -0x8000
"""Bits of bf16 -0.0 as int16: what a publisher never writes."""
FP32_ROUNDING = 2.0**-24
"""Unit roundoff of fp32."""
ERROR_FACTOR = 12.0
"""Rounding errors granted per fp32 quantity: a few operations, an rsqrt or the square of an exp2 (2**-22)."""
LARGEST_SQUARES = 2.0**127
"""Sum of squares of a source up to which a kernel must give a finite result, with a factor of 2 to spare in fp32."""
SMALLEST_FP32 = 2.0**-149
"""Smallest fp32 subnormal: the absolute rounding error where results underflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """The tensors of one launch, all on one device."""

    source: Tensor
    """[rows, H] bf16, or the published mailbox [slots, capacity, H] bf16."""
    prefix: Tensor
    """[rows, H] bf16; read only by variants with a delta."""
    blocks: Tensor
    """[rows, B, H] bf16; blocks 0..nb-1 are read unless statistics are given."""
    norm: Tensor
    """[H] bf16."""
    query: Tensor
    """[H] bf16."""
    out_norm: Tensor
    """[H] bf16."""
    out: Tensor
    """[rows, H] bf16, written."""
    mixture: Tensor | None = None
    """[capacity, H] fp32 for statistics variants."""
    scal: Tensor | None = None
    """[capacity, 2] fp32 (maximum logit, sum of exponentials) for statistics variants."""
    aux: Tensor | None = None
    """[rows, H] bf16 for aux variants, written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What one launch must write, and how close it can come."""

    updated: Tensor
    """[rows, H] bf16: the updated prefix, which prefix, aux and the written block must hold bit for bit."""
    exact: Tensor
    """[rows, H] fp64: the output before its last rounding."""
    out: Tensor
    """[rows, H] bf16: `exact` rounded once."""
    low: Tensor
    """[rows, H] bf16: smallest value that fp32 arithmetic may return where the result is ill-conditioned."""
    high: Tensor
    """[rows, H] bf16: largest such value."""
    defined: Tensor
    """[rows] bool: fp32 holds the sum of squares of every source, so that none is Inf; elsewhere NaN or Inf may stand
    for what is finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactStatistics:
    """What a statistics producer must write, in fp64, and how far off a careful fp32 evaluation may be.

    Errors of total and mixture are those that remain once both are scaled from the maximum found to the exact one.
    """

    maximum: Tensor
    """[rows]: largest logit."""
    total: Tensor
    """[rows]: sum of exponentials."""
    mixture: Tensor
    """[rows, H]: un-normalised."""
    maximum_error: Tensor
    """[rows]."""
    total_error: Tensor
    """[rows]."""
    mixture_error: Tensor
    """[rows, H]."""
    defined: Tensor
    """[rows] bool, as in `Expected`."""


def consume(variant: Variant, operands: Operands, eps: tuple[float, float]) -> Expected:
    """Computes what a launch of `variant` must write.

    Args:
      variant: which consumer; its write index and aux option do not change the values.
      operands: inputs as they are before the launch.
      eps: added to the mean square of each source, and to that of the mixture; used as fp32.
    """
    updated = updated_prefix(variant, operands)
    point = updated.double()
    under, out_eps = map(fp32, eps)
    weight = operands.norm.double() * operands.query.double()
    sources = [point]
    if variant.key.nb == 0:
        mix, error = point, torch.zeros_like(point)
    elif variant.stats:
        assert operands.mixture is not None
        assert operands.scal is not None
        rows = point.shape[0]
        maximum, total = operands.scal[:rows].double().unbind(-1)
        logit, spread = _logits(point, weight, under)
        values = torch.stack([operands.mixture[:rows].double() / total[:, None], point], 1)
        logits = torch.stack([maximum, logit], 1)
        spreads = torch.stack([torch.zeros_like(spread), spread], 1)
        sources.append(operands.mixture[:rows].double())
        mix, error = _mix(values, logits, spreads, torch.stack([total, torch.ones_like(total)], 1))
    else:
        values = torch.cat([operands.blocks[:, : variant.key.nb].double(), point[:, None]], 1)
        logits, spreads = _logits(values, weight, under)
        sources += values[:, :-1].unbind(1)
        mix, error = _mix(values, logits, spreads, torch.ones_like(logits))
    return Expected(
        updated=updated,
        defined=_squares_fit(torch.stack(sources, 1)),
        **_normalise(mix, error, operands.out_norm.double(), out_eps, final=variant.key.final),
    )


def updated_prefix(variant: Variant, operands: Operands) -> Tensor:
    """Returns the updated prefix [rows, H] in bf16: one rounding per step that the contract names."""
    rows = operands.prefix.shape[0]
    source = operands.source[:, :rows] if variant.slots else operands.source[None]
    delta = source[0]
    if variant.slots > 1:
        total = source[0].float()
        for slot in source[1:]:
            total = total + slot.float()
        delta = total.to(torch.bfloat16)
    return operands.prefix + delta if variant.key.has_delta else delta.clone()


def statistics(blocks: Tensor, nb: int, norm: Tensor, query: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Computes the statistics of the saved blocks that a statistics variant takes.

    Args:
      blocks: [rows, B, H] bf16 with B >= nb >= 1.
      nb: saved blocks to mix.
      norm: [H] bf16.
      query: [H] bf16.
      eps: added to the mean squares; used as fp32.

    Returns:
      mixture [rows, H] fp32 (un-normalised) and scal [rows, 2] fp32: maximum logit and sum of exponentials.
    """
    exact = exact_statistics(blocks, nb, norm, query, eps)
    return exact.mixture.float(), torch.stack([exact.maximum, exact.total], -1).float()


def exact_statistics(blocks: Tensor, nb: int, norm: Tensor, query: Tensor, eps: float) -> ExactStatistics:
    """Computes the statistics of the saved blocks in fp64, with how close fp32 can come; arguments as above."""
    values = blocks[:, :nb].double()
    logits, spreads = _logits(values, norm.double() * query.double(), fp32(eps))
    maximum = logits.amax(-1)
    weights = (logits - maximum[:, None]).exp()
    unit = ERROR_FACTOR * FP32_ROUNDING
    moved = unit * (logits.abs() + maximum.abs()[:, None] + spreads + 1)
    off = weights * moved.expm1() + 4 * SMALLEST_FP32
    return ExactStatistics(
        maximum=maximum,
        total=weights.sum(-1),
        mixture=torch.einsum("rs,rsh->rh", weights, values),
        maximum_error=moved.amax(-1),
        total_error=off.sum(-1),
        mixture_error=torch.einsum("rs,rsh->rh", off, values.abs()) + 4 * SMALLEST_FP32,
        defined=_squares_fit(values),
    )


def publish(mailbox: Tensor, slot: int, values: Tensor) -> None:
    """Writes `values` [rows, H] bf16 into the first rows of a mailbox slot, with -0.0 made +0.0."""
    bits = values.contiguous().view(torch.int16)
    mailbox[slot, : values.shape[0]].view(torch.int16).copy_(bits.masked_fill(bits == NEGATIVE_ZERO, 0))


def arm(mailbox: Tensor) -> None:
    """Marks every word of a mailbox, or of some rows of one, as empty."""
    mailbox.view(torch.int32).fill_(ARMED_WORD)


def is_armed(mailbox: Tensor) -> Tensor:
    """Tells per 32-bit word of a mailbox, or of some rows of one, whether it is empty; the last dimension is halved."""
    return mailbox.view(torch.int32) == ARMED_WORD


def ulp_distance(left: Tensor, right: Tensor) -> Tensor:
    """Counts bf16 steps between finite bf16 tensors, element by element, as int32; +0.0 and -0.0 coincide."""
    return (_ordered(left) - _ordered(right)).abs()


def round_to_bf16(values: Tensor) -> Tensor:
    """Rounds fp64 to bf16 once, to nearest even; going through fp32 is harmless because that step rounds to odd."""
    narrow = values.float()
    bits = narrow.view(torch.int32)
    wide = narrow.double()
    inexact = values.isfinite() & (wide != values) & (bits & 1 == 0)
    towards = torch.where(values.abs() > wide.abs(), 1, -1).to(torch.int32)
    return torch.where(inexact, bits + towards, bits).view(torch.float32).to(torch.bfloat16)


def fp32(value: float) -> float:
    """Returns `value` rounded to fp32, which is how scalars reach a kernel."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def _ordered(values: Tensor) -> Tensor:
    bits = values.contiguous().view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def _logits(values: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the logit of each row and the size of its terms, sqrt(sum (v w)^2) / rms, which drives its error."""
    scale = (values.square().mean(-1) + eps).rsqrt()
    terms = values * weight
    return terms.sum(-1) * scale, terms.square().sum(-1).sqrt() * scale


def _squares_fit(values: Tensor) -> Tensor:
    """Tells [rows] of `values` [rows, sources, H] where no source is too large for its squares."""
    return values.square().sum(-1).amax(-1) <= LARGEST_SQUARES


def _mix(values: Tensor, logits: Tensor, spreads: Tensor, multiplicity: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the softmax mixture [rows, H] of `values` [rows, sources, H] and the fp32 error to expect of it."""
    maximum = logits.amax(-1, keepdim=True)
    weights = multiplicity * (logits - maximum).exp()
    weights = weights / weights.sum(-1, keepdim=True)
    mix = torch.einsum("rs,rsh->rh", weights, values)
    return mix, _mix_error(values, weights, mix, logits.abs() + maximum.abs() + spreads)


def _mix_error(values: Tensor, weights: Tensor, mix: Tensor, logit_size: Tensor) -> Tensor:
    """First-order error of an fp32 mixture.

    A logit is off by a few roundings of its own size, of the maximum's and of its terms' (as random signs add up);
    moving logit s by d moves the mixture by weight_s * (v_s - mix) * d. Products and sums add roundings of the terms.
    """
    unit = ERROR_FACTOR * FP32_ROUNDING
    moved = torch.zeros_like(mix)
    for s in range(values.shape[1]):
        share = weights[:, s, None]
        value = values[:, s]
        moved += share * ((value - mix).abs() * logit_size[:, s, None] + value.abs())
    return unit * moved + 4 * SMALLEST_FP32


def _normalise(mix: Tensor, error: Tensor, out_norm: Tensor, out_eps: float, *, final: bool) -> dict[str, Tensor]:
    """Returns the output, its rounding and its bounds, by the names of their fields in `Expected`."""
    low, high = mix - error, mix + error
    if final:
        mix, low, high = (round_to_bf16(value).double() for value in (mix, low, high))
    scale = (mix.square().mean(-1, keepdim=True) + out_eps).rsqrt()
    gain = scale * out_norm
    exact = mix * gain
    scale_error = error.square().mean(-1, keepdim=True).sqrt() * scale + ERROR_FACTOR * FP32_ROUNDING
    slack = exact.abs() * scale_error + SMALLEST_FP32
    ends = torch.stack([low * gain, high * gain])
    return {
        "exact": exact,
        "out": round_to_bf16(exact),
        "low": round_to_bf16(ends.amin(0) - slack),
        "high": round_to_bf16(ends.amax(0) + slack),
    }

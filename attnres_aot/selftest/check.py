"""Judging a launch: memory bit for bit, the output against the fp64 interval, with few host synchronisations."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from attnres_aot.selftest import reference
from attnres_aot.selftest.arena import Arena
from attnres_aot.selftest.cases import Prepared
from attnres_aot.spec.variants import Variant

MAX_RELATIVE_ERROR = 2.0e-3
"""Largest ||out - exact|| / ||exact|| over typical rows; rounding to bf16 alone gives 1.66e-3, cutting off 2.9e-3."""
MAX_PROBLEMS = 6
"""Problems described per case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one launch was found to do."""

    problems: tuple[str, ...]
    """What is wrong, in words; empty when the launch is right."""
    elements: int
    """Output elements that were compared."""
    relative_error: float | None = None
    """||out - exact|| / ||exact|| over the typical rows; None when there are none, or elements are compared as bits."""
    worst_ulp: int = 0
    """Largest bf16 distance from the rounded fp64 result, ill-conditioned elements aside; consumers only."""
    fp32_limited: int = 0
    """Elements further off than the contract's ulps, but within what fp32 arithmetic can reach; consumers only."""


def ulp_limit(variant: Variant) -> int:
    """Returns how many bf16 steps the contract allows the output of `variant`."""
    return 2 if variant.key.final else 1


def judge(prepared: Prepared) -> Verdict:
    """Compares the memory of a case after its launch with what it must hold; one host synchronisation when right."""
    limit = ulp_limit(prepared.case.variant)
    out, expected = prepared.arena.views.out, prepared.expected
    typical = prepared.bank.typical[prepared.rows]
    comparison = _compare_out(out, expected, limit)
    wanted = expected_memory(prepared)
    memory_differs = (prepared.arena.words != wanted.words).any()
    error, size = (
        torch.where(typical[:, None], values, 0.0).norm() for values in (out.double() - expected.exact, expected.exact)
    )
    numbers = torch.stack(
        [
            memory_differs.double(),
            comparison.masks_differ.any().double(),
            comparison.wrong.any().double(),
            comparison.distance.masked_fill(comparison.excused, 0).amax().double(),
            comparison.excused.sum().double(),
            error / size,
        ]
    ).tolist()
    relative_error = numbers[5] if any(f.typical for f in prepared.bank.families[prepared.rows]) else None
    problems: list[str] = []
    if numbers[0]:
        problems += describe_memory(prepared.arena, prepared.before, wanted)
    if numbers[1]:
        problems.append(_describe_out(prepared, comparison.masks_differ, "NaN or Inf elsewhere than it must be"))
    if numbers[2]:
        problems.append(_describe_out(prepared, comparison.wrong, f"further off than {limit} ulp"))
    if relative_error is not None and not relative_error <= MAX_RELATIVE_ERROR:
        problems.append(f"relative error {relative_error:.3e} over {MAX_RELATIVE_ERROR:.1e}")
    return Verdict(
        problems=tuple(problems[:MAX_PROBLEMS]),
        worst_ulp=int(numbers[3]),
        relative_error=relative_error,
        elements=out.numel(),
        fp32_limited=int(numbers[4]),
    )


def expected_memory(prepared: Prepared) -> Arena:
    """Returns all memory of the case as it must be after the launch, but with the output rows as they are.

    Where the updated prefix is computed (not copied) and NaN, any NaN is right; its copies must still be its bits.
    """
    variant, wanted = prepared.case.variant, prepared.before.clone()
    views, actual = wanted.views, prepared.arena.views
    updated = prepared.expected.updated
    if variant.key.has_delta or variant.slots > 1:
        updated = torch.where(updated.isnan() & actual.prefix.isnan(), actual.prefix, updated)
    views.prefix.copy_(updated)
    if views.aux is not None:
        views.aux.copy_(updated)
    if variant.key.write is not None:
        views.blocks[:, variant.key.write].copy_(updated)
    if variant.slots:
        reference.arm(views.source[:, : prepared.case.rows])
    views.out.copy_(actual.out)
    return wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """Element by element, [rows, H]."""

    masks_differ: Tensor
    """bool: NaN or Inf on one side only, or Inf of another sign; not where NaN or Inf may stand for what is finite."""
    distance: Tensor
    """int32: bf16 steps from the rounded result; 0 where not compared."""
    excused: Tensor
    """bool: over the limit, but within the interval."""
    wrong: Tensor
    """bool: over the limit and outside the interval."""


def _compare_out(out: Tensor, expected: reference.Expected, limit: int) -> _Comparison:
    finite = out.isfinite() & expected.out.isfinite()
    same = (out.isnan() & expected.out.isnan()) | (out == expected.out)
    distance = reference.ulp_distance(out, expected.out).masked_fill(~finite, 0)
    inside = (out >= expected.low) & (out <= expected.high)
    over = distance > limit
    return _Comparison(
        masks_differ=~finite & ~same & (expected.defined[:, None] | ~expected.out.isfinite()),
        distance=distance,
        excused=over & inside,
        wrong=over & ~inside,
    )


def describe_memory(actual: Arena, before: Arena, wanted: Arena) -> list[str]:
    """Names the places whose memory is not as it must be after a launch, at most one per operand or gap."""
    actual_bits, wanted_bits = actual.words.view(torch.int16), wanted.words.view(torch.int16)
    places = (actual_bits != wanted_bits).nonzero().flatten()
    before_bits = before.words.view(torch.int16)
    edges = sorted(edge for region in wanted.regions for edge in (region.start // 2, region.end // 2))
    bounds = [0, *edges, actual_bits.numel()]
    lines = []
    for first, last in pairwise(bounds):
        here = places[(places >= first) & (places < last)]
        if here.numel():
            at = int(here[0])
            was, want, got = (int(bits[at]) & 0xFFFF for bits in (before_bits, wanted_bits, actual_bits))
            lines.append(
                f"{here.numel()} wrong half-words, first at {wanted.locate(2 * at)}: "
                f"found {got:#06x}, expected {want:#06x}, before the launch {was:#06x}"
            )
    return lines


def _describe_out(prepared: Prepared, mask: Tensor, what: str) -> str:
    row, column = (int(i) for i in mask.nonzero()[0])
    expected = prepared.expected
    rows = mask.any(1).nonzero().flatten().tolist()
    families = sorted({prepared.bank.families[prepared.case.start + r].name for r in rows})
    return (
        f"{int(mask.sum())} of out in {len(rows)} rows (families {', '.join(families)}) {what}, first at "
        f"out[{row}, {column}]: found {float(prepared.arena.views.out[row, column])!r}, expected "
        f"{float(expected.exact[row, column])!r} (fp32 may reach {float(expected.low[row, column])!r} to "
        f"{float(expected.high[row, column])!r})"
    )

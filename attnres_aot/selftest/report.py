"""Reports of a check: one table row per variant or producer, totals per kind of source, as text and JSON data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnres_aot.bundle.manifest import to_json
from attnres_aot.columns import line
from attnres_aot.selftest.suite import Result
from attnres_aot.spec.variants import Producer, Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What was checked, where and how."""

    bundle: str
    """Name and arch of the bundle."""
    manifest_sha256: str
    """Digest of the bundle's manifest, which holds the digests of all its files."""
    variants_in_bundle: int
    """Variants that the bundle has."""
    images_in_bundle: int
    """Images that the bundle has."""
    device: str
    """Name of the GPU."""
    torch: str
    """Version of torch, with its CUDA version."""
    seed: int
    """Seed of the input values."""
    rows: tuple[int, ...]
    """Row counts."""
    seconds: float
    """How long the check took, to a tenth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """The results of several variants together: sums, and the largest of what is largest for each."""

    kind: str
    """Kind of source: `ordinary`, `ring of 8`, ... with `, statistics` or `, final` where they apply."""
    variants: int
    """Variants checked."""
    failed: int
    """Those with a problem."""
    launches: int
    """As in `Result`, and so are those that follow."""
    elements: int
    worst_ulp: int
    relative_error: float
    fp32_limited: int


def kind_of(variant: Variant) -> str:
    """Names the kind of source of a variant, with what else changes its arithmetic."""
    source = f"ring of {variant.slots}" if variant.slots else "ordinary"
    return source + ", statistics" * variant.stats + ", final" * variant.key.final


def total(kind: str, results: Sequence[Result]) -> Total:
    """Adds up results under one name."""
    return Total(
        kind=kind,
        variants=len(results),
        failed=sum(bool(result.problems) for result in results),
        launches=sum(result.launches for result in results),
        elements=sum(result.elements for result in results),
        worst_ulp=max((result.worst_ulp for result in results), default=0),
        relative_error=max((result.relative_error for result in results), default=0.0),
        fp32_limited=sum(result.fp32_limited for result in results),
    )


def split(results: Sequence[Result]) -> tuple[list[Result], list[Result]]:
    """Returns the results of variants, and those of producers."""
    of_variants = [result for result in results if isinstance(result.subject, Variant)]
    return of_variants, [result for result in results if isinstance(result.subject, Producer)]


def totals(results: Sequence[Result]) -> list[Total]:
    """Adds up the results of variants per kind of source, and all of them last."""
    kinds: dict[str, list[Result]] = {}
    for result in results:
        if isinstance(result.subject, Variant):
            kinds.setdefault(kind_of(result.subject), []).append(result)
    return [*(total(kind, found) for kind, found in kinds.items()), total("all", split(results)[0])]


_HEADING = ("launches", "worst ulp", "relative error", "fp32-limited")


def text_header(width: int) -> str:
    """Returns the head of the table whose rows `text_row` formats, for names of up to `width` characters."""
    return _row("variant", _HEADING, "result", width)


def text_row(result: Result, width: int) -> str:
    """Formats one result as a table row, with a line per problem under it."""
    limit = result.ulp_limit
    ulp, limited = ("-", "-") if limit is None else (f"{result.worst_ulp} of {limit}", str(result.fp32_limited))
    cells = (str(result.launches), ulp, f"{result.relative_error:.3e}", limited)
    row = _row(str(result.subject), cells, "FAILED" if result.problems else "ok", width)
    return "\n".join([row, *(f"    {problem}" for problem in result.problems)])


def _row(name: str, cells: Sequence[str], outcome: str, width: int) -> str:
    return line((name, *cells), (width, *map(len, _HEADING))) + f"  {outcome}"


def summary_line(results: Sequence[Result]) -> str:
    """Says the outcome in one line, or one for variants and one for producers."""
    lines = []
    for found, what in zip(split(results), ("variants", "producers"), strict=True):
        if found:
            whole = total(what, found)
            outcome = f"{whole.failed} of {whole.variants} {what} FAILED" if whole.failed else "all right"
            elements, ulp = f"{whole.elements} elements", ""
            if what == "variants":
                elements, ulp = f"{whole.elements} output elements", f"worst {whole.worst_ulp} ulp, "
            lines.append(
                f"{whole.variants} {what}, {whole.launches} launches, {elements}: "
                f"{ulp}worst relative error {whole.relative_error:.3e}; {outcome}"
            )
    return "\n".join(lines) or "nothing was checked"


def report_json(results: Sequence[Result], setting: Setting) -> dict[str, Any]:
    """Returns everything as plain JSON data."""
    variants, producers = split(results)
    return {
        "setting": to_json(setting),
        "totals": [to_json(row) for row in totals(results)],
        "variants": [_result_json(result) for result in variants],
        "producers": [_result_json(result) for result in producers],
    }


def _result_json(result: Result) -> dict[str, Any]:
    found = {"name": str(result.subject), "ok": not result.problems, "launches": result.launches}
    found |= {"elements": result.elements, "relative_error": result.relative_error, "problems": list(result.problems)}
    if result.ulp_limit is not None:
        found |= {"worst_ulp": result.worst_ulp, "ulp_limit": result.ulp_limit, "fp32_limited": result.fp32_limited}
    return found

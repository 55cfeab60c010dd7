"""Reports of a check: one table row per variant, totals per kind of source, as text, Markdown and JSON data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnres_aot.columns import line
from attnres_aot.selftest.producers import ProducerResult
from attnres_aot.selftest.suite import VariantResult
from attnres_aot.spec.variants import Variant


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
    """How long the check took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """The results of several variants together."""

    kind: str
    """Kind of source: `ordinary`, `ring of 8`, ... with `, statistics` or `, final` where they apply."""
    variants: int
    """Variants checked."""
    failed: int
    """Those with a problem."""
    cases: int
    """Launches checked."""
    elements: int
    """Output elements compared."""
    worst_ulp: int
    """Largest distance from the rounded fp64 result among well-conditioned elements."""
    relative_error: float
    """Largest relative error of a case."""
    ill_conditioned: int
    """Elements that fp32 arithmetic cannot decide, and that are within what it can reach."""


def kind_of(variant: Variant) -> str:
    """Names the kind of source of a variant, with what else changes its arithmetic."""
    parts = [f"ring of {variant.slots}" if variant.slots else "ordinary"]
    if variant.stats:
        parts.append("statistics")
    if variant.key.final:
        parts.append("final")
    return ", ".join(parts)


def total(kind: str, results: Sequence[VariantResult]) -> Total:
    """Adds up results under one name."""
    return Total(
        kind=kind,
        variants=len(results),
        failed=sum(bool(result.problems) for result in results),
        cases=sum(result.cases for result in results),
        elements=sum(result.elements for result in results),
        worst_ulp=max((result.worst_ulp for result in results), default=0),
        relative_error=max((result.relative_error for result in results), default=0.0),
        ill_conditioned=sum(result.ill_conditioned for result in results),
    )


def totals(results: Sequence[VariantResult]) -> list[Total]:
    """Adds up results per kind of source, and all of them last."""
    kinds = dict.fromkeys(kind_of(result.variant) for result in results)
    rows = [total(kind, [result for result in results if kind_of(result.variant) == kind]) for kind in kinds]
    return [*rows, total("all", results)]


_HEADING = ("launches", "worst ulp", "relative error", "fp32-limited")


def text_header(width: int) -> str:
    """Returns the head of the table whose rows `text_row` formats, for names of up to `width` characters."""
    return _row("variant", _HEADING, "result", width)


def text_row(result: VariantResult | ProducerResult, width: int) -> str:
    """Formats one variant or producer as a table row, with a line per problem under it."""
    if isinstance(result, VariantResult):
        name, ulp = str(result.variant), f"{result.worst_ulp} of {result.ulp_limit}"
        limited = str(result.ill_conditioned)
    else:
        name, ulp, limited = str(result.producer), "-", "-"
    cells = (str(result.cases), ulp, f"{result.relative_error:.3e}", limited)
    row = _row(name, cells, "FAILED" if result.problems else "ok", width)
    return "\n".join([row, *(f"    {problem}" for problem in result.problems)])


def _row(name: str, cells: Sequence[str], outcome: str, width: int) -> str:
    return line((name, *cells), (width, *map(len, _HEADING))) + f"  {outcome}"


def summary_line(results: Sequence[VariantResult], producers: Sequence[ProducerResult] = ()) -> str:
    """Says the outcome in one line, or one for variants and one for producers."""
    lines = []
    if results:
        whole = total("all", results)
        outcome = f"{whole.failed} of {whole.variants} variants FAILED" if whole.failed else "all right"
        lines.append(
            f"{whole.variants} variants, {whole.cases} launches, {whole.elements} output elements: "
            f"worst {whole.worst_ulp} ulp, worst relative error {whole.relative_error:.3e}; {outcome}"
        )
    if producers:
        failed = sum(bool(result.problems) for result in producers)
        outcome = f"{failed} of {len(producers)} producers FAILED" if failed else "all right"
        cases, elements = (sum(getattr(result, name) for result in producers) for name in ("cases", "elements"))
        worst = max(result.relative_error for result in producers)
        lines.append(
            f"{len(producers)} producers, {cases} launches, {elements} elements: worst relative error {worst:.3e}; "
            f"{outcome}"
        )
    return "\n".join(lines) or "nothing was checked"


def markdown(results: Sequence[VariantResult], setting: Setting, producers: Sequence[ProducerResult] = ()) -> str:
    """Formats the setting, the totals and all problems for a document."""
    rows = ", ".join(map(str, setting.rows))
    circumstances = (
        f"Bundle {setting.bundle} (manifest sha256 {setting.manifest_sha256[:16]}, {setting.variants_in_bundle} "
        f"variants, {setting.images_in_bundle} images); {setting.device}; torch {setting.torch}; rows {rows}; "
        f"seed {setting.seed}; {setting.seconds:.0f} s."
    )
    lines = [
        circumstances,
        "",
        "| source | variants | failed | launches | output elements | worst ulp | worst relative error | fp32-limited |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.kind} | {row.variants} | {row.failed} | {row.cases} | {row.elements} | {row.worst_ulp} | "
        f"{row.relative_error:.3e} | {row.ill_conditioned} |"
        for row in totals(results)
    ]
    if producers:
        lines += ["", "| producer | launches | elements | worst relative error |", "|---|---|---|---|"]
    lines += [
        f"| {result.producer} | {result.cases} | {result.elements} | {result.relative_error:.3e} |"
        for result in producers
    ]
    problems = [f"- `{result.variant}`: {problem}" for result in results for problem in result.problems]
    problems += [f"- `{result.producer}`: {problem}" for result in producers for problem in result.problems]
    return "\n".join([*lines, *(["", "Problems:", "", *problems] if problems else []), ""])


def to_json(
    results: Sequence[VariantResult], setting: Setting, producers: Sequence[ProducerResult] = ()
) -> dict[str, Any]:
    """Returns everything as plain JSON data."""
    return {
        "setting": {
            "bundle": setting.bundle,
            "manifest_sha256": setting.manifest_sha256,
            "variants_in_bundle": setting.variants_in_bundle,
            "images_in_bundle": setting.images_in_bundle,
            "device": setting.device,
            "torch": setting.torch,
            "seed": setting.seed,
            "rows": list(setting.rows),
            "seconds": round(setting.seconds, 1),
        },
        "totals": [
            {
                "kind": row.kind,
                "variants": row.variants,
                "failed": row.failed,
                "launches": row.cases,
                "elements": row.elements,
                "worst_ulp": row.worst_ulp,
                "relative_error": row.relative_error,
                "fp32_limited": row.ill_conditioned,
            }
            for row in totals(results)
        ],
        "variants": [
            {
                "name": str(result.variant),
                "ok": not result.problems,
                "launches": result.cases,
                "elements": result.elements,
                "worst_ulp": result.worst_ulp,
                "ulp_limit": result.ulp_limit,
                "relative_error": result.relative_error,
                "fp32_limited": result.ill_conditioned,
                "problems": list(result.problems),
            }
            for result in results
        ],
        "producers": [
            {
                "name": str(result.producer),
                "ok": not result.problems,
                "launches": result.cases,
                "elements": result.elements,
                "relative_error": result.relative_error,
                "problems": list(result.problems),
            }
            for result in producers
        ],
    }

"""The results of a self-test as a page: what `--gpu-report` writes."""

from collections.abc import Sequence

from attnres_aot.selftest.report import Setting, split, totals
from attnres_aot.selftest.suite import Result


def markdown(results: Sequence[Result], setting: Setting) -> str:
    """Formats the setting, the totals and all problems for a document."""
    producers = split(results)[1]
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
        f"| {row.kind} | {row.variants} | {row.failed} | {row.launches} | {row.elements} | {row.worst_ulp} | "
        f"{row.relative_error:.3e} | {row.fp32_limited} |"
        for row in totals(results)
    ]
    if producers:
        lines += ["", "| producer | launches | elements | worst relative error |", "|---|---|---|---|"]
    lines += [
        f"| {result.subject} | {result.launches} | {result.elements} | {result.relative_error:.3e} |"
        for result in producers
    ]
    problems = [f"- `{result.subject}`: {problem}" for result in results for problem in result.problems]
    return "\n".join([*lines, *(["", "Problems:", "", *problems] if problems else []), ""])

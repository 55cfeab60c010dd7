"""`attnres-aot verify`: checks bundles against what their manifests promise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from attnres_aot.bundle.manifest import Manifest
from attnres_aot.cli.bundle_argument import bundles_at
from attnres_aot.cli.options import json_option
from attnres_aot.cli.printing import show, show_json, strong
from attnres_aot.cli.wording import count
from attnres_aot.spec.arch import parse_arch
from attnres_aot.verify.bundle_check import VerifyReport, verify_bundle


@click.command("verify")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="BUNDLE...")
@click.option("--strict", is_flag=True, help="Fail when anything could not be checked, too.")
@json_option
def command(paths: tuple[Path, ...], *, strict: bool, as_json: bool) -> int:
    """Check the files and binaries of bundles against their manifests.

    BUNDLE is a bundle folder, a folder of bundles, or a shared object. Exits with 1 when a promise is broken. Of a
    bundle that another release built, what follows from its sources cannot be derived again; the answer says what was
    not checked.
    """
    bundles = dict.fromkeys(bundle for path in paths for bundle in bundles_at(path))
    reports = [verify_bundle(bundle) for bundle in bundles]
    if as_json:
        show_json({"bundles": [_as_json(report, strict=strict) for report in reports]})
    else:
        for report in reports:
            _show(report, strict=strict)
    return 0 if all(_passes(report, strict=strict) for report in reports) else 1


def _passes(report: VerifyReport, *, strict: bool) -> bool:
    return report.ok and not (strict and report.notes)


def _show(report: VerifyReport, *, strict: bool) -> None:
    for problem in report.problems:
        show(f"{report.path}: {problem}")
    for note in report.notes:
        show(f"{report.path}: not checked: {note}")
    if report.problems:
        show(f"{report.path}: {strong('NOT OK')}: {count(len(report.problems), 'problem')}")
    elif not _passes(report, strict=strict):
        show(f"{report.path}: {strong('NOT OK')}: not all of it could be checked, as --strict asks")
    elif report.manifest is not None:
        show(f"{report.path}: {strong('OK')}: {_summary(report.manifest)}")


def _summary(manifest: Manifest) -> str:
    size = sum(image.size for image in manifest.images)
    return (
        f"{count(len(manifest.images), 'image')} of {size:,} bytes, {count(len(manifest.variants), 'variant')}, "
        f"{count(len(manifest.producers), 'producer')}, "
        f"{manifest.arch.proven} (for {parse_arch(manifest.arch.proven).rule()})"
    )


def _as_json(report: VerifyReport, *, strict: bool) -> dict[str, Any]:
    manifest = report.manifest
    return {
        "path": str(report.path),
        "ok": _passes(report, strict=strict),
        "problems": list(report.problems),
        "not_checked": list(report.notes),
        "images": len(manifest.images) if manifest else None,
        "variants": len(manifest.variants) if manifest else None,
        "producers": len(manifest.producers) if manifest else None,
        "arch": manifest.arch.proven if manifest else None,
    }

"""Verifying a bundle: its manifest is assembled again from the binaries and the configuration, and compared.

What a reader relies on before it believes a manifest (`bundle.manifest_check`) is asked first, and the folder is looked
at; whatever else is wrong with a bundle shows as a difference to the manifest that it should have.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from attnres_aot.bundle.folder import Folder, read_at_once
from attnres_aot.bundle.manifest import (
    MANIFEST_NAME,
    ImageRecord,
    LibraryRecord,
    Manifest,
    decode_manifest,
    digest_problem,
    dump_manifest,
    parse_manifest,
    to_json,
)
from attnres_aot.bundle.manifest_check import MAX_PROBLEMS, manifest_problems
from attnres_aot.bundle.reader import image_bytes, manifest_bytes
from attnres_aot.bundle.shared_object import is_library, payload_of, read_file, read_payload
from attnres_aot.errors import BundleError, CompileError, ConfigError, UsageError, clip
from attnres_aot.spec.params import KERNEL_PARAMS
from attnres_aot.verify.derive import FROM_SOURCES, Derivation, is_of_this_release
from attnres_aot.verify.difference import differences
from attnres_aot.verify.library_check import EmbeddedFolder, file_problems, libraries_problems

_SHOWN_CHARS = 500  # of one problem


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What the verification of one bundle found."""

    path: Path
    """The bundle folder, as given."""
    problems: tuple[str, ...]
    """One line per broken promise, at most some hundred; empty when the bundle is as it says."""
    notes: tuple[str, ...]
    """What could not be checked, and why."""
    manifest: Manifest | None
    """The manifest, if it could be read."""

    @property
    def ok(self) -> bool:
        """The bundle keeps every promise that could be checked."""
        return not self.problems


def verify_bundle(path: str | os.PathLike[str]) -> VerifyReport:
    """Checks everything that a bundle promises; needs no compiler, torch or GPU, and raises nothing.

    All of it is checked as it is at one moment, though a build may replace the bundle meanwhile.

    Args:
      path: The bundle folder.

    Returns:
      The problems found: in the manifest, in the folder, and image by image.
    """
    folder = Path(path)
    try:
        if is_library(folder) and folder.is_file():
            return _verify_library(folder)
        return read_at_once(folder, _verify, lambda report: report.ok)
    except BundleError as error:
        return VerifyReport(path=folder, problems=(str(error),), notes=(), manifest=None)


def _verify(folder: Folder) -> VerifyReport:
    data = manifest_bytes(folder)
    manifest = decode_manifest(parse_manifest(data, MANIFEST_NAME), MANIFEST_NAME)
    notes = () if is_of_this_release(manifest) else tuple(_not_checked(manifest))
    found = list(islice(_problems(folder, data, manifest), MAX_PROBLEMS + 1))
    shown = [clip(problem, _SHOWN_CHARS) for problem in found[:MAX_PROBLEMS]]
    if len(found) > MAX_PROBLEMS:
        shown.append("and more")
    return VerifyReport(path=folder.path, problems=tuple(shown), notes=notes, manifest=manifest)


def _verify_library(path: Path) -> VerifyReport:
    """Checks a shared object by itself; the manifest of the report is that of the first bundle in it."""
    data = read_file(path)
    bundles = read_payload(payload_of(data, path.name), path.name)
    found, notes = list(file_problems(data, bundles)), list[str]()
    for each in bundles:
        arch = each.manifest.arch.requested
        inside = _problems(EmbeddedFolder(path, each), each.manifest_bytes, each.manifest)
        found += [f"{arch}: {problem}" for problem in islice(inside, MAX_PROBLEMS)]
        notes += (
            [] if is_of_this_release(each.manifest) else [f"{arch}: {note}" for note in _not_checked(each.manifest)]
        )
    shown = tuple(clip(problem, _SHOWN_CHARS) for problem in found[:MAX_PROBLEMS])
    return VerifyReport(path=path, problems=shown, notes=tuple(notes), manifest=bundles[0].manifest)


def _not_checked(manifest: Manifest) -> Iterator[str]:
    yield FROM_SOURCES
    for kernel, params in islice(manifest.abis.items(), MAX_PROBLEMS):
        if params != KERNEL_PARAMS.get(kernel):
            yield (
                f"abis.{kernel:.80}: not the parameters that this release fills, so which argument is which was not "
                "checked, and this release's loader refuses the bundle"
            )


def _problems(folder: Folder, data: bytes, manifest: Manifest) -> Iterator[str]:
    if (problem := digest_problem(data)) is not None:
        yield f"{MANIFEST_NAME}: changed after the build: {problem}"
    elif data != dump_manifest(manifest):
        yield f"{MANIFEST_NAME}: not in canonical form; it was edited after the build"
    yield from _folder_problems(folder, manifest.files)
    unusable = manifest_problems(manifest)
    yield from unusable
    derivation = None
    if not unusable:  # Past this point names are safe and references resolve.
        try:
            derivation = Derivation(manifest)
        except (ConfigError, UsageError) as error:
            yield f"{MANIFEST_NAME}: the bundle cannot have been built from what it names: {error}"
    records = {image.name: image for image in manifest.images}
    for image in manifest.images:
        try:
            cubin = image_bytes(folder, image)
            if derivation is not None:
                records[image.name] = derivation.prove(image, cubin)
        except (BundleError, CompileError) as error:
            yield f"image {image.name!r:.140}: {error}"
    if derivation is not None:
        yield from (f"images.{name}: not in the manifest; built again it would be" for name in derivation.missing)
        assembled = replace(derivation.assemble(records), libraries=manifest.libraries)
        yield from differences(to_json(manifest), to_json(assembled))
    if not unusable:
        yield from libraries_problems(folder, manifest)


def _folder_problems(folder: Folder, records: Iterable[ImageRecord | LibraryRecord]) -> Iterator[str]:
    expected = {MANIFEST_NAME, *(record.file for record in records)}
    try:
        names = folder.names()
    except BundleError as error:
        yield str(error)
        return
    yield from (f"file {name!r:.140} is not in the manifest" for name in names if name not in expected)

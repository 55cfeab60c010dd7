"""Reading a bundle: its manifest and its image files, from one moment, all of them checked.

A bundle is read as a whole, so nothing that happens to its folder afterwards, be it damaged, replaced or reached by
another path, changes what a process has. A bundle from elsewhere can do no more than fail to load.

Standard library only: the deployment loader imports this module.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from attnres_aot.bundle.folder import Folder, read_at_once
from attnres_aot.bundle.limits import MAX_IMAGE_BYTES
from attnres_aot.bundle.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, ImageRecord, Manifest, load_manifest
from attnres_aot.bundle.manifest_check import manifest_problems
from attnres_aot.errors import BundleError, clip
from attnres_aot.records import record

_SHOWN_PROBLEMS = 20
_SHOWN_CHARS = 400  # of each


@record(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A bundle that has been read: a checked manifest, and its image files as they were at that moment."""

    path: Path
    """The bundle folder, as given."""
    manifest: Manifest
    """What the bundle promises."""
    manifest_sha256: str
    """Digest of the manifest file."""
    files: Mapping[str, bytes]
    """The image files that are as the manifest says, by file name."""
    damage: Mapping[str, str]
    """What is wrong with the other image files, by file name."""


def read_bundle(path: str | os.PathLike[str]) -> Bundle:
    """Reads a bundle: checks its manifest, and every image file by size and digest.

    Damage to image files is no error yet: `read_image` raises it, and `Bundle.damage` lists it.

    Raises:
      BundleError: no such folder, no manifest in it, or a manifest that is not usable; lists every problem.
    """
    return read_at_once(Path(path), _read_folder, lambda bundle: not bundle.damage)


def read_manifest_bytes(path: Path) -> bytes:
    """Reads the manifest file of a bundle folder without interpreting it.

    Raises:
      BundleError: no such folder, not a folder, no manifest in it, or not a plain readable file.
    """
    return read_at_once(path, manifest_bytes)


def manifest_bytes(folder: Folder) -> bytes:
    """Reads the manifest file of an open folder; raises as `read_manifest_bytes` does."""
    if not folder.holds(MANIFEST_NAME):
        raise BundleError(
            f"no bundle at {str(folder.path)!r}: it holds no {MANIFEST_NAME}; give a folder that was written by "
            "'attnres-aot build'"
        )
    return folder.read(MANIFEST_NAME, MAX_MANIFEST_BYTES)


def read_image(bundle: Bundle, image: ImageRecord) -> bytes:
    """Returns the file of `image`.

    Raises:
      BundleError: the file was missing, not a plain file, or not the one that the manifest describes.
    """
    data = bundle.files.get(image.file)
    if data is None:
        raise BundleError(bundle.damage[image.file])
    return data


def image_bytes(folder: Folder, image: ImageRecord) -> bytes:
    """Reads the file of `image` from an open folder and checks its size and digest.

    Raises:
      BundleError: the file is missing, not a plain file, or not the one that the manifest describes.
    """
    data = folder.read(image.file, MAX_IMAGE_BYTES)
    problem = ""
    if len(data) != image.size:
        problem = f"{len(data)} bytes, but the manifest says {image.size}"
    elif (digest := hashlib.sha256(data).hexdigest()) != image.sha256:
        problem = f"sha256 is {digest}, but the manifest says {image.sha256}"
    if problem:
        raise BundleError(f"{folder.path / image.file}: {problem}; the bundle is damaged: copy or build it again")
    return data


def _read_folder(folder: Folder) -> Bundle:
    data = manifest_bytes(folder)
    where = str(folder.path / MANIFEST_NAME)
    manifest = load_manifest(data, where)
    problems = manifest_problems(manifest)
    if problems:
        shown = [clip(problem, _SHOWN_CHARS) for problem in problems[:_SHOWN_PROBLEMS]]
        rest = ["and more"] if len(problems) > len(shown) else []
        lines = "".join(f"\n  {line}" for line in [*shown, *rest])
        raise BundleError(f"{where}: the manifest contradicts itself; rebuild the bundle:{lines}")
    files, damage = {}, {}
    for image in manifest.images:
        try:
            files[image.file] = image_bytes(folder, image)
        except BundleError as error:
            damage[image.file] = str(error)
    return Bundle(
        path=folder.path,
        manifest=manifest,
        manifest_sha256=hashlib.sha256(data).hexdigest(),
        files=files,
        damage=damage,
    )

"""Reading a bundle folder: its manifest, and its image files with size and digest checked.

Only regular files directly in the folder are ever read. A symbolic link, a name that leaves the folder, an over-long
name or an unknown schema number is refused, so that a bundle from elsewhere can do no more than fail to load. The
folder itself may be reached through a link (deployments point `current` at a release that way).

Standard library only: the deployment loader imports this module.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from attnres_aot.bundle.manifest_check import MAX_IMAGE_BYTES, manifest_problems, name_problem
from attnres_aot.errors import BundleError
from attnres_aot.manifest import MANIFEST_NAME, ImageRecord, Manifest, load_manifest
from attnres_aot.records import dataclass

MAX_MANIFEST_BYTES = 16 << 20
"""Largest manifest that a reader accepts."""

_SHOWN_PROBLEMS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A bundle whose manifest has been read and checked; image files are read on demand."""

    path: Path
    """The bundle folder, as given."""
    manifest: Manifest
    """What the bundle promises."""


def read_bundle(path: str | os.PathLike[str]) -> Bundle:
    """Reads and checks a bundle's manifest; opens no image file.

    Raises:
      BundleError: no such folder, no manifest in it, or a manifest that is not usable; lists every problem.
    """
    folder = Path(path)
    data = read_manifest_bytes(folder)
    where = str(folder / MANIFEST_NAME)
    manifest = load_manifest(data, where)
    problems = manifest_problems(manifest)
    if problems:
        shown = problems[:_SHOWN_PROBLEMS]
        rest = [f"and {len(problems) - len(shown)} more"] if len(problems) > len(shown) else []
        lines = "".join(f"\n  {line}" for line in [*shown, *rest])
        raise BundleError(f"{where}: the manifest contradicts itself; rebuild the bundle:{lines}")
    return Bundle(path=folder, manifest=manifest)


def read_manifest_bytes(folder: Path) -> bytes:
    """Reads the manifest file of a bundle folder without interpreting it.

    Raises:
      BundleError: no such folder, not a folder, no manifest in it, or not a plain readable file.
    """
    if not os.path.isdir(folder):  # noqa: PTH112 - Path.is_dir raises for a name that is too long
        found = "it is not a folder" if os.path.lexists(folder) else "there is no such folder"
        raise BundleError(
            f"no bundle at {str(folder)!r}: {found}; build one with `attnres-aot build --arch ARCH --out DIR`"
        )
    if not os.path.lexists(folder / MANIFEST_NAME):
        raise BundleError(
            f"no bundle at {str(folder)!r}: it holds no {MANIFEST_NAME}; give a folder that was written by "
            "'attnres-aot build'"
        )
    return read_plain_file(folder, MANIFEST_NAME, MAX_MANIFEST_BYTES)


def read_image(bundle: Bundle, image: ImageRecord) -> bytes:
    """Reads the file of `image` and checks its size and digest against the manifest.

    Raises:
      BundleError: the file is missing, not a plain file, or not the one that the manifest describes.
    """
    data = read_plain_file(bundle.path, image.file, MAX_IMAGE_BYTES)
    where = f"{bundle.path / image.file}"
    advice = "the bundle is damaged or was replaced while in use; load it again or rebuild it"
    if len(data) != image.size:
        raise BundleError(f"{where}: {len(data)} bytes, but the manifest says {image.size}; {advice}")
    digest = hashlib.sha256(data).hexdigest()
    if digest != image.sha256:
        raise BundleError(f"{where}: sha256 is {digest}, but the manifest says {image.sha256}; {advice}")
    return data


def read_plain_file(folder: Path, name: str, max_bytes: int) -> bytes:
    """Reads a regular file that lies directly in `folder`, following no link and blocking on no pipe.

    Raises:
      BundleError: unsafe name, missing, a link or anything else than a plain file, larger than `max_bytes`, unreadable.
    """
    problem = name_problem(name)
    if problem is not None:
        raise BundleError(f"{folder}: {problem}")
    where = folder / name
    try:
        mode = os.lstat(where).st_mode
        if not stat.S_ISREG(mode):
            found = "a symbolic link" if stat.S_ISLNK(mode) else "not a plain file"
            raise BundleError(f"{where}: {found}; a bundle holds plain files only")
        # The flags hold for what may have taken the file's place since.
        descriptor = os.open(where, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            data = file.read(max_bytes + 1)
    except FileNotFoundError as error:
        raise BundleError(f"{where}: the file is missing; rebuild the bundle") from error
    except OSError as error:
        raise BundleError(f"{where}: cannot be read: {error.strerror or error}") from error
    if len(data) > max_bytes:
        raise BundleError(f"{where}: larger than the {max_bytes} bytes that are allowed")
    return data

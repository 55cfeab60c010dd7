"""One library of several archs' bundles, which picks at load."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from attnres_aot.bundle.reader import read_bundle, read_image
from attnres_aot.errors import BundleError
from attnres_aot.launcher.libraries import make_libraries


def make_fat(bundles: Sequence[Path], hosts: Sequence[str], out: Path) -> list[Path]:
    """Writes a library of several bundles for each host into a folder, in the place of what has its name.

    Returns:
      The libraries.

    Raises:
      BundleError: a bundle is damaged, or the folder cannot be written.
      CompileError: there is no compiler for a host, it failed, or what it made is not what a library must be.
    """
    read = [read_bundle(path) for path in bundles]
    contents = [
        (bundle.manifest, {image.file: read_image(bundle, image) for image in bundle.manifest.images})
        for bundle in read
    ]
    return [_write(out / library.record.file, library.data) for library in make_libraries(contents, hosts)]


def _write(path: Path, data: bytes) -> Path:
    """Writes a file in one step, readable by all."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                os.fchmod(file.fileno(), 0o644)
            Path(name).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(name).unlink()
            raise
    except OSError as error:
        raise BundleError(f"cannot write the library {str(path)!r}: {error.strerror or error}") from error
    return path

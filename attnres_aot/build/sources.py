"""The source closure of an image: the package's files whose text decides the compiled bytes, and their digest."""

from __future__ import annotations

import hashlib
from pathlib import Path

from attnres_aot.manifest import canonical_json

PACKAGE = Path(__file__).resolve().parent.parent
"""Folder of the attnres_aot package."""
CLOSURE = ("kernels/**/*.py", "compiler.py", "abi.py", "variants.py")
"""Patterns of the files that decide bytes, relative to the package: kernels, compiling them, their parameters."""


def source_files(package: Path = PACKAGE) -> tuple[Path, ...]:
    """Lists the files of the closure, ascending by path."""
    return tuple(sorted({path for pattern in CLOSURE for path in package.glob(pattern) if path.is_file()}))


def sources_digest(package: Path = PACKAGE) -> str:
    """Returns the sha256 over relative names and contents of the closure; where the package lies does not matter."""
    digests = {
        path.relative_to(package).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in source_files(package)
    }
    return hashlib.sha256(canonical_json(digests).encode("ascii")).hexdigest()

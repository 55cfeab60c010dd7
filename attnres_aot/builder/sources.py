"""Which of the package's files decide an image's bytes, per kernel, and their digests.

An image of a kernel depends on the kernel's module, on the device code which that imports in turn, and on what every
image is compiled by. A change of one kernel thus leaves the images of the others as they are.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from attnres_aot.bundle.manifest import canonical_json
from attnres_aot.spec.params import KERNEL_PARAMS

PACKAGE = Path(__file__).resolve().parent.parent
"""Folder of the attnres_aot package."""
COMMON = ("kernels/compile.py", "spec/params.py", "spec/variants.py", "kernels/__init__.py")
"""Files on which every image depends, relative to the package."""

_DEVICE_CODE = "attnres_aot.kernels"


def source_files(kernel: str, package: Path = PACKAGE) -> tuple[Path, ...]:
    """Lists the files that decide the images of `kernel`, ascending by path."""
    found: set[Path] = set()
    waiting = [package / "kernels" / f"{kernel}.py"]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += (package / name for name in _device_imports(path) if (package / name).is_file())
    return tuple(sorted({*found, *(package / name for name in COMMON)}))


def sources_digests(package: Path = PACKAGE) -> dict[str, str]:
    """Returns kernel -> digest of its sources: over relative names and contents, wherever the package lies."""
    return {kernel: _digest(kernel, package) for kernel in sorted(KERNEL_PARAMS)}


def combined_digest(digests: Mapping[str, str]) -> str:
    """Returns the one digest that stands for the sources of all kernels in a manifest."""
    return hashlib.sha256(canonical_json(dict(digests)).encode("ascii")).hexdigest()


def _digest(kernel: str, package: Path) -> str:
    digests = {
        path.relative_to(package).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in source_files(kernel, package)
    }
    return combined_digest(digests)


def _device_imports(path: Path) -> Iterator[str]:
    """Yields the files, relative to the package, of the device code that a module may import."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            if name.startswith(_DEVICE_CODE + "."):
                yield "/".join(name.split(".")[1:]) + ".py"

"""Which compiler is installed: the versions that decide an image's bytes, found without importing it."""

from __future__ import annotations

import importlib.metadata
import re

from attnres_aot.errors import CompileError

COMPILER = "nvidia-cutlass-dsl"
"""Distribution name of the compiler; its library packages have names that start with it."""


def toolchain_versions() -> dict[str, str]:
    """Returns distribution name -> version of the compiler and of all its installed library packages.

    Which library package (ptxas flavour) the compiler picks depends on what is installed, so all of them count.

    Raises:
      CompileError: the compiler is not installed.
    """
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.name or "").lower()
        if name.startswith(COMPILER):
            found.setdefault(name, distribution.version)
    if COMPILER not in found:
        raise CompileError(
            f"the compiler {COMPILER} is not installed here; install the builder: `pip install 'attnres-aot[build]'`"
        )
    return dict(sorted(found.items()))

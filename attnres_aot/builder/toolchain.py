"""Which compiler is installed: the versions that decide an image's bytes, found without importing it."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator

from attnres_aot.errors import CompileError

COMPILER = "nvidia-cutlass-dsl"
"""Distribution name of the compiler; its library packages have names that start with it."""

_LIBRARY_OF_A_FLAVOUR = re.compile(rf"{COMPILER}-libs-(?:.*-)?(cu\d+)")


def toolchain_versions(flavour: str) -> dict[str, str]:
    """Returns distribution name -> version of the compiler and of its library packages that compile `flavour`.

    Library packages of other flavours are left out: whether they are installed changes nothing.

    Raises:
      CompileError: the compiler, or its library of that flavour, is not installed.
    """
    installed = dict(_installed())
    if COMPILER not in installed:
        raise CompileError(
            f"the compiler {COMPILER} is not installed here; install the builder: `pip install 'attnres-aot[build]'`"
        )
    library = f"{COMPILER}-libs-{flavour}"
    if library not in installed:
        flavours = {match[1] for name in installed if (match := _LIBRARY_OF_A_FLAVOUR.fullmatch(name))}
        raise CompileError(
            f"the compiler's library of flavour {flavour} is not installed here (installed: "
            f"{', '.join(sorted(flavours)) or 'none'}); install it: `pip install '{library}=={installed[COMPILER]}'`"
        )
    return {
        name: version
        for name, version in sorted(installed.items())
        if name == library or not _LIBRARY_OF_A_FLAVOUR.fullmatch(name)
    }


def _installed() -> Iterator[tuple[str, str]]:
    """Yields (distribution name, version) of the compiler's packages; the first that Python would import counts."""
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        try:
            name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
            version = distribution.version
        except Exception:  # noqa: BLE001, S112 - a stranger's broken package raises anything and says nothing about ours
            continue
        if name.startswith(COMPILER) and name not in seen and version:
            seen.add(name)
            yield name, version

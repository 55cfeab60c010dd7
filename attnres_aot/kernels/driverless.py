"""Keeps the machine's driver out of a process that compiles, and chooses the compiler's flavour instead.

With several flavours installed the compiler takes the newest that the machine's CUDA driver serves, the newest of all
where there is no driver, and refuses to start beside a driver that is too old. So who asks for the driver's library
here gets a stand-in that serves the CUDA version of the chosen flavour and does nothing else. The binary is the last
word on whether that worked: `binary.prove` reads from it which assembler made it.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from attnres_aot.spec.toolkits import FLAVOURS

SHADOW = "no-driver"
"""Name of the folder in which `make_shadow` puts what hides the driver from other code than Python's."""

_LIBRARIES = ("libcuda.so", "libcuda.so.1")


def make_shadow(folder: Path) -> str:
    """Makes files in `folder` that the dynamic linker takes for the driver's library and cannot load.

    Returns:
      What to put first into LD_LIBRARY_PATH: relative to `folder`, as a colon in its name would split the path.
    """
    shadow = folder / SHADOW
    shadow.mkdir()
    for name in _LIBRARIES:
        (shadow / name).touch()
    return SHADOW


def stand_in_for_driver(flavour: str) -> None:
    """Replaces the driver's library for everything in this process that opens it with ctypes.

    Args:
      flavour: a key of `toolkits.FLAVOURS`, which the compiler will take if it is installed.
    """
    real = getattr(ctypes.CDLL, "_real", ctypes.CDLL)
    stand_in = _StandIn(FLAVOURS[flavour][0] * 1000)

    class Library(real):  # type: ignore[misc, valid-type]
        """ctypes.CDLL, but for the driver."""

        _real = real

        def __new__(cls, name: Any = None, *_: Any, **__: Any) -> Any:
            if isinstance(name, str | bytes | os.PathLike) and os.fsdecode(name).rpartition("/")[2] in _LIBRARIES:
                return stand_in
            return super().__new__(cls)

    ctypes.CDLL = Library  # type: ignore[misc]
    ctypes.cdll = ctypes.LibraryLoader(Library)


class _StandIn:
    """A driver that tells its version."""

    def __init__(self, version: int) -> None:
        self._version = version

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802 - the driver's name for it
        """Writes the version through a `ctypes.byref` or a pointer; returns success."""
        target = getattr(version, "_obj", None)
        if target is None:
            target = version.contents
        target.value = self._version
        return 0

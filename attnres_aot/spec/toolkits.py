"""CUDA toolkits as far as they decide what runs where: the compiler's flavours, and the drivers that take their code.

The compiler comes with the assembler of one or several CUDA major versions, each in a library package of its own: its
flavours. Code of each needs a driver that is new enough in two ways.

- For the flavour: by CUDA's minor version compatibility (CUDA Compatibility guide), machine code of a toolkit runs on
  any driver of the same CUDA major version or a later one.
- For the arch: the driver must know it. The first toolkit that assembles for it is in the release notes of the PTX
  ISA: 7.8 (CUDA 11.8) for sm_90, 8.6 and 8.7 (CUDA 12.8) for sm_100 and sm_120, 8.8 (CUDA 12.9) for sm_103 and for
  all archs with suffix `f`.

The Linux driver release that came with a toolkit is in table 3 of the CUDA Toolkit's release notes.
"""

from __future__ import annotations

import re

from attnres_aot.errors import UsageError, did_you_mean
from attnres_aot.spec.arch import Arch

Cuda = tuple[int, int]
"""A CUDA version, (major, minor)."""

FLAVOURS: dict[str, Cuda] = {"cu12": (12, 0), "cu13": (13, 0)}
"""Flavour -> the oldest CUDA version whose driver takes machine code of its assembler."""
DEFAULT_FLAVOUR = "cu12"
"""The flavour that compiles unless another is asked for: it serves every buildable arch, and the oldest drivers."""
DRIVER_RELEASES: dict[Cuda, str] = {
    (11, 8): "520.61.05",
    (12, 0): "525.60.13",
    (12, 4): "550.54.14",
    (12, 8): "570.26",
    (12, 9): "575.51.03",
    (13, 0): "580.65.06",
}
"""CUDA version -> the Linux driver release that came with it, for every version that is named here."""

_FIRST_FAMILY: Cuda = (12, 9)
_FIRST_KNOWN: dict[tuple[int, int], Cuda] = {(9, 0): (11, 8), (10, 0): (12, 8), (10, 3): (12, 9), (12, 0): (12, 8)}
_VERSION = re.compile(r"([1-9][0-9]?)\.([0-9]{1,2})")
_FLAVOUR = re.compile(r"cu[1-9][0-9]?")


def parse_flavour(name: str) -> str:
    """Returns `name` if it is a flavour.

    Raises:
      UsageError: it is none; lists them.
    """
    if name not in FLAVOURS:
        hint = did_you_mean(name, FLAVOURS)
        raise UsageError(f"{name!r} is not a compiler flavour{hint}; choose from {', '.join(FLAVOURS)}")
    return name


def is_flavour_name(name: str) -> bool:
    """Tells whether `name` has the form of a flavour, e.g. `cu12`; it may be one that this release does not know."""
    return _FLAVOUR.fullmatch(name) is not None


def oldest_driver(flavour: str, arch: Arch) -> Cuda:
    """Returns the oldest CUDA version whose driver can run code of `flavour` for `arch`.

    Args:
      flavour: a key of `FLAVOURS`.
      arch: a buildable arch.
    """
    family = _FIRST_FAMILY if arch.suffix == "f" else (0, 0)
    return max(FLAVOURS[flavour], _FIRST_KNOWN[arch.capability], family)


def parse_cuda(text: str) -> Cuda | None:
    """Reads a CUDA version such as `12.8`; None when it is not one."""
    match = _VERSION.fullmatch(text)
    return (int(match[1]), int(match[2])) if match else None


def cuda_text(version: Cuda) -> str:
    """Writes a CUDA version as a manifest holds it, e.g. `12.8`."""
    return f"{version[0]}.{version[1]}"


def driver_text(version: Cuda) -> str:
    """Says which driver serves a CUDA version, e.g. `CUDA 12.8 (driver release 570.26)`."""
    release = DRIVER_RELEASES.get(version)
    return f"CUDA {cuda_text(version)}" + (f" (driver release {release})" if release else "")

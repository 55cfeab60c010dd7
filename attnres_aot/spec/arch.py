"""GPU architectures as parsed values: names, what a bundle may be built for, and which device runs which code.

The compatibility rule is the CUDA C++ Programming Guide's: code for `sm_XY` runs on compute capability X.Z with
Z >= Y; `sm_XYf` runs within its family (same major, Z >= Y); `sm_XYa` runs on X.Y alone.
"""

from __future__ import annotations

import re

from attnres_aot.errors import UsageError, did_you_mean
from attnres_aot.records import record

_NAME = re.compile(r"sm_([1-9][0-9]{0,3})([0-9])([af]?)")


@record(frozen=True, slots=True, order=True)
class Arch:
    """One GPU architecture target, e.g. `sm_100a`."""

    major: int
    """Compute capability major number."""
    minor: int
    """Compute capability minor number."""
    suffix: str = ""
    """`""` (plain), `"a"` (this chip only) or `"f"` (this family only)."""

    def __str__(self) -> str:
        return f"sm_{self.major}{self.minor}{self.suffix}"

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability whose code this is, as (major, minor)."""
        return (self.major, self.minor)

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Tells whether code for this arch runs on a device of `capability` (major, minor), by CUDA's rule."""
        major, minor = capability
        if self.suffix == "a":
            return (major, minor) == self.capability
        return major == self.major and minor >= self.minor

    def rule(self) -> str:
        """Says in words for which devices this arch's code is."""
        if self.suffix == "a":
            return f"compute capability {self.major}.{self.minor} only"
        family = " (its family)" if self.suffix == "f" else ""
        return f"compute capability {self.major}.{self.minor} and later {self.major}.x{family}"

    def distance(self, capability: tuple[int, int]) -> tuple[int, int]:
        """Orders archs that run on `capability`: smaller is closer (exact minor first, then `a`, `f`, plain)."""
        return (capability[1] - self.minor, "af".find(self.suffix) if self.suffix else 2)


BUILDABLE: tuple[Arch, ...] = (
    Arch(9, 0),
    Arch(9, 0, "a"),
    Arch(10, 0),
    Arch(10, 0, "a"),
    Arch(10, 0, "f"),
    Arch(10, 3),
    Arch(10, 3, "a"),
    Arch(12, 0),
    Arch(12, 0, "a"),
)
"""Archs that a bundle can be built for, in the order that help texts list them."""


def parse_arch(name: str) -> Arch:
    """Parses a syntactically valid arch name such as `sm_100a`.

    Raises:
      UsageError: `name` is not of the form sm_<major><minor>[a|f].
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise UsageError(f"{name!r:.80} is not a GPU architecture name{_hint(name)}; choose from {choices()}")
    return Arch(int(match[1]), int(match[2]), match[3])


def parse_buildable_arch(name: str) -> Arch:
    """Parses an arch name and checks that bundles can be built for it.

    Raises:
      UsageError: the name does not parse, or is not one of `BUILDABLE`.
    """
    arch = parse_arch(name)
    if arch not in BUILDABLE:
        raise UsageError(f"no bundle can be built for {name!r:.80}{_hint(name)}; choose from {choices()}")
    return arch


def choices() -> str:
    """Lists the buildable archs for a message."""
    return ", ".join(map(str, BUILDABLE))


def _hint(name: str) -> str:
    return did_you_mean(name, map(str, BUILDABLE))

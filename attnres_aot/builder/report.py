"""What a build did, as data: the command line turns it into text or JSON."""

from __future__ import annotations

from dataclasses import dataclass

from attnres_aot.builder.pool import JobFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildReport:
    """The outcome of building one bundle."""

    path: str
    """The bundle folder."""
    arch: str
    """The arch that was asked for."""
    status: str
    """`built`, `unchanged` (nothing to do), or with the bundle as it was before: `failed` or `refused`."""
    variants: int
    """Variants of the bundle."""
    producers: int
    """Producers of the bundle."""
    images: int
    """Images of the bundle."""
    compiled: tuple[str, ...] = ()
    """Images that were compiled, in the bundle's order."""
    reused: tuple[str, ...] = ()
    """Images that were there already."""
    failures: tuple[JobFailure, ...] = ()
    """Images that could not be compiled or proven."""
    reason: str = ""
    """Why nothing could be built at all; empty but for `refused`."""
    warnings: tuple[str, ...] = ()
    """What did not work but fails nothing, such as removing what an earlier build has left."""
    jobs: int = 0
    """Compiler processes at the same time."""
    wall_seconds: float = 0.0
    """Duration of the build."""
    compile_seconds: float = 0.0
    """Sum of the images' own compile times."""
    peak_memory_bytes: int = 0
    """Peak memory of this process and the compiler processes together, an upper bound."""
    size_bytes: int = 0
    """Size of the bundle's files, manifest included."""

    @property
    def done(self) -> bool:
        """The bundle that was asked for is there."""
        return self.status in {"built", "unchanged"}

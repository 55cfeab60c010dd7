"""What can be built for a device: the archs whose code runs there, and the one to build for."""

from __future__ import annotations

from attnres_aot.spec.arch import BUILDABLE, Arch


def fitting_archs(capability: tuple[int, int]) -> tuple[Arch, ...]:
    """Lists the buildable archs whose code runs on `capability`, closest first."""
    fitting = [arch for arch in BUILDABLE if arch.runs_on(capability)]
    return tuple(sorted(fitting, key=lambda arch: arch.distance(capability)))


def arch_to_build(capability: tuple[int, int]) -> Arch | None:
    """Returns the arch to build a bundle for `capability` for, or None if no buildable arch runs there.

    Plain archs are suggested: their bundles also serve later devices of the same major capability.
    """
    plain = [arch for arch in fitting_archs(capability) if not arch.suffix]
    return plain[0] if plain else None


def dotted(capability: tuple[int, int]) -> str:
    """Formats a compute capability, e.g. `9.0`."""
    return f"{capability[0]}.{capability[1]}"

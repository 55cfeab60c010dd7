"""How many registers an image may use: the build fails above it."""

from __future__ import annotations

from attnres_aot.variants import ImageSpec

REGISTERS = {"consumer": 128, "statistics": 102, "publish": 32}
"""Kernel -> registers per thread: 4, 5 and 16 CTAs of 128 threads then fit an SM's 65536."""


def register_budget(spec: ImageSpec) -> int:
    """Returns the most registers per thread that the image of `spec` may use."""
    return REGISTERS[spec.kernel]

"""How many registers an image may use: the build fails above it.

An image must leave room for as many CTAs on an SM as its launch constants promise, and must not need more than images
of its kind did when they were last looked at: a change that costs registers is to be noticed and written down here.
"""

from __future__ import annotations

from attnres_aot.variants import STATISTICS, ConsumerSpec, ImageSpec

SM_REGISTERS = 65536
"""Registers of an SM, on every supported arch."""
ALLOCATION_UNIT = 8
"""Registers per thread are handed out in multiples of this."""


def register_budget(spec: ImageSpec, launch: dict[str, int]) -> int:
    """Returns the most registers per thread that the image of `spec` may use.

    Args:
      spec: What is compiled.
      launch: The launch constants that it is compiled with.
    """
    threads = launch["threads"] * launch.get("min_ctas_per_sm", 1)
    return min(_of_its_kind(spec), SM_REGISTERS // threads // ALLOCATION_UNIT * ALLOCATION_UNIT)


def _of_its_kind(spec: ImageSpec) -> int:
    """The most of all images of a kind, rounded up: sm_90, sm_100, sm_103, sm_120; H 1024 to 8192; 2026-11-30."""
    if not isinstance(spec, ConsumerSpec):
        return 88 if spec.kernel == STATISTICS else 48
    if spec.slots > 8:
        return 128
    if spec.nb is None:
        return 96 if spec.slots > 1 else 80
    if spec.nb == 0:
        return 72
    return 128 if spec.wide or spec.slots > 1 else 96

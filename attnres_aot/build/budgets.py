"""How many registers an image may use: the build fails above it."""

from __future__ import annotations

from attnres_aot.variants import ConsumerSpec

CONSUMER_REGISTERS = 128
"""Registers per thread of a consumer: 4 CTAs of 128 threads then fit an SM's 65536. Not tuned on a GPU yet."""


def register_budget(kernel: str, spec: ConsumerSpec) -> int:
    """Returns the most registers per thread that the image of `spec` may use."""
    del kernel, spec  # One number serves every consumer so far.
    return CONSUMER_REGISTERS

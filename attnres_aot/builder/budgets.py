"""What an image may use of an SM, so that as many of its CTAs fit together as its launch constants promise.

Nothing else about registers, memory or instructions fails a build. What our own images need is held by a test with
their numbers (`tests/unit/kernels/test_golden.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from attnres_aot.bundle.manifest import BudgetRecord

SM_REGISTERS = 65536
"""Registers of an SM, on every supported arch."""
ALLOCATION_UNIT = 8
"""Registers per thread are handed out in multiples of this."""
MOST_REGISTERS = 255
"""Registers that one thread can have."""
SM_SMEM_BYTES = 100 << 10
"""Shared memory of an SM on the supported arch that has least, compute capability 12.0 (CUDA programming guide)."""
CTA_SMEM_BYTES = 1 << 10
"""Shared memory that the system takes for each CTA (same source)."""


def budget_for(launch: Mapping[str, int]) -> BudgetRecord:
    """Returns what an image may use.

    Args:
      launch: the launch constants that it is compiled with.
    """
    together = launch.get("min_ctas_per_sm", 1)
    fitting = SM_REGISTERS // (launch["threads"] * together) // ALLOCATION_UNIT * ALLOCATION_UNIT
    return BudgetRecord(
        registers=min(MOST_REGISTERS, fitting),
        smem_bytes=SM_SMEM_BYTES // together - CTA_SMEM_BYTES,
    )

"""What an image may use of registers, shared memory and time: the build fails above it.

An image must leave room for as many CTAs on an SM as its launch constants promise, and must not need more than images
of its kind did when they were last looked at: a change that costs is to be noticed and written down here. Budgets are
recorded in the bundle, beside what each image uses.
"""

from __future__ import annotations

from dataclasses import replace

from attnres_aot.manifest import BudgetRecord
from attnres_aot.toolkits import DEFAULT_FLAVOUR
from attnres_aot.variants import STATISTICS, ConsumerSpec, ImageSpec

SM_REGISTERS = 65536
"""Registers of an SM, on every supported arch."""
ALLOCATION_UNIT = 8
"""Registers per thread are handed out in multiples of this."""


INSTRUCTION_PERCENT: dict[str, int] = {"cu13": 105}
"""Flavour -> how many critical instructions its images may have, in percent of the table below, where not 100.

The table is that of cu12. Of 416 images of kimi_k3 for sm_90, sm_100, sm_103 and sm_120 that cu13 (CUDA 13.4) made, 5
were over it, by at most 2.5 %; none needed more registers or memory; 2026-11-30.
"""


def budget_for(spec: ImageSpec, launch: dict[str, int], flavour: str = DEFAULT_FLAVOUR) -> BudgetRecord:
    """Returns what the image of `spec` may use.

    Args:
      spec: What is compiled.
      launch: The launch constants that it is compiled with.
      flavour: Which of the compiler's libraries compiles it, e.g. `cu12`.
    """
    threads = launch["threads"] * launch.get("min_ctas_per_sm", 1)
    fitting = SM_REGISTERS // threads // ALLOCATION_UNIT * ALLOCATION_UNIT
    kind = _of_its_kind(spec)
    instructions = kind.critical_instructions * INSTRUCTION_PERCENT.get(flavour, 100) // 100
    return replace(kind, registers=min(kind.registers, fitting), critical_instructions=instructions)


def _of_its_kind(spec: ImageSpec) -> BudgetRecord:
    """The most of all images of a kind, rounded up: sm_90, sm_100, sm_103, sm_120; H 1024 to 8192; 2026-11-30."""
    if not isinstance(spec, ConsumerSpec):
        return _most(88, 1856, 176) if spec.kernel == STATISTICS else _most(48, 0, 128)
    if spec.nb is None:
        registers, instructions = {0: (88, 384), 1: (88, 528)}.get(spec.slots, (128, 896))
        return _most(registers, 1984, instructions if spec.slots <= 8 else 1216)
    if spec.slots:
        return _most(128, 3328, 1056 if spec.slots == 1 else 1520 if spec.slots <= 8 else 1808)
    if spec.nb == 0:
        return _most(72, 1216, 224) if spec.wide else _most(72, 1984, 192)
    if spec.wide:
        return _most(128, 2240, 432 if spec.final else 336)
    return _most(96, 3328, 352 if spec.final else 288)


def _most(registers: int, smem_bytes: int, critical_instructions: int) -> BudgetRecord:
    return BudgetRecord(registers=registers, smem_bytes=smem_bytes, critical_instructions=critical_instructions)

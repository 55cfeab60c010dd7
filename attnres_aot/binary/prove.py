"""Proving a compiled image: what its binary says against what was asked of the compiler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attnres_aot.binary.cubin import CubinFacts, read_cubin
from attnres_aot.binary.kernel_facts import KernelFacts
from attnres_aot.bundle.manifest import BudgetRecord
from attnres_aot.errors import BundleError, CompileError
from attnres_aot.spec.arch import Arch
from attnres_aot.spec.params import Param


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedLaunch:
    """How an image's kernel is launched, which its binary must be made for."""

    params: tuple[Param, ...]
    """The parameters that it must take."""
    block_threads: int
    """Threads per CTA, in x, that it must fix."""
    smem_dynamic_bytes: int
    """Shared memory that a launch adds, bytes per CTA; above 0 it must use shared memory."""
    pdl: bool
    """Whether it must wait for what it depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """What a manifest takes from a proven binary."""

    symbol: str
    """Symbol of the image's one kernel."""
    proven_arch: Arch
    """The arch that the binary names."""
    registers: int
    """Registers per thread."""
    stack_bytes: int
    """Stack, bytes per thread."""
    spill_bytes: int
    """Bytes per thread that register spills store."""
    smem_static_bytes: int
    """Shared memory that the kernel declares, bytes per CTA."""
    critical_instructions: int
    """Instructions that a chain of dependent launches cannot overlap."""


def prove_image(
    cubin: bytes,
    *,
    symbol: str,
    arch: Arch,
    flavour: str,
    launch: AskedLaunch,
    budget: BudgetRecord,
) -> ImageFacts:
    """Checks that a binary is the image that was asked for.

    Args:
      cubin: The whole file.
      symbol: What its one kernel must be called.
      arch: The target it must name, suffix included.
      flavour: The compiler's flavour that must have made it, e.g. `cu12`.
      launch: How it will be launched.
      budget: What it may use.

    Returns:
      The facts of its only kernel.

    Raises:
      CompileError: it is not; every difference is listed with what was asked and what was found.
    """
    try:
        facts = read_cubin(cubin)
    except BundleError as error:
        raise CompileError(f"the compiled image cannot be read: {error}") from error
    problems = []
    if facts.arch != arch:
        problems.append(f"arch: asked {arch}, the binary names {facts.arch}")
    problems += _flavour_problems(facts, flavour)
    if len(facts.kernels) != 1:
        found = ", ".join(kernel.symbol for kernel in facts.kernels) or "none"
        problems.append(f"kernels: asked for exactly one, found {len(facts.kernels)}: {found:.400}")
    else:
        if facts.kernels[0].symbol != symbol:
            problems.append(f"symbol: asked {symbol!r}, found {facts.kernels[0].symbol!r:.300}")
        problems += _launch_problems(facts.kernels[0], launch)
        problems += _resource_problems(facts.kernels[0], budget)
        problems += _convergence_problems(facts.kernels[0])
    if problems:
        raise CompileError("the compiled image is not what was asked for: " + "; ".join(problems))
    kernel = facts.kernels[0]
    return ImageFacts(
        symbol=kernel.symbol,
        proven_arch=facts.arch,
        registers=kernel.registers,
        stack_bytes=kernel.stack_bytes,
        spill_bytes=kernel.spill_bytes,
        smem_static_bytes=kernel.smem_static_bytes,
        critical_instructions=kernel.critical_instructions,
    )


def _flavour_problems(facts: CubinFacts, flavour: str) -> Iterator[str]:
    """Yields a line if the binary was made by another flavour of the compiler than `flavour`."""
    if facts.flavour != flavour:
        made_by = facts.toolkit or "a compiler that does not name itself"
        yield f"flavour: asked {flavour}, the binary is of {facts.flavour or 'an unknown one'} ({made_by})"


def _launch_problems(kernel: KernelFacts, launch: AskedLaunch) -> Iterator[str]:
    """Yields the differences between a kernel and the launch that is prepared for it, one line each."""
    asked = [(param.offset, param.size) for param in launch.params]
    found = [(param.offset, param.size) for param in kernel.params]
    if len(asked) != len(found):
        yield f"parameters: asked {len(asked)}, found {len(found)}"
    for param, place in zip(launch.params, found, strict=False):
        if (param.offset, param.size) != place:
            yield (
                f"parameter {param.name!r}: asked {param.size} bytes at offset {param.offset}, "
                f"found {place[1]} bytes at offset {place[0]}"
            )
    if kernel.block != (launch.block_threads, 1, 1):
        block = "none" if kernel.block is None else " x ".join(map(str, kernel.block))
        yield f"threads per CTA: asked {launch.block_threads} x 1 x 1, the binary fixes {block}"
    if kernel.cluster is not None:
        yield f"cluster: asked for one set by the launch, the binary fixes {' x '.join(map(str, kernel.cluster))}"
    if kernel.pdl != launch.pdl:
        yield f"pdl: asked {launch.pdl}, found {kernel.pdl}"
    if launch.smem_dynamic_bytes and not kernel.uses_smem:
        yield f"dynamic shared memory: asked {launch.smem_dynamic_bytes} bytes, the kernel uses none"


def _convergence_problems(kernel: KernelFacts) -> Iterator[str]:
    """Yields what may go wrong because the threads of a warp are not together, one line each."""
    if kernel.split_shuffles:
        yield (
            f"convergence: {kernel.split_shuffles} shuffles after a loop that the threads of a warp leave one by one, "
            "with neither WARPSYNC nor BRA.DIV between; allowed is none"
        )


def _resource_problems(kernel: KernelFacts, budget: BudgetRecord) -> Iterator[str]:
    for what, used, allowed in (
        ("registers: {} per thread", kernel.registers, budget.registers),
        ("shared memory: {} bytes per CTA", kernel.smem_static_bytes, budget.smem_bytes),
    ):
        if used > allowed:
            yield f"{what.format(used)}, the budget is {allowed}"
    if kernel.stack_bytes or kernel.spill_bytes or kernel.local_instructions:
        yield (
            f"local memory: {kernel.stack_bytes} bytes of stack, {kernel.spill_bytes} bytes of spills, "
            f"{kernel.local_instructions} instructions that use it; allowed is none"
        )

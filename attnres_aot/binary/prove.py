"""Proving a compiled image: what its binary says against what was asked of the compiler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attnres_aot.binary.cubin import CubinFacts, read_cubin
from attnres_aot.binary.kernel_facts import KernelFacts
from attnres_aot.bundle.manifest import BudgetRecord
from attnres_aot.errors import BundleError, CompileError
from attnres_aot.spec.arch import Arch
from attnres_aot.spec.params import Param


def prove_image(
    cubin: bytes,
    *,
    symbol: str,
    arch: Arch,
    flavour: str,
    params: tuple[Param, ...],
    launch: Mapping[str, int],
    budget: BudgetRecord,
) -> KernelFacts:
    """Checks that a binary is the image that was asked for.

    Args:
      cubin: The whole file.
      symbol: What its one kernel must be called.
      arch: The target it must name, suffix included.
      flavour: The compiler's flavour that must have made it, e.g. `cu12`.
      params: The parameter list its kernel must take.
      launch: What a launch of it is: `threads` per CTA, in x, `smem_dynamic_bytes` and `pdl`.
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
        (kernel,) = facts.kernels
        if kernel.symbol != symbol:
            problems.append(f"symbol: asked {symbol!r}, found {kernel.symbol!r:.300}")
        problems += _launch_problems(kernel, params, launch)
        problems += _resource_problems(kernel, budget)
        problems += _convergence_problems(kernel)
    if problems:
        raise CompileError("the compiled image is not what was asked for: " + "; ".join(problems))
    return facts.kernels[0]


def _flavour_problems(facts: CubinFacts, flavour: str) -> Iterator[str]:
    """Yields a line if the binary was made by another flavour of the compiler than `flavour`."""
    if facts.flavour != flavour:
        made_by = facts.toolkit or "a compiler that does not name itself"
        yield f"flavour: asked {flavour}, the binary is of {facts.flavour or 'an unknown one'} ({made_by})"


def _launch_problems(kernel: KernelFacts, params: tuple[Param, ...], launch: Mapping[str, int]) -> Iterator[str]:
    """Yields the differences between a kernel and the launch that is prepared for it, one line each."""
    asked = [(param.offset, param.size) for param in params]
    found = [(param.offset, param.size) for param in kernel.params]
    if len(asked) != len(found):
        yield f"parameters: asked {len(asked)}, found {len(found)}"
    for param, place in zip(params, found, strict=False):
        if (param.offset, param.size) != place:
            yield (
                f"parameter {param.name!r}: asked {param.size} bytes at offset {param.offset}, "
                f"found {place[1]} bytes at offset {place[0]}"
            )
    if kernel.block != (launch["threads"], 1, 1):
        block = "none" if kernel.block is None else " x ".join(map(str, kernel.block))
        yield f"threads per CTA: asked {launch['threads']} x 1 x 1, the binary fixes {block}"
    if kernel.cluster is not None:
        yield f"cluster: asked for one set by the launch, the binary fixes {' x '.join(map(str, kernel.cluster))}"
    if kernel.pdl != launch["pdl"]:
        yield f"pdl: asked {bool(launch['pdl'])}, found {kernel.pdl}"
    if launch["smem_dynamic_bytes"] and not kernel.uses_smem:
        yield f"dynamic shared memory: asked {launch['smem_dynamic_bytes']} bytes, the kernel uses none"


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

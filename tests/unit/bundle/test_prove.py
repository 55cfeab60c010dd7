"""Proving an image: every difference from what was asked is named, all of them at once."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest

from attnres_aot.binary.elf_image import open_elf
from attnres_aot.binary.kernel_facts import KernelFacts
from attnres_aot.binary.prove import prove_image
from attnres_aot.bundle.manifest import BudgetRecord
from attnres_aot.errors import CompileError
from attnres_aot.spec.arch import Arch
from attnres_aot.spec.params import CONSUMER_PARAMS, lay_out

CRITICAL = 16
"""Instructions of the cubin's kernel up to its exit: it does not wait."""
ROOMY = BudgetRecord(registers=32, smem_bytes=1024)

COUNT = len(CONSUMER_PARAMS)

ASKED: dict[str, Any] = {
    "symbol": "consumer",
    "arch": Arch(10, 0),
    "flavour": "cu12",
    "params": CONSUMER_PARAMS,
    "threads": 128,
    "smem_dynamic_bytes": 0,
    "pdl": True,
    "budget": BudgetRecord(registers=8, smem_bytes=40),
}


def prove(data: bytes, **changes: Any) -> KernelFacts:
    asked = {**ASKED, **changes}
    launch = {name: asked.pop(name) for name in ("threads", "smem_dynamic_bytes", "pdl")}
    return prove_image(data, launch=launch, **asked)


def test_an_image_that_is_what_was_asked_for(cubin):
    facts = prove(cubin("consumer"))
    assert (facts.symbol, facts.registers, facts.smem_static_bytes) == ("consumer", 8, 40)
    assert (facts.stack_bytes, facts.spill_bytes, facts.critical_instructions) == (0, 0, CRITICAL)


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A request that the cubin does not meet."""

    name: str
    kernel: str = "consumer"
    asked: dict[str, Any] = field(default_factory=dict)
    message: str


ONE_POINTER = lay_out([("source", "pointer")])
SWAPPED = (
    *CONSUMER_PARAMS[:10],
    dataclasses.replace(CONSUMER_PARAMS[10], offset=84, size=4),
    *CONSUMER_PARAMS[11:],
)
SYMBOLS = {"dynamic": "dynamic_kernel"}
REFUSED = [
    Refused(name="another symbol", asked={"symbol": "other"}, message="symbol: asked 'other', found 'consumer'"),
    Refused(name="another arch", asked={"arch": Arch(10, 3)}, message="arch: asked sm_103, the binary names sm_100"),
    Refused(name="suffix", asked={"arch": Arch(10, 0, "f")}, message="arch: asked sm_100f, the binary names sm_100"),
    Refused(
        name="flavour",
        asked={"flavour": "cu13"},
        message="flavour: asked cu13, the binary is of cu12 (Cuda compilation tools, release 12.9, V12.9.",
    ),
    Refused(name="two kernels", kernel="two", message="kernels: asked for exactly one, found 2: one, two"),
    Refused(name="no kernel", kernel="none", message="kernels: asked for exactly one, found 0: none"),
    Refused(
        name="fewer parameters",
        asked={"params": CONSUMER_PARAMS[:-1]},
        message=f"parameters: asked {COUNT - 1}, found {COUNT}",
    ),
    Refused(name="more parameters", kernel="cluster", message=f"parameters: asked {COUNT}, found 1"),
    Refused(
        name="parameter place",
        asked={"params": SWAPPED},
        message="parameter 'fault': asked 4 bytes at offset 84, found 8 bytes at offset 80",
    ),
    Refused(name="pdl", asked={"pdl": False}, message="pdl: asked False, found True"),
    Refused(
        name="dynamic shared memory",
        kernel="cluster",
        asked={"params": ONE_POINTER, "smem_dynamic_bytes": 16},
        message="dynamic shared memory: asked 16 bytes, the kernel uses none",
    ),
    Refused(name="block", asked={"threads": 256}, message="asked 256 x 1 x 1, the binary fixes 128 x 1 x 1"),
    Refused(name="block in y", kernel="bare", asked={"params": ()}, message="the binary fixes 32 x 2 x 1"),
    Refused(name="open block", kernel="bounded", asked={"params": ONE_POINTER}, message="the binary fixes none"),
    Refused(name="cluster", kernel="cluster", asked={"params": ONE_POINTER}, message="the binary fixes 7 x 1 x 1"),
    Refused(
        name="registers",
        asked={"budget": dataclasses.replace(ROOMY, registers=7)},
        message="registers: 8 per thread, the budget is 7",
    ),
    Refused(
        name="shared memory",
        asked={"budget": dataclasses.replace(ROOMY, smem_bytes=39)},
        message="shared memory: 40 bytes per CTA, the budget is 39",
    ),
    Refused(
        name="spills",
        kernel="spill",
        asked={"params": ONE_POINTER, "budget": ROOMY},
        message="local memory: 424 bytes of stack, 420 bytes of spills, 210 instructions that use it; allowed is none",
    ),
    Refused(
        name="stack",
        kernel="local",
        asked={"params": ONE_POINTER, "budget": ROOMY},
        message="512 bytes of stack, 0 bytes of spills, 2 instructions",
    ),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_a_difference_is_named_with_what_was_asked_and_found(cubin, case):
    with pytest.raises(CompileError) as caught:
        prove(cubin(case.kernel), **{"symbol": SYMBOLS.get(case.kernel, case.kernel), **case.asked})
    assert case.message in str(caught.value)


def test_all_differences_come_together(cubin):
    with pytest.raises(CompileError) as caught:
        prove(cubin("spill", "sm_90"), symbol="spill", threads=96)
    text = str(caught.value)
    for part in (
        "arch: asked sm_100",
        f"parameters: asked {COUNT}",
        "asked 96 x 1 x 1",
        "registers: 32",
        "local memory: 424",
    ):
        assert part in text


def test_a_warp_that_may_be_apart_where_it_shuffles_is_refused(cubin):
    """The second instruction becomes a shuffle, and the first what ends a loop that threads leave one by one."""
    data = cubin("consumer")
    code = open_elf(data).find(".text.consumer")
    assert code is not None
    assert data.count(code.data) == 1
    start = data.index(code.data)
    yields, shuffles = (opcode.to_bytes(16, "little") for opcode in (0x946, 0xF89))
    with pytest.raises(CompileError, match="convergence: 1 shuffles after a loop"):
        prove(data[:start] + yields + shuffles + data[start + 32 :])


def test_what_is_no_cubin_is_a_compile_error():
    with pytest.raises(CompileError, match="cannot be read: not a cubin"):
        prove(b"ELF")

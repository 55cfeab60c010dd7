"""The machine: all threads of a launch, each with a program counter, executed in groups that share one.

Any group of threads at one place may go next; `Schedule` chooses. A group runs on to the next branch, label or barrier,
so threads of a warp may part and meet anywhere, as on a GPU with independent thread scheduling. An instruction that
waits is not executed before what it waits for holds; when nobody can go on, that is a deadlock, and an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ptx_machine.arithmetic import OPERATIONS, approximations
from ptx_machine.memory import GlobalMemory
from ptx_machine.program import Address, Imm, Instruction, Label, Operand, Program, PtxError, Reg, Special, Vec
from ptx_machine.shared import WARP, Mbarriers, SharedMemory, Who

WARP_BARRIERS = frozenset({"shfl.sync.bfly.b32", "shfl.sync.idx.b32", "bar.warp.sync"})
TRY_WAIT = "mbarrier.try_wait.parity.shared::cta.b64"
WAITING = WARP_BARRIERS | {"bar.sync", "barrier.cluster.wait", TRY_WAIT}
"""Opcodes that wait for other threads."""
MAX_STEPS = 200_000
"""Groups executed before a launch counts as one that does not end."""


class DeadlockError(PtxError):
    """No thread can go on, or none ever ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One launch."""

    program: Program
    """What is launched."""
    params: Sequence[int]
    """Bits of the parameters."""
    ctas: int
    """CTAs of the grid."""
    cluster: int
    """CTAs per cluster."""
    error_seed: int | None = None
    """Of the errors of approximate functions; None: they make none."""


class Machine:
    """One launch in progress: registers, places and barriers of all its threads."""

    def __init__(self, launch: Launch, memory: GlobalMemory) -> None:
        self.program, self.launch, self.memory = launch.program, launch, memory
        if len(launch.params) != len(launch.program.params):
            raise PtxError(f"{len(launch.params)} parameters for {len(launch.program.params)}")
        threads = launch.program.threads
        self.threads = launch.ctas * threads
        self.thread = torch.arange(self.threads)
        self.cta, self.warp = self.thread // threads, self.thread // WARP
        self.cluster = self.cta // launch.cluster
        self.special = {
            "%tid.x": (self.thread % threads).int(),
            "%ctaid.x": self.cta.int(),
            "%laneid": (self.thread % WARP).int(),
        }
        self.operations = {**OPERATIONS, **approximations(launch.error_seed)}
        self.pc = torch.zeros(self.threads, dtype=torch.int64)
        self.turns = torch.zeros(self.threads, dtype=torch.int64)  # branches back
        self.end = len(self.program.instructions)
        self.registers: list[Tensor | None] = [None] * len(self.program.register_types)
        self.shared = SharedMemory(launch.ctas, self.program.shared_end)
        self.mbarriers = Mbarriers(launch.ctas)
        self.cta_epoch, self.warp_epoch = torch.zeros_like(self.pc), torch.zeros_like(self.pc)
        self.arrived, self.passed = torch.zeros_like(self.pc), torch.zeros_like(self.pc)
        self.waited = torch.zeros(self.threads, dtype=torch.bool)
        self.released = torch.zeros(self.threads, dtype=torch.bool)
        self.seen = torch.zeros((self.threads, 0), dtype=torch.bool)

    def who(self, group: Tensor) -> Who:
        """Describes a group to shared memory."""
        return Who(
            thread=group,
            cta=self.cta[group],
            cta_epoch=self.cta_epoch[group],
            warp_epoch=self.warp_epoch[group],
            seen=self.seen[group],
        )

    def fetch(self, operand: Operand, group: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns an operand's values for a group, or one for all; `dtype` is the type of an immediate."""
        if isinstance(operand, Reg):
            values = self.registers[operand.number]
            if values is None:
                raise PtxError(f"register {operand.number} is read before anything is written to it")
            return values if len(group) == self.threads else values[group]
        if isinstance(operand, Imm):
            return _immediate(operand.value, dtype)
        if not isinstance(operand, Special) or operand.name not in self.special:
            raise PtxError(f"the machine does not know {operand}")
        return self.special[operand.name][group]

    def assign(self, register: Operand, group: Tensor, values: Tensor) -> None:
        """Writes a register of a group's threads."""
        assert isinstance(register, Reg)
        dtype = self.program.register_types[register.number]
        if values.dtype != dtype:
            raise PtxError(f"{values.dtype} for a register of type {dtype}")
        if len(group) == self.threads:
            self.registers[register.number] = values.expand(self.threads)
            return
        old = self.registers[register.number]
        new = torch.zeros(self.threads, dtype=dtype) if old is None else old.clone()
        new[group] = values
        self.registers[register.number] = new

    def address(self, operand: Operand, group: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the addresses that an operand in square brackets means, [threads] int64."""
        assert isinstance(operand, Address)
        return (self.fetch(operand.base, group, dtype).long() + operand.offset).expand(len(group))

    def ready(self, group: Tensor) -> Tensor:
        """Returns those of the threads at one place who need not wait there."""
        opcode = self.program.instructions[int(self.pc[group[0]])].opcode
        if opcode in WARP_BARRIERS:
            return group[_complete(self.warp, group, WARP)]
        if opcode == "bar.sync":
            return group[_complete(self.cta, group, self.program.threads)]
        if opcode == "barrier.cluster.wait":
            gone = torch.where(self.pc == self.end, 1 << 40, self.arrived)
            least = torch.full((int(self.cluster[-1]) + 1,), 1 << 41).scatter_reduce(0, self.cluster, gone, "amin")
            return group[least[self.cluster[group]] > self.passed[group]]
        if opcode == TRY_WAIT:
            instruction = self.program.instructions[int(self.pc[group[0]])]
            address = self.address(instruction.operands[1], group, torch.int32)
            return group[self.mbarriers.complete(address, self.cta[group])]
        return group

    def step(self, group: Tensor, *, fine: bool = False) -> None:
        """Runs a group that is ready up to the next branch, label or barrier; `fine`: or access to memory."""
        from ptx_machine.effects import EFFECTS

        pc = first = int(self.pc[group[0]])
        everybody = len(group) == self.threads
        while pc < self.end:
            instruction = self.program.instructions[pc]
            opcode = instruction.opcode
            if pc != first and (
                (pc in self.program.joins and not everybody)
                or (opcode in WAITING and not (everybody and (opcode in WARP_BARRIERS or opcode == "bar.sync")))
                or (fine and opcode.startswith(("ld.global", "ld.relaxed", "st.", "ld.shared")))
            ):
                break
            if opcode in ("bra", "bra.uni"):
                self._branch(instruction, pc, group)
                return
            if opcode == "ret":
                pc = self.end
                break
            active = self._active(instruction, group)
            if len(active):
                if (operation := self.operations.get(opcode)) is not None:
                    self._compute(operation, instruction, active)
                elif (effect := EFFECTS.get(opcode)) is not None:
                    effect(self, instruction, active)
                else:
                    raise PtxError(f"the machine does not know: {instruction.text}")
            pc += 1
        self.pc[group] = pc

    def _active(self, instruction: Instruction, group: Tensor) -> Tensor:
        if instruction.guard is None:
            return group
        return group[self.fetch(instruction.guard, group, torch.bool) ^ instruction.negated]

    def _branch(self, instruction: Instruction, pc: int, group: Tensor) -> None:
        (target,) = instruction.operands
        assert isinstance(target, Label)
        taken = self._active(instruction, group)
        self.pc[group] = pc + 1
        self.pc[taken] = target.pc
        if target.pc <= pc:
            self.turns[taken] += 1

    def _compute(self, operation: Callable[..., Tensor], instruction: Instruction, group: Tensor) -> None:
        to, *sources = instruction.operands
        assert isinstance(to, Reg)
        dtype = self.program.register_types[to.number]
        for source in sources:
            if isinstance(source, Reg) and self.program.register_types[source.number] != torch.bool:
                dtype = self.program.register_types[source.number]
                break
        self.assign(to, group, operation(*(self.fetch(source, group, dtype) for source in sources)))


@functools.cache
def _immediate(value: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor(value - (1 << 32) if dtype == torch.int32 and value >= 1 << 31 else value, dtype=dtype)


def vector(operand: Operand) -> tuple[Reg | Imm, ...]:
    """The parts of an operand in braces, or the operand."""
    if isinstance(operand, Vec):
        return operand.parts
    assert isinstance(operand, Reg | Imm)
    return (operand,)


def _complete(unit: Tensor, group: Tensor, size: int) -> Tensor:
    """Tells for each thread of a group whether all `size` threads of its warp or CTA are in the group."""
    return torch.bincount(unit[group])[unit[group]] == size

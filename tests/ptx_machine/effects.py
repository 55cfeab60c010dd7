"""Instructions that do more than compute: memory, shuffles, barriers, and what a launch tells its neighbours."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ptx_machine.arithmetic import MASK32
from ptx_machine.machine import TRY_WAIT, Machine, vector
from ptx_machine.program import Imm, Instruction, Param, PtxError, Reg
from ptx_machine.shared import WARP

PEER = 1 << 20
"""mapa's result is (rank + 1) * PEER + the address in that CTA."""
Effect = Callable[[Machine, Instruction, Tensor], None]


class TrapError(PtxError):
    """The kernel has stopped itself."""


def _load_param(machine: Machine, instruction: Instruction, group: Tensor) -> None:
    to, param = instruction.operands
    assert isinstance(to, Reg)
    assert isinstance(param, Param)
    size = {"u64": "b64", "u32": "b32", "f32": "b32"}[machine.program.params[param.number]]
    if not instruction.opcode.endswith(size):
        raise PtxError(f"parameter {param.number} is read with another size than it has")
    dtype = machine.program.register_types[to.number]
    if size == "b64" and dtype != torch.int64:
        raise PtxError(f"parameter {param.number} does not fit the register")
    value = machine.launch.params[param.number]
    if size == "b32" and dtype == torch.int64:  # a wider register is filled with zeros
        value = int(value) & MASK32
    machine.assign(to, group, torch.tensor(value, dtype=dtype))


def _load_global(machine: Machine, instruction: Instruction, group: Tensor) -> None:
    to = vector(instruction.operands[0])
    address = machine.address(instruction.operands[1], group, torch.int64)
    constant = ".nc." in instruction.opcode
    words = machine.memory.load(address, len(to), machine.waited[group], constant=constant)
    for register, values in zip(to, words.unbind(1), strict=True):
        machine.assign(register, group, values)


def _store_global(machine: Machine, instruction: Instruction, group: Tensor) -> None:
    address = machine.address(instruction.operands[0], group, torch.int64)
    machine.memory.store(address, _values(machine, instruction, group), machine.waited[group], group)


def _values(machine: Machine, instruction: Instruction, group: Tensor) -> Tensor:
    parts = vector(instruction.operands[1])
    return torch.stack([machine.fetch(part, group, torch.int32).expand(len(group)) for part in parts], 1)


def _load_shared(machine: Machine, instruction: Instruction, group: Tensor) -> None:
    to = vector(instruction.operands[0])
    address = machine.address(instruction.operands[1], group, torch.int32)
    words = machine.shared.load(address, len(to), machine.who(group))
    for register, values in zip(to, words.unbind(1), strict=True):
        machine.assign(register, group, values)


def _store_shared(machine: Machine, instruction: Instruction, group: Tensor) -> None:
    address = machine.address(instruction.operands[0], group, torch.int32)
    machine.shared.store(address, _values(machine, instruction, group), machine.who(group))


def _map_peer(machine: Machine, instruction: Instruction, group: Tensor) -> None:
    to, address, rank = instruction.operands
    at, peer = (machine.fetch(operand, group, torch.int32) for operand in (address, rank))
    machine.assign(to, group, (peer + 1) * PEER + at)


def _store_async(machine: Machine, instruction: Instruction, group: Tensor) -> None:
    there, barrier = (machine.address(instruction.operands[i], group, torch.int32) for i in (0, 2))
    rank = there // PEER - 1
    if bool((rank != barrier // PEER - 1).any()) or int(rank.min()) < 0 or int(rank.max()) >= machine.launch.cluster:
        raise PtxError(f"st.async to CTAs {rank.unique().tolist()} of a cluster of {machine.launch.cluster}")
    if bool((machine.passed[group] == 0).any()):
        raise PtxError("st.async before the cluster barrier that shows its mbarrier")
    target = machine.cta[group] // machine.launch.cluster * machine.launch.cluster + rank
    threads = machine.program.threads
    if bool((machine.pc.view(-1, threads)[target] == machine.end).all(1).any()):
        raise PtxError("st.async to a CTA that has ended")
    values = _values(machine, instruction, group)
    number = machine.mbarriers.transfer(barrier % PEER, target, 4 * values.shape[1])
    who = machine.who(group)
    machine.shared.store(there % PEER, values, type(who)(**{**_fields(who), "cta": target}), number)


def _fields(who: object) -> dict[str, Tensor]:
    return {name: getattr(who, name) for name in ("thread", "cta", "cta_epoch", "warp_epoch", "seen")}


def _init_mbarrier(machine: Machine, instruction: Instruction, group: Tensor) -> None:
    address, count = machine.address(instruction.operands[0], group, torch.int32), instruction.operands[1]
    assert isinstance(count, Imm)
    machine.mbarriers.init(address, machine.cta[group], count.value)


def _expect(machine: Machine, instruction: Instruction, group: Tensor) -> None:
    _, barrier, size = instruction.operands
    address = machine.address(barrier, group, torch.int32)
    machine.mbarriers.expect(address, machine.cta[group], machine.fetch(size, group, torch.int32))


def _try_wait(machine: Machine, instruction: Instruction, group: Tensor) -> None:
    done, barrier, parity = instruction.operands
    if parity != Imm(0):
        raise PtxError("only phase 0 of an mbarrier is waited for")
    address = machine.address(barrier, group, torch.int32)
    complete = machine.mbarriers.complete(address, machine.cta[group])
    number = machine.mbarriers.number(address)
    missing = len(machine.mbarriers) - machine.seen.shape[1]
    machine.seen = torch.nn.functional.pad(machine.seen, (0, missing))
    machine.seen[group[complete], number] = True
    machine.assign(done, group, complete)


def _shuffle(machine: Machine, instruction: Instruction, group: Tensor) -> None:
    to, source, operand, clamp, mask = instruction.operands
    if (clamp, mask) != (Imm(31), Imm(-1)):
        raise PtxError(f"a shuffle of a part of the warp: {instruction.text}")
    values = machine.fetch(source, group, torch.int32).view(-1, WARP)  # a group holds whole warps here, in order
    lane = torch.arange(WARP)
    other = machine.fetch(operand, group, torch.int32)
    if other.dim():
        raise PtxError(f"a shuffle by a register: {instruction.text}")
    chosen = lane ^ other if ".bfly." in instruction.opcode else other.expand(WARP)
    machine.assign(to, group, values[:, chosen.long()].reshape(-1))


def _warp_barrier(machine: Machine, instruction: Instruction, group: Tensor) -> None:
    if instruction.operands != (Imm(-1),):
        raise PtxError(f"a barrier of a part of the warp: {instruction.text}")
    machine.warp_epoch[group] += 1


def _cta_barrier(machine: Machine, instruction: Instruction, group: Tensor) -> None:
    if instruction.operands != (Imm(0),):
        raise PtxError(f"a barrier of a part of the CTA: {instruction.text}")
    machine.warp_epoch[group] += 1
    machine.cta_epoch[group] += 1


def _arrive(machine: Machine, instruction: Instruction, group: Tensor) -> None:
    if bool((machine.arrived[group] != machine.passed[group]).any()):
        raise PtxError("a thread arrives twice at the cluster barrier")
    machine.arrived[group] += 1


def _wait_cluster(machine: Machine, instruction: Instruction, group: Tensor) -> None:
    machine.passed[group] += 1
    if bool((machine.passed[group] > machine.arrived[group]).any()):
        raise PtxError("a thread waits at the cluster barrier without having arrived")


def _wait_grid(machine: Machine, instruction: Instruction, group: Tensor) -> None:
    machine.waited[group] = True


def _release_grid(machine: Machine, instruction: Instruction, group: Tensor) -> None:
    machine.released[group] = True


def _nothing(machine: Machine, instruction: Instruction, group: Tensor) -> None:
    """Fences: memory here is always coherent, and races are found by epochs."""


def _trap(machine: Machine, instruction: Instruction, group: Tensor) -> None:
    raise TrapError(f"{len(group)} threads trap, the first of them thread {int(group[0])} of the launch")


EFFECTS: dict[str, Effect] = {
    "ld.param.b32": _load_param,
    "ld.param.b64": _load_param,
    "ld.global.nc.v4.b32": _load_global,
    "ld.global.v4.b32": _load_global,
    "ld.global.v2.f32": _load_global,
    "ld.relaxed.sys.global.v4.b32": _load_global,
    "st.global.v4.b32": _store_global,
    "st.global.v4.f32": _store_global,
    "st.global.v2.f32": _store_global,
    "st.relaxed.sys.global.v4.b32": _store_global,
    "ld.shared.f32": _load_shared,
    "ld.shared.v4.f32": _load_shared,
    "st.shared.f32": _store_shared,
    "mapa.shared::cluster.u32": _map_peer,
    "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32": _store_async,
    "mbarrier.init.shared::cta.b64": _init_mbarrier,
    "mbarrier.arrive.expect_tx.relaxed.cluster.shared::cta.b64": _expect,
    TRY_WAIT: _try_wait,
    "shfl.sync.bfly.b32": _shuffle,
    "shfl.sync.idx.b32": _shuffle,
    "bar.warp.sync": _warp_barrier,
    "bar.sync": _cta_barrier,
    "barrier.cluster.arrive.relaxed": _arrive,
    "barrier.cluster.wait": _wait_cluster,
    "griddepcontrol.wait": _wait_grid,
    "griddepcontrol.launch_dependents": _release_grid,
    "fence.mbarrier_init.release.cluster": _nothing,
    "fence.proxy.async.shared::cta": _nothing,
    "prefetch.global.L2": _nothing,
    "fence.acq_rel.sys": _nothing,
    "trap": _trap,
}
"""Opcode -> what it does. With `arithmetic.OPERATIONS` and branches, these are all instructions that exist."""

"""Schedules: which threads go next, until all have ended; in order of the text, or at random."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from ptx_machine.machine import MAX_STEPS, DeadlockError, Launch, Machine
from ptx_machine.memory import GlobalMemory
from ptx_machine.program import PtxError

World = Callable[[int], None]
"""What the rest of the world does before each step of the machine, by the number of the step."""


def run(
    launch: Launch,
    memory: GlobalMemory,
    *,
    world: World | None = None,
    seed: int | None = None,
    max_steps: int = MAX_STEPS,
) -> Machine:
    """Runs a launch to its end.

    Args:
      launch: what.
      memory: global memory; holds the results afterwards.
      world: called before each step.
      seed: random order, with switches at every access to memory; None: in lock-step, where possible.
      max_steps: steps before the launch counts as endless.

    Raises:
      DeadlockError: no thread can go on, or the steps are used up.
      TrapError: the kernel has stopped itself.
      PtxError: it has done something that is wrong in itself.
    """
    machine = Machine(launch, memory)
    choose = _lowest if seed is None else _Random(seed)
    for step in range(max_steps):
        if world is not None:
            world(step)
        places = machine.pc.unique().tolist()
        if places == [machine.end]:
            machine.mbarriers.check_exit()
            if not bool(machine.released.all()):
                raise PtxError("a thread has not released the dependent launch")
            return machine
        machine.step(choose(machine, [place for place in places if place != machine.end]), fine=seed is not None)
    raise DeadlockError(f"no end after {max_steps} steps; {_where(machine)}")


def _lowest(machine: Machine, places: list[int]) -> Tensor:
    """Takes all threads at one place: those that have looped least, and of them the first in the text."""
    turns = {place: int(machine.turns[machine.pc == place].min()) for place in places} if len(places) > 1 else {}
    for place in sorted(places, key=lambda place: (turns.get(place, 0), place)):
        if len(group := machine.ready((machine.pc == place).nonzero().flatten())):
            return group
    raise DeadlockError(f"nobody can go on; {_where(machine)}")


class _Random:
    """Takes some threads at some place: now whole warps, now single threads, and often few of them.

    For some time it takes none of certain laggards, CTAs, warps or threads, unless nobody else can go on.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._until = 0
        self._step = 0
        self._keen: Tensor | None = None

    def __call__(self, machine: Machine, places: list[int]) -> Tensor:
        if self._step == self._until:
            self._keen = self._chance(machine, self._random.choice((1.0, 0.8, 0.3)))
            self._until += self._random.choice((10, 100, 1000))
        self._step += 1
        self._random.shuffle(places)
        for keen_only in (True, False):
            for place in places:
                here = machine.pc == place
                group = (here & self._keen if keen_only else here).nonzero().flatten()
                if len(group) and len(group := machine.ready(group)):
                    some = group[self._chance(machine, self._random.choice((0.05, 0.3, 0.9, 1.0)))[group]]
                    return some if len(some) and len(some := machine.ready(some)) else group
        raise DeadlockError(f"nobody can go on; {_where(machine)}")

    def _chance(self, machine: Machine, share: float) -> Tensor:
        """Chooses CTAs, warps or threads; returns [threads] bool."""
        unit = self._random.choice((machine.cta, machine.warp, machine.warp, machine.thread))
        return (torch.rand(int(unit[-1]) + 1, generator=self._generator) < share)[unit]


def _where(machine: Machine) -> str:
    """Says where the threads are that have not ended."""
    parts = []
    for place in machine.pc.unique().tolist():
        if place != machine.end:
            here = (machine.pc == place).nonzero().flatten()
            ctas = machine.cta[here].unique().numel()
            text = machine.program.instructions[place].text
            parts.append(f"{len(here)} threads of {ctas} CTAs at `{text}`")
    return "; ".join(parts)

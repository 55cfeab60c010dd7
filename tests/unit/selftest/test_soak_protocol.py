"""The order that the soak relies on, in every interleaving of its two streams: two mailboxes are enough, one is not.

A rank is a list of steps, and the other rank's steps may come in between anywhere. A consumer takes its slots in any
order, and between looking at a slot and arming it again anything may happen, as on a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support.ranks import Rank

ROUNDS = 5
EMPTY = None


def programs(slots: int, mailboxes: int) -> list[list[tuple]]:
    """The steps of both ranks: ("put", owner, mailbox, slot, round) and ("take", ...), of one rank's own mailboxes."""
    ranks = [SimpleNamespace(index=index, variant=SimpleNamespace(slots=slots)) for index in range(2)]
    steps = []
    for rank in ranks:
        mine = []
        for number in range(ROUNDS):
            box = number % mailboxes
            for owner in ranks:
                share = Rank.share(rank, owner)
                mine += [("put", owner.index, box, slot, number) for slot in range(share.start, share.stop)]
            mine.append(("consume", rank.index, box, slots, number))
        steps.append(mine)
    return steps


def successors(state, steps):
    """Yields every next state, or a fault in words."""
    for rank in range(2):
        if state[0][rank] < len(steps[rank]):
            step = steps[rank][state[0][rank]]
            yield from (_put if step[0] == "put" else _consume)(rank, step, *state)


def _put(rank, step, counters, taken, memory):
    _, owner, box, slot, number = step
    place = (owner, box, slot)
    if memory.get(place, EMPTY) is not EMPTY:
        yield f"rank {rank} overwrites round {memory[place]} with {number} at {place}"
    else:
        yield _set(counters, rank, counters[rank] + 1), taken, {**memory, place: number}


def _consume(rank, step, counters, taken, memory):
    _, owner, box, slots, number = step
    looked, armed = taken[rank]
    for slot in range(slots):
        place = (owner, box, slot)
        found = memory.get(place, EMPTY)
        if slot in armed or found is EMPTY:
            continue
        if found != number:
            yield f"rank {rank} takes or arms round {found} for {number} at {place}"
        elif slot not in looked:
            yield counters, _set(taken, rank, (looked | {slot}, armed)), memory
        else:
            yield counters, _set(taken, rank, (looked, armed | {slot})), {**memory, place: EMPTY}
    if len(armed) == slots:
        yield _set(counters, rank, counters[rank] + 1), _set(taken, rank, (frozenset(), frozenset())), memory


def _set(pair, index, value):
    return tuple(value if i == index else old for i, old in enumerate(pair))


def explore(slots: int, mailboxes: int) -> list[str]:
    """Walks through every reachable state; returns faults, and deadlocks."""
    steps = programs(slots, mailboxes)
    idle = (frozenset(), frozenset())
    stack, seen, faults = [((0, 0), (idle, idle), {})], set(), []
    while stack:
        state = stack.pop()
        key = (state[0], state[1], frozenset(item for item in state[2].items() if item[1] is not EMPTY))
        if key in seen:
            continue
        seen.add(key)
        following = list(successors(state, steps))
        faults += [each for each in following if isinstance(each, str)]
        if not following and state[0] != tuple(map(len, steps)):
            faults.append(f"nobody can go on at {state[0]}")
        stack += [each for each in following if not isinstance(each, str)]
    assert len(seen) > ROUNDS
    return faults


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_two_mailboxes_are_enough(slots):
    assert explore(slots, mailboxes=2) == []


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_one_mailbox_is_not(slots):
    assert any("overwrites" in fault for fault in explore(slots, mailboxes=1))

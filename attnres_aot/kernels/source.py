"""The delta row that a consumer takes: of an ordinary source, or of a mailbox, which is polled and armed again.

A mailbox row has `slots` parts, which are added in the order of the slots and rounded once. A vector of one is complete
when none of its words is ARMED; a publisher writes no such word. The vectors of all slots are loaded at once. Those of up to
TOGETHER slots are looked at together, so that one branch says that they are complete; what is not is loaded again, together.
Each is armed as soon as it is complete.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from attnres_aot.kernels import ptx
from attnres_aot.kernels.vectors import pack, select, tree, unpack, vec_address

ARMED = -0x80000000
"""An empty mailbox word (0x80000000), as the signed integer that the compiler compares."""
TOGETHER = 8
"""Most mailbox slots that are polled together, or half as many if there are more: they would not fit the registers."""


class Source:
    """The row as vectors of one thread."""

    def __init__(self, slots, vectors):
        """Fixes the constants.

        Args:
          slots: mailbox slots, or 0 for an ordinary source.
          vectors: 16-byte vectors per thread.
        """
        self.slots, self.vectors = slots, vectors

    def look(self, source, row, cols, on, row_stride, slot_stride):
        """Returns the row's vectors, slot by slot, and the addresses of the first slot's; a mailbox may not be full."""
        at = [vec_address(source, row, row_stride, col) for col in cols]
        if not self.slots:
            return [ptx.ld_vec(address, o) for address, o in zip(at, on, strict=True)], at
        there = zip(self._in_slots(at, slot_stride), on * self.slots, strict=True)
        return [ptx.ld_vec_mailbox(address, o) for address, o in there], at

    def _in_slots(self, at, slot_stride):
        """The addresses of vectors in all slots, slot by slot, from those in the first."""
        step = Int64(slot_stride) * 16
        return [address + step * slot if slot else address for slot in range(self.slots) for address in at]

    def take(self, looked, row, cols, on, slot_stride, fault, fault_tag, spin_budget):
        """Returns the row's vectors from what `look` returned; a mailbox is polled until it is full, and re-armed."""
        vecs, at = looked
        if not self.slots:
            return vecs
        at = self._in_slots(at, ptx.launder(slot_stride))  # worked out again, rather than kept since the look
        group = (TOGETHER if self.slots <= TOGETHER else TOGETHER // 2) * self.vectors
        totals = [[]] * self.vectors
        for i in range(0, len(vecs), group):
            slot = i // self.vectors
            some, places = vecs[i : i + group], at[i : i + group]
            has = (on * self.slots)[i : i + group]
            full = self._fill(some, places, has, slot, cols, row, fault, fault_tag, spin_budget)
            cute.arch.sync_warp()  # ptxas takes a warp for converged after the loop that is not, and shuffles then go wrong
            if self.slots == 1:
                return full
            totals = [_add_slots(total, full[v :: self.vectors]) for v, total in enumerate(totals)]
        return [pack(total) for total in totals]

    @cute.jit
    def _fill(
        self,
        vecs,
        at,
        on,
        first_slot: cutlass.Constexpr,
        cols,
        row: Int32,
        fault: cute.Pointer,
        fault_tag: Int32,
        spin_budget: Int32,
    ):
        """Returns the mailbox vectors at `at` once no word of any is the armed pattern, each re-armed when it was complete.

        `vecs` are the first loads, of slot `first_slot` and those after it, and `on` tells which of them the row has. Vectors that are not complete are loaded again,
        together; if `spin_budget` looks, the first one included, do not find all complete, the kernel traps.
        """
        least = _least_words(vecs)
        self._rearm(at, [_and(word != ARMED, o) for word, o in zip(least, on, strict=True)])
        polls = Int32(0)
        while tree(ptx.imin, least) == ARMED:
            polls = polls + 1
            if (polls == spin_budget) & (spin_budget != 0):
                slot, col = self._first_empty(least, first_slot, cols)
                ptx.trap_with_record(fault.toint(), fault_tag, row, slot, col)
            empty = [word == ARMED for word in least]
            vecs = [ptx.ld_vec_mailbox_where(*each) for each in zip(at, vecs, empty, strict=True)]
            least = _least_words(vecs)
            self._rearm(at, [was & (word != ARMED) for was, word in zip(empty, least, strict=True)])
        return vecs

    def _rearm(self, at, enabled):
        """Empties the mailbox vectors that `enabled` names."""
        for address, on in zip(at, enabled, strict=True):
            ptx.st_vec_mailbox(address, (Int32(ARMED),) * 4, on)

    def _first_empty(self, least, first_slot, cols):
        """Returns slot and column of the first vector that is not complete, by the least word of each."""
        slot, col = Int32(first_slot), cols[0]
        for i, word in reversed(list(enumerate(least))):
            slot = select(word == ARMED, Int32(first_slot + i // self.vectors), slot)
            col = select(word == ARMED, cols[i % self.vectors], col)
        return slot, col


def _and(condition, on):
    """Narrows a condition to vectors that the row has; `on` None: it has all."""
    return condition if on is None else condition & (on != 0)


def _least_words(vecs):
    """The least word of each vector: ARMED, which is the least of all, if the vector is not complete."""
    return [tree(ptx.imin, list(vec)) for vec in vecs]


def _add_slots(total, vecs):
    """Adds the elements of a vector's slots, in their order, to `total`, which is empty before the first."""
    for vec in vecs:
        total = [a + b for a, b in zip(total, unpack(vec), strict=True)] if total else unpack(vec)
    return total

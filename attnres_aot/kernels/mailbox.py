"""The delta row that a consumer takes out of a mailbox, which is polled and re-armed.

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


class Mailbox:
    """The mailbox as one thread sees it."""

    def __init__(self, slots, vectors):
        """Fixes the constants.

        Args:
          slots: mailbox slots, at least 1.
          vectors: 16-byte vectors per thread.
        """
        self.slots, self.vectors = slots, vectors

    def look(self, p, share):
        """Loads the thread's vectors once, complete or not.

        Returns:
          (vecs, at): [slots * V] vectors, slot by slot, and the addresses of the first slot's, [V].
        """
        at = [vec_address(p.source, share.row, p.source_row_stride, col) for col in share.cols]
        there = zip(self._in_slots(at, p.source_slot_stride), share.on * self.slots, strict=True)
        return [ptx.ld_vec_mailbox(address, on) for address, on in there], at

    def _in_slots(self, at, slot_stride):
        """The addresses of vectors in all slots, slot by slot, from those in the first."""
        step = Int64(slot_stride) * 16
        return [address + step * slot if slot else address for slot in range(self.slots) for address in at]

    def take(self, p, share, looked):
        """Polls from what `look` returned until all is complete, and arms it again; returns the row's [V] vectors."""
        vecs, at = looked
        at = self._in_slots(at, ptx.launder(p.source_slot_stride))  # worked out again, rather than kept since the look
        group = (TOGETHER if self.slots <= TOGETHER else TOGETHER // 2) * self.vectors
        totals = [[]] * self.vectors
        for i in range(0, len(vecs), group):
            some, places, has = (each[i : i + group] for each in (vecs, at, share.on * self.slots))
            full = self._fill(p, share, some, places, has, i // self.vectors)
            cute.arch.sync_warp()  # ptxas takes a warp for converged after the loop that is not, and shuffles then go wrong
            if self.slots == 1:
                return full
            totals = [_add_slots(total, full[v :: self.vectors]) for v, total in enumerate(totals)]
        return [pack(total) for total in totals]

    @cute.jit
    def _fill(self, p, share, vecs, at, on, first_slot: cutlass.Constexpr):
        """Returns the mailbox vectors at `at` once no word of any is the armed pattern, each re-armed when it was complete.

        `vecs` are the first loads, of slot `first_slot` and those after it, and `on` tells which of them the row has.
        Vectors that are not complete are loaded again, together; if `spin_budget` looks, the first one included, do not
        find all complete, the kernel traps.
        """
        least = _least_words(vecs)
        self._rearm(at, [_and(word != ARMED, o) for word, o in zip(least, on, strict=True)])
        polls = Int32(0)
        while tree(ptx.imin, least) == ARMED:
            polls = polls + 1
            if (polls == p.spin_budget) & (p.spin_budget != 0):
                slot, col = self._first_empty(least, first_slot, share.cols)
                ptx.trap_with_record(p.fault.toint(), p.fault_tag, share.row, slot, col)
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

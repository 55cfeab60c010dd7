"""Shared memory and mbarriers of all CTAs of a launch, with detection of races.

A word may be read by the thread that wrote it; by others of its warp after a warp barrier; by others of its CTA after
a CTA barrier; and, if another CTA's st.async wrote it, by a thread that has seen the mbarrier complete. A word may be
written again only after a barrier that follows every read of it. Lanes of a warp may write one word together; if they
do not write the same, the word is poisoned, like words that were never written: NaN, which no result survives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ptx_machine.program import SHARED_BASE, PtxError

WARP = 32
POISON = 0x7FC0DEAD
"""A NaN."""
_NEVER, _SEVERAL = -1, -2


@dataclass(frozen=True, slots=True, kw_only=True)
class Who:
    """The threads of an access; all tensors [threads] int64."""

    thread: Tensor
    """Number in the launch."""
    cta: Tensor
    """Number in the launch."""
    cta_epoch: Tensor
    """CTA barriers passed."""
    warp_epoch: Tensor
    """Warp and CTA barriers passed."""
    seen: Tensor
    """[threads, mbarriers] bool: mbarriers whose phase 0 the thread has seen complete."""


class Mbarriers:
    """Barriers by CTA and address."""

    def __init__(self, ctas: int) -> None:
        self._ctas = ctas
        self._number: dict[int, int] = {}
        self._count = torch.zeros((ctas, 0), dtype=torch.int64)
        self._expected = self._count.clone()
        self.transfers = self._count.clone()
        """[CTAs, barriers] bytes that are still expected."""

    def number(self, address: Tensor) -> int:
        """Returns the number of the barrier that all threads of a group name, in whatever CTAs."""
        first = int(address.flatten()[0])
        if bool((address != first).any()) or first % 8:
            raise PtxError("threads name different mbarriers in one instruction, or one that is not aligned")
        if first not in self._number:
            self._number[first] = len(self._number)
            column = torch.zeros((self._ctas, 1), dtype=torch.int64)
            self._count, self._expected, self.transfers = (
                torch.cat([each, column], 1) for each in (self._count, self._expected, self.transfers)
            )
        return self._number[first]

    def __len__(self) -> int:
        return len(self._number)

    def init(self, address: Tensor, cta: Tensor, count: int) -> None:
        """mbarrier.init, with one arrival."""
        number = self.number(address)
        if count != 1 or bool(self._count[cta, number].any()) or cta.unique().numel() != cta.numel():
            raise PtxError("an mbarrier is initialised twice, or for more than one arrival")
        self._count[cta, number] = 1

    def expect(self, address: Tensor, cta: Tensor, transfers: Tensor) -> None:
        """mbarrier.arrive.expect_tx: the only arrival."""
        number = self.number(address)
        if bool((self._count[cta, number] != 1).any()):
            raise PtxError("an arrival at an mbarrier that is not initialised, or complete")
        self._count[cta, number] = 2
        self.transfers[cta, number] = self._expected[cta, number] = transfers.long()

    def transfer(self, address: Tensor, cta: Tensor, size: int) -> int:
        """complete_tx: `size` bytes by each thread have come to a CTA; returns the barrier's number."""
        number = self.number(address)
        if bool((self._count[cta, number] != 2).any()):
            raise PtxError("st.async to an mbarrier that is not armed")
        self.transfers[:, number] -= size * torch.bincount(cta, minlength=self._ctas)
        if bool((self.transfers[:, number] < 0).any()):
            raise PtxError("more bytes came to an mbarrier than it expects")
        return number

    def complete(self, address: Tensor, cta: Tensor) -> Tensor:
        """Tells where phase 0 is complete."""
        number = self.number(address)
        return (self._count[cta, number] == 2) & (self.transfers[cta, number] == 0)

    def check_exit(self) -> None:
        """At the end of a launch each barrier is complete, or nothing was ever sent to it."""
        if bool(((self.transfers != 0) & (self.transfers != self._expected)).any()):
            raise PtxError("an mbarrier has got only a part of what it expects")


class SharedMemory:
    """Words by CTA and address."""

    def __init__(self, ctas: int, end: int) -> None:
        self._size = -(-end // 4)
        total = ctas * self._size
        self._words = torch.full((total,), POISON, dtype=torch.int32)
        self._writer = torch.full((total,), _NEVER)
        self._barrier = torch.full((total,), _NEVER)  # st.async: the mbarrier it counts on
        self._write_cta, self._write_warp = torch.zeros(total).long(), torch.zeros(total).long()
        self._reader = torch.full((total,), _NEVER)  # a warp
        self._read_cta, self._read_warp = torch.zeros(total).long(), torch.zeros(total).long()

    def load(self, address: Tensor, count: int, who: Who) -> Tensor:
        """Returns [threads, count] words.

        Raises:
          PtxError: out of bounds, not aligned, or a race.
        """
        index = self._index(address, count, who.cta)
        writer = self._writer[index]
        barrier = self._barrier[index]
        own = writer == who.thread[:, None]
        warp = (writer // WARP == who.thread[:, None] // WARP) & (who.warp_epoch[:, None] > self._write_warp[index])
        plain = own | warp | (who.cta_epoch[:, None] > self._write_cta[index])
        ok = torch.where(barrier >= 0, self._seen(barrier, who), plain) | (writer == _NEVER)
        if not bool(ok.all()):
            raise PtxError("a race: shared memory is read with no barrier since it was written")
        self._note_read(index, who)
        return self._words[index]

    @staticmethod
    def _seen(barrier: Tensor, who: Who) -> Tensor:
        if who.seen.shape[1] == 0:
            return torch.zeros_like(barrier, dtype=torch.bool)
        return who.seen.gather(1, barrier.clamp(min=0))

    def store(self, address: Tensor, values: Tensor, who: Who, barrier: int = _NEVER) -> None:
        """Stores [threads, count] words in the CTAs of `who`; `barrier`: by st.async, counting on that mbarrier.

        Raises:
          PtxError: out of bounds, not aligned, or a race.
        """
        index = self._index(address, values.shape[1], who.cta)
        self._check_write(index, who, barrier)
        self._writer[index] = who.thread[:, None].expand_as(index)
        if bool((self._writer[index] // WARP != who.thread[:, None] // WARP).any()):
            raise PtxError("two warps write the same word of shared memory")
        self._barrier[index] = barrier
        self._write_cta[index] = who.cta_epoch[:, None].expand_as(index)
        self._write_warp[index] = who.warp_epoch[:, None].expand_as(index)
        self._reader[index] = _NEVER
        self._words[index] = values
        self._words[index[self._words[index] != values]] = POISON  # lanes of a warp differ, and any of them may win

    def _check_write(self, index: Tensor, who: Who, barrier: int) -> None:
        writer, reader = self._writer[index], self._reader[index]
        if barrier != _NEVER:
            if bool((writer != _NEVER).any()):
                raise PtxError("st.async to a word that was written before")
            return
        if bool((self._barrier[index] >= 0).any()):
            raise PtxError("a word that st.async wrote is overwritten")
        same = reader == who.thread[:, None] // WARP
        ordered = (who.cta_epoch[:, None] > self._read_cta[index]) | (
            same & (who.warp_epoch[:, None] > self._read_warp[index])
        )
        if not bool((ordered | (reader == _NEVER)).all()):
            raise PtxError("a race: shared memory is overwritten with no barrier since it was read")
        mine = writer // WARP == who.thread[:, None] // WARP
        if not bool((mine | (writer == _NEVER) | (who.cta_epoch[:, None] > self._write_cta[index])).all()):
            raise PtxError("a race: two warps write a word of shared memory with no barrier between")

    def _note_read(self, index: Tensor, who: Who) -> None:
        flat, warp = index.flatten(), (who.thread // WARP)[:, None].expand_as(index).flatten()
        before = self._reader[flat]
        self._reader[flat] = warp
        several = (self._reader[flat] != warp) | ((before != _NEVER) & (before != warp))
        self._reader[flat[several]] = _SEVERAL
        for kept, now in ((self._read_cta, who.cta_epoch), (self._read_warp, who.warp_epoch)):
            kept.scatter_reduce_(0, flat, now[:, None].expand_as(index).flatten(), "amax")

    def _index(self, address: Tensor, count: int, cta: Tensor) -> Tensor:
        if int(address.min()) < SHARED_BASE or int(address.max()) + 4 * count > 4 * self._size:
            raise PtxError(f"shared memory is accessed out of bounds: {int(address.min())} to {int(address.max())}")
        if bool((address % (4 * count) != 0).any()):
            raise PtxError(f"an access of {4 * count} bytes to shared memory is not aligned")
        return (cta * self._size + address // 4)[:, None] + torch.arange(count)

"""Global memory of the machine: torch storage with, for every word, who may do what to it.

Beside bounds and alignment it finds words that are written twice, read-only loads of words that the launch writes, and
accesses before the dependency wait to what only holds after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ptx_machine.program import PtxError


@dataclass(kw_only=True)
class Segment:
    """One allocation."""

    words: Tensor
    """int32, the allocation itself."""
    readable: Tensor
    """bool per word."""
    writable: Tensor
    """bool per word."""
    after_wait: Tensor
    """bool per word: touched only after the dependency wait."""
    written_after_wait: Tensor
    """bool per word: written only after the dependency wait."""
    rewritable: Tensor
    """bool per word: the thread that wrote it may write it again."""
    writer: Tensor = field(init=False)
    """int64 per word: which thread wrote it, or -1."""

    def __post_init__(self) -> None:
        self.writer = torch.full(self.words.shape, -1)

    @classmethod
    def over(cls, words: Tensor) -> Segment:
        """An allocation of which nothing may be touched yet."""
        assert words.is_contiguous()
        return cls(words=words, **{name: torch.zeros(words.shape, dtype=torch.bool) for name in _RIGHTS})

    def allow(self, view: Tensor, *rights: str) -> None:
        """Gives rights, fields of this class by name, to the elements of a view into the allocation.

        The last axis is contiguous and of an even number of bf16.
        """
        if not view.numel():
            return
        words = view.view(torch.int32)
        offset = (words.data_ptr() - self.words.data_ptr()) // 4
        for right in rights:
            getattr(self, right).as_strided(words.shape, words.stride(), offset).fill_(True)


_RIGHTS = ("readable", "writable", "after_wait", "written_after_wait", "rewritable")


class GlobalMemory:
    """Segments, found by address."""

    def __init__(self, *segments: Segment) -> None:
        self._segments = segments

    def load(self, address: Tensor, count: int, waited: Tensor, *, constant: bool) -> Tensor:
        """Returns [threads, count] words.

        Args:
          address: [threads] int64.
          count: words for each thread.
          waited: [threads] bool: the thread is past the dependency wait.
          constant: nothing may write there while the kernel runs.
        """
        segment, index = self._find(address, count, waited, "readable")
        if constant and bool((segment.writer[index] >= 0).any()):
            raise PtxError("a read-only load of a word that this launch has written")
        return segment.words[index]

    def store(self, address: Tensor, values: Tensor, waited: Tensor, thread: Tensor) -> None:
        """Stores [threads, count] words; `thread` [threads] says who does."""
        segment, index = self._find(address, values.shape[1], waited, "writable")
        if bool((segment.written_after_wait[index].any(1) & ~waited).any()):
            raise PtxError("a store before the dependency wait to what may be in use until then")
        before = segment.writer[index]
        if bool(((before >= 0) & ~(segment.rewritable[index] & (before == thread[:, None]))).any()):
            raise PtxError("a word is written twice")
        segment.writer[index] = thread[:, None].expand_as(index)
        if bool((segment.writer[index] != thread[:, None]).any()):
            raise PtxError("two threads write the same word")
        segment.words[index] = values

    def _find(self, address: Tensor, count: int, waited: Tensor, right: str) -> tuple[Segment, Tensor]:
        first, last = int(address.min()), int(address.max())
        for segment in self._segments:
            base = segment.words.data_ptr()
            if base <= first and last + 4 * count <= base + 4 * segment.words.numel():
                break
        else:
            raise PtxError(f"{right}: addresses {first:#x} to {last:#x} are in no allocation")
        offset = address - base
        # alignment is relative to the allocation, which a GPU would align to 256 bytes
        if bool((offset % (4 * count) != 0).any()):
            raise PtxError(f"an access of {4 * count} bytes is not aligned")
        index = (offset // 4)[:, None] + torch.arange(count)
        if not bool(getattr(segment, right)[index].all()):
            bad = offset[~getattr(segment, right)[index].all(1)][0]
            raise PtxError(f"the word at byte {int(bad)} of its allocation is not {right}")
        if bool((segment.after_wait[index].any(1) & ~waited).any()):
            raise PtxError("an access before the dependency wait to what holds only after it")
        return segment, index

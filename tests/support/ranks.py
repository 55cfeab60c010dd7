"""Ranks of a soak: what they publish, the memory they work on, and what a round of theirs must give."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnres_aot.errors import CompileError
from attnres_aot.selftest import reference
from attnres_aot.selftest.check import ulp_limit
from attnres_aot.selftest.inputs import BANK_ROWS, Bank
from attnres_aot.selftest.reference import Operands
from attnres_aot.selftest.suite import wait
from attnres_aot.spec.variants import Variant

SETS = 6
"""Different contents of a round."""
EPS = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What a consumer of a rank is bound to."""

    variant: Variant
    """Which consumer."""
    mailbox: Tensor
    """[slots, capacity, H] bf16."""
    operands: Operands
    """Weights, epsilons and statistics."""
    rows: tuple[int, ...]
    """Row counts of its launches."""
    pdl: bool
    """Launch with programmatic stream serialization."""


Launch = Callable[[Tensor, Tensor, Tensor], object]
"""Launches a consumer on the current stream; takes prefix [rows, H], blocks [rows, B, H] and out [rows, H]."""
Bind = Callable[[Bound], Launch]
"""Makes such a launch."""
Publish = Callable[[Tensor, slice, Tensor], object]
"""Publishes values [slots, rows, H], which hold no -0.0, into the slots of a mailbox that the slice names."""


def publish_words(mailbox: Tensor, slots: slice, values: Tensor) -> None:
    """Publishes with a torch copy of whole 32-bit words, so that a fragment may be seen half written."""
    mailbox[slots, : values.shape[1]].view(torch.int32).copy_(values.view(torch.int32))


class Material:
    """What all ranks take from a bank: the contents of rounds, and everything that stays."""

    def __init__(self, bank: Bank, slots: int, capacity: int) -> None:
        """Takes SETS windows of `capacity` rows from a bank, with -0.0 made +0.0 in what is published."""
        self.bank = bank
        starts = [i * (BANK_ROWS - capacity) // (SETS - 1) for i in range(SETS)]
        self.values = torch.stack([bank.slots[:slots, start : start + capacity] for start in starts])
        bits = self.values.view(torch.int16)
        bits.masked_fill_(bits == reference.NEGATIVE_ZERO, 0)
        self.prefixes = torch.stack([bank.prefix[start : start + capacity] for start in starts])
        self.typical = torch.stack([bank.typical[start : start + capacity] for start in starts])
        self.blocks = bank.blocks[:capacity].contiguous()

    def operands(self, variant: Variant, content: int, rows: int) -> Operands:
        """Returns what a round of `variant` reads."""
        bank, mixture, scal = self.bank, None, None
        if variant.stats:
            made = reference.statistics(self.blocks, variant.key.nb, bank.norm, bank.query, EPS)
            mixture, scal = (each.contiguous() for each in made)
        return Operands(
            source=self.values[content],
            prefix=self.prefixes[content, :rows],
            blocks=self.blocks[:rows],
            norm=bank.norm,
            query=bank.query,
            out_norm=bank.out_norm,
            out=torch.empty_like(self.prefixes[content, :rows]),
            mixture=mixture,
            scal=scal,
        )


class Rank:
    """One rank: its stream, mailboxes and working memory, and the count of its wrong rounds."""

    def __init__(self, index: int, variant: Variant, material: Material) -> None:
        """Allocates; `variant` reads a mailbox, adds it to the prefix and writes neither block nor aux copy."""
        assert variant.slots
        assert variant.key.has_delta
        assert variant.key.write is None
        self.index, self.variant, self.material = index, variant, material
        capacity, hidden = material.blocks.shape[0], material.blocks.shape[2]
        self.device = material.blocks.device
        self.stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        shape = (variant.slots, capacity, hidden)
        self.mailboxes = [torch.empty(shape, dtype=torch.bfloat16, device=self.device) for _ in range(2)]
        for mailbox in self.mailboxes:
            reference.arm(mailbox)
        self.work = torch.zeros((2, capacity, hidden), dtype=torch.bfloat16, device=self.device)  # prefix, out
        self.wrong = torch.zeros((), dtype=torch.int64, device=self.device)
        self._launches: dict[tuple[int, bool], Launch] = {}  # by parity and pdl
        self._expected: dict[tuple[int, int], Tensor] = {}  # by content and rows: [2, rows, H / 2] words

    def bind(self, bind: Bind, row_counts: Sequence[int]) -> None:
        """Makes the rank's consumers."""
        operands = self.material.operands(self.variant, 0, max(row_counts))
        for parity, mailbox in enumerate(self.mailboxes):
            for pdl in (False, True):
                self._launches[parity, pdl] = bind(
                    Bound(variant=self.variant, mailbox=mailbox, operands=operands, rows=tuple(row_counts), pdl=pdl)
                )

    def current(self) -> contextlib.AbstractContextManager[object]:
        """Makes the rank's stream the current one."""
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def share(self, owner: Rank) -> slice:
        """Returns the slots that this rank publishes into a mailbox of `owner`."""
        slots = self.variant.slots
        if slots == 1:
            return slice(0, 0 if owner is self else 1)
        return slice(0, slots // 2) if self.index == 0 else slice(slots // 2, slots)

    def put(self, content: int, rows: int) -> None:
        """Puts the prefix of a round in place."""
        self.work[0, :rows].copy_(self.material.prefixes[content, :rows])

    def consume(self, rows: int, parity: int, *, pdl: bool) -> None:
        """Launches the consumer of a mailbox."""
        work = self.work[:, :rows]
        self._launches[parity, pdl](work[0], self.material.blocks[:rows], work[1])

    def count(self, content: int, rows: int) -> None:
        """Counts the round as wrong, on the device, unless every bit is what `expect` found."""
        self.wrong.add_((self.work[:, :rows].view(torch.int32) != self._expected[content, rows]).any())

    def expect(self, content: int, rows: int, publish: Publish) -> None:
        """Launches a round with nothing beside it, checks its typical rows and keeps its bits.

        Raises:
          CompileError: the result is not what the reference says, so nothing can be expected of it.
        """
        publish(self.mailboxes[0], slice(0, self.variant.slots), self.material.values[content, :, :rows])
        self.put(content, rows)
        self.consume(rows, 0, pdl=False)
        wait(self.device, f"{self.variant} for {rows} rows by itself")
        prefix, out = self.work[:, :rows]
        wanted = reference.consume(self.variant, self.material.operands(self.variant, content, rows), (EPS, EPS))
        same = (prefix.view(torch.int16) == wanted.updated.view(torch.int16)) | wanted.updated.isnan()
        near = reference.ulp_distance(out, wanted.out) <= ulp_limit(self.variant)
        near |= (out >= wanted.low) & (out <= wanted.high)
        if not (same.all() and (near | ~self.material.typical[content, :rows, None]).all()):
            raise CompileError(f"{self.variant} is wrong by itself, for {rows} rows; see `attnres-aot selftest BUNDLE`")
        self._expected[content, rows] = self.work[:, :rows].view(torch.int32).clone()

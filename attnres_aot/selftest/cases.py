"""Cases: one launch each, from a variant, a row count, a memory layout, epsilons and a place in an input bank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnres_aot.errors import UsageError
from attnres_aot.selftest import reference
from attnres_aot.selftest.arena import BLOCK_MAJOR, DENSE, PADDED, Arena, Layout, build_arena
from attnres_aot.selftest.inputs import BANK_ROWS, FAMILIES, Bank, draw_bank
from attnres_aot.selftest.reference import Expected
from attnres_aot.spec.variants import Variant

ROW_COUNTS = (1, 2, 3, 7, 16, 63, 64)
"""Row counts that are checked unless others are asked for."""
MAX_ROWS = BANK_ROWS // 2
"""Most rows of one case."""
STARTS = BANK_ROWS - MAX_ROWS
"""Rows of a bank at which a case of any row count may start: 0 to STARTS - 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One launch to check."""

    variant: Variant
    """Which consumer."""
    rows: int
    """Rows of the launch."""
    layout: Layout
    """How operands lie in memory."""
    eps: float
    """Added to the mean square of each source."""
    out_eps: float
    """Added to the mean square of the mixture."""
    steep: bool
    """Which bank the values come from."""
    start: int
    """First row of the bank that is used."""

    def __str__(self) -> str:
        weights = "steep" if self.steep else "mild"
        eps = f"eps {self.eps:g}/{self.out_eps:g}"
        return f"{self.variant} rows {self.rows} {self.layout.name} {eps} {weights} start {self.start}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Banks:
    """Both input banks of one run, and the geometry they are for."""

    mild: Bank
    """Logits of order 1."""
    steep: Bank
    """Logits up to +-1e4."""
    capacity: int
    """Mailbox rows that the bundle was planned for."""

    def of(self, steep: bool) -> Bank:
        """Returns one of them."""
        return self.steep if steep else self.mild

    @property
    def hidden(self) -> int:
        """Row length in elements."""
        return self.mild.norm.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the values are."""
        return self.mild.norm.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A case with its memory filled in and its result known."""

    case: Case
    """The case."""
    arena: Arena
    """Memory that the launch works on; the inputs are in it."""
    before: Arena
    """A copy of the memory before the launch."""
    expected: Expected
    """What the launch must write."""
    bank: Bank
    """Where the values came from."""

    @property
    def rows(self) -> slice:
        """Rows of the bank that the case uses."""
        return slice(self.case.start, self.case.start + self.case.rows)


def draw_banks(hidden: int, capacity: int, seed: int, device: torch.device) -> Banks:
    """Draws both banks from one seed."""
    return Banks(
        mild=draw_bank(hidden, 2 * seed, steep=False, device=device),
        steep=draw_bank(hidden, 2 * seed + 1, steep=True, device=device),
        capacity=max(capacity, MAX_ROWS),
    )


def cases_for(variant: Variant, row_counts: Sequence[int], salt: int = 0) -> Iterator[Case]:
    """Yields three cases per row count: dense, padded and block-major memory, with other epsilons and inputs each.

    Args:
      variant: which consumer.
      row_counts: row counts, each from 1 to MAX_ROWS.
      salt: moves the rows of the banks that are used, so that variants do not all see the same ones.
    """
    for i, rows in enumerate(row_counts):
        odd = (i + salt) % 2 == 1
        # A dense case starts at a well-behaved row; the others move through the families.
        dense_start = len(FAMILIES) * ((salt + i) % 3)
        moved = (5 * salt + 7 * i) % STARTS
        for layout, eps, out_eps, steep, start in (
            (DENSE, 1e-5, 1e-5, False, dense_start),
            (PADDED, 1e-6, 1e-6 if odd else 1e-5, False, moved),
            (BLOCK_MAJOR, 1e-6 if odd else 1e-5, 1e-6, True, (moved + 11) % STARTS),
        ):
            yield Case(variant=variant, rows=rows, layout=layout, eps=eps, out_eps=out_eps, steep=steep, start=start)


def prepare(case: Case, banks: Banks) -> Prepared:
    """Allocates the memory of a case, fills in its inputs and computes what the launch must write.

    Raises:
      UsageError: the case reaches beyond its bank.
    """
    if case.rows < 1 or case.start < 0 or case.start + case.rows > BANK_ROWS:
        raise UsageError(
            f"{case}: rows {case.start} to {case.start + case.rows - 1} of the inputs are asked for; there are rows 0 "
            f"to {BANK_ROWS - 1}, so start below {STARTS}"
        )
    bank = banks.of(case.steep)
    size = {"rows": case.rows, "hidden": banks.hidden, "capacity": banks.capacity}
    arena = build_arena(case.variant, **size, layout=case.layout, device=banks.device)
    _fill(case, bank, arena)
    expected = reference.consume(case.variant, arena.views, (case.eps, case.out_eps))
    return Prepared(case=case, arena=arena, before=arena.clone(), expected=expected, bank=bank)


def refill(prepared: Prepared) -> None:
    """Puts the memory of a case back to what it was before the launch."""
    prepared.arena.words.copy_(prepared.before.words)


def _fill(case: Case, bank: Bank, arena: Arena) -> None:
    views, variant = arena.views, case.variant
    rows = slice(case.start, case.start + case.rows)
    for view, values in ((views.norm, bank.norm), (views.query, bank.query), (views.out_norm, bank.out_norm)):
        view.copy_(values)
    for slot in range(variant.slots):
        reference.publish(views.source, slot, bank.slots[slot, rows])
    if not variant.slots:
        views.source.copy_(bank.slots[0, rows])
    if variant.key.has_delta:
        views.prefix.copy_(bank.prefix[rows])
    saved = bank.blocks[rows, : variant.key.nb]
    if variant.stats:
        _fill_statistics(case, bank, saved, arena)  # the saved blocks stay poisoned: nothing may read them
    else:
        views.blocks[:, : variant.key.nb].copy_(saved)


def _fill_statistics(case: Case, bank: Bank, saved: Tensor, arena: Arena) -> None:
    mixture, scal = reference.statistics(saved, case.variant.key.nb, bank.norm, bank.query, case.eps)
    assert arena.views.mixture is not None
    assert arena.views.scal is not None
    arena.views.mixture[: case.rows].copy_(mixture)
    arena.views.scal[: case.rows].copy_(scal)

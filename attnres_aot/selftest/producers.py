"""Checks of producers: published rows bit for bit, statistics against fp64, in guarded memory like a consumer's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnres_aot.selftest import arena as shapes
from attnres_aot.selftest import reference
from attnres_aot.selftest.arena import BLOCK_MAJOR, DENSE, PADDED, SPARE_BLOCKS, Arena, Layout, place
from attnres_aot.selftest.cases import STARTS, Banks
from attnres_aot.selftest.check import Verdict, describe_memory
from attnres_aot.selftest.inputs import Bank
from attnres_aot.spec.variants import MAX_SLOTS, Producer

MAX_STATISTICS_ERROR = 1e-5
"""Largest relative error of mixture and l over typical rows, with mild logits."""
SLOTS = 3
"""Slots of a mailbox that is published into."""
BF16_VALUES = 1 << 16
"""Bit patterns of bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerCase:
    """One launch of a producer to check."""

    producer: Producer
    """Which producer."""
    rows: int
    """Rows of the launch."""
    layout: Layout
    """How operands lie in memory."""
    eps: float
    """Added to the mean square of each block; statistics only."""
    steep: bool
    """Which bank the values come from."""
    start: int
    """First row of the bank that is used."""
    slot: int
    """Mailbox slot that is published into."""
    every_value: bool
    """Publishes every bit pattern of bf16 in turn instead of rows of the bank."""

    def __str__(self) -> str:
        what = f"eps {self.eps:g} {'steep' if self.steep else 'mild'}"
        if self.producer.nb is None:
            what = f"slot {self.slot} {'every value' if self.every_value else 'rows of the bank'}"
        return f"{self.producer} rows {self.rows} {self.layout.name} {what} start {self.start}"


def producer_cases(producer: Producer, row_counts: Sequence[int], salt: int = 0) -> Iterator[ProducerCase]:
    """Yields three cases per row count: dense, padded and block-major memory, with other values each."""
    for i, rows in enumerate(row_counts):
        moved = (5 * salt + 7 * i) % STARTS
        for j, layout in enumerate((DENSE, PADDED, BLOCK_MAJOR)):
            yield ProducerCase(
                producer=producer,
                rows=rows,
                layout=layout,
                eps=(1e-5, 1e-6)[(i + j) % 2],
                steep=j == 2,
                start=(moved + 11 * j) % STARTS,
                slot=(i + j) % SLOTS,
                every_value=j == 1,
            )


def prepare_producer(case: ProducerCase, banks: Banks) -> Arena:
    """Allocates the memory of a case and fills in its inputs.

    A statistics kernel finds blocks, norm, query, mixture and scal in it, the publisher source and mailbox.
    """
    bank = banks.of(case.steep)
    hidden, rows, nb = banks.hidden, case.rows, case.producer.nb
    capacity = case.layout.capacity(rows, banks.capacity)
    if nb is None:
        operands = [
            shapes.matrix("source", rows, hidden, case.layout, 1),
            shapes.mailbox("mailbox", SLOTS, capacity, hidden),
        ]
        values = {"source": _values_to_publish(case, bank)}
    else:
        operands = [
            shapes.saved_blocks(rows, nb + SPARE_BLOCKS, hidden, case.layout),
            *(shapes.vector(name, hidden) for name in ("norm", "query")),
            *shapes.statistics(capacity, hidden),
        ]
        values = {"norm": bank.norm, "query": bank.query}
    arena = place(operands, case.layout, banks.device)
    for name, tensor in values.items():
        arena.tensor(name).copy_(tensor)
    if nb is None:
        reference.arm(arena.tensor("mailbox")[case.slot, :rows])
    else:
        arena.tensor("blocks")[:, :nb].copy_(bank.blocks[case.start : case.start + rows, :nb])
    return arena


def judge_producer(case: ProducerCase, banks: Banks, arena: Arena, before: Arena) -> Verdict:
    """Compares the memory of a case after its launch with what it must hold, given what it held before."""
    wanted = before.clone()
    if case.producer.nb is None:
        reference.publish(wanted.tensor("mailbox"), case.slot, before.tensor("source"))
        verdict = Verdict(problems=(), elements=arena.tensor("source").numel())
    else:
        for name in ("mixture", "scal"):
            wanted.tensor(name)[: case.rows].copy_(arena.tensor(name)[: case.rows])
        verdict = _judge_statistics(case, banks.of(case.steep), arena, before)
    if bool((arena.words != wanted.words).any()):
        verdict = replace(verdict, problems=(*describe_memory(arena, before, wanted), *verdict.problems))
    return verdict


def _values_to_publish(case: ProducerCase, bank: Bank) -> Tensor:
    """Returns [rows, H] bf16: rows of the bank, or every value, further on in each case."""
    rows = slice(case.start, case.start + case.rows)
    if not case.every_value:
        return bank.slots[(case.start + case.slot) % MAX_SLOTS, rows]
    hidden, device = bank.norm.shape[0], bank.norm.device
    index = torch.arange(case.rows * hidden, device=device, dtype=torch.int32) + case.start * hidden
    values = index * (2 * case.start + 1) % BF16_VALUES  # an odd step reaches every value; pairs differ by case
    return values.to(torch.int16).view(torch.bfloat16).view(case.rows, hidden)


def _judge_statistics(case: ProducerCase, bank: Bank, arena: Arena, before: Arena) -> Verdict:
    rows = case.rows
    exact = reference.exact_statistics(before.tensor("blocks"), case.producer.nb or 0, bank.norm, bank.query, case.eps)
    mixture = arena.tensor("mixture")[:rows].double()
    maximum, total = arena.tensor("scal")[:rows].double().unbind(-1)
    typical = bank.typical[case.start : case.start + rows]
    judged = exact.defined | total.isfinite()  # a total that is not finite makes all of a consumer's output so
    scale = (maximum - exact.maximum).exp()
    m_off = (maximum - exact.maximum).abs() > exact.maximum_error
    l_off = _off(total, scale, exact.total, exact.total_error)
    mixture_off = _off(mixture, scale[:, None], exact.mixture, exact.mixture_error)
    problems = []
    for name, off, found, wants in (
        ("m", m_off & exact.maximum.isfinite(), maximum, exact.maximum),
        ("l", l_off, total, exact.total),
        ("mixture", mixture_off, mixture, exact.mixture),
    ):
        wrong = off & (judged if off.dim() == 1 else judged[:, None])
        if bool(wrong.any()):
            problems.append(_describe(name, wrong, found, wants))
    errors = [
        _relative(found, wants, typical)
        for found, wants in ((mixture * scale[:, None], exact.mixture), (total * scale, exact.total))
    ]
    error = 0.0 if case.steep else max(errors)  # logits of 1e4 are known to 1e-3 only, and so are exponentials
    if error > MAX_STATISTICS_ERROR:
        problems.append(f"relative error {error:.3e} over {MAX_STATISTICS_ERROR:.1e}")
    return Verdict(problems=tuple(problems), elements=mixture.numel() + 2 * rows, relative_error=error)


def _off(found: Tensor, scale: Tensor, exact: Tensor, error: Tensor) -> Tensor:
    """Tells where `found`, scaled, is further from `exact` than fp32 may be, or not finite in another way."""
    far = ~((found * scale - exact).abs() <= error)
    same = (found.isnan() & exact.isnan()) | (found == exact)
    return torch.where(exact.isfinite(), far, ~same)


def _relative(found: Tensor, exact: Tensor, typical: Tensor) -> float:
    """Returns ||found - exact|| / ||exact|| over the typical rows; 0 when there is none."""
    if not bool(typical.any()):
        return 0.0
    return float((found[typical] - exact[typical]).norm() / exact[typical].norm())


def _describe(name: str, wrong: Tensor, found: Tensor, exact: Tensor) -> str:
    first = tuple(int(i) for i in wrong.nonzero()[0])
    return (
        f"{int(wrong.sum())} of {name} further off than fp32 may be, first at {name}{list(first)}: found "
        f"{float(found[first])!r}, expected {float(exact[first])!r}"
    )

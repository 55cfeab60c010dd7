"""Checks of producers: published rows bit for bit, statistics against fp64, in guarded memory like a consumer's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from attnres_aot.bundle.manifest import Manifest
from attnres_aot.selftest import reference
from attnres_aot.selftest.arena import BLOCK_MAJOR, DENSE, PADDED, SPARE_BLOCKS, Layout, Memory, matrix, place
from attnres_aot.selftest.arena import saved_blocks as blocks_of
from attnres_aot.selftest.cases import MAX_ROWS, Banks
from attnres_aot.selftest.check import describe_memory
from attnres_aot.selftest.inputs import BANK_ROWS, Bank
from attnres_aot.selftest.suite import DeviceLostError, check_cases, wait
from attnres_aot.spec.variants import MAX_SLOTS, Producer, parse_producer

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerResult:
    """What was found out about one producer."""

    producer: Producer
    """Which producer."""
    cases: int
    """Launches checked."""
    elements: int
    """Elements compared."""
    relative_error: float
    """Largest relative error of mixture or l over the typical rows of a case of mild logits; 0 for published rows."""
    problems: tuple[str, ...]
    """What is wrong, each with its case; empty when everything is right."""


class Launcher(Protocol):
    """Whatever launches the cases: the loader on a GPU, or a simulation."""

    def produce(self, case: ProducerCase, memory: Memory) -> None:
        """Launches `case` on the current stream.

        `memory` holds blocks, norm, query, mixture and scal for statistics; source and mailbox for publishing.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    problems: list[str]
    elements: int
    relative_error: float = 0.0


def bundle_producers(manifest: Manifest) -> list[Producer]:
    """Lists every producer of a bundle, in the manifest's order."""
    return [parse_producer(record.name) for record in manifest.producers]


def producer_cases(producer: Producer, row_counts: Sequence[int], salt: int = 0) -> Iterator[ProducerCase]:
    """Yields three cases per row count: dense, padded and block-major memory, with other values each."""
    for i, rows in enumerate(row_counts):
        moved = (5 * salt + 7 * i) % (BANK_ROWS - MAX_ROWS)
        for j, layout in enumerate((DENSE, PADDED, BLOCK_MAJOR)):
            yield ProducerCase(
                producer=producer,
                rows=rows,
                layout=layout,
                eps=(1e-5, 1e-6)[(i + j) % 2],
                steep=j == 2,
                start=(moved + 11 * j) % (BANK_ROWS - MAX_ROWS),
                slot=(i + j) % SLOTS,
                every_value=j == 1,
            )


def check_producer(
    producer: Producer, launcher: Launcher, banks: Banks, row_counts: Sequence[int], salt: int = 0
) -> ProducerResult:
    """Checks one producer on all its cases.

    Raises:
      DeviceLostError: a launch hung or broke the device.
    """
    cases = producer_cases(producer, row_counts, salt)
    verdicts, problems = check_cases(cases, lambda case: _check(case, launcher, banks))
    return ProducerResult(
        producer=producer,
        cases=len(verdicts),
        elements=sum(verdict.elements for verdict in verdicts),
        relative_error=max((verdict.relative_error for verdict in verdicts), default=0.0),
        problems=problems,
    )


def check_producers(
    producers: Sequence[Producer], launcher: Launcher, banks: Banks, row_counts: Sequence[int]
) -> Iterator[ProducerResult]:
    """Checks producers one after another; a lost device ends the run with a result that says so."""
    for salt, producer in enumerate(producers):
        try:
            result = check_producer(producer, launcher, banks, row_counts, salt)
        except DeviceLostError as error:
            problem = f"{error}; nothing after it can be checked in this process"
            yield ProducerResult(producer=producer, cases=0, elements=0, relative_error=0.0, problems=(problem,))
            return
        yield result


def _check(case: ProducerCase, launcher: Launcher, banks: Banks) -> _Verdict:
    bank = banks.steep if case.steep else banks.mild
    prepare, judge = (_prepare_publish, _judge_publish) if case.producer.nb is None else (_prepare, _judge)
    memory = prepare(case, bank, banks.capacity)
    before = memory.duplicate()
    launcher.produce(case, memory)
    wait(banks.device, str(case))
    return judge(case, bank, memory, before)


def _prepare_publish(case: ProducerCase, bank: Bank, capacity: int) -> Memory:
    hidden, rows = bank.norm.shape[0], case.rows
    capacity = capacity if case.layout.spare_capacity is None else rows + case.layout.spare_capacity
    strides = (capacity * hidden, hidden, 1)
    shapes = [
        matrix("source", rows, hidden, case.layout, 1),
        ("mailbox", (SLOTS, capacity, hidden), strides, torch.bfloat16),
    ]
    memory = place(shapes, case.layout, bank.norm.device)
    memory.tensor("source").copy_(_values_to_publish(case, bank))
    reference.arm(memory.tensor("mailbox")[case.slot, :rows])
    return memory


def _values_to_publish(case: ProducerCase, bank: Bank) -> Tensor:
    """Returns [rows, H] bf16: rows of the bank, or every value, further on in each case."""
    rows = slice(case.start, case.start + case.rows)
    if not case.every_value:
        return bank.slots[(case.start + case.slot) % MAX_SLOTS, rows]
    hidden, device = bank.norm.shape[0], bank.norm.device
    index = torch.arange(case.rows * hidden, device=device, dtype=torch.int32) + case.start * hidden
    values = index * (2 * case.start + 1) % BF16_VALUES  # an odd step reaches every value; pairs differ by case
    return values.to(torch.int16).view(torch.bfloat16).view(case.rows, hidden)


def _judge_publish(case: ProducerCase, bank: Bank, memory: Memory, before: Memory) -> _Verdict:
    del bank
    wanted = before.duplicate()
    reference.publish(wanted.tensor("mailbox"), case.slot, before.tensor("source"))
    problems = describe_memory(memory, before, wanted) if bool((memory.words != wanted.words).any()) else []
    return _Verdict(problems=problems, elements=memory.tensor("source").numel())


def _prepare(case: ProducerCase, bank: Bank, capacity: int) -> Memory:
    hidden, rows = bank.norm.shape[0], case.rows
    nb = case.producer.nb or 0
    capacity = capacity if case.layout.spare_capacity is None else rows + case.layout.spare_capacity
    shapes = [
        blocks_of(rows, nb + SPARE_BLOCKS, hidden, case.layout),
        ("norm", (hidden,), (1,), torch.bfloat16),
        ("query", (hidden,), (1,), torch.bfloat16),
        ("mixture", (capacity, hidden), (hidden, 1), torch.float32),
        ("scal", (capacity, 2), (2, 1), torch.float32),
    ]
    memory = place(shapes, case.layout, bank.norm.device)
    memory.tensor("norm").copy_(bank.norm)
    memory.tensor("query").copy_(bank.query)
    memory.tensor("blocks")[:, :nb].copy_(bank.blocks[case.start : case.start + rows, :nb])
    return memory


def _judge(case: ProducerCase, bank: Bank, memory: Memory, before: Memory) -> _Verdict:
    rows, nb = case.rows, case.producer.nb or 0
    exact = reference.exact_statistics(before.tensor("blocks"), nb, bank.norm, bank.query, case.eps)
    mixture = memory.tensor("mixture")[:rows].double()
    maximum, total = memory.tensor("scal")[:rows].double().unbind(-1)
    wanted = before.duplicate()
    for name in ("mixture", "scal"):
        wanted.tensor(name)[:rows].copy_(memory.tensor(name)[:rows])
    problems = describe_memory(memory, before, wanted) if bool((memory.words != wanted.words).any()) else []
    typical = bank.typical[case.start : case.start + rows]
    judged = exact.defined | total.isfinite()  # a total that is not finite makes all of a consumer's output so
    scale = (maximum - exact.maximum).exp()
    m_off = (maximum - exact.maximum).abs() > exact.maximum_error
    l_off = _off(total, scale, exact.total, exact.total_error)
    mixture_off = _off(mixture, scale[:, None], exact.mixture, exact.mixture_error)
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
    return _Verdict(problems=problems, elements=mixture.numel() + 2 * rows, relative_error=error)


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

"""The rig: memory, bound consumers and timed graphs for one bundle on one device.

A set is the memory of one launch. With a warm L2 all launches of a graph work on one set; with a cold one on so many
sets in turn, weights included, that each was evicted before its next turn.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from attnres_aot.bench.clock import Call
from attnres_aot.bench.traffic import Traffic, consumer_traffic, copy_traffic, statistics_traffic
from attnres_aot.runtime.find.loaded import LoadedBundle
from attnres_aot.runtime.launch.pdl import Pdl
from attnres_aot.runtime.operands.mailbox import new_mailbox
from attnres_aot.runtime.prepared import PreparedAttnRes
from attnres_aot.runtime.publish import PreparedPublish
from attnres_aot.runtime.statistics import PreparedStatistics
from attnres_aot.spec.variants import Variant

EPS = 1e-6
COLD_FACTOR = 2.0
"""Bytes of all sets together, as a multiple of the L2, for a cold measurement."""
MAX_SETS = 2048
"""Most sets of one measurement."""
COPY_TIMINGS = 3
"""Graphs that are timed for one time of a copy into a mailbox."""
SPIN_BUDGET = 1 << 24
"""Polls after which a ring consumer gives up instead of hanging the run."""

Timer = Callable[[Sequence[Call]], float]
"""Returns the GPU time of one of the calls given, in microseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one launch of a graph does."""

    variant: Variant
    """Which consumer; with slots, its mailbox is filled first."""
    rows: int
    """Rows."""
    pdl: Pdl
    """Launch mode of the consumer; the kernels before it have it too, as far as they know it."""
    cold: bool = False
    """With a cold L2."""
    statistics_before: bool = False
    """Launch the statistics kernel before the consumer, whether that takes its results or not."""
    publish: bool = False
    """Fill the mailbox, of one slot, with the bundle's publisher instead of torch's copy."""
    consumer: bool = True
    """Launch the consumer; without it only what precedes it is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sets:
    """Memory of several launches; the first dimension counts sets."""

    source: torch.Tensor
    """[sets, max(1, slots), rows, H] bf16: the delta, or what is copied into the mailbox."""
    prefix: torch.Tensor
    """[sets, rows, H] bf16."""
    blocks: torch.Tensor
    """[sets, rows, B, H] bf16."""
    weights: torch.Tensor
    """[sets, 3, H] bf16: norm, query, out_norm."""
    out: torch.Tensor
    """[sets, rows, H] bf16."""
    aux: torch.Tensor | None
    """[sets, rows, H] bf16."""
    mixture: torch.Tensor
    """[sets, rows, H] fp32."""
    scal: torch.Tensor
    """[sets, rows, 2] fp32."""
    mailbox: torch.Tensor | None
    """[sets, slots, capacity, H] bf16, armed."""

    @property
    def count(self) -> int:
        """Sets."""
        return self.out.shape[0]


class Rig:
    """Measures one bundle on its device."""

    def __init__(self, loaded: LoadedBundle, timer: Timer, l2_bytes: int) -> None:
        """Takes a bundle, what measures time, and the size of the device's L2."""
        manifest = loaded.bundle.manifest
        self.loaded, self.timer, self.l2_bytes = loaded, timer, l2_bytes
        self.hidden, self.capacity = manifest.model.hidden, max(1, manifest.mailbox.capacity)
        self._blocks = max(1, -(-manifest.model.layers // manifest.model.block_size))

    def time_us(self, job: Job) -> float:
        """Returns the GPU time of a job, in microseconds."""
        sets = self.make_sets(job)
        return self.timer([self.call(job, sets, index) for index in range(sets.count)])

    def copy_us(self, job: Job) -> float:
        """Returns the GPU time of the copy into a job's mailbox alone, in microseconds: the median of COPY_TIMINGS.

        It is taken off other times, where a single odd one would make many look too short or too long.
        """
        alone = Job(variant=job.variant, rows=job.rows, pdl=False, cold=job.cold, consumer=False)
        return statistics.median(self.time_us(alone) for _ in range(COPY_TIMINGS))

    def set_count(self, job: Job) -> int:
        """Returns how many sets a job works on in turn."""
        if not job.cold:
            return 1
        touched = traffic(job, self.hidden).touched
        return min(MAX_SETS, max(2, -(-int(COLD_FACTOR * self.l2_bytes) // touched)))

    def make_sets(self, job: Job) -> Sets:
        """Allocates and fills the memory of a job, the same values each time."""
        variant, rows, count, hidden = job.variant, job.rows, self.set_count(job), self.hidden
        device = self.loaded.device.device
        generator = torch.Generator(device).manual_seed(1)
        capacity = rows if job.cold else max(rows, self.capacity)

        def normal(*shape: int) -> torch.Tensor:
            values = torch.empty((count, *shape), dtype=torch.bfloat16, device=device)
            return values.normal_(generator=generator).add_(0.0)  # adding makes -0.0, which no mailbox takes, +0.0

        def single(*shape: int) -> torch.Tensor:
            return torch.empty((count, *shape), dtype=torch.float32, device=device)

        written = -1 if variant.key.write is None else variant.key.write
        weights = normal(3, hidden)
        weights[:, 1] /= hidden**0.5  # logits of order 1
        mailbox = None
        if variant.slots:
            whole = new_mailbox(count * variant.slots, capacity, hidden, device)
            mailbox = whole.view(count, variant.slots, capacity, hidden)
        return Sets(
            source=normal(max(1, variant.slots), rows, hidden),
            prefix=normal(rows, hidden),
            blocks=normal(rows, max(self._blocks, variant.key.nb, written + 1), hidden),
            weights=weights,
            out=normal(rows, hidden),
            aux=normal(rows, hidden) if variant.aux else None,
            mixture=single(rows, hidden).normal_(generator=generator),
            scal=single(rows, 2).fill_(1.0),
            mailbox=mailbox,
        )

    def bind(self, job: Job, sets: Sets, index: int, *, checks: bool = True) -> partial[torch.Tensor]:
        """Binds the consumer of a job to one set and returns what launches it."""
        variant, weights = job.variant, tuple(sets.weights[index])
        prepared = PreparedAttnRes(weights, variant.key, EPS, self.loaded, pdl=job.pdl, checks=checks)
        operands = [sets.prefix[index], sets.blocks[index], sets.out[index]]
        if sets.aux is not None:
            prepared.bind_aux()
            operands.append(sets.aux[index])
        if variant.stats:
            prepared.bind_statistics(sets.mixture[index], sets.scal[index], [job.rows])
        if sets.mailbox is None:
            return partial(prepared.run, sets.source[index, 0], *operands)
        prepared.bind_ring(sets.mailbox[index], spin_budget=SPIN_BUDGET)
        return partial(prepared.run_ring, *operands)

    def call(self, job: Job, sets: Sets, index: int) -> Call:
        """Returns what does a job once, on one set."""
        steps: list[Call] = []
        if sets.mailbox is not None:
            steps.append(self._fill(job, sets.mailbox[index], sets.source[index]))
        if job.statistics_before:
            steps.append(self._statistics(job, sets, index))
        if job.consumer:
            steps.append(self.bind(job, sets, index))
        return steps[0] if len(steps) == 1 else partial(_in_turn, tuple(steps))

    def _statistics(self, job: Job, sets: Sets, index: int) -> Call:
        norm, query, _ = sets.weights[index]
        results, nb, pdl = (sets.mixture[index], sets.scal[index]), job.variant.key.nb, bool(job.pdl)
        kernel = PreparedStatistics(norm, query, EPS, *results, nb=nb, bundle=self.loaded, pdl=pdl, checks=False)
        return partial(kernel.run, sets.blocks[index])

    def _fill(self, job: Job, mailbox: torch.Tensor, source: torch.Tensor) -> Call:
        if job.publish:
            return partial(PreparedPublish(mailbox, 0, self.loaded, pdl=bool(job.pdl)).run, source[0])
        return partial(mailbox[:, : job.rows].copy_, source)


def traffic(job: Job, hidden: int) -> Traffic:
    """Returns what one launch of a job moves."""
    variant, rows = job.variant, job.rows
    parts = [consumer_traffic(variant, rows, hidden)] if job.consumer else []
    parts += [copy_traffic(variant.slots, rows, hidden)] if variant.slots else []
    parts += [statistics_traffic(variant.key.nb, rows, hidden)] if job.statistics_before else []
    total = Traffic(read=0, written=0, touched=0)
    for part in parts:
        total = total.plus(part)
    return total


def _in_turn(steps: tuple[Call, ...]) -> None:
    for step in steps:
        step()

"""Producers in fp32 torch operations and integers: what correct kernels write, with switches for defects."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnres_aot.selftest.arena import Arena
from attnres_aot.selftest.producers import ProducerCase


@dataclass(kw_only=True)
class SimulatedProducer:
    """The contract; the fields switch defects on."""

    clean: Callable[[torch.Tensor], torch.Tensor] = lambda bits: torch.where(bits == -0x8000, 0, bits)
    slot_shift: int = 0
    eps_factor: float = 1.0
    shift_softmax: bool = True
    normalise: bool = False
    report_overflow: bool = True
    skip_block: int | None = None
    half_precision_weight: bool = False
    swap_scalars: bool = False
    after: Callable[[ProducerCase, Arena], None] = lambda case, memory: None

    def produce(self, case: ProducerCase, memory: Arena) -> None:
        if case.producer.nb is None:
            bits = memory.tensor("source").contiguous().view(torch.int16)
            slot = memory.tensor("mailbox")[(case.slot + self.slot_shift) % 3, : case.rows]
            slot.view(torch.int16).copy_(self.clean(bits))
        else:
            self._statistics(case, memory)
        self.after(case, memory)

    def _statistics(self, case: ProducerCase, memory: Arena) -> None:
        blocks = [s for s in range(case.producer.nb) if s != self.skip_block]
        values = memory.tensor("blocks")[:, blocks].float()
        weight = memory.tensor("norm").float() * memory.tensor("query").float()
        if self.half_precision_weight:
            weight = weight.bfloat16().float()
        squares = values.square().mean(-1)
        logits = (values * weight).sum(-1) * (squares + case.eps * self.eps_factor).rsqrt()
        if self.report_overflow:  # an infinite sum would give a logit of 0
            logits = logits + 0 * squares
        maximum = logits.amax(-1) if self.shift_softmax else torch.zeros_like(logits[:, 0])
        weights = (logits - maximum[:, None]).exp()
        total = weights.sum(-1)
        mixture = (weights[..., None] * values).sum(1)
        if self.normalise:
            mixture = mixture / total[:, None]
        memory.tensor("mixture")[: case.rows] = mixture
        pair = [total, maximum] if self.swap_scalars else [maximum, total]
        memory.tensor("scal")[: case.rows] = torch.stack(pair, -1)

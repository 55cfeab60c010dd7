"""The contract in fp32 torch operations: what a correct kernel computes, with switches for defects."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnres_aot.selftest import reference
from attnres_aot.selftest.cases import Case
from attnres_aot.selftest.reference import Operands
from attnres_aot.spec.variants import Variant


@dataclass(kw_only=True)
class SimulatedConsumer:
    """The contract in fp32 torch operations; the fields switch defects on."""

    slot_order: Callable[[range], list[int]] = list
    round_slot_sum: bool = True
    cut_prefix: bool = False
    eps_factor: float = 1.0
    out_eps_factor: float = 1.0
    shift_softmax: bool = True
    skip_block: int | None = None
    flush_subnormals: bool = False
    round_mix: bool | None = None
    norm_by_fold: bool = False
    cut_out: bool = False
    report_overflow: bool = True
    after: Callable[[Case, Operands], None] = lambda case, views: None

    def launch(self, case: Case, views: Operands) -> None:
        variant, rows = case.variant, case.rows
        updated = self._updated(variant, views, rows)
        views.prefix.copy_(updated)
        if views.aux is not None:
            views.aux.copy_(updated)
        if variant.key.write is not None:
            views.blocks[:, variant.key.write].copy_(updated)
        if variant.slots:
            for slot in views.source:
                reference.arm(slot[:rows])
        mix = self._mix(case, views, updated.float())
        if self.flush_subnormals:
            mix = torch.where(mix.abs() < 2.0**-126, 0.0 * mix, mix)
        if variant.key.final if self.round_mix is None else self.round_mix:
            mix = mix.bfloat16().float()
        mean = mix.double().square().mean(-1, keepdim=True)
        if self.norm_by_fold and variant.stats:
            mean = self._mean
        scale = (mean + case.out_eps * self.out_eps_factor).rsqrt().float()
        out = mix * scale * views.out_norm.float()
        if self.cut_out:
            out = (out.view(torch.int32) & -0x10000).view(torch.float32)
        views.out.copy_(out)
        self.after(case, views)

    def _updated(self, variant: Variant, views: Operands, rows: int) -> torch.Tensor:
        delta = views.source
        if variant.slots:
            order = self.slot_order(range(variant.slots))
            total = delta[order[0], :rows].float()
            for slot in order[1:]:
                total = total + delta[slot, :rows].float()
            delta = total if not self.round_slot_sum else total.bfloat16()
        if not variant.key.has_delta:
            return delta.bfloat16()
        total = views.prefix.float() + delta.float()
        if self.cut_prefix:
            return (total.view(torch.int32) & -0x10000).view(torch.float32).bfloat16()
        return total.bfloat16()

    def _mix(self, case: Case, views: Operands, point: torch.Tensor) -> torch.Tensor:
        nb = case.variant.key.nb
        if nb == 0:
            return point
        weight = views.norm.float() * views.query.float()
        eps = case.eps * self.eps_factor

        def logits(v: torch.Tensor) -> torch.Tensor:
            squares = v.square().mean(-1)
            poison = 0 * squares if self.report_overflow else torch.zeros(())  # an infinite sum would give a logit of 0
            return (v * weight).sum(-1) * (squares + eps).rsqrt() + poison

        if case.variant.stats:
            maximum, total = views.scal[: case.rows].unbind(-1)
            mixture = views.mixture[: case.rows]
            logit = logits(point)
            top = torch.maximum(maximum, logit)
            a, b = (maximum - top).exp(), (logit - top).exp()
            whole = a * total + b
            a, b = (a / whole)[:, None], (b / whole)[:, None]
            sums = [(x * y).mean(-1, keepdim=True) for x, y in ((mixture, mixture), (mixture, point), (point, point))]
            terms = a * a * sums[0], 2 * a * b * sums[1], b * b * sums[2]
            self._mean = terms[0] + terms[1] + terms[2] + 2.0**-20 * (terms[0] + terms[2])  # 16 roundings of fp32
            return a * mixture + b * point
        blocks = [s for s in range(nb) if s != self.skip_block]
        values = torch.cat([views.blocks[:, blocks].float(), point[:, None]], 1)
        scores = logits(values)
        weights = (scores - (scores.amax(-1, keepdim=True) if self.shift_softmax else 0)).exp()
        return (weights[..., None] * values).sum(1) / weights.sum(-1, keepdim=True)

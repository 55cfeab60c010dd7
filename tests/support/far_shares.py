"""Inputs whose smallest share counts: a huge source far behind tiny ones in the softmax, so that both make the output.

A source of magnitude LARGE whose logit is `gap` below the others has a share of about e^-gap. Where the others are of
magnitude e^-gap * LARGE, it is half of the mixture: a share that is lost, or squared before it meets the large source,
shows in every element. The contract holds shares down to fp32's smallest normal number, a gap of 87.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnres_aot.selftest.arena import DENSE
from attnres_aot.selftest.cases import Banks, Case
from attnres_aot.selftest.inputs import BANK_ROWS, Bank, Family
from attnres_aot.spec.variants import MAX_BLOCKS, MAX_SLOTS, Variant

GAPS = (20, 40, 44, 50, 60, 65, 80, 86)
"""How far the large source's logit is below the others', by row."""
LARGE = 5e16
"""Magnitude of the large source: the square of its row sum fits fp32."""
_STEEPEST = 100.0
"""Size of the logit of a row along the query."""


def far_banks(hidden: int, capacity: int, device: torch.device, gaps: Sequence[int] = GAPS) -> Banks:
    """Returns banks, both alike, whose rows repeat `gaps` twice: the prefix is the large source, then the first block.

    Args:
      hidden: row length in elements.
      capacity: mailbox rows that the bundle was planned for.
      device: where.
      gaps: how far the large source's logit is below the others'.
    """
    generator = torch.Generator(device=device).manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    along = normal(hidden)
    along /= along.norm()
    slots = torch.zeros(MAX_SLOTS, BANK_ROWS, hidden, device=device)
    blocks = normal(BANK_ROWS, MAX_BLOCKS, hidden)
    for row in range(BANK_ROWS):
        gap, in_block = gaps[row % len(gaps)], row // len(gaps) % 2
        cosine = gap / _STEEPEST
        across = normal(hidden)
        across -= (across @ along) * along
        large = (1 - cosine**2) ** 0.5 * across - cosine * along * hidden**0.5
        small = float(torch.tensor(-gap, dtype=torch.float64).exp())
        blocks[row] *= small
        slots[0, row] = normal(hidden) * small if in_block else large
        if in_block:
            blocks[row, 0] = large
    ones = torch.ones(hidden, dtype=torch.bfloat16, device=device)
    bank = Bank(
        norm=ones,
        query=(along * (_STEEPEST / hidden**0.5)).to(torch.bfloat16),
        out_norm=ones,
        prefix=torch.zeros(BANK_ROWS, hidden, dtype=torch.bfloat16, device=device),
        slots=(LARGE * slots).to(torch.bfloat16),
        blocks=(LARGE * blocks).to(torch.bfloat16),
        families=(Family(name="far-share", make=lambda draw: draw.row(), typical=True),) * BANK_ROWS,
        typical=torch.ones(BANK_ROWS, dtype=torch.bool, device=device),
    )
    return Banks(mild=bank, steep=bank, capacity=max(capacity, BANK_ROWS))


def far_case(variant: Variant) -> Case:
    """Returns the launch of a variant that sees every gap both ways."""
    return Case(variant=variant, rows=2 * len(GAPS), layout=DENSE, eps=1e-5, out_eps=1e-30, steep=False, start=0)

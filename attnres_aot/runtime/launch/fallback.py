"""What a caller's fallback is given when the bundle lacks a variant. Nothing falls back unless a caller says how."""

from __future__ import annotations

from collections.abc import Callable

import torch

from attnres_aot.records import record
from attnres_aot.runtime.operands.weights import AttnResWeights
from attnres_aot.spec.variants import Variant


@record(frozen=True, slots=True, kw_only=True, eq=False)
class Missed:
    """A launch that the bundle holds no code for, handed to a fallback, which does all of its work in place."""

    variant: Variant
    """What was needed."""
    weights: AttnResWeights
    """Weights of the consumer."""
    eps: tuple[float, float]
    """Epsilons under the logits and of the output norm."""
    source: torch.Tensor
    """The delta [rows, H], or the mailbox [slots, capacity, H], which must be re-armed."""
    prefix: torch.Tensor
    """[rows, H] bf16, updated."""
    blocks: torch.Tensor
    """[rows, B, H] bf16."""
    out: torch.Tensor
    """[rows, H] bf16, written."""
    aux: torch.Tensor | None
    """[rows, H] bf16, written; None without an aux copy."""


Fallback = Callable[[Missed], object]
"""Does in place what a missing variant would have done; what it returns is ignored."""

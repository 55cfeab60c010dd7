"""Input values: a bank of rows of different families, drawn once and shared by all cases.

Rows are independent in the contract, so one launch mixes families: a hard row must not disturb its neighbours. Two
kinds of weights exist. With *mild* ones logits are of order 1; with *steep* ones they reach +-1e4 in the rows of
family `aligned`, whose sources lie along the weight at clearly different angles, because fp32 cannot tell apart
logits of that size that differ by less than about 0.01. Where families still leave single elements ill-conditioned,
the reference widens its interval (see `attnres_aot.selftest.reference`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attnres_aot.spec.variants import MAX_BLOCKS, MAX_SLOTS

BANK_ROWS = 128
"""Rows of a bank: 64 for the largest launch, and as many to start it at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Values of one row, fp32, before rounding to bf16."""

    prefix: Tensor
    """[H]."""
    slots: Tensor
    """[MAX_SLOTS, H]; slot 0 is also the ordinary source."""
    blocks: Tensor
    """[MAX_BLOCKS, H]."""


class Draw:
    """Draws random values for one bank."""

    def __init__(self, generator: torch.Generator, weight: Tensor) -> None:
        self._generator = generator
        self.hidden = weight.shape[0]
        self.turn = 0
        """How many rows of the family were drawn before."""
        self.direction = weight / weight.norm()
        """Unit vector [H] along norm * query."""

    def normal(self, *shape: int) -> Tensor:
        """Standard normal values of `shape`."""
        return torch.randn(shape, generator=self._generator, device=self._generator.device)

    def whole(self, limit: int) -> int:
        """One integer from 0 to limit - 1."""
        return int(torch.randint(limit, (1,), generator=self._generator, device=self._generator.device))

    def order(self, count: int) -> Tensor:
        """A random order of `count` things."""
        return torch.randperm(count, generator=self._generator, device=self._generator.device)

    def row(self, scale: float = 1.0) -> Row:
        """A row of independent normal values."""
        return Row(
            prefix=scale * self.normal(self.hidden),
            slots=scale * self.normal(MAX_SLOTS, self.hidden),
            blocks=scale * self.normal(MAX_BLOCKS, self.hidden),
        )

    def single(self, source: Tensor, blocks: Tensor) -> Row:
        """A row whose updated prefix is exactly `source` [H], with or without a delta and for any slot count."""
        slots = torch.zeros(MAX_SLOTS, self.hidden, device=source.device)
        slots[1:] = -0.0
        slots[0] = source
        return Row(prefix=torch.zeros_like(source), slots=slots, blocks=blocks)


def _signed_zeros(draw: Draw, keep: float) -> Row:
    row = draw.row()
    parts = [torch.where(draw.normal(*t.shape) < keep, t, 0.0 * t) for t in (row.prefix, row.slots, row.blocks)]
    return Row(prefix=parts[0], slots=parts[1], blocks=parts[2])


def _nearly_armed(draw: Draw) -> Row:
    """Slots whose mailbox words are one bit away from the empty word (+0.0, -0.0), once published."""
    least = 2.0**-133  # smallest bf16 subnormal
    pattern = torch.tensor([0.0, -least, least, -0.0, -0.0, -least, 0.0, -0.0], device=draw.direction.device)
    row = draw.row()
    return Row(prefix=row.prefix, slots=pattern.repeat(MAX_SLOTS, draw.hidden // 8), blocks=row.blocks)


def _negative_zero(draw: Draw) -> Row:
    """Every element of every source -0.0, which only a copy keeps."""
    row = draw.row(0.0)
    return Row(prefix=-row.prefix.abs(), slots=-row.slots.abs(), blocks=-row.blocks.abs())


def _cancelling(draw: Draw) -> Row:
    value = draw.normal(draw.hidden)
    value = (value - (value @ draw.direction) * draw.direction) * (1.0, 1e3)[draw.turn % 2]
    signs = torch.tensor([1.0, -1.0] * (MAX_BLOCKS // 2), device=value.device)
    return draw.single(-value, signs[:, None] * value)


def _equal(draw: Draw) -> Row:
    value = draw.normal(draw.hidden)
    return draw.single(value, value.expand(MAX_BLOCKS, -1))


def _dominant(draw: Draw) -> Row:
    row = draw.row()
    strong = draw.direction * draw.hidden**0.5 + 0.1 * draw.normal(draw.hidden)
    if draw.turn % 2:
        return draw.single(strong, row.blocks)
    row.blocks[0] = strong
    return row


def _aligned(draw: Draw) -> Row:
    """Sources at cosines 1, -0.94, 0.89, -0.83 ... to the weight: logits as large as they get, well apart."""
    count = MAX_BLOCKS + 1
    steps = torch.arange(count, device=draw.direction.device)
    cosines = ((1.0 - steps / count) * torch.where(steps % 2 == 0, 1.0, -1.0))[draw.order(count), None]
    along = cosines * draw.direction * draw.hidden**0.5
    sources = along + (1 - cosines.square()).clamp(min=0).sqrt() * draw.normal(count, draw.hidden)
    return draw.single(sources[0], sources[1:])


def _scales(draw: Draw) -> Row:
    row = draw.row()
    up = torch.logspace(-3, 3, MAX_BLOCKS // 2, device=row.blocks.device)
    powers = torch.cat([up, up.flip(0)])
    return Row(prefix=row.prefix, slots=row.slots, blocks=row.blocks * powers[:, None])


def _slot_order(draw: Draw) -> Row:
    """Slots whose fp32 sum depends on the order of summation: large values that cancel between small ones."""
    row = draw.row()
    large = 3e7 * draw.normal(draw.hidden)
    row.slots[0::4] = large
    row.slots[2::4] = -large
    return row


def _with_special(value: float) -> Callable[[Draw], Row]:
    def make(draw: Draw) -> Row:
        row = draw.row()
        victim = (row.slots[0], row.blocks[0], row.prefix)[draw.turn % 3]
        victim[draw.whole(draw.hidden)] = value
        return row

    return make


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A kind of row."""

    name: str
    """Name in reports."""
    make: Callable[[Draw], Row]
    """Draws one row."""
    typical: bool = False
    """Well-conditioned random values: the rows that the relative error is taken over."""


_NORMAL = Family(name="normal", make=lambda draw: draw.row(), typical=True)
FAMILIES = (
    _NORMAL,
    Family(name="small", make=lambda draw: draw.row(1e-3)),
    Family(name="slot-order", make=_slot_order),
    Family(name="cancelling", make=_cancelling),
    Family(name="infinite", make=_with_special(float("inf"))),
    Family(name="subnormal", make=lambda draw: draw.row(1e-39)),
    Family(name="huge", make=lambda draw: draw.row(2e16)),
    _NORMAL,
    Family(name="dominant", make=_dominant),
    Family(name="not-a-number", make=_with_special(float("nan"))),
    Family(name="zero", make=lambda draw: _signed_zeros(draw, -1e9)),
    Family(name="aligned", make=_aligned),
    Family(name="equal", make=_equal),
    _NORMAL,
    Family(name="tiny", make=lambda draw: draw.row(1e-22)),
    Family(name="signed-zeros", make=lambda draw: _signed_zeros(draw, 0.0)),
    Family(name="overflowing", make=lambda draw: draw.row(1e38)),
    Family(name="scales", make=_scales),
    Family(name="overflowing-element", make=_with_special(3.39e38)),
    Family(name="nearly-armed", make=_nearly_armed),
    Family(name="negative-zero", make=_negative_zero),
    Family(name="negative-infinite", make=_with_special(-float("inf"))),
)
"""Families in the order in which the rows of a bank repeat them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bank:
    """Rows and weights that cases take their values from; all tensors bf16 unless said otherwise."""

    norm: Tensor
    """[H]."""
    query: Tensor
    """[H]."""
    out_norm: Tensor
    """[H]."""
    prefix: Tensor
    """[BANK_ROWS, H]."""
    slots: Tensor
    """[MAX_SLOTS, BANK_ROWS, H]; slot 0 is also the ordinary source."""
    blocks: Tensor
    """[BANK_ROWS, MAX_BLOCKS, H]."""
    families: tuple[Family, ...]
    """Family of each row."""
    typical: Tensor
    """[BANK_ROWS] bool, from the families."""


def draw_bank(hidden: int, seed: int, *, steep: bool, device: torch.device) -> Bank:
    """Draws a bank.

    Args:
      hidden: row length in elements.
      seed: equal seeds give equal banks on one kind of device.
      steep: weights that make logits up to +-1e4 instead of about +-1.
      device: where.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def near(mean: float, spread: float) -> Tensor:
        return (mean + spread * torch.randn(hidden, generator=generator, device=device)).to(torch.bfloat16)

    norm, out_norm = near(1.0, 0.2), near(1.0, 0.3)
    query = near(0.0, 2.0 if steep else hidden**-0.5)
    draw = Draw(generator, norm.float() * query.float())
    families = tuple(FAMILIES[i % len(FAMILIES)] for i in range(BANK_ROWS))
    rows = []
    for i, family in enumerate(families):
        draw.turn = i // len(FAMILIES)
        rows.append(family.make(draw))
    return Bank(
        norm=norm,
        query=query,
        out_norm=out_norm,
        prefix=torch.stack([row.prefix for row in rows]).to(torch.bfloat16),
        slots=torch.stack([row.slots for row in rows], 1).to(torch.bfloat16),
        blocks=torch.stack([row.blocks for row in rows]).to(torch.bfloat16),
        families=families,
        typical=torch.tensor([family.typical for family in families], device=device),
    )

"""Launches for a memory checker: every operand an allocation of its own, exactly as large as the contract says.

Inputs come by copies from host memory, so that no other kernel has to be watched, and what a launch must not read is
never initialised: rows beyond the launch, blocks that are not mixed, blocks beside statistics, a prefix without delta.
With PYTORCH_NO_CUDA_MEMORY_CACHING=1 torch gives each tensor memory straight from the driver, so a checker sees every
access outside one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnres_aot.bundle.manifest import Choice, Manifest
from attnres_aot.selftest import reference
from attnres_aot.selftest.arena import DENSE, SPARE_BLOCKS
from attnres_aot.selftest.cases import Case
from attnres_aot.selftest.check import ulp_limit
from attnres_aot.selftest.reference import Expected, Operands
from attnres_aot.selftest.suite import Launcher, image_variants, wait
from attnres_aot.spec.variants import Variant

BARE_EPS = 1e-5
"""Epsilon of all launches here."""
_SPARE_ROWS = 1
_BF16 = torch.bfloat16
_FP32_TOLERANCE = 1e-4

MakeStatistics = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], object]
"""Makes statistics; takes norm, query, blocks, mixture and scal."""
PublishRows = Callable[[Tensor, Tensor, int], object]
"""Publishes rows into a mailbox; takes the rows, the mailbox and the slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bare:
    """One launch with its memory and its result."""

    case: Case
    """What is launched."""
    views: Operands
    """Operands on the device."""
    expected: Expected
    """What the launch must write, on the host."""


def bare_cases(manifest: Manifest, row_counts: Sequence[int]) -> Iterator[tuple[Variant, int]]:
    """Yields variants and row counts that together reach every consumer image, as few launches as possible for each."""
    records = {record.name: record for record in manifest.variants}
    for variant in image_variants(manifest):
        for rows in rows_for(records[str(variant)].choices, row_counts):
            yield variant, rows


def rows_for(choices: Sequence[Choice], row_counts: Sequence[int]) -> list[int]:
    """Returns `row_counts`, and one more for each image of `choices` that they would miss."""
    found, least = [], 1
    for choice in choices:
        served = [rows for rows in row_counts if rows >= least and rows <= (choice.max_rows or rows)]
        found += served or [choice.max_rows or least]
        least = (choice.max_rows or 0) + 1
    return found


def draw_bare(variant: Variant, rows: int, hidden: int, generator: torch.Generator, device: torch.device) -> Bare:
    """Draws the inputs of one launch and puts them on the device.

    Args:
      variant: which consumer.
      rows: rows of the launch.
      hidden: row length in elements.
      generator: of the host.
      device: where the launch will be.
    """

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=generator)).to(_BF16)

    nb, slots = variant.key.nb, variant.slots
    written = -1 if variant.key.write is None else variant.key.write
    source = torch.zeros(max(1, slots), rows, hidden, dtype=_BF16)
    for slot in range(source.shape[0]):
        reference.publish(source, slot, normal(rows, hidden))
    prefix, blocks = normal(rows, hidden), normal(rows, nb, hidden)
    norm, query, out_norm = normal(hidden), normal(hidden, scale=hidden**-0.5), normal(hidden)
    mixture, scal = reference.statistics(blocks, nb, norm, query, BARE_EPS) if variant.stats else (None, None)
    operands = Operands(
        source=source if slots else source[0],
        prefix=prefix,
        blocks=blocks,
        norm=norm,
        query=query,
        out_norm=out_norm,
        out=torch.empty_like(prefix),
        mixture=mixture,
        scal=scal,
    )

    def empty(*shape: int, dtype: torch.dtype = _BF16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    capacity = rows + _SPARE_ROWS
    views = Operands(
        source=empty(slots, capacity, hidden) if slots else empty(rows, hidden),
        prefix=empty(rows, hidden),
        blocks=empty(rows, max(nb, written + 1) + SPARE_BLOCKS, hidden),
        norm=empty(hidden),
        query=empty(hidden),
        out_norm=empty(hidden),
        out=empty(rows, hidden),
        aux=empty(rows, hidden) if variant.aux else None,
        mixture=empty(capacity, hidden, dtype=torch.float32) if variant.stats else None,
        scal=empty(capacity, 2, dtype=torch.float32) if variant.stats else None,
    )
    _put(variant, operands, views)
    case = Case(variant=variant, rows=rows, layout=DENSE, eps=BARE_EPS, out_eps=BARE_EPS, steep=False, start=0)
    return Bare(case=case, views=views, expected=reference.consume(variant, operands, (BARE_EPS, BARE_EPS)))


def check_bare(bare: Bare, consumer: Launcher) -> list[str]:
    """Launches and says what is wrong with the result; empty when it is right.

    Raises:
      DeviceLostError: the launch did not come to its end.
    """
    consumer.launch(bare.case, bare.views)
    wait(bare.views.out.device, str(bare.case))
    variant, rows, views, expected = bare.case.variant, bare.case.rows, bare.views, bare.expected
    out = views.out.cpu()
    near = reference.ulp_distance(out, expected.out) <= ulp_limit(variant)
    near |= (out >= expected.low) & (out <= expected.high)
    problems = [] if near.all() else [f"{bare.case}: {int((~near).sum())} elements of out are wrong"]
    copies = {"prefix": views.prefix, "aux": views.aux}
    if variant.key.write is not None:
        copies["the written block"] = views.blocks[:, variant.key.write]
    problems += [
        f"{bare.case}: {name} is not the updated prefix"
        for name, copy in copies.items()
        if copy is not None and not _same_bits(_rows_to_host(copy), expected.updated)
    ]
    if variant.slots and not all(reference.is_armed(slot[:rows].cpu()).all() for slot in views.source):
        problems.append(f"{bare.case}: the mailbox is not armed again")
    return problems


def check_statistics(
    nb: int, rows: int, hidden: int, generator: torch.Generator, device: torch.device, launch: MakeStatistics
) -> list[str]:
    """Launches a producer of statistics; returns what is wrong with them."""

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=generator)).to(_BF16)

    norm, query, values = normal(hidden), normal(hidden, scale=hidden**-0.5), normal(rows, nb, hidden)
    blocks = torch.empty(rows, nb + SPARE_BLOCKS, hidden, dtype=_BF16, device=device)
    for row in range(rows):
        blocks[row, :nb].copy_(values[row])
    mixture = torch.empty(rows + _SPARE_ROWS, hidden, dtype=torch.float32, device=device)
    scal = torch.empty(rows + _SPARE_ROWS, 2, dtype=torch.float32, device=device)
    launch(norm.to(device), query.to(device), blocks, mixture, scal)
    wait(device, f"statistics of {nb} blocks for {rows} rows")
    expected = reference.statistics(values, nb, norm, query, BARE_EPS)
    return [
        f"statistics of {nb} blocks for {rows} rows: {name} is wrong"
        for name, found, wanted in zip(("mixture", "scal"), (mixture[:rows], scal[:rows]), expected, strict=True)
        if not torch.allclose(found.cpu(), wanted, rtol=_FP32_TOLERANCE, atol=_FP32_TOLERANCE)
    ]


def check_publish(
    rows: int, hidden: int, generator: torch.Generator, device: torch.device, launch: PublishRows
) -> list[str]:
    """Launches a publisher of rows with many a -0.0; returns what is wrong with what it published."""
    values = torch.randn(rows, hidden, generator=generator).to(_BF16)
    values.view(torch.int16)[:, ::3] = reference.NEGATIVE_ZERO
    source = torch.empty(rows, hidden, dtype=_BF16, device=device)
    source.copy_(values)
    mailbox = torch.empty(2, rows + _SPARE_ROWS, hidden, dtype=_BF16, device=device)
    launch(source, mailbox, 1)
    wait(device, f"publishing {rows} rows")
    expected = torch.empty(1, rows, hidden, dtype=_BF16)
    reference.publish(expected, 0, values)
    return [] if _same_bits(mailbox[1, :rows].cpu(), expected[0]) else [f"publishing {rows} rows: wrong bits"]


def _put(variant: Variant, operands: Operands, views: Operands) -> None:
    """Copies inputs to the device, a contiguous piece at a time, which takes no kernel."""
    rows = views.out.shape[0]
    pieces = [(views.norm, operands.norm), (views.query, operands.query), (views.out_norm, operands.out_norm)]
    if variant.slots:
        pieces += [(views.source[slot, :rows], operands.source[slot]) for slot in range(variant.slots)]
    else:
        pieces.append((views.source, operands.source))
    if variant.key.has_delta:
        pieces.append((views.prefix, operands.prefix))
    if views.mixture is not None and views.scal is not None:
        assert operands.mixture is not None
        assert operands.scal is not None
        pieces += [(views.mixture[:rows], operands.mixture), (views.scal[:rows], operands.scal)]
    else:
        pieces += [(views.blocks[row, : variant.key.nb], operands.blocks[row]) for row in range(rows)]
    for to, values in pieces:
        to.copy_(values)


def _rows_to_host(matrix: Tensor) -> Tensor:
    return torch.stack([row.cpu() for row in matrix])


def _same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.int16), right.view(torch.int16))

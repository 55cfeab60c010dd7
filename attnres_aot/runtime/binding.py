"""What launches of one consumer have in common: code, weights, source, statistics; and the arguments that follow."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from attnres_aot.errors import OperandError
from attnres_aot.records import dataclass
from attnres_aot.runtime.fault import RingLaunch, fault_arguments
from attnres_aot.runtime.loaded import LoadedBundle
from attnres_aot.runtime.mailbox import mailbox_problems
from attnres_aot.runtime.operands import VECTOR_ELEMS, Expected, View, vector_problems
from attnres_aot.runtime.overlap import SOURCE
from attnres_aot.runtime.pdl import EARLY, Pdl
from attnres_aot.runtime.weights import AttnResWeights
from attnres_aot.variants import ConsumerKey, Variant

_MAX_SPIN_BUDGET = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Ring:
    """A bound mailbox."""

    mailbox: torch.Tensor
    """[slots, capacity, H] bf16."""
    spin_budget: int
    """Polls before a launch gives up and traps; 0: never."""

    @property
    def slots(self) -> int:
        """Partial sums per row."""
        return self.mailbox.shape[0]

    @property
    def capacity(self) -> int:
        """Rows per slot."""
        return self.mailbox.shape[1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Statistics:
    """Bound statistics of the saved blocks."""

    mixture: torch.Tensor
    """[cap, H] fp32."""
    scal: torch.Tensor
    """[cap, 2] fp32."""
    rows: frozenset[int]
    """Row counts whose launches take them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Binding:
    """Everything that launches of a route have in common."""

    bundle: LoadedBundle
    """Where code comes from."""
    handle: int
    """Number of the PreparedAttnRes that launches."""
    key: ConsumerKey
    """Which consumer."""
    weights: AttnResWeights
    """Its weights."""
    eps: tuple[float, float]
    """Epsilons under the logits and of the output norm."""
    ring: Ring | None
    """The mailbox that is the source; None for an ordinary source."""
    aux: bool
    """An aux copy is written."""
    statistics: Statistics | None
    """Statistics, where bound."""
    pdl: Pdl
    """Launch mode."""
    checks: bool
    """Check addresses."""

    def variant(self, rows: int) -> Variant:
        """Returns the variant that serves `rows` rows."""
        stats = self.statistics is not None and rows in self.statistics.rows
        return Variant(key=self.key, slots=self.ring.slots if self.ring else 0, aux=self.aux, stats=stats)

    def expected(self) -> tuple[Expected, ...]:
        """Returns what the operands must be, in the order in which they are passed."""
        key = self.key
        written = () if key.write is None else (key.write,)
        source = () if self.ring else (Expected(name=SOURCE, reads=(0,)),)
        return (
            *source,
            Expected(name="prefix", reads=(0,) if key.has_delta else (), writes=(0,)),
            Expected(
                name="blocks",
                reads=tuple(range(key.nb)),
                writes=written,
                blocks=max(key.nb, *(write + 1 for write in written)) if written else key.nb,
            ),
            Expected(name="out", writes=(0,)),
            *((Expected(name="aux", writes=(0,)),) if self.aux else ()),
        )


def make_ring(mailbox: torch.Tensor, spin_budget: int, hidden: int) -> Ring:
    """Checks a mailbox and returns it as a binding.

    Raises:
      OperandError: it cannot be bound; one line for every problem.
    """
    problems = mailbox_problems(mailbox, hidden=hidden)
    if not 0 <= spin_budget <= _MAX_SPIN_BUDGET:
        problems.append(f"spin_budget is {spin_budget!r}; 0 to {_MAX_SPIN_BUDGET} is allowed")
    if problems:
        raise OperandError("\n".join(problems))
    return Ring(mailbox=mailbox, spin_budget=spin_budget)


def make_statistics(mixture: torch.Tensor, scal: torch.Tensor, rows: Iterable[int], hidden: int) -> Statistics:
    """Checks statistics and returns them as a binding.

    Raises:
      OperandError: they cannot be bound; one line for every problem.
    """
    counts = frozenset(rows)
    problems = vector_problems("mixture", mixture, (-1, hidden), torch.float32)
    problems += vector_problems("scal", scal, (-1, 2), torch.float32, alignment=8)
    if not problems and mixture.shape[0] != scal.shape[0]:
        problems.append(f"mixture holds {mixture.shape[0]} rows, but scal {scal.shape[0]}; the same is wanted")
    if not problems and counts and (min(counts) < 1 or max(counts) > mixture.shape[0]):
        bad = sorted(count for count in counts if not 1 <= count <= mixture.shape[0])
        problems.append(f"rows hold {bad}; 1 to {mixture.shape[0]}, the rows of mixture, are allowed")
    if problems:
        raise OperandError("\n".join(problems))
    return Statistics(mixture=mixture, scal=scal, rows=counts)


def constants(binding: Binding, views: tuple[View, ...], variant: Variant) -> dict[str, int | float]:
    """Returns the arguments of every launch with this geometry, by parameter name."""
    by_name = {view.expected.name: view for view in views}
    key, weights, ring, statistics = binding.key, binding.weights, binding.ring, binding.statistics
    row_vectors = binding.bundle.hidden // VECTOR_ELEMS
    values: dict[str, int | float] = {
        "norm": weights.norm.data_ptr(),
        "query": weights.query.data_ptr(),
        "out_norm": weights.out_norm.data_ptr(),
        "prefix_row_stride": by_name["prefix"].row_stride // VECTOR_ELEMS,
        "blocks_row_stride": by_name["blocks"].row_stride // VECTOR_ELEMS,
        "blocks_block_stride": by_name["blocks"].block_stride // VECTOR_ELEMS,
        "out_row_stride": by_name["out"].row_stride // VECTOR_ELEMS,
        "write": -1 if key.write is None else key.write,
        "rows": by_name["out"].rows,
        "eps": binding.eps[0],
        "out_eps": binding.eps[1],
    }
    if ring is not None:
        values["early"] = int(binding.pdl == EARLY)
        values["source"] = ring.mailbox.data_ptr()
        values["source_row_stride"] = row_vectors
        values["source_slot_stride"] = ring.capacity * row_vectors
        if ring.spin_budget:
            values |= _spin_arguments(binding, ring, variant)
    else:
        values["source_row_stride"] = by_name[SOURCE].row_stride // VECTOR_ELEMS
    if binding.aux:
        values["aux_row_stride"] = by_name["aux"].row_stride // VECTOR_ELEMS
    if variant.stats and statistics is not None:
        values["mixture"] = statistics.mixture.data_ptr()
        values["scal"] = statistics.scal.data_ptr()
    return values


def _spin_arguments(binding: Binding, ring: Ring, variant: Variant) -> dict[str, int]:
    """Returns the arguments that bound a launch's waiting and name it if it gives up."""
    manifest = binding.bundle.bundle.manifest
    launch = RingLaunch(
        variant=variant,
        bundle=f"{manifest.name}-{manifest.arch.requested}",
        handle=binding.handle,
        spin_budget=ring.spin_budget,
    )
    return {"spin_budget": ring.spin_budget, **fault_arguments(launch, binding.bundle.device.ordinal)}


def fixed_memory(binding: Binding, rows: int) -> list[tuple[str, int, int]]:
    """Returns (name, address, bytes) of bound memory that no operand may touch."""
    tensors = {}
    if binding.ring is not None:
        tensors["the mailbox"] = binding.ring.mailbox
    if binding.statistics is not None and rows in binding.statistics.rows:
        tensors["mixture"] = binding.statistics.mixture
        tensors["scal"] = binding.statistics.scal
    return [(name, tensor.data_ptr(), tensor.numel() * tensor.element_size()) for name, tensor in tensors.items()]

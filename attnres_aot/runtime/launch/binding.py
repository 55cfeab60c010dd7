"""What launches of one consumer have in common: code, weights, source, statistics; and the arguments that follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from attnres_aot.errors import OperandError
from attnres_aot.records import record
from attnres_aot.runtime.cuda.fault import LaunchKind, Owner, fault_arguments
from attnres_aot.runtime.find.loaded import LoadedBundle
from attnres_aot.runtime.launch.pdl import EARLY, Pdl
from attnres_aot.runtime.operands.geometry import VECTOR_ELEMS, Expected, View, vector_problems
from attnres_aot.runtime.operands.integers import whole
from attnres_aot.runtime.operands.mailbox import mailbox_problems
from attnres_aot.runtime.operands.memory import overlap_problems
from attnres_aot.runtime.operands.overlap import SOURCE, Fixed
from attnres_aot.runtime.operands.weights import WEIGHT_NAMES, AttnResWeights
from attnres_aot.spec.variants import ConsumerKey, Variant

_MAX_SPIN_BUDGET = 2**31 - 1


@record(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Ring:
    """A bound mailbox."""

    mailbox: torch.Tensor
    """[slots, capacity, H] bf16."""
    address: int
    """Where it was when it was bound, which publishers know."""
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


@record(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Statistics:
    """Bound statistics of the saved blocks."""

    mixture: torch.Tensor
    """[cap, H] fp32."""
    scal: torch.Tensor
    """[cap, 2] fp32."""
    rows: frozenset[int]
    """Row counts whose launches take them."""


@record(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Binding:
    """Everything that launches of one of a consumer's routes have in common: its `Bound`."""

    bundle: LoadedBundle
    """Where code comes from."""
    owner: Owner | None
    """What faults call the PreparedAttnRes that launches; None without a spin budget."""
    key: ConsumerKey
    """Which consumer."""
    weights: AttnResWeights
    """Its weights."""
    eps: tuple[float, float]
    """Epsilons under the logits and of the output norm."""
    ring: Ring | None
    """The mailbox that is the source; None for an ordinary source."""
    mailbox: torch.Tensor | None
    """The mailbox that is bound, whether it is the source or not."""
    aux: bool
    """An aux copy is written."""
    statistics: Statistics | None
    """Statistics, where bound."""
    pdl: Pdl
    """Launch mode."""
    checks: bool
    """Check addresses."""
    watched: bool
    """Ask bound tensors in every launch whether they moved; a plan that does keeps them alive."""

    def bound(self, variant: Variant) -> list[tuple[str, torch.Tensor]]:
        """Returns bound tensors whose addresses launches of a variant take, with what messages call them."""
        bound: list[tuple[str, torch.Tensor]] = list(zip(WEIGHT_NAMES, self.weights, strict=True))
        if self.ring is not None:
            bound.append(("the mailbox", self.ring.mailbox))
        if variant.stats and self.statistics is not None:
            bound += [("mixture", self.statistics.mixture), ("scal", self.statistics.scal)]
        return bound

    def asked(self, rows: int) -> Variant:
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

    def plan_in(
        self, table: Any, give: Callable[[torch.Tensor], Any], constants: Mapping[str, int | float], /
    ) -> Callable[..., Any]:
        """Returns what plans launches in a library, to which everything that is bound here is given."""
        key = (self.key.nb, self.key.has_delta, self.key.write, self.key.final)
        consumer = table.prepare_consumer(*map(give, self.weights), *key, *self.eps, self.pdl, self.checks)
        if self.ring is not None:
            fault, tag = constants.get("fault", 0), constants.get("fault_tag", 0)
            consumer.bind_ring(give(self.ring.mailbox), self.ring.spin_budget, fault, tag)
        elif self.mailbox is not None:
            consumer.bind_ring(give(self.mailbox))
        if self.aux:
            consumer.bind_aux()
        if self.statistics is not None:
            bound = self.statistics
            consumer.bind_statistics(give(bound.mixture), give(bound.scal), sorted(bound.rows))
        plan: Callable[..., Any] = consumer.plan_run if self.ring is None else consumer.plan_run_ring
        return plan

    def check_room(self, rows: int) -> None:
        """Raises OperandError where the mailbox has no room for that many rows."""
        if self.ring is not None and rows > self.ring.capacity:
            raise OperandError(
                f"out has {rows} rows, but the bound mailbox holds {self.ring.capacity} per slot; "
                "use an ordinary source for this many rows, or bind a larger mailbox"
            )

    def check_in_place(self) -> None:
        """Raises OperandError where the mailbox has moved. Weights and statistics may, with their storages."""
        if self.ring is not None:
            check_unmoved(self.ring.mailbox, self.ring.address)

    def constants(self, views: tuple[View, ...], asked: Variant) -> dict[str, int | float]:
        """Returns the arguments of every launch with this geometry, by parameter name."""
        by_name = {view.expected.name: view for view in views}
        key, weights, ring, statistics = self.key, self.weights, self.ring, self.statistics
        row_vectors = self.bundle.hidden // VECTOR_ELEMS
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
            "eps": self.eps[0],
            "out_eps": self.eps[1],
        }
        if ring is not None:
            values["early"] = int(self.pdl == EARLY)
            values["source"] = ring.address
            values["source_row_stride"] = row_vectors
            values["source_slot_stride"] = ring.capacity * row_vectors
            if self.owner is not None:
                values |= self._spin_arguments(ring, self.owner, asked)
        else:
            values["source_row_stride"] = by_name[SOURCE].row_stride // VECTOR_ELEMS
        if self.aux:
            values["aux_row_stride"] = by_name["aux"].row_stride // VECTOR_ELEMS
        if asked.stats and statistics is not None:
            values["mixture"] = statistics.mixture.data_ptr()
            values["scal"] = statistics.scal.data_ptr()
        return values

    def _spin_arguments(self, ring: Ring, owner: Owner, variant: Variant) -> dict[str, int]:
        """Returns the arguments that bound a launch's waiting and name it if it gives up."""
        manifest = self.bundle.bundle.manifest
        kind = LaunchKind(
            variant=variant, bundle=f"{manifest.name}-{manifest.arch.requested}", spin_budget=ring.spin_budget
        )
        return {"spin_budget": ring.spin_budget, **fault_arguments(kind, owner, self.bundle.device.ordinal)}

    def fixed(self, _views: tuple[View, ...], /) -> list[Fixed]:
        """Returns bound memory that operands must not touch, as far as one of the two is written.

        Launches of another route or row count may take what these do not, so what they write must not lie there either.
        """
        bound = list(zip(WEIGHT_NAMES, self.weights, strict=True))
        if self.mailbox is not None:
            bound.append(("the mailbox", self.mailbox))
        if self.statistics is not None:
            bound += [("mixture", self.statistics.mixture), ("scal", self.statistics.scal)]
        return [
            Fixed(
                name=name,
                address=tensor.data_ptr(),
                size=tensor.nbytes,
                written=self.ring is not None and tensor is self.ring.mailbox,
            )
            for name, tensor in bound
            if tensor.numel() and tensor.data_ptr()
        ]


def make_ring(mailbox: torch.Tensor, spin_budget: Any, hidden: int) -> Ring:
    """Checks a mailbox and returns it as a binding.

    Raises:
      OperandError: it cannot be bound; one line for every problem.
    """
    problems = mailbox_problems(mailbox, hidden=hidden)
    budget = whole(spin_budget)
    if budget is None or not 0 <= budget <= _MAX_SPIN_BUDGET:
        problems.append(f"spin_budget is {spin_budget!r}; a whole number, 0 to {_MAX_SPIN_BUDGET}, is allowed")
    if problems or budget is None:
        raise OperandError("\n".join(problems))
    address = 0 if mailbox.device.type == "meta" else mailbox.data_ptr()
    return Ring(mailbox=mailbox, address=address, spin_budget=budget)


def make_statistics(mixture: torch.Tensor, scal: torch.Tensor, rows: Iterable[int], hidden: int) -> Statistics:
    """Checks statistics and returns them as a binding.

    Raises:
      OperandError: they cannot be bound; one line for every problem.
    """
    problems = vector_problems("mixture", mixture, (-1, hidden), torch.float32)
    problems += vector_problems("scal", scal, (-1, 2), torch.float32, alignment=8)
    if not problems and mixture.shape[0] != scal.shape[0]:
        problems.append(f"mixture holds {mixture.shape[0]} rows, but scal {scal.shape[0]}; the same is wanted")
    try:
        asked: list[Any] = list(rows)
    except TypeError:
        raise OperandError(
            "\n".join([*problems, f"rows is {rows!r}; some row counts are wanted, as in [1, 2]"])
        ) from None
    counts = frozenset([-1 if count is None else count for count in map(whole, asked)])
    if not problems and counts and not 1 <= min(counts) <= max(counts) <= mixture.shape[0]:
        bad = [value for value in asked if whole(value) not in range(1, mixture.shape[0] + 1)]
        bad.sort(key=lambda value: (whole(value) is None, whole(value) or 0))
        problems.append(f"rows hold {bad}; 1 to {mixture.shape[0]}, the rows of mixture, are allowed")
    if problems:
        raise OperandError("\n".join(problems))
    return Statistics(mixture=mixture, scal=scal, rows=counts)


def check_apart(weights: AttnResWeights, ring: Ring | None, statistics: Statistics | None) -> None:
    """Checks that bound memory which is written, by launches or by producers, is bound once.

    Raises:
      OperandError: it is bound twice; one line for each pair.
    """
    bound = [(name, tensor, False) for name, tensor in zip(WEIGHT_NAMES, weights, strict=True)]
    if ring is not None:
        bound.append(("mailbox", ring.mailbox, True))
    if statistics is not None:
        bound += [("mixture", statistics.mixture, True), ("scal", statistics.scal, True)]
    if problems := overlap_problems(bound):
        raise OperandError("\n".join(problems))


def check_unmoved(mailbox: torch.Tensor, before: int) -> None:
    """Checks that a bound mailbox is where it was, as its publishers know its address.

    Raises:
      OperandError: it has moved.
    """
    if (now := mailbox.data_ptr()) != before:
        raise OperandError(
            f"the mailbox was at {before:#x} when it was bound, and is at {now:#x} now, where nothing publishes and "
            "nothing is armed; arm it and bind it again, here and at its publishers"
        )

"""One way of calling a consumer (its source, with or without aux copy): finds or makes the plan for given operands.

Plans are kept by shape and strides. The last one used is tried first by the caller, so the look-up here is only paid
when a geometry changes, and the checks of a geometry only when it is new.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnres_aot.errors import OperandError
from attnres_aot.runtime.driver import open_driver
from attnres_aot.runtime.guards import make_guard
from attnres_aot.runtime.launch import NOTHING_TO_DO, UNBOUND, Launcher, Plan
from attnres_aot.runtime.loaded import LoadedBundle
from attnres_aot.runtime.operands import VECTOR_ELEMS, Expected, View, check_geometry
from attnres_aot.runtime.overlap import SOURCE, AddressCheck
from attnres_aot.runtime.weights import AttnResWeights
from attnres_aot.variants import ConsumerKey, Variant

_MAX_PLANS = 256
"""Geometries remembered per route; beyond it all are forgotten and made again."""


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Bound statistics of the saved blocks."""

    mixture: torch.Tensor
    """[cap, H] fp32."""
    scal: torch.Tensor
    """[cap, 2] fp32."""
    rows: frozenset[int]
    """Row counts whose launches take them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """Everything that launches of a route have in common."""

    bundle: LoadedBundle
    """Where code comes from."""
    key: ConsumerKey
    """Which consumer."""
    weights: AttnResWeights
    """Its weights."""
    eps: tuple[float, float]
    """Epsilons under the logits and of the output norm."""
    source_is_mailbox: bool
    """The source is a mailbox."""
    ring: Ring | None
    """The mailbox; None for an ordinary source, or where none is bound yet."""
    aux: bool
    """An aux copy is written."""
    statistics: Statistics | None
    """Statistics, where bound."""
    pdl: bool
    """Launch with programmatic stream serialization."""
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


class Route:
    """Plans of one binding.

    `binding` is what they have in common. `plan` is the last one used: try its `accepts` first, and call `find` when it
    refuses.
    """

    __slots__ = ("_plans", "binding", "plan")

    def __init__(self, binding: Binding) -> None:
        self.binding = binding
        self._plans: dict[Any, Plan] = {}
        self.plan: Launcher = UNBOUND

    def forget(self) -> None:
        """Forgets every plan."""
        self._plans = {}
        self.plan = UNBOUND

    def find(self, tensors: tuple[torch.Tensor, ...]) -> Launcher:
        """Returns the plan for operands, made if their geometry is new.

        Args:
          tensors: the operands, in the order of `Binding.expected`.

        Raises:
          OperandError: an operand cannot be launched; one line for every problem.
          VariantMissError: the bundle lacks the variant.
          DriverError: the driver refused to load the code, or this process was forked.
        """
        open_driver()
        key = _geometry_key(tensors)
        plan = self._plans.get(key)
        if plan is None or not plan.accepts(*tensors):
            made = self._make(tensors)
            if not isinstance(made, Plan):
                return made
            plan = made
            if len(self._plans) >= _MAX_PLANS:
                self._plans = {}
            self._plans[key] = plan
        self.plan = plan
        return plan

    def _make(self, tensors: tuple[torch.Tensor, ...]) -> Launcher:
        binding = self.binding
        device = binding.bundle.device
        views = check_geometry(
            binding.expected(),
            tensors,
            hidden=binding.bundle.hidden,
            tensor_index=device.tensor_index,
            device=str(device.device),
        )
        rows = views[0].rows
        variant = binding.variant(rows)
        _check_capacity(binding, rows)
        if rows == 0:
            return NOTHING_TO_DO
        kernel = binding.bundle.kernel(variant, rows)
        if binding.pdl and not kernel.image.pdl:
            raise OperandError(f"pdl was asked for, but the code of {variant} does not support it; leave pdl off")
        return Plan(
            driver=open_driver(),
            kernel=kernel,
            device=device,
            constants=_constants(binding, views, with_statistics=variant.stats),
            pointers=tuple("source" if view.expected.name == SOURCE else view.expected.name for view in views),
            rows=rows,
            pdl=binding.pdl,
            accepts=make_guard(tensors),
            check=AddressCheck(views, _fixed_memory(binding, rows)) if binding.checks else None,
            what=f"{variant} for {rows} rows",
        )


def _geometry_key(tensors: tuple[torch.Tensor, ...]) -> tuple[Any, ...] | None:
    """Returns a key that differs for different shapes or strides; None for what is not even tensors."""
    try:
        return tuple([(tensor.shape, tensor.stride()) for tensor in tensors])
    except (AttributeError, RuntimeError, TypeError):
        return None


def _check_capacity(binding: Binding, rows: int) -> None:
    if binding.ring is not None and rows > binding.ring.capacity:
        raise OperandError(
            f"out has {rows} rows, but the bound mailbox holds {binding.ring.capacity} per slot; "
            "use an ordinary source for this many rows, or bind a larger mailbox"
        )


def _constants(binding: Binding, views: tuple[View, ...], *, with_statistics: bool) -> dict[str, int | float]:
    """Returns the arguments of every launch with this geometry, by parameter name."""
    by_name = {view.expected.name: view for view in views}
    key, weights, ring, statistics = binding.key, binding.weights, binding.ring, binding.statistics
    row_vectors = binding.bundle.hidden // VECTOR_ELEMS
    constants: dict[str, int | float] = {
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
        constants["source"] = ring.mailbox.data_ptr()
        constants["source_row_stride"] = row_vectors
        constants["source_slot_stride"] = ring.capacity * row_vectors
        constants["spin_budget"] = ring.spin_budget
    else:
        constants["source_row_stride"] = by_name[SOURCE].row_stride // VECTOR_ELEMS
    if binding.aux:
        constants["aux_row_stride"] = by_name["aux"].row_stride // VECTOR_ELEMS
    if with_statistics and statistics is not None:
        constants["mixture"] = statistics.mixture.data_ptr()
        constants["scal"] = statistics.scal.data_ptr()
    return constants


def _fixed_memory(binding: Binding, rows: int) -> list[tuple[str, int, int]]:
    """Returns (name, address, bytes) of bound memory that no operand may touch."""
    tensors = {}
    if binding.ring is not None:
        tensors["the mailbox"] = binding.ring.mailbox
    if binding.statistics is not None and rows in binding.statistics.rows:
        tensors["mixture"] = binding.statistics.mixture
        tensors["scal"] = binding.statistics.scal
    return [(name, tensor.data_ptr(), tensor.numel() * tensor.element_size()) for name, tensor in tensors.items()]

"""One way of calling a consumer (its source, with or without aux copy) or a producer: the plans for its operands.

Plans are kept by shape and strides. The last one used is tried first by the caller, so the look-up here is only paid
when a geometry changes, and the checks of a geometry only when it is new.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from attnres_aot.errors import OperandError
from attnres_aot.runtime.cuda.driver import open_driver
from attnres_aot.runtime.find.loaded import LoadedBundle
from attnres_aot.runtime.launch.packed import NOTHING_TO_DO, UNBOUND, Launcher, Order, Plan
from attnres_aot.runtime.launch.pdl import Pdl
from attnres_aot.runtime.operands.geometry import Expected, View, check_geometry
from attnres_aot.runtime.operands.guards import make_guard
from attnres_aot.runtime.operands.memory import check_bound_memory, never_moves, watch
from attnres_aot.runtime.operands.overlap import SOURCE, AddressCheck, Fixed, PlacedCheck
from attnres_aot.spec.variants import Producer, Variant

_MAX_PLANS = 256
"""Geometries remembered per route; beyond it all are forgotten and made again."""
_MAX_ALIKE = 8
"""Plans per geometry: guards also tell apart what launches do not, e.g. tensors made in inference mode or not."""
_SOURCES = (SOURCE, "rows")
"""Operands whose address the parameter `source` takes; that of any other bears its name."""


class Bound(Protocol):
    """What launches of one route have in common, and what follows from it: of a consumer or a producer."""

    __slots__ = ()

    @property
    def bundle(self) -> LoadedBundle:
        """Where code comes from."""

    @property
    def pdl(self) -> Pdl:
        """Launch mode."""

    @property
    def checks(self) -> bool:
        """Check addresses."""

    @property
    def watched(self) -> bool:
        """Ask bound tensors in every launch whether they moved; a plan that does keeps them alive."""

    def expected(self) -> tuple[Expected, ...]:
        """Returns what the operands must be, in the order in which they are passed."""

    def asked(self, rows: int, /) -> Any:
        """Returns the Variant or Producer that serves `rows` rows; the methods below are given it as `asked`."""

    def check_room(self, rows: int) -> None:
        """Raises OperandError where there is no room for that many rows."""

    def check_in_place(self) -> None:
        """Raises OperandError where bound memory has moved that must not."""

    def bound(self, asked: Any, /) -> Sequence[tuple[str, torch.Tensor]]:
        """Returns bound tensors whose addresses launches take, with what messages call them."""

    def constants(self, views: tuple[View, ...], asked: Any, /) -> dict[str, int | float]:
        """Returns the arguments of every launch with this geometry, by parameter name."""

    def fixed(self, views: tuple[View, ...], /) -> Sequence[Fixed]:
        """Returns bound memory that operands must not touch, as far as one of the two is written."""

    def plan_in(
        self, table: Any, give: Callable[[torch.Tensor], Any], constants: Mapping[str, int | float], /
    ) -> Callable[..., Any]:
        """Returns what plans launches for operands in a library (`runtime/shared`): it is given them all.

        Args:
          table: the library's code for the device.
          give: turns a tensor into what the library takes.
          constants: what `constants` returned.
        """


class Route:
    """Plans of what is bound.

    `plan` is the last one used and `steps` are its: try its `accepts` first, and call `find` when it refuses.
    """

    __slots__ = ("_plans", "plan", "steps")

    def __init__(self) -> None:
        self._plans: dict[Any, tuple[Plan, ...]] = {}
        self.plan, self.steps = UNBOUND, UNBOUND.steps

    @property
    def used(self) -> bool:
        """Whether there are plans."""
        return bool(self._plans)

    def forget(self) -> None:
        """Forgets every plan."""
        self._plans = {}
        self.plan, self.steps = UNBOUND, UNBOUND.steps

    def find(self, bound: Bound, tensors: tuple[torch.Tensor, ...]) -> Launcher:
        """Returns the plan for operands, made if their geometry is new.

        Args:
          bound: what the launches have in common, always the same for one route.
          tensors: the operands, in the order of `Bound.expected`.

        Raises:
          OperandError: an operand cannot be launched; one line for every problem.
          VariantMissError: the bundle lacks the variant.
          DriverError: this process was forked.
        """
        open_driver()
        key = _geometry_key(tensors)
        known = tuple([plan for plan in self._plans.get(key, ()) if not plan.moved()])
        plan = next((plan for plan in known if plan.accepts(*tensors)), None)
        if plan is None:
            made = _make(bound, tensors)
            if not isinstance(made, Plan):
                return made
            plan = made
            if len(self._plans) >= _MAX_PLANS:
                self._plans = {}
            self._plans[key] = (plan, *known[: _MAX_ALIKE - 1])
        self.plan, self.steps = plan, plan.steps
        return plan


def _make(bound: Bound, tensors: tuple[torch.Tensor, ...]) -> Launcher:
    bundle, device, expected = bound.bundle, bound.bundle.device, bound.expected()
    views = check_geometry(
        expected, tensors, hidden=bundle.hidden, tensor_index=device.tensor_index, device=str(device.device)
    )
    rows = views[0].rows
    asked: Variant | Producer = bound.asked(rows)
    bound.check_room(rows)
    if rows == 0:
        return NOTHING_TO_DO
    taken = bound.bound(asked)
    check_bound_memory(taken)
    bound.check_in_place()
    kernel = bundle.launchable(asked, rows)
    if bound.pdl and not kernel.image.pdl:
        raise OperandError(f"pdl was asked for, but the code of {asked} does not support it; leave pdl off")
    names = [each.name for each in expected]
    order = Order(
        driver=open_driver(),
        kernel=kernel,
        device=device,
        constants=bound.constants(views, asked),
        pointers=tuple(["source" if name in _SOURCES else name for name in names]),
        rows=rows,
        pdl=bool(bound.pdl),
        accepts=make_guard(tensors),
        trusts=None if bound.checks or "out" not in names else make_guard([tensors[names.index("out")]]),
        check=AddressCheck(views, bound.fixed(views)) if bound.checks else PlacedCheck(views),
        moved=watch([tensor for _, tensor in taken]) if bound.watched else never_moves,
        what=f"{asked} for {rows} rows",
    )
    planner: Any = bundle
    return planner.plan(order, bound, tensors) if bundle.plans else Plan(order)


def _geometry_key(tensors: tuple[torch.Tensor, ...]) -> tuple[Any, ...] | None:
    """Returns a key that differs for different shapes or strides; None for what is not even tensors."""
    try:
        return tuple([(tensor.shape, tensor.stride()) for tensor in tensors])
    except (AttributeError, RuntimeError, TypeError):
        return None

"""One way of calling a consumer (its source, with or without aux copy): finds or makes the plan for given operands.

Plans are kept by shape and strides. The last one used is tried first by the caller, so the look-up here is only paid
when a geometry changes, and the checks of a geometry only when it is new.
"""

from __future__ import annotations

from typing import Any

import torch

from attnres_aot.errors import OperandError
from attnres_aot.runtime.cuda.driver import open_driver
from attnres_aot.runtime.launch.binding import Binding, check_still_there, constants, fixed_memory
from attnres_aot.runtime.launch.packed import NOTHING_TO_DO, UNBOUND, Launcher, Order, Plan
from attnres_aot.runtime.operands.geometry import check_geometry
from attnres_aot.runtime.operands.guards import make_guard
from attnres_aot.runtime.operands.memory import never_moves, watch
from attnres_aot.runtime.operands.overlap import SOURCE, AddressCheck, PlacedCheck

_MAX_PLANS = 256
"""Geometries remembered per route; beyond it all are forgotten and made again."""
_MAX_ALIKE = 8
"""Plans per geometry: guards also tell apart what launches do not, e.g. tensors made in inference mode or not."""


class Route:
    """Plans of one binding.

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

    def find(self, binding: Binding, tensors: tuple[torch.Tensor, ...]) -> Launcher:
        """Returns the plan for operands, made if their geometry is new.

        Args:
          binding: what the launches have in common, always the same for one route.
          tensors: the operands, in the order of `Binding.expected`.

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
            made = _make(binding, tensors)
            if not isinstance(made, Plan):
                return made
            plan = made
            if len(self._plans) >= _MAX_PLANS:
                self._plans = {}
            self._plans[key] = (plan, *known[: _MAX_ALIKE - 1])
        self.plan, self.steps = plan, plan.steps
        return plan


def _make(binding: Binding, tensors: tuple[torch.Tensor, ...]) -> Launcher:
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
    check_still_there(binding, variant)
    kernel = binding.bundle.launchable(variant, rows)
    if binding.pdl and not kernel.image.pdl:
        raise OperandError(f"pdl was asked for, but the code of {variant} does not support it; leave pdl off")
    order = Order(
        driver=open_driver(),
        kernel=kernel,
        device=device,
        constants=constants(binding, views, variant),
        pointers=tuple("source" if view.expected.name == SOURCE else view.expected.name for view in views),
        rows=rows,
        pdl=bool(binding.pdl),
        accepts=make_guard(tensors),
        trusts=None if binding.checks else make_guard([tensors[-2] if binding.aux else tensors[-1]]),
        check=AddressCheck(views, fixed_memory(binding, variant)) if binding.checks else PlacedCheck(views),
        moved=watch([tensor for _, tensor in binding.bound(variant)]) if binding.watched else never_moves,
        what=f"{variant} for {rows} rows",
    )
    bundle: Any = binding.bundle
    return bundle.plan_consumer(order, binding, tensors) if bundle.plans else Plan(order)


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

"""What producers have in common: bound once to where they write, launched for one tensor at a time.

`statistics` and `publish` hold the two producers. Plans are kept by shape and strides, as a consumer's are.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from attnres_aot.errors import OperandError
from attnres_aot.runtime.cuda.driver import open_driver
from attnres_aot.runtime.find.loaded import LoadedBundle
from attnres_aot.runtime.graphs.handles import Handles, handle_tensor
from attnres_aot.runtime.launch.copies import BoundToMemory
from attnres_aot.runtime.launch.packed import NOTHING_TO_DO, UNBOUND, Launcher, Order, Plan
from attnres_aot.runtime.launch.pdl import check_producer_pdl
from attnres_aot.runtime.operands.geometry import Expected, View, check_geometry
from attnres_aot.runtime.operands.guards import make_guard
from attnres_aot.runtime.operands.memory import check_bound_memory, never_moves, watch
from attnres_aot.runtime.operands.overlap import AddressCheck, Fixed, PlacedCheck
from attnres_aot.spec.variants import PUBLISH, STATISTICS, Producer

if TYPE_CHECKING:
    from typing_extensions import Self

_MAX_PLANS = 256
"""Geometries remembered; beyond it all are forgotten and made again."""

producers: dict[str, Handles[Any]] = {
    STATISTICS: Handles("PreparedStatistics"),
    PUBLISH: Handles("PreparedPublish"),
}
"""Every prepared producer that is alive, by kernel."""


class PreparedProducer(BoundToMemory, ABC):
    """A producer bound to its output. Several threads may launch the same object.

    `handle` is the number by which the custom operators of namespace `attnres_aot` know the object, as a
    `PreparedAttnRes` has one; so are copies.
    """

    __slots__ = (
        "__weakref__", "_bundle", "_checks", "_pdl", "_plan", "_plans", "_producer", "handle", "handle_tensor", "name",
    )  # fmt: skip

    def __init__(self, producer: Producer, bundle: LoadedBundle, *, pdl: bool, checks: bool) -> None:
        """Finds the producer in the bundle; `_load` puts its code on the device once everything has been checked.

        Raises:
          VariantMissError: the bundle does not hold it.
        """
        bundle.producer_record(producer)
        self._producer, self._bundle = producer, bundle
        self._pdl, self._checks = check_producer_pdl(pdl), checks
        self._plans: dict[Any, Plan] = {}
        self._plan: Launcher = UNBOUND

    def _take_handle(self, name: str | None) -> None:
        """Gives the object, which is complete, its handle."""
        self.name = name
        self.handle = producers[self._producer.kernel].register(self, name)
        self.handle_tensor = handle_tensor(self.handle)

    def __copy__(self) -> Self:
        twin = self._same_slots()
        twin.forget_plans()
        twin._take_handle(None)  # noqa: SLF001
        return twin

    def _load(self) -> None:
        """Puts on the device all code that launches can need.

        Raises:
          BundleError: an image is damaged.
          DriverError: the driver refused.
        """
        self._bundle.load_producer(self._producer)

    @property
    def checks(self) -> bool:
        """Whether addresses of operands are checked; may be set at any time. Geometry is always checked."""
        return self._checks

    @checks.setter
    def checks(self, on: bool) -> None:
        self._checks = on
        self.forget_plans()

    def forget_plans(self) -> None:
        """Makes the next launch look for its plan again."""
        self._plans, self._plan = {}, UNBOUND

    @abstractmethod
    def _expected(self) -> Expected:
        """Returns what the tensor that is passed with each launch must be."""

    @abstractmethod
    def _arguments(self) -> tuple[Any, ...]:
        """Returns what the object was made of, as a library takes it."""

    @abstractmethod
    def _check_room(self, rows: int) -> None:
        """Raises OperandError where there is no room for that many rows."""

    @abstractmethod
    def _constants(self, view: View) -> dict[str, int | float]:
        """Returns the arguments of every launch with this geometry, by parameter name.

        Raises:
          OperandError: bound memory has moved, and must not.
        """

    @abstractmethod
    def _bound(self) -> list[tuple[str, torch.Tensor]]:
        """Returns bound tensors, whose addresses launches take, with what messages call them."""

    @abstractmethod
    def _written(self, view: View) -> list[Fixed]:
        """Returns what a launch writes, which the tensor must not touch."""

    @abstractmethod
    def _pointer(self) -> str:
        """Returns the name of the parameter that takes the tensor's address."""

    def launch(self, tensor: torch.Tensor) -> None:
        """Launches without asking who is tracing; what the custom operators do."""
        plan = self._plan
        if not plan.accepts(tensor) or plan.moved():
            plan = self._find(tensor)
        plan.launch((tensor.data_ptr(),))

    def _find(self, tensor: Any) -> Launcher:
        """Returns the plan for a tensor that the last plan does not take, made if its geometry is new."""
        open_driver()
        key = (tensor.shape, tensor.stride()) if isinstance(tensor, torch.Tensor) else None
        plan = self._plans.get(key)
        if plan is None or not plan.accepts(tensor) or plan.moved():
            made = self._make(tensor)
            if not isinstance(made, Plan):
                return made
            plan = made
            if len(self._plans) >= _MAX_PLANS:
                self._plans = {}
            self._plans[key] = plan
        self._plan = plan
        return plan

    def _make(self, tensor: torch.Tensor) -> Launcher:
        bundle, device = self._bundle, self._bundle.device
        (view,) = check_geometry(
            (self._expected(),),
            (tensor,),
            hidden=bundle.hidden,
            tensor_index=device.tensor_index,
            device=str(device.device),
        )
        self._check_room(view.rows)
        if view.rows == 0:
            return NOTHING_TO_DO
        bound = self._bound()
        check_bound_memory(bound)
        kernel = bundle.launchable_producer(self._producer, view.rows)
        if self._pdl and not kernel.image.pdl:
            raise OperandError(
                f"pdl was asked for, but the code of {self._producer} does not support it; leave pdl off"
            )
        order = Order(
            driver=open_driver(),
            kernel=kernel,
            device=device,
            constants=self._constants(view),
            pointers=(self._pointer(),),
            rows=view.rows,
            pdl=self._pdl,
            accepts=make_guard((tensor,)),
            check=AddressCheck((view,), self._written(view)) if self._checks else PlacedCheck((view,)),
            moved=watch([each for _, each in bound]) if self._checks else never_moves,
            what=f"{self._producer} for {view.rows} rows",
        )
        if bundle.plans:
            made: Any = bundle
            given = (*self._arguments(), self._pdl, self._checks)
            return made.plan_producer(order, self._producer.kernel, given, tensor)  # type: ignore[no-any-return]
        return Plan(order)


def _forget_all_plans() -> None:
    """Makes every launch in a forked child look for its plan again, which is refused there."""
    for kind in producers.values():
        for prepared in kind.alive():
            prepared.forget_plans()


os.register_at_fork(after_in_child=_forget_all_plans)

"""What producers have in common: bound once to where they write, launched for one tensor at a time.

`statistics` and `publish` hold the two producers. Plans are kept by shape and strides, as a consumer's are.
"""

from __future__ import annotations

import itertools
import os
import weakref
from abc import ABC, abstractmethod
from typing import Any

import torch

from attnres_aot.errors import OperandError, UsageError
from attnres_aot.runtime.driver import open_driver
from attnres_aot.runtime.guards import make_guard
from attnres_aot.runtime.launch import NOTHING_TO_DO, UNBOUND, Launcher, Order, Plan
from attnres_aot.runtime.loaded import LoadedBundle
from attnres_aot.runtime.operands import Expected, View, check_geometry
from attnres_aot.runtime.overlap import AddressCheck
from attnres_aot.runtime.pdl import check_producer_pdl
from attnres_aot.variants import Producer

_MAX_PLANS = 256
"""Geometries remembered; beyond it all are forgotten and made again."""

_numbers = itertools.count(1)
_alive: weakref.WeakValueDictionary[int, PreparedProducer] = weakref.WeakValueDictionary()


class PreparedProducer(ABC):
    """A producer bound to its output. Several threads may launch the same object.

    `handle` is the number by which the custom operators of namespace `attnres_aot` know the object.
    """

    __slots__ = ("__weakref__", "_bundle", "_checks", "_pdl", "_plan", "_plans", "_producer", "handle")

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
        self.handle = next(_numbers)
        _alive[self.handle] = self

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
    def _constants(self, view: View) -> dict[str, int | float]:
        """Returns the arguments of every launch with this geometry, by parameter name.

        Raises:
          OperandError: there is no room for that many rows.
        """

    @abstractmethod
    def _written(self, view: View) -> list[tuple[str, int, int]]:
        """Returns (name, address, bytes) of what a launch writes, which the tensor may not touch."""

    @abstractmethod
    def _pointer(self) -> str:
        """Returns the name of the parameter that takes the tensor's address."""

    def _launch(self, tensor: torch.Tensor) -> None:
        """Launches for `tensor` on the current stream of its device."""
        plan = self._plan
        if not plan.accepts(tensor):
            plan = self._find(tensor)
        plan.launch((tensor.data_ptr(),))

    def _find(self, tensor: Any) -> Launcher:
        """Returns the plan for a tensor that the last plan does not take, made if its geometry is new."""
        open_driver()
        key = (tensor.shape, tensor.stride()) if isinstance(tensor, torch.Tensor) else None
        plan = self._plans.get(key)
        if plan is None or not plan.accepts(tensor):
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
        constants = self._constants(view)
        if view.rows == 0:
            return NOTHING_TO_DO
        kernel = bundle.launchable_producer(self._producer, view.rows)
        if self._pdl and not kernel.image.pdl:
            raise OperandError(
                f"pdl was asked for, but the code of {self._producer} does not support it; leave pdl off"
            )
        return Plan(
            Order(
                driver=open_driver(),
                kernel=kernel,
                device=device,
                constants=constants,
                pointers=(self._pointer(),),
                rows=view.rows,
                pdl=self._pdl,
                accepts=make_guard((tensor,)),
                check=AddressCheck((view,), self._written(view)) if self._checks else None,
                what=f"{self._producer} for {view.rows} rows",
            )
        )


def find_prepared(handle: int, kind: str) -> Any:
    """Returns the prepared producer that a handle names, which is of the class called `kind`.

    Raises:
      UsageError: there is none.
    """
    found = _alive.get(handle)
    if type(found).__name__ != kind:
        raise UsageError(
            f"handle {handle} names no {kind} of this process; keep the object alive as long as graphs that call it, "
            "and trace again in a new process"
        )
    return found


def _forget_all_plans() -> None:
    """Makes every launch in a forked child look for its plan again, which is refused there."""
    for prepared in list(_alive.values()):
        prepared.forget_plans()


os.register_at_fork(after_in_child=_forget_all_plans)

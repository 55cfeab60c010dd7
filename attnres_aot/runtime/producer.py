"""What producers have in common: bound once to where they write, launched for one tensor at a time.

`statistics` and `publish` hold the two producers. Each launches through one `Route`, whose `Bound` it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnres_aot.runtime.find.loaded import LoadedBundle
from attnres_aot.runtime.launch.copies import BoundToMemory
from attnres_aot.runtime.launch.packed import Launcher
from attnres_aot.runtime.launch.pdl import check_producer_pdl
from attnres_aot.runtime.launch.route import Bound, Route
from attnres_aot.spec.variants import Producer

if TYPE_CHECKING:
    from typing_extensions import Self


class PreparedProducer(BoundToMemory, Bound):
    """A producer bound to its output. Several threads may launch the same object.

    `handle` is the number by which the custom operators of namespace `attnres_aot` know the object, as a
    `PreparedAttnRes` has one; so are copies.
    """

    __slots__ = (
        "__weakref__", "_checks", "_route", "bundle", "pdl", "producer",
    )  # fmt: skip

    bundle: LoadedBundle
    pdl: bool

    def __init__(self, producer: Producer, bundle: LoadedBundle, *, pdl: bool, checks: bool) -> None:
        """Finds the producer in the bundle; `_load` puts its code on the device once everything has been checked.

        Raises:
          VariantMissError: the bundle does not hold it.
        """
        bundle.producer_record(producer)
        self.producer, self.bundle = producer, bundle
        self.pdl, self._checks = check_producer_pdl(pdl), checks
        self._route = Route()

    def __copy__(self) -> Self:
        twin = self._same_slots()
        twin._route = Route()  # noqa: SLF001
        twin._take_handle(None)  # noqa: SLF001
        return twin

    def _load(self) -> None:
        """Puts on the device all code that launches can need.

        Raises:
          BundleError: an image is damaged.
          DriverError: the driver refused.
        """
        self.bundle.load_producer(self.producer)

    @property
    def checks(self) -> bool:
        """Whether operands and bound memory are checked (`docs/loader.md`); may be set at any time."""
        return self._checks

    @checks.setter
    def checks(self, on: bool) -> None:
        self._checks = on
        self._route = Route()  # a launch in flight may still find the plans of the other

    def forget_plans(self) -> None:
        """Makes the next launch look for its plan again."""
        self._route.forget()

    @property
    def watched(self) -> bool:
        """Whether each launch asks bound tensors if they moved."""
        return self._checks

    def asked(self, _rows: int, /) -> Producer:
        """Returns the producer, which serves every number of rows."""
        return self.producer

    def check_in_place(self) -> None:
        """Bound memory may move with its storage, unless the producer says otherwise."""

    def launch(self, tensor: torch.Tensor) -> None:
        """Launches without asking who is tracing; what the custom operators do."""
        plan: Launcher = self._route.plan
        if not plan.accepts(tensor) or plan.moved():
            plan = self._route.find(self, (tensor,))
        plan.launch((tensor.data_ptr(),))

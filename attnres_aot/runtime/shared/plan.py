"""A plan whose launches a library does: addresses and a stream go there, and it checks, packs and launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnres_aot.errors import DriverError
from attnres_aot.runtime.cuda.fault import read_fault
from attnres_aot.runtime.launch.packed import Order, Plan


class _Call:
    """One launch at a time, as a plan's slot: what it was given last, and how it is done."""

    __slots__ = ("_launch", "pointers", "stream")

    def __init__(self, launch: Callable[..., Any]) -> None:
        self._launch = launch
        self.pointers: tuple[int, ...] = ()
        self.stream = 0

    def call(self) -> int:
        """Launches; raises what the library does, and so returns no status but 0."""
        self._launch(self.stream, *self.pointers)
        return 0


class LibraryPlan(Plan):
    """Launches of one kernel for one geometry of operands, by a library."""

    __slots__ = ("_ordinal",)

    def __init__(self, order: Order, launch: Callable[..., Any]) -> None:
        """Takes the steps of a plan, other than packing.

        Args:
          order: what is launched.
          launch: the library's function of the stream and the operands' addresses.
        """
        device = order.device
        self._ordinal, self.idle = device.ordinal, []
        self.make_slot = lambda: _Call(self._launched(launch))  # type: ignore[assignment]
        self.accepts, self.moved, self._check, self._what = order.accepts, order.moved, order.check, order.what
        self._driver, self._device = order.driver, device
        self.steps = (
            order.accepts, order.trusts, order.moved, self.idle.pop, self.idle.append,
            device.stream, device.ordinal, None, self,
        )  # fmt: skip

    def fill(self, slot: Any, pointers: tuple[int, ...], stream: int) -> None:
        """Notes what changes from launch to launch; the library checks the addresses."""
        slot.pointers, slot.stream = pointers, stream

    def _launched(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        """Adds to a refused launch what this process knows of a consumer that gave up."""

        def call(*arguments: int) -> None:
            try:
                launch(*arguments)
            except DriverError as error:
                fault = read_fault(self._ordinal)
                if fault is None:
                    raise
                raise DriverError(f"{error}. What failed: {fault}") from error

        return call

"""A bundle whose code comes from a shared object: the library puts it on the device, binds and launches it.

The surface is that of `LoadedBundle`: whoever launches makes a plan per geometry of operands, and gets one here that
calls the library. The loader's own checks come first, as some of them need torch, then the library's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from attnres_aot.bundle.reader import Bundle
from attnres_aot.runtime.cuda.device import TorchDevice
from attnres_aot.runtime.cuda.modules import LoadedKernel
from attnres_aot.runtime.find.loaded import LoadedBundle
from attnres_aot.runtime.launch.packed import Order, Plan
from attnres_aot.runtime.shared import library
from attnres_aot.runtime.shared.plan import LibraryPlan
from attnres_aot.spec.variants import STATISTICS

if TYPE_CHECKING:
    from attnres_aot.runtime.launch.binding import Binding


class LibraryBundle(LoadedBundle):
    """A bundle inside a shared object, for one device."""

    __slots__ = ("_table",)

    def __init__(self, bundle: Bundle, device: TorchDevice) -> None:
        """Opens the library.

        Raises:
          UsageError: apache-tvm-ffi is not installed, or the library cannot be loaded.
          DriverError: it cannot launch here.
          BundleError: no code in it runs on the device.
        """
        super().__init__(bundle, device)
        self._table = library.open_library(bundle.path).load_table(device.ordinal)

    def load_image(self, name: str) -> LoadedKernel:
        """Puts one image on the device, or returns it if it is there already."""
        found = self._kernels.get(name)
        if found is None:
            image = self._images[name]
            function = ctypes.c_void_p(self._table.load_image(name))
            params = self.bundle.manifest.abis[image.abi]
            found = self._kernels[name] = LoadedKernel(image=image, params=params, function=function)
        return found

    def plan_consumer(self, order: Order, binding: Binding, operands: Sequence[torch.Tensor]) -> Plan:
        """Returns the plan of a consumer's launches, made by the library for what is bound."""
        give, key = library.as_argument, binding.key
        consumer = self._table.prepare_consumer(
            *[give(weight) for weight in binding.weights],
            key.nb,
            key.has_delta,
            key.write,
            key.final,
            *binding.eps,
            binding.pdl,
            binding.checks,
        )
        mailbox = binding.ring.mailbox if binding.ring is not None else binding.mailbox
        if mailbox is not None:
            constants, budget = order.constants, binding.ring.spin_budget if binding.ring is not None else 0
            consumer.bind_ring(give(mailbox), budget, constants.get("fault", 0), constants.get("fault_tag", 0))
        if binding.aux:
            consumer.bind_aux()
        if binding.statistics is not None:
            bound = binding.statistics
            consumer.bind_statistics(give(bound.mixture), give(bound.scal), sorted(bound.rows))
        plan = consumer.plan_run if binding.ring is None else consumer.plan_run_ring
        return self._planned(order, plan, operands)

    def plan_producer(self, order: Order, kernel: str, bound: Sequence[Any], operand: torch.Tensor) -> Plan:
        """Returns the plan of a producer's launches.

        Args:
          order: what is launched.
          kernel: STATISTICS or PUBLISH.
          bound: the arguments that prepare the producer, tensors and numbers.
          operand: the tensor that is passed with each launch.
        """
        given = [library.as_argument(each) if isinstance(each, torch.Tensor) else each for each in bound]
        prepare = self._table.prepare_statistics if kernel == STATISTICS else self._table.prepare_publish
        return self._planned(order, prepare(*given).plan_run, [operand])

    def _planned(self, order: Order, plan: Callable[..., Any], operands: Sequence[torch.Tensor]) -> Plan:
        return LibraryPlan(order, plan(*[library.as_argument(operand) for operand in operands]))

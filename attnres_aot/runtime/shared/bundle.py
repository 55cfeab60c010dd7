"""A bundle whose code comes from a shared object: the library puts it on the device, binds and launches it.

The surface is that of `LoadedBundle`: whoever launches makes a plan per geometry of operands, and gets one here that
calls the library. The loader's own checks come first, as some of them need torch, then the library's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from attnres_aot.bundle.reader import Bundle
from attnres_aot.runtime.cuda.device import TorchDevice
from attnres_aot.runtime.cuda.modules import LoadedKernel
from attnres_aot.runtime.find.loaded import LoadedBundle
from attnres_aot.runtime.launch.packed import Order, Plan
from attnres_aot.runtime.launch.route import Bound
from attnres_aot.runtime.shared import library
from attnres_aot.runtime.shared.plan import LibraryPlan


class LibraryBundle(LoadedBundle):
    """A bundle inside a shared object, for one device."""

    __slots__ = ("_code",)
    plans = True

    def __init__(self, bundle: Bundle, device: TorchDevice) -> None:
        """Opens the library.

        Raises:
          UsageError: apache-tvm-ffi is not installed, or the library cannot be loaded.
          DriverError: it cannot launch here.
          BundleError: no code in it runs on the device.
        """
        super().__init__(bundle, device)
        self._code = library.open_library(bundle.path).load_table(device.ordinal)

    def load_image(self, name: str) -> LoadedKernel:
        """Puts one image on the device, or returns it if it is there already."""
        found = self._kernels.get(name)
        if found is None:
            image = self._images[name]
            function = ctypes.c_void_p(self._code.load_image(name))
            params = self.bundle.manifest.abis[image.abi]
            found = self._kernels[name] = LoadedKernel(image=image, params=params, function=function)
        return found

    def plan(self, order: Order, bound: Bound, operands: Sequence[torch.Tensor]) -> Plan:
        """Returns the plan of launches for operands, made by the library of what is bound.

        Raises:
          OperandError: the library refuses something; one line for every problem.
        """
        plan = bound.plan_in(self._code, library.as_argument, order.constants)
        return LibraryPlan(order, plan(*map(library.as_argument, operands)))

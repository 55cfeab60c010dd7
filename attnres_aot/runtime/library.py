"""Loads compiled images into the driver, once per process and device, and proves that each is what the manifest says.

Images are loaded when they are first needed. Equal bytes are loaded once, whichever bundle they come from, and stay
loaded for the life of the process, so that a captured graph can never refer to code that has gone.
"""

from __future__ import annotations

import ctypes
import threading

from attnres_aot.abi import Param
from attnres_aot.bundle import Bundle, read_image
from attnres_aot.errors import BundleError, DriverError
from attnres_aot.manifest import ImageRecord
from attnres_aot.records import dataclass
from attnres_aot.runtime.driver import Current, Driver, open_driver
from attnres_aot.runtime.torch_device import TorchDevice

_MAX_THREADS, _MAX_DYNAMIC_SMEM = 0, 8  # CU_FUNC_ATTRIBUTE_*
_DEFAULT_DYNAMIC_SMEM = 48 << 10  # bytes that any kernel may use without asking
_CAPTURE_IMPLICIT = 906  # the legacy stream was asked while another stream was being captured
_NOT_CAPTURING = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class LoadedKernel:
    """A kernel that is loaded on one device and ready to launch."""

    image: ImageRecord
    """Launch facts."""
    params: tuple[Param, ...]
    """Parameter list, as checked against the driver."""
    function: ctypes.c_void_p
    """The driver's handle of the kernel on this device."""


_lock = threading.Lock()
_kernels: dict[tuple[str, str], ctypes.c_void_p] = {}  # (sha256, symbol) -> CUkernel
_functions: dict[tuple[str, str, int], ctypes.c_void_p] = {}  # (sha256, symbol, device) -> CUfunction


def load_kernel(bundle: Bundle, image: ImageRecord, device: TorchDevice) -> LoadedKernel:
    """Loads the kernel of `image` on `device`, or returns it if it is loaded already.

    Raises:
      BundleError: the image's file is damaged, or the binary's parameters or block size are not the manifest's.
      DriverError: the driver refused, or a stream is being captured into a graph.
    """
    driver = open_driver()
    params = bundle.manifest.abis[image.abi]
    where = f"image {image.name!r} of {bundle.path}"
    with _lock:
        function = _functions.get((image.sha256, image.symbol, device.ordinal))
        kernel = _kernels.get((image.sha256, image.symbol))
        if function is None:
            _refuse_during_capture(driver, device, where)
            with Current(driver, device.ordinal):
                if kernel is None:
                    kernel = _load(driver, read_image(bundle, image), image, where)
                    _kernels[image.sha256, image.symbol] = kernel
                _prove(driver, kernel, image, params, device, where)
                function = _enter(driver, kernel, image, device, where)
            _functions[image.sha256, image.symbol, device.ordinal] = function
        elif kernel is not None:
            _prove_parameters(driver, kernel, params, where)
    return LoadedKernel(image=image, params=params, function=function)


def _refuse_during_capture(driver: Driver, device: TorchDevice, where: str) -> None:
    """Refuses to load while the current stream is being captured, where the driver's own failure would end it."""
    state = ctypes.c_int()
    with Current(driver, device.ordinal):
        stream = ctypes.c_void_p(device.stream(device.ordinal))
        status = driver.lib.cuStreamIsCapturing(stream, ctypes.byref(state))
    if status == 0 and state.value == _NOT_CAPTURING:
        return
    if status in (0, _CAPTURE_IMPLICIT):
        raise DriverError(
            f"{where} is not loaded yet, and the current stream is being captured into a CUDA graph, which forbids "
            "loading; call attnres_aot.preload() before capturing, or run the same consumer once before"
        )
    raise driver.error(status, f"tell whether the current stream is being captured, before loading {where}")


def _load(driver: Driver, data: bytes, image: ImageRecord, where: str) -> ctypes.c_void_p:
    library, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    status = driver.lib.cuLibraryLoadData(ctypes.byref(library), ctypes.c_char_p(data), None, None, 0, None, None, 0)
    driver.check(status, f"load {where}")
    status = driver.lib.cuLibraryGetKernel(ctypes.byref(kernel), library, ctypes.c_char_p(image.symbol.encode()))
    driver.check(status, f"find kernel {image.symbol!r} in {where}")
    return kernel


def _prove(
    driver: Driver,
    kernel: ctypes.c_void_p,
    image: ImageRecord,
    params: tuple[Param, ...],
    device: TorchDevice,
    where: str,
) -> None:
    _prove_parameters(driver, kernel, params, where)
    threads = ctypes.c_int()
    status = driver.lib.cuKernelGetAttribute(ctypes.byref(threads), _MAX_THREADS, kernel, device.ordinal)
    driver.check(status, f"tell the block size of {where}")
    if threads.value < image.block_threads:
        raise BundleError(
            f"{where}: the binary runs with at most {threads.value} threads per CTA, but the manifest says "
            f"{image.block_threads}; the bundle is damaged: build it again"
        )


def _prove_parameters(driver: Driver, kernel: ctypes.c_void_p, params: tuple[Param, ...], where: str) -> None:
    found = driver.parameters(kernel, where)
    promised = [(param.offset, param.size) for param in params]
    if found != promised:
        raise BundleError(
            f"{where}: the binary's parameters are, as (offset, size), {found}, but the manifest promises {promised}; "
            "the bundle is damaged: build it again"
        )


def _enter(
    driver: Driver, kernel: ctypes.c_void_p, image: ImageRecord, device: TorchDevice, where: str
) -> ctypes.c_void_p:
    """Puts the kernel on the device now, so that no launch has to."""
    if image.smem_dynamic_bytes + image.smem_static_bytes > _DEFAULT_DYNAMIC_SMEM:
        status = driver.lib.cuKernelSetAttribute(_MAX_DYNAMIC_SMEM, image.smem_dynamic_bytes, kernel, device.ordinal)
        driver.check(status, f"give {image.smem_dynamic_bytes} bytes of shared memory to {where}")
    function = ctypes.c_void_p()
    driver.check(driver.lib.cuKernelGetFunction(ctypes.byref(function), kernel), f"put {where} on {device.device}")
    return function

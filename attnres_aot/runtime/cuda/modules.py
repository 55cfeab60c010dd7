"""Loads compiled images into the driver, once per process and device, and proves that each is what the manifest says.

Equal bytes are loaded once, whichever bundle they come from, and stay loaded for the life of the process, so that a
captured graph can never refer to code that has gone. What is loaded is found without a lock and without asking the
driver: a load that waits for a kernel, which waits for a publisher, keeps nobody from what is loaded already.
"""

from __future__ import annotations

import ctypes
import threading

from attnres_aot.bundle.manifest import ImageRecord
from attnres_aot.bundle.reader import Bundle, read_image
from attnres_aot.errors import BundleError
from attnres_aot.records import record
from attnres_aot.runtime.cuda.device import TorchDevice
from attnres_aot.runtime.cuda.driver import Current, Driver, Relaxed, open_driver
from attnres_aot.spec.params import Param

_MAX_THREADS, _MAX_DYNAMIC_SMEM = 0, 8  # CU_FUNC_ATTRIBUTE_*
_DEFAULT_DYNAMIC_SMEM = 48 << 10  # bytes that any kernel may use without asking
_NOT_FOUND = 500  # CUDA_ERROR_NOT_FOUND


@record(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class LoadedKernel:
    """A kernel that is loaded on one device and ready to launch."""

    image: ImageRecord
    """Launch facts."""
    params: tuple[Param, ...]
    """Parameter list, as checked against the driver."""
    function: ctypes.c_void_p
    """The driver's handle of the kernel on this device."""


@record(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class _Kernel:
    """A kernel that the driver has read."""

    handle: ctypes.c_void_p
    """CUkernel."""
    parameters: list[tuple[int, int]]
    """(offset, size) of its parameters, as the driver reports them."""


_lock = threading.Lock()
_kernels: dict[tuple[str, str], _Kernel] = {}  # by (sha256, symbol)
_functions: dict[tuple[str, str, int], ctypes.c_void_p] = {}  # (sha256, symbol, device) -> CUfunction


def load_kernel(bundle: Bundle, image: ImageRecord, device: TorchDevice) -> LoadedKernel:
    """Puts the kernel of `image` on `device`, or returns it if it is there already.

    Does no harm to streams that are being captured, on this thread or on others; needs no current context.

    Raises:
      BundleError: the image's file is damaged, or the binary's parameters or block size are not the manifest's.
      DriverError: the driver refused.
    """
    driver = open_driver()
    params = bundle.manifest.abis[image.abi]
    where = f"image {image.name!r} of {bundle.path}"
    key, place = (image.sha256, image.symbol), (image.sha256, image.symbol, device.ordinal)
    function = _functions.get(place)
    if function is None:
        with _lock, Relaxed(driver), Current(driver, device.ordinal):
            function = _functions.get(place)
            if function is None:
                kernel = _kernels.get(key)
                if kernel is None:
                    kernel = _kernels[key] = _load(driver, read_image(bundle, image), image, where)
                _prove_parameters(kernel, params, where)
                _prove_threads(driver, kernel, image, device, where)
                function = _functions[place] = _enter(driver, kernel, image, device, where)
    _prove_parameters(_kernels[key], params, where)
    return LoadedKernel(image=image, params=params, function=function)


def _load(driver: Driver, data: bytes, image: ImageRecord, where: str) -> _Kernel:
    library, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    status = driver.lib.cuLibraryLoadData(ctypes.byref(library), ctypes.c_char_p(data), None, None, 0, None, None, 0)
    driver.check(status, f"load {where}")
    status = driver.lib.cuLibraryGetKernel(ctypes.byref(kernel), library, ctypes.c_char_p(image.symbol.encode()))
    if status == _NOT_FOUND:
        raise BundleError(
            f"{where}: the binary has no kernel {image.symbol!r}, so it is the code of something else; the bundle is "
            "damaged: build or copy it again"
        )
    driver.check(status, f"find kernel {image.symbol!r} in {where}")
    return _Kernel(handle=kernel, parameters=driver.parameters(kernel, where))


def _prove_parameters(kernel: _Kernel, params: tuple[Param, ...], where: str) -> None:
    promised = [(param.offset, param.size) for param in params]
    if kernel.parameters != promised:
        raise BundleError(
            f"{where}: the binary's parameters are, as (offset, size), {kernel.parameters}, but the manifest promises "
            f"{promised}; the bundle is damaged: build it again"
        )


def _prove_threads(driver: Driver, kernel: _Kernel, image: ImageRecord, device: TorchDevice, where: str) -> None:
    threads = ctypes.c_int()
    status = driver.lib.cuKernelGetAttribute(ctypes.byref(threads), _MAX_THREADS, kernel.handle, device.ordinal)
    driver.check(status, f"tell the block size of {where}")
    if threads.value < image.block_threads:  # more is no fault: the driver tells what the registers allow
        raise BundleError(
            f"{where}: the binary runs with at most {threads.value} threads per CTA, but the manifest says "
            f"{image.block_threads}; the bundle is damaged: build it again"
        )


def _enter(driver: Driver, kernel: _Kernel, image: ImageRecord, device: TorchDevice, where: str) -> ctypes.c_void_p:
    """Puts the kernel on the device now, however lazily modules are loaded, so that no launch has to."""
    lib = driver.lib
    if image.smem_dynamic_bytes + image.smem_static_bytes > _DEFAULT_DYNAMIC_SMEM:
        size = image.smem_dynamic_bytes
        status = lib.cuKernelSetAttribute(_MAX_DYNAMIC_SMEM, size, kernel.handle, device.ordinal)
        driver.check(status, f"give {size} bytes of shared memory to {where}")
    function = ctypes.c_void_p()
    status = lib.cuKernelGetFunction(ctypes.byref(function), kernel.handle) or lib.cuFuncLoad(function)
    driver.check(status, f"put {where} on {device.device}")
    return function

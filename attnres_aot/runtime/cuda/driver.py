"""Owns the connection to the CUDA driver: opening libcuda on first use, its functions, and errors with its names.

Nothing is opened at import. Handles never become invalid: what is created here lives as long as the process. A child
that was forked after the driver was initialised, by whomever, cannot use CUDA, so every use there is refused.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

from attnres_aot.errors import DriverError
from attnres_aot.spec.toolkits import DRIVER_RELEASES, Cuda

LIBRARY_NAME = "libcuda.so.1"
"""The driver's library, as the dynamic linker finds it."""
MIN_CUDA = (12, 4)
"""Oldest CUDA version whose driver has every function called here (the newest is `cuKernelGetParamInfo`)."""
MIN_DRIVER = DRIVER_RELEASES[MIN_CUDA]
"""The Linux driver release that came with MIN_CUDA."""
STUB_LIBRARY = 34
"""CUDA_ERROR_STUB_LIBRARY: the answer of the toolkit's library that programs are linked against, to every call."""
STUB_NAME = "CUDA_ERROR_STUB_LIBRARY"
"""Its name."""
STUB_FOUND = "the {name} that was found is the CUDA toolkit's link-time stub"
"""What is the case, where that library is found in place of the driver."""
STUB_ADVICE = "take the folder of the toolkit's stubs out of LD_LIBRARY_PATH and of the linker's configuration"
"""What to do about it."""
INVALID_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT: this thread has no current context."""
WRONG_CONTEXT = frozenset({INVALID_CONTEXT, 400, 709})
"""What a launch answers while no context is current, or another one than its own (INVALID_HANDLE, as handles belong to
a context), or one that is gone (CONTEXT_IS_DESTROYED)."""

FUNCTIONS = (
    "cuCtxGetCurrent",
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuCtxSetCurrent",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDevicePrimaryCtxRetain",
    "cuDriverGetVersion",
    "cuFuncLoad",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuInit",
    "cuKernelGetAttribute",
    "cuKernelGetFunction",
    "cuKernelGetParamInfo",
    "cuKernelSetAttribute",
    "cuLaunchKernelEx",
    "cuLibraryGetKernel",
    "cuLibraryLoadData",
    "cuMemHostAlloc",
    "cuStreamIsCapturing",
    "cuThreadExchangeStreamCaptureMode",
)
"""Every driver function that the loader calls."""

_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_NAME_BYTES = 256
_INVALID_VALUE, _NOT_INITIALIZED = 1, 3
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_FORKED = (
    "this process was forked after its parent had initialised CUDA, and CUDA does not survive a fork: start workers "
    "with the 'spawn' or 'forkserver' method, or use CUDA (torch's included) in the worker only"
)
_CAPTURE_ADVICE = (
    "a stream capture forbids this; make and bind consumers and producers before capturing, which puts on the device "
    "all that their launches need"
)
_ADVICE = {
    2: "free device memory, or load the bundle before the engine takes all of it",
    100: "no GPU is visible: check nvidia-smi, CUDA_VISIBLE_DEVICES and the container's --gpus option",
    200: "the image is damaged or of another toolkit generation: run `attnres-aot verify BUNDLE`",
    201: "make the device current on this thread first, e.g. with torch.cuda.set_device",
    400: "the stream belongs to another device or context, or is gone: launch on a stream of the bundle's device",
    209: "the bundle's code does not run on this GPU: build one for its arch (`attnres-aot doctor` names it)",
    300: "the bundle's file was not accepted: run `attnres-aot verify BUNDLE`",
    700: "an earlier kernel on this device accessed invalid memory and the process cannot go on: find it with "
    "CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer",
    701: "too many resources for this GPU: the bundle was built for another one",
    702: "a kernel ran for too long: is a mailbox's publisher missing?",
    719: "an earlier kernel on this device failed and the process cannot go on: find it with CUDA_LAUNCH_BLOCKING=1; "
    "a ring consumer with a spin budget stops this way when its publisher is missing (attnres_aot.ring_fault())",
    802: "start the fabric manager (nvidia-fabricmanager), which multi-GPU systems need",
    803: "driver library and kernel module are of different releases: reboot after the driver update, or remove the "
    "driver library that the container brings",
    804: "this GPU does not support the CUDA compatibility package: remove it from LD_LIBRARY_PATH",
    **dict.fromkeys(range(900, 910), _CAPTURE_ADVICE),
    901: "an earlier call ended the capture of this stream: the first error after the capture began says which",
    912: "this GPU cannot place the kernel's cluster: is it a MIG slice? Use a larger one",
}


class Driver:
    """The functions of an opened and initialised driver library.

    `lib` is the `ctypes` library: its functions have no declared argument types, so callers pass ctypes instances.
    `cuda` is the CUDA version that it serves.
    """

    __slots__ = ("_contexts", "_lock", "cuda", "lib")

    def __init__(self, lib: Any, cuda: Cuda) -> None:
        self.lib = lib
        self.cuda = cuda
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._lock = threading.Lock()

    def check(self, status: int, what: str) -> None:
        """Raises for a status other than success.

        Args:
          status: a CUresult.
          what: what was being done, to complete "the CUDA driver refused to ...".

        Raises:
          DriverError: `status` is not 0; carries the driver's name for it and advice.
        """
        if status:
            raise self.error(status, what)

    def error(self, status: int, what: str) -> DriverError:
        """Returns the error for a failed driver call."""
        word, text = error_name(self.lib, status), ctypes.c_char_p()
        self.lib.cuGetErrorString(status, ctypes.byref(text))
        explained = f" ({text.value.decode('ascii', 'replace')})" if text.value else ""
        advice = _ADVICE.get(status, "run `attnres-aot doctor` for the state of this machine")
        return DriverError(f"the CUDA driver refused to {what}: {word}{explained}; {advice}")

    def device_count(self) -> int:
        """Returns how many devices this process sees."""
        count = ctypes.c_int()
        self.check(self.lib.cuDeviceGetCount(ctypes.byref(count)), "count the devices")
        return count.value

    def capability(self, ordinal: int) -> tuple[int, int]:
        """Returns the compute capability (major, minor) of a device; needs no context."""
        device = self._device(ordinal)
        values = []
        for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR):
            value = ctypes.c_int()
            status = self.lib.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            self.check(status, f"tell the compute capability of device {ordinal}")
            values.append(value.value)
        return values[0], values[1]

    def context(self, ordinal: int) -> ctypes.c_void_p:
        """Returns the primary context of a device (the one torch uses), retained for the life of the process."""
        with self._lock:
            found = self._contexts.get(ordinal)
            if found is None:
                found = ctypes.c_void_p()
                status = self.lib.cuDevicePrimaryCtxRetain(ctypes.byref(found), self._device(ordinal))
                self.check(status, f"open device {ordinal}")
                self._contexts[ordinal] = found
        return found

    def parameters(self, kernel: ctypes.c_void_p, what: str) -> list[tuple[int, int]]:
        """Returns (offset, size) of every parameter of a kernel, in bytes and in order."""
        found: list[tuple[int, int]] = []
        index, offset, size = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_size_t()
        arguments = (kernel, index, ctypes.byref(offset), ctypes.byref(size))  # made once: an image has some 30 of them
        ask = self.lib.cuKernelGetParamInfo
        while True:
            index.value = len(found)
            status = ask(*arguments)
            if status == _INVALID_VALUE:
                return found
            self.check(status, f"describe the parameters of {what}")
            found.append((offset.value, size.value))

    def _device(self, ordinal: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self.check(self.lib.cuDeviceGet(ctypes.byref(device), ordinal), f"find device {ordinal}")
        return device


class Current:
    """Makes a device's primary context current within a `with` block and restores what was current before."""

    __slots__ = ("_driver", "_ordinal")

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self._driver, self._ordinal = driver, ordinal

    def __enter__(self) -> None:
        context = self._driver.context(self._ordinal)
        self._driver.check(self._driver.lib.cuCtxPushCurrent_v2(context), f"make device {self._ordinal} current")

    def __exit__(self, *_: object) -> None:
        popped = ctypes.c_void_p()
        self._driver.lib.cuCtxPopCurrent_v2(ctypes.byref(popped))


class Relaxed:
    """Lets this thread allocate and load within a `with` block while streams are being captured, by it or by others.

    Without it either ends every capture of this thread that is not relaxed, and every global one of other threads. It
    is right for what does not belong to any graph: code and memory that stay for the life of the process.
    """

    __slots__ = ("_driver", "_mode")

    def __init__(self, driver: Driver) -> None:
        self._driver, self._mode = driver, ctypes.c_int(_RELAXED)

    def __enter__(self) -> None:
        self._exchange()

    def __exit__(self, *_: object) -> None:
        self._exchange()

    def _exchange(self) -> None:
        status = self._driver.lib.cuThreadExchangeStreamCaptureMode(ctypes.byref(self._mode))
        self._driver.check(status, "change how this thread takes part in stream captures")


class _Process:
    """What this process knows of the driver; replaced as a whole by tests."""

    __slots__ = ("driver", "forked", "lock")

    def __init__(self) -> None:
        self.driver: Driver | None = None
        self.forked = False
        self.lock = threading.Lock()


_process = _Process()


def open_driver() -> Driver:
    """Returns the driver, opening and initialising it on first use.

    Raises:
      DriverError: no driver library, too old, no GPU, or this process was forked after CUDA was initialised.
    """
    refuse_after_fork()
    process = _process
    with process.lock:
        if process.driver is None:
            process.driver = _open(LIBRARY_NAME)
            os.register_at_fork(after_in_child=_mark_forked)
        return process.driver


def refuse_after_fork() -> None:
    """Raises if this process was forked after CUDA was initialised in its parent.

    Raises:
      DriverError: it was.
    """
    if _process.forked:
        raise DriverError(_FORKED)


def _mark_forked() -> None:
    if _process.driver is not None:
        _process.forked = True


def open_library(name: str) -> Any:
    """Opens a shared library by name; raises OSError."""
    return ctypes.CDLL(name)


def missing_functions(lib: Any) -> tuple[str, ...]:
    """Returns those of FUNCTIONS that an opened library lacks."""
    return tuple([function for function in FUNCTIONS if not hasattr(lib, function)])


def served_cuda(lib: Any) -> Cuda | None:
    """Returns the CUDA version that an opened library serves; None for the toolkit's stub, which may leave it out."""
    version = ctypes.c_int()
    status = lib.cuDriverGetVersion(ctypes.byref(version)) if hasattr(lib, "cuDriverGetVersion") else STUB_LIBRARY
    return None if status == STUB_LIBRARY or not version.value else (version.value // 1000, version.value % 1000 // 10)


def error_name(lib: Any, status: int) -> str:
    """Returns the driver's name for a status, as far as the library knows it; a stub does not even know its own."""
    name = ctypes.c_char_p()
    if status == STUB_LIBRARY:
        return STUB_NAME
    if hasattr(lib, "cuGetErrorName"):
        lib.cuGetErrorName(status, ctypes.byref(name))
    return (name.value or b"CUDA error %d" % status).decode("ascii", "replace")


def start_and_list(lib: Any) -> tuple[int, list[tuple[str, tuple[int, int]]]]:
    """Initialises an opened library; creates no context.

    Returns:
      The first failing status (or 0), and the name and compute capability of each device listed until then.
    """
    count, found = ctypes.c_int(), []
    status: int = lib.cuInit(0) or lib.cuDeviceGetCount(ctypes.byref(count))
    for ordinal in range(0 if status else count.value):
        device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        name = ctypes.create_string_buffer(_NAME_BYTES)
        status = (
            lib.cuDeviceGet(ctypes.byref(device), ordinal)
            or lib.cuDeviceGetName(name, _NAME_BYTES, device)
            or lib.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device)
            or lib.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device)
        )
        if status:
            break
        found.append((name.value.decode("utf-8", "replace"), (major.value, minor.value)))
    return status, found


def _open(name: str) -> Driver:
    try:
        lib = open_library(name)
    except OSError as error:
        raise DriverError(
            f"no CUDA driver: {name} cannot be loaded ({error}); install the NVIDIA driver, or start the container "
            "with access to the GPU (--gpus)"
        ) from error
    found = served_cuda(lib)
    if found is None:
        raise DriverError(f"no CUDA driver: {STUB_FOUND.format(name=name)}; {STUB_ADVICE}")
    if found < MIN_CUDA:
        raise DriverError(
            f"the CUDA driver is too old: it serves CUDA {found[0]}.{found[1]}, but launching needs "
            f"{MIN_CUDA[0]}.{MIN_CUDA[1]} or newer; install driver {MIN_DRIVER} or later"
        )
    if missing := missing_functions(lib):
        raise DriverError(
            f"{name} lacks {', '.join(missing)}, though it claims CUDA {found[0]}.{found[1]}: it is not the NVIDIA "
            f"driver's own library; install driver {MIN_DRIVER} or later"
        )
    driver = Driver(lib, found)
    status = lib.cuInit(0)
    if status == _NOT_INITIALIZED:  # what it answers in a child of a process that had initialised it
        raise DriverError(_FORKED)
    driver.check(status, "start")
    return driver

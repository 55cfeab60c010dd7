"""Everything that is asked of torch about devices and streams.

A launch needs two facts per call: the current stream of the tensors' device and, where there are several devices, the
current device. Torch's own cheap functions for both are private, so each has a public equal to fall back on.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from operator import index
from typing import Any

import torch

from attnres_aot.errors import DriverError, OperandError, UsageError
from attnres_aot.records import record
from attnres_aot.runtime.cuda.driver import Current, Relaxed, open_driver

_CAPTURE_IMPLICIT = 906  # the legacy stream was asked about while another stream was being captured
_opened: set[tuple[int, int]] = set()  # (device, device whose memory it may access)


@record(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class TorchDevice:
    """One CUDA device, as torch and as the driver name it."""

    device: torch.device
    """What tensors on the device report."""
    ordinal: int
    """Device number of torch and of the driver, which both count under CUDA_VISIBLE_DEVICES."""
    tensor_index: int
    """What `tensor.get_device()` returns for its tensors."""
    stream: Callable[[int], int]
    """Returns the raw handle of the current stream of a device number."""
    current: Callable[[], int] | None
    """Returns the number of the current device; None where there is only one device."""


def pick_device(device: torch.device | str | int | None = None) -> TorchDevice:
    """Returns the CUDA device that a caller means.

    Args:
      device: anything torch takes for a device; None is torch's current device.

    Raises:
      DriverError: torch has no CUDA, there is no usable driver, or no GPU.
      UsageError: not a CUDA device, or a number beyond the devices that are there.
    """
    if not cuda_version():
        raise DriverError(
            f"this torch ({torch.__version__}) was built without CUDA, so nothing can be launched; install a CUDA build"
        )
    count = open_driver().device_count()
    wanted = torch.device("cuda") if device is None else torch.device(device)
    if wanted.type != "cuda":
        raise UsageError(f"device {device!r} is a {wanted.type} device; the kernels run on CUDA devices only")
    number: int | None = wanted.index
    ordinal = torch.cuda.current_device() if number is None else number
    if not 0 <= ordinal < count:
        raise UsageError(f"there is no device {device!r}: this process sees {count}, numbered from 0")
    return TorchDevice(
        device=torch.device("cuda", ordinal),
        ordinal=ordinal,
        tensor_index=ordinal,
        stream=_stream_reader(),
        current=_device_reader() if count > 1 else None,
    )


def check_device(name: str, tensor: torch.Tensor, device: TorchDevice) -> None:
    """Checks that an operand is where the code of a bundle runs.

    Raises:
      OperandError: it is elsewhere.
    """
    if tensor.get_device() != device.tensor_index or tensor.device.type != device.device.type:
        raise OperandError(f"{name}: on {tensor.device}, but the bundle was loaded for {device.device}")


def open_memory_of(name: str, tensor: torch.Tensor, device: TorchDevice) -> None:
    """Lets kernels on `device` access an operand that may be in the memory of another device of this process.

    Raises:
      OperandError: the device cannot reach that memory.
      DriverError: it has not accessed it before, and a current stream is being captured.
    """
    if tensor.device.type != device.device.type:
        check_device(name, tensor, device)
    if tensor.get_device() == device.tensor_index:
        return
    pair = (device.ordinal, tensor.get_device())
    if pair in _opened:
        return
    if not torch.cuda.can_device_access_peer(*pair):
        raise OperandError(
            f"{name}: on {tensor.device}, whose memory {device.device} cannot access; use two devices that NVLink or "
            "PCIe peer access connects ('nvidia-smi topo -p2p w' lists them)"
        )
    if is_capturing(device.ordinal, device.stream) or is_capturing(pair[1], device.stream):
        raise DriverError(
            f"{name}: on {tensor.device}, whose memory {device.device} has not accessed yet, and opening it takes a "
            "copy, which a stream capture forbids; make one publisher into that device's memory before capturing"
        )
    with outside_captures(device.device, tensor.device):
        # Torch opens a device's memory to another when it first copies between them, and only torch knows how it has
        # mapped the memory that it hands out.
        torch.empty(1, device=tensor.device).copy_(torch.empty(1, device=device.device))
    _opened.add(pair)


def lasting_byte(device: TorchDevice) -> torch.Tensor:
    """Returns a tensor of one byte that belongs to no graph's memory, even if it is made while one is captured."""
    with outside_captures(device.device):
        return torch.empty(1, dtype=torch.int8, device=device.device)


@contextlib.contextmanager
def outside_captures(*devices: torch.device) -> Iterator[None]:
    """Keeps what torch does on devices out of graphs that are being captured, and from ending their captures.

    Torch gives memory of the graph to what a capturing stream allocates, so the default streams are made current, which
    cannot be captured.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(Relaxed(open_driver()))
        for device in devices:
            if device.type == "cuda":
                stack.enter_context(torch.cuda.stream(torch.cuda.default_stream(device)))
        yield


def is_capturing(ordinal: int, stream: Callable[[int], int]) -> bool:
    """Tells whether the current stream of a device number is being captured, or cannot be asked because another is.

    Args:
      ordinal: device number.
      stream: returns the raw handle of the current stream of a device number.
    """
    driver, state = open_driver(), ctypes.c_int()
    with Current(driver, ordinal):
        status = driver.lib.cuStreamIsCapturing(ctypes.c_void_p(stream(ordinal)), ctypes.byref(state))
    if status == _CAPTURE_IMPLICIT:
        return True
    driver.check(status, f"tell whether the current stream of device {ordinal} is being captured")
    return state.value != 0


def stream_handle(stream: Any, device: TorchDevice) -> int:
    """Returns the raw handle of a stream that a caller names.

    Args:
      stream: a handle, torch's stream, an object of the `__cuda_stream__` protocol, or one that `int` takes, as
        cuda.bindings' `CUstream` is.
      device: where it is to be launched.

    Raises:
      OperandError: it is no stream, or one of another device.
    """
    if isinstance(stream, torch.Stream) and stream.device != device.device:
        raise OperandError(f"stream is on {stream.device}, but the bundle was loaded for {device.device}")
    try:
        if isinstance(stream, (bool, torch.Tensor)):
            raise TypeError
        if hasattr(stream, "cuda_stream"):
            handle = index(stream.cuda_stream)
        elif hasattr(stream, "__cuda_stream__"):
            handle = index(stream.__cuda_stream__()[1])
        else:
            handle = stream.__int__()
        if not 0 <= handle < 1 << 64:
            raise ValueError
    except (AttributeError, TypeError, ValueError):
        found = repr(stream) if isinstance(stream, int) else type(stream).__name__
        raise OperandError(
            f"stream is {found}; a torch stream, a handle, an object that int() turns into one, or None for the "
            "current stream is wanted"
        ) from None
    return handle


def cuda_version() -> str | None:
    """Returns the CUDA version that torch was built with; None for a build without CUDA."""
    found: str | None = getattr(torch.version, "cuda", None)
    return found


def _stream_reader() -> Callable[[int], int]:
    fast: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # noqa: SLF001
    if fast is not None:
        return fast
    return lambda index: int(torch.cuda.current_stream(index).cuda_stream)


def _device_reader() -> Callable[[], int]:
    fast: Callable[[], int] | None = getattr(torch._C, "_cuda_getDevice", None)  # noqa: SLF001
    return torch.cuda.current_device if fast is None else fast

"""Everything that is asked of torch about devices and streams.

A launch needs two facts per call: the current stream of the tensors' device and, where there are several devices, the
current device. Torch's own cheap functions for both are private, so each has a public equal to fall back on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from attnres_aot.errors import DriverError, OperandError, UsageError
from attnres_aot.records import dataclass
from attnres_aot.runtime.driver import open_driver


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
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
    """
    if tensor.device.type != device.device.type:
        check_device(name, tensor, device)
    if tensor.get_device() == device.tensor_index:
        return
    if not torch.cuda.can_device_access_peer(device.ordinal, tensor.get_device()):
        raise OperandError(
            f"{name}: on {tensor.device}, whose memory {device.device} cannot access; use two devices that NVLink or "
            "PCIe peer access connects ('nvidia-smi topo -p2p w' lists them)"
        )
    # Torch opens a device's memory to another when it first copies between them.
    torch.empty(1, device=tensor.device).copy_(torch.empty(1, device=device.device))


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

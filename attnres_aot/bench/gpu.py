"""The GPU that is measured: its facts, memory in use, and waiting for it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from attnres_aot.doctor.machine import gather_driver

_L2_IF_UNKNOWN = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """What a report says about the GPU and the software above it."""

    name: str
    """Product name."""
    l2_bytes: int
    """Size of the L2."""
    driver: str
    """Version of the kernel module, or the CUDA version that the driver serves."""
    torch: str
    """Version of torch, with its CUDA version."""


def gpu_facts(device: torch.device) -> GpuFacts:
    """Asks torch and the driver about a device."""
    properties = torch.cuda.get_device_properties(device)
    driver = gather_driver()
    served = "unknown" if driver.cuda is None else f"CUDA {driver.cuda[0]}.{driver.cuda[1]}"
    return GpuFacts(
        name=properties.name,
        l2_bytes=int(getattr(properties, "L2_cache_size", 0)) or _L2_IF_UNKNOWN,
        driver=driver.kernel_module or served,
        torch=f"{torch.__version__} (CUDA {torch.version.cuda})",
    )


def host_bytes() -> int:
    """Returns the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def device_bytes(device: torch.device) -> int:
    """Returns the memory in use on a device, by every process on it."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free

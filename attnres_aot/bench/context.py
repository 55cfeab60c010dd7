"""Floors measured in the same run: the bandwidth of a copy, and an empty kernel in a consumer's launch shape."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial

import torch

from attnres_aot.bench.bare import Shape, bare_launch, load_empty_kernel
from attnres_aot.bench.clock import Call
from attnres_aot.bench.results import Context, EmptyTime
from attnres_aot.bench.rig import Rig, Timer
from attnres_aot.errors import DriverError
from attnres_aot.runtime.cuda.device import TorchDevice
from attnres_aot.runtime.cuda.driver import Current, Driver, open_driver

_MEMORY_COPY_BYTES = 512 << 20
_L2_SHARE = 8  # source and destination together take a quarter of the L2


def measure_context(rig: Rig, shape: Shape, rows: Sequence[int], pdl: Sequence[bool]) -> Context:
    """Measures the floors.

    Args:
      rig: what measures.
      shape: launch shape of a consumer, of which cluster and threads count.
      rows: row counts for the empty kernel.
      pdl: launch modes of the empty kernel.
    """
    device = rig.loaded.device
    empty: tuple[EmptyTime, ...] = ()
    notes: tuple[str, ...] = ()
    try:
        empty = measure_empty(device, rig.timer, shape, rows, pdl)
    except DriverError as error:
        notes = (f"the empty kernel was not measured: {error}",)
    return Context(
        memory_bytes_per_us=copy_bandwidth(device.device, rig.timer, _MEMORY_COPY_BYTES),
        l2_bytes_per_us=copy_bandwidth(device.device, rig.timer, rig.l2_bytes // _L2_SHARE),
        empty=empty,
        notes=notes,
    )


def copy_bandwidth(device: torch.device, timer: Timer, size: int) -> float:
    """Returns bytes read plus bytes written per microsecond by a copy of `size` bytes within the device."""
    source = torch.ones(size // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return 2.0 * size / timer([partial(target.copy_, source)])


def measure_empty(
    device: TorchDevice, timer: Timer, shape: Shape, rows: Sequence[int], pdl: Sequence[bool]
) -> tuple[EmptyTime, ...]:
    """Times the empty kernel.

    Raises:
      DriverError: the driver cannot compile it.
    """
    driver = open_driver()
    with Current(driver, device.ordinal):
        function = load_empty_kernel(driver)
    times = []
    for flag in pdl:
        for count in rows:
            grid = Shape(grid=shape.cluster * count, threads=shape.threads, cluster=shape.cluster, pdl=flag)
            launch = _on_current_stream(driver, function, grid, device)
            times.append(EmptyTime(rows=count, pdl=flag, us=timer([launch])))
    return tuple(times)


def _on_current_stream(driver: Driver, function: ctypes.c_void_p, shape: Shape, device: TorchDevice) -> Call:
    """Returns what launches on whatever stream is current then."""
    ready: dict[int, Callable[[], int]] = {}

    def launch() -> None:
        stream = device.stream(device.ordinal)
        if stream not in ready:
            ready[stream] = bare_launch(driver, function, shape, stream, b"")
        driver.check(ready[stream](), "launch the empty kernel")

    return launch

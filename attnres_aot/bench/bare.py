"""Launches through the driver with everything prebuilt: the yardstick of host cost, and the floor of an empty kernel.

Built here from the driver's documented structures and not from the loader's, so that it measures the driver call alone.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from attnres_aot.runtime.cuda.driver import Driver
from attnres_aot.runtime.cuda.modules import LoadedKernel
from attnres_aot.runtime.launch.packed import KIND_FORMATS

_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6  # CU_LAUNCH_ATTRIBUTE_*
_BUFFER_POINTER, _BUFFER_SIZE, _END = 1, 2, 0  # CU_LAUNCH_PARAM_*

_EMPTY_PTX = b"""
.version 7.8
.target sm_90
.address_size 64
.visible .entry attnres_empty() {
  griddepcontrol.launch_dependents;
  ret;
}
\0"""
"""A kernel that releases its dependents and ends; the driver compiles it, as only this measurement needs it."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a kernel is launched."""

    grid: int
    """CTAs, in x."""
    threads: int
    """Threads per CTA, in x."""
    cluster: int
    """CTAs per cluster, in x."""
    shared_bytes: int = 0
    """Dynamic shared memory per CTA."""
    pdl: bool = False
    """With programmatic stream serialization."""


def holding(call: partial[int], *objects: object) -> partial[int]:
    """Keeps objects alive as long as a call of the driver, which knows no more of them than addresses."""
    call.__dict__["objects"] = objects
    return call


def bare_launch(
    driver: Driver, function: ctypes.c_void_p, shape: Shape, stream: int, parameters: bytes, operands: object = None
) -> partial[int]:
    """Prepares a launch of which nothing is left to do but the driver's call.

    Args:
      driver: what is called.
      function: the kernel.
      shape: its launch shape.
      stream: where to.
      parameters: one block, as `pack_parameters` makes it.
      operands: whatever the addresses in `parameters` are of.

    Returns:
      What launches and returns the driver's status. It keeps everything that a launch reads, operands too, alive.
    """
    attributes = (_Attribute * 2)()
    attributes[0].id = _CLUSTER_DIMENSION
    attributes[0].value[0:3] = [shape.cluster, 1, 1]
    attributes[1].id = _PROGRAMMATIC_STREAM_SERIALIZATION
    attributes[1].value[0] = 1
    config = _Config(
        grid=(shape.grid, 1, 1),
        block=(shape.threads, 1, 1),
        shared_bytes=shape.shared_bytes,
        stream=stream,
        attributes=attributes,
        attribute_count=2 if shape.pdl else 1,
    )
    buffer = ctypes.create_string_buffer(parameters, max(1, len(parameters)))
    size = ctypes.c_size_t(len(parameters))
    extra = (ctypes.c_void_p * 5)(_BUFFER_POINTER, ctypes.addressof(buffer), _BUFFER_SIZE, ctypes.addressof(size), _END)
    last = ctypes.cast(extra, ctypes.c_void_p) if parameters else None
    call = partial(driver.lib.cuLaunchKernelEx, ctypes.c_void_p(ctypes.addressof(config)), function, None, last)
    return holding(call, attributes, config, buffer, size, extra, operands)


def pack_parameters(kernel: LoadedKernel, values: Mapping[str, int | float]) -> bytes:
    """Lays out arguments as the kernel's parameter list says; what is not mentioned is 0."""
    block = bytearray(max(param.offset + param.size for param in kernel.params))
    for param in kernel.params:
        struct.pack_into(KIND_FORMATS[param.kind], block, param.offset, values.get(param.name, 0))
    return bytes(block)


def load_empty_kernel(driver: Driver) -> ctypes.c_void_p:
    """Returns the empty kernel, compiled by the driver for the current device.

    Raises:
      DriverError: the driver has no PTX compiler here, or refused.
    """
    library, kernel, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    status = driver.lib.cuLibraryLoadData(
        ctypes.byref(library), ctypes.c_char_p(_EMPTY_PTX), None, None, 0, None, None, 0
    )
    driver.check(status, "compile the empty kernel")
    status = driver.lib.cuLibraryGetKernel(ctypes.byref(kernel), library, ctypes.c_char_p(b"attnres_empty"))
    driver.check(status, "find the empty kernel")
    driver.check(driver.lib.cuKernelGetFunction(ctypes.byref(function), kernel), "load the empty kernel")
    return function

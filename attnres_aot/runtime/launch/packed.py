"""Launches one kernel for operands of one geometry: everything but pointers and stream is packed beforehand.

A launch needs a block of memory that the driver reads: the configuration, its attributes and the parameters. Blocks
are kept in a stack per plan. A launch takes one, fills in what changed and puts it back, so that threads never share
one, and steady state allocates nothing. `list.pop` and `list.append` are atomic.

    0    CUlaunchConfig (56 bytes)
    64   the `extra` array: {BUFFER_POINTER, address, BUFFER_SIZE, address of the size, END} (40 bytes)
    104  size of the parameters
    112  CUlaunchAttribute[2] (72 bytes each)
    256  parameters, at the offsets of the manifest
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch

from attnres_aot.errors import DriverError
from attnres_aot.records import record
from attnres_aot.runtime.cuda.device import TorchDevice
from attnres_aot.runtime.cuda.driver import WRONG_CONTEXT, Current, Driver
from attnres_aot.runtime.cuda.fault import read_fault
from attnres_aot.runtime.cuda.modules import LoadedKernel

KIND_FORMATS = {"pointer": "<Q", "i32": "<i", "i64": "<q", "f32": "<f"}
"""How each kind of parameter is packed."""

_WORD = 8
_CONFIG = struct.Struct("<7I4xQQI")  # grid, block, shared memory; stream; attributes; their number
_STREAM_WORD = 32 // _WORD
_ATTRIBUTES_OFFSET = 40
_EXTRA_AT, _SIZE_AT, _ATTRIBUTES_AT, _PARAMETERS_AT = 64, 104, 112, 256
_EXTRA = struct.Struct("<5Q")
_BUFFER_POINTER, _BUFFER_SIZE, _END = 1, 2, 0  # CU_LAUNCH_PARAM_*
_ATTRIBUTE_BYTES = 72
_CLUSTER = struct.Struct("<I4x3I")
_FLAG = struct.Struct("<I4xi")
_CLUSTER_DIMENSION, _PDL = 4, 6  # CU_LAUNCH_ATTRIBUTE_*


class Slot:
    """One block of launch memory, used by one launch at a time."""

    __slots__ = ("call", "pointers", "stream", "words")

    def __init__(self, template: bytes, attribute_count: int, parameter_bytes: int, launch: Any, function: int) -> None:
        memory = bytearray(template)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        struct.pack_into("<QI", memory, _ATTRIBUTES_OFFSET, address + _ATTRIBUTES_AT, attribute_count)
        size_at = address + _SIZE_AT
        _EXTRA.pack_into(memory, _EXTRA_AT, _BUFFER_POINTER, address + _PARAMETERS_AT, _BUFFER_SIZE, size_at, _END)
        struct.pack_into("<Q", memory, _SIZE_AT, parameter_bytes)
        pointer = ctypes.c_void_p.from_param  # converts now what each call would convert otherwise
        self.call: Callable[[], int] = partial(
            launch, pointer(address), pointer(function), None, pointer(address + _EXTRA_AT)
        )
        self.words = memoryview(memory).cast("Q")
        self.pointers: tuple[int, ...] = ()
        self.stream = 0


@record(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Order:
    """What a plan is to launch."""

    driver: Driver
    """The opened driver."""
    kernel: LoadedKernel
    """The code."""
    device: TorchDevice
    """Where."""
    constants: Mapping[str, int | float]
    """Arguments that stay, by parameter name; what is not mentioned is 0."""
    pointers: tuple[str, ...]
    """Names of the parameters whose values come with each launch, in that order."""
    rows: int
    """Rows of each launch, at least 1."""
    pdl: bool
    """Launch with programmatic stream serialization."""
    accepts: Callable[..., bool]
    """Tells whether tensors have the geometry that the constants describe."""
    trusts: Callable[[torch.Tensor], bool] | None = None
    """Tells as much of `out` alone, which is enough while no address changes; None: it never is."""
    check: Callable[[tuple[int, ...]], None]
    """Raises if pointers cannot be launched; called when any is new."""
    moved: Callable[[], bool]
    """Tells whether bound memory, whose addresses are among the constants, is elsewhere now."""
    what: str
    """Names the launch in errors."""


class Plan:
    """Launches of one kernel for one geometry of operands.

    `accepts` tells whether tensors have that geometry. `launch` does it all; the two ways of launching that are used
    most (`PreparedAttnRes.run` and `run_ring`) take its steps themselves, which saves a call and its look-ups.
    """

    __slots__ = (
        "_check",
        "_device",
        "_driver",
        "_pointer_words",
        "_what",
        "accepts",
        "idle",
        "make_slot",
        "moved",
        "steps",
    )

    def __init__(self, order: Order) -> None:
        """Packs everything that stays."""
        kernel, device, driver = order.kernel, order.device, order.driver
        offsets = {param.name: param.offset for param in kernel.params}
        template, attribute_count = _template(kernel, order.constants, order.rows, pdl=order.pdl)
        function = kernel.function.value
        assert function is not None
        size = _parameter_bytes(kernel)
        self.make_slot = partial(Slot, template, attribute_count, size, driver.lib.cuLaunchKernelEx, function)
        self._pointer_words = tuple((_PARAMETERS_AT + offsets[name]) // _WORD for name in order.pointers)
        self.idle: list[Slot] = []
        self._driver, self._device = driver, device
        self._check, self._what = order.check, order.what
        self.accepts, self.moved = order.accepts, order.moved
        self.steps: Steps = (
            order.accepts, order.trusts, order.moved, self.idle.pop, self.idle.append,
            device.stream, device.ordinal, device.current, self,
        )  # fmt: skip

    def launch(self, pointers: tuple[int, ...], stream: int | None = None) -> None:
        """Launches on a stream of the device.

        Args:
          pointers: device addresses, in the order of the constructor's `pointers`.
          stream: raw handle of the stream; None is torch's current one.

        Raises:
          OperandError: checks are on and an address is unaligned, or operands overlap.
          DriverError: the driver refused the launch.
        """
        _, _, _, pop, push, current_stream, ordinal, current, _ = self.steps
        try:
            slot = pop()
        except IndexError:
            slot = self.make_slot()
        if stream is None:
            stream = current_stream(ordinal)
        if slot.pointers != pointers or slot.stream != stream:
            self.fill(slot, pointers, stream)
        call = slot.call
        if status := call() if current is None or current() == ordinal else self.call_elsewhere(slot):
            self.recover(slot, status)
        push(slot)

    def fill(self, slot: Slot, pointers: tuple[int, ...], stream: int) -> None:
        """Writes what changes from launch to launch: the operands' addresses, which are checked, and the stream.

        Raises:
          OperandError: checks are on and an address is unaligned, or operands overlap.
        """
        if slot.pointers != pointers:
            self._check(pointers)
            words = slot.words
            for word, pointer in zip(self._pointer_words, pointers):  # noqa: B905 - equal by construction; strict costs time
                words[word] = pointer
            slot.pointers = pointers
        if slot.stream != stream:
            slot.words[_STREAM_WORD] = stream
            slot.stream = stream

    def call_elsewhere(self, slot: Slot) -> int:
        """Launches while another device is current; returns the driver's status."""
        with Current(self._driver, self._device.ordinal):
            return slot.call()

    def recover(self, slot: Slot, status: int) -> None:
        """Launches again if all that was wrong is the context that is current on this thread; otherwise raises.

        A thread without one gets the device's primary context, as torch would give it. Where another library's is
        current, it stays so: torch's default stream, too, means that of the primary context.
        """
        if status in WRONG_CONTEXT:
            lib, found, mine = self._driver.lib, ctypes.c_void_p(), self._driver.context(self._device.ordinal)
            if lib.cuCtxGetCurrent(ctypes.byref(found)) or not found.value:
                lib.cuCtxSetCurrent(mine)
                status = slot.call()
            elif found.value != mine.value:
                status = self.call_elsewhere(slot)
        if status:
            raise self._refused(status)

    def _refused(self, status: int) -> DriverError:
        error = self._driver.error(status, f"launch {self._what} on {self._device.device}")
        fault = read_fault(self._device.ordinal)
        return error if fault is None else DriverError(f"{error}. What failed: {fault}")


Steps = tuple[
    Callable[..., bool],
    Callable[[torch.Tensor], bool] | None,
    Callable[[], bool],
    Callable[[], Slot],
    Callable[[Slot], None],
    Callable[[int], int],
    int,
    Callable[[], int] | None,
    Plan,
]
"""What a launch uses, for callers that do the steps of `Plan.launch` themselves: `accepts`, `trusts` and
`moved`; what takes a slot and puts it back; the device's current stream, its number, the current device; the plan. One
unpacking costs less than many look-ups."""


class NoPlan:
    """Stands in for a plan: accepts no tensors and launches nothing."""

    __slots__ = ("steps",)

    def __init__(self) -> None:
        self.steps = (self.accepts, *[None] * 8)  # what a caller unpacks before `accepts` refuses

    def accepts(self, *_: torch.Tensor) -> bool:
        """Returns False."""
        return False

    def moved(self) -> bool:
        """Returns False."""
        return False

    def launch(self, pointers: tuple[int, ...], stream: int | None = None) -> None:
        """Does nothing."""


Launcher = Plan | NoPlan
"""What a launch goes through."""
UNBOUND = cast("Plan", NoPlan())
"""Stands in before the first plan; as it accepts nothing, nothing else of it is used."""
NOTHING_TO_DO = NoPlan()
"""Stands in where there is nothing to launch."""


def _template(kernel: LoadedKernel, constants: Mapping[str, int | float], rows: int, *, pdl: bool) -> tuple[bytes, int]:
    """Returns launch memory without addresses, and the number of launch attributes in it."""
    image = kernel.image
    memory = bytearray(_PARAMETERS_AT + -(-_parameter_bytes(kernel) // _WORD) * _WORD)
    grid = image.cluster * -(-rows // image.rows_per_cluster)
    _CONFIG.pack_into(memory, 0, grid, 1, 1, image.block_threads, 1, 1, image.smem_dynamic_bytes, 0, 0, 0)
    _CLUSTER.pack_into(memory, _ATTRIBUTES_AT, _CLUSTER_DIMENSION, image.cluster, 1, 1)
    if pdl:
        _FLAG.pack_into(memory, _ATTRIBUTES_AT + _ATTRIBUTE_BYTES, _PDL, 1)
    for param in kernel.params:
        value = constants.get(param.name, 0)
        struct.pack_into(KIND_FORMATS[param.kind], memory, _PARAMETERS_AT + param.offset, value)
    return bytes(memory), 2 if pdl else 1


def _parameter_bytes(kernel: LoadedKernel) -> int:
    """Bytes of the parameter block to the last byte: the driver refuses a launch that is given more."""
    return max((param.offset + param.size for param in kernel.params), default=0)

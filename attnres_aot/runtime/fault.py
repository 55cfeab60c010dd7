"""Owns the records in which ring kernels say, before they trap, which launch waited in vain and for what.

A device has one record of four 32-bit words {tag, row, slot, vector}, in pinned host memory: its kernels write it with
one 16-byte store, and it stays readable after the trap has ended the CUDA context. The tag is the number of a launch
that was given a spin budget; 0 is an empty record. Records are never freed, because captured graphs hold their
addresses.
"""

from __future__ import annotations

import ctypes
import struct
import threading

from attnres_aot.records import dataclass
from attnres_aot.runtime.driver import Current, Driver, Relaxed, open_driver
from attnres_aot.variants import Variant

_RECORD = struct.Struct("<4i")
_VECTOR_ELEMS = 8
_PORTABLE_AND_MAPPED = 0x1 | 0x2  # CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_DEVICEMAP


@dataclass(frozen=True, slots=True, kw_only=True)
class RingLaunch:
    """What a tag stands for."""

    variant: Variant
    """Which consumer."""
    bundle: str
    """Name and arch of the bundle."""
    handle: int
    """`handle` of the PreparedAttnRes that launches it."""
    spin_budget: int
    """Polls for its rows after which it gives up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingFault:
    """What a ring kernel was waiting for when it gave up."""

    launch: RingLaunch
    """Which launch gave up."""
    device: int
    """Number of its device."""
    row: int
    """Mailbox row that was incomplete."""
    slot: int
    """Mailbox slot that was incomplete: which publisher is late or missing."""
    column: int
    """First of the 8 elements of the row that were incomplete. Others may have been, too."""

    @property
    def variant(self) -> Variant:
        """The consumer that gave up."""
        return self.launch.variant

    def __str__(self) -> str:
        launch = self.launch
        return (
            f"ring consumer {launch.variant} of {launch.bundle} gave up on cuda:{self.device} after "
            f"{launch.spin_budget} polls: slot {self.slot}, row {self.row}, elements {self.column} to "
            f"{self.column + _VECTOR_ELEMS - 1} of its mailbox were not published"
        )


_lock = threading.Lock()
_opening = threading.Lock()  # apart, so that launching and reading never wait for an allocation
_records: dict[int, ctypes.c_void_p] = {}  # device -> its record
_tags: dict[RingLaunch, int] = {}
_launches: list[RingLaunch] = []  # by tag - 1


def open_record(ordinal: int) -> int:
    """Returns the address of a device's record, the same for the host and for kernels, allocated on first use.

    Does no harm to streams that are being captured, on this thread or on others.

    Raises:
      DriverError: the driver refused.
    """
    driver = open_driver()
    record = _records.get(ordinal)
    if record is None:
        with _opening:
            record = _records.get(ordinal) or _allocate(driver, ordinal)
    assert record.value is not None
    return record.value


def _allocate(driver: Driver, ordinal: int) -> ctypes.c_void_p:
    record, size = ctypes.c_void_p(), ctypes.c_size_t(_RECORD.size)
    with Relaxed(driver), Current(driver, ordinal):
        status = driver.lib.cuMemHostAlloc(ctypes.byref(record), size, _PORTABLE_AND_MAPPED)
    driver.check(status, f"allocate the fault record of device {ordinal}")
    ctypes.memset(record, 0, _RECORD.size)
    _records[ordinal] = record
    return record


def fault_arguments(launch: RingLaunch, ordinal: int) -> dict[str, int]:
    """Returns the kernel arguments, by parameter name, with which a launch can report its fault."""
    address = open_record(ordinal)
    with _lock:
        tag = _tags.setdefault(launch, len(_launches) + 1)
        if tag > len(_launches):
            _launches.append(launch)
    return {"fault": address, "fault_tag": tag}


def read_fault(ordinal: int | None = None) -> RingFault | None:
    """Returns the fault of a device, or of any; None if no ring kernel has given up. Makes no CUDA call."""
    with _lock:
        for number, record in list(_records.items()):
            tag, row, slot, vector = _RECORD.unpack(ctypes.string_at(record, _RECORD.size))
            if ordinal in (None, number) and 1 <= tag <= len(_launches):
                launch = _launches[tag - 1]
                return RingFault(launch=launch, device=number, row=row, slot=slot, column=vector * _VECTOR_ELEMS)
    return None

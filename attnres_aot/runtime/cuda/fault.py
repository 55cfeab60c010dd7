"""Owns the records in which ring kernels say, before they trap, which launch waited in vain and for what.

A device has one record of four 32-bit words {tag, row, slot, vector}, in pinned host memory: its kernels write it with
one 16-byte store, and it stays readable after the trap has ended the CUDA context. Records are never freed, because
captured graphs hold their addresses.

A tag says who launched: which of the kinds of launch that were ever given a spin budget (variant, bundle, budget), and
which object, by a number that is never given to another. Captured graphs may outlive the object; their fault is then
one of a kind, without an object. Nothing is kept for objects that are gone. 0 is an empty record.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
import threading
import weakref

from attnres_aot.errors import UsageError
from attnres_aot.records import record
from attnres_aot.runtime.cuda.driver import Current, Driver, Relaxed, open_driver
from attnres_aot.spec.variants import Variant

_RECORD = struct.Struct("<4i")
_VECTOR_ELEMS = 8
_PORTABLE_AND_MAPPED = 0x1 | 0x2  # CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_DEVICEMAP


class Owner:
    """What an object that launches is known by in faults; lives as long as it."""

    __slots__ = ("__weakref__", "handle", "name", "number")

    def __init__(self, handle: int, name: str | None) -> None:
        """Takes the next number.

        Args:
          handle: `handle` of the object.
          name: its name, if it has one.
        """
        self.handle, self.name = handle, name
        with _lock:
            self.number = min(_next_number(), _MAX_NUMBER)  # beyond, faults name no object
            if self.number < _MAX_NUMBER:
                _owners[self.number] = self


@record(frozen=True, slots=True, kw_only=True)
class LaunchKind:
    """What launches of several objects have in common; the part of a fault that outlives them."""

    variant: Variant
    """Which consumer."""
    bundle: str
    """Name and arch of the bundle."""
    spin_budget: int
    """Polls for its rows after which it gives up."""


@record(frozen=True, slots=True, kw_only=True)
class RingLaunch:
    """Which launch gave up."""

    variant: Variant
    """Which consumer."""
    bundle: str
    """Name and arch of the bundle."""
    handle: int | None
    """`handle` of the PreparedAttnRes that launched it; None if that is gone, and a captured graph launched."""
    name: str | None
    """Its name, if it has one."""
    spin_budget: int
    """Polls for its rows after which it gives up."""


@record(frozen=True, slots=True, kw_only=True)
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
        named = f"{launch.variant}" if launch.name is None else f"{launch.variant} {launch.name!r}"
        return (
            f"ring consumer {named} of {launch.bundle} gave up on cuda:{self.device} after "
            f"{launch.spin_budget} polls: slot {self.slot}, row {self.row}, elements {self.column} to "
            f"{self.column + _VECTOR_ELEMS - 1} of its mailbox were not published"
        )


_KIND_BITS = 14
_MAX_KINDS = 1 << _KIND_BITS
_MAX_NUMBER = (1 << (31 - _KIND_BITS)) - 1  # a tag is a positive 32-bit integer

_lock = threading.Lock()
_opening = threading.Lock()  # apart, so that launching and reading never wait for an allocation
_records: dict[int, ctypes.c_void_p] = {}  # device -> its record
_kinds: dict[LaunchKind, int] = {}  # from 1 on
_owners: weakref.WeakValueDictionary[int, Owner] = weakref.WeakValueDictionary()  # from 1 on
_next_number = itertools.count(1).__next__


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


def fault_arguments(kind: LaunchKind, owner: Owner, ordinal: int) -> dict[str, int]:
    """Returns the kernel arguments, by parameter name, with which a launch can report its fault.

    Raises:
      UsageError: so many kinds of launch were given a spin budget that no tag is left.
    """
    address = open_record(ordinal)
    with _lock:
        number = _kinds.setdefault(kind, len(_kinds) + 1)
        if number >= _MAX_KINDS:
            del _kinds[kind]
            raise UsageError(
                f"spin_budget is {kind.spin_budget}, but {_MAX_KINDS - 1} different launches (variant, bundle, budget) "
                "have had one already, and a fault can name no more; use fewer different budgets"
            )
    return {"fault": address, "fault_tag": owner.number << _KIND_BITS | number}


def read_fault(ordinal: int | None = None) -> RingFault | None:
    """Returns the fault of a device, or of any; None if no ring kernel has given up. Makes no CUDA call."""
    with _lock:
        for number, record in list(_records.items()):
            tag, row, slot, vector = _RECORD.unpack(ctypes.string_at(record, _RECORD.size))
            if ordinal in (None, number) and tag > 0:
                launch = _launch(tag)
                return RingFault(launch=launch, device=number, row=row, slot=slot, column=vector * _VECTOR_ELEMS)
    return None


def _launch(tag: int) -> RingLaunch:
    """Returns what a tag stands for."""
    owner, wanted = _owners.get(tag >> _KIND_BITS), tag % _MAX_KINDS
    kind = next(kind for kind, number in _kinds.items() if number == wanted)
    return RingLaunch(
        variant=kind.variant,
        bundle=kind.bundle,
        handle=owner.handle if owner else None,
        name=owner.name if owner else None,
        spin_budget=kind.spin_budget,
    )

"""A ring consumer that gives up: what its launch carries, and who is told what was missing."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace

import pytest

import attnres_aot
from attnres_aot.errors import DriverError
from attnres_aot.runtime.loaded import LoadedBundle
from attnres_aot.variants import ConsumerKey

HIDDEN = 1024
LAUNCH_FAILED = 719
KEY = ConsumerKey(nb=2, has_delta=True)


@pytest.fixture
def make(bundle, weights):
    def make(*, slots=8, budget=1 << 20, key=KEY):
        mailbox = attnres_aot.new_mailbox(slots, 64, HIDDEN, "cpu")
        return attnres_aot.PreparedAttnRes(weights, key, 1e-5, bundle).bind_ring(mailbox, spin_budget=budget)

    return make


def give_up(stub, *, row: int, slot: int, vector: int, index: int = -1) -> None:
    """Does what the kernel of a launch does when it gives up, and what the driver answers from then on."""
    arguments = stub.launch(index).arguments()
    ctypes.memmove(arguments["fault"], struct.pack("<4i", arguments["fault_tag"], row, slot, vector), 16)
    stub.fail("cuLaunchKernelEx", LAUNCH_FAILED)


def test_a_budget_comes_with_a_record_and_a_tag(stub, make, operands):
    make(budget=77).run_ring(*operands().ring)
    arguments = stub.launch().arguments()
    assert arguments["spin_budget"] == 77
    assert arguments["fault"] % 16 == 0
    assert ctypes.string_at(arguments["fault"], 16) == bytes(16)
    assert arguments["fault_tag"] == 1


def test_without_a_budget_there_is_no_record(stub, make, operands):
    prepared = make(budget=0)
    prepared.run_ring(*operands().ring)
    arguments = stub.launch().arguments()
    assert (arguments["spin_budget"], arguments["fault"], arguments["fault_tag"]) == (0, 0, 0)
    assert stub.calls("cuMemHostAlloc") == 0
    assert attnres_aot.ring_fault() is None
    assert prepared.fault() is None


def test_ordinary_launches_carry_no_record(stub, make, operands):
    make().run(*operands().ordinary)
    arguments = stub.launch().arguments()
    assert (arguments["spin_budget"], arguments["fault"], arguments["fault_tag"]) == (0, 0, 0)


def test_the_record_is_allocated_by_binding_and_not_by_a_launch_that_may_be_captured(stub, make, operands):
    prepared = make()
    assert stub.calls("cuMemHostAlloc") == 1
    prepared.run_ring(*operands().ring)
    make(slots=16).run_ring(*operands().ring)
    assert stub.calls("cuMemHostAlloc") == 1


def test_every_variant_and_every_object_has_a_tag_of_its_own(stub, make, operands):
    one, other = make(), make()
    one.run_ring(*operands(rows=3).ring)
    one.run_ring(*operands(rows=5).ring)
    other.run_ring(*operands(rows=3).ring)
    one.bind_aux().run_ring(*operands(rows=3).ring, operands().aux)
    assert [stub.launch(i).arguments()["fault_tag"] for i in range(4)] == [1, 1, 2, 3]


def test_the_fault_names_variant_row_slot_and_elements(stub, make, operands):
    one, other = make(), make(slots=16)
    one.run_ring(*operands().ring)
    other.run_ring(*operands().ring)
    give_up(stub, row=2, slot=5, vector=100)
    fault = attnres_aot.ring_fault()
    assert (str(fault.variant), fault.row, fault.slot, fault.column) == ("nb2-delta-ring16", 2, 5, 800)
    assert (fault.device, fault.launch.bundle, fault.launch.spin_budget) == (0, "tiny-sm_90", 1 << 20)
    assert str(fault) == (
        "ring consumer nb2-delta-ring16 of tiny-sm_90 gave up on cuda:0 after 1048576 polls: slot 5, row 2, "
        "elements 800 to 807 of its mailbox were not published"
    )


def test_only_the_object_that_gave_up_says_so(stub, make, operands):
    one, other = make(), make()
    one.run_ring(*operands().ring)
    other.run_ring(*operands().ring)
    give_up(stub, row=0, slot=1, vector=2, index=0)
    assert one.fault() == attnres_aot.ring_fault()
    assert one.fault().launch.handle == one.handle
    assert other.fault() is None


def test_the_next_launch_of_anything_says_what_gave_up(stub, make, operands):
    prepared = make()
    prepared.run_ring(*operands().ring)
    give_up(stub, row=1, slot=7, vector=0)
    told = (
        "launch nb2-delta for 3 rows .*LAUNCH_FAILED.* ring consumer nb2-delta-ring8 .*slot 7, row 1, elements 0 to 7"
    )
    with pytest.raises(DriverError, match=told):
        prepared.run(*operands().ordinary)


def test_a_refusal_with_no_fault_blames_no_ring(stub, make, operands):
    prepared = make()
    prepared.run_ring(*operands().ring)
    stub.fail("cuLaunchKernelEx", LAUNCH_FAILED)
    with pytest.raises(DriverError) as caught:
        prepared.run(*operands().ordinary)
    assert "ring consumer nb2" not in str(caught.value)


def test_devices_have_records_of_their_own(stub, bundle, make, operands, weights):
    stub.machine(devices=2)
    make().run_ring(*operands().ring)
    there = LoadedBundle(bundle.bundle, stub.device(1, several=True))
    stub.current_device = 1
    stub.lib.stub_make_current(1)
    mailbox = attnres_aot.new_mailbox(8, 64, HIDDEN, "cpu")
    other = attnres_aot.PreparedAttnRes(weights, KEY, 1e-5, there).bind_ring(mailbox, spin_budget=5)
    other.run_ring(*operands().ring)
    assert stub.launch(0).arguments()["fault"] != stub.launch(1).arguments()["fault"]
    give_up(stub, row=0, slot=0, vector=1)
    assert attnres_aot.ring_fault(0) is None
    assert attnres_aot.ring_fault("cuda:0") is None
    assert attnres_aot.ring_fault("cuda:1") == attnres_aot.ring_fault(1) == attnres_aot.ring_fault("cuda")
    assert attnres_aot.ring_fault().device == 1


def test_a_refused_record_is_a_driver_error_and_binds_nothing(stub, bundle, weights):
    stub.fail("cuMemHostAlloc", 2)
    prepared = attnres_aot.PreparedAttnRes(weights, KEY, 1e-5, bundle)
    mailbox = attnres_aot.new_mailbox(8, 64, HIDDEN, "cpu")
    with pytest.raises(DriverError, match=r"allocate the fault record of device 0: CUDA_ERROR_OUT_OF_MEMORY"):
        prepared.bind_ring(mailbox, spin_budget=1)
    assert prepared.mailbox is None
    stub.mend("cuMemHostAlloc")
    assert prepared.bind_ring(mailbox, spin_budget=1).mailbox is mailbox


def test_reading_a_fault_makes_no_driver_call(stub, make, operands, monkeypatch):
    make().run_ring(*operands().ring)
    give_up(stub, row=0, slot=0, vector=0)
    monkeypatch.setattr("attnres_aot.runtime.driver._process", SimpleNamespace(forked=True))
    assert attnres_aot.ring_fault().slot == 0

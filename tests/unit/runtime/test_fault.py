"""A ring consumer that gives up: what its launch carries, and who is told what was missing."""

from __future__ import annotations

import ctypes
import gc
import itertools
import struct
from types import SimpleNamespace

import pytest

import attnres_aot
from attnres_aot.errors import DriverError, UsageError
from attnres_aot.runtime.cuda import fault
from attnres_aot.runtime.find.loaded import LoadedBundle
from attnres_aot.spec.variants import ConsumerKey

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
    assert 0 < arguments["fault_tag"] < 2**31


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
    tags = [stub.launch(i).arguments()["fault_tag"] for i in range(4)]
    assert tags[0] == tags[1]
    assert len(set(tags)) == 3


def test_objects_that_are_gone_leave_nothing_behind(stub, make, operands):
    before = len(fault._owners)
    for _ in range(100):
        make().run_ring(*operands().ring)
    gc.collect()
    assert len(fault._owners) == before
    assert len(fault._kinds) == 1
    assert len({stub.launch(i).arguments()["fault_tag"] for i in range(100)}) == 100


def test_a_captured_launch_of_an_object_that_is_gone_is_never_taken_for_another(stub, make, operands):
    gone = make(budget=123)
    gone.run_ring(*operands().ring)
    del gone
    gc.collect()
    others = [make() for _ in range(20)]
    for other in others:
        other.run_ring(*operands().ring)
    give_up(stub, row=1, slot=2, vector=3, index=0)
    found = attnres_aot.ring_fault()
    assert (found.launch.handle, found.launch.spin_budget, found.row) == (None, 123, 1)
    assert str(found).startswith("ring consumer nb2-delta-ring8 of tiny-sm_90 gave up on cuda:0 after 123 polls")
    assert [other.fault() for other in others] == [None] * 20


def test_when_numbers_run_out_faults_name_no_object(stub, make, operands, monkeypatch):
    monkeypatch.setattr(fault, "_next_number", itertools.count(fault._MAX_NUMBER).__next__)
    consumers = [make(), make()]
    for consumer in consumers:
        consumer.run_ring(*operands().ring)
    give_up(stub, row=0, slot=1, vector=2)
    assert attnres_aot.ring_fault().launch.handle is None
    assert str(attnres_aot.ring_fault().variant) == "nb2-delta-ring8"
    assert [consumer.fault() for consumer in consumers] == [None, None]


def test_too_many_kinds_of_launch_are_refused(stub, make, operands, monkeypatch):
    monkeypatch.setattr(fault, "_MAX_KINDS", 3)
    for budget in (1, 2, 2):
        make(budget=budget).run_ring(*operands().ring)
    with pytest.raises(UsageError, match=r"spin_budget is 3, but 2 different launches .* use fewer different budgets"):
        make(budget=3).run_ring(*operands().ring)
    make(budget=1).run_ring(*operands().ring)


def test_a_fault_says_the_name(stub, bundle, weights, operands):
    mailbox = attnres_aot.new_mailbox(8, 64, HIDDEN, "cpu")
    named = attnres_aot.PreparedAttnRes(weights, KEY, 1e-5, bundle, name="layers.3").bind_ring(mailbox, spin_budget=5)
    named.run_ring(*operands().ring)
    give_up(stub, row=0, slot=1, vector=2)
    assert named.fault().launch.name == "layers.3"
    assert str(named.fault()).startswith("ring consumer nb2-delta-ring8 'layers.3' of tiny-sm_90 gave up")


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
    monkeypatch.setattr("attnres_aot.runtime.cuda.driver._process", SimpleNamespace(forked=True))
    assert attnres_aot.ring_fault().slot == 0

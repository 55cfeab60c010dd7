"""Copies of what is bound: a copy is an object of its own; deep copies and pickles are refused with a way out."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import attnres_aot
from attnres_aot.errors import UsageError
from attnres_aot.runtime import api
from attnres_aot.runtime.consumer import Consumer
from attnres_aot.runtime.cuda import fault
from attnres_aot.spec.variants import parse_variant

from .conftest import HIDDEN

BF16 = torch.bfloat16


@pytest.fixture
def prepared(bundle, weights, key):
    return attnres_aot.PreparedAttnRes(weights, key, 1e-5, bundle, name="layers.0")


@pytest.fixture
def producing(stub, bundles):
    return api.load(bundles.write(["nb2-delta"], producers=("statistics-nb2", "publish"), name="producing"))


def mailbox() -> torch.Tensor:
    return attnres_aot.new_mailbox(8, 64, HIDDEN, "cpu")


def test_a_copy_launches_for_itself(stub, prepared, operands):
    mine, other = mailbox(), mailbox()
    prepared.bind_ring(mine, spin_budget=7)
    prepared.run_ring(*operands().ring)
    twin = copy.copy(prepared)
    assert twin.handle != prepared.handle
    assert (twin.name, prepared.name) == (None, "layers.0")
    twin.run_ring(*operands().ring)
    twin.bind_ring(other, spin_budget=7)
    for consumer, box in ((twin, other), (prepared, mine), (twin, other)):
        consumer.run_ring(*operands().ring)
        assert stub.launch().arguments()["source"] == box.data_ptr()
    tags = [stub.launch(index).arguments()["fault_tag"] for index in range(5)]
    assert tags[0] == tags[3]
    assert len(set(tags)) == 2
    twin.checks = False
    assert prepared.checks


def test_a_copy_shares_what_is_bound(stub, prepared, operands, weights):
    twin = copy.copy(prepared.bind_aux())
    given = operands()
    twin.run(*given.ordinary, given.aux)
    torch.ops.attnres_aot.run(twin.handle, *given.ordinary, None, None, None)
    found = [stub.launch(index).arguments()["norm"] for index in range(2)]
    assert found == [weights[0].data_ptr()] * 2


def test_copies_of_subclasses_keep_their_attributes(bundle, weights, key):
    class Mine(attnres_aot.PreparedAttnRes):
        pass

    consumer = Mine(weights, key, 1e-5, bundle)
    consumer.layer = 7
    twin = copy.copy(consumer)
    assert (type(twin), twin.layer) == (Mine, 7)


def test_copies_of_producers_launch_for_themselves(stub, producing, weights):
    box, mixture, scal = mailbox(), torch.zeros(8, HIDDEN), torch.zeros(8, 2)
    publisher = attnres_aot.PreparedPublish(box, 1, producing, name="a")
    statistics = attnres_aot.PreparedStatistics(*weights[:2], 1e-5, mixture, scal, nb=2, bundle=producing)
    rows, blocks = torch.zeros(3, HIDDEN, dtype=BF16), torch.zeros(3, 2, HIDDEN, dtype=BF16)
    publisher.run(rows)
    for one, given in ((publisher, rows), (statistics, blocks)):
        twin = copy.copy(one)
        assert twin.handle != one.handle
        assert twin._route is not one._route
        twin.run(given)
    assert stub.launch_count() == 3


@pytest.mark.parametrize("kind", ["consumer", "launched", "publisher", "statistics", "bundle", "variant"])
def test_what_cannot_be_sent_says_so(stub, bundle, producing, prepared, operands, weights, kind):
    made = {
        "consumer": lambda: prepared,
        "launched": lambda: prepared,
        "publisher": lambda: attnres_aot.PreparedPublish(mailbox(), 1, producing),
        "statistics": lambda: attnres_aot.PreparedStatistics(
            *weights[:2], 1e-5, torch.zeros(8, HIDDEN), torch.zeros(8, 2), nb=2, bundle=producing
        ),
        "bundle": lambda: bundle,
        "variant": lambda: Consumer(bundle=bundle, variant=parse_variant("nb2-delta"), capacity=0),
    }[kind]()
    if kind == "launched":
        prepared.run(*operands().ordinary)
    with pytest.raises(UsageError, match=r"cannot be pickled: it holds .*of this process; send"):
        pickle.dumps(made)
    if kind in ("bundle", "variant"):
        assert copy.copy(made) is copy.deepcopy(made) is made
    else:
        with pytest.raises(UsageError, match=r"cannot be deep-copied: it is bound to tensors by address.* copy.copy"):
            copy.deepcopy(made)


def test_a_model_that_holds_one_says_so_when_it_is_copied(prepared):
    model = torch.nn.Linear(2, 2)
    model.prepared = prepared
    with pytest.raises(UsageError, match=r"a PreparedAttnRes cannot be deep-copied"):
        copy.deepcopy(model)


def test_statistics_that_a_compiler_copied_leave_no_object_behind(stub, prepared, operands):
    prepared.bind_statistics(torch.zeros(64, HIDDEN), torch.zeros(64, 2), [3]).bind_ring(mailbox(), spin_budget=9)
    given, copies = operands(rows=3), (torch.zeros(64, HIDDEN), torch.zeros(64, 2))
    owners = len(fault._owners)
    torch.ops.attnres_aot.run_ring(prepared.handle, *given.ring, None, *copies, None)
    torch.ops.attnres_aot.run_ring(prepared.handle, *given.ring, None, *prepared.statistics, None)
    tags = {stub.launch(index).arguments()["fault_tag"] for index in range(2)}
    assert len(tags) == 1
    assert len(fault._owners) == owners

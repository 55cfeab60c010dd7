"""The custom operators: what torch requires of them, and consumers inside compiled graphs."""

from __future__ import annotations

import gc

import pytest
import torch

import attnres_aot
from attnres_aot.errors import OperandError, UsageError
from attnres_aot.spec.variants import ConsumerKey


@pytest.fixture
def prepared(bundle, weights, key):
    return attnres_aot.PreparedAttnRes(weights, key, 1e-5, bundle)


@pytest.fixture
def writing(bundle, weights):
    return attnres_aot.PreparedAttnRes(weights, ConsumerKey(nb=2, has_delta=True, write=2), 1e-5, bundle)


@pytest.fixture
def mailbox():
    return attnres_aot.new_mailbox(8, 64, 1024, "cpu")


def test_opcheck_passes(prepared, writing, mailbox, operands):
    given = operands()
    mixture, scal = torch.zeros(64, 1024), torch.zeros(64, 2)
    for consumer in (prepared, writing):
        consumer.bind_ring(mailbox).bind_aux().bind_statistics(mixture, scal, [3])
    ops = torch.ops.attnres_aot
    for consumer, run, ring in ((prepared, ops.run, ops.run_ring), (writing, ops.run_write, ops.run_ring_write)):
        torch.library.opcheck(run, (consumer.handle, *given.ordinary, None, None, None))
        torch.library.opcheck(run, (consumer.handle, *given.ordinary, given.aux, mixture, scal))
        torch.library.opcheck(ring, (consumer.handle, *given.ring, given.aux, mixture, scal, given.delta))


def test_methods_compile_into_one_graph(stub, prepared, writing, mailbox, operands):
    prepared.bind_ring(mailbox)
    given = operands()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(delta, prefix, blocks, out):
        first = prepared.run(delta * 2, prefix, blocks, out)
        second = prepared.run_ring(prefix, blocks, out)
        return writing.run(first + second, prefix, blocks, out) * 1

    model(*given.ordinary)
    symbols = [stub.launch(i).arguments() for i in range(stub.launch_count())]
    assert [launch["write"] for launch in symbols] == [-1, -1, 2]
    assert [launch["source"] == mailbox.data_ptr() for launch in symbols] == [False, True, False]
    assert [launch["source_slot_stride"] for launch in symbols] == [0, 64 * 128, 0]


def test_one_graph_serves_many_layers_and_row_counts(stub, bundle, weights, key, operands):
    layers = [attnres_aot.PreparedAttnRes(weights, key, 1e-5, bundle) for _ in range(20)]
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def step(layer, delta, prefix, blocks, out):
        return layer.run(delta, prefix, blocks, out)

    for rows, layer in enumerate(layers, start=2):
        step(layer, *operands(rows=rows).ordinary)
    assert [stub.launch(i).arguments()["rows"] for i in range(stub.launch_count())] == list(range(2, 22))
    assert counter.frame_count <= 3


def test_compiled_ring_without_mailbox_names_the_missing_call(prepared, operands):
    compiled = torch.compile(prepared.run_ring, backend="eager")
    with pytest.raises(Exception, match=r"bind_ring"):
        compiled(*operands().ring)


def test_handle_of_a_dead_object_is_refused(bundle, weights, key, operands):
    prepared = attnres_aot.PreparedAttnRes(weights, key, 1e-5, bundle)
    handle = prepared.handle
    del prepared
    gc.collect()
    with pytest.raises(UsageError, match=f"handle {handle} names no PreparedAttnRes"):
        torch.ops.attnres_aot.run(handle, *operands().ordinary, None, None, None)


def test_statistics_that_a_compiler_copied_are_used(stub, prepared, operands):
    given, mixture, scal = operands(rows=3), torch.zeros(64, 1024), torch.zeros(64, 2)
    prepared.bind_statistics(mixture, scal, [3])
    copies = mixture.clone(), scal.clone()
    torch.ops.attnres_aot.run(prepared.handle, *given.ordinary, None, *copies)
    torch.ops.attnres_aot.run(prepared.handle, *given.ordinary, None, mixture, scal)
    found = [(launch["mixture"], launch["scal"]) for launch in (stub.launch(0).arguments(), stub.launch(1).arguments())]
    assert found == [tuple(t.data_ptr() for t in copies), (mixture.data_ptr(), scal.data_ptr())]


def test_statistics_that_are_not_bound_are_refused(prepared, operands):
    given, mixture, scal = operands(), torch.zeros(64, 1024), torch.zeros(64, 2)
    with pytest.raises(OperandError, match=r"no statistics bound; bind them before tracing"):
        torch.ops.attnres_aot.run(prepared.handle, *given.ordinary, None, mixture, scal)
    with pytest.raises(OperandError, match=r"only one was passed"):
        torch.ops.attnres_aot.run(prepared.handle, *given.ordinary, None, mixture, None)


def test_order_behind_a_publisher_is_kept(stub, prepared, mailbox, operands):
    prepared.bind_ring(mailbox)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(prefix, blocks, out, published):
        return prepared.run_ring(prefix, blocks, out, after=published + 1)

    given = operands()
    model(*given.ring, given.delta)
    assert stub.launch().arguments()["source"] == mailbox.data_ptr()

"""Launches under what traces: modules that Dynamo compiles once, torch.export, make_fx, dispatch modes."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import attnres_aot
from attnres_aot.errors import OperandError, UsageError
from attnres_aot.runtime import api
from attnres_aot.runtime.consumer import Consumer
from attnres_aot.spec.variants import ConsumerKey

from .conftest import HIDDEN

BF16 = torch.bfloat16


class Layer(torch.nn.Module):
    """A layer as engines write it: the prepared object is an attribute."""

    def __init__(self, prepared, *, ring: bool = False) -> None:
        super().__init__()
        self.prepared, self.ring = prepared, ring

    def forward(self, delta, prefix, blocks, out):
        if self.ring:
            return self.prepared.run_ring(prefix, blocks, out, after=delta) * 2
        return self.prepared.run(delta, prefix, blocks, out) * 2


class Calls(torch.nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


@pytest.fixture
def prepared(bundle, weights, key):
    return attnres_aot.PreparedAttnRes(weights, key, 1e-5, bundle)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def norms(stub) -> list[int]:
    return [stub.launch(i).arguments()["norm"] for i in range(stub.launch_count())]


def many_weights(count: int) -> list[tuple[torch.Tensor, ...]]:
    return [tuple(torch.ones(HIDDEN, dtype=BF16) for _ in range(3)) for _ in range(count)]


@pytest.mark.parametrize("ring", [False, True])
def test_one_compiled_layer_serves_all_modules(stub, bundle, key, operands, ring):
    own = many_weights(12)
    layers = [Layer(attnres_aot.PreparedAttnRes(each, key, 1e-5, bundle), ring=ring) for each in own]
    if ring:
        for layer in layers:
            layer.prepared.bind_ring(attnres_aot.new_mailbox(8, 64, HIDDEN, "cpu"))
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for layer in layers:
        torch.compile(layer, fullgraph=True, backend=counter)(*operands().ordinary)
    assert counter.frame_count == 1
    assert norms(stub) == [each[0].data_ptr() for each in own]


def test_layers_that_write_other_blocks_share_a_graph(stub, bundle, operands):
    writing, first = ConsumerKey(nb=2, has_delta=True, write=2), ConsumerKey(nb=0, has_delta=False, write=0)
    owns = zip(many_weights(3), (writing, writing, first), strict=True)
    layers = [Layer(attnres_aot.PreparedAttnRes(own, each, 1e-5, bundle)) for own, each in owns]
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for layer in layers:
        torch.compile(layer, fullgraph=True, backend=counter)(*operands().ordinary)
    assert counter.frame_count == 1
    assert [stub.launch(i).arguments()["write"] for i in range(3)] == [2, 2, 0]


def test_a_model_of_layers_is_one_graph_and_launches_each_in_order(stub, bundle, key, operands):
    own = many_weights(10)
    layers = torch.nn.ModuleList([Layer(attnres_aot.PreparedAttnRes(each, key, 1e-5, bundle)) for each in own])

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, delta, prefix, blocks, out):
            for layer in self.layers:
                delta = layer(delta, prefix, blocks, out)
            return delta

    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(Model(), fullgraph=True, backend=counter)
    for rows in (3, 3, 5):
        compiled(*operands(rows=rows).ordinary)
    assert norms(stub) == [each[0].data_ptr() for each in own] * 3
    assert counter.frame_count <= 2  # again for another number of rows


def test_one_compiled_layer_serves_all_producers(stub, bundles, weights):
    found = api.load(bundles.write(["nb2-delta"], producers=("statistics-nb2", "publish")))
    mailbox = attnres_aot.new_mailbox(12, 8, HIDDEN, "cpu")
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    class Publishes(torch.nn.Module):
        def __init__(self, slot: int) -> None:
            super().__init__()
            self.publisher = attnres_aot.PreparedPublish(mailbox, slot, found)
            self.mixture, self.scal = torch.zeros(8, HIDDEN), torch.zeros(8, 2)
            self.statistics = attnres_aot.PreparedStatistics(
                *weights[:2], 1e-5, self.mixture, self.scal, nb=2, bundle=found
            )

        def forward(self, rows, blocks):
            self.statistics.run(blocks)
            self.publisher.run(rows)
            return rows + 1

    blocks = torch.zeros(3, 2, HIDDEN, dtype=BF16)
    for slot in range(12):
        torch.compile(Publishes(slot), fullgraph=True, backend=counter)(torch.zeros(3, HIDDEN, dtype=BF16), blocks)
    assert counter.frame_count == 1
    assert stub.launch_count() == 24


def test_handle_tensors_are_marked_as_torch_marks_them(prepared):
    expected = torch.empty((4, 0), dtype=torch.int8)
    torch._dynamo.maybe_mark_dynamic(expected, 0)
    assert prepared.handle_tensor._dynamo_weak_dynamic_indices == expected._dynamo_weak_dynamic_indices
    assert prepared.handle_tensor.shape == (prepared.handle, 0)


def calls_of(graph: torch.fx.Graph) -> list[tuple[str, int]]:
    nodes = [node for node in graph.nodes if node.op == "call_function" and "attnres_aot" in str(node.target)]
    return [(str(node.target), node.args[0]) for node in nodes]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("ring", [False, True])
def test_export_holds_the_launch(stub, prepared, operands, ring, strict):
    if ring:
        prepared.bind_ring(attnres_aot.new_mailbox(8, 64, HIDDEN, "cpu"))
    given = operands()
    program = torch.export.export(Layer(prepared, ring=ring), given.ordinary, strict=strict)
    assert calls_of(program.graph) == [(f"attnres_aot.run{'_ring' if ring else ''}.default", prepared.handle)]
    assert stub.launch_count() == 0
    program.module()(*given.ordinary)
    assert norms(stub) == [prepared._weights.norm.data_ptr()]


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("aux", [False, True])
def test_make_fx_records_the_launch(stub, prepared, operands, mode, aux):
    given = operands()
    prepared.bind_aux().bind_ring(attnres_aot.new_mailbox(8, 64, HIDDEN, "cpu"))
    prepared.run(*given.ordinary, *([given.aux] if aux else []))  # what plans exist must not matter
    before = stub.launch_count()

    def function(delta, prefix, blocks, out, extra):
        prepared.run(delta, prefix, blocks, out, extra if aux else None)
        return prepared.run_ring(prefix, blocks, out, extra if aux else None, after=delta) * 2

    graph = make_fx(function, tracing_mode=mode)(*given.ordinary, given.aux)
    names = ["attnres_aot.run.default", "attnres_aot.run_ring.default"]
    assert calls_of(graph.graph) == [(name, prepared.handle) for name in names]
    launched = stub.launch_count() - before
    assert launched == (2 if mode == "real" else 0)
    graph(*given.ordinary, given.aux)
    assert stub.launch_count() - before == launched + 2


def test_producers_are_recorded_too(stub, bundles, weights):
    found = api.load(bundles.write(["nb2-delta"], producers=("statistics-nb2", "publish")))
    mailbox, mixture, scal = attnres_aot.new_mailbox(2, 8, HIDDEN, "cpu"), torch.zeros(8, HIDDEN), torch.zeros(8, 2)
    publisher = attnres_aot.PreparedPublish(mailbox, 1, found)
    statistics = attnres_aot.PreparedStatistics(*weights[:2], 1e-5, mixture, scal, nb=2, bundle=found)
    given = torch.zeros(3, HIDDEN, dtype=BF16), torch.zeros(3, 2, HIDDEN, dtype=BF16)

    class Module(torch.nn.Module):
        def forward(self, rows, blocks):
            return publisher.run(rows), blocks * 2

    for strict in (False, True):
        program = torch.export.export(Module(), given, strict=strict)
        assert calls_of(program.graph) == [("attnres_aot.publish.default", publisher.handle)]
    graph = make_fx(lambda rows, blocks: (statistics.run(blocks), publisher.run(rows)))(*given)
    assert calls_of(graph.graph) == [
        ("attnres_aot.statistics.default", statistics.handle),
        ("attnres_aot.publish.default", publisher.handle),
    ]
    with pytest.raises(UsageError, match=r"<PreparedStatistics .* cannot be recorded with bound statistics"):
        make_fx(lambda blocks: statistics.run(blocks)[0], tracing_mode="fake")(given[1])


def test_bound_statistics_are_not_copied_into_a_graph(stub, prepared, operands):
    given, mixture, scal = operands(rows=3), torch.zeros(64, HIDDEN), torch.zeros(64, 2)
    prepared.bind_statistics(mixture, scal, [3])
    told = r"a launch of <PreparedAttnRes .* cannot be recorded with bound statistics .* use torch.compile"
    with pytest.raises(UsageError, match=told):
        torch.export.export(Layer(prepared), given.ordinary, strict=False)
    with pytest.raises(Exception, match=r"bound statistics"):
        torch.export.export(Layer(prepared), given.ordinary, strict=True)
    with pytest.raises(UsageError, match=told):
        make_fx(Layer(prepared), tracing_mode="fake")(*given.ordinary)
    graph = make_fx(Layer(prepared))(*given.ordinary)
    graph(*given.ordinary)
    assert stub.launch().arguments()["mixture"] == mixture.data_ptr()


def test_fake_tensors_launch_nothing_inside_their_mode_or_outside(stub, bundles, prepared, weights, operands):
    found = api.load(bundles.write(["nb2-delta"], producers=("statistics-nb2", "publish"), name="other"))
    publisher = attnres_aot.PreparedPublish(attnres_aot.new_mailbox(2, 8, HIDDEN, "cpu"), 1, found)
    prepared.bind_statistics(torch.zeros(64, HIDDEN), torch.zeros(64, 2), [3])
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(tensor) for tensor in operands().ordinary]
    assert prepared.run(*fakes) is fakes[-1]
    publisher.run(fakes[0])
    with mode:
        assert prepared.run(*fakes) is fakes[-1]
        publisher.run(fakes[0])
    assert stub.launch_count() == 0


def test_other_dispatch_modes_see_the_operator_and_it_launches_once(stub, prepared, operands):
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    given = operands()
    with Watch(), Watch():
        assert prepared.run(*given.ordinary) is given.out
    assert seen == ["attnres_aot.run.default"] * 2
    assert stub.launch_count() == 1


def test_a_launchable_that_is_no_operator_is_not_recorded(stub, bundle, weights, operands):
    launchable = Consumer(bundle, attnres_aot.parse_variant("nb2-delta"), 0)
    given = operands()
    called = lambda *tensors: launchable(*tensors[:3], *weights, tensors[3], 1e-5, 1e-5)  # noqa: E731
    with pytest.raises(UsageError, match=r"<Consumer nb2-delta .* while a graph is being recorded"):
        make_fx(called)(*given.ordinary)
    with pytest.raises(UsageError, match=r"while a graph is being recorded"):
        torch.export.export(Calls(called), given.ordinary, strict=False)
    with pytest.raises(OperandError, match=r"delta is a FakeTensor"):
        called(FakeTensorMode().from_tensor(given.delta), *given.ordinary[1:])
    assert stub.launch_count() == 0
    called(*given.ordinary)
    assert stub.launch_count() == 1


@pytest.mark.parametrize("transform", ["vmap", "grad", "functionalize"])
def test_transforms_are_refused_in_our_words(stub, prepared, operands, transform):
    given = operands()
    prepared.run(*given.ordinary)

    def function(delta):
        return prepared.run(delta, *given.ordinary[1:]).float().sum()

    transforms = {"vmap": torch.func.vmap, "grad": torch.func.grad, "functionalize": torch.func.functionalize}
    delta = torch.zeros(2, *given.delta.shape, dtype=BF16) if transform == "vmap" else given.delta
    with pytest.raises(OperandError, match=r"delta is wrapped by a function transform"):
        transforms[transform](function)(delta)
    assert stub.launch_count() == 1

"""torch.compile and the custom operators: whole graphs, the same bits, and what opcheck says."""

import gc
from dataclasses import dataclass

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from attnres_aot import AttnResWeights, PreparedAttnRes


@dataclass(kw_only=True)
class Tensors:
    delta: torch.Tensor
    prefix: torch.Tensor
    blocks: torch.Tensor
    out: torch.Tensor
    aux: torch.Tensor | None

    def clone(self) -> "Tensors":
        aux = None if self.aux is None else self.aux.clone()
        delta, prefix, blocks, out = (t.clone() for t in (self.delta, self.prefix, self.blocks, self.out))
        return Tensors(delta=delta, prefix=prefix, blocks=blocks, out=out, aux=aux)


@pytest.fixture
def make(consumer, seed):
    """Makes plain operands and a prepared consumer for a variant without a mailbox."""
    hidden, device = consumer.bundle.manifest.model.hidden, consumer.device
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(shape, generator=generator, device=device)).to(torch.bfloat16)

    def make(variant, rows=5):
        weights = AttnResWeights(normal(hidden), normal(hidden, scale=hidden**-0.5), normal(hidden))
        prepared = PreparedAttnRes(weights, variant.key, 1e-5, consumer.loaded)
        if variant.aux:
            prepared.bind_aux()
        tensors = Tensors(
            delta=normal(rows, hidden), prefix=normal(rows, hidden), blocks=normal(rows, 9, hidden),
            out=normal(rows, hidden), aux=normal(rows, hidden) if variant.aux else None,
        )  # fmt: skip
        return prepared, tensors

    return make


CONDITIONS = {
    "reads-blocks": lambda v: not v.slots and not v.stats and v.key.has_delta and v.key.write is None and not v.aux,
    "writes-a-block": lambda v: not v.slots and not v.stats and v.key.write is not None and not v.aux,
    "aux": lambda v: not v.slots and not v.stats and v.key.write is not None and v.aux,
}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("condition", CONDITIONS)
def test_compiled_model_gives_the_same_bits(condition, backend, choose, make):
    prepared, tensors = make(choose(CONDITIONS[condition]))
    torch._dynamo.reset()

    def model(delta, prefix, blocks, out, aux):
        prepared.run(delta * 2, prefix, blocks, out, aux)
        return out * 2, prefix * 2

    def call(function, given):
        results = function(given.delta, given.prefix, given.blocks, given.out, given.aux)
        return [*results, given.prefix, given.blocks, given.out, *([] if given.aux is None else [given.aux])]

    eager = call(model, tensors.clone())
    compiled = call(torch.compile(model, fullgraph=True, backend=backend), tensors.clone())
    for left, right in zip(eager, compiled, strict=True):
        assert torch.equal(left.view(torch.int16), right.view(torch.int16))


@pytest.mark.parametrize("condition", CONDITIONS)
def test_opcheck(condition, choose, make):
    prepared, tensors = make(choose(CONDITIONS[condition]))
    operators = torch.ops.attnres_aot
    operator = operators.run if prepared.key.write is None else operators.run_write
    arguments = (prepared.handle, tensors.delta, tensors.prefix, tensors.blocks, tensors.out, tensors.aux, None, None)
    torch.library.opcheck(operator.default, arguments)


def test_compiled_ring_gives_the_same_bits(choose, consumer, seed):
    """A compiled consumer takes a published mailbox and arms it, like an eager one."""
    from attnres_aot.selftest import reference

    variant = choose(lambda v: v.slots > 1 and not v.stats and not v.aux and v.key.has_delta and v.key.write is None)
    hidden, device = consumer.bundle.manifest.model.hidden, consumer.device
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(torch.bfloat16)

    mailbox = torch.empty(variant.slots, 8, hidden, dtype=torch.bfloat16, device=device)
    weights, values = [normal(hidden) for _ in range(3)], normal(variant.slots, 3, hidden)
    prepared = PreparedAttnRes(weights, variant.key, 1e-5, consumer.loaded).bind_ring(mailbox, spin_budget=1 << 22)
    blocks, prefix = normal(3, 8, hidden), normal(3, hidden)
    torch._dynamo.reset()

    def model(prefix, blocks, out):
        prepared.run_ring(prefix, blocks, out)
        return out * 2

    results = []
    for function in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        reference.arm(mailbox)
        for slot in range(variant.slots):
            reference.publish(mailbox, slot, values[slot])
        updated, out = prefix.clone(), torch.empty_like(prefix)
        results.append([function(updated, blocks, out), updated, out])
        assert reference.is_armed(mailbox).all()
    for left, right in zip(*results, strict=True):
        assert torch.equal(left.view(torch.int16), right.view(torch.int16))


class Layer(torch.nn.Module):
    """A layer as engines write it: the prepared object is an attribute."""

    def __init__(self, prepared: PreparedAttnRes) -> None:
        super().__init__()
        self.prepared = prepared

    def forward(self, delta, prefix, blocks, out):
        self.prepared.run(delta * 2, prefix, blocks, out)
        return out * 2


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_one_compiled_layer_serves_all_modules(choose, make, mode):
    """More layers than Dynamo compiles a function for; each must launch with its own weights, captured or not."""
    variant = choose(CONDITIONS["reads-blocks"])
    layers, given = [], []
    for _ in range(12):
        prepared, tensors = make(variant)
        layers.append(Layer(prepared))
        given.append(tensors)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = [torch.compile(layer, fullgraph=True, mode=mode) for layer in layers]
    for _ in range(4):  # warm-up, capture, replays
        for layer, function, tensors in zip(layers, compiled, given, strict=True):
            results = []
            for call in (layer, function):
                each = tensors.clone()
                result = call(each.delta, each.prefix, each.blocks, each.out)
                results.append([result.clone(), each.prefix, each.out])
            for left, right in zip(*results, strict=True):
                assert torch.equal(left.view(torch.int16), right.view(torch.int16))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_saved_graph_finds_the_layer_by_its_name(choose, consumer, make, tmp_path):
    """Objects are made in another order after loading, as another process may; the names say which is which."""
    variant, named = choose(CONDITIONS["reads-blocks"]), {}
    made = [make(variant) for _ in range(3)]
    for index, (prepared, tensors) in enumerate(made):
        weights = tuple(prepared._weights)
        named[index] = PreparedAttnRes(weights, variant.key, 1e-5, consumer.loaded, name=f"layers.{index}")
        operands = (tensors.delta, tensors.prefix, tensors.blocks, tensors.out)
        program = torch.export.export(Layer(named[index]), operands, strict=False)
        torch.export.save(program, tmp_path / f"{index}.pt2")
    named.clear()
    del program
    gc.collect()
    again = {}
    for index in (2, 0, 1):
        weights = tuple(made[index][0]._weights)
        again[index] = PreparedAttnRes(weights, variant.key, 1e-5, consumer.loaded, name=f"layers.{index}")
    for index, (prepared, tensors) in enumerate(made):
        loaded = torch.export.load(tmp_path / f"{index}.pt2").module()
        results = []
        for call in (Layer(prepared), loaded):
            each = tensors.clone()
            results.append([call(each.delta, each.prefix, each.blocks, each.out), each.prefix, each.out])
        for left, right in zip(*results, strict=True):
            assert torch.equal(left.view(torch.int16), right.view(torch.int16))
    assert len(again) == 3


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_make_fx_records_launches(choose, make, mode):
    prepared, tensors = make(choose(CONDITIONS["reads-blocks"]))
    layer, each = Layer(prepared), tensors.clone()
    graph = make_fx(layer, tracing_mode=mode)(each.delta, each.prefix, each.blocks, each.out)
    assert [str(node.target) for node in graph.graph.nodes if "attnres" in str(node.target)] == [
        "attnres_aot.run.default"
    ]
    results = []
    for call in (layer, graph):
        each = tensors.clone()
        results.append([call(each.delta, each.prefix, each.blocks, each.out), each.prefix, each.out])
    for left, right in zip(*results, strict=True):
        assert torch.equal(left.view(torch.int16), right.view(torch.int16))

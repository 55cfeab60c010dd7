"""torch.compile and the custom operators: whole graphs, the same bits, and what opcheck says."""

from dataclasses import dataclass

import pytest
import torch

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
    from attnres_aot import reference

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

"""Memory on a GPU: what is gone is refused before a launch, what moved is followed, shared sources give the same bits.

Each refusal is followed by a launch whose result is checked, so a context that was lost would be seen. Nothing here
launches with bad memory: a refusal that is missing fails the test in a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attnres_aot import ConsumerKey, OperandError, PreparedAttnRes, PreparedPublish, PreparedStatistics, new_mailbox
from attnres_aot.selftest import reference

ROOT = Path(__file__).parents[2]
ROWS = 4
PATIENCE = 1 << 22
"""Polls, some seconds, after which a consumer whose rows never come ends in a named fault instead of a hang."""


class Tensors:
    """Weights and operands of consumers that read `nb` blocks."""

    def __init__(self, consumer, key: ConsumerKey, seed: int) -> None:
        self.hidden, self.device, self.key = consumer.bundle.manifest.model.hidden, consumer.device, key
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.weights = [
            self.normal(self.hidden),
            self.normal(self.hidden) * self.hidden**-0.5,
            self.normal(self.hidden),
        ]
        self.delta, self.prefix = self.normal(ROWS, self.hidden), self.normal(ROWS, self.hidden)
        self.blocks, self.out = self.normal(ROWS, max(key.nb, 1) + 1, self.hidden), self.normal(ROWS, self.hidden)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(torch.bfloat16)

    def results(self, prepared: PreparedAttnRes) -> list[torch.Tensor]:
        """Launches on copies of the operands and returns what was written."""
        prefix, blocks, out = self.prefix.clone(), self.blocks.clone(), torch.empty_like(self.out)
        prepared.run(self.delta.clone(), prefix, blocks, out)
        torch.cuda.synchronize(self.device)
        return [prefix, blocks, out]


def same_bits(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(one, other, strict=True))


@pytest.fixture
def key(choose) -> ConsumerKey:
    ordinary = choose(lambda v: not v.slots and not v.stats and v.key.has_delta and v.key.write is None and not v.aux)
    return ordinary.key


@pytest.fixture
def tensors(consumer, key, seed) -> Tensors:
    return Tensors(consumer, key, seed)


def lose(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)
    torch.cuda.empty_cache()


def move(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Frees a tensor's memory, gives it other memory, and puts values into that."""
    before, size = tensor.data_ptr(), tensor.untyped_storage().nbytes()
    lose(tensor)
    filler = torch.empty(size, dtype=torch.uint8, device=values.device)  # takes the place that was freed
    tensor.untyped_storage().resize_(size)
    assert tensor.data_ptr() != before
    tensor.copy_(values)
    del filler


def test_weights_that_are_gone_are_refused_and_followed_when_they_are_back(consumer, tensors):
    prepared = PreparedAttnRes(tensors.weights, tensors.key, 1e-5, consumer.loaded)
    expected, values = tensors.results(prepared), tensors.weights[0].clone()
    lose(tensors.weights[0])
    for _ in range(2):
        with pytest.raises(OperandError, match=r"weights.norm has no memory"):
            tensors.results(prepared)
    tensors.weights[0].untyped_storage().resize_(values.numel() * values.element_size())
    move(tensors.weights[0], values)
    assert same_bits(tensors.results(prepared), expected)


@pytest.mark.parametrize("what", ["weights", "mailbox", "statistics", "publish", "operand"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_null_memory_never_reaches_a_kernel(consumer, what, when):
    """In a process of its own: if a launch got through, only that process would lose its context."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "ATTNRES_AOT_BUNDLE": str(consumer.bundle.path)}
    command = [sys.executable, str(Path(__file__).with_name("null_memory.py")), what, when]
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=240, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_lazily_negated_source_is_refused_and_right_once_it_is_resolved(consumer, tensors):
    prepared = PreparedAttnRes(tensors.weights, tensors.key, 1e-5, consumer.loaded)
    prefix, out = tensors.prefix.clone(), tensors.out.clone()
    negated = torch._neg_view(tensors.delta)
    for _ in range(2):
        with pytest.raises(OperandError, match=r"delta is negated or conjugated lazily"):
            prepared.run(negated, prefix, tensors.blocks, out)
        prepared.run(tensors.delta, prefix.clone(), tensors.blocks, out)  # a plan must not change that
    prepared.run(negated.resolve_neg(), prefix, tensors.blocks, out)
    expected = tensors.prefix.clone()
    prepared.run(-tensors.delta, expected, tensors.blocks, torch.empty_like(out))
    assert torch.equal(prefix, expected)


@pytest.mark.parametrize("same_object", [True, False])
@pytest.mark.parametrize("rows", [1, ROWS])
def test_the_source_may_be_out_itself_at_changing_addresses(consumer, tensors, rows, same_object):
    prepared = PreparedAttnRes(tensors.weights, tensors.key, 1e-5, consumer.loaded)
    expected, other = tensors.prefix[:rows].clone(), tensors.out[:rows].clone()
    prepared.run(tensors.delta[:rows], expected, tensors.blocks[:rows], other)
    kept = []
    for _ in range(20):
        prefix, both = tensors.prefix[:rows].clone(), tensors.delta[:rows].clone()
        prepared.run(both if same_object else both[:], prefix, tensors.blocks[:rows], both)
        kept.append((prefix, both))  # so that no address comes again
    for prefix, both in kept:
        assert same_bits([prefix, both], [expected, other])


def test_out_over_a_weight_is_refused(consumer, tensors):
    room = torch.zeros(ROWS * tensors.hidden, dtype=torch.bfloat16, device=tensors.device)
    room[: tensors.hidden] = tensors.weights[0]
    weights = [room[: tensors.hidden], *tensors.weights[1:]]
    prepared = PreparedAttnRes(weights, tensors.key, 1e-5, consumer.loaded)
    for _ in range(2):
        with pytest.raises(OperandError, match=r"out overlaps weights.norm"):
            prepared.run(tensors.delta, tensors.prefix, tensors.blocks, room.view(ROWS, -1))
        tensors.results(prepared)
    assert torch.equal(room[: tensors.hidden], tensors.weights[0])


def test_a_mailbox_that_moved_is_refused(choose, consumer, tensors):
    ring = choose(lambda v: v.slots > 1 and not v.stats and not v.aux and v.key.has_delta and v.key.write is None)
    mailbox = new_mailbox(ring.slots, 8, tensors.hidden, tensors.device)
    blocks = tensors.normal(ROWS, max(ring.key.nb, 1), tensors.hidden)
    prepared = PreparedAttnRes(tensors.weights, ring.key, 1e-5, consumer.loaded)
    publishers = [PreparedPublish(mailbox, slot, consumer.loaded) for slot in range(ring.slots)]

    def round_trip() -> None:
        for publisher in publishers:
            publisher.run(tensors.delta)
        prepared.run_ring(tensors.prefix.clone(), blocks, tensors.out)
        torch.cuda.synchronize(tensors.device)
        assert reference.is_armed(mailbox).all()

    prepared.bind_ring(mailbox, spin_budget=PATIENCE)
    round_trip()
    move(mailbox, new_mailbox(ring.slots, 8, tensors.hidden, tensors.device))
    with pytest.raises(OperandError, match=r"the mailbox was at .* bind it again"):
        publishers[0].run(tensors.delta)
    with pytest.raises(OperandError, match=r"the mailbox was at .* bind it again"):
        prepared.run_ring(tensors.prefix.clone(), blocks, tensors.out)
    prepared.bind_ring(mailbox, spin_budget=PATIENCE)
    publishers = [PreparedPublish(mailbox, slot, consumer.loaded) for slot in range(ring.slots)]
    round_trip()


def test_statistics_that_moved_are_followed_by_both_sides(choose, consumer, seed):
    taking = choose(lambda v: v.stats and not v.slots and not v.aux and v.key.write is None)
    tensors = Tensors(consumer, taking.key, seed)
    full = {"dtype": torch.float32, "device": tensors.device}
    mixture, scal = torch.zeros(8, tensors.hidden, **full), torch.zeros(8, 2, **full)
    norm, query, _ = tensors.weights
    producer = PreparedStatistics(norm, query, 1e-5, mixture, scal, nb=taking.key.nb, bundle=consumer.loaded)
    prepared = PreparedAttnRes(tensors.weights, taking.key, 1e-5, consumer.loaded)
    prepared.bind_statistics(mixture, scal, [ROWS])
    producer.run(tensors.blocks)
    expected = tensors.results(prepared)
    for tensor in (mixture, scal):
        move(tensor, torch.full_like(tensor, float("nan")))
    producer.run(tensors.blocks)
    assert same_bits(tensors.results(prepared), expected)

"""Launches that overlap (PDL) in chains that obey the table of `pdl=True`: a slow reader or consumer comes first.

A gate, a ring consumer whose row comes late, holds up the grids behind it, which have started and stand at their
dependency waits. What a grid behind those does too early then shows in their results.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from attnres_aot import PreparedAttnRes, PreparedStatistics, arm, new_mailbox
from attnres_aot.selftest.reference import is_armed
from attnres_aot.spec.variants import STATISTICS, parse_producer

ROUNDS = 1000
ROWS = 4
BUDGET = 1 << 24
"""Polls, some ten seconds, after which a consumer whose rows never come ends in a named fault instead of a hang."""
HOLD = 60_000
"""Cycles, about 30 us, for which a row is late: several times what a launch takes."""

RINGS = {
    "few-blocks": lambda v: v.slots == 1 and not v.stats and v.key.nb == 1 and v.key.has_delta,
    "many-blocks": lambda v: v.slots == 1 and not v.stats and v.key.has_delta and not v.key.final,
    "many-slots": lambda v: v.slots > 1 and not v.stats and v.key.has_delta and not v.key.final,
    "final": lambda v: v.slots == 1 and not v.stats and v.key.final,
    "statistics": lambda v: v.slots == 1 and v.stats and v.key.has_delta and not v.key.final,
}
"""Ring consumers that differ in what they do around the dependency wait."""


@dataclass(kw_only=True)
class Link:
    """One consumer with operands of its own."""

    prepared: PreparedAttnRes
    prefix: torch.Tensor
    blocks: torch.Tensor
    out: torch.Tensor
    aux: torch.Tensor | None = None
    first: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self):
        self.keep()

    def keep(self):
        """Remembers the inputs that a launch overwrites."""
        self.first = {"prefix": self.prefix.clone(), "blocks": self.blocks.clone()}

    def restore(self):
        self.prefix.copy_(self.first["prefix"])
        self.blocks.copy_(self.first["blocks"])
        self.out.fill_(1.0)

    def ring(self):
        self.prepared.run_ring(self.prefix, self.blocks, self.out, self.aux)

    def ordinary(self, delta):
        self.prepared.run(delta, self.prefix, self.blocks, self.out, self.aux)


class Bench:
    """Makes links, and rows to publish, on the device under test."""

    def __init__(self, consumer):
        self.loaded, self.device = consumer.loaded, consumer.device
        manifest = consumer.bundle.manifest
        self.hidden, self.capacity = manifest.model.hidden, manifest.mailbox.capacity
        self.depth = -(-manifest.model.layers // manifest.model.block_size) + 1
        self.weights = (self.normal(self.hidden), self.normal(self.hidden) / self.hidden**0.5, self.normal(self.hidden))
        self.waiting, self.publishing = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)

    def normal(self, *shape):
        return torch.randn(*shape, device=self.device).bfloat16().add_(0.0)  # adding makes -0.0, which no mailbox takes

    def mailbox(self, slots):
        return new_mailbox(slots, self.capacity, self.hidden, self.device)

    def link(self, variant, mailbox=None, *, pdl):
        prepared = PreparedAttnRes(self.weights, variant.key, 1e-6, self.loaded, pdl=pdl)
        if variant.aux:
            prepared.bind_aux()
        if variant.stats:
            mixture = torch.randn(ROWS, self.hidden, device=self.device)
            prepared.bind_statistics(mixture, torch.ones(ROWS, 2, device=self.device), [ROWS])
        if mailbox is not None:
            prepared.bind_ring(mailbox, spin_budget=BUDGET)
        rows = {name: self.normal(ROWS, self.hidden) for name in ("prefix", "out", "aux")}
        aux = rows.pop("aux")
        return Link(
            prepared=prepared,
            blocks=self.normal(ROWS, self.depth, self.hidden),
            aux=aux if variant.aux else None,
            **rows,
        )

    def values(self, mailbox):
        """Rows for all slots of a mailbox."""
        return self.normal(mailbox.shape[0], ROWS, self.hidden)

    def late(self, mailbox, values, *more):
        """Publishes on a stream of its own, each set of rows after a pause."""
        with torch.cuda.stream(self.publishing):
            for each in (values, *more):
                torch.cuda._sleep(HOLD)
                mailbox[:, :ROWS].view(torch.int32).copy_(each.view(torch.int32))

    def warm(self, *launches):
        """Launches once by itself, with everything there: a kernel that is first loaded beside a consumer may hang."""
        for mailbox, values, launch in launches:
            torch.cuda.synchronize(self.device)
            if mailbox is not None:
                self.late(mailbox, values)
            torch.cuda.synchronize(self.device)
            launch()
        torch.cuda.synchronize(self.device)

    def repeat(self, chain, publish, check, *, captured):
        """Runs ROUNDS rounds of a chain that waits for what `publish` brings."""
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                chain()
        for number in range(ROUNDS):
            check.prepare()
            torch.cuda.synchronize(self.device)
            with torch.cuda.stream(self.waiting):
                graph.replay() if captured else chain()
            publish()
            torch.cuda.synchronize(self.device)
            problem = check()
            assert not problem, f"round {number}: {problem}"


@dataclass(kw_only=True)
class Check:
    """Compares results with what the same launches give by themselves."""

    links: list[Link]
    wanted: list[torch.Tensor]
    mailboxes: list[torch.Tensor]
    prepare: Callable[[], object]
    """Puts the inputs of a round in place."""

    def __call__(self):
        for number, (link, wanted) in enumerate(zip(self.links, self.wanted, strict=True)):
            wrong = int((link.out != wanted).sum())
            if wrong:
                return f"{wrong} of {wanted.numel()} elements of link {number} are not as when launched alone"
        left = sum(int((~is_armed(mailbox[:, :ROWS])).sum()) for mailbox in self.mailboxes)
        return f"{left} words were left in the mailboxes" if left else ""


@pytest.fixture
def bench(consumer):
    consumer.loaded.preload()
    torch.manual_seed(3)
    return Bench(consumer)


@pytest.fixture(params=RINGS)
def ring(request, choose):
    return choose(RINGS[request.param])


def ordinary(variant):
    return not variant.slots and not variant.stats and variant.key.has_delta and variant.key.write is None


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("operand", ["out", "prefix", "aux", "block"])
def test_a_slow_reader_of_what_a_ring_consumer_writes(operand, captured, choose, bench):
    """The reader's delta is what the ring consumer behind it writes: the reader must see it as it was before."""
    gate = bench.link(choose(RINGS["few-blocks"]), box := bench.mailbox(1), pdl=False)
    reader = bench.link(choose(lambda v: ordinary(v) and not v.aux and not v.key.final), pdl=True)

    def writes(variant):
        return variant.slots == 1 and not variant.stats and variant.aux == (operand == "aux")

    writer_of = choose(
        lambda v: (
            writes(v)
            and (v.key.write is not None if operand == "block" else v.key.write is None)
            and (operand != "prefix" or not v.key.has_delta)
        )  # one that only writes its prefix
    )
    writer = bench.link(writer_of, its := bench.mailbox(1), pdl=True)
    delta = bench.normal(ROWS, bench.hidden)
    shared = delta.clone()
    if operand == "block":
        shared = writer.blocks[:, writer_of.key.write]
        shared.copy_(delta)
        writer.keep()
    else:
        setattr(writer, operand, shared)
    rows, its_rows = bench.values(box), bench.values(its)
    bench.warm((box, rows, gate.ring), (None, None, lambda: reader.ordinary(delta)), (its, its_rows, writer.ring))
    check = Check(
        links=[reader],
        wanted=[reader.out.clone()],
        mailboxes=[box, its],
        prepare=lambda: (reader.restore(), shared.copy_(delta), its[:, :ROWS].copy_(its_rows)),
    )

    def chain():
        gate.ring()
        reader.ordinary(shared)
        writer.ring()

    reader.restore()
    bench.repeat(chain, lambda: bench.late(box, rows), check, captured=captured)


BETWEEN = ("nothing", "consumer-of-another-mailbox", "statistics")


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("between", BETWEEN)
def test_two_consumers_of_one_mailbox(between, ring, captured, choose, bench):
    """Rows of two rounds come one after the other: the first consumer takes the first, the second the second."""
    box, other = bench.mailbox(ring.slots), bench.mailbox(1)
    first, second = (bench.link(ring, box, pdl=pdl) for pdl in (False, True))
    middle = bench.link(choose(RINGS["few-blocks"]), other, pdl=True)
    rows, more, others = bench.values(box), bench.values(box), bench.values(other)
    bench.warm((box, rows, first.ring), (box, more, second.ring), (other, others, middle.ring))
    wanted = [first.out.clone(), second.out.clone()]
    if between == "statistics":
        mixture, scal = torch.empty(ROWS, bench.hidden, device=bench.device), torch.empty(ROWS, 2, device=bench.device)
        norm, query, _ = bench.weights
        nb = max(p.nb for p in statistics_of(bench.loaded))
        producer = PreparedStatistics(norm, query, 1e-6, mixture, scal, nb=nb, bundle=bench.loaded, pdl=True)

    def chain():
        first.ring()
        if between == "consumer-of-another-mailbox":
            middle.ring()
        elif between == "statistics":
            producer.run(middle.blocks)
        second.ring()

    def prepare():
        first.restore()
        second.restore()
        middle.restore()
        if between == "consumer-of-another-mailbox":
            other[:, :ROWS].copy_(others)

    check = Check(links=[first, second], wanted=wanted, mailboxes=[box, other], prepare=prepare)
    bench.repeat(chain, lambda: bench.late(box, rows, more), check, captured=captured)


def statistics_of(loaded):
    producers = [parse_producer(record.name) for record in loaded.bundle.manifest.producers]
    return [producer for producer in producers if producer.kernel == STATISTICS]


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
def test_a_mailbox_is_armed_right_before_its_consumer(ring, captured, bench):
    """What arming overwrites must not be taken."""
    box = bench.mailbox(ring.slots)
    link = bench.link(ring, box, pdl=True)
    rows, stale = bench.values(box), bench.values(box)
    bench.warm((box, rows, link.ring))
    check = Check(
        links=[link],
        wanted=[link.out.clone()],
        mailboxes=[box],
        prepare=lambda: (link.restore(), box[:, :ROWS].copy_(stale)),
    )

    def chain():
        arm(box)
        link.ring()

    bench.repeat(chain, lambda: bench.late(box, rows), check, captured=captured)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
def test_early_launches_that_keep_their_promise(ring, captured, choose, bench):
    """Behind a kernel that touches nothing of theirs, and two after the last consumption of their mailbox."""
    box = bench.mailbox(ring.slots)
    link = bench.link(ring, box, pdl="early")
    bystander = bench.link(choose(lambda v: ordinary(v) and not v.aux), pdl=True)
    delta = bench.normal(ROWS, bench.hidden)
    rows = bench.values(box)
    bench.warm((box, rows, link.ring), (None, None, lambda: bystander.ordinary(delta)))
    check = Check(links=[link], wanted=[link.out.clone()], mailboxes=[box], prepare=link.restore)

    def chain():
        bystander.ordinary(delta)
        link.ring()

    bench.repeat(chain, lambda: bench.late(box, rows), check, captured=captured)

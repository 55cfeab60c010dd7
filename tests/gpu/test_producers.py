"""Producers on a GPU: against the reference, before consumers of what they make, under dependent launches, to peers."""

import pytest
import torch

from attnres_aot import PreparedAttnRes, PreparedPublish, PreparedStatistics, new_mailbox
from attnres_aot.selftest import reference
from attnres_aot.selftest.arena import BLOCK_MAJOR, DENSE, PADDED
from attnres_aot.selftest.cases import ROW_COUNTS, STARTS, Case, prepare, refill
from attnres_aot.selftest.check import judge
from attnres_aot.selftest.suite import bundle_producers, bundle_variants, check_subject, wait
from attnres_aot.spec.variants import ConsumerKey, Variant

EPS = 1e-5
CHAIN = 40
"""Launches in a chain that shares one place for statistics."""
ROUNDS = 200
SLEEP_CYCLES = 20_000_000
"""About 10 ms of GPU time: far longer than any launch."""


def case_of(variant, rows, layout=DENSE, start=0, steep=False) -> Case:
    return Case(variant=variant, rows=rows, layout=layout, eps=EPS, out_eps=EPS, steep=steep, start=start)


def assert_right(prepared):
    wait(prepared.arena.words.device, str(prepared.case))
    problems = judge(prepared).problems
    assert not problems, "\n".join(problems)


def statistics_keys(consumer) -> list[ConsumerKey]:
    variants = bundle_variants(consumer.bundle.manifest)
    keys = dict.fromkeys(variant.key for variant in variants if variant.stats and not variant.slots)
    assert keys, f"{consumer.bundle.path} has no statistics variant"
    return list(keys)


class Chain:
    """Statistics and the consumer that takes them, for the operands of one prepared case without statistics."""

    def __init__(self, consumer, prepared, mixture, scal, *, pdl):
        views, key, rows = prepared.arena.views, prepared.case.variant.key, prepared.case.rows
        self.views = views
        self.statistics = PreparedStatistics(
            views.norm, views.query, EPS, mixture, scal, nb=key.nb, bundle=consumer.loaded, pdl=pdl
        )
        weights = (views.norm, views.query, views.out_norm)
        self.consumer = PreparedAttnRes(weights, key, EPS, consumer.loaded, pdl=pdl)
        self.consumer.bind_statistics(mixture, scal, [rows])

    def run(self):
        views = self.views
        self.statistics.run(views.blocks)
        self.consumer.run(views.source, views.prefix, views.blocks, views.out)


def room_for(consumer, rows):
    """Statistics that hold NaN until they are written."""
    hidden, device = consumer.bundle.manifest.model.hidden, consumer.device
    return torch.full((rows, hidden), torch.nan, device=device), torch.full((rows, 2), torch.nan, device=device)


def test_producer(producer, consumer, banks, ledger):
    salt = bundle_producers(consumer.bundle.manifest).index(producer)
    result = check_subject(producer, consumer, banks, ROW_COUNTS, salt)
    ledger.results.append(result)
    assert not result.problems, "\n".join(result.problems)
    assert result.launches == 3 * len(ROW_COUNTS)


@pytest.mark.parametrize("pdl", [False, True], ids=["ordered", "dependent"])
@pytest.mark.parametrize("layout", [DENSE, PADDED, BLOCK_MAJOR], ids=lambda layout: layout.name)
def test_statistics_then_consumer_is_what_the_consumer_alone_does(layout, pdl, consumer, banks):
    """The bound on the consumer that reads the blocks holds for the pair, for every consumer and every family."""
    for number, key in enumerate(statistics_keys(consumer)):
        for rows in (1, 7, 64):
            case = case_of(Variant(key=key), rows, layout, start=3 * number % STARTS)
            prepared = prepare(case, banks)
            chain = Chain(consumer, prepared, *room_for(consumer, rows), pdl=pdl)
            wait(consumer.device, "inputs")
            chain.run()
            assert_right(prepared)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
def test_a_chain_of_dependent_launches_shares_one_place_for_statistics(captured, consumer, banks):
    """Each producer may start while the consumer before it still reads the last statistics."""
    keys = [key for key in statistics_keys(consumer) if key.has_delta and key.write is None and not key.final]
    rows = 16
    mixture, scal = room_for(consumer, rows)
    cases = [case_of(Variant(key=keys[i % len(keys)]), rows, start=i % 32) for i in range(CHAIN)]
    prepared = [prepare(case, banks) for case in cases]
    chains = [Chain(consumer, each, mixture, scal, pdl=True) for each in prepared]
    for chain in chains:  # loads everything
        chain.run()
    wait(consumer.device, "warm-up")
    for each in prepared:
        refill(each)
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            for chain in chains:
                chain.run()
    wait(consumer.device, "inputs")
    for _ in range(5):
        for each in prepared:
            refill(each)
        wait(consumer.device, "inputs")
        if captured:
            graph.replay()
        else:
            for chain in chains:
                chain.run()
        for each in prepared:
            assert_right(each)


def test_equal_blocks_give_equal_bits(consumer, banks):
    key = statistics_keys(consumer)[-1]
    prepared = prepare(case_of(Variant(key=key), 64, start=5), banks)
    mixture, scal = room_for(consumer, 64)
    chain = Chain(consumer, prepared, mixture, scal, pdl=False)
    chain.statistics.run(prepared.arena.views.blocks)
    first = mixture.view(torch.int32).clone(), scal.view(torch.int32).clone()
    differ = torch.zeros((), dtype=torch.bool, device=consumer.device)
    for _ in range(ROUNDS):
        mixture.fill_(torch.nan)
        scal.fill_(torch.nan)
        chain.statistics.run(prepared.arena.views.blocks)
        differ |= (mixture.view(torch.int32) != first[0]).any() | (scal.view(torch.int32) != first[1]).any()
    wait(consumer.device, "statistics")
    assert not bool(differ)


def ring_variants(consumer) -> list[Variant]:
    variants = [v for v in bundle_variants(consumer.bundle.manifest) if v.slots and not v.stats and not v.aux]
    by_kind = {(v.slots, v.key.has_delta, v.key.final): v for v in sorted(variants, key=lambda v: v.key.nb)}
    assert by_kind, f"{consumer.bundle.path} has no mailbox variant"
    return list(by_kind.values())


@pytest.mark.parametrize("order", ["published-before", "published-late", "dependent"])
def test_published_rows_are_what_a_ring_consumer_takes(order, consumer, banks):
    """A mailbox filled by the kernel gives what one filled by the reference does, and is armed again."""
    for number, variant in enumerate(ring_variants(consumer)):
        for rows, layout in ((1, DENSE), (16, PADDED), (64, BLOCK_MAJOR)):
            prepared = prepare(case_of(variant, rows, layout, start=7 * number % STARTS), banks)
            views, pdl = prepared.arena.views, order == "dependent"
            sources = banks.mild.slots[: variant.slots, prepared.rows].clone()
            reference.arm(views.source[:, :rows])  # what the reference has published there
            publishers = [
                PreparedPublish(views.source, slot, consumer.loaded, pdl=pdl) for slot in range(variant.slots)
            ]
            launch = consumer.bind(prepared.case, views, pdl=pdl)
            for publisher, source in zip(publishers, sources, strict=True):  # loads everything
                publisher.run(source)
            launch()
            wait(consumer.device, "warm-up")
            refill(prepared)
            reference.arm(views.source[:, :rows])
            side = torch.cuda.Stream(consumer.device)
            torch.cuda._sleep(1)
            wait(consumer.device, "inputs")
            if order == "published-late":
                launch()
            with torch.cuda.stream(side if order == "published-late" else torch.cuda.current_stream()):
                if order == "published-late":
                    torch.cuda._sleep(SLEEP_CYCLES // 10)
                for publisher, source in zip(publishers, sources, strict=True):
                    publisher.run(source)
            if order != "published-late":
                launch()
            assert_right(prepared)


def test_rounds_of_publishing_and_consuming_in_one_graph(consumer, banks):
    variant = min((v for v in ring_variants(consumer) if v.key.has_delta), key=lambda v: v.slots)
    prepared = prepare(case_of(variant, 16), banks)
    views = prepared.arena.views
    sources = [banks.mild.slots[slot, prepared.rows].clone() for slot in range(variant.slots)]
    reference.arm(views.source[:, :16])
    publishers = [PreparedPublish(views.source, slot, consumer.loaded, pdl=True) for slot in range(variant.slots)]
    launch = consumer.bind(prepared.case, views, pdl=False)

    def round_():
        for publisher, source in zip(publishers, sources, strict=True):
            publisher.run(source)
        launch()

    round_()
    wait(consumer.device, "warm-up")
    expected = views.prefix.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CHAIN):
            round_()
    graph.replay()
    wait(consumer.device, "rounds")
    delta = reference_published(sources[0]).float()
    for source in sources[1:]:
        delta = delta + reference_published(source).float()
    for _ in range(CHAIN):
        expected = expected + delta.bfloat16()
    finite = expected.isfinite()
    assert torch.equal(views.prefix[finite].view(torch.int16), expected[finite].view(torch.int16))
    assert bool(reference.is_armed(views.source[:, :16]).all())


def reference_published(rows):
    """Returns rows [rows, H] as the reference publishes them."""
    mailbox = torch.empty((1, *rows.shape), dtype=rows.dtype, device=rows.device)
    reference.publish(mailbox, 0, rows)
    return mailbox[0]


@pytest.mark.parametrize("ordinal", range(max(1, torch.cuda.device_count())))
def test_a_mailbox_in_the_memory_of_any_device_of_the_process(ordinal, consumer, banks):
    """Launched on the device of the rows, which need not be the mailbox's, nor the current one."""
    hidden = consumer.bundle.manifest.model.hidden
    mailbox = new_mailbox(2, 66, hidden, device=f"cuda:{ordinal}")
    rows = banks.mild.slots[0, :64].clone()
    publisher = PreparedPublish(mailbox, 1, consumer.loaded)
    wait(mailbox.device, "armed")
    with torch.cuda.device(ordinal):
        publisher.run(rows)
    wait(consumer.device, "published")
    found = mailbox[1, :64].to(consumer.device).view(torch.int16)
    assert torch.equal(found, reference_published(rows).view(torch.int16))
    assert bool(reference.is_armed(mailbox[0]).all())
    assert bool(reference.is_armed(mailbox[1, 64:]).all())


def test_launches_on_the_current_stream(consumer, banks):
    """The rows are put in place on a side stream after a long sleep; a launch elsewhere would not see them."""
    hidden = consumer.bundle.manifest.model.hidden
    mailbox = new_mailbox(1, 8, hidden, device=consumer.device)
    rows, late = torch.zeros((8, hidden), dtype=torch.bfloat16, device=consumer.device), banks.mild.prefix[:8].clone()
    publisher = PreparedPublish(mailbox, 0, consumer.loaded)
    publisher.run(rows)
    side = torch.cuda.Stream(consumer.device)
    wait(consumer.device, "warm-up")
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        rows.copy_(late)
        publisher.run(rows)
        wait(consumer.device, "published")
    assert torch.equal(mailbox[0].view(torch.int16), reference_published(late).view(torch.int16))

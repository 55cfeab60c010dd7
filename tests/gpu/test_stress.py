"""The mailbox protocol and the spin budget under stress, and equal bits from equal inputs over many launches."""

import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from attnres_aot import PreparedAttnRes, PreparedPublish
from attnres_aot.selftest import reference
from attnres_aot.selftest.arena import DENSE
from attnres_aot.selftest.cases import Case, prepare, refill
from attnres_aot.selftest.check import judge
from attnres_aot.selftest.inputs import FAMILIES
from attnres_aot.selftest.suite import bundle_variants, image_variants, wait
from attnres_aot.spec.variants import Variant
from tests.support.ranks import EPS, publish_words
from tests.support.soak import Soak

ROOT = Path(__file__).parents[2]
ROW_COUNTS = (1, 2, 3, 7, 16, 33, 64)
BUDGET = 1 << 24
"""Polls that bound a hang of these tests themselves: some four seconds on an H200."""


def case_of(variant, rows, *, steep=False, start=0) -> Case:
    return Case(variant=variant, rows=rows, layout=DENSE, eps=1e-5, out_eps=1e-5, steep=steep, start=start)


def rings(consumer, slots):
    """Ring variants of so many slots that neither write a block nor an aux copy, most blocks first."""
    variants = [v for v in bundle_variants(consumer.bundle.manifest) if v.slots == slots and not v.aux]
    variants = [v for v in variants if v.key.has_delta and v.key.write is None]
    return sorted(variants, key=lambda v: -v.key.nb)


def first(variants, condition):
    return next(filter(condition, variants))


@dataclass(frozen=True)
class Pair:
    """Which consumers the two ranks run, and what publishes."""

    name: str
    conditions: tuple[Callable[[Variant], bool], Callable[[Variant], bool]]
    with_kernel: bool


PAIRS = [
    Pair("blocks-statistics", (lambda v: not (v.stats or v.key.final), lambda v: v.stats and not v.key.final), False),
    Pair("final-few-blocks", (lambda v: not v.stats and v.key.final, lambda v: not v.stats and v.key.nb <= 2), True),
]


def kernel_publisher(consumer):
    """Publishes with the bundle's own kernel, one launch for each slot."""
    prepared = {}

    def publish(mailbox, slots, values) -> None:
        for slot, rows in zip(range(slots.start, slots.stop), values, strict=True):
            key = (mailbox.data_ptr(), slot)
            if key not in prepared:
                prepared[key] = PreparedPublish(mailbox, slot, consumer.loaded)
            prepared[key].run(rows)

    return publish


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_ring_soak(slots, pair, request, consumer, banks, seed, full, notes):
    """Two ranks on two streams that only the mailboxes order: 2,000 rounds, or 50,000 with --stress."""
    if slots not in consumer.bundle.manifest.mailbox.slots:
        consumer = request.getfixturevalue("stress_consumer")
    variants = tuple(first(rings(consumer, slots), condition) for condition in pair.conditions)
    consumer.loaded.preload()

    def bind(bound):
        given = bound.operands
        weights, eps = (given.norm, given.query, given.out_norm), (EPS, EPS)
        prepared = PreparedAttnRes(weights, bound.variant.key, eps, consumer.loaded, pdl=bound.pdl)
        if bound.variant.stats:
            prepared.bind_statistics(given.mixture, given.scal, bound.rows)
        return prepared.bind_ring(bound.mailbox, spin_budget=BUDGET).run_ring

    capacity = consumer.bundle.manifest.mailbox.capacity
    publish = kernel_publisher(consumer) if pair.with_kernel else publish_words
    soak = Soak(variants, banks.mild, capacity, bind, row_counts=ROW_COUNTS, seed=seed, publish=publish)
    soak.record(graphs=4, rounds=16)
    result = soak.run(50_000 if full else 2_000)
    notes.append(
        f"- soak, {slots} slots, {' and '.join(map(str, variants))}: {result.rounds} rounds, {result.replayed} of them "
        f"in graphs, {sum(result.wrong)} wrong, {result.seconds:.1f} s, seed {seed}"
    )
    assert result.wrong == (0, 0)
    assert result.not_armed == 0
    assert result.replayed


@pytest.mark.parametrize("steep", [False, True], ids=["mild", "steep"])
def test_equal_inputs_give_equal_bits_on_every_image(steep, consumer, banks, full, notes, request):
    """All families of values, 100 launches of every image, or 1,000 with --stress; compared with the first launch."""
    repeats = 1_000 if full else request.config.getoption("--repeats")
    differing: list[str] = []
    images: set[str] = set()
    for variant in image_variants(consumer.bundle.manifest):
        for choice in consumer.loaded.record(variant).choices:
            if choice.image in images:
                continue
            rows, start = min(64, choice.max_rows or 64), len(images) % len(FAMILIES)
            images.add(choice.image)
            prepared = prepare(case_of(variant, rows, steep=steep, start=start), banks)
            launch = consumer.bind(prepared.case, prepared.arena.views)
            launch()
            wait(consumer.device, str(prepared.case))
            problems = judge(prepared).problems
            assert not problems, "\n".join(problems)
            first_words = prepared.arena.words.clone()
            differs = torch.zeros((), dtype=torch.int64, device=consumer.device)
            for _ in range(repeats):
                refill(prepared)
                launch()
                differs.add_((prepared.arena.words != first_words).any())
            wait(consumer.device, str(prepared.case))
            if differs:
                differing.append(f"{prepared.case}: {int(differs)} of {repeats} launches differ")
    weights = "steep" if steep else "mild"
    notes.append(
        f"- equal bits, {weights}: {repeats} launches of each of {len(images)} images, {len(differing)} differ"
    )
    assert not differing, "\n".join(differing)


RINGS = {
    "ring-of-one": lambda v: v.slots == 1 and not v.stats,
    "ring": lambda v: v.slots > 1 and not v.stats,
    "ring-statistics": lambda v: v.slots > 1 and v.stats,
}

GIVE_UP = """
import json, os, sys, time, torch
import attnres_aot
from attnres_aot.selftest import reference
from attnres_aot.selftest.arena import DENSE
from attnres_aot.selftest.cases import Case, draw_banks, prepare
from attnres_aot.selftest.loaded import LoadedConsumer
from attnres_aot.spec.variants import parse_variant

bundle, name, budget, row, slot, column = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
consumer = LoadedConsumer.open(bundle)
banks = draw_banks(consumer.bundle.manifest.model.hidden, 64, 1, consumer.device)
case = Case(variant=parse_variant(name), rows=3, layout=DENSE, eps=1e-5, out_eps=1e-5, steep=False, start=0)
prepared = prepare(case, banks)
views = prepared.arena.views
launch = consumer.bind(case, views, spin_budget=budget)
launch()  # nothing is missing: it does not give up
torch.cuda.synchronize()
views.source.copy_(prepared.before.views.source)
reference.arm(views.source[slot, row, column : column + 8])
torch.cuda.synchronize()
before = attnres_aot.ring_fault()
launch()
started = time.perf_counter()
error = refusal = ""
try:
    torch.cuda.synchronize()
except Exception as problem:
    error = f"{type(problem).__name__}: {problem}"
seconds = time.perf_counter() - started
try:
    launch()
except attnres_aot.DriverError as problem:
    refusal = str(problem)
fault = attnres_aot.ring_fault()
print(json.dumps({
    "error": error, "seconds": seconds, "refusal": refusal, "before": before and str(before), "fault": str(fault),
    "found": fault and [str(fault.variant), fault.row, fault.slot, fault.column],
}), flush=True)
os._exit(0)  # the context is lost; tearing it down would only complain
"""


def give_up(bundle, variant, budget, row, slot, column) -> dict:
    """Runs a ring consumer from whose mailbox one fragment is missing, in a process of its own; says what it saw."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    arguments = [str(bundle), str(variant), *map(str, (budget, row, slot, column))]
    with Path(tempfile.gettempdir(), f"attnres-aot-trap-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several traps at once have cost a machine its GPU: one at a time
        done = subprocess.run(
            [sys.executable, "-c", GIVE_UP, *arguments], env={**os.environ, "PYTHONPATH": path}, capture_output=True,
            text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", RINGS)
def test_with_a_budget_a_missing_publisher_is_named(kind, choose, consumer):
    variant = choose(RINGS[kind])
    place = (2, variant.slots - 1, 8 * 517)
    saw = give_up(consumer.bundle.path, variant, 1 << 16, *place)
    assert saw["before"] is None
    assert "CUDA" in saw["error"]
    assert saw["found"] == [str(variant), *place]
    assert saw["seconds"] < 20
    assert f"ring consumer {variant}" in saw["refusal"]
    assert f"slot {place[1]}, row 2, elements 4136 to 4143" in saw["fault"]


def test_the_budget_is_what_bounds_the_wait(choose, consumer, notes):
    """Two budgets in two processes: the difference in time is that of the polls between them."""
    variant, few, many = choose(RINGS["ring"]), 1 << 16, 1 << 21
    times = [give_up(consumer.bundle.path, variant, budget, 0, 0, 0)["seconds"] for budget in (few, many)]
    poll_ns = (times[1] - times[0]) / (many - few) * 1e9
    notes.append(f"- a poll takes {poll_ns:.0f} ns: a budget of {many} polls ended a launch after {times[1]:.2f} s")
    assert 50 < poll_ns < 20_000


@pytest.mark.parametrize("kind", RINGS)
def test_without_a_budget_it_waits_until_the_row_comes(kind, choose, consumer, banks):
    """Half a second is millions of polls; then the missing fragment is published and everything is right."""
    prepared = prepare(case_of(choose(RINGS[kind]), rows=3), banks)
    source, values = prepared.arena.views.source, prepared.before.views.source
    middle = source.shape[-1] // 16 * 8
    fragment = (-1, 2, slice(middle, middle + 8))
    launch = consumer.bind(prepared.case, prepared.arena.views, spin_budget=0)
    publisher = torch.cuda.Stream(consumer.device)

    def publish() -> None:
        with torch.cuda.stream(publisher):
            source[fragment].view(torch.int32).copy_(values[fragment].view(torch.int32))

    # Everything is launched once, alone: loading may wait for the kernel that waits for what is loaded. No stream here
    # waits for another, so what one reads must be there before it starts.
    torch.cuda.synchronize(consumer.device)
    publish()
    torch.cuda.synchronize(consumer.device)
    launch()
    torch.cuda.synchronize(consumer.device)
    refill(prepared)
    reference.arm(source[fragment])
    torch.cuda.synchronize(consumer.device)
    done = torch.cuda.Event()
    launch()
    done.record()
    time.sleep(0.5)
    waiting = not done.query()
    publish()
    wait(consumer.device, str(prepared.case))
    assert waiting
    publisher.synchronize()
    problems = judge(prepared).problems
    assert not problems, "\n".join(problems)


def graph_of(consumer, prepared, budget, launches=20):
    """A graph that fills the mailbox and consumes it, again and again."""
    launch = consumer.bind(prepared.case, prepared.arena.views, spin_budget=budget)
    rows = slice(0, prepared.case.rows)
    source, values = (a.views.source.view(torch.int32)[:, rows] for a in (prepared.arena, prepared.before))
    source.copy_(values)
    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            source.copy_(values)
            launch()
    graph.replay()
    wait(consumer.device, "warm-up")
    return graph


def replay_us(graph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def test_a_budget_costs_nothing(choose, consumer, banks, notes):
    """Copy and consumer in graphs of 20, with and without a budget, replayed in turn: medians of 60 replays each."""
    ratios = {}
    for kind, condition in RINGS.items():
        for rows in (1, 4, 16, 64):
            prepared = prepare(case_of(choose(condition), rows), banks)
            graphs = [graph_of(consumer, prepared, budget) for budget in (0, 1 << 20)]
            times: list[list[float]] = [[], []]
            for _ in range(60):
                for graph, found in zip(graphs, times, strict=True):
                    found.append(replay_us(graph))
            without, budgeted = (statistics.median(found) / 20 for found in times)
            ratios[kind, rows] = budgeted / without
            notes.append(f"- {kind}, {rows} rows: {without:.2f} us without a budget, {budgeted:.2f} us with one")
    median = statistics.median(ratios.values())
    notes.append(f"- a budget costs a factor of {median:.4f} (median), {max(ratios.values()):.4f} (largest)")
    assert median < 1.03, ratios


def test_a_trap_ends_the_context_of_its_own_process_alone(choose, consumer, banks):
    prepared = prepare(case_of(choose(RINGS["ring"]), rows=3), banks)
    give_up(consumer.bundle.path, prepared.case.variant, 1 << 12, 0, 0, 0)
    consumer.launch(prepared.case, prepared.arena.views)
    wait(consumer.device, str(prepared.case))
    problems = judge(prepared).problems
    assert not problems, "\n".join(problems)

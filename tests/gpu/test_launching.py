"""What a serving engine does with launches: streams, graphs, threads, devices, dependent launches, late peers."""

import dataclasses
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from attnres_aot.selftest import reference
from attnres_aot.selftest.arena import DENSE, PADDED
from attnres_aot.selftest.cases import Case, draw_banks, prepare, refill
from attnres_aot.selftest.check import judge
from attnres_aot.selftest.inputs import FAMILIES
from attnres_aot.selftest.loaded import LoadedConsumer
from attnres_aot.selftest.suite import wait

ROOT = Path(__file__).parents[2]
SLEEP_CYCLES = 20_000_000
"""About 10 ms of GPU time: far longer than any launch."""
PATIENCE = 1 << 24
"""Polls, some ten seconds, after which a consumer whose rows never come ends in a named fault instead of a hang."""

KINDS = {
    "first": lambda v: v.key.nb == 0,
    "ordinary": lambda v: not v.slots and not v.stats and v.key.has_delta and v.key.nb and v.key.write is None,
    "write": lambda v: not v.slots and not v.stats and v.key.has_delta and v.key.write is not None,
    "final": lambda v: not v.slots and not v.stats and v.key.final,
    "ring-of-one": lambda v: v.slots == 1 and not v.stats,
    "ring": lambda v: v.slots > 1 and not v.stats and v.key.has_delta,
    "statistics": lambda v: v.stats and not v.slots,
    "ring-statistics": lambda v: v.stats and v.slots > 1,
}


def case_of(variant, rows=7, layout=DENSE, **changes) -> Case:
    given = {"eps": 1e-5, "out_eps": 1e-5, "steep": False, "start": 0, **changes}
    return Case(variant=variant, rows=rows, layout=layout, **given)


def check(prepared):
    wait(prepared.arena.words.device, str(prepared.case))
    problems = judge(prepared).problems
    assert not problems, "\n".join(problems)


@pytest.fixture(params=KINDS)
def kind(request, choose):
    return choose(KINDS[request.param])


def test_launches_on_the_current_stream(kind, consumer, banks):
    """The inputs are put in place on a side stream after a long sleep; a launch elsewhere would not see them."""
    prepared = prepare(case_of(kind), banks)
    launch = consumer.bind(prepared.case, prepared.arena.views)
    launch()  # loads the image
    wait(consumer.device, "warm-up")
    prepared.arena.words.copy_(prepared.before.words)
    prepared.arena.views.out.fill_(1.0)
    prepared.arena.views.prefix.fill_(1.0)
    stream = torch.cuda.Stream(consumer.device)
    stream.wait_stream(torch.cuda.current_stream(consumer.device))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        refill(prepared)
        launch()
    stream.synchronize()
    check(prepared)


def test_graph_replays_mixed_with_eager_launches(kind, consumer, banks):
    captured, eager = prepare(case_of(kind, rows=16), banks), prepare(case_of(kind, rows=3, layout=PADDED), banks)
    launch = consumer.bind(captured.case, captured.arena.views)
    launch_eager = consumer.bind(eager.case, eager.arena.views)
    launch_eager()
    consumer.loaded.preload()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for _ in range(3):
        refill(captured)
        refill(eager)
        launch_eager()
        graph.replay()
        check(captured)
        check(eager)


def test_one_graph_of_many_launches(choose, consumer, banks):
    consumer.loaded.preload()
    items = [prepare(case_of(choose(KINDS[name]), rows=1 + 5 * i), banks) for i, name in enumerate(KINDS)]
    launches = [consumer.bind(item.case, item.arena.views) for item in items]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    for _ in range(2):
        for item in items:
            refill(item)
        graph.replay()
        for item in items:
            check(item)


def test_no_rows_launch_nothing(kind, consumer, banks):
    prepared = prepare(case_of(kind, rows=2), banks)
    views = prepared.arena.views
    rows = {name: getattr(views, name)[:0] for name in ("prefix", "blocks", "out")}
    if not kind.slots:
        rows["source"] = views.source[:0]
    if views.aux is not None:
        rows["aux"] = views.aux[:0]
    empty = dataclasses.replace(views, **rows)
    result = consumer.bind(prepared.case, empty)()
    wait(consumer.device, "no rows")
    assert result is empty.out
    assert torch.equal(prepared.arena.words, prepared.before.words)


@pytest.mark.parametrize("operand", ["prefix", "out"])
def test_source_may_be_the_very_view_that_is_written(operand, choose, consumer, banks):
    prepared = prepare(case_of(choose(lambda v: KINDS["ordinary"](v) and not v.aux), rows=7), banks)
    views = prepared.arena.views
    if operand == "prefix":
        views.prefix.copy_(views.source)
    else:
        views.out.copy_(views.source)
    shared = dataclasses.replace(views, source=getattr(views, operand))
    before = prepared.arena.clone()
    expected = consume(prepared.case, before.views, getattr(before.views, operand))
    prepared = dataclasses.replace(prepared, before=before, expected=expected)
    consumer.bind(prepared.case, shared)()
    check(prepared)


def test_same_inputs_give_the_same_bits(kind, consumer, banks):
    prepared = prepare(case_of(kind, rows=64, steep=True), banks)
    launch = consumer.bind(prepared.case, prepared.arena.views)
    launch()
    check(prepared)
    first = prepared.arena.words.clone()
    differs = torch.zeros((), dtype=torch.bool, device=consumer.device)
    for _ in range(200):
        refill(prepared)
        launch()
        differs |= (prepared.arena.words != first).any()
    wait(consumer.device, "repeated launches")
    assert not differs


def test_threads_launch_at_once(choose, consumer, banks):
    """Eight threads, each with a stream of its own, launch different consumers, two of them the same object."""
    consumer.loaded.preload()
    shared = prepare(case_of(choose(KINDS["ordinary"]), rows=5), banks)
    shared_launch = consumer.bind(shared.case, shared.arena.views)
    items = [prepare(case_of(choose(KINDS[name]), rows=9), banks) for name in KINDS]
    launches = [consumer.bind(item.case, item.arena.views) for item in items]
    torch.cuda.synchronize()
    problems: list[str] = []
    lock, start = threading.Lock(), threading.Barrier(len(items))

    def work(item, launch):
        try:
            stream = torch.cuda.Stream(consumer.device)
            start.wait()
            with torch.cuda.stream(stream):
                for _ in range(40):
                    refill(item)
                    launch()
                    stream.synchronize()
                    with lock:
                        refill(shared)
                        shared_launch()
                        problems.extend(judge(shared).problems)
                    problems.extend(judge(item).problems)
        except Exception as error:  # noqa: BLE001 - a thread's error must reach the test
            problems.append(repr(error))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(items, launches, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, "\n".join(problems[:10])


@pytest.mark.parametrize("ordinal", range(max(1, torch.cuda.device_count())))
def test_every_device_of_the_process(ordinal, choose, seed, consumer):
    """Launches go to the tensors' device while device 0 is the current one."""
    device = f"cuda:{ordinal}"
    there = LoadedConsumer.open(str(consumer.bundle.path), device)
    manifest = there.bundle.manifest
    banks = draw_banks(manifest.model.hidden, manifest.mailbox.capacity, seed, torch.device(device))
    for condition in KINDS.values():
        prepared = prepare(case_of(choose(condition), rows=7), banks)
        torch.cuda.synchronize(device)
        with torch.cuda.device(0):
            there.bind(prepared.case, prepared.arena.views)()
            assert torch.cuda.current_device() == 0
        torch.cuda.synchronize(device)
        check(prepared)


RINGS = {
    **{name: KINDS[name] for name in ("ring-of-one", "ring", "ring-statistics")},
    "ring-of-one-few-blocks": lambda v: v.slots == 1 and not v.stats and v.key.nb == 1,
    "ring-few-blocks": lambda v: v.slots > 1 and not v.stats and v.key.nb in (1, 4),
}
"""Kinds of mailbox consumers that differ in what they do between polling and adding up."""


@pytest.mark.parametrize("name", RINGS)
def test_a_ring_waits_for_late_publishers(name, choose, consumer, banks):
    """The consumer is launched first; its rows come later, slot by slot from the last, on another stream."""
    prepared = prepare(case_of(choose(RINGS[name]), rows=4), banks)
    source, rows = prepared.arena.views.source, prepared.case.rows
    launch = consumer.bind(prepared.case, prepared.arena.views, spin_budget=PATIENCE)
    publisher, waiter = torch.cuda.Stream(consumer.device), torch.cuda.Stream(consumer.device)

    def publish(cycles: int) -> None:
        with torch.cuda.stream(publisher):
            for slot in reversed(range(source.shape[0])):
                torch.cuda._sleep(cycles)
                for row in range(rows):
                    source[slot, row].copy_(prepared.before.views.source[slot, row])

    # Everything is launched once, alone: loading may wait for the kernel that waits for what is loaded. No stream here
    # waits for another, so what one reads must be there before it starts.
    torch.cuda.synchronize(consumer.device)
    publish(1)
    torch.cuda.synchronize(consumer.device)
    launch()
    wait(consumer.device, "warm-up")
    for _ in range(40):
        refill(prepared)
        reference.arm(source[:, :rows])
        torch.cuda.synchronize(consumer.device)
        with torch.cuda.stream(waiter):
            launch()
        publish(50_000)
        with torch.cuda.stream(waiter):
            wait(consumer.device, str(prepared.case))
        publisher.synchronize()
        check(prepared)


def consume(case, views, source):
    return reference.consume(case.variant, dataclasses.replace(views, source=source), (case.eps, case.out_eps))


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
def test_dependent_launches_in_a_correct_chain(captured, choose, consumer, banks):
    """Every link's delta is the output of the link before; all else was complete long before. PDL is on throughout."""
    consumer.loaded.preload()
    names = ["ordinary", "write", "final", "statistics", "ordinary"] * 3
    links = [prepare(case_of(choose(KINDS[name]), rows=16, start=len(FAMILIES)), banks) for name in names]
    first = links[0].before.views.source.clone()
    sources = [links[0].arena.views.source, *(link.arena.views.out for link in links[:-1])]
    launches = [
        consumer.bind(link.case, dataclasses.replace(link.arena.views, source=source), pdl=True)
        for link, source in zip(links, sources, strict=True)
    ]

    def run():
        sources[0].copy_(first)
        for launch in launches:
            launch()

    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            run()
    for _ in range(25):
        for link in links:
            refill(link)
        sources[0].fill_(float("nan"))
        torch.cuda.synchronize(consumer.device)
        if captured:
            graph.replay()
        else:
            run()
        wait(consumer.device, "a chain of dependent launches")
        for link, source in zip(links, sources, strict=True):
            expected = consume(link.case, link.before.views, source)
            check(dataclasses.replace(link, expected=expected))


FORK = """
import os, sys, torch
from attnres_aot.selftest.cases import Case, draw_banks, prepare
from attnres_aot.selftest.arena import DENSE
from attnres_aot.selftest.loaded import LoadedConsumer
from attnres_aot.errors import AttnResError
from attnres_aot.spec.variants import parse_variant

consumer = LoadedConsumer.open(None)
banks = draw_banks(consumer.bundle.manifest.model.hidden, 64, 1, consumer.device)
case = Case(variant=parse_variant(sys.argv[1]), rows=3, layout=DENSE, eps=1e-5, out_eps=1e-5, steep=False, start=0)
prepared = prepare(case, banks)
launch = consumer.bind(case, prepared.arena.views)
launch()
torch.cuda.synchronize()
child = os.fork()
if child == 0:
    try:
        launch()
    except AttnResError as error:
        print("refused:", error, flush=True)
        os._exit(0 if "fork" in str(error) else 3)
    os._exit(4)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
launch()
torch.cuda.synchronize()
print("child", status)
sys.exit(status)
"""


def run_program(program: str, *arguments: str) -> str:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], env={**os.environ, "PYTHONPATH": path}, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_launch_in_a_forked_child_is_refused(choose, consumer):
    assert "refused: " in run_program(FORK, str(choose(KINDS["ordinary"])))

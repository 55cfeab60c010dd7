"""A soak of the mailbox protocol on one device: two ranks on two streams publish to each other, round after round.

Nothing but the mailboxes orders the streams. In a round each rank publishes its share of the slots into both ranks'
mailboxes (with one slot: into the other's) and consumes its own, which waits for what the other publishes. Every rank
has two mailboxes, for even and odd rounds, because one is not enough: a rank's consumer of round r ends as soon as the
other has published r, and what the rank publishes next could meet a mailbox from which the other has not yet taken r.
With two, round r + 2 is published after the rank's consumer of r + 1 has ended, which waited for what the other
published in r + 1, which the other's stream put after its own consumer of round r.

What a consumer waits for must be able to start beside it, however many rows it spins for. On one GPU the launch that
publishes therefore needs a hardware queue of its own, and must not be one of clusters, which may not be started there;
a copy and this package's publisher are not. Consumers are: that of the round before may have to start beside the other
rank's. 64 rows of 7 CTAs leave room for that on 132 SMs, which hold 4 or more such CTAs each; one cluster at a time is
enough, since its rows are there and it ends at once.

Every round is checked on the device, bit for bit, and counted there, so that the host never waits and the streams run
into each other as they like. What is expected comes from launches with nothing beside them.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from attnres_aot.errors import DriverError
from attnres_aot.selftest import reference
from attnres_aot.selftest.inputs import Bank
from attnres_aot.selftest.suite import DeviceLostError, naming_device_failures, wait
from attnres_aot.spec.variants import Variant
from tests.support.ranks import SETS, Bind, Material, Publish, Rank, publish_words

RANKS = 2
"""Ranks, one stream each."""
LONGEST_SLEEP = 30_000
"""Cycles that a rank sleeps at most before it publishes or consumes: some 15 us, several launches."""
ROUNDS_BETWEEN_LOOKS = 512
"""Rounds after which the host looks whether the ranks still run and whether all was right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What both ranks do in one round; tuples hold an entry per rank unless they say otherwise."""

    content: int
    """Which set of values is published."""
    rows: int
    """How many rows."""
    sleeps: tuple[tuple[int, int], ...]
    """Cycles slept before publishing and before consuming."""
    pdl: tuple[bool, ...]
    """Launch the consumer with programmatic stream serialization."""
    order: tuple[int, ...]
    """Ranks in the order in which the host enqueues them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakResult:
    """What a soak found."""

    rounds: int
    """Rounds run; each has a consumer launch per rank."""
    replayed: int
    """Rounds of them that were replayed from graphs."""
    wrong: tuple[int, ...]
    """Rounds, per rank, whose prefix or output had a wrong bit."""
    not_armed: int
    """Mailbox words that were not empty in the end."""
    seconds: float
    """Time from the first round to the last."""


class Soak:
    """Two ranks with their material: `record` graphs if wanted, then `run`."""

    def __init__(
        self,
        variants: tuple[Variant, Variant],
        bank: Bank,
        capacity: int,
        bind: Bind,
        *,
        row_counts: Sequence[int],
        seed: int,
        publish: Publish = publish_words,
    ) -> None:
        """Allocates everything, and finds out what each round must give.

        Args:
          variants: the consumer of each rank, both of the same slots; see `Rank` for what they must be.
          bank: values.
          capacity: rows of a mailbox slot.
          bind: makes consumers.
          row_counts: row counts of rounds, 1 to capacity each.
          seed: decides the rounds.
          publish: publishes.

        Raises:
          CompileError: a launch by itself is not what the reference says.
        """
        self._random = random.Random(seed)
        self._row_counts, self._publish = tuple(row_counts), publish
        self._device = bank.norm.device
        self._last = 0
        self._graphs: list[tuple[int, list[torch.cuda.CUDAGraph]]] = []
        self._sleep: Callable[[int], object] = lambda _: None
        if self._device.type == "cuda":
            self._sleep = torch.cuda._sleep
        material = Material(bank, variants[0].slots, capacity)
        self._ranks = [Rank(index, variant, material) for index, variant in enumerate(variants)]
        for rank in self._ranks:
            rank.bind(bind, row_counts)
            for content in range(SETS):
                for rows in row_counts:
                    rank.expect(content, rows, publish)

    def record(self, graphs: int, rounds: int) -> None:
        """Captures graphs of `rounds` rounds, an even number, for `run` to replay among its eager rounds."""
        self._warm_up()
        for _ in range(graphs):
            plan = [self._draw() for _ in range(rounds)]
            pair = []
            for rank in self._ranks:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=rank.stream):
                    for number, each in enumerate(plan):
                        self._produce(rank, each, number % 2)
                        self._consume(rank, each, number % 2)
                pair.append(graph)
            self._graphs.append((rounds, pair))

    def run(self, rounds: int) -> SoakResult:
        """Runs at least `rounds` rounds, some eagerly and some from graphs; stops early once a round was wrong.

        Raises:
          DeviceLostError: a rank waits for ever, or a launch broke the device; says at which round the host was, and
            which ring consumer gave up, if one did.
        """
        self._warm_up()
        started, done, replayed, looked = time.monotonic(), 0, 0, 0
        while done < rounds:
            with _naming(f"round {done} of {rounds}"):
                if self._graphs and self._random.random() < 0.5:
                    count = self._replay()
                    replayed += count
                else:
                    count = self._some_rounds()
            done += count
            if done - looked >= ROUNDS_BETWEEN_LOOKS:
                looked = done
                self._settle(f"round {done} of {rounds}")
                if any(rank.wrong for rank in self._ranks):
                    break
        self._settle("the last round")
        armed = [reference.is_armed(mailbox) for rank in self._ranks for mailbox in rank.mailboxes]
        return SoakResult(
            rounds=done,
            replayed=replayed,
            wrong=tuple(int(rank.wrong) for rank in self._ranks),
            not_armed=sum(int((~words).sum()) for words in armed),
            seconds=time.monotonic() - started,
        )

    def _draw(self) -> Round:
        """Draws a round whose content is not that of the round drawn before."""
        draw = self._random
        self._last = (self._last + draw.randrange(1, SETS)) % SETS

        def sleep() -> int:
            return draw.randrange(LONGEST_SLEEP) if draw.random() < 0.25 else 0

        return Round(
            content=self._last,
            rows=draw.choice(self._row_counts),
            sleeps=tuple((sleep(), sleep()) for _ in range(RANKS)),
            pdl=tuple(draw.random() < 0.5 for _ in range(RANKS)),
            order=tuple(draw.sample(range(RANKS), RANKS)),
        )

    def _replay(self) -> int:
        """Replays a recorded pair of graphs; returns its rounds."""
        count, graphs = self._random.choice(self._graphs)
        for index in self._random.sample(range(RANKS), RANKS):
            with self._ranks[index].current():
                graphs[index].replay()
        return count

    def _some_rounds(self) -> int:
        """Enqueues a few rounds, an even number, and returns it."""
        count = 2 * self._random.randint(1, 4)
        for number in range(count):
            self._enqueue(self._draw(), number % 2, apart=self._random.random() < 0.5)
        return count

    def _enqueue(self, each: Round, parity: int, *, apart: bool) -> None:
        """Enqueues a round, one rank after the other, or `apart`: what both publish, then both consumers."""
        ranks = [self._ranks[index] for index in each.order]
        if apart or self._device.type != "cuda":
            steps = [(rank, step) for step in (self._produce, self._consume) for rank in ranks]
        else:
            steps = [(rank, step) for rank in ranks for step in (self._produce, self._consume)]
        for rank, step in steps:
            with rank.current():
                step(rank, each, parity)

    def _produce(self, rank: Rank, each: Round, parity: int) -> None:
        before, _ = each.sleeps[rank.index]
        if before:
            self._sleep(before)
        rank.put(each.content, each.rows)
        for owner in self._ranks:
            share = rank.share(owner)
            if share.stop > share.start:
                values = rank.material.values[each.content, share, : each.rows]
                self._publish(owner.mailboxes[parity], share, values)

    def _consume(self, rank: Rank, each: Round, parity: int) -> None:
        _, before = each.sleeps[rank.index]
        if before:
            self._sleep(before)
        rank.consume(each.rows, parity, pdl=each.pdl[rank.index])
        rank.count(each.content, each.rows)

    def _warm_up(self) -> None:
        """Runs everything once with the host in between: loading code may wait for a kernel that waits for it."""
        wait(self._device, "what the ranks were given")
        with _naming("the warm-up"):
            for parity in range(2):
                for rows in self._row_counts:
                    for pdl in (False, True):
                        each = Round(content=0, rows=rows, sleeps=((1, 1),) * RANKS, pdl=(pdl,) * RANKS, order=(0, 1))
                        for step in (self._produce, self._consume):
                            for rank in self._ranks:
                                with rank.current():
                                    step(rank, each, parity)
                            self._settle("the warm-up")
            for _, graphs in self._graphs:
                for rank, graph in zip(self._ranks, graphs, strict=True):
                    with rank.current():
                        graph.replay()
                self._settle("the first replay of a graph")

    def _settle(self, what: str) -> None:
        """Waits for both ranks, but not for ever."""
        for rank in self._ranks:
            with rank.current():
                wait(self._device, f"rank {rank.index}, {what}")


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
    """Says where the host was when torch or the loader reported that an earlier launch broke the device."""
    try:
        with naming_device_failures(what):
            yield
    except DeviceLostError:
        raise
    except DriverError as error:
        raise DeviceLostError(f"{what}: {error}") from error

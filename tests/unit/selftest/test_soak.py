"""The soak finds what a ring consumer or a publisher does wrong, with a simulated consumer and one thread."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from simulated_consumer import SimulatedConsumer

from attnres_aot.errors import CompileError, DriverError
from attnres_aot.selftest import reference, suite
from attnres_aot.selftest.arena import DENSE
from attnres_aot.selftest.cases import Case
from attnres_aot.selftest.reference import Operands
from attnres_aot.spec.variants import parse_variant
from tests.support.ranks import EPS, Bound, publish_words
from tests.support.soak import Soak

CAPACITY = 8
ROW_COUNTS = (1, 3, 8)


class Simulation:
    """Binds simulated consumers; `defect` is called after every launch with its number, its views and its rows."""

    def __init__(self, defect: Callable[[int, Operands, int], None] = lambda number, views, rows: None) -> None:
        self.number, self.defect = 0, defect
        self.rows: list[int] = []

    def bind(self, bound: Bound):
        def launch(prefix, blocks, out) -> None:
            given, rows = bound.operands, out.shape[0]
            views = Operands(
                source=bound.mailbox, prefix=prefix, blocks=blocks, norm=given.norm, query=given.query,
                out_norm=given.out_norm, out=out, mixture=given.mixture, scal=given.scal,
            )  # fmt: skip
            case = Case(
                variant=bound.variant, rows=rows, layout=DENSE, eps=EPS, out_eps=EPS, steep=False,
                start=0,
            )  # fmt: skip
            SimulatedConsumer().launch(case, views)
            self.number += 1
            self.rows.append(rows)
            self.defect(self.number, views, rows)

        return launch


def soak(simulation: Simulation, banks, names=("nb2-delta-ring2", "nb1-delta-ring2"), publish=publish_words) -> Soak:
    variants = tuple(parse_variant(name) for name in names)
    return Soak(
        variants, banks.mild, CAPACITY, simulation.bind, row_counts=ROW_COUNTS, seed=3, publish=publish
    )  # fmt: skip


PAIRS = [
    ("nb2-delta-ring1", "nb1-delta-ring1"),
    ("nb2-delta-ring2", "nb2-delta-ring2"),
    ("nb1-delta-ring8", "nb2-delta-final-ring8"),
    ("nb2-delta-ring16-stats", "nb2-delta-ring16"),
]


@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_correct_ranks_pass(names, banks):
    simulation = Simulation()
    each = soak(simulation, banks, names)
    set_up = len(simulation.rows)
    result = each.run(20)
    assert (result.wrong, result.not_armed, result.replayed) == ((0, 0), 0, 0)
    assert 20 <= result.rounds < 28
    warm_up = 2 * 2 * 2 * len(ROW_COUNTS)
    assert len(simulation.rows) == set_up + warm_up + 2 * result.rounds
    assert set(simulation.rows[set_up + warm_up :]) == set(ROW_COUNTS)


LATE = 2 * 6 * len(ROW_COUNTS) + 2 * 2 * 2 * len(ROW_COUNTS) + 7
"""A launch well after the set-up and the warm-up."""


def once(change: Callable[[Operands, int], None]) -> Callable[[int, Operands, int], None]:
    def defect(number: int, views: Operands, rows: int) -> None:
        if number == LATE:
            change(views, rows)

    return defect


@dataclass(frozen=True)
class Defect:
    name: str
    change: Callable[[Operands, int], None]


def _flip(tensor: torch.Tensor) -> None:
    tensor.view(torch.int16)[-1, -1] ^= 1


DEFECTS = [
    Defect("one-bit-of-out", lambda views, rows: _flip(views.out)),
    Defect("one-bit-of-prefix", lambda views, rows: _flip(views.prefix)),
    Defect("out-not-written", lambda views, rows: views.out.fill_(0.0)),
    Defect("negative-zero", lambda views, rows: views.out.view(torch.int16)[0, :1].fill_(-0x8000)),
]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_one_wrong_launch_is_counted(defect, banks):
    result = soak(Simulation(once(defect.change)), banks).run(20)
    assert sum(result.wrong) == 1


def test_a_word_left_behind_shows_in_the_end(banks):
    def leave(views: Operands, rows: int) -> None:
        views.source.view(torch.int32)[1, rows - 1, 5] = 7

    simulation = Simulation(lambda number, views, rows: leave(views, rows) if number > LATE else None)
    assert soak(simulation, banks).run(20).not_armed > 0


def test_a_publisher_that_leaves_out_a_slot_is_found(banks):
    def publish(mailbox, slots, values) -> None:
        publish.calls += 1
        if publish.calls != 2 * LATE:
            publish_words(mailbox, slots, values)

    publish.calls = 0
    assert sum(soak(Simulation(), banks, publish=publish).run(40).wrong) >= 1
    assert publish.calls > 2 * LATE


def test_a_consumer_that_is_wrong_by_itself_is_refused(banks):
    simulation = Simulation(lambda number, views, rows: views.out.mul_(1.1))
    with pytest.raises(CompileError, match="nb2-delta-ring2 is wrong by itself, for 1 rows"):
        soak(simulation, banks)


def test_what_is_published_holds_no_negative_zero(banks):
    published = []

    def publish(mailbox, slots, values) -> None:
        published.append(bool((values.view(torch.int16) == reference.NEGATIVE_ZERO).any()))
        publish_words(mailbox, slots, values)

    soak(Simulation(), banks, publish=publish)
    assert published
    assert not any(published)


def test_equal_seeds_give_equal_rounds(banks):
    runs = []
    for _ in range(2):
        simulation = Simulation()
        soak(simulation, banks).run(20)
        runs.append(simulation.rows)
    assert runs[0] == runs[1]


FAILURE = "CUDA error: unspecified launch failure"
GAVE_UP = "ring consumer nb2-delta-ring2 gave up"
REPORTS = {
    "torch-knows-no-more": (RuntimeError(FAILURE), None, f"the device failed: {FAILURE}"),
    "a-consumer-gave-up": (RuntimeError(FAILURE), GAVE_UP, GAVE_UP),
    "the-loader-knows": (DriverError(f"launch refused: {GAVE_UP}"), GAVE_UP, f"launch refused: {GAVE_UP}"),
}


@pytest.mark.parametrize(("error", "fault", "says"), REPORTS.values(), ids=REPORTS)
def test_a_launch_that_broke_the_device_is_named_with_the_round(error, fault, says, banks, monkeypatch):
    """The host is far ahead of the device, so whichever call comes next is the one that fails."""
    monkeypatch.setattr(suite, "read_fault", lambda: fault)

    def publish(mailbox, slots, values) -> None:
        publish_words(mailbox, slots, values)
        if len(simulation.rows) > LATE:
            raise error

    simulation = Simulation()
    each = soak(simulation, banks, publish=publish)
    with pytest.raises(suite.DeviceLostError, match=rf"^round \d+ of 20: {re.escape(says)}$") as raised:
        each.run(20)
    assert raised.value.__cause__ is error


def test_a_launch_that_broke_the_device_in_the_warm_up_is_named(banks):
    def publish(mailbox, slots, values) -> None:
        if len(simulation.rows) > 2 * 6 * len(ROW_COUNTS):
            raise RuntimeError(FAILURE)
        publish_words(mailbox, slots, values)

    simulation = Simulation()
    with pytest.raises(suite.DeviceLostError, match=f"^the warm-up: the device failed: {FAILURE}$"):
        soak(simulation, banks, publish=publish).run(20)

"""The checker passes a correct fp32 consumer and catches every planted defect."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from simulated_consumer import SimulatedConsumer

from attnres_aot.selftest import reference
from attnres_aot.selftest.arena import BLOCK_MAJOR, DENSE, PADDED
from attnres_aot.selftest.cases import ROW_COUNTS, Case, cases_for, prepare
from attnres_aot.selftest.check import judge
from attnres_aot.selftest.reference import Operands
from attnres_aot.selftest.suite import check_case, check_subject
from attnres_aot.spec.variants import parse_variant

GOOD = [
    "nb0-write0-aux",
    "nb1-delta",
    "nb3",
    "nb7-delta-write7",
    "nb8-delta-final",
    "nb8-delta-ring1-aux",
    "nb4-delta-write4-ring8",
    "nb2-delta-ring16",
    "nb8-delta-final-ring8-aux-stats",
    "nb5-delta-aux-stats",
    "nb1-stats",
]


@pytest.mark.parametrize("name", GOOD)
def test_correct_consumer_passes(name, banks):
    result = check_subject(parse_variant(name), SimulatedConsumer(), banks, (1, 3, 64), salt=GOOD.index(name))
    assert result.problems == ()
    assert result.launches == 9
    assert 1.4e-3 < result.relative_error < 1.9e-3
    assert result.fp32_limited < 2e-3 * result.elements


def _touch(field: str, index: tuple, value: float = 1.0) -> Callable[[Case, Operands], None]:
    def after(case: Case, views: Operands) -> None:
        getattr(views, field)[index] = value

    return after


def _beyond(field: str) -> Callable[[Case, Operands], None]:
    """Writes one element just after the last used row of an operand."""

    def after(case: Case, views: Operands) -> None:
        view = getattr(views, field)
        offset = view.storage_offset() + case.rows * view.stride(0)
        view.as_strided((1,), (1,), offset).fill_(1.0)

    return after


def _before(field: str) -> Callable[[Case, Operands], None]:
    def after(case: Case, views: Operands) -> None:
        view = getattr(views, field)
        view.as_strided((1,), (1,), view.storage_offset() - 1).fill_(1.0)

    return after


def _stale_aux(case: Case, views: Operands) -> None:
    views.aux[case.rows - 1, :8] = float("nan")


def _spread_nan(case: Case, views: Operands) -> None:
    """NaN leaks from a bad row into a neighbour."""
    bad = views.out.isnan().any(1).nonzero().flatten().tolist()
    views.out[(bad[0] + 1) % case.rows, 0] = float("nan")


@dataclass(frozen=True, kw_only=True)
class Defect:
    name: str
    variant: str
    consumer: SimulatedConsumer
    says: str


DEFECTS = [
    Defect(name="prefix-truncated", variant="nb1-delta", consumer=SimulatedConsumer(cut_prefix=True), says="prefix["),
    Defect(
        name="slots-reversed",
        variant="nb1-delta-ring8",
        consumer=SimulatedConsumer(slot_order=lambda slots: list(slots)[::-1]),
        says="prefix[",
    ),
    Defect(
        name="slots-even-first",
        variant="nb1-delta-ring8",
        consumer=SimulatedConsumer(slot_order=lambda slots: [*slots[::2], *slots[1::2]]),
        says="prefix[",
    ),
    Defect(
        name="slot-sum-unrounded",
        variant="nb1-delta-ring8",
        consumer=SimulatedConsumer(round_slot_sum=False),
        says="prefix[",
    ),
    Defect(name="wrong-eps", variant="nb2-delta", consumer=SimulatedConsumer(eps_factor=1.2), says="1 ulp"),
    Defect(name="wrong-out-eps", variant="nb2-delta", consumer=SimulatedConsumer(out_eps_factor=0.8), says="1 ulp"),
    Defect(name="no-eps", variant="nb2-delta", consumer=SimulatedConsumer(eps_factor=0.0), says="NaN or Inf"),
    Defect(
        name="softmax-unshifted",
        variant="nb2-delta",
        consumer=SimulatedConsumer(shift_softmax=False),
        says="families aligned",
    ),
    Defect(name="block-forgotten", variant="nb8-delta", consumer=SimulatedConsumer(skip_block=7), says="1 ulp"),
    Defect(
        name="subnormals-flushed",
        variant="nb2-delta",
        consumer=SimulatedConsumer(flush_subnormals=True),
        says="(families subnormal)",
    ),
    Defect(name="final-unrounded", variant="nb8-delta-final", consumer=SimulatedConsumer(round_mix=False), says="ulp"),
    Defect(name="rounded-not-final", variant="nb8-delta", consumer=SimulatedConsumer(round_mix=True), says="relative"),
    Defect(name="out-truncated", variant="nb8-delta", consumer=SimulatedConsumer(cut_out=True), says="relative error"),
    Defect(
        name="norm-by-fold-of-cancelling-rows",
        variant="nb1-delta-stats",
        consumer=SimulatedConsumer(norm_by_fold=True),
        says="families cancelling",
    ),
    Defect(
        name="one-word-not-re-armed",
        variant="nb1-delta-ring8",
        consumer=SimulatedConsumer(after=_touch("source", (5, 0, 17), 0.0)),
        says="source[5, 0, 17]",
    ),
    Defect(
        name="armed-beyond-the-rows",
        variant="nb1-delta-ring1",
        consumer=SimulatedConsumer(after=lambda case, views: reference.arm(views.source[0, : case.rows + 1])),
        says="source[0, 3, 0]",
    ),
    Defect(
        name="aux-not-written", variant="nb1-delta-aux", consumer=SimulatedConsumer(after=_stale_aux), says="aux[2, 0]"
    ),
    Defect(
        name="saved-block-touched",
        variant="nb2-delta",
        consumer=SimulatedConsumer(after=_touch("blocks", (1, 1, 3))),
        says="blocks[1, 1, 3]",
    ),
    Defect(
        name="unused-block-touched",
        variant="nb2-delta-write2",
        consumer=SimulatedConsumer(after=_touch("blocks", (1, 3, 3))),
        says="blocks[1, 3, 3]",
    ),
    *(
        Defect(
            name=f"{field}-row-beyond",
            variant="nb2-delta-aux-stats",
            consumer=SimulatedConsumer(after=_beyond(field)),
            says=f"{field}[3, ",
        )
        for field in ("prefix", "out", "aux", "blocks", "source", "mixture", "scal")
    ),
    Defect(
        name="guard-touched",
        variant="nb2-delta",
        consumer=SimulatedConsumer(after=_before("out")),
        says="guard zone before out",
    ),
    Defect(
        name="weights-touched",
        variant="nb2-delta",
        consumer=SimulatedConsumer(after=_touch("query", (9,))),
        says="query[9]",
    ),
    Defect(
        name="silent-overflow",
        variant="nb2-delta",
        consumer=SimulatedConsumer(report_overflow=False),
        says="1 ulp",
    ),
    Defect(
        name="damage-spreads",
        variant="nb2-delta",
        consumer=SimulatedConsumer(after=_spread_nan),
        says="NaN or Inf elsewhere",
    ),
]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_planted_defect_is_caught(defect, banks):
    rows = 3 if "[" in defect.says and defect.says != "prefix[" else 64
    result = check_subject(parse_variant(defect.variant), defect.consumer, banks, (rows,))
    assert any(defect.says in problem for problem in result.problems), "\n".join(result.problems)


@pytest.mark.parametrize("layout", [DENSE, PADDED, BLOCK_MAJOR], ids=lambda layout: layout.name)
def test_operands_are_aligned_and_apart(layout, banks):
    case = Case(
        variant=parse_variant("nb7-delta-write7-ring8-aux-stats"),
        rows=3, layout=layout, eps=1e-5, out_eps=1e-5, steep=False, start=0,
    )  # fmt: skip
    arena = prepare(case, banks).arena
    base = arena.words.data_ptr()
    for region in arena.regions:
        view = getattr(arena.views, region.name)
        assert view.data_ptr() == base + region.start
        assert view.data_ptr() % 16 == 0
        assert all(stride * view.element_size() % 16 == 0 for stride in view.stride()[:-1]) or region.name == "scal"
    gaps = [b.start - a.end for a, b in zip(arena.regions, arena.regions[1:], strict=False)]
    assert min(gaps) >= 4096
    assert arena.regions[0].start >= 4096
    assert arena.words.numel() * 4 >= arena.regions[-1].end + 4096


def test_a_launch_that_does_nothing_is_wrong_everywhere(banks):
    class Nothing:
        def launch(self, case, views):
            pass

    case = next(cases_for(parse_variant("nb7-delta-write7-ring8-aux"), (2,)))
    problems = "\n".join(check_case(case, Nothing(), banks).problems)
    for operand in ("source[0, 0, 0]", "prefix[0, 0]", "blocks[0, 7, 0]", "aux[0, 0]", "out[0, 0]"):
        assert operand in problems


def test_copies_must_be_bits_even_of_nan(banks):
    """A NaN that is only copied keeps its payload; one that was computed may be any NaN, but its copies agree."""
    case = next(cases_for(parse_variant("nb0-write0-aux"), (64,)))
    prepared = prepare(case, banks)
    SimulatedConsumer().launch(case, prepared.arena.views)
    assert judge(prepared).problems == ()
    row = int(prepared.expected.updated.isnan().any(1).nonzero()[0])
    column = int(prepared.expected.updated[row].isnan().nonzero()[0])
    prepared.arena.views.aux.view(torch.int16)[row, column] ^= 1
    assert f"aux[{row}, {column}]" in "\n".join(judge(prepared).problems)


def test_cases_cover_layouts_epsilons_and_both_weights():
    cases = list(cases_for(parse_variant("nb1-delta"), ROW_COUNTS, salt=3))
    assert {case.rows for case in cases} == set(ROW_COUNTS)
    assert {case.layout for case in cases} == {DENSE, PADDED, BLOCK_MAJOR}
    assert {(case.eps, case.out_eps) for case in cases} == {(a, b) for a in (1e-5, 1e-6) for b in (1e-5, 1e-6)}
    assert {case.steep for case in cases} == {False, True}
    assert len({str(case) for case in cases}) == len(cases)


def test_every_family_is_in_every_large_case(banks):
    case = replace(next(cases_for(parse_variant("nb1-delta"), (64,))), start=9)
    bank = banks.mild
    assert {f.name for f in bank.families[case.start : case.start + 64]} == {f.name for f in bank.families}

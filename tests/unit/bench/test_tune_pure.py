"""Deciding tables, writing them into configurations, and choosing launch shapes: no GPU needed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest

from attnres_aot.bench.results import Setting
from attnres_aot.bundle.manifest import Choice
from attnres_aot.config.reader import DEFAULT_CONFIG, parse_config
from attnres_aot.errors import ConfigError, UsageError
from attnres_aot.spec.tables import parse_table
from attnres_aot.tune import show
from attnres_aot.tune.command import check_config
from attnres_aot.tune.decide import AFTER, EXPOSED, MARGIN, READY, RULES, Cell, Decision, decide, spans
from attnres_aot.tune.shapes import ShapeTimes, best_choices
from attnres_aot.tune.yaml_tables import replace_deployments

SETTING = Setting(
    bundle="kimi_k3-sm_90", manifest_sha256="ab" * 32, gpu="NVIDIA X", driver="580", torch="2.11", date="2026-01-02",
    launches=20, replays=50,
)  # fmt: skip


def cell(nb: int, rows: int, ratio: float, slots: int = 0) -> Cell:
    """A cell of which every rule sees the same ratio."""
    return Cell(nb=nb, slots=slots, rows=rows, plain_us=2.0, ready_us=2 * ratio, chain_us=2 * ratio, beside_us=2.0)


@dataclass(frozen=True, kw_only=True)
class Spans:
    name: str
    on: tuple[int, ...]
    text: str


SPANS = [
    Spans(name="none", on=(), text=""),
    Spans(name="all", on=(1, 2, 4, 8, 64), text="1-64:1"),
    Spans(name="gap-is-off", on=(1, 2, 8, 64), text="1-2:1,8-64:1"),
    Spans(name="single", on=(4,), text="4:1"),
    Spans(name="nothing-beyond", on=(1,), text="1:1"),
]


@pytest.mark.parametrize("case", SPANS, ids=lambda case: case.name)
def test_between_two_measured_numbers_both_must_be_on(case: Spans) -> None:
    text = spans(case.on, (1, 2, 4, 8, 64))
    assert text == case.text
    assert str(parse_table(text).canonical()) == text


def test_what_is_on_wins_everywhere() -> None:
    """nb 8 wins at all rows, nb 4 only at small ones, nb 1 nowhere."""
    cells = [cell(8, rows, 0.5) for rows in (1, 8, 64)]
    cells += [cell(4, 1, 0.8), cell(4, 8, 1.0), cell(4, 64, 1.2)]
    cells += [cell(1, rows, 1.5) for rows in (1, 8, 64)]
    found = decide(cells, (0,), EXPOSED, MARGIN)
    assert (found.attn_stats, found.attn_stats_blocks) == ("1-64:1", "8:1")
    assert found.gain_us == pytest.approx(3.0)
    assert found.worst == 0.5


def test_more_blocks_at_fewer_rows_when_that_saves_more() -> None:
    cells = [cell(nb, 1, 0.5) for nb in (5, 6, 7, 8)] + [cell(nb, 64, 1.1) for nb in (5, 6, 7)] + [cell(8, 64, 0.9)]
    found = decide(cells, (0,), READY, MARGIN)
    assert (found.attn_stats, found.attn_stats_blocks) == ("1:1", "5-8:1")


def test_every_source_of_the_deployment_must_win_and_no_other() -> None:
    cells = [cell(8, 1, 0.5), cell(8, 1, 1.1, slots=8), cell(8, 1, 0.6, slots=16)]
    assert decide(cells, (0, 16), EXPOSED, MARGIN).attn_stats == "1:1"
    assert decide(cells, (0, 8), EXPOSED, MARGIN) == Decision(
        attn_stats="", attn_stats_blocks="", gain_us=0.0, worst=0.0
    )


@pytest.mark.parametrize(("ratio", "on"), [(0.949, "1:1"), (0.951, ""), (1.0, "")], ids=["wins", "tie", "equal"])
def test_a_tie_leaves_statistics_off(ratio: float, on: str) -> None:
    assert decide([cell(8, 1, ratio)], (0,), EXPOSED, MARGIN).attn_stats == on


def test_each_rule_compares_what_it_says() -> None:
    one = Cell(nb=1, slots=0, rows=1, plain_us=1.0, ready_us=2.0, chain_us=3.0, beside_us=4.0)
    assert {rule: one.times(rule) for rule in RULES} == {EXPOSED: (3.0, 1.0), AFTER: (3.0, 4.0), READY: (2.0, 1.0)}
    assert [rule for rule in RULES if one.wins(rule, 0.0)] == [AFTER]


def decisions(stats: str = "1-8:1", blocks: str = "5-8:1") -> dict[tuple[int, int], Decision]:
    found = Decision(attn_stats=stats, attn_stats_blocks=blocks, gain_us=1.0, worst=0.5)
    pairs = [deployment.pair for deployment in shipped().deployments]
    return dict.fromkeys(pairs, found)


def shipped():
    return parse_config(DEFAULT_CONFIG.read_bytes(), "shipped")


@pytest.mark.parametrize("tables", [("1-8:1", "5-8:1"), ("", "")], ids=["on", "off"])
def test_the_shipped_configuration_takes_measured_tables(tables: tuple[str, str]) -> None:
    old = DEFAULT_CONFIG.read_text()
    comment = show.comment_lines(
        [cell(8, 1, 0.5), cell(8, 64, 1.1)], decisions(*tables), SETTING, EXPOSED, 0.02, pdl=True
    )
    new = replace_deployments(old, decisions(*tables), comment, "shipped")
    assert check_config(old, new, decisions(*tables), "shipped")
    head = old[: old.index("\n\n# Batch tables")]
    assert new.startswith(head + "\n\n# Batch tables")
    assert "NVIDIA H200" not in new  # nothing of the old comment stays
    assert "# Measured by 'attnres-aot tune' on one NVIDIA X, driver 580, 2026-01-02: torch 2.11;" in new
    assert max(map(len, new.splitlines())) <= 120
    again = replace_deployments(new, decisions(*tables), comment, "shipped")
    assert again == new


LAYOUT = """name: x # mine
deployments: # where it runs
- {tp: 8, dcp: 1}
- tp: 16
  dcp: 1

# About the model.
model: {hidden_size: 1024, layers: 4, block_size: 2, leading_dense_layers: 1}
"""


def test_other_layouts_and_what_follows_stay() -> None:
    new = replace_deployments(LAYOUT, {(8, 1): decisions()[8, 1]}, ["Measured."], "x.yaml")
    assert new == (
        'name: x # mine\n# Measured.\ndeployments:\n  - tp: 8\n    dcp: 1\n    attn_stats: "1-8:1" # rows\n'
        '    attn_stats_blocks: "5-8:1" # saved blocks\n\n# About the model.\n' + LAYOUT.splitlines()[-1] + "\n"
    )


def test_a_file_without_the_section_is_refused() -> None:
    with pytest.raises(UsageError, match=r"x\.yaml: no line starts with 'deployments:'"):
        replace_deployments("name: x\n", {}, [], "x.yaml")


def test_a_rewrite_that_changes_anything_else_is_refused() -> None:
    old = DEFAULT_CONFIG.read_text()
    new = replace_deployments(old, decisions(), [], "shipped")
    with pytest.raises(UsageError, match="cannot be rewritten safely"):
        check_config(old, new.replace("capacity: 64", "capacity: 65"), decisions(), "shipped")
    with pytest.raises(UsageError, match="cannot be rewritten safely"):
        check_config(old, new, decisions("1-9:1"), "shipped")
    with pytest.raises(ConfigError):
        check_config(old, new.replace("  - tp: 8", "  tp: 8"), decisions(), "shipped")


def test_a_bundle_of_a_part_cannot_be_tuned_for_the_whole() -> None:
    part = {(8, 1): decisions()[8, 1]}
    old = DEFAULT_CONFIG.read_text()
    with pytest.raises(UsageError, match=r"but the bundle serves \(8, 1\); tune a bundle of the whole configuration"):
        check_config(old, replace_deployments(old, part, [], "shipped"), part, "shipped")


def test_what_is_shown_names_rule_margin_and_tables() -> None:
    text = "\n".join(show.decision_lines({EXPOSED: decisions(), READY: decisions()}, EXPOSED, 0.02))
    assert "on where they win by more than 2%" in text
    assert text.index("Rule 'ready': " + RULES[READY]) < text.index("Rule 'exposed' (decides): " + RULES[EXPOSED])
    assert "tp 8, dcp 1: attn_stats '1-8:1', attn_stats_blocks '5-8:1'; worst ratio there 0.500" in text
    nowhere = {(8, 1): dataclasses.replace(decisions("", "")[8, 1], worst=0.0)}
    assert "They win nowhere." in " ".join(show.comment_lines([], nowhere, SETTING, EXPOSED, 0.02, pdl=True))
    assert "; nowhere" in show.decision_lines({EXPOSED: nowhere}, EXPOSED, 0.02)[-1]


def test_cells_are_shown_by_source_and_rule() -> None:
    one = Cell(nb=1, slots=8, rows=4, plain_us=1.0, ready_us=2.0, chain_us=3.0, beside_us=4.0)
    assert show.cell_tables([one], EXPOSED)[1].startswith(
        "mailbox of 8 slots, less the copy into it, us: without | with"
    )
    assert show.cell_tables([one], EXPOSED)[-1].split() == ["nb", "1", "1.00|3.00|2.00"]
    long = [dataclasses.replace(one, rows=rows, plain_us=10.561, ready_us=12.3, chain_us=99.9) for rows in (4, 8)]
    assert show.cell_tables(long, EXPOSED)[-1].split() == ["nb", "1", *["10.6|99.9|12.3"] * 2]
    assert show.cell_tables([one], AFTER)[-1].split() == ["nb", "1", "4.00|3.00|2.00"]
    assert show.cell_tables([one], READY)[-1].split() == ["nb", "1", "1.00|2.00"]


def shape(image: str, *us: float) -> ShapeTimes:
    return ShapeTimes(variant="nb8-delta", image=image, us=dict(zip((1, 8, 64), us, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Best:
    name: str
    times: list[ShapeTimes]
    choices: tuple[Choice, ...]


BEST = [
    Best(
        name="one-wins", times=[shape("a", 1, 1, 1), shape("b", 2, 2, 2)], choices=(Choice(image="a", max_rows=None),)
    ),
    Best(
        name="wide-wins-at-many-rows",
        times=[shape("a", 1, 1, 3), shape("b", 2, 2, 2)],
        choices=(Choice(image="a", max_rows=8), Choice(image="b", max_rows=None)),
    ),
    Best(
        name="there-and-back",
        times=[shape("a", 1, 3, 1), shape("b", 2, 2, 2)],
        choices=(Choice(image="a", max_rows=1), Choice(image="b", max_rows=8), Choice(image="a", max_rows=None)),
    ),
]


@pytest.mark.parametrize("case", BEST, ids=lambda case: case.name)
def test_best_launch_shapes(case: Best) -> None:
    assert best_choices(case.times) == case.choices
    assert show.shape_lines(case.times)[-1].startswith("best: a ")

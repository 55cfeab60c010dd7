"""`attnres-aot plan`: the table for people and the JSON for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attnres_aot.cli.entry import main
from attnres_aot.cli.variant_tables import rows_of
from attnres_aot.cli.wording import ranges
from attnres_aot.config.reader import DEFAULT_CONFIG, load_config
from attnres_aot.plan.plan import Selection, plan
from attnres_aot.plan.records import variant_record
from attnres_aot.spec.arch import parse_arch

SM_100 = parse_arch("sm_100")
ALL = Path(__file__).parents[2] / "configs" / "kimi_k3_all.yaml"
K3 = load_config(ALL)


def show(capsys, *arguments):
    assert main(["plan", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_table_counts_variants_and_images_and_says_for_whom(capsys):
    lines = show(capsys, "--arch", "sm_100", "--config", str(ALL)).splitlines()
    assert lines[0] == "kimi_k3_all: 386 variants and 9 producers served by 108 images, for each arch"
    assert "ordinary source: 98 variants, 39 images, for every (tp, dcp)" in lines
    assert "mailbox of 8 slots: 96 variants, 20 images, for (8,1) (8,8)" in lines
    assert "9 producers" in lines
    assert "  statistics  1-8  every (tp, dcp)       8" in lines
    assert lines[-1] == "kimi_k3_all-sm_100: for compute capability 10.0 and later 10.x"


def test_without_a_configuration_the_shipped_one_is_planned(capsys):
    lines = show(capsys, "--arch", "sm_100").splitlines()
    assert lines[0] == "kimi_k3: 290 variants and 5 producers served by 104 images, for each arch"
    assert "  for (16,1) (16,16) alone:" not in lines
    assert "  statistics  5-8  every (tp, dcp)       4" in lines


def test_row_counts_with_images_of_their_own_are_named(capsys):
    limits = {choice.max_rows for each in plan(K3, SM_100).variants for choice in each.choices} - {None}
    note = "Some variants have images of their own for few rows: up to " + ", ".join(map(str, sorted(limits)))
    assert (f"{note}.\n" in show(capsys, "--arch", "sm_100")) == bool(limits)
    assert "for few rows" not in show(capsys, "--arch", "sm_100", "--only", "nb8-delta-ring8")


@pytest.mark.parametrize("config", [DEFAULT_CONFIG, ALL], ids=lambda path: path.stem)
def test_table_fits_a_terminal_of_80_columns(config, capsys):
    assert max(map(len, show(capsys, "--arch", "sm_100", "--config", str(config)).splitlines())) <= 80


def test_rows_hold_every_variant_once():
    variants = list(map(variant_record, plan(K3, SM_100).variants))
    rows = rows_of(variants, {})
    assert sorted(member.name for row in rows for member in row.members) == sorted(each.name for each in variants)
    for row in rows:
        blocks = {member.nb for member in row.members}
        options = {(member.aux, member.stats) for member in row.members}
        assert len(row.members) == len(blocks) * len(options)


def test_rows_split_where_the_tables_differ(tmp_path, capsys):
    path = tmp_path / "c.yaml"
    text = ALL.read_text().replace('blocks: "1-8:1"', 'blocks: "2-3:1,5:1"').replace("1-64:1", "1-64:0", 1)
    path.write_text(text)
    out = show(capsys, "--arch", "sm_100", "--config", str(path))
    row = "  before attn, MLP  2-3,5    delta                   -    -      3     3       1\n"
    assert f"  for (8,8) (16,1) (16,16) alone:\n{row}" in out
    assert "  before attn, MLP  1,4,6-8  delta                   5    5      -     -       5\n" in out


def test_json_names_every_variant_and_image(capsys):
    shown = json.loads(show(capsys, "--arch", "sm_100,sm_90", "--arch", "sm_100", "--json", "--config", str(ALL)))
    assert [each["bundle"] for each in shown["plans"]] == ["kimi_k3_all-sm_100", "kimi_k3_all-sm_90"]
    first = shown["plans"][0]
    assert first["counts"] == {name: len(first[name]) for name in ("variants", "producers", "images")}
    served = {image["name"] for each in first["variants"] for image in each["images"]}
    served |= {each["image"] for each in first["producers"]}
    assert served == {each["name"] for each in first["images"]}
    assert first["producers"][0] == {
        "name": "statistics-nb1",
        "kernel": "statistics",
        "nb": 1,
        "image": "h7168-statistics-nb1",
        "deployments": [[8, 1], [8, 8], [16, 1], [16, 16]],
    }
    assert first["variants"][0] == {
        "name": "nb0-write0",
        "nb": 0,
        "has_delta": False,
        "write": 0,
        "final": False,
        "slots": 0,
        "aux": False,
        "stats": False,
        "images": [{"name": "h7168-nb0", "max_rows": 16}, {"name": "h7168-nb0-wide", "max_rows": None}],
        "positions": ["before attention"],
        "deployments": [[8, 1], [8, 8], [16, 1], [16, 16]],
    }
    assert first["config_sha256"] == K3.digest


def test_selection_reaches_the_plan(capsys):
    shown = json.loads(
        show(capsys, "--arch", "sm_90", "--tp", "8", "--dcp", "1", "--only", "nb8-delta", "--only", "*final", "--json")
    )
    assert [each["name"] for each in shown["plans"][0]["variants"]] == ["nb8-delta", "nb8-delta-final"]
    expected = plan(K3, SM_100, selection=Selection(tp=(8,), dcp=(1,), only=("nb8-delta", "*final")))
    assert len(expected.variants) == 2


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([1, 2, 3], "1-3"), ([5, 1, 2, 8, 7], "1-2, 5, 7-8")]
)
def test_ranges(numbers, text):
    assert ranges(numbers) == text

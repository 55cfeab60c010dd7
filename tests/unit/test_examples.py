"""What a message or a help text gives as an example is accepted where the reader would put it."""

from __future__ import annotations

import importlib
import re
from types import SimpleNamespace

import click
import pytest

from attnres_aot.bench.points import match_variants
from attnres_aot.cli.commands import COMMANDS
from attnres_aot.config.reader import DEFAULT_CONFIG, load_config
from attnres_aot.errors import UsageError
from attnres_aot.plan.plan import Selection, plan
from attnres_aot.spec.arch import BUILDABLE, choices, parse_buildable_arch
from attnres_aot.spec.row_counts import parse_rows
from attnres_aot.spec.tables import parse_table, scan_table
from attnres_aot.spec.variants import parse_producer, parse_variant


def refusal(call, *arguments) -> str:
    with pytest.raises(UsageError) as caught:
        call(*arguments)
    return str(caught.value)


@pytest.mark.parametrize("most", [1, 2, 15, 16, 63, 64, 65536])
def test_row_counts(most):
    example = refusal(parse_rows, "x", most).split("e.g. ")[1]
    assert parse_rows(example, most)


@pytest.mark.parametrize("text", ["", ",", "0", "65", "-1", "1.5", "\u00b2", "9" * 5000, "1," * 5000])
def test_row_counts_that_are_refused_are_so_in_a_few_words(text):
    assert len(refusal(parse_rows, text, 64)) < 250


def test_batch_tables():
    example = re.search(r"e\.g\. '([^']+)'", refusal(parse_table, "x"))[1]
    assert str(parse_table(example)) == example
    assert {span.value for span in scan_table(example)[0].spans} == {0, 1}


def test_variants():
    assert parse_variant(re.search(r"e\.g\. '([^']+)'", refusal(parse_variant, "x"))[1])
    assert str(parse_producer("statistics-nbN".replace("N", "2"))) == "statistics-nb2"
    assert "the forms are statistics-nbN and publish" in refusal(parse_producer, "x")


def test_archs():
    assert [str(parse_buildable_arch(name)) for name in choices().split(", ")] == list(map(str, BUILDABLE))


def test_patterns_of_measured_variants():
    manifest = SimpleNamespace(variants=[SimpleNamespace(name=name) for name in ("nb0-write0", "nb1-delta")])
    example = re.search(r"e\.g\. '([^']+)'", refusal(match_variants, manifest, ["x"]))[1]
    assert match_variants(manifest, [example])
    assert "e.g." not in refusal(match_variants, SimpleNamespace(variants=[]), ["x"])


def help_texts():
    for name in COMMANDS:
        command = importlib.import_module(f"attnres_aot.cli.{name}_command").command
        yield from (parameter.help for parameter in command.params if isinstance(parameter, click.Option))


def test_help_texts():
    pytest.importorskip("torch", reason="commands that launch import it")
    texts = "\n".join(filter(None, help_texts()))
    patterns = re.findall(r"(?:such as|e\.g\.) '([^']+)'", texts)
    assert sorted(set(patterns)) == ["*-ring8*", "nb8-*"]
    shipped = load_config(DEFAULT_CONFIG)
    for pattern in patterns:
        assert plan(shipped, BUILDABLE[0], selection=Selection(only=(pattern,))).variants
    for rows in re.findall(r"e\.g\. ([0-9,]+)", texts):
        assert parse_rows(rows, 64)
    for name in re.findall(r"name, e\.g\. (\w+)", texts):
        assert name == shipped.name

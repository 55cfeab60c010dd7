"""Batch tables: grammar, later-wins look-up, canonical form, and that spans are never expanded."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnres_aot.errors import UsageError
from attnres_aot.spec.tables import BatchTable, Span, overlaps, parse_table, scan_table


@dataclass(frozen=True)
class Parsed:
    name: str
    text: str
    canonical: str


PARSED = [
    Parsed("empty", "", ""),
    Parsed("blank", "  ", ""),
    Parsed("issue_example", "1-2:96,3-8:120", "1-2:96,3-8:120"),
    Parsed("single_number", "7:1", "7:1"),
    Parsed("span_of_one", "7-7:1", "7:1"),
    Parsed("dotted_tuple", "16:64.16.4.8", "16:64.16.4.8"),
    Parsed("name", "16-64:trtllm", "16-64:trtllm"),
    Parsed("spaces", " 1 - 2 : 96 , 3:1 ", "1-2:96,3:1"),
    Parsed("leading_zeros", "01-02:003", "1-2:3"),
    Parsed("unsorted", "5:1,1:2", "1:2,5:1"),
    Parsed("later_wins_inside", "1-9:1,4-5:0", "1-3:1,4-5:0,6-9:1"),
    Parsed("later_wins_over_all", "4-5:0,1-9:1", "1-9:1"),
    Parsed("later_wins_at_an_edge", "1-4:1,4-6:2", "1-3:1,4-6:2"),
    Parsed("neighbours_join", "1-2:1,3:1,5:1", "1-3:1,5:1"),
    Parsed("neighbours_of_other_value_stay", "1-2:1,3:0", "1-2:1,3:0"),
    Parsed("huge_span", "1-999999999999999999:1", "1-999999999999999999:1"),
]


@pytest.mark.parametrize("case", PARSED, ids=lambda case: case.name)
def test_text_has_one_canonical_form(case):
    canonical = parse_table(case.text).canonical()
    assert str(canonical) == case.canonical
    assert parse_table(str(canonical)) == canonical == canonical.canonical()


@dataclass(frozen=True)
class Refused:
    name: str
    text: str
    says: str


REFUSED = [
    Refused("no_value", "1-2", "'1-2' is not understood; the form is lo[-hi]:value"),
    Refused("no_number", ":1", "':1' is not understood"),
    Refused("empty_value", "1:", "'1:' is not understood"),
    Refused("extra_comma", "1:1,,2:1", "an entry between commas is empty"),
    Refused("trailing_comma", "1:1,", "an entry between commas is empty"),
    Refused("negative", "-1:1", "'-1:1' is not understood"),
    Refused("reversed", "8-2:1", "span 8-2 is reversed; write 2-8"),
    Refused("half_a_tuple", "1:64.", "'1:64.' is not understood"),
    Refused("other_digits", "\u0661:1", "is not understood"),
    Refused("endless_number", "9" * 5000 + ":1", "is not understood"),
    Refused("two_values", "1:2:3", "'1:2:3' is not understood"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_refusal_quotes_the_entry(case):
    with pytest.raises(UsageError) as caught:
        parse_table(case.text)
    assert case.says in str(caught.value)
    assert len(str(caught.value)) < 500


def test_every_bad_entry_is_reported_and_good_ones_are_kept():
    table, problems = scan_table("x,1:1,9-2:1")
    assert str(table) == "1:1"
    assert len(problems) == 2


def test_look_up_is_by_exact_number():
    table = parse_table("2-4:96,4:120,8:none")
    assert [table.get(number) for number in (0, 1, 2, 3, 4, 5, 8)] == [None, None, 96, 96, 120, None, "none"]


def test_switched_on_spans_are_those_of_value_one():
    assert parse_table("1-64:1,5-6:0,70:96").switched_on() == ((1, 4), (7, 64))
    assert parse_table("").switched_on() == ()


def test_overlaps_names_both_entries():
    pairs = overlaps(parse_table("10-20:1,1-12:0,30:1,20:1"))
    assert [(str(one), str(other)) for one, other in pairs] == [("1-12:0", "10-20:1"), ("10-20:1", "20:1")]
    assert overlaps(parse_table("1-2:1,3-4:1")) == ()


def test_an_entry_inside_a_long_one_overlaps_whatever_lies_between():
    assert len(overlaps(parse_table("1-100:1,2:0,50:0"))) == 2


def test_many_overlapping_entries_take_no_time():
    table = BatchTable(spans=tuple(Span(first=n, last=10**15 - n, value=n % 2) for n in range(20_000)))
    started = time.process_time()
    table.canonical()
    assert time.process_time() - started < 5


spans = st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 2)).map(
    lambda each: Span(first=min(each[:2]), last=max(each[:2]), value=each[2])
)


@given(st.lists(spans, max_size=8))
def test_canonical_form_means_the_same_and_is_disjoint(entries):
    table = BatchTable(spans=tuple(entries))
    canonical = table.canonical()
    assert [canonical.get(number) for number in range(-1, 33)] == [table.get(number) for number in range(-1, 33)]
    assert overlaps(canonical) == ()
    assert parse_table(str(table)) == table

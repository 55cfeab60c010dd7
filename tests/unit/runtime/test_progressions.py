"""Rows of byte ranges: exact against marking every byte, at a cost that does not grow with their number."""

from __future__ import annotations

import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attnres_aot.runtime.operands.progressions import Ranges, _floor_sum, ranges_touch


def ranges(highest: int, steps: st.SearchStrategy[int], sizes: st.SearchStrategy[int]) -> st.SearchStrategy[Ranges]:
    return st.builds(Ranges, start=st.integers(0, highest), step=steps, count=st.integers(1, 12), size=sizes)


def bytes_of(one: Ranges) -> set[int]:
    return {one.start + index * one.step + byte for index in range(one.count) for byte in range(one.size)}


NARROW = ranges(60, st.integers(0, 30), st.integers(1, 6))
ROWS = ranges(4000, st.integers(0, 60).map(lambda vectors: 16 * vectors), st.sampled_from([16, 32, 64]))


@settings(max_examples=1000, deadline=None)
@given(one=NARROW, other=NARROW)
@example(one=Ranges(start=0, step=3, count=5, size=1), other=Ranges(start=1, step=3, count=5, size=2))
def test_is_exact_for_any_numbers(one, other):
    assert ranges_touch(one, other) == ranges_touch(other, one) == bool(bytes_of(one) & bytes_of(other))


@settings(max_examples=1000, deadline=None)
@given(one=ROWS, other=ROWS)
def test_is_exact_for_rows_of_vectors(one, other):
    assert ranges_touch(one, other) == ranges_touch(other, one) == bool(bytes_of(one) & bytes_of(other))


@settings(max_examples=1000, deadline=None)
@given(count=st.integers(0, 60), modulus=st.integers(1, 50), factor=st.integers(0, 90), offset=st.integers(-200, 200))
def test_sum_of_floors(count, modulus, factor, offset):
    assert _floor_sum(count, modulus, factor, offset) == sum((factor * i + offset) // modulus for i in range(count))


def lines_run(function) -> int:
    """Counts the lines of Python that a call executes."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("rows", [10, 20_000, 10**12])
@pytest.mark.parametrize("steps", [(4096, 4096), (3 * 4096, 5 * 4096), (4096 + 16, 4096 + 48), (2048 * 89, 2048 * 144)])
def test_cost_is_bounded_for_any_number_of_rows(rows, steps):
    one = Ranges(start=0, step=steps[0], count=rows, size=16)
    other = Ranges(start=2048, step=steps[1], count=rows, size=16)
    assert lines_run(lambda: ranges_touch(one, other)) < 500


def test_far_rows_that_touch_are_found():
    """Only rows 100,000,007 and 99,999,999 lie on one byte."""
    one = Ranges(start=0, step=32 * 99_999_999, count=100_000_008, size=1)
    other = Ranges(start=0, step=32 * 100_000_007, count=100_000_000, size=1)
    shifted = Ranges(start=1, step=other.step, count=other.count, size=1)
    behind_first = Ranges(start=other.step, step=other.step, count=other.count - 1, size=1)
    assert ranges_touch(one, other)
    assert ranges_touch(one, behind_first)
    assert not ranges_touch(one, shifted)
    shorter = Ranges(start=other.step, step=other.step, count=other.count - 2, size=1)
    assert not ranges_touch(one, shorter)

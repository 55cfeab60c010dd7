"""The overlap rule against a model that marks every byte."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from attnres_aot.errors import OperandError
from attnres_aot.runtime.operands import Expected, View, rows_touch
from attnres_aot.runtime.overlap import AddressCheck

HIDDEN = 8
BASE = 1 << 20
views = st.builds(
    View,
    expected=st.just(Expected(name="x", reads=(0,))),
    rows=st.integers(1, 5),
    row_stride=st.integers(0, 6).map(lambda n: 8 * n),
    block_stride=st.just(0),
    hidden=st.just(HIDDEN),
)
addresses = st.integers(0, 40).map(lambda n: BASE + 16 * n)


def bytes_of(view: View, start: int) -> set[int]:
    return {start + row * view.row_stride * 2 + i for row in range(view.rows) for i in range(view.hidden * 2)}


@settings(max_examples=400, deadline=None)
@given(one=views, start=addresses, other=views, other_start=addresses)
def test_rows_touch_is_exact(one, start, other, other_start):
    assert rows_touch(one, start, other, other_start) == bool(bytes_of(one, start) & bytes_of(other, other_start))


@settings(max_examples=200, deadline=None)
@given(starts=st.lists(addresses, min_size=3, max_size=3), rows=st.integers(1, 3), repeats=st.integers(1, 3))
def test_check_refuses_exactly_what_shares_written_bytes(starts, rows, repeats):
    def view(name, **access):
        return View(expected=Expected(name=name, **access), rows=rows, row_stride=16, block_stride=0, hidden=HIDDEN)

    given_views = [view("prefix", reads=(0,), writes=(0,)), view("blocks", reads=(0,)), view("out", writes=(0,))]
    marks = [bytes_of(one, start) for one, start in zip(given_views, starts, strict=True)]
    harmful = bool(marks[0] & marks[1] or marks[0] & marks[2] or marks[1] & marks[2])
    check = AddressCheck(given_views, [])
    for _ in range(repeats):  # what was learnt from one call must not change the next
        try:
            check(tuple(starts))
            refused = False
        except OperandError:
            refused = True
        assert refused == harmful

"""The overlap rule against a model that marks every byte, and what is remembered from launch to launch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnres_aot.errors import OperandError
from attnres_aot.runtime.operands.geometry import Expected, View, rows_touch
from attnres_aot.runtime.operands.overlap import AddressCheck, Fixed, PlacedCheck

from .test_progressions import lines_run

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


def view(name: str, rows: int, stride: int = 16, **access: tuple[int, ...]) -> View:
    return View(expected=Expected(name=name, **access), rows=rows, row_stride=stride, block_stride=0, hidden=HIDDEN)


def refused(check: AddressCheck, starts: tuple[int, ...]) -> bool:
    try:
        check(starts)
    except OperandError:
        return True
    return False


@settings(max_examples=600, deadline=None)
@given(
    launches=st.lists(st.lists(addresses, min_size=4, max_size=4), min_size=1, max_size=5),
    fixed=st.lists(st.tuples(st.integers(0, 80), st.integers(1, 5), st.booleans()), max_size=3),
    rows=st.integers(1, 3),
    stride=st.sampled_from([8, 16, 24]),
)
def test_check_refuses_exactly_what_shares_written_bytes(launches, fixed, rows, stride):
    """What was learnt from some launches must not change the next."""
    operands = [
        view("delta", rows, stride, reads=(0,)),
        view("prefix", rows, stride, reads=(0,), writes=(0,)),
        view("blocks", rows, stride, reads=(0,)),
        view("out", rows, 16, writes=(0,)),
    ]
    bound = [
        Fixed(name=f"bound {index}", address=BASE + 8 * at, size=8 * size, written=written)
        for index, (at, size, written) in enumerate(fixed)
    ]
    check = AddressCheck(operands, bound)
    for starts in (*launches, *launches):
        marks = [bytes_of(one, start) for one, start in zip(operands, starts, strict=True)]
        pairs = [(0, 1), (0, 3), (1, 2), (1, 3), (2, 3)]
        twins = {pair for pair in ((0, 1), (0, 3)) if starts[0] == starts[pair[1]] and (pair[1] == 1 or stride == 16)}
        harmful = any(marks[a] & marks[b] for a, b in pairs if (a, b) not in twins)
        for each in bound:
            taken = set(range(each.address, each.address + each.size))
            touching = marks if each.written else (marks[1], marks[3])
            harmful = harmful or any(mark & taken for mark in touching)
        assert refused(check, tuple(starts)) == harmful


def test_a_source_that_is_another_view_costs_no_closer_look(monkeypatch):
    operands = [view("delta", 64, reads=(0,)), view("prefix", 64, writes=(0,)), view("out", 64, writes=(0,))]
    check = AddressCheck(operands, [Fixed(name="norm", address=BASE, size=16, written=False)])
    slab = BASE + (1 << 16)
    check((slab, slab + 8192, slab))
    monkeypatch.setattr(AddressCheck, "_look_closer", lambda *_: pytest.fail("looked closer"))
    for shift in range(0, 1 << 20, 1 << 14):
        check((slab + shift, slab + shift + 8192, slab + shift))


@pytest.mark.parametrize("rows", [20, 20_000, 10**9])
def test_interleaved_rows_cost_the_same_for_any_number(rows):
    operands = [view(name, rows, 64, writes=(0,)) for name in ("prefix", "out", "aux")]
    check = AddressCheck(operands, [Fixed(name="norm", address=BASE + 96, size=16, written=False)])
    assert lines_run(lambda: check((BASE, BASE + 32, BASE + 64))) < 2000
    with pytest.raises(OperandError, match="out overlaps norm"):
        check((BASE, BASE + 96, BASE + 64))
    with pytest.raises(OperandError, match="prefix overlaps aux"):
        check((BASE, BASE + 32, BASE + 64 * 2 * (rows - 1)))


def test_layouts_that_were_seen_are_recognized(monkeypatch):
    operands = [view("prefix", 2, writes=(0,)), view("out", 2, writes=(0,))]
    check = AddressCheck(operands, [Fixed(name="norm", address=BASE + 1024, size=16, written=False)])
    seen = [(BASE, BASE + 2048), (BASE + 2048, BASE), (BASE + 4096, BASE + 8192), (BASE + 128, BASE)]
    for starts in seen:
        check(starts)
    monkeypatch.setattr(AddressCheck, "_layout", lambda *_: pytest.fail("sorted again"))
    for starts in seen * 3:
        check(starts)


@pytest.mark.parametrize(("pointers", "text"), [((0, 32), "a has no memory"), ((32, 40), "b starts at 0x28")])
def test_with_checks_off_addresses_are_looked_at_alone(pointers, text):
    check = PlacedCheck([view("a", 1), view("b", 1)])
    with pytest.raises(OperandError, match=text):
        check(pointers)
    check((32, 32))

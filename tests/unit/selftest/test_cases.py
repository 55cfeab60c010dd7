"""Cases: what they draw on, and what a case that reaches beyond its inputs is told."""

import dataclasses

import pytest

from attnres_aot.errors import UsageError
from attnres_aot.selftest.arena import DENSE
from attnres_aot.selftest.cases import MAX_ROWS, ROW_COUNTS, STARTS, Case, cases_for, prepare
from attnres_aot.spec.variants import parse_variant

VARIANT = parse_variant("nb1-delta")
CASE = Case(variant=VARIANT, rows=MAX_ROWS, layout=DENSE, eps=1e-5, out_eps=1e-5, steep=False, start=STARTS)


def test_the_last_start_leaves_room_for_the_most_rows(banks):
    assert prepare(CASE, banks).expected.out.shape[0] == MAX_ROWS


@pytest.mark.parametrize("beyond", [{"start": STARTS + 1}, {"start": -1}, {"rows": 0}, {"rows": 2 * MAX_ROWS}], ids=str)
def test_a_case_beyond_its_inputs_is_refused(beyond, banks):
    with pytest.raises(UsageError, match=f"of the inputs are asked for; there are rows 0 to .*start below {STARTS}"):
        prepare(dataclasses.replace(CASE, **beyond), banks)


def test_all_cases_of_a_variant_stay_within_the_inputs(banks):
    for salt in range(400):
        for case in cases_for(VARIANT, ROW_COUNTS, salt):
            assert 0 <= case.start <= STARTS
            assert case.rows <= MAX_ROWS

"""Budgets: what the launch constants promise, and no more than a kind of image is known to need."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from attnres_aot.arch import BUILDABLE
from attnres_aot.build.budgets import SM_REGISTERS, budget_for
from attnres_aot.compiler import launch_constants
from attnres_aot.config import load_config
from attnres_aot.plan import plan
from attnres_aot.variants import ConsumerSpec, ImageSpec, PublishSpec, StatisticsSpec

ROOMY = {"threads": 32, "min_ctas_per_sm": 1}


@dataclass(frozen=True)
class Budget:
    name: str
    spec: ImageSpec
    allowed: tuple[int, int, int]


def consumer(**facts) -> ConsumerSpec:
    return ConsumerSpec(**{"hidden": 7168, "nb": 3, "has_delta": True, "final": False, "slots": 0, **facts})


BUDGETS = [
    Budget("ordinary", consumer(), (96, 3328, 288)),
    Budget("final", consumer(final=True), (96, 3328, 352)),
    Budget("wide", consumer(wide=True), (128, 2240, 336)),
    Budget("wide, final", consumer(wide=True, final=True), (128, 2240, 432)),
    Budget("no blocks", consumer(nb=0, wide=True), (72, 768, 224)),
    Budget("no blocks, few rows", consumer(nb=0), (72, 1280, 192)),
    Budget("many slots", consumer(slots=16), (128, 3328, 1808)),
    Budget("statistics alone", consumer(nb=None), (88, 1984, 384)),
    Budget("one slot", consumer(slots=1), (128, 3328, 1056)),
    Budget("some slots", consumer(slots=2), (128, 3328, 1520)),
    Budget("statistics taken", consumer(nb=None, slots=1), (88, 1984, 464)),
    Budget("statistics and slots", consumer(nb=None, slots=8), (128, 1984, 848)),
    Budget("statistics and many slots", consumer(nb=None, slots=9), (128, 1984, 1184)),
    Budget("statistics made", StatisticsSpec(hidden=7168, nb=8), (88, 1856, 176)),
    Budget("publish", PublishSpec(hidden=7168), (48, 0, 128)),
]


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda budget: budget.name)
def test_each_kind_has_its_budget(budget):
    found = budget_for(budget.spec, ROOMY)
    assert (found.registers, found.smem_bytes, found.critical_instructions) == budget.allowed


def test_the_promised_ctas_fit_an_sm():
    assert budget_for(consumer(), {"threads": 128, "min_ctas_per_sm": 6}).registers == 80
    assert budget_for(consumer(), {"threads": 1024}).registers == 64


def test_whatever_kimi_k3_needs_fits_as_its_launch_constants_promise():
    everything = Path(__file__).parents[3] / "configs" / "kimi_k3_all.yaml"
    for spec in plan(load_config(everything), BUILDABLE[0]).images:
        launch = launch_constants(spec)
        needed = budget_for(spec, launch).registers * launch["threads"] * launch["min_ctas_per_sm"]
        assert needed <= SM_REGISTERS, str(spec)


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda budget: budget.name)
def test_the_other_flavour_may_have_a_few_more_instructions_and_nothing_else(budget):
    usual, other = budget_for(budget.spec, ROOMY), budget_for(budget.spec, ROOMY, "cu13")
    assert (other.registers, other.smem_bytes) == (usual.registers, usual.smem_bytes)
    assert 1.03 < other.critical_instructions / usual.critical_instructions <= 1.05
    assert budget_for(budget.spec, ROOMY, "cu12") == usual

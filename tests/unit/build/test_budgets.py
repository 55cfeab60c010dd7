"""Register budgets: what the launch constants promise, and no more than a kind of image is known to need."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from attnres_aot.arch import BUILDABLE
from attnres_aot.build.budgets import SM_REGISTERS, register_budget
from attnres_aot.compiler import launch_constants
from attnres_aot.config import load_config
from attnres_aot.plan import plan
from attnres_aot.variants import ConsumerSpec, ImageSpec, PublishSpec, StatisticsSpec

ROOMY = {"threads": 32, "min_ctas_per_sm": 1}


@dataclass(frozen=True)
class Budget:
    name: str
    spec: ImageSpec
    registers: int


def consumer(**facts) -> ConsumerSpec:
    return ConsumerSpec(**{"hidden": 7168, "nb": 3, "has_delta": True, "final": False, "slots": 0, **facts})


BUDGETS = [
    Budget("ordinary", consumer(), 96),
    Budget("wide", consumer(wide=True), 128),
    Budget("no blocks", consumer(nb=0, wide=True), 72),
    Budget("one slot", consumer(slots=1), 96),
    Budget("some slots", consumer(slots=2), 128),
    Budget("statistics taken", consumer(nb=None, slots=1), 80),
    Budget("statistics and slots", consumer(nb=None, slots=8), 96),
    Budget("statistics and many slots", consumer(nb=None, slots=9), 128),
    Budget("statistics made", StatisticsSpec(hidden=7168, nb=8), 88),
    Budget("publish", PublishSpec(hidden=7168), 48),
]


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda budget: budget.name)
def test_each_kind_has_its_budget(budget):
    assert register_budget(budget.spec, ROOMY) == budget.registers


def test_the_promised_ctas_fit_an_sm():
    assert register_budget(consumer(), {"threads": 128, "min_ctas_per_sm": 6}) == 80
    assert register_budget(consumer(), {"threads": 1024}) == 64


def test_whatever_kimi_k3_needs_fits_as_its_launch_constants_promise():
    everything = Path(__file__).parents[3] / "configs" / "kimi_k3_all.yaml"
    for spec in plan(load_config(everything), BUILDABLE[0]).images:
        launch = launch_constants(spec)
        needed = register_budget(spec, launch) * launch["threads"] * launch["min_ctas_per_sm"]
        assert needed <= SM_REGISTERS, str(spec)

"""Budgets: what the launch constants promise of an SM."""

from __future__ import annotations

import pytest

from attnres_aot.builder.budgets import SM_REGISTERS, SM_SMEM_BYTES, budget_for
from attnres_aot.kernels.compile import launch_constants
from attnres_aot.spec.variants import ConsumerSpec, PublishSpec, StatisticsSpec


@pytest.mark.parametrize(
    ("threads", "together", "registers", "smem_bytes"),
    [(128, 6, 80, 16042), (128, 5, 96, 19456), (64, 8, 128, 11776), (1024, 1, 64, 101376), (32, 1, 255, 101376)],
)
def test_as_many_ctas_fit_as_are_promised(threads, together, registers, smem_bytes):
    found = budget_for({"threads": threads, "min_ctas_per_sm": together})
    assert (found.registers, found.smem_bytes) == (registers, smem_bytes)
    assert found.registers * threads * together <= SM_REGISTERS
    assert (found.smem_bytes + 1024) * together <= SM_SMEM_BYTES


@pytest.mark.parametrize(
    ("spec", "together"),
    [
        (ConsumerSpec(hidden=7168, nb=8, has_delta=True, final=False, slots=16), 4),
        (ConsumerSpec(hidden=4096, nb=6, has_delta=False, final=False, slots=16), 2),
        (ConsumerSpec(hidden=7168, nb=7, has_delta=False, final=False, slots=13), 2),
        (ConsumerSpec(hidden=7168, nb=9, has_delta=True, final=False, slots=0), 3),
        (ConsumerSpec(hidden=2304, nb=8, has_delta=True, final=False, slots=0, wide=True), 6),
        (ConsumerSpec(hidden=7168, nb=8, has_delta=True, final=False, slots=0), 5),
        (StatisticsSpec(hidden=7168, nb=8), 5),
        (StatisticsSpec(hidden=7168, nb=16), 3),
        (PublishSpec(hidden=256), 8),
    ],
)
def test_geometries_that_need_more_registers_promise_fewer_ctas(spec, together):
    assert launch_constants(spec)["min_ctas_per_sm"] == together

"""Measuring on a GPU: times, floors and host costs come out at all, and a soak of fewer launches than `bench`'s."""

from functools import partial

import pytest
import torch

from attnres_aot.bench import host
from attnres_aot.bench.clock import Effort, graph_time_us, host_times_us
from attnres_aot.bench.cold_start import measure_cold_start
from attnres_aot.bench.gpu import gpu_facts
from attnres_aot.bench.measure import measure_gpu
from attnres_aot.bench.points import Selection, default_variants
from attnres_aot.bench.rig import Job, Rig
from attnres_aot.bench.soak import CudaMachine, soak

EFFORT = Effort(replays=5, host_calls=200, host_rounds=5)
SOAK_LAUNCHES = 20_000


@pytest.fixture(scope="module")
def rig(consumer):
    timer = partial(graph_time_us, effort=EFFORT, device=consumer.device)
    return Rig(consumer.loaded, timer, gpu_facts(consumer.device).l2_bytes)


def test_every_kind_of_work_has_a_time_and_a_floor(rig):
    selection = Selection(globs=(), rows=(1, 64), pdl=(True, False), cold=(False,))
    context, timings = measure_gpu(rig, selection, lambda line: None)
    assert {t.variant for t in timings} == {str(variant) for variant in default_variants(rig.loaded.bundle.manifest)}
    assert all(0.2 < timing.us < 500 and timing.floor_us > 0 for timing in timings)
    assert context.notes == ()
    assert all(0.1 < empty.us < 50 for empty in context.empty)
    assert context.l2_bytes_per_us > 0 < context.memory_bytes_per_us


def test_memory_outside_the_l2_takes_longer(rig):
    variant = max((v for v in default_variants(rig.loaded.bundle.manifest) if not v.slots), key=lambda v: v.key.nb)
    warm, cold = (rig.time_us(Job(variant=variant, rows=64, pdl=False, cold=cold)) for cold in (False, True))
    assert cold > warm


def test_host_costs_are_in_proportion(rig):
    found = {
        cost.name: cost
        for cost in host.measure_host(rig, partial(host_times_us, effort=EFFORT, device=rig.loaded.device.device))
    }
    assert found[host.BARE].ratio == 1
    assert all(0.5 < cost.ratio < 10 for cost in found.values())


def test_the_bare_launch_computes_what_the_loader_computes(rig):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        ways = host.ways_to_launch(rig, host.memset_fill(rig))
        run = ways[host.RUN]
        assert isinstance(run, partial)
        _, prefix, _, out = run.args
        given, results = prefix.clone(), []
        for name in (host.BARE, host.RUN):
            prefix.copy_(given)
            out.zero_()
            ways[name]()
            results.append((prefix.clone(), out.clone()))
    stream.synchronize()
    (bare_prefix, bare_out), (run_prefix, run_out) = results
    assert bare_out.any()
    assert torch.equal(bare_out, run_out)
    assert torch.equal(bare_prefix, run_prefix)


def test_a_cold_start_ends_with_a_launch(rig):
    found = measure_cold_start(rig.loaded.bundle.path, str(rig.loaded.device.device), processes=1)
    model = rig.loaded.bundle.manifest.model
    assert found.consumers == model.layers + 1
    assert found.total_ms > 0
    assert found.foreign == ()


def test_soak(rig):
    found = soak(rig, CudaMachine(rig.loaded.device.device), SOAK_LAUNCHES, 60, print)
    assert found.problems == ()
    assert found.launches >= SOAK_LAUNCHES

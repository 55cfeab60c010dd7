"""Host cost of launching: the loader's calls beside the bare driver call, in turns within one run.

A ring consumer would spin on a mailbox that nobody fills, so each of its launches is preceded by a prebuilt driver
call that fills the mailbox, and the cost of that call, measured in the same rounds, is taken off.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import partial

import torch

from attnres_aot.bench.bare import Shape, bare_launch, holding, pack_parameters
from attnres_aot.bench.clock import Call
from attnres_aot.bench.results import HostCost
from attnres_aot.bench.rig import EPS, Job, Rig, Sets
from attnres_aot.errors import UsageError
from attnres_aot.runtime.cuda.driver import open_driver
from attnres_aot.runtime.operands.geometry import VECTOR_ELEMS
from attnres_aot.spec.variants import Variant, parse_variant

BARE, RUN, RUN_UNCHECKED = "bare cuLaunchKernelEx", "run, checks on", "run, checks off"
RUN_MOVING, TORCH = "run, checks on, other tensors in turn", "torch in-place add"
RING, RING_UNCHECKED, FILL = "run_ring, checks on", "run_ring, checks off", "fill a mailbox"
LIMITS = {RUN: 2.0, RUN_UNCHECKED: 1.5, RING: 2.0, RING_UNCHECKED: 1.5}
"""What each way may cost, as a multiple of the bare driver call."""

_FULL_WORD = 0x3F803F80  # two bf16 of 1.0: any word that is not the empty one
_ROWS = 1

Fill = Callable[[torch.Tensor], Call]
"""Returns what fills a mailbox's rows, cheaply for the host."""


def measure_host(rig: Rig, timer: Callable[[dict[str, Call]], dict[str, float]]) -> tuple[HostCost, ...]:
    """Measures the host cost of each way of launching, on a side stream.

    Raises:
      UsageError: the bundle has no variant to launch.
    """
    device = rig.loaded.device.device
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(stream):
        times = timer(ways_to_launch(rig, memset_fill(rig)))
        torch.cuda.synchronize(device)
    return costs(times)


def costs(times: Mapping[str, float]) -> tuple[HostCost, ...]:
    """Turns measured times into costs: takes the filling off the ring's, and divides by the bare call."""
    bare = times[BARE]
    found = []
    for name, us in times.items():
        if name == FILL:
            continue
        net = us - times[FILL] if name in (RING, RING_UNCHECKED) else us
        found.append(HostCost(name=name, us=net, ratio=net / bare, limit=LIMITS.get(name)))
    return tuple(found)


def ways_to_launch(rig: Rig, fill: Fill) -> dict[str, Call]:
    """Returns each way of launching by name; a call keeps alive what it works on."""
    job = Job(variant=_richest(rig, slots=False), rows=_ROWS, pdl=False)
    sets = rig.make_sets(job)
    checked = rig.bind(job, sets, 0)
    ways: dict[str, Call] = {
        BARE: _bare(rig, job.variant, sets),
        RUN: checked,
        RUN_UNCHECKED: rig.bind(job, sets, 0, checks=False),
        RUN_MOVING: _alternating(checked, partial(checked.func, *_operands(rig.make_sets(job)))),
        TORCH: partial(sets.out[0].add_, 1.0),
    }
    if rig.loaded.bundle.manifest.mailbox.slots:
        ways.update(_ring_ways(rig, fill))
    return ways


def memset_fill(rig: Rig) -> Fill:
    """Returns a filler that uses one driver call, on the stream that is current when it is made."""
    driver, device = open_driver(), rig.loaded.device

    def fill(mailbox: torch.Tensor) -> Call:
        slots, _, hidden = mailbox.shape
        row, pitch = ctypes.c_size_t(hidden // 2), ctypes.c_size_t(mailbox.stride(0) * 2)
        call: partial[int] = partial(
            driver.lib.cuMemsetD2D32Async,
            ctypes.c_uint64(mailbox.data_ptr()),
            pitch,
            ctypes.c_uint(_FULL_WORD),
            row,
            ctypes.c_size_t(slots),
            ctypes.c_void_p(device.stream(device.ordinal)),
        )
        driver.check(call(), "fill a mailbox")  # once, for the timed calls are not checked
        return holding(call, mailbox)

    return fill


def _ring_ways(rig: Rig, fill: Fill) -> dict[str, Call]:
    job = Job(variant=_richest(rig, slots=True), rows=_ROWS, pdl=False)
    sets = rig.make_sets(job)
    assert sets.mailbox is not None
    publish = fill(sets.mailbox[0])
    return {
        FILL: _after(publish, lambda: None),
        RING: _after(publish, rig.bind(job, sets, 0)),
        RING_UNCHECKED: _after(publish, rig.bind(job, sets, 0, checks=False)),
    }


def _operands(sets: Sets) -> tuple[torch.Tensor, ...]:
    return sets.source[0, 0], sets.prefix[0], sets.blocks[0], sets.out[0]


def _after(first: Call, second: Call) -> Call:
    def both() -> None:
        first()
        second()

    return both


def _alternating(one: Call, other: Call) -> Call:
    turn = [one, other]

    def call() -> None:
        turn.reverse()
        turn[0]()

    return call


def _richest(rig: Rig, *, slots: bool) -> Variant:
    """Returns the consumer with a delta and the most saved blocks; with the fewest slots, if a mailbox is wanted."""
    every = [parse_variant(record.name) for record in rig.loaded.bundle.manifest.variants]
    fit = [v for v in every if bool(v.slots) == slots and not v.aux and not v.stats and v.key.write is None]
    if not fit:
        raise UsageError(
            f"{rig.loaded.bundle.path} has no {'ring' if slots else 'ordinary'} variant to launch; "
            "build a bundle of a whole configuration"
        )
    return max(fit, key=lambda v: (-v.slots, v.key.has_delta, not v.key.final, v.key.nb))


def _bare(rig: Rig, variant: Variant, sets: Sets) -> Call:
    kernel = rig.loaded.kernel(variant, _ROWS)
    operands = dict(zip(("source", "prefix", "blocks", "out"), _operands(sets), strict=True))
    tensors = {**operands, **dict(zip(("norm", "query", "out_norm"), sets.weights[0], strict=True))}
    values: dict[str, int | float] = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    values |= {f"{name}_row_stride": tensor.stride(0) // VECTOR_ELEMS for name, tensor in operands.items()}
    values["blocks_block_stride"] = operands["blocks"].stride(1) // VECTOR_ELEMS
    values.update(write=-1, rows=_ROWS, eps=EPS, out_eps=EPS)
    stream = rig.loaded.device.stream(rig.loaded.device.ordinal)
    parameters = pack_parameters(kernel, values)
    return bare_launch(open_driver(), kernel.function, shape_of(rig, variant), stream, parameters, sets)


def shape_of(rig: Rig, variant: Variant, rows: int = _ROWS) -> Shape:
    """Returns the launch shape of a consumer, from the manifest."""
    image = rig.loaded.kernel(variant, rows).image
    return Shape(
        grid=image.cluster * -(-rows // image.rows_per_cluster),
        threads=image.block_threads,
        cluster=image.cluster,
        shared_bytes=image.smem_dynamic_bytes,
    )

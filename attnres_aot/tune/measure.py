"""Measures what is decided from: consumers with and without statistics, alone and after the statistics kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from attnres_aot.bench.points import holds
from attnres_aot.bench.rig import Job, Rig
from attnres_aot.config.advice import build_changed
from attnres_aot.errors import BundleError
from attnres_aot.runtime.find.loaded import LoadedBundle
from attnres_aot.spec.variants import STATISTICS, ConsumerKey, Producer, Variant
from attnres_aot.tune.decide import Cell


def check_bundle(loaded: LoadedBundle, every_nb: Sequence[int], slots: Sequence[int]) -> None:
    """Checks that a bundle holds all that has to be measured.

    Raises:
      BundleError: it does not; names what is missing and how to build it.
    """
    manifest = loaded.bundle.manifest
    kernels = {nb: Producer(kernel=STATISTICS, nb=nb) for nb in every_nb}
    missing = [f"statistics kernel for nb {nb}" for nb, kernel in kernels.items() if not holds(manifest, kernel)]
    for nb in every_nb:
        wanted = [variant_for(nb, count, stats=stats) for count in slots for stats in (False, True)]
        missing += [str(variant) for variant in wanted if variant not in loaded]
    if missing:
        more = f" and {len(missing) - 6} more" if len(missing) > 6 else ""
        rows, blocks = f'attn_stats: "1-{manifest.mailbox.capacity}:1"', f'attn_stats_blocks: "1-{max(every_nb)}:1"'
        lines = [
            f"{loaded.bundle.path} cannot be tuned: it has no {', '.join(missing[:6])}{more}",
            f"Next step: set {rows} and {blocks} in each deployment of the configuration, and build again:",
            *build_changed(manifest.arch.requested, manifest.name),
        ]
        raise BundleError("\n".join(lines))


def variant_for(nb: int, slots: int, *, stats: bool) -> Variant:
    """Returns the consumer by which `nb` saved blocks are judged: the common one, with a delta and no write."""
    return Variant(key=ConsumerKey(nb=nb, has_delta=True), slots=slots, stats=stats)


def measure_cell(rig: Rig, nb: int, slots: int, rows: int, *, pdl: bool) -> Cell:
    """Measures one consumer at one row count, with a warm L2."""
    plain = Job(variant=variant_for(nb, slots, stats=False), rows=rows, pdl=pdl)
    stats = replace(plain, variant=variant_for(nb, slots, stats=True))
    copy = rig.copy_us(plain) if slots else 0.0
    return Cell(
        nb=nb,
        slots=slots,
        rows=rows,
        plain_us=rig.time_us(plain) - copy,
        ready_us=rig.time_us(stats) - copy,
        chain_us=rig.time_us(replace(stats, statistics_before=True)) - copy,
        beside_us=rig.time_us(replace(plain, statistics_before=True)) - copy,
    )


def deployments(loaded: LoadedBundle) -> dict[tuple[int, int], tuple[int, ...]]:
    """Returns each (tp, dcp) that the bundle serves, with the slot counts of its sources; 0 is an ordinary one."""
    manifest = loaded.bundle.manifest
    return {
        (table.tp, table.dcp): tuple(
            sorted({record.slots for record in manifest.variants if (table.tp, table.dcp) in record.deployments})
        )
        for table in manifest.tables
    }

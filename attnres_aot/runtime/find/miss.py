"""Words the error for a variant that a bundle does not hold: what was asked, what is near, what would add it."""

from __future__ import annotations

from attnres_aot.bundle.manifest import Manifest
from attnres_aot.bundle.manifest_check import variant_of
from attnres_aot.bundle.reader import Bundle
from attnres_aot.config.advice import build_changed
from attnres_aot.errors import VariantMissError
from attnres_aot.spec.variants import MAX_BLOCKS, MAX_SLOTS, Producer, Variant

_SHOWN = 5


def variant_miss(bundle: Bundle, asked: Variant) -> VariantMissError:
    """Returns the error for a variant that `bundle` lacks."""
    manifest = bundle.manifest
    lines = [f"the bundle holds no variant {str(asked)!r}"]
    near = nearest(asked, [variant_of(record) for record in manifest.variants])
    lines.append(f"  nearest present: {', '.join(map(str, near)) or 'none, the bundle is empty'}")
    lines.append(f"  bundle: {bundle.path} ({manifest.name} for {manifest.arch.requested})")
    lines.append(f"  mailbox slots: {', '.join(map(str, manifest.mailbox.slots)) or 'none'}")
    lines += [
        f"  tp {table.tp}, dcp {table.dcp}: attn_stats {table.attn_stats!r}, "
        f"attn_stats_blocks {table.attn_stats_blocks!r}"
        for table in manifest.tables
    ] or ["  (tp, dcp) tables: none"]
    return VariantMissError("\n".join([*lines, *_next_step(_remedy(asked), manifest)]))


def producer_miss(bundle: Bundle, asked: Producer) -> VariantMissError:
    """Returns the error for a producer that `bundle` lacks."""
    manifest = bundle.manifest
    have = ", ".join(record.name for record in manifest.producers) or "none"
    remedy = _beyond(asked.nb or 0, 0) or ", ".join(_statistics(asked.nb) if asked.nb else ["variants.ring is true"])
    lines = [
        f"the bundle holds no producer {str(asked)!r}",
        f"  present: {have}",
        f"  bundle: {bundle.path} ({manifest.name} for {manifest.arch.requested})",
    ]
    return VariantMissError("\n".join([*lines, *_next_step(remedy, manifest)]))


def nearest(asked: Variant, present: list[Variant]) -> list[Variant]:
    """Returns the few variants of `present` that differ least from `asked`, closest first."""
    return sorted(present, key=lambda variant: (_distance(asked, variant), variant.sort_key))[:_SHOWN]


def _distance(one: Variant, other: Variant) -> int:
    """Weighs what two variants differ in: what the model fixes weighs more than what a caller binds."""
    key, other_key = one.key, other.key
    return (
        min(8, 2 * abs(key.nb - other_key.nb))
        + 8 * (key.final != other_key.final)
        + 6 * (key.has_delta != other_key.has_delta)
        + 4 * (key.write != other_key.write)
        + 4 * (bool(one.slots) != bool(other.slots))
        + 1 * (one.slots != other.slots)
        + 2 * (one.aux != other.aux)
        + 2 * (one.stats != other.stats)
    )


def _next_step(remedy: str, manifest: Manifest) -> list[str]:
    """Returns the lines that end a message: what the configuration must hold, and how to build it again."""
    if remedy.startswith("No "):
        return [remedy]
    return [
        f"Next step: change the configuration so that {remedy}, and build again:",
        *build_changed(manifest.arch.requested, manifest.name),
    ]


def _remedy(asked: Variant) -> str:
    """Says what the configuration must hold for a build to include `asked`, or from "No " on that none can."""
    beyond = _beyond(asked.key.nb, asked.slots)
    if beyond:
        return beyond
    if asked.stats and asked.key.nb == 0:
        return "No bundle can hold it: a consumer of no saved blocks has no statistics; bind none to it"
    needs = ["model (layers, block_size, leading_dense_layers) has this consumer"]
    if asked.slots:
        needs += ["variants.ring is true", f"mailbox.slots has {asked.slots}"]
    if asked.aux:
        needs.append("variants.aux is true")
    if asked.stats:
        needs += _statistics(asked.key.nb)
    return ", ".join(needs)


def _statistics(nb: int) -> list[str]:
    """Returns what a configuration with statistics of `nb` saved blocks holds."""
    return [
        "variants.stats is true",
        f'in a deployment attn_stats_blocks has "{nb}:1" and attn_stats has the row counts, such as "1:1"',
    ]


def _beyond(nb: int, slots: int) -> str:
    """Says that the kernels cannot do what is asked; empty if they can."""
    if nb > MAX_BLOCKS:
        return f"No bundle can hold it: there are at most {MAX_BLOCKS} saved blocks"
    return f"No bundle can hold it: a mailbox has at most {MAX_SLOTS} slots" if slots > MAX_SLOTS else ""

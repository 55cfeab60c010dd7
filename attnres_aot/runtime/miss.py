"""Words the error for a variant that a bundle does not hold: what was asked, what is near, what would add it."""

from __future__ import annotations

from attnres_aot.bundle import Bundle
from attnres_aot.bundle.manifest_check import variant_of
from attnres_aot.errors import VariantMissError
from attnres_aot.variants import STATISTICS, Producer, Variant

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
    lines.append(f"Next step: {_remedy(asked)}")
    lines.append(f"  attnres-aot build --arch {manifest.arch.requested} --config {manifest.name}.yaml")
    return VariantMissError("\n".join(lines))


def producer_miss(bundle: Bundle, asked: Producer) -> VariantMissError:
    """Returns the error for a producer that `bundle` lacks."""
    manifest = bundle.manifest
    have = ", ".join(record.name for record in manifest.producers) or "none"
    needs = (
        f"'variants: stats: true' and {asked.nb}:1 in a deployment's 'attn_stats_blocks'"
        if asked.kernel == STATISTICS
        else "'variants: ring: true'"
    )
    return VariantMissError(
        f"the bundle holds no producer {str(asked)!r}\n"
        f"  present: {have}\n"
        f"  bundle: {bundle.path} ({manifest.name} for {manifest.arch.requested})\n"
        f"Next step: with {needs} in the configuration file, build it\n"
        f"  attnres-aot build --arch {manifest.arch.requested} --config {manifest.name}.yaml"
    )


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


def _remedy(asked: Variant) -> str:
    """Says what the configuration must hold for a build to include `asked`."""
    if asked.stats and asked.key.nb == 0:
        return "a consumer of no saved blocks has no statistics: do not bind any to it; other variants come with"
    needs = []
    if asked.slots:
        needs.append(f"'variants: ring: true' and {asked.slots} among 'mailbox: slots'")
    if asked.aux:
        needs.append("'variants: aux: true'")
    if asked.stats:
        needs.append(f"'variants: stats: true' and {asked.key.nb}:1 in a deployment's 'attn_stats_blocks'")
    which = f"{', '.join(needs)}, and a model with this consumer" if needs else "a model with this consumer"
    return f"with {which} in the configuration file, build it"

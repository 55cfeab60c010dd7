"""Manifests of bundles that hold given variants, with no code behind them."""

from __future__ import annotations

from collections.abc import Iterable

from attnres_aot.bundle.manifest import (
    SCHEMA,
    ArchRecord,
    Choice,
    MailboxRecord,
    Manifest,
    ModelRecord,
    ProducerRecord,
    SelectionRecord,
    TableRecord,
    VariantRecord,
)
from attnres_aot.spec.variants import Variant, parse_producer, parse_variant

PAIRS = ((8, 1), (16, 1))


def manifest_of(names: Iterable[str], producers: Iterable[str] = (), *, blocks: int = 8) -> Manifest:
    variants = [parse_variant(name) for name in names]
    made = [parse_producer(name) for name in producers]
    return Manifest(
        schema=SCHEMA, name="toy", arch=ArchRecord(requested="sm_90", proven="sm_90"), config={},
        selection=SelectionRecord(tp=(), dcp=(), only=()),
        sources_sha256="", toolchain={"stub": "1"}, flavour="cu12", oldest_driver="12.0",
        model=ModelRecord(hidden=1024, layers=12 * blocks, block_size=12, leading_dense_layers=1),
        mailbox=MailboxRecord(capacity=64, slots=tuple(sorted({v.slots for v in variants} - {0}))),
        tables=tuple(TableRecord(tp=tp, dcp=dcp, attn_stats="", attn_stats_blocks="") for tp, dcp in PAIRS),
        abis={}, images=(), variants=tuple(map(record_of, variants)),
        producers=tuple(
            ProducerRecord(name=str(p), kernel=p.kernel, nb=p.nb, choices=(), deployments=PAIRS) for p in made
        ),
    )  # fmt: skip


def record_of(variant: Variant) -> VariantRecord:
    key = variant.key
    return VariantRecord(
        name=str(variant), nb=key.nb, has_delta=key.has_delta, write=key.write, final=key.final, slots=variant.slots,
        aux=variant.aux, stats=variant.stats, choices=(Choice(image="x", max_rows=None),),
        deployments=tuple(pair for pair in PAIRS if variant.slots in (0, 1, pair[0])),
    )  # fmt: skip

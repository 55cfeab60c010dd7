"""Manifests for tests, with no compiled code behind them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping

from attnres_aot.bundle.manifest import (
    SCHEMA,
    ArchRecord,
    BudgetRecord,
    Choice,
    ImageRecord,
    MailboxRecord,
    Manifest,
    ModelRecord,
    ProducerRecord,
    SelectionRecord,
    TableRecord,
    VariantRecord,
)
from attnres_aot.spec.params import KERNEL_PARAMS, Param
from attnres_aot.spec.variants import (
    Variant,
    choices_for,
    kernel_symbol,
    parse_image,
    parse_producer,
    parse_variant,
    producer_spec_for,
)

Pairs = tuple[tuple[int, int], ...]
PAIRS = ((8, 1), (16, 1))
TABLES = tuple(TableRecord(tp=tp, dcp=dcp, attn_stats="", attn_stats_blocks="") for tp, dcp in PAIRS)
MODEL = ModelRecord(hidden=1024, layers=4, block_size=2, leading_dense_layers=1)


def pairs_of(variant: Variant) -> Pairs:
    """Who needs a variant: with one mailbox slot per rank those of so many ranks, else all of PAIRS."""
    return tuple(pair for pair in PAIRS if variant.slots in (0, 1, pair[0]))


def make_image(name: str, code: bytes = b"code") -> ImageRecord:
    """What a manifest says of an image of 128 threads with this code."""
    spec = parse_image(name)
    return ImageRecord(
        name=name,
        kernel=spec.kernel,
        file=f"{name}.cubin",
        sha256=hashlib.sha256(code).hexdigest(),
        size=len(code),
        symbol=kernel_symbol(name),
        abi=spec.kernel,
        cluster=spec.cluster,
        rows_per_cluster=1,
        block_threads=128,
        smem_static_bytes=0,
        smem_dynamic_bytes=0,
        pdl=True,
        registers=64,
        stack_bytes=0,
        spill_bytes=0,
        critical_instructions=100,
        budget=BudgetRecord(registers=255, smem_bytes=4096),
        build_key=hashlib.sha256(name.encode()).hexdigest(),
    )


def make_manifest(
    variants: Iterable[str] = (),
    producers: Iterable[str] = (),
    *,
    name: str = "toy",
    arch: str = "sm_90",
    model: ModelRecord = MODEL,
    tables: tuple[TableRecord, ...] = TABLES,
    deployments: Callable[[Variant], Pairs] = pairs_of,
    producer_deployments: Pairs = PAIRS,
    params: tuple[Param, ...] = KERNEL_PARAMS["consumer"],
    code: Mapping[str, bytes] | None = None,
) -> Manifest:
    """Makes a manifest of variants, each served by its first image for all rows, and of producers.

    Args:
      variants: their names.
      producers: likewise.
      name: of the configuration.
      arch: what the images are for.
      model: its geometry.
      tables: what the bundle promises.
      deployments: who needs a variant.
      producer_deployments: who needs a producer.
      params: the parameter list of the consumers.
      code: image name -> its file, for other images than those that variants and producers need.
    """
    parsed, made = [parse_variant(text) for text in variants], [parse_producer(text) for text in producers]
    served = {variant: str(choices_for(variant, model.hidden)[0].spec) for variant in parsed}
    producing = {producer: str(producer_spec_for(producer, model.hidden)) for producer in made}
    images = [
        make_image(*item) for item in (code or dict.fromkeys([*served.values(), *producing.values()], b"")).items()
    ]
    slots = tuple(sorted({variant.slots for variant in parsed} - {0}))
    return Manifest(
        schema=SCHEMA,
        name=name,
        arch=ArchRecord(requested=arch, proven=arch),
        config={},
        selection=SelectionRecord(tp=(), dcp=(), only=()),
        sources_sha256="0" * 64,
        toolchain={"stub": "1"},
        flavour="cu12",
        oldest_driver="12.0",
        model=model,
        mailbox=MailboxRecord(capacity=64, slots=slots),
        tables=tables,
        abis={image.kernel: params if image.kernel == "consumer" else KERNEL_PARAMS[image.kernel] for image in images},
        images=tuple(images),
        variants=tuple(
            VariantRecord(
                name=str(variant),
                nb=variant.key.nb,
                has_delta=variant.key.has_delta,
                write=variant.key.write,
                final=variant.key.final,
                slots=variant.slots,
                aux=variant.aux,
                stats=variant.stats,
                choices=(Choice(image=image, max_rows=None),),
                deployments=deployments(variant),
            )
            for variant, image in served.items()
        ),
        producers=tuple(
            ProducerRecord(
                name=str(producer),
                kernel=producer.kernel,
                nb=producer.nb,
                choices=(Choice(image=image, max_rows=None),),
                deployments=producer_deployments,
            )
            for producer, image in producing.items()
        ),
    )

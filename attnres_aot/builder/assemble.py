"""From proven images to a manifest: pure, and in an order that depends on names alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from attnres_aot.binary.prove import prove_image
from attnres_aot.builder.budgets import budget_for
from attnres_aot.builder.image import FinishedImage
from attnres_aot.builder.keys import BuildFacts, WantedImage
from attnres_aot.bundle.audit import statistics_held
from attnres_aot.bundle.manifest import (
    IMAGE_SUFFIX,
    SCHEMA,
    ArchRecord,
    Choice,
    ImageRecord,
    MailboxRecord,
    Manifest,
    ModelRecord,
    ProducerRecord,
    TableRecord,
    VariantRecord,
)
from attnres_aot.plan.plan import Plan, PlannedVariant
from attnres_aot.plan.settings import Deployment
from attnres_aot.spec.params import KERNEL_PARAMS
from attnres_aot.spec.tables import BatchTable, Span
from attnres_aot.spec.toolkits import cuda_text, oldest_driver
from attnres_aot.spec.variants import kernel_symbol


def prove_record(wanted: WantedImage, image: FinishedImage, plan: Plan, flavour: str) -> ImageRecord:
    """Proves an image from its binary, made by `flavour`, and returns what the manifest says about it.

    Raises:
      CompileError: the binary is not what was asked for; says what was asked and what was found.
    """
    budget = budget_for(wanted.launch)
    facts = prove_image(
        image.cubin,
        symbol=kernel_symbol(wanted.name),
        arch=plan.arch,
        flavour=flavour,
        params=KERNEL_PARAMS[wanted.kernel],
        block_threads=image.block_threads,
        budget=budget,
    )
    return ImageRecord(
        name=wanted.name,
        kernel=wanted.kernel,
        file=wanted.name + IMAGE_SUFFIX,
        sha256=hashlib.sha256(image.cubin).hexdigest(),
        size=len(image.cubin),
        symbol=facts.symbol,
        abi=wanted.kernel,
        cluster=wanted.launch["cluster"],
        rows_per_cluster=image.rows_per_cluster,
        block_threads=image.block_threads,
        smem_static_bytes=facts.smem_static_bytes,
        smem_dynamic_bytes=image.smem_dynamic_bytes,
        pdl=image.pdl,
        registers=facts.registers,
        stack_bytes=facts.stack_bytes,
        spill_bytes=facts.spill_bytes,
        critical_instructions=facts.critical_instructions,
        budget=budget,
        build_key=wanted.key,
    )


def assemble(plan: Plan, facts: BuildFacts, images: Sequence[ImageRecord]) -> Manifest:
    """Returns the manifest of a bundle of `images`, which are in the plan's order and all proven for its arch."""
    config = plan.config
    model, mailbox = config.model, config.mailbox
    variants = tuple(_variant_record(planned) for planned in plan.variants)
    held = statistics_held(variants)
    return Manifest(
        schema=SCHEMA,
        name=config.name,
        arch=ArchRecord(requested=str(plan.arch), proven=str(plan.arch)),
        config_sha256=config.digest,
        sources_sha256=facts.sources_sha256,
        toolchain=facts.recorded,
        flavour=facts.flavour,
        oldest_driver=cuda_text(oldest_driver(facts.flavour, plan.arch)),
        model=ModelRecord(
            hidden=model.hidden_size,
            layers=model.layers,
            block_size=model.block_size,
            leading_dense_layers=model.leading_dense_layers,
        ),
        mailbox=MailboxRecord(capacity=mailbox.capacity, slots=plan.slots),
        tables=tuple(
            _table_record(deployment, held.get(deployment.pair, frozenset())) for deployment in plan.deployments
        ),
        abis={kernel: KERNEL_PARAMS[kernel] for kernel in sorted({image.kernel for image in images})},
        images=tuple(images),
        variants=variants,
        producers=tuple(
            ProducerRecord(
                name=str(planned.producer),
                kernel=planned.producer.kernel,
                nb=planned.producer.nb,
                choices=(Choice(image=str(planned.spec), max_rows=None),),
                deployments=planned.deployments,
            )
            for planned in plan.producers
        ),
    )


def _table_record(deployment: Deployment, held: frozenset[int]) -> TableRecord:
    """Returns a deployment's tables, cut to the numbers of saved blocks for which the bundle holds what they need."""
    rows = BatchTable(
        spans=tuple(Span(first=first, last=last, value=1) for first, last in deployment.attn_stats.switched_on())
    )
    blocks = BatchTable(
        spans=tuple(
            Span(first=nb, last=nb, value=1) for nb in sorted(held) if deployment.attn_stats_blocks.get(nb) == 1
        )
    ).canonical()
    used = bool(rows.spans and blocks.spans)
    return TableRecord(
        tp=deployment.tp,
        dcp=deployment.dcp,
        attn_stats=str(rows) if used else "",
        attn_stats_blocks=str(blocks) if used else "",
    )


def _variant_record(planned: PlannedVariant) -> VariantRecord:
    variant = planned.variant
    key = variant.key
    return VariantRecord(
        name=str(variant),
        nb=key.nb,
        has_delta=key.has_delta,
        write=key.write,
        final=key.final,
        slots=variant.slots,
        aux=variant.aux,
        stats=variant.stats,
        choices=tuple(Choice(image=str(choice.spec), max_rows=choice.max_rows) for choice in planned.choices),
        deployments=planned.deployments,
    )

"""From proven images to a manifest: pure, and in an order that depends on names alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from attnres_aot.binary.prove import prove_image
from attnres_aot.builder.keys import BuildFacts, WantedImage
from attnres_aot.bundle.manifest import (
    IMAGE_SUFFIX,
    SCHEMA,
    ArchRecord,
    ImageRecord,
    MailboxRecord,
    Manifest,
    ModelRecord,
    SelectionRecord,
    TableRecord,
    VariantRecord,
)
from attnres_aot.plan.plan import Plan
from attnres_aot.plan.records import producer_record, variant_record
from attnres_aot.plan.settings import Deployment
from attnres_aot.spec.arch import Arch
from attnres_aot.spec.params import KERNEL_PARAMS, Param
from attnres_aot.spec.tables import BatchTable, Span
from attnres_aot.spec.toolkits import cuda_text, oldest_driver
from attnres_aot.spec.variants import kernel_symbol, variant_name


def prove_record(wanted: WantedImage, cubin: bytes, arch: Arch, flavour: str) -> ImageRecord:
    """Proves an image for `arch` from its binary, made by `flavour`, and returns what the manifest says about it.

    Raises:
      CompileError: the binary is not what was asked for; says what was asked and what was found.
    """
    symbol, launch = kernel_symbol(wanted.name), wanted.launch
    facts = prove_image(
        cubin,
        symbol=symbol,
        arch=arch,
        flavour=flavour,
        params=wanted.params,
        launch=launch,
        budget=wanted.budget,
    )
    return ImageRecord(
        name=wanted.name,
        kernel=wanted.kernel,
        file=wanted.name + IMAGE_SUFFIX,
        sha256=hashlib.sha256(cubin).hexdigest(),
        size=len(cubin),
        symbol=symbol,
        abi=wanted.kernel,
        cluster=launch["cluster"],
        rows_per_cluster=launch["rows_per_cluster"],
        block_threads=launch["threads"],
        smem_static_bytes=facts.smem_static_bytes,
        smem_dynamic_bytes=launch["smem_dynamic_bytes"],
        pdl=bool(launch["pdl"]),
        registers=facts.registers,
        stack_bytes=facts.stack_bytes,
        spill_bytes=facts.spill_bytes,
        critical_instructions=facts.critical_instructions,
        budget=wanted.budget,
        build_key=wanted.key,
    )


def assemble(
    plan: Plan,
    facts: BuildFacts,
    images: Sequence[ImageRecord],
    *,
    abis: Mapping[str, tuple[Param, ...]] = KERNEL_PARAMS,
    oldest: str | None = None,
) -> Manifest:
    """Returns the manifest of a bundle of `images`, which are in the plan's order and all proven for its arch.

    Args:
      plan: what the bundle holds.
      facts: what its images were compiled with.
      images: what was proven of each.
      abis: kernel -> the parameters that its images take.
      oldest: the oldest CUDA version whose driver runs the images; None for what flavour and arch say.
    """
    config, selection = plan.config, plan.selection
    model, mailbox = config.model, config.mailbox
    variants = tuple(map(variant_record, plan.variants))
    held = _statistics_held(variants)
    return Manifest(
        schema=SCHEMA,
        name=config.name,
        arch=ArchRecord(requested=str(plan.arch), proven=str(plan.arch)),
        config=config.source,
        selection=SelectionRecord(
            tp=tuple(sorted(set(selection.tp))),
            dcp=tuple(sorted(set(selection.dcp))),
            only=tuple(sorted(set(selection.only))),
        ),
        sources_sha256=facts.sources_sha256,
        toolchain=facts.recorded,
        flavour=facts.flavour,
        oldest_driver=oldest or cuda_text(oldest_driver(facts.flavour, plan.arch)),
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
        abis={kernel: abis[kernel] for kernel in sorted({image.kernel for image in images})},
        images=tuple(images),
        variants=variants,
        producers=tuple(map(producer_record, plan.producers)),
    )


def _statistics_held(variants: Iterable[VariantRecord]) -> dict[tuple[int, int], frozenset[int]]:
    """Returns, per deployment, for which numbers of saved blocks it can use precomputed statistics.

    It can where every variant that it has of so many blocks has a twin for it that takes statistics.
    """
    users = {variant.name: frozenset(variant.deployments) for variant in variants}
    able: dict[tuple[int, int], set[int]] = {}
    unable: dict[tuple[int, int], set[int]] = {}
    nobody: frozenset[tuple[int, int]] = frozenset()
    for variant in variants:
        if variant.stats:
            for pair in variant.deployments:
                able.setdefault(pair, set()).add(variant.nb)
        else:
            fields = (variant.nb, variant.has_delta, variant.write, variant.final, variant.slots, variant.aux)
            for pair in users[variant.name] - users.get(variant_name(*fields, stats=True), nobody):
                unable.setdefault(pair, set()).add(variant.nb)
    return {pair: frozenset(blocks - unable.get(pair, set())) for pair, blocks in able.items()}


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

"""What a manifest's parts promise each other: images fit what they serve, tables explain the deployments.

`manifest_check` asks whether a reader can use a manifest safely; this module asks whether it tells a true story.
Nothing here opens a file of the bundle.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from attnres_aot.abi import KERNEL_PARAMS
from attnres_aot.arch import parse_arch
from attnres_aot.build.keys import LAUNCH_FIELDS, PACKAGE_COMPONENT, BuildFacts, build_key
from attnres_aot.build.sources import combined_digest, sources_digests
from attnres_aot.bundle.manifest_check import producer_of, variant_of
from attnres_aot.compiler import launch_constants
from attnres_aot.errors import UsageError
from attnres_aot.manifest import Choice, ImageRecord, Manifest, ProducerRecord, TableRecord, VariantRecord
from attnres_aot.tables import BatchTable, scan_table
from attnres_aot.variants import (
    MAX_BLOCKS,
    MAX_SLOTS,
    STATISTICS,
    ImageSpec,
    SpecChoice,
    choices_for,
    parse_producer,
    parse_variant,
    producer_spec_for,
    producers_for,
)

VECTOR_ELEMS = 8
"""bf16 elements of one 16-byte access."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


def audit_problems(manifest: Manifest) -> list[str]:
    """Lists every contradiction between the parts of a manifest, in manifest order."""
    return [
        *_header_problems(manifest),
        *_table_problems(manifest),
        *_image_problems(manifest),
        *_variant_problems(manifest),
        *_producer_problems(manifest),
    ]


def is_of_this_release(manifest: Manifest) -> bool:
    """Tells whether the bundle was built from the same kernel and compiler sources as this package's."""
    return manifest.sources_sha256 == combined_digest(sources_digests())


def derivation_problems(manifest: Manifest) -> Iterator[str]:
    """Derives launch shapes, parameter lists and build keys again and yields what differs from the manifest's.

    Only meaningful where `is_of_this_release`.
    """
    for kernel, params in KERNEL_PARAMS.items():
        if manifest.abis.get(kernel, params) != params:
            yield f"abis.{kernel}: not the parameter list of the sources that the manifest names"
    toolchain = {name: version for name, version in manifest.toolchain.items() if name != PACKAGE_COMPONENT}
    facts = BuildFacts(
        toolchain=toolchain,
        package_version=manifest.toolchain.get(PACKAGE_COMPONENT, ""),
        sources=sources_digests(),
    )
    specs = {str(spec): spec for spec in _specs(manifest)}
    for image in manifest.images:
        spec = specs.get(image.name)
        if spec is None or image.kernel != spec.kernel:
            continue
        launch = launch_constants(spec)
        for constant, field in LAUNCH_FIELDS.items():
            found = getattr(image, field)
            if found != launch[constant]:
                yield f"image {image.name!r}: {field} is {found}, its sources say {launch[constant]}"
        if image.build_key != build_key(spec, launch, parse_arch(manifest.arch.requested), facts):
            yield f"image {image.name!r}: build_key is not that of its spec, arch, launch shape, sources and toolchain"


def _specs(manifest: Manifest) -> Iterator[ImageSpec]:
    for variant in manifest.variants:
        yield from (choice.spec for choice in choices_for(variant_of(variant), manifest.model.hidden))
    for producer in manifest.producers:
        yield producer_spec_for(producer_of(producer), manifest.model.hidden)


def _header_problems(manifest: Manifest) -> Iterator[str]:
    if manifest.arch.requested != manifest.arch.proven:
        yield f"arch: {manifest.arch.requested!r} was requested, but {manifest.arch.proven!r} is proven"
    for field, digest in (("config_sha256", manifest.config_sha256), ("sources_sha256", manifest.sources_sha256)):
        if _DIGEST.fullmatch(digest) is None:
            yield f"{field} {digest!r:.80} is not a lower-case sha256 digest"
    if not manifest.toolchain:
        yield "toolchain: empty; a bundle says what compiled it"
    model = manifest.model
    for field, value, low in (
        ("model.hidden", model.hidden, 1),
        ("model.layers", model.layers, 1),
        ("model.block_size", model.block_size, 1),
        ("model.leading_dense_layers", model.leading_dense_layers, 0),
        ("mailbox.capacity", manifest.mailbox.capacity, 1),
    ):
        if value < low:
            yield f"{field} is {value}; at least {low} is possible"
    slots = sorted({variant.slots for variant in manifest.variants} - {0})
    if list(manifest.mailbox.slots) != slots:
        yield f"mailbox.slots are {list(manifest.mailbox.slots)}, but the variants have {slots}"
    used = {image.abi for image in manifest.images}
    yield from (f"abis.{name}: no image takes it" for name in sorted(manifest.abis.keys() - used))


def _table_problems(manifest: Manifest) -> Iterator[str]:
    pairs = [(table.tp, table.dcp) for table in manifest.tables]
    if pairs != sorted(pairs):
        yield f"tables: (tp, dcp) {pairs} are not ascending"
    for table in manifest.tables:
        where = f"table tp {table.tp}, dcp {table.dcp}"
        if min(table.tp, table.dcp) < 1:
            yield f"{where}: sizes start at 1"
        for field, text, limit in (
            ("attn_stats", table.attn_stats, manifest.mailbox.capacity),
            ("attn_stats_blocks", table.attn_stats_blocks, MAX_BLOCKS),
        ):
            parsed, problems = scan_table(text)
            yield from (f"{where}: {field}: {problem}" for problem in problems)
            yield from (
                f"{where}: {field}: entry '{span}' is outside of 1..{limit}, or not 0 or 1"
                for span in parsed.spans
                if not 1 <= span.first <= span.last <= limit or span.value not in (0, 1)
            )


def _image_problems(manifest: Manifest) -> Iterator[str]:
    served = {choice.image for variant in manifest.variants for choice in variant.choices}
    served |= {choice.image for producer in manifest.producers for choice in producer.choices}
    for image in manifest.images:
        where = f"image {image.name!r}"
        if image.kernel not in KERNEL_PARAMS:
            known = ", ".join(KERNEL_PARAMS)
            yield f"{where}: kernel {image.kernel!r} is not one that this release knows: {known}"
            continue
        if image.abi != image.kernel:
            yield f"{where}: abi {image.abi!r}; images of kernel {image.kernel!r} take {image.kernel!r}"
        if image.name not in served:
            yield f"{where}: no variant or producer uses it"
        if not _covers_row(image, manifest.model.hidden):
            yield (
                f"{where}: {image.cluster} CTAs of {image.block_threads} threads do not share rows of "
                f"{manifest.model.hidden} elements evenly in vectors of {VECTOR_ELEMS}"
            )
        for field, used, allowed in (
            ("registers", image.registers, image.budget.registers),
            ("smem_static_bytes", image.smem_static_bytes, image.budget.smem_bytes),
            ("critical_instructions", image.critical_instructions, image.budget.critical_instructions),
        ):
            if used > allowed:
                yield f"{where}: {field} is {used}, over its budget of {allowed}"


def _covers_row(image: ImageRecord, hidden: int) -> bool:
    share = image.cluster * image.block_threads * VECTOR_ELEMS
    return share > 0 and hidden % share == 0


def _variant_problems(manifest: Manifest) -> Iterator[str]:
    tables = {(table.tp, table.dcp): table for table in manifest.tables}
    for record in manifest.variants:
        for problem in (
            *_name_problems(record),
            *_geometry_problems(record, manifest),
            *_fit_problems(record.choices, choices_for(variant_of(record), manifest.model.hidden)),
            *_deployment_problems(record.deployments, tables),
            *_stats_problems(record, tables),
        ):
            yield f"variant {record.name!r:.80}: {problem}"


def _producer_problems(manifest: Manifest) -> Iterator[str]:
    tables = {(table.tp, table.dcp): table for table in manifest.tables}
    present = {producer_of(record) for record in manifest.producers}
    for variant in manifest.variants:
        for producer in producers_for(variant_of(variant)):
            if producer not in present:
                yield f"variant {variant.name!r:.80}: takes what {str(producer)!r} makes, which is not in the bundle"
    for record in manifest.producers:
        for problem in (
            *_kind_problems(record, manifest),
            *_deployment_problems(record.deployments, tables),
        ):
            yield f"producer {record.name!r:.80}: {problem}"


def _kind_problems(record: ProducerRecord, manifest: Manifest) -> Iterator[str]:
    try:
        producer = parse_producer(record.name)
    except UsageError as error:
        yield str(error)
        return
    blocks = _saved_blocks(manifest)
    if producer.kernel == STATISTICS and not 1 <= (producer.nb or 0) <= min(blocks, MAX_BLOCKS):
        yield f"nb is {producer.nb}; the model has {blocks} saved blocks"
    spec = producer_spec_for(producer, manifest.model.hidden)
    if record.choices != (Choice(image=str(spec), max_rows=None),):
        yield f"its images are {_images(record.choices)}; its code would be {str(spec)!r} for all rows"


def _name_problems(record: VariantRecord) -> Iterator[str]:
    try:
        parse_variant(record.name)
    except UsageError as error:
        yield str(error)


def _geometry_problems(record: VariantRecord, manifest: Manifest) -> Iterator[str]:
    blocks = _saved_blocks(manifest)
    if not 0 <= record.nb <= min(blocks, MAX_BLOCKS):
        yield f"nb is {record.nb}; the model has {blocks} saved blocks"
    if record.write not in (None, record.nb):
        yield f"write is {record.write}; a block is only ever written at nb, which is {record.nb}"
    if not 0 <= record.slots <= MAX_SLOTS:
        yield f"slots is {record.slots}; 0 to {MAX_SLOTS} is possible"
    if record.nb == 0 and (record.slots or record.stats):
        yield "a consumer of no saved blocks has no mailbox and no statistics"


def _saved_blocks(manifest: Manifest) -> int:
    model = manifest.model
    return -(-model.layers // model.block_size) if model.block_size > 0 else 0


def _fit_problems(choices: tuple[Choice, ...], wanted: Iterable[SpecChoice]) -> Iterator[str]:
    expected = tuple(Choice(image=str(choice.spec), max_rows=choice.max_rows) for choice in wanted)
    if choices != expected:
        yield f"its images are {_images(choices)}; its code would be {_images(expected)}"


def _images(choices: Iterable[Choice]) -> str:
    return ", ".join(
        repr(choice.image) + (" for all rows" if choice.max_rows is None else f" up to {choice.max_rows} rows")
        for choice in choices
    )


def _deployment_problems(
    deployments: tuple[tuple[int, int], ...], tables: dict[tuple[int, int], TableRecord]
) -> Iterator[str]:
    if not deployments:
        yield "no deployment needs it"
    if list(deployments) != sorted(set(deployments)):
        yield f"its deployments {_pairs(deployments)} are not ascending"
    unknown = [pair for pair in deployments if pair not in tables]
    if unknown:
        yield f"deployments {_pairs(unknown)} are not in the tables, which have {_pairs(tables)}"


def _stats_problems(record: VariantRecord, tables: dict[tuple[int, int], TableRecord]) -> Iterator[str]:
    if record.stats:
        off = [pair for pair in record.deployments if pair in tables and not _uses_stats(tables[pair], record.nb)]
        if off:
            yield f"the tables of {_pairs(off)} never use statistics of {record.nb} saved blocks"


def _uses_stats(table: TableRecord, nb: int) -> bool:
    return _parsed(table.attn_stats_blocks).get(nb) == 1 and bool(_parsed(table.attn_stats).switched_on())


def _parsed(text: str) -> BatchTable:
    return scan_table(text)[0]


def _pairs(pairs: Iterable[tuple[int, int]]) -> str:
    return ", ".join(f"({tp}, {dcp})" for tp, dcp in pairs)

"""How `attnres-aot inspect` shows a bundle, a variant and an image to a person."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from attnres_aot.binary.cubin import CubinFacts
from attnres_aot.bundle.manifest import ImageRecord, Manifest, ProducerRecord, VariantRecord, to_json
from attnres_aot.bundle.reader import Bundle
from attnres_aot.cli.printing import show, show_facts, show_table, strong
from attnres_aot.cli.variant_tables import Part, parts_of, show_producers, show_variants
from attnres_aot.cli.wording import count, pairs
from attnres_aot.spec.arch import parse_arch
from attnres_aot.spec.params import Param
from attnres_aot.spec.toolkits import driver_text, parse_cuda

_ALWAYS = ("registers", "bytes")  # columns of images


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageView:
    """One image with everything that is shown of it."""

    record: ImageRecord
    """What the manifest says."""
    params: tuple[Param, ...]
    """Its parameter list."""
    facts: CubinFacts
    """What the binary says."""
    serves: tuple[str, ...]
    """Names of the variants or producers that use it."""
    sass: str | None
    """Its disassembled code, if asked for."""


def show_bundles(bundles: Sequence[Bundle]) -> None:
    """Prints one line per bundle."""
    rows = [("bundle", "arch", "for", "images", "variants", "bytes")]
    for bundle in bundles:
        manifest = bundle.manifest
        proven = manifest.arch.proven
        size = sum(image.size for image in manifest.images)
        counts = (str(len(manifest.images)), str(len(manifest.variants)), f"{size:,}")
        rows.append((bundle.path.name, proven, parse_arch(proven).rule(), *counts))
    show_table(rows, words=3, indent="")


def show_bundle(bundle: Bundle) -> None:
    """Prints a whole bundle: what it is, its images, its variants and its producers by kind."""
    manifest = bundle.manifest
    show_facts(str(bundle.path), _header(manifest))
    show()
    _show_images(manifest)
    everyone = tuple((table.tp, table.dcp) for table in manifest.tables)
    registers = {image.name: image.registers for image in manifest.images}
    if manifest.variants:
        show()
        show(strong(count(len(manifest.variants), "variant")))
        show_variants(manifest.variants, everyone, registers=registers)
    if manifest.producers:
        show()
        show_producers(manifest.producers, everyone, registers)


def _show_images(manifest: Manifest) -> None:
    """Prints a table of images with, besides registers and sizes, what is not the same for all of them."""
    images = manifest.images
    served = Counter(choice.image for each in parts_of(manifest) for choice in each.choices)
    numbers = {
        "registers": [image.registers for image in images],
        "spills": [image.spill_bytes for image in images],
        "smem": [image.smem_static_bytes + image.smem_dynamic_bytes for image in images],
        "CTAs": [image.cluster for image in images],
        "threads": [image.block_threads for image in images],
        "rows": [image.rows_per_cluster for image in images],
        "bytes": [image.size for image in images],
    }
    alike = [name for name, values in numbers.items() if name not in _ALWAYS and len(set(values)) == 1]
    common = ", ".join(f"{name} {numbers[name][0]}" for name in alike)
    shown = [name for name in numbers if name not in alike]
    rows: list[tuple[str, ...]] = [("image", *shown, "serves")]
    for index, image in enumerate(images):
        cells = (f"{numbers[name][index]:,}" for name in shown)
        rows.append((image.name, *cells, str(served[image.name])))
    show(strong(count(len(images), "image")) + (f": all with {common}" if common else ""))
    show_table(rows)


def show_part(bundle: Bundle, part: Part | None, images: Sequence[ImageView]) -> None:
    """Prints one variant or producer in full, if there is one, then images in full."""
    if part is not None:
        proven = bundle.manifest.arch.proven
        what = _variant_facts(part) if isinstance(part, VariantRecord) else _producer_facts(part)
        facts = [
            ("bundle", f"{bundle.path} ({proven}: {parse_arch(proven).rule()})"),
            *what,
            ("(tp,dcp)", pairs(part.deployments)),
            *(("image", f"{choice.image}, for {_rows(choice.max_rows)}") for choice in part.choices),
        ]
        show_facts(part.name, facts)
    for number, view in enumerate(images):
        if part is not None or number:
            show()
        _show_image(view)


def _variant_facts(variant: VariantRecord) -> Iterator[tuple[str, str]]:
    source = f"a mailbox of {count(variant.slots, 'slot')}" if variant.slots else "ordinary [rows, H]"
    yield "saved blocks", str(variant.nb)
    yield "source", f"{source}, {'added to' if variant.has_delta else 'replaces'} the prefix"
    yield "writes block", "none" if variant.write is None else str(variant.write)
    for name, flag in (("final", variant.final), ("aux copy", variant.aux), ("statistics", variant.stats)):
        yield name, "yes" if flag else "no"


def _producer_facts(producer: ProducerRecord) -> Iterator[tuple[str, str]]:
    blocks = producer.nb
    yield "makes", "rows of a mailbox" if blocks is None else f"statistics of {count(blocks, 'saved block')}"


def _show_image(view: ImageView) -> None:
    """Prints one image in full: the manifest's record, the binary's own word, the parameters, and its code."""
    record, facts = view.record, view.facts
    show_facts(record.name, _image_facts(record, facts))
    show_facts("", [("serves", ", ".join(view.serves) or "nothing")])
    show()
    params = [(param.name, param.kind, str(param.offset), str(param.size)) for param in view.params]
    show_table([("parameter", "kind", "offset", "bytes"), *params], words=2, indent="")
    if view.sass is not None:
        show()
        show(view.sass)


def _image_facts(record: ImageRecord, facts: CubinFacts) -> Iterator[tuple[str, str]]:
    yield "file", f"{record.file}, {record.size:,} bytes, sha256 {record.sha256}"
    yield "symbol", record.symbol
    yield "launch", _launch(record)
    budget = record.budget
    yield (
        "shared memory",
        f"{record.smem_static_bytes} bytes static (budget {budget.smem_bytes}), {record.smem_dynamic_bytes} dynamic",
    )
    yield "PDL", "allowed" if record.pdl else "not allowed"
    local = f"{record.stack_bytes} bytes of stack, {record.spill_bytes} of spills"
    yield "registers", f"{record.registers} (budget {budget.registers}); {local}"
    yield "critical path", f"{record.critical_instructions} instructions"
    for kernel in facts.kernels:
        slow = kernel.local_instructions
        yield "code", f"{kernel.instructions} instructions, {slow or 'none'} of them on local memory"
    made_by = f"{facts.toolkit}; {facts.options}" if facts.toolkit is not None else "the binary names no tool"
    yield "compiled by", f"{made_by} (flavour {facts.flavour or 'unknown'})"
    yield "build key", record.build_key


def _launch(record: ImageRecord) -> str:
    rows = "row" if record.rows_per_cluster == 1 else f"{record.rows_per_cluster} rows"
    ctas = "one CTA" if record.cluster == 1 else f"a cluster of {record.cluster} CTAs"
    return f"{ctas} of {record.block_threads} threads per {rows}"


def _header(manifest: Manifest) -> Iterator[tuple[str, str]]:
    model, mailbox = manifest.model, manifest.mailbox
    arch = parse_arch(manifest.arch.proven)
    size = sum(image.size for image in manifest.images)
    yield "for", f"{arch.rule()}; {manifest.arch.requested} requested, {arch} proven"
    oldest = parse_cuda(manifest.oldest_driver)
    yield "driver", f"{driver_text(oldest) if oldest else manifest.oldest_driver} or later"
    counts = f"{count(len(manifest.variants), 'variant')} and {count(len(manifest.producers), 'producer')}"
    yield "holds", f"{counts} in {count(len(manifest.images), 'image')} of {size:,} bytes"
    yield "model", f"{manifest.name}: {model.layers} layers of {model.hidden}, {model.block_size} to a saved block"
    slots = ", ".join(map(str, mailbox.slots)) or "none"
    yield "mailboxes", f"capacity {mailbox.capacity} rows; slots: {slots}"
    yield "built with", f"flavour {manifest.flavour}"
    for name, version in sorted(manifest.toolchain.items()):
        yield "built with", f"{name} {version}"
    yield "sources", f"digest {manifest.sources_sha256[:12]}"
    for name, part in to_json(manifest.selection).items():
        if part:
            yield "selected", f"{name} {', '.join(map(str, part))}"
    tables: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for table in manifest.tables:
        tables.setdefault((table.attn_stats or "none", table.attn_stats_blocks or "none"), []).append(
            (table.tp, table.dcp)
        )
    for (rows, blocks), users in tables.items():
        yield "statistics", f"rows {rows}, saved blocks {blocks} for (tp,dcp) {pairs(users)}"


def _rows(max_rows: int | None) -> str:
    return "any number of rows" if max_rows is None else f"up to {max_rows} rows"

"""How `attnres-aot inspect` shows a bundle, a variant and an image to a person."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attnres_aot.abi import Param
from attnres_aot.arch import parse_arch
from attnres_aot.binary.cubin import CubinFacts
from attnres_aot.bundle import Bundle
from attnres_aot.cli.plan_rows import ranges
from attnres_aot.manifest import ImageRecord, Manifest, VariantRecord

MIN_WIDTH = 150
"""Characters that a table gets where the output is no terminal, so that no name is cut."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """What the variants of one row have in common, besides their saved blocks."""

    slots: int
    consumer: str
    deployments: tuple[tuple[int, int], ...]


def show_bundles(bundles: Sequence[Bundle]) -> None:
    """Prints one line per bundle."""
    table = _table("bundle", "arch", "images:", "variants:", "bytes:", "for")
    for bundle in bundles:
        manifest = bundle.manifest
        proven = manifest.arch.proven
        size = sum(image.size for image in manifest.images)
        counts = (str(len(manifest.images)), str(len(manifest.variants)), f"{size:,}")
        table.add_row(escape(bundle.path.name), proven, *counts, parse_arch(proven).rule())
    _console().print(table)


def show_bundle(bundle: Bundle) -> None:
    """Prints a whole bundle: what it is, its images, and its variants by kind."""
    console = _console()
    _print_facts(console, str(bundle.path), _header(bundle.manifest))
    console.print()
    console.print(_image_table(bundle.manifest))
    console.print()
    console.print(_variant_table(bundle.manifest))
    if bundle.manifest.producers:
        console.print()
        console.print(_producer_table(bundle.manifest))


def show_variant(bundle: Bundle, variant: VariantRecord) -> None:
    """Prints one variant in full; its images are shown apart."""
    manifest = bundle.manifest
    source = f"a mailbox of {variant.slots} slots" if variant.slots else "ordinary [rows, H]"
    facts = [
        ("bundle", f"{bundle.path} ({manifest.arch.proven}: {parse_arch(manifest.arch.proven).rule()})"),
        ("saved blocks", str(variant.nb)),
        ("source", f"{source}, {'added to' if variant.has_delta else 'replaces'} the prefix"),
        ("writes block", "none" if variant.write is None else str(variant.write)),
        ("final", _yes(flag=variant.final)),
        ("aux copy", _yes(flag=variant.aux)),
        ("precomputed statistics", _yes(flag=variant.stats)),
        ("(tp, dcp)", _pairs(variant.deployments)),
        *(("image", f"{choice.image}, for {_rows(choice.max_rows)}") for choice in variant.choices),
    ]
    _print_facts(_console(), variant.name, facts)


def show_image(view: ImageView) -> None:
    """Prints one image in full: the manifest's record, the binary's own word, the parameters, and its code."""
    console = _console()
    record, facts = view.record, view.facts
    console.print()
    _print_facts(console, record.name, _image_facts(record, facts))
    _print_facts(console, "", [("serves", ", ".join(view.serves) or "nothing")])
    table = _table("parameter", "kind", "offset:", "bytes:")
    for param in view.params:
        table.add_row(escape(param.name), param.kind, str(param.offset), str(param.size))
    console.print()
    console.print(table)
    if view.sass is not None:
        console.print()
        console.out(view.sass, highlight=False)


def _image_facts(record: ImageRecord, facts: CubinFacts) -> Iterator[tuple[str, str]]:
    yield "file", f"{record.file}, {record.size:,} bytes, sha256 {record.sha256}"
    yield "symbol", record.symbol
    yield "launch", _launch(record)
    yield "shared memory", f"{record.smem_static_bytes} bytes static, {record.smem_dynamic_bytes} dynamic"
    yield "PDL", "allowed" if record.pdl else "not allowed"
    yield "registers", f"{record.registers}; {record.stack_bytes} bytes of stack, {record.spill_bytes} of spills"
    for kernel in facts.kernels:
        local = kernel.local_instructions
        yield "code", f"{kernel.instructions} instructions, {local or 'none'} of them on local memory"
    if facts.toolkit is not None:
        yield "compiled by", f"{facts.toolkit}; {facts.options}"
    yield "build key", record.build_key


def _launch(record: ImageRecord) -> str:
    rows = "row" if record.rows_per_cluster == 1 else f"{record.rows_per_cluster} rows"
    return f"a cluster of {record.cluster} CTAs of {record.block_threads} threads per {rows}"


def _header(manifest: Manifest) -> Iterator[tuple[str, str]]:
    model, mailbox = manifest.model, manifest.mailbox
    arch = parse_arch(manifest.arch.proven)
    size = sum(image.size for image in manifest.images)
    yield "for", f"{arch.rule()}; {manifest.arch.requested} requested, {arch} proven"
    counts = f"{len(manifest.variants)} variants and {len(manifest.producers)} producers"
    yield "holds", f"{counts} served by {len(manifest.images)} images of {size:,} bytes in all"
    yield "model", f"{manifest.name}: {model.layers} layers of {model.hidden}, {model.block_size} to a saved block"
    slots = ", ".join(map(str, mailbox.slots)) or "none"
    yield "mailboxes", f"capacity {mailbox.capacity} rows; slots: {slots}"
    yield "built with", ", ".join(f"{name} {version}" for name, version in sorted(manifest.toolchain.items()))
    yield "digests", f"config {manifest.config_sha256[:12]}, sources {manifest.sources_sha256[:12]}"
    for table in manifest.tables:
        rows, blocks = (text or "none" for text in (table.attn_stats, table.attn_stats_blocks))
        yield f"tp {table.tp}, dcp {table.dcp}", f"statistics for rows {rows}; saved blocks {blocks}"


def _image_table(manifest: Manifest) -> Table:
    serves: dict[str, int] = {}
    choices = [choice for variant in manifest.variants for choice in variant.choices]
    choices += [choice for producer in manifest.producers for choice in producer.choices]
    for choice in choices:
        serves[choice.image] = serves.get(choice.image, 0) + 1
    table = _table("image", "registers:", "spills:", "smem:", "CTAs:", "threads:", "rows:", "bytes:", "serves:")
    for image in manifest.images:
        numbers = (
            image.registers,
            image.spill_bytes,
            image.smem_static_bytes + image.smem_dynamic_bytes,
            image.cluster,
            image.block_threads,
            image.rows_per_cluster,
        )
        counts = (f"{image.size:,}", str(serves.get(image.name, 0)))
        table.add_row(escape(image.name), *map(str, numbers), *counts)
    return table


def _producer_table(manifest: Manifest) -> Table:
    table = _table("producer", "saved blocks:", "image", "(tp, dcp)")
    for producer in manifest.producers:
        blocks = "-" if producer.nb is None else str(producer.nb)
        images = ", ".join(choice.image for choice in producer.choices)
        table.add_row(escape(producer.name), blocks, escape(images), _pairs(producer.deployments))
    return table


def _variant_table(manifest: Manifest) -> Table:
    images = {image.name: image for image in manifest.images}
    table = _table("source", "consumer", "saved blocks", "options", "variants:", "images:", "registers:", "(tp, dcp)")
    for (kind, blocks), by_options in _merged(manifest.variants).items():
        members = [member for alike in by_options.values() for member in alike]
        used = {choice.image for member in members for choice in member.choices}
        registers = sorted({images[name].registers for name in used})
        table.add_row(
            f"mailbox, {kind.slots}" if kind.slots else "ordinary",
            kind.consumer,
            blocks,
            ", ".join(by_options),
            str(len(members)),
            str(len(used)),
            f"{registers[0]}-{registers[-1]}" if len(registers) > 1 else str(registers[0]),
            _pairs(kind.deployments),
        )
    return table


def _merged(variants: Iterable[VariantRecord]) -> dict[tuple[_Kind, str], dict[str, list[VariantRecord]]]:
    """Groups variants by kind and saved blocks, then by options: those of equal saved blocks share a row."""
    apart: dict[tuple[_Kind, str], list[VariantRecord]] = {}
    for variant in variants:
        apart.setdefault((_kind(variant), _options(variant)), []).append(variant)
    merged: dict[tuple[_Kind, str], dict[str, list[VariantRecord]]] = {}
    for (kind, options), members in apart.items():
        merged.setdefault((kind, ranges(member.nb for member in members)), {})[options] = members
    return merged


def _kind(variant: VariantRecord) -> _Kind:
    words = [
        "delta" if variant.has_delta else "no delta",
        "" if variant.write is None else "writes nb" if variant.write == variant.nb else f"writes {variant.write}",
        "final" if variant.final else "",
    ]
    return _Kind(slots=variant.slots, consumer=", ".join(filter(None, words)), deployments=variant.deployments)


def _options(variant: VariantRecord) -> str:
    return "+".join(name for name, on in (("aux", variant.aux), ("stats", variant.stats)) if on) or "plain"


def _print_facts(console: Console, title: str, facts: Iterable[tuple[str, str]]) -> None:
    if title:
        console.print(f"[bold]{escape(title)}[/]")
    for name, value in facts:
        console.print(f"  [dim]{escape(name):<22}[/]  {escape(value)}")


def _table(*headers: str) -> Table:
    """Returns an empty table; a header that ends in `:` has numbers below it."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for header in headers:
        table.add_column(header.rstrip(":"), justify="right" if header.endswith(":") else "left", no_wrap=True)
    return table


def _console() -> Console:
    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(highlight=False, soft_wrap=True, width=MIN_WIDTH)


def _rows(max_rows: int | None) -> str:
    return "any number of rows" if max_rows is None else f"up to {max_rows} rows"


def _yes(*, flag: bool) -> str:
    return "yes" if flag else "no"


def _pairs(pairs: Iterable[tuple[int, int]]) -> str:
    return " ".join(f"({tp},{dcp})" for tp, dcp in pairs)

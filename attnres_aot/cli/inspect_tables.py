"""The tables of `attnres-aot inspect`: images, variants and producers of a bundle; they fit 80 characters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from attnres_aot.bundle.manifest import Manifest, ProducerRecord, VariantRecord
from attnres_aot.cli.printing import faint, show, show_table, strong
from attnres_aot.cli.wording import count, pairs, ranges, source_name, span
from attnres_aot.columns import line, widths

_VARIANT_HEADER = ("consumer", "nb", "options", "variants", "images", "registers")
_ALWAYS = ("registers", "bytes")

_Group = tuple[int, tuple[tuple[int, int], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """What the variants of one row have in common, besides their saved blocks."""

    slots: int
    consumer: str
    deployments: tuple[tuple[int, int], ...]

    @property
    def group(self) -> _Group:
        """What the rows below one heading have in common."""
        return (self.slots, self.deployments)


def show_images(manifest: Manifest) -> None:
    """Prints a table of images with, besides registers and sizes, what is not the same for all of them."""
    images = manifest.images
    served = _served(manifest)
    numbers = {
        "registers": [image.registers for image in images],
        "spills": [image.spill_bytes for image in images],
        "smem": [image.smem_static_bytes + image.smem_dynamic_bytes for image in images],
        "CTAs": [image.cluster for image in images],
        "threads": [image.block_threads for image in images],
        "rows": [image.rows_per_cluster for image in images],
        "bytes": [image.size for image in images],
    }
    alike = [f"{name} {values[0]}" for name, values in numbers.items() if name not in _ALWAYS and len(set(values)) == 1]
    shown = [name for name, values in numbers.items() if name in _ALWAYS or len(set(values)) > 1]
    rows: list[tuple[str, ...]] = [("image", *shown, "serves")]
    for index, image in enumerate(images):
        cells = (f"{numbers[name][index]:,}" for name in shown)
        rows.append((image.name, *cells, str(served[image.name])))
    show(f"{strong(count(len(images), 'image'))}{': all with ' + ', '.join(alike) if alike else ''}")
    show_table(rows)


def show_variants(manifest: Manifest) -> None:
    """Prints a table of variants by source and deployments, with those of one kind in one row."""
    registers = {image.name: image.registers for image in manifest.images}
    rows: dict[_Group, list[tuple[str, ...]]] = {}
    for (kind, blocks), by_options in _by_kind(manifest.variants).items():
        members = [member for alike in by_options.values() for member in alike]
        used = {choice.image for member in members for choice in member.choices}
        options = ", ".join(by_options)
        cells: tuple[str, ...] = (
            kind.consumer,
            blocks,
            options,
            str(len(members)),
            str(len(used)),
            span(registers[name] for name in used),
        )
        rows.setdefault(kind.group, []).append(cells)
    columns = widths([_VARIANT_HEADER, *(cells for section in rows.values() for cells in section)])
    show(strong(count(len(manifest.variants), "variant")))
    show(f"  {faint(line(_VARIANT_HEADER, columns, words=3))}")
    for group in sorted(rows):
        slots, deployments = group
        show(f"{source_name(slots)}, for (tp,dcp) {pairs(deployments)}")
        for row in rows[group]:
            show(f"  {line(row, columns, words=3)}")


def show_producers(manifest: Manifest) -> None:
    """Prints a table of producers, with those of one kernel in one row."""
    registers = {image.name: image.registers for image in manifest.images}
    kinds: dict[tuple[str, tuple[tuple[int, int], ...]], list[ProducerRecord]] = {}
    for producer in manifest.producers:
        kinds.setdefault((producer.kernel, producer.deployments), []).append(producer)
    rows = [("kernel", "nb", "for (tp,dcp)", "images", "registers")]
    for (kernel, deployments), members in kinds.items():
        used = {choice.image for member in members for choice in member.choices}
        blocks = ranges(member.nb for member in members if member.nb is not None)
        rows.append((kernel, blocks or "-", pairs(deployments), str(len(used)), span(registers[name] for name in used)))
    show(strong(count(len(manifest.producers), "producer")))
    show_table(rows, words=3)


def _served(manifest: Manifest) -> Counter[str]:
    """Counts by image how many variants and producers it serves."""
    variants = (choice.image for variant in manifest.variants for choice in variant.choices)
    producers = (choice.image for producer in manifest.producers for choice in producer.choices)
    return Counter((*variants, *producers))


def _by_kind(variants: Iterable[VariantRecord]) -> dict[tuple[_Kind, str], dict[str, list[VariantRecord]]]:
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
        "" if variant.write is None else "write nb" if variant.write == variant.nb else f"write {variant.write}",
        "final" if variant.final else "",
    ]
    return _Kind(slots=variant.slots, consumer=", ".join(filter(None, words)), deployments=variant.deployments)


def _options(variant: VariantRecord) -> str:
    return "both" if variant.aux and variant.stats else "aux" if variant.aux else "stats" if variant.stats else "plain"

"""How large a bundle and the parts of its manifest may be, so that checking any bundle takes little time and memory.

Every bundle that can be built is far below; `docs/bundle_format.md` lists the limits.
"""

from __future__ import annotations

from collections.abc import Iterator

from attnres_aot.bundle.manifest import Manifest, ProducerRecord, VariantRecord
from attnres_aot.spec.variants import MAX_DEPLOYMENTS

MAX_IMAGE_BYTES = 1 << 20
"""Largest image file that a reader accepts; ours have some 30 KB."""
MAX_BUNDLE_BYTES = 64 << 20
"""Largest sum of all image files."""
MAX_IMAGES = 4096
"""Most images."""
MAX_VARIANTS = 16384
"""Most variants, and most producers."""
MAX_TABLE_CHARS = 1 << 19
"""Most characters of all statistics tables together."""
MAX_CHOICES = 16
"""Most images of one variant."""
MAX_ABIS = 16
"""Most parameter lists."""
MAX_PARAMS = 128
"""Most parameters of one kernel."""
MAX_TOOLCHAIN = 64
"""Most components of the toolchain."""
MAX_LIBRARIES = 16
"""Most shared objects."""
MAX_TEXT_CHARS = 256
"""Longest text of any other kind: a parameter's name, a component's version."""
MAX_NUMBER = 1 << 31
"""Largest number where nothing else bounds it."""


def size_problems(manifest: Manifest) -> Iterator[str]:
    """Yields every part of a manifest that is too large or too long to be looked at more closely."""
    for what, count, most in (
        ("images", len(manifest.images), MAX_IMAGES),
        ("variants", len(manifest.variants), MAX_VARIANTS),
        ("producers", len(manifest.producers), MAX_VARIANTS),
        ("tables", len(manifest.tables), MAX_DEPLOYMENTS),
        ("abis", len(manifest.abis), MAX_ABIS),
        ("toolchain", len(manifest.toolchain), MAX_TOOLCHAIN),
        ("libraries", len(manifest.libraries), MAX_LIBRARIES),
        *(
            (f"names of library {each.file:.80}", len(each.needed) + len(each.exports), MAX_TEXT_CHARS)
            for each in manifest.libraries
        ),
        ("mailbox.slots", len(manifest.mailbox.slots), MAX_TEXT_CHARS),
        *((f"selection.{name}", len(part), MAX_TEXT_CHARS) for name, part in _selected(manifest)),
        ("bytes of images", sum(image.size for image in manifest.images), MAX_BUNDLE_BYTES),
        ("characters of tables", _table_chars(manifest), MAX_TABLE_CHARS),
        *((f"abis.{name:.80}", len(params), MAX_PARAMS) for name, params in manifest.abis.items()),
    ):
        if count > most:
            yield f"{what}: {count}; at most {most} are allowed"
    records: tuple[VariantRecord | ProducerRecord, ...] = (*manifest.variants, *manifest.producers)
    for record in records:
        if len(record.choices) > MAX_CHOICES or len(record.deployments) > MAX_DEPLOYMENTS:
            yield _record_problem(record)
    for text in _texts(manifest):
        if len(text) > MAX_TEXT_CHARS:
            yield f"a text of {len(text)} characters, {text[:40]!r}...; at most {MAX_TEXT_CHARS} are allowed"
    model, mailbox = manifest.model, manifest.mailbox
    for field, value, low in (
        ("model.hidden", model.hidden, 1),
        ("model.layers", model.layers, 1),
        ("model.block_size", model.block_size, 1),
        ("model.leading_dense_layers", model.leading_dense_layers, 0),
        ("mailbox.capacity", mailbox.capacity, 1),
        *((f"mailbox.slots[{index}]", slots, 1) for index, slots in enumerate(mailbox.slots)),
        *((f"tables[{index}].tp", table.tp, 1) for index, table in enumerate(manifest.tables)),
        *((f"tables[{index}].dcp", table.dcp, 1) for index, table in enumerate(manifest.tables)),
    ):
        if not low <= value <= MAX_NUMBER:
            yield f"{field} is {value}; {low} to {MAX_NUMBER} is possible"


def _selected(manifest: Manifest) -> Iterator[tuple[str, tuple[object, ...]]]:
    selection = manifest.selection
    yield from (("tp", selection.tp), ("dcp", selection.dcp), ("only", selection.only))


def _table_chars(manifest: Manifest) -> int:
    return sum(len(table.attn_stats) + len(table.attn_stats_blocks) for table in manifest.tables)


def _record_problem(record: VariantRecord | ProducerRecord) -> str:
    return (
        f"{record.name!r:.80}: {len(record.choices)} images and {len(record.deployments)} deployments; "
        f"at most {MAX_CHOICES} and {MAX_DEPLOYMENTS} are allowed"
    )


def _texts(manifest: Manifest) -> Iterator[str]:
    """Yields the texts of a manifest that no rule of their own keeps short."""
    yield from manifest.selection.only
    yield from manifest.toolchain.keys()
    yield from manifest.toolchain.values()
    for name, params in manifest.abis.items():
        yield name
        for param in params:
            yield param.name
            yield param.kind
    for image in manifest.images:
        yield image.symbol
        yield image.abi
        yield image.kernel
    for variant in manifest.variants:
        yield variant.name
    for producer in manifest.producers:
        yield producer.name
        yield producer.kernel

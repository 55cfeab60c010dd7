"""Writes what a shared object embeds: per bundle a table of its manifest's facts, the manifest itself, the images.

    header    magic, number of bundles, digest of the rest, an offset of a table per bundle
    tables    records of fixed size, as `launcher.cpp` declares them, with offsets from the start of the payload
    pool      numbers, texts, manifests (bzip2, of which every release makes the same bytes), images on multiples of 64

Equal manifests and images give equal bytes. `attnres_aot.bundle.shared_object` reads the part that a loader needs.
"""

from __future__ import annotations

import bz2
import hashlib
import struct
from collections.abc import Mapping, Sequence

from attnres_aot.bundle.manifest import Choice, Manifest, dump_manifest
from attnres_aot.bundle.manifest_check import variant_of
from attnres_aot.bundle.shared_object import HEADER, IMAGE_RECORD, MAGIC, MAX_BUNDLES, TABLE_RECORD, Ref
from attnres_aot.errors import BundleError
from attnres_aot.spec.arch import parse_arch
from attnres_aot.spec.tables import scan_table
from attnres_aot.spec.toolkits import driver_text, parse_cuda

KERNELS = ("consumer", "statistics", "publish")
"""Kernels whose parameters the launcher fills."""

_PARAM = struct.Struct("<2I2I")
_KERNEL = struct.Struct("<2I2I")
_VARIANT = struct.Struct("<2I2i5I2I2I")
_PRODUCER = struct.Struct("<2II2I2I")
_STATISTICS = struct.Struct("<2I2I2I2I2I")
_PAIR = struct.Struct("<2I")
_NO_LIMIT = 0xFFFFFFFF
_IMAGE_ALIGNMENT = 64


def pack_payload(bundles: Sequence[tuple[Manifest, Mapping[str, bytes]]], advice: Mapping[str, str]) -> bytes:
    """Returns the payload of a library.

    Args:
      bundles: manifests, each with its image files by name, of different archs.
      advice: per arch, what a message says on how to build again after a change of the configuration.

    Raises:
      BundleError: more bundles than a library can hold.
    """
    if not 1 <= len(bundles) <= MAX_BUNDLES:
        raise BundleError(f"a library holds 1 to {MAX_BUNDLES} bundles, not {len(bundles)}")
    pool = _Pool()
    tables = [pool.add(b"\0" * TABLE_RECORD.size, 8).offset for _ in bundles]
    for at, (manifest, files) in zip(tables, bundles, strict=True):
        pool.data[at : at + TABLE_RECORD.size] = _table(pool, manifest, files, advice[manifest.arch.proven])
    body = bytes(pool.data[HEADER.size :])
    digest = hashlib.sha256(body).hexdigest()[:32].encode("ascii")
    offsets = [*tables, *[0] * (MAX_BUNDLES - len(tables))]
    return HEADER.pack(MAGIC, len(bundles), 0, digest, *offsets) + body


class _Pool:
    """Bytes that records refer to; equal texts and numbers lie there once."""

    def __init__(self) -> None:
        self.data = bytearray(HEADER.size)
        self._known: dict[tuple[bytes, int], Ref] = {}

    def add(self, data: bytes, alignment: int = 1) -> Ref:
        """Appends bytes."""
        self.data += b"\0" * (-len(self.data) % alignment)
        ref = Ref(len(self.data), len(data))
        self.data += data
        return ref

    def text(self, text: str) -> Ref:
        """Returns where a text lies; the launcher takes it with the zero behind it."""
        data = text.encode("ascii")
        found = self._known.get((data, 1))
        if found is None:
            self._known[data, 1] = found = self.add(data + b"\0")
        return Ref(found.offset, len(data))

    def records(self, packed: Sequence[bytes]) -> Ref:
        """Returns where records lie, and how many there are."""
        data = b"".join(packed)
        found = self._known.get((data, 4))
        if found is None:
            self._known[data, 4] = found = self.add(data, 4)
        return Ref(found.offset, len(packed))


def _table(pool: _Pool, manifest: Manifest, files: Mapping[str, bytes], advice: str) -> bytes:
    arch = parse_arch(manifest.arch.proven)
    oldest = parse_cuda(manifest.oldest_driver) or (0, 0)
    places = {image.name: number for number, image in enumerate(manifest.images)}
    return TABLE_RECORD.pack(
        manifest.model.hidden,
        arch.major,
        arch.minor,
        ord(arch.suffix) if arch.suffix else 0,
        oldest[0] * 1000 + oldest[1] * 10,
        *pool.text(manifest.name),
        *pool.text(manifest.arch.proven),
        *pool.text(arch.rule()),
        *pool.text(driver_text(oldest)),
        *pool.text(advice),
        *pool.add(bz2.compress(dump_manifest(manifest))),
        *_kernels(pool, manifest),
        *_images(pool, manifest, files),
        *_variants(pool, manifest, places),
        *_producers(pool, manifest, places),
        *_statistics(pool, manifest),
    )


def _kernels(pool: _Pool, manifest: Manifest) -> Ref:
    records = []
    for name in KERNELS:
        params = [
            _PARAM.pack(*pool.text(param.name), param.offset, param.size) for param in manifest.abis.get(name, ())
        ]
        records.append(_KERNEL.pack(*pool.text(name), *pool.records(params)))
    return pool.records(records)


def _images(pool: _Pool, manifest: Manifest, files: Mapping[str, bytes]) -> Ref:
    return pool.records(
        [
            IMAGE_RECORD.pack(
                *pool.text(image.name),
                *pool.text(image.symbol),
                *pool.add(files[image.file], _IMAGE_ALIGNMENT),
                KERNELS.index(image.kernel),
                image.cluster,
                image.rows_per_cluster,
                image.block_threads,
                image.smem_static_bytes,
                image.smem_dynamic_bytes,
                image.pdl,
            )
            for image in manifest.images
        ]
    )


def _choices(pool: _Pool, choices: Sequence[Choice], places: Mapping[str, int]) -> Ref:
    return pool.records(
        [
            _PAIR.pack(places[choice.image], _NO_LIMIT if choice.max_rows is None else choice.max_rows)
            for choice in choices
        ]
    )


def _variants(pool: _Pool, manifest: Manifest, places: Mapping[str, int]) -> Ref:
    return pool.records(
        [
            _VARIANT.pack(
                *pool.text(record.name),
                record.nb,
                -1 if record.write is None else record.write,
                record.has_delta,
                record.final,
                record.slots,
                record.aux,
                record.stats,
                *_choices(pool, record.choices, places),
                *pool.records([_PAIR.pack(*pair) for pair in record.deployments]),
            )
            for record in sorted(manifest.variants, key=lambda record: variant_of(record).sort_key)
        ]
    )


def _producers(pool: _Pool, manifest: Manifest, places: Mapping[str, int]) -> Ref:
    return pool.records(
        [
            _PRODUCER.pack(
                *pool.text(record.name),
                KERNELS.index(record.kernel),
                *_choices(pool, record.choices, places),
                *pool.records([_PAIR.pack(*pair) for pair in record.deployments]),
            )
            for record in manifest.producers
        ]
    )


def _statistics(pool: _Pool, manifest: Manifest) -> Ref:
    return pool.records(
        [
            _STATISTICS.pack(
                table.tp,
                table.dcp,
                *pool.text(table.attn_stats),
                *pool.text(table.attn_stats_blocks),
                *_numbers(pool, table.attn_stats),
                *_numbers(pool, table.attn_stats_blocks),
            )
            for table in manifest.tables
        ]
    )


def _numbers(pool: _Pool, table: str) -> Ref:
    spans = scan_table(table)[0].switched_on()
    numbers = sorted({number for first, last in spans for number in range(first, last + 1)})
    return pool.records([struct.pack("<I", number) for number in numbers])

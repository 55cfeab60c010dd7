"""Reading the bundles inside a shared object, without running anything of it.

The library's section `.attnres` is its payload: `launcher/payload.py` says how it is laid out. A payload holds a bundle
per arch: a manifest, and every image that it names. Standard library only: the deployment loader imports this module.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path
from typing import NamedTuple

from attnres_aot.bundle.limits import MAX_IMAGE_BYTES
from attnres_aot.bundle.manifest import LIBRARY_SUFFIX, MAX_MANIFEST_BYTES, Manifest, load_manifest
from attnres_aot.bundle.manifest_check import manifest_problems
from attnres_aot.bundle.reader import Bundle
from attnres_aot.errors import BundleError
from attnres_aot.records import record

SECTION = ".attnres"
"""Section of the library that holds the payload."""
MAGIC = b"ATTNRES\x01"
"""How a payload begins; the last byte is the number of its layout."""
MAX_BUNDLES = 16
"""Most bundles in one library."""
MAX_LIBRARY_BYTES = 512 << 20
"""Largest library that a reader accepts."""
HEADER = struct.Struct(f"<8s2I32s{MAX_BUNDLES}I")
"""Magic, number of bundles, 0, digest of what follows, offsets of the tables."""
TABLE_RECORD = struct.Struct("<5I" + 6 * "2I" + 5 * "2I")
"""hidden, major, minor, suffix, oldest driver; name, arch, rule, driver, advice, manifest; kernels, images, variants,
producers, statistics."""
IMAGE_RECORD = struct.Struct("<2I2I2I7I")
"""name, symbol, code; kernel and launch facts."""

_ELF_HEADER = struct.Struct("<4sBBBB8xHHIQQQIHHHHHH")
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
_MANIFEST_AT, _IMAGES_AT = 5 + 2 * 5, 5 + 2 * 7  # fields of TABLE_RECORD


class Ref(NamedTuple):
    """Where something lies in a payload: bytes of a text, or records."""

    offset: int
    """From the start of the payload."""
    size: int
    """Bytes, or records."""


@record(frozen=True, slots=True, kw_only=True)
class Embedded:
    """One bundle inside a payload."""

    manifest: Manifest
    """Its manifest, checked."""
    manifest_bytes: bytes
    """The manifest file."""
    files: dict[str, bytes]
    """The image files, by name, as they lie there."""


def is_library(path: Path) -> bool:
    """Tells whether a path is that of a shared object, by its name."""
    return path.name.endswith(LIBRARY_SUFFIX)


def read_library(path: str | os.PathLike[str]) -> tuple[Bundle, ...]:
    """Reads the bundles inside a shared object and checks every image by size and digest.

    Raises:
      BundleError: no such file, no shared object of attnres-aot, or one that is damaged.
    """
    place = Path(path)
    return tuple(
        _bundle(place, embedded) for embedded in read_payload(payload_of(read_file(place), str(place)), str(place))
    )


def read_file(path: Path) -> bytes:
    """Reads the file of a library.

    Raises:
      BundleError: it is missing, unreadable, no plain file or too large.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not path.is_file() or size > MAX_LIBRARY_BYTES:
                raise BundleError(f"{path}: not a plain file of at most {MAX_LIBRARY_BYTES} bytes")
            return file.read()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise BundleError(
            f"no library at {str(path)!r}: {why}; build one with `attnres-aot build --arch ARCH --format so`"
        ) from error


def payload_of(data: bytes, where: str) -> bytes:
    """Returns the payload of a library's bytes.

    Raises:
      BundleError: no 64-bit little-endian ELF file, or one without a payload.
    """
    try:
        payload = _section(data)
    except (struct.error, IndexError, ValueError) as error:
        raise BundleError(f"{where}: not a shared object that attnres-aot built: {error}") from error
    if payload is None or len(payload) < HEADER.size or payload[: len(MAGIC)] != MAGIC:
        raise BundleError(f"{where}: a shared object, but attnres-aot of this release did not build it")
    return payload


def read_payload(payload: bytes, where: str) -> tuple[Embedded, ...]:
    """Returns the bundles of a payload.

    Raises:
      BundleError: it is damaged.
    """
    _, count, _, digest, *tables = HEADER.unpack_from(payload)
    found = hashlib.sha256(memoryview(payload)[HEADER.size :]).hexdigest()[: len(digest)].encode("ascii")
    if found != digest or not 1 <= count <= MAX_BUNDLES:
        raise BundleError(f"{where}: changed after it was built; build or copy the library again")
    try:
        return tuple(_embedded(payload, at, where) for at in tables[:count])
    except (struct.error, IndexError, OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{where}: damaged: {error}; build or copy the library again") from error


def _section(data: bytes) -> bytes | None:
    magic, bits, order, *_, sections_at, _flags, _, _, _, entry_size, count, names = _ELF_HEADER.unpack_from(data)
    if magic != b"\x7fELF" or (bits, order) != (2, 1):
        raise ValueError("no 64-bit little-endian ELF file")
    if entry_size != _SECTION_HEADER.size:
        raise ValueError("section headers of an unknown size")
    headers = [_SECTION_HEADER.unpack_from(data, sections_at + number * entry_size) for number in range(count)]
    names_at = headers[names][4]
    for header in headers:
        start = names_at + header[0]
        if data[start : data.index(b"\0", start)] == SECTION.encode("ascii"):
            section = data[header[4] : header[4] + header[5]]
            return section if len(section) == header[5] else None
    return None


def _embedded(payload: bytes, at: int, where: str) -> Embedded:
    table = TABLE_RECORD.unpack_from(payload, at)
    data = _unpacked(_slice(payload, Ref(*table[_MANIFEST_AT : _MANIFEST_AT + 2]), MAX_MANIFEST_BYTES))
    manifest = load_manifest(data, where)
    if problems := manifest_problems(manifest):
        raise BundleError(f"{where}: the manifest contradicts itself; build it again: {problems[0]}")
    images = Ref(*table[_IMAGES_AT : _IMAGES_AT + 2])
    if images.size != len(manifest.images):
        raise BundleError(f"{where}: holds {images.size} images, but its manifest names {len(manifest.images)}")
    files = {}
    for number, image in enumerate(manifest.images):
        fields = IMAGE_RECORD.unpack_from(payload, images.offset + number * IMAGE_RECORD.size)
        files[image.file] = _slice(payload, Ref(*fields[4:6]), MAX_IMAGE_BYTES)
    return Embedded(manifest=manifest, manifest_bytes=data, files=files)


def _unpacked(data: bytes) -> bytes:
    """Returns a compressed manifest, of bounded size."""
    import bz2  # only libraries need it

    decompressor = bz2.BZ2Decompressor()
    unpacked = decompressor.decompress(data, MAX_MANIFEST_BYTES + 1)
    if not decompressor.eof or len(unpacked) > MAX_MANIFEST_BYTES:
        raise IndexError(f"the manifest is larger than {MAX_MANIFEST_BYTES} bytes, or cut off")
    return unpacked


def _slice(payload: bytes, ref: Ref, most: int) -> bytes:
    data = payload[ref.offset : ref.offset + ref.size]
    if len(data) != ref.size or ref.size > most:
        raise IndexError(f"{ref.size} bytes at {ref.offset} do not lie in it")
    return data


def _bundle(path: Path, embedded: Embedded) -> Bundle:
    files, damage = {}, {}
    for image in embedded.manifest.images:
        data = embedded.files[image.file]
        if len(data) == image.size and hashlib.sha256(data).hexdigest() == image.sha256:
            files[image.file] = data
        else:
            damage[image.file] = (
                f"{path}: image {image.file} is not the one that the manifest describes; the library is damaged: copy "
                "or build it again"
            )
    return Bundle(
        path=path,
        manifest=embedded.manifest,
        manifest_sha256=hashlib.sha256(embedded.manifest_bytes).hexdigest(),
        files=files,
        damage=damage,
    )

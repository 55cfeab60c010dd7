"""Whether a bundle's libraries are what its manifest says, and hold the bundle's own images, byte for byte."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace

from attnres_aot.bundle.folder import Folder
from attnres_aot.bundle.manifest import LibraryRecord, Manifest, dump_manifest
from attnres_aot.bundle.reader import image_bytes
from attnres_aot.bundle.shared_object import MAX_LIBRARY_BYTES, payload_of, read_payload
from attnres_aot.errors import BundleError
from attnres_aot.launcher.elf import facts_problems, read_facts, record_problems
from attnres_aot.launcher.libraries import payload_for


def libraries_problems(folder: Folder, manifest: Manifest) -> Iterator[str]:
    """Yields what is wrong with libraries: the files, what they say of themselves as ELF files, what they embed.

    Args:
      folder: the bundle's folder.
      manifest: the bundle's manifest, in which `manifest_problems` finds nothing.
    """
    for record in manifest.libraries:
        yield from (f"library {record.file!r:.140}: {problem}" for problem in _problems(folder, record, manifest))


def _problems(folder: Folder, record: LibraryRecord, manifest: Manifest) -> Iterator[str]:
    try:
        data = folder.read(record.file, MAX_LIBRARY_BYTES)
        facts, payload = read_facts(data), payload_of(data, record.file)
    except BundleError as error:
        yield str(error)
        return
    if len(data) != record.size:
        yield f"{len(data)} bytes, but the manifest says {record.size}"
    elif (digest := hashlib.sha256(data).hexdigest()) != record.sha256:
        yield f"sha256 is {digest}, but the manifest says {record.sha256}"
    yield from facts_problems(facts, record.host, record.file)
    yield from record_problems(facts, record)
    yield from _content_problems(folder, payload, manifest, record.file)


def _content_problems(folder: Folder, payload: bytes, manifest: Manifest, name: str) -> Iterator[str]:
    bare = replace(manifest, libraries=())
    try:
        bundles = read_payload(payload, name)
        files = {image.file: image_bytes(folder, image) for image in manifest.images}
    except BundleError as error:
        yield str(error)
        return
    if len(bundles) != 1 or bundles[0].manifest_bytes != dump_manifest(bare):
        yield "it embeds another manifest than the bundle's without libraries"
    elif bundles[0].files != files:
        changed = sorted(file for file, data in files.items() if bundles[0].files[file] != data)
        yield f"it embeds other images than the bundle's: {', '.join(changed[:5])}"
    elif payload != payload_for([(bare, files)]):
        yield "its table is not what this release makes of the manifest: it was changed, or another release built it"

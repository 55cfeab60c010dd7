"""Whether a bundle's libraries are what its manifest says, and hold the bundle's own images, byte for byte."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from attnres_aot.bundle.folder import Folder
from attnres_aot.bundle.manifest import MANIFEST_NAME, LibraryRecord, Manifest, dump_manifest
from attnres_aot.bundle.reader import image_bytes
from attnres_aot.bundle.shared_object import MAX_LIBRARY_BYTES, Embedded, payload_of, read_payload
from attnres_aot.errors import BundleError
from attnres_aot.launcher.compilers import HOSTS
from attnres_aot.launcher.elf import facts_problems, read_facts, record_problems
from attnres_aot.launcher.libraries import payload_for

TABLE_CHANGED = "its table is not what this release makes of the manifest: it was changed, or another release built it"
"""A problem of a library whose launcher would be told something else than the manifest says."""


class EmbeddedFolder(Folder):
    """A bundle inside a library, as the folder that it was made of."""

    __slots__ = ("_files",)

    def __init__(self, path: Path, embedded: Embedded) -> None:
        self.path = path
        self._files = {MANIFEST_NAME: embedded.manifest_bytes, **embedded.files}

    def names(self) -> list[str]:
        """Lists the files."""
        return sorted(self._files)

    def read(self, name: str, max_bytes: int) -> bytes:
        """Returns a file, of which reading the library has bounded the size."""
        del max_bytes
        return self._files[name]


def file_problems(data: bytes, bundles: Sequence[Embedded]) -> Iterator[str]:
    """Yields what is wrong with a library whatever manifest lists it: as an ELF file, and its tables.

    Args:
      data: the file, which holds a payload.
      bundles: what is inside.
    """
    facts = read_facts(data)
    host = next((host.name for host in HOSTS.values() if host.machine == facts.machine), facts.machine)
    yield from facts_problems(facts, host, facts.soname)
    if payload_of(data, facts.soname) != payload_for([(each.manifest, each.files) for each in bundles]):
        yield TABLE_CHANGED


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
        yield TABLE_CHANGED

"""The manifest of a bundle: its records, and reading and writing them as canonical JSON.

The manifest is the loader's only source of file names, symbols, launch facts and parameter layouts. It holds no
time, path or host name, so equal inputs give equal bytes. The file carries a digest of its own bytes: whoever changes
one of them by accident or without thought is noticed. `docs/bundle_format.md` describes the format.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from typing import Any

from attnres_aot.bundle.decoding import decode
from attnres_aot.errors import BundleError, clip
from attnres_aot.records import record
from attnres_aot.spec.params import Param

SCHEMA = 3
"""Number of the manifest format that this package reads and writes."""
MANIFEST_NAME = "manifest.json"
"""File name of the manifest in a bundle folder."""
IMAGE_SUFFIX = ".cubin"
"""What follows an image's name in the name of its file."""
LIBRARY_SUFFIX = ".so"
"""How the file name of a shared object ends."""
MAX_MANIFEST_BYTES = 8 << 20
"""Largest manifest that a reader accepts; Kimi K3's has 0.2 MB."""
DIGEST_FIELD = "sha256"
"""The field of the file, beside those of `Manifest`, that holds the digest of the file."""

_BLANK = b"0" * 64
_DIGEST_START = f'\n "{DIGEST_FIELD}": "'.encode("ascii")  # by its indentation a field of the outermost object
_MAX_PARTS = 500_000  # lists, objects and fields; what json.loads makes of this many fits 200 MB
_MAX_DIGITS = 18
_ALPHABET = bytes(set(range(0x20, 0x7F)) - {ord("\\")}) + b"\n"
_SHOW_DIGITS = bytes(b"0"[0] if byte in b"0123456789" else b"."[0] for byte in range(256))
_MAX_MESSAGE = 2000


@record(frozen=True, slots=True, kw_only=True)
class ArchRecord:
    """Which GPU architecture the bundle's code is for."""

    requested: str
    """The arch that the build was asked for, e.g. `sm_100`."""
    proven: str
    """The arch that the binaries themselves name."""


@record(frozen=True, slots=True, kw_only=True)
class SelectionRecord:
    """The part of a configuration that a bundle holds; each empty field leaves that aspect whole."""

    tp: tuple[int, ...]
    """Tensor-parallel sizes."""
    dcp: tuple[int, ...]
    """Decode-context-parallel sizes."""
    only: tuple[str, ...]
    """Patterns of variant and producer names."""


@record(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """Geometry of the model that the bundle serves."""

    hidden: int
    """Row length in elements."""
    layers: int
    """Decoder layers."""
    block_size: int
    """Layers per saved block."""
    leading_dense_layers: int
    """Layers at the start of the model without experts."""


@record(frozen=True, slots=True, kw_only=True)
class MailboxRecord:
    """Geometry of the mailboxes that the ring variants were planned for."""

    capacity: int
    """Rows per slot."""
    slots: tuple[int, ...]
    """Slot counts that ring variants exist for, ascending."""


@record(frozen=True, slots=True, kw_only=True)
class TableRecord:
    """The statistics tables of one deployment."""

    tp: int
    """Tensor-parallel size."""
    dcp: int
    """Decode-context-parallel size."""
    attn_stats: str
    """Batch table: rows -> 1 where precomputed statistics are used."""
    attn_stats_blocks: str
    """Batch table: nb -> 1 where precomputed statistics are used."""


@record(frozen=True, slots=True, kw_only=True)
class BudgetRecord:
    """What the build allowed an image to use."""

    registers: int
    """Registers per thread."""
    smem_bytes: int
    """Shared memory that the kernel declares, bytes per CTA."""


@record(frozen=True, slots=True, kw_only=True)
class ImageRecord:
    """One compiled image: a cubin with one kernel, and the facts needed to launch it."""

    name: str
    """Name within the bundle; unique."""
    kernel: str
    """Which kernel of the package this is: `consumer`, `statistics` or `publish`."""
    file: str
    """File name within the bundle folder."""
    sha256: str
    """Lower-case hex digest of the file."""
    size: int
    """Bytes of the file."""
    symbol: str
    """Kernel symbol in the cubin."""
    abi: str
    """Key into the manifest's `abis`: the parameter list."""
    cluster: int
    """CTAs per cluster, in x."""
    rows_per_cluster: int
    """Rows that one cluster handles: grid.x = cluster * ceil(rows / rows_per_cluster), grid.y = grid.z = 1."""
    block_threads: int
    """Threads per CTA, in x."""
    smem_static_bytes: int
    """Shared memory that the kernel declares, bytes per CTA."""
    smem_dynamic_bytes: int
    """Shared memory that a launch must add, bytes per CTA."""
    pdl: bool
    """The kernel may be launched with programmatic stream serialization (see the ordering contract)."""
    registers: int
    """Registers per thread."""
    stack_bytes: int
    """Stack frame, bytes per thread."""
    spill_bytes: int
    """Register spills, bytes per thread."""
    critical_instructions: int
    """Instructions that a chain of dependent launches cannot overlap: from the wait for what the kernel depends on to
    the next exit, which rare cases follow; from its start where it does not wait, or only waits at its end."""
    budget: BudgetRecord
    """What the build allowed."""
    build_key: str
    """sha256 of everything that decides the image's bytes."""


@record(frozen=True, slots=True, kw_only=True)
class Choice:
    """One image of a variant, for launches of up to `max_rows` rows."""

    image: str
    """Image name."""
    max_rows: int | None
    """Largest row count served, or None for no limit; choices are in ascending order and the last has None."""


@record(frozen=True, slots=True, kw_only=True)
class VariantRecord:
    """One variant and the images that serve it."""

    name: str
    """Variant name, as `variants.parse_variant` reads it."""
    nb: int
    """Saved blocks."""
    has_delta: bool
    """The source is added to the prefix."""
    write: int | None
    """Block that receives the updated prefix."""
    final: bool
    """End-of-model consumer."""
    slots: int
    """Mailbox slots; 0 for an ordinary source."""
    aux: bool
    """Writes the aux copy."""
    stats: bool
    """Takes precomputed statistics."""
    choices: tuple[Choice, ...]
    """Images by row count."""
    deployments: tuple[tuple[int, int], ...]
    """(tp, dcp) pairs that need the variant, ascending."""


@record(frozen=True, slots=True, kw_only=True)
class ProducerRecord:
    """One producer of what variants take, and the images that serve it."""

    name: str
    """Producer name, as `variants.parse_producer` reads it."""
    kernel: str
    """Kernel of its images: `statistics` or `publish`."""
    nb: int | None
    """Saved blocks that statistics are made of."""
    choices: tuple[Choice, ...]
    """Images by row count."""
    deployments: tuple[tuple[int, int], ...]
    """(tp, dcp) pairs that need the producer, ascending."""


@record(frozen=True, slots=True, kw_only=True)
class LibraryRecord:
    """One shared object: all images of the bundle, and what launches them, for one kind of host."""

    file: str
    """File name within the bundle folder."""
    sha256: str
    """Lower-case hex digest of the file."""
    size: int
    """Bytes of the file."""
    host: str
    """Machine that it is for, as `uname -m` calls it."""
    needed: tuple[str, ...]
    """Libraries that it needs, as they stand in it."""
    glibc: str
    """The oldest glibc that has every symbol which it takes, e.g. `2.14`."""
    exports: tuple[str, ...]
    """Names that it exports, ascending."""
    compiler: str
    """What compiled it."""
    build_key: str
    """sha256 of everything that decides its bytes."""


@record(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything that a bundle promises."""

    schema: int
    """Format number; readers refuse numbers they do not know."""
    name: str
    """Name of the configuration, e.g. `kimi_k3`."""
    arch: ArchRecord
    """Requested and proven arch."""
    config: dict[str, Any]
    """The configuration that the bundle was built from, as plain data in the form of its file."""
    selection: SelectionRecord
    """What of it was selected."""
    sources_sha256: str
    """Digest of the code that decides the images and the rest of the manifest (`builder.sources`)."""
    toolchain: dict[str, str]
    """Component -> version of everything that decides the bytes."""
    flavour: str
    """Which of the compiler's libraries made the images: `cu` and the CUDA major version of its assembler."""
    oldest_driver: str
    """The oldest CUDA version whose driver can run the images, e.g. `12.8`; a reader may need a newer one itself."""
    model: ModelRecord
    """Model geometry."""
    mailbox: MailboxRecord
    """Mailbox geometry."""
    tables: tuple[TableRecord, ...]
    """Statistics tables, ascending by (tp, dcp)."""
    abis: dict[str, tuple[Param, ...]]
    """Parameter lists by name."""
    images: tuple[ImageRecord, ...]
    """Compiled images."""
    variants: tuple[VariantRecord, ...]
    """Consumers that a caller can ask for."""
    producers: tuple[ProducerRecord, ...]
    """Producers that a caller can ask for."""
    libraries: tuple[LibraryRecord, ...] = ()
    """Shared objects of the same images, ascending by file name."""

    @property
    def files(self) -> tuple[ImageRecord | LibraryRecord, ...]:
        """Records of all files beside the manifest."""
        return (*self.images, *self.libraries)


def canonical_json(value: Any) -> str:
    """Serialises plain JSON data with sorted keys and no spaces: the form that digests are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def to_json(record: Any) -> Any:
    """Turns a record (dataclass, dict, tuple or scalar) into plain JSON data."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {field.name: to_json(getattr(record, field.name)) for field in dataclasses.fields(record)}
    if isinstance(record, dict):
        return {key: to_json(value) for key, value in record.items()}
    if isinstance(record, tuple):
        return [to_json(value) for value in record]
    return record


def dump_manifest(manifest: Manifest) -> bytes:
    """Serialises a manifest as it stands in its file: canonical JSON, with the digest of these bytes."""
    return seal(to_json(manifest))


def seal(raw: dict[str, Any]) -> bytes:
    """Serialises plain data as a manifest file: keys sorted, indented by one, a final newline, and its digest."""
    text = json.dumps({**raw, DIGEST_FIELD: _BLANK.decode("ascii")}, indent=1, sort_keys=True, ensure_ascii=True) + "\n"
    data = text.encode("ascii")
    start = data.index(_DIGEST_START) + len(_DIGEST_START)
    return data[:start] + _digest(data, start) + data[start + len(_BLANK) :]


def _digest(data: bytes, start: int) -> bytes:
    """Returns the digest of a manifest file with its 64 characters from `start`, the digest's own, taken as zeros."""
    digest = hashlib.sha256(memoryview(data)[:start])
    digest.update(_BLANK)
    digest.update(memoryview(data)[start + len(_BLANK) :])
    return digest.hexdigest().encode("ascii")


def digest_problem(data: bytes) -> str | None:
    """Says that a manifest file is not, to the last byte, as it was written, or None where it is."""
    start = data.find(_DIGEST_START) + len(_DIGEST_START)
    if start < len(_DIGEST_START) or data.find(_DIGEST_START, start) >= 0:
        return "it does not hold its own digest once, in the place where the build writes it"
    found, said = _digest(data, start), data[start : start + len(_BLANK)]
    if found != said:
        return f"its digest is {found.decode()}, but it says {said.decode('ascii', 'replace')}"
    return None


def load_manifest(data: bytes, where: str) -> Manifest:
    """Parses a manifest file; `where` names it in errors.

    Raises:
      BundleError: not JSON, an unknown schema number, not the bytes that were written, or a missing, unknown or
        ill-typed field.
    """
    raw = parse_manifest(data, where)
    check_digest(data, where)
    return decode_manifest(raw, where)


def check_digest(data: bytes, where: str) -> None:
    """Checks that a manifest file is as it was written.

    Raises:
      BundleError: it is not.
    """
    if (problem := digest_problem(data)) is not None:
        raise BundleError(f"{where}: changed after it was built: {problem}; build or copy the bundle again")


def parse_manifest(data: bytes, where: str) -> dict[str, Any]:
    """Parses a manifest file as plain data, in time and memory that its size bounds.

    Raises:
      BundleError: not JSON of plain ASCII without escapes, out of bounds, or of an unknown schema number.
    """
    try:
        raw = _parse_json(data)
    except RecursionError as error:
        raise BundleError(f"{where}: not a manifest: nested too deeply") from error
    except ValueError as error:
        raise BundleError(f"{where}: not a manifest: {clip(str(error), _MAX_MESSAGE)}") from error
    if not isinstance(raw, dict):
        raise BundleError(f"{where}: not a manifest: expected an object, found {type(raw).__name__}")
    schema = raw.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        raise BundleError(
            f"{where}: manifest schema {schema!r:.80}, but this attnres-aot reads schema {SCHEMA}; "
            "rebuild the bundle, or install the attnres-aot release that built it"
        )
    return raw


def decode_manifest(raw: dict[str, Any], where: str) -> Manifest:
    """Reads the records out of a manifest's plain data.

    Raises:
      BundleError: a missing, unknown or ill-typed field.
    """
    fields = {name: value for name, value in raw.items() if name != DIGEST_FIELD}
    try:
        return decode(Manifest, fields, where)
    except BundleError as error:
        raise BundleError(clip(str(error), _MAX_MESSAGE)) from error


def _parse_json(data: bytes) -> Any:
    if len(data) > MAX_MANIFEST_BYTES:
        raise ValueError(f"{len(data)} bytes; at most {MAX_MANIFEST_BYTES} are allowed")
    if foreign := data.translate(None, _ALPHABET):
        raise ValueError(f"byte {foreign[0]:#04x} at {data.index(foreign[0])}; it is plain ASCII without escapes")
    parts = data.count(b"[") + data.count(b"{") + data.count(b":")
    if parts > _MAX_PARTS:
        raise ValueError(f"{parts} lists, objects and fields; at most {_MAX_PARTS} are allowed")
    # A digest may hold such a row of digits, too, so this says only when to look; json.loads is faster without a hook.
    long_numbers = b"0" * (_MAX_DIGITS + 1) in data.translate(_SHOW_DIGITS)
    return json.loads(data, object_pairs_hook=_no_duplicates, parse_int=_short_int if long_numbers else None)


def _short_int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits; at most {_MAX_DIGITS} are allowed")
    return int(digits)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"key {name!r:.80} occurs twice in one object")
    return result

"""The manifest of a bundle: its records, and reading and writing them as canonical JSON.

The manifest is the loader's only source of file names, symbols, launch facts and parameter layouts. It holds no
time, path or host name, so equal inputs give equal bytes. `docs/bundle_format.md` describes the format.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from attnres_aot.abi import Param
from attnres_aot.errors import BundleError
from attnres_aot.records import dataclass

SCHEMA = 1
"""Number of the manifest format that this package reads and writes."""
MANIFEST_NAME = "manifest.json"
"""File name of the manifest in a bundle folder."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchRecord:
    """Which GPU architecture the bundle's code is for."""

    requested: str
    """The arch that the build was asked for, e.g. `sm_100`."""
    proven: str
    """The arch that the binaries themselves name."""


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class MailboxRecord:
    """Geometry of the mailboxes that the ring variants were planned for."""

    capacity: int
    """Rows per slot."""
    slots: tuple[int, ...]
    """Slot counts that ring variants exist for, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
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
    build_key: str
    """sha256 of everything that decides the image's bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One image of a variant, for launches of up to `max_rows` rows."""

    image: str
    """Image name."""
    max_rows: int | None
    """Largest row count served, or None for no limit; choices are in ascending order and the last has None."""


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything that a bundle promises."""

    schema: int
    """Format number; readers refuse numbers they do not know."""
    name: str
    """Name of the configuration, e.g. `kimi_k3`."""
    arch: ArchRecord
    """Requested and proven arch."""
    config_sha256: str
    """Digest of the parsed configuration."""
    sources_sha256: str
    """Digest of the kernel and compiler sources."""
    toolchain: dict[str, str]
    """Component -> version of everything that decides the bytes."""
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
    """Serialises a manifest as indented JSON with a final newline."""
    return (json.dumps(to_json(manifest), indent=1, sort_keys=True, ensure_ascii=True) + "\n").encode("ascii")


def load_manifest(data: bytes, where: str) -> Manifest:
    """Parses a manifest; `where` names it in errors.

    Raises:
      BundleError: not JSON, an unknown schema number, or a missing, unknown or ill-typed field.
    """
    try:
        raw = json.loads(data, object_pairs_hook=_no_duplicates)
    except ValueError as error:
        raise BundleError(f"{where}: not a manifest: {error}") from error
    except RecursionError as error:
        raise BundleError(f"{where}: not a manifest: nested too deeply") from error
    if not isinstance(raw, dict):
        raise BundleError(f"{where}: not a manifest: expected an object, found {type(raw).__name__}")
    schema = raw.get("schema")
    if schema != SCHEMA or isinstance(schema, bool):
        raise BundleError(
            f"{where}: manifest schema {schema!r}, but this attnres-aot reads schema {SCHEMA}; "
            "rebuild the bundle, or install the attnres-aot release that built it"
        )
    return _decode(Manifest, raw, where)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(n for n in names if names.count(n) > 1)!r} occurs twice in one object")
    return result


_Reader = Callable[[Any, str, str], Any]
"""Turns JSON data (value, where, field name) into a value of one type, or raises BundleError."""


def _decode(cls: type[_T], raw: dict[str, Any], where: str) -> _T:
    scalars, others = _fields(typing.cast("typing.Hashable", cls))
    if len(raw) != len(scalars) + len(others) or not (raw.keys() >= scalars.keys() and raw.keys() >= others.keys()):
        known = scalars.keys() | others.keys()
        missing, unknown = sorted(known - raw.keys()), sorted(raw.keys() - known)
        raise BundleError(
            f"{where}: manifest fields missing: {missing or 'none'}, unknown: {unknown or 'none'}; it was edited, or "
            "written by another version: rebuild it with 'attnres-aot build'"
        )
    for name, kind in scalars.items():
        if type(raw[name]) is not kind:
            raise _mistyped(kind, raw[name], where, name)
    values = dict(raw)
    for name, read in others.items():
        values[name] = read(raw[name], where, name)
    return cls(**values)


@functools.cache
def _fields(cls: Any) -> tuple[dict[str, type], dict[str, _Reader]]:
    """Returns the types of a record's scalar fields, and readers for its others."""
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    scalars = {name: hints[name] for name in names if hints[name] in (str, int, bool)}
    return scalars, {name: _reader(hints[name]) for name in names if name not in scalars}


def _reader(hint: Any) -> _Reader:
    """Makes the reader of a type; making it once keeps introspection out of the thousands of values of a manifest."""
    if hint in (str, int, bool):
        return functools.partial(_read_scalar, hint)
    if dataclasses.is_dataclass(hint):
        return functools.partial(_read_record, hint)
    if isinstance(hint, types.UnionType):
        inner = _reader(typing.get_args(hint)[0])
        return lambda value, where, name: None if value is None else inner(value, where, name)
    args = typing.get_args(hint)
    if typing.get_origin(hint) is dict:
        return functools.partial(_read_dict, hint, _reader(args[1]))
    if args[-1] is Ellipsis:
        return functools.partial(_read_list, hint, _reader(args[0]))
    return functools.partial(_read_tuple, hint, tuple(_reader(arg) for arg in args))


def _read_scalar(hint: type, value: Any, where: str, name: str) -> Any:
    if type(value) is not hint:
        raise _mistyped(hint, value, where, name)
    return value


def _read_record(hint: Any, value: Any, where: str, name: str) -> Any:
    if not isinstance(value, dict):
        raise _mistyped(hint, value, where, name)
    return _decode(hint, value, f"{where}: {name}")


def _read_dict(hint: Any, read: _Reader, value: Any, where: str, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _mistyped(hint, value, where, name)
    return {key: read(item, where, f"{name}.{key}") for key, item in value.items()}


def _read_list(hint: Any, read: _Reader, value: Any, where: str, name: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _mistyped(hint, value, where, name)
    try:
        return tuple([read(item, where, name) for item in value])
    except BundleError:  # read again to say which: naming every item of a good list costs more than reading it
        return tuple([read(item, where, f"{name}[{i}]") for i, item in enumerate(value)])


def _read_tuple(hint: Any, readers: tuple[_Reader, ...], value: Any, where: str, name: str) -> tuple[Any, ...]:
    if not isinstance(value, list) or len(value) != len(readers):
        raise _mistyped(hint, value, where, name)
    return tuple([read(item, where, name) for read, item in zip(readers, value, strict=True)])


def _mistyped(hint: Any, value: Any, where: str, name: str) -> BundleError:
    wanted = hint.__name__ if isinstance(hint, type) else str(hint)
    return BundleError(f"{where}: manifest field {name!r}: expected {wanted}, found {value!r:.80}")

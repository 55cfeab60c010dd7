"""Reads records out of plain JSON data, strictly, by the types of their fields.

Exactly the fields of a record must be there, each of exactly its type. A manifest has thousands of values, so how a
type is read is worked out once, and the names of items are only made up for an error.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from attnres_aot.errors import BundleError, clip
from attnres_aot.records import maker, record

_T = TypeVar("_T")

_SCALARS: dict[Any, type] = {"str": str, "int": int, "bool": bool}
"""Scalar types by the annotation that names them."""
_Reader = Callable[[Any, str, str], Any]
"""Turns JSON data (value, where, field name) into a value of one type, or raises BundleError."""


@record(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class _Layout:
    """How a record is read."""

    names: tuple[str, ...]
    """Its fields: first those of scalar types, then the others."""
    scalars: tuple[type, ...]
    """Types of the scalar fields."""
    readers: tuple[tuple[str, _Reader], ...]
    """Names and readers of the others."""
    pick: Callable[[dict[str, Any]], tuple[Any, ...]]
    """Takes the values of the scalar fields out of JSON data."""
    make: Callable[[Iterable[Any]], Any]
    """Makes a record of the values of `names`."""


def decode(cls: type[_T], raw: dict[str, Any], where: str) -> _T:
    """Returns the record of class `cls` that JSON data describes; `where` names the data in errors.

    Fields may be scalars, None or a scalar, records, tuples, and dictionaries from str, all of them nested; what is
    stated as Any is taken as it is.

    Raises:
      BundleError: a field is missing, unknown or of another type.
    """
    record: _T = _decode(cls, raw, where)
    return record


def _decode(cls: Any, raw: dict[str, Any], where: str) -> Any:
    layout = _layout(cls)
    try:
        values = layout.pick(raw)
        others = [read(raw[name], where, name) for name, read in layout.readers]
    except KeyError:
        raise _misnamed(layout, raw, where) from None
    if len(raw) != len(layout.names):
        raise _misnamed(layout, raw, where)
    if tuple(map(type, values)) != layout.scalars:
        for name, kind, value in zip(layout.names, layout.scalars, values, strict=False):
            _read_scalar(kind, value, where, name)
    return layout.make((*values, *others))


def _misnamed(layout: _Layout, raw: dict[str, Any], where: str) -> BundleError:
    missing = sorted(set(layout.names) - raw.keys()) or "none"
    unknown = clip(str(sorted(raw.keys() - set(layout.names)) or "none"), 400)
    return BundleError(
        f"{where}: manifest fields missing: {missing}, unknown: {unknown}; it was edited, or "
        "written by another version: build it again with `attnres-aot build --arch ARCH`"
    )


@functools.cache
def _layout(cls: Any) -> _Layout:
    """Works out once how a record is read."""
    stated = {field.name: field.type for field in dataclasses.fields(cls)}
    scalars = {name: _SCALARS[kind] for name, kind in stated.items() if kind in _SCALARS}
    others = types.SimpleNamespace(__annotations__={n: kind for n, kind in stated.items() if n not in scalars})
    hints = typing.get_type_hints(others, vars(sys.modules[cls.__module__]))  # compiles each: scalars spared that
    pick = operator.itemgetter(*scalars) if scalars else lambda _: ()
    return _Layout(
        names=(*scalars, *hints),
        scalars=tuple(scalars.values()),
        readers=tuple([(name, _reader(hint)) for name, hint in hints.items()]),
        pick=pick if len(scalars) != 1 else lambda raw: (pick(raw),),
        make=maker(cls, (*scalars, *hints)),
    )


def _reader(hint: Any) -> _Reader:
    """Makes the reader of a type; making it once keeps introspection out of the thousands of values of a manifest."""
    if hint in (str, int, bool):
        return functools.partial(_read_scalar, hint)
    if hint is Any:
        return lambda value, *_: value
    if dataclasses.is_dataclass(hint):
        return functools.partial(_read_record, hint)
    if isinstance(hint, types.UnionType):
        inner = _reader(typing.get_args(hint)[0])
        return lambda value, where, name: None if value is None else inner(value, where, name)
    args = typing.get_args(hint)
    if typing.get_origin(hint) is dict:
        return functools.partial(_read_dict, hint, _reader(args[1]))
    if args[-1] is Ellipsis and typing.get_origin(args[0]) is tuple:
        return functools.partial(_read_rows, hint, typing.get_args(args[0]), _reader(args[0]))
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


def _read_rows(
    hint: Any, kinds: tuple[type, ...], read: _Reader, value: Any, where: str, name: str
) -> tuple[tuple[Any, ...], ...]:
    """Reads a list of tuples of scalars."""
    if type(value) is list and _all_of(kinds, value):
        return tuple([tuple(row) for row in value])
    return _read_list(hint, read, value, where, name)


def _all_of(kinds: tuple[type, ...], rows: list[Any]) -> bool:
    for row in rows:  # noqa: SIM110 - a generator costs more
        if type(row) is not list or tuple(map(type, row)) != kinds:
            return False
    return True


def _read_tuple(hint: Any, readers: tuple[_Reader, ...], value: Any, where: str, name: str) -> tuple[Any, ...]:
    if not isinstance(value, list) or len(value) != len(readers):
        raise _mistyped(hint, value, where, name)
    return tuple([read(item, where, name) for read, item in zip(readers, value, strict=True)])


def _mistyped(hint: Any, value: Any, where: str, name: str) -> BundleError:
    wanted = hint.__name__ if isinstance(hint, type) else str(hint)
    return BundleError(f"{where}: manifest field {name!r:.200}: expected {wanted}, found {value!r:.80}")

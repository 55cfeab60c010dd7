"""What differs between two manifests, field by field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_NOTHING = object()


def differences(found: Any, expected: Any, path: str = "") -> Iterator[str]:
    """Yields a line for every part of `found` that is not as in `expected`; both are plain JSON data."""
    if isinstance(found, dict) and isinstance(expected, dict):
        yield from _parts(found, expected, path)
    elif _has_records(found) and _has_records(expected):
        ours, theirs = _by_key(found), _by_key(expected)
        yield from _parts(ours, theirs, path)
        if ours.keys() == theirs.keys() and list(ours) != list(theirs):
            yield f"{path}: not in the order in which they are built"
    elif type(found) is not type(expected) or found != expected:
        yield f"{path}: the manifest says {_shown(found)}; built again it would say {_shown(expected)}"


def _parts(found: dict[str, Any], expected: dict[str, Any], path: str) -> Iterator[str]:
    for name in dict.fromkeys((*found, *expected)):
        where = f"{path}.{name}" if path else str(name)
        ours, theirs = found.get(name, _NOTHING), expected.get(name, _NOTHING)
        if theirs is _NOTHING:
            yield f"{where}: the manifest has it; built again it would not"
        elif ours is _NOTHING:
            yield f"{where}: not in the manifest; built again it would be"
        else:
            yield from differences(ours, theirs, where)


def _has_records(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) and _key(item) for item in value)


def _by_key(records: list[dict[str, Any]]) -> dict[str, Any]:
    return {_key(record): record for record in records}


def _key(record: dict[str, Any]) -> str:
    """Returns what tells a record from the others of its list; empty where nothing does."""
    if "name" in record:
        return str(record["name"])
    return " ".join(f"{name} {record[name]}" for name in ("tp", "dcp") if name in record)


def _shown(value: Any) -> str:
    return f"{value!r:.160}"

"""A configuration as a tree of nodes that know their lines: what YAML text and plain data are both turned into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 16
"""Deepest nesting that is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """A single value, uninterpreted."""

    line: int
    """Line of the file, from 1."""
    text: str
    """The text, without quotes."""
    plain: bool
    """Written without quotes."""
    refused: bool = False
    """Stands for something already reported (an alias); readers skip it silently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """A list."""

    line: int
    """Line of its start, from 1."""
    items: tuple[Node, ...]
    """Its items."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapping:
    """A mapping, with duplicate keys kept."""

    line: int
    """Line of its start, from 1."""
    entries: tuple[tuple[Node, Node], ...]
    """Its (key, value) pairs in file order."""


Node = Scalar | Sequence | Mapping


def plain_tree(value: Any, depth: int = 0) -> Node:
    """Turns plain data, as JSON has it, into a tree, all of it on line 1; deeper than MAX_DEPTH there is nothing."""
    if isinstance(value, (dict, list)) and depth < MAX_DEPTH:
        if isinstance(value, list):
            return Sequence(line=1, items=tuple(plain_tree(item, depth + 1) for item in value))
        entries = ((Scalar(line=1, text=key, plain=True), plain_tree(item, depth + 1)) for key, item in value.items())
        return Mapping(line=1, entries=tuple(entries))
    if isinstance(value, str):
        return Scalar(line=1, text=value, plain=False)
    text = str(value).lower() if isinstance(value, (bool, int, float)) else "null"
    return Scalar(line=1, text=text, plain=True)

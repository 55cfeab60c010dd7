"""YAML text to a tree of nodes that know their lines, with everything refused that a configuration has no use for.

Only the parser's events are used: no value is interpreted and no tag constructed. Aliases, anchors, tags, several
documents and deep nesting are refused as they appear, so no input makes this work long or much.
"""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from attnres_aot.config.problems import Problems
from attnres_aot.config.source import MAX_BYTES, START_FROM
from attnres_aot.config.tree import MAX_DEPTH, Mapping, Node, Scalar, Sequence

MAX_NODES = 5000
"""Most values, lists and mappings that are read: the parser takes about 20 microseconds for each."""


def read_tree(data: bytes, problems: Problems) -> Node | None:
    """Parses YAML; returns the document's root, or None when there is none that can be read on.

    What is refused is added to `problems`.
    """
    text = _decode(data, problems)
    if text is None or _has_tabs(text, problems):
        return None
    loader = yaml.SafeLoader("")
    try:
        loader = yaml.SafeLoader(text)
        root = _Composer(loader, problems).compose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        about = ", ".join(filter(None, (error.context, error.problem)))
        problems.add(mark.line + 1 if mark else 1, "", f"not YAML: {about}; mend the syntax here or just above")
        return None
    except yaml.YAMLError as error:
        position = getattr(error, "position", 0)
        line = text.count("\n", 0, position) + 1
        problems.add(line, "", f"not YAML: {getattr(error, 'reason', error)}; remove the character")
        return None
    except (ValueError, OverflowError):  # the parser converts escapes and version numbers unchecked
        text = "not YAML: a character escape or version number beyond all limits; write the character itself"
        problems.add(loader.line + 1, "", text)
        return None
    if root is None and not problems:
        problems.add(1, "", f"the file is empty; {START_FROM}")
    return root


def _decode(data: bytes, problems: Problems) -> str | None:
    if len(data) > MAX_BYTES:
        problems.add(1, "", f"the file is larger than {MAX_BYTES} bytes, the most that a configuration may have")
        return None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problems.add(line, "", f"not UTF-8: byte {data[error.start]:#04x} at offset {error.start}; save it as UTF-8")
        return None


def _has_tabs(text: str, problems: Problems) -> bool:
    lines = [
        number
        for number, line in enumerate(text.split("\n"), 1)
        if "\t" in line[: len(line) - len(line.lstrip(" \t"))] and line.strip()
    ]
    for number in lines:
        problems.add(number, "", "a tab in the indentation; YAML allows only spaces there, replace it")
    return bool(lines)


class _TooMuchError(Exception):
    """Unwinds the composer."""


class _Composer:
    """Builds nodes from the parser's events."""

    def __init__(self, loader: yaml.SafeLoader, problems: Problems) -> None:
        self._events = _events(loader)
        self._nodes = 0
        self._problems = problems

    def compose(self) -> Node | None:
        root: Node | None = None
        documents = 0
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    text = "a second document starts; one file holds one configuration"
                    self._problems.add(_line(event), "", text)
                    return root
                try:
                    root = self._node(next(self._events), 0)
                except _TooMuchError:
                    return None
        return root

    def _node(self, event: yaml.Event, depth: int) -> Node:
        line = _line(event)
        if isinstance(event, yaml.AliasEvent):
            self._problems.add(line, "", f"alias *{event.anchor}: aliases are not allowed; write the value out")
            return Scalar(line=line, text="", plain=True, refused=True)
        self._nodes += 1
        if depth > MAX_DEPTH:
            self._problems.add(line, "", f"nested more than {MAX_DEPTH} deep; a configuration is at most 3 deep")
            raise _TooMuchError
        if self._nodes > MAX_NODES:
            self._problems.add(line, "", f"more than {MAX_NODES} values; a configuration has some hundreds at most")
            raise _TooMuchError
        if isinstance(event, yaml.NodeEvent) and event.anchor is not None:
            self._problems.add(line, "", f"anchor &{event.anchor}: anchors are not allowed; remove it")
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag is not None:
            self._problems.add(line, "", f"tag {event.tag!r}: tags are not allowed; remove it")
        if isinstance(event, yaml.ScalarEvent):
            return Scalar(line=line, text=event.value, plain=event.style is None)
        children = self._children(depth)
        if isinstance(event, yaml.SequenceStartEvent):
            return Sequence(line=line, items=tuple(children))
        return Mapping(line=line, entries=tuple(zip(children[::2], children[1::2], strict=True)))

    def _children(self, depth: int) -> list[Node]:
        children = []
        for event in self._events:
            if isinstance(event, yaml.CollectionEndEvent):
                break
            children.append(self._node(event, depth + 1))
        return children


def _events(loader: yaml.SafeLoader) -> Iterator[yaml.Event]:
    """Yields the parser's events as it finds them."""
    while loader.check_event():
        yield loader.get_event()  # type: ignore[no-untyped-call]


def _line(event: yaml.Event) -> int:
    """Returns the line of an event, from 1."""
    return event.start_mark.line + 1 if event.start_mark else 1

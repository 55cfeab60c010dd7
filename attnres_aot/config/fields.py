"""Typed reading of the fields of one YAML mapping: presence, spelling, type and range, with each mistake reported."""

from __future__ import annotations

import re
from collections.abc import Sequence as Names

from attnres_aot.config.problems import Problems
from attnres_aot.config.tree import Mapping, Node, Scalar, Sequence
from attnres_aot.errors import did_you_mean
from attnres_aot.spec.tables import EMPTY, BatchTable, Span, overlaps, scan_table

_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")
_NULLS = ("", "~", "null", "Null", "NULL")


class Fields:
    """The fields of one mapping.

    A reader method returns None (or the default) for a field that is missing or wrong, after reporting it.
    """

    def __init__(self, node: Mapping, path: str, allowed: Names[str], problems: Problems) -> None:
        self.line = node.line
        self.path = path
        self._problems = problems
        self._values: dict[str, Node] = {}
        self._misspelt: set[str] = set()
        first_lines: dict[str, int] = {}
        for key, value in node.entries:
            if not isinstance(key, Scalar):
                problems.add(key.line, path, f"found {describe(key)} as a field name; allowed: {', '.join(allowed)}")
            elif key.refused:
                continue
            elif key.text not in allowed:
                hint = did_you_mean(key.text, allowed)
                self._misspelt.update(name for name in allowed if repr(name) in hint)
                text = f"unknown field{hint}; allowed: {', '.join(allowed)}"
                problems.add(key.line, self.at(f"{key.text!r:.60}"), text)
            elif key.text in first_lines:
                text = f"occurs twice, first on line {first_lines[key.text]}; remove one"
                problems.add(key.line, self.at(key.text), text)
            else:
                first_lines[key.text] = key.line
                self._values[key.text] = value

    def at(self, name: str) -> str:
        """Returns the full path of field `name`."""
        return f"{self.path}.{name}" if self.path else name

    def line_of(self, name: str) -> int:
        """Returns the line of field `name`, or of the mapping when it is absent."""
        return self._values[name].line if name in self._values else self.line

    def report(self, name: str, text: str) -> None:
        """Reports a mistake of field `name`."""
        self._problems.add(self.line_of(name), self.at(name), text)

    def integer(self, name: str, low: int, high: int, why: str = "") -> int | None:
        """Reads a required integer within `low`..`high`; `why` says where the limits come from."""
        node = self._required(name, f"an integer, {low}..{high}{why}")
        return None if node is None else read_integer(node, self.at(name), low, high, self._problems, why)

    def multiple(self, name: str, step: int, high: int) -> int | None:
        """Reads a required multiple of `step`, from `step` to `high`, which is one itself."""
        allowed = f"a multiple of {step}, {step}..{high}"
        node = self._required(name, allowed)
        if node is None:
            return None
        if not (isinstance(node, Scalar) and node.plain and _INTEGER.fullmatch(node.text)):
            self._wrong(name, node, f"{allowed}, in plain digits")
            return None
        value = int(node.text)
        below, above = value // step * step, -(-value // step) * step
        near = sorted({min(max(each, step), high) for each in (below, above)})
        if near == [value]:
            return value
        self.report(name, f"found {value}; allowed: {allowed}; nearest: {' or '.join(map(str, near))}")
        return None

    def switch(self, name: str, *, default: bool) -> bool:
        """Reads an optional `true` or `false`."""
        node = self._values.get(name)
        if node is None:
            return default
        if isinstance(node, Scalar) and node.plain and node.text in ("true", "false"):
            return node.text == "true"
        self._wrong(name, node, "true or false")
        return default

    def text(self, name: str, allowed: str) -> str | None:
        """Reads a required text; `allowed` says what it should be."""
        node = self._required(name, allowed)
        if node is None:
            return None
        if isinstance(node, Scalar) and not node.refused and not (node.plain and node.text in _NULLS):
            return node.text
        self._wrong(name, node, allowed)
        return None

    def mapping(self, name: str, allowed: Names[str], *, required: bool = True) -> Fields | None:
        """Reads a nested mapping whose fields are `allowed`."""
        wanted = f"a mapping with {', '.join(allowed)}"
        node = self._required(name, wanted) if required else self._values.get(name)
        if isinstance(node, Mapping):
            return Fields(node, self.at(name), allowed, self._problems)
        if node is not None:
            self._wrong(name, node, wanted)
        return None

    def items(self, name: str, allowed: str) -> tuple[Node, ...] | None:
        """Reads a required list with at least one item; `allowed` says of what."""
        node = self._required(name, allowed)
        if isinstance(node, Sequence) and node.items:
            return node.items
        if node is not None:
            self._wrong(name, node, allowed)
        return None

    def switch_table(self, name: str, high: int, unit: str) -> BatchTable:
        """Reads an optional batch table of 0 and 1 over 1..`high`; returns it in canonical form.

        Args:
          name: The field.
          high: Largest number that an entry may hold.
          unit: What the numbers count and where `high` comes from, for messages.
        """
        node = self._values.get(name)
        if node is None:
            return EMPTY
        example = str(Span(first=1, last=high, value=1))
        if not isinstance(node, Scalar) or node.refused or (node.plain and node.text in _NULLS):
            self._wrong(name, node, f"a quoted batch table such as '{example}', or '' for none")
            return EMPTY
        table, mistakes = scan_table(node.text, example)
        texts = list(mistakes)
        for span in table.spans:
            if span.first < 1 or span.last > high:
                texts.append(f"'{span}': {unit} must be within 1..{high}")
            if span.value not in (0, 1):
                texts.append(f"'{span}': the value must be 1 (on) or 0 (off)")
        texts += [f"'{one}' and '{other}' overlap; make them disjoint" for one, other in overlaps(table)]
        for text in texts:
            self.report(name, text)
        return EMPTY if texts else table.canonical()

    def _required(self, name: str, allowed: str) -> Node | None:
        node = self._values.get(name)
        if node is None and name not in self._misspelt:
            self._problems.add(self.line, self.at(name), f"missing; add it: {allowed}")
        return node

    def _wrong(self, name: str, node: Node, allowed: str) -> None:
        wrong(node, self.at(name), allowed, self._problems)


def read_integer(node: Node, path: str, low: int, high: int, problems: Problems, why: str = "") -> int | None:
    """Reads an integer within `low`..`high` in plain decimal digits."""
    if isinstance(node, Scalar) and node.plain and _INTEGER.fullmatch(node.text):
        value = int(node.text)
        if low <= value <= high:
            return value
        problems.add(node.line, path, f"found {value}; allowed: {low}..{high}{why}")
        return None
    wrong(node, path, f"an integer in plain digits, {low}..{high}{why}", problems)
    return None


def wrong(node: Node, path: str, allowed: str, problems: Problems) -> None:
    """Reports that `node` is not what is allowed, unless it was reported already."""
    if not (isinstance(node, Scalar) and node.refused):
        problems.add(node.line, path, f"found {describe(node)}; allowed: {allowed}")


def describe(node: Node) -> str:
    """Says in a few words what a node is."""
    if isinstance(node, Sequence):
        return f"a list of {len(node.items)}" if node.items else "an empty list"
    if isinstance(node, Mapping):
        return "a mapping"
    if node.plain and node.text in _NULLS:
        return "nothing"
    return f"{node.text!r:.60}" if node.plain else f"the quoted text {node.text!r:.60}"

"""How commands print: with styles where a terminal shows them, and facts and tables one below the other."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

import click

from attnres_aot.columns import facts, table


def show(text: str = "") -> None:
    """Prints a line; its styles are left out where they cannot be seen, or are not wanted (`NO_COLOR`)."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    click.echo(text, color=False if plain else None)


def show_json(data: Any) -> None:
    """Prints plain data for programs."""
    show(json.dumps(data, indent=1))


def strong(text: str) -> str:
    """Marks a title."""
    return click.style(text, bold=True)


def faint(text: str) -> str:
    """Marks what is beside the point."""
    return click.style(text, dim=True)


def show_table(rows: Sequence[Sequence[str]], words: int = 1, indent: str = "  ") -> None:
    """Prints a table as `columns.table` lines it up."""
    heading, *others = table(rows, words, indent=indent)
    show(faint(heading))
    for text in others:
        show(text)


def show_facts(title: str, pairs: Iterable[tuple[str, str]]) -> None:
    """Prints names and values below a title."""
    if title:
        show(strong(title))
    for name, value in facts(pairs):
        show(f"  {faint(name)}  {value}")

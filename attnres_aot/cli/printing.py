"""How commands print: with styles where a terminal shows them, and facts and tables one below the other."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import click

from attnres_aot.columns import table

_LABEL_WIDTH = 13  # characters of the names of facts


def show(text: str = "") -> None:
    """Prints a line; its styles are left out where they cannot be seen, or are not wanted (`NO_COLOR`)."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    click.echo(text, color=False if plain else None)


def strong(text: str) -> str:
    """Marks a title."""
    return click.style(text, bold=True)


def faint(text: str) -> str:
    """Marks what is beside the point."""
    return click.style(text, dim=True)


def show_table(rows: Sequence[Sequence[str]], words: int = 1, indent: str = "  ") -> None:
    """Prints a table, its heading the first row: `words` columns to the left, further ones to the right."""
    heading, *others = table(rows, words)
    show(indent + faint(heading))
    for text in others:
        show(indent + text)


def show_facts(title: str, facts: Iterable[tuple[str, str]]) -> None:
    """Prints names and values below a title; a name that follows itself is printed once."""
    if title:
        show(strong(title))
    before = ""
    for name, value in facts:
        label = ("" if name == before else name).ljust(_LABEL_WIDTH)
        show(f"  {faint(label)}  {value}")
        before = name

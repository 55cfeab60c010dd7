"""Reads which installed packages register something in an entry-point group, whatever state the others are in.

`importlib.metadata.entry_points` reads the files of every installed package and raises at the first that is broken,
though it may have nothing to do with the group. Here only packages that name the group are read in full, and one that
cannot be read is a note.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from importlib.metadata import Distribution, EntryPoint

_FILE = "entry_points.txt"


def registered(group: str) -> tuple[list[EntryPoint], list[str]]:
    """Returns the entry points of a group, ascending by name and value, and what could not be read, one note each.

    Where a package is installed twice the first on the search path counts, as for imports.
    """
    found: dict[str, list[EntryPoint]] = {}
    notes: list[str] = []
    for number, distribution in enumerate(_distributions(notes)):
        try:
            if group not in (distribution.read_text(_FILE) or ""):
                continue
            entries = [entry for entry in distribution.entry_points if entry.group == group]
        except Exception as error:  # noqa: BLE001 - a broken package raises anything; the trace reports it
            notes.append(f"the {_FILE} of {_label(distribution)} cannot be read: {type(error).__name__}")
            continue
        found.setdefault(_name(distribution) or f"unnamed {number}", entries)
    entries = [entry for each in found.values() for entry in each]
    return sorted(entries, key=lambda entry: (entry.name, entry.value)), notes


def _distributions(notes: list[str]) -> Iterator[Distribution]:
    """Yields the installed packages; one of the finders that other packages add may raise, which ends the list."""
    distributions = iter(importlib.metadata.distributions())
    while True:
        try:
            yield next(distributions)
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001 - see above
            notes.append(f"the installed packages cannot be listed: {type(error).__name__}: {error}")
            return


def _name(distribution: Distribution) -> str:
    try:
        return (distribution.metadata["Name"] or "").lower().replace("_", "-")
    except Exception:  # noqa: BLE001 - see above
        return ""


def _label(distribution: Distribution) -> str:
    """Names a package that may not be able to tell its name."""
    return _name(distribution) or str(getattr(distribution, "_path", "a package"))

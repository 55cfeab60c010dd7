"""The bundle argument of commands: a bundle folder, or a folder of bundles."""

from __future__ import annotations

import os
from pathlib import Path

from attnres_aot.bundle.manifest import MANIFEST_NAME


def bundles_at(path: Path) -> tuple[Path, ...]:
    """Returns the bundles that `path` stands for: itself, or the bundles directly in it in order of name.

    A path that is neither is returned as it is, so that opening it says what is wrong.
    """
    if os.path.lexists(path / MANIFEST_NAME) or not os.path.isdir(path):  # noqa: PTH112 - Path.is_dir may raise
        return (path,)
    try:
        found = sorted(entry for entry in path.iterdir() if is_bundle(entry))
    except OSError:
        found = []
    return tuple(found) or (path,)


def is_bundle(path: Path) -> bool:
    """Tells whether `path` looks like a finished bundle; a writer's working folders have hidden names."""
    return not path.name.startswith(".") and os.path.lexists(path / MANIFEST_NAME)

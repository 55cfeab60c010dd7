"""The configurations that ship inside the package."""

from __future__ import annotations

from pathlib import Path

from attnres_aot.errors import UsageError, did_you_mean

FOLDER = Path(__file__).parent
"""Where they lie."""
DEFAULT_NAME = "kimi_k3"
"""The one that commands take when none is named."""


def names() -> tuple[str, ...]:
    """Returns the names of all, the default first."""
    return tuple(sorted((path.stem for path in FOLDER.glob("*.yaml")), key=lambda name: (name != DEFAULT_NAME, name)))


def path_of(name: str) -> Path:
    """Returns the file of one.

    Raises:
      UsageError: none has that name.
    """
    if name not in names():
        raise UsageError(
            f"no configuration {name!r:.80} ships with attnres-aot{did_you_mean(name, names())}; choose from "
            f"{', '.join(names())}"
        )
    return FOLDER / f"{name}.yaml"


def about(text: str) -> str:
    """Returns what a configuration says of itself: its first line, which is a comment."""
    return text.partition("\n")[0].lstrip("# ")

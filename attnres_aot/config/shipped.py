"""The configurations that ship inside the package, and the command `attnres-aot config`, which prints them."""

from __future__ import annotations

import argparse
import json
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `attnres-aot config`."""
    parser.add_argument(
        "name", nargs="?", default=DEFAULT_NAME, help=f"one of {', '.join(names())} (default: {DEFAULT_NAME})"
    )
    parser.add_argument("--list", action="store_true", help="list the names, each with what it is")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.epilog = "To make a configuration of your own: `attnres-aot config > my_model.yaml`"


def run(args: argparse.Namespace) -> int:
    """Runs `attnres-aot config`, printing through `args.echo`.

    Raises:
      UsageError: no configuration of that name ships.
    """
    shown = {name: path_of(name).read_text(encoding="utf-8") for name in (names() if args.list else (args.name,))}
    if args.json:
        found = [{"name": name, "about": about(text), "text": text} for name, text in shown.items()]
        args.echo(json.dumps({"configs": found} if args.list else found[0], indent=1))
    elif args.list:
        width = max(map(len, shown))
        args.echo("\n".join(f"{name:<{width}}  {about(text)}" for name, text in shown.items()))
    else:
        args.echo(shown[args.name].removesuffix("\n"))
    return 0

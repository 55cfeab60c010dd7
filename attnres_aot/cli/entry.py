"""The command line's entry: makes the standard streams fit to print to, then hands over to click."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Sequence

from attnres_aot._version import __version__
from attnres_aot.cli import streams
from attnres_aot.cli.commands import COMMANDS, install_command


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0 done, 1 failed, 2 misuse, 130 interrupted.

    Args:
      argv: Arguments without the program's name; None for the process's own.
    """
    streams.open_closed()
    _escape_what_streams_cannot_hold()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        click_main = importlib.import_module("attnres_aot.cli.main")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "click":
            raise
        return _without_click(arguments)
    status: int = click_main.run(arguments)
    return status


def _escape_what_streams_cannot_hold() -> None:
    """Lets names of files that the terminal's encoding lacks be printed as escapes, where Python would raise."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _without_click(arguments: list[str]) -> int:
    """Says what to install; importing the package needs no click, but every command does."""
    command = COMMANDS.get(arguments[0]) if arguments else None
    extra = command.extra if command else "runtime"
    streams.tell(
        f"error: the commands of attnres-aot {__version__} need the module 'click', which is not installed: "
        f"{install_command(extra)}"
    )
    return 2

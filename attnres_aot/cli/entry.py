"""The command line's entry: runs with or without the build tools, and keeps deployment commands free of them."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Sequence

from attnres_aot._version import __version__
from attnres_aot.cli import device_cli, streams

BUILDER_COMMANDS: dict[str, str] = {
    "plan": "Show which variants and images a configuration needs.",
    "build": "Compile a configuration into one bundle per GPU architecture.",
    "verify": "Check a bundle's files and binaries against its manifest.",
    "inspect": "Show what a bundle holds and for which GPUs it is.",
}
"""Name -> one-line help of the commands that need the build tools; `NAME_command.py` here holds each."""

INSTALL_BUILD = "pip install 'attnres-aot[build]'"
"""The command that installs the build tools."""

_BUILD_MODULES = ("click", "yaml", "rich", "elftools", "cutlass")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0 done, 1 failed, 2 misuse, 130 interrupted.

    Args:
      argv: Arguments without the program's name; None for the process's own.
    """
    streams.open_closed()
    _escape_what_streams_cannot_hold()
    status: int
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in device_cli.COMMANDS:
        return device_cli.main(arguments)
    try:
        builder = importlib.import_module("attnres_aot.cli.main")
    except ModuleNotFoundError as error:
        if not is_build_module(error):
            raise
        try:
            status = _without_build_tools(arguments)
            streams.flush_output()
        except OSError as trouble:
            streams.give_up_output(trouble)
            return device_cli.FAILED
        return status
    status = builder.run(arguments)
    return status


def _escape_what_streams_cannot_hold() -> None:
    """Lets names of files that the terminal's encoding lacks be printed as escapes, where Python would raise."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def is_build_module(error: ModuleNotFoundError) -> bool:
    """Tells whether a failed import is of a module that the `build` extra installs."""
    return (error.name or "").split(".")[0] in _BUILD_MODULES


def _without_build_tools(arguments: list[str]) -> int:
    """Answers what can be answered without click: help, version, and what to install."""
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, [*device_cli.COMMANDS, *BUILDER_COMMANDS]))
        print("usage: attnres-aot COMMAND [ARGUMENTS]\n")
        for name, text in device_cli.COMMANDS.items():
            print(f"  {name:<{width}}  {text}")
        print(f"\nafter {INSTALL_BUILD}:")
        for name, text in BUILDER_COMMANDS.items():
            print(f"  {name:<{width}}  {text}")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"attnres-aot {__version__}")
        return 0
    if arguments[0] not in BUILDER_COMMANDS:
        return device_cli.main(arguments)
    streams.tell(f"error: {arguments[0]!r} needs the build tools, which are not installed: {INSTALL_BUILD}")
    return 2

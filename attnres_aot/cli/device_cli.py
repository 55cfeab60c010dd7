"""Commands that run in a deployment image: dispatched with argparse, so that they need neither click nor a compiler.

The package's entry, `attnres_aot.cli`, forwards these commands here and answers `--help` and `--version` itself. A
command is a module with `add_arguments(parser)` and `run(args) -> int`; it is imported only when it is called, and
prints through `args.echo(text)`.
"""

from __future__ import annotations

import argparse
import importlib
import warnings
from dataclasses import dataclass
from typing import Any

from attnres_aot.cli import streams
from attnres_aot.errors import AttnResError, ConfigError, UsageError, did_you_mean

FAILED, MISUSED, INTERRUPTED = 1, 2, 130
"""Exit statuses other than 0, the same as those of every other command."""

INSTALL_RUNTIME = "pip install 'attnres-aot[runtime]'"
"""The command that installs what launching needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Command:
    module: str
    """Module with `add_arguments` and `run`."""
    help: str
    """One line for help texts."""


_MODULES = {
    "config": _Command(
        module="attnres_aot.config.shipped", help="Print a configuration that ships, to start your own from."
    ),
    "doctor": _Command(
        module="attnres_aot.doctor.doctor", help="Say whether bundles can be launched here, and how to fix it if not."
    ),
    "selftest": _Command(
        module="attnres_aot.selftest.command",
        help="Check a bundle's kernels against an fp64 reference on this machine's GPU.",
    ),
    "bench": _Command(
        module="attnres_aot.bench.command", help="Measure a bundle's kernels, launches and cold start on this GPU."
    ),
    "tune": _Command(
        module="attnres_aot.tune.command", help="Measure where statistics and launch shapes pay, and write the tables."
    ),
}

COMMANDS: dict[str, str] = {name: command.help for name, command in _MODULES.items()}
"""Name -> one-line help of every command here."""
ANYWHERE = ("config",)
"""Those that are as useful on a build machine."""


class _Parser(argparse.ArgumentParser):
    """A parser whose help fails where it cannot be written."""

    def print_help(self, file: Any = None) -> None:
        """Prints the help; argparse's own way takes no notice of errors."""
        print(self.format_help(), end="", file=file)


def main(argv: list[str]) -> int:
    """Runs one command and returns its exit status: 0 done, 1 failed, 2 misuse, 130 interrupted.

    Args:
      argv: the command's name and its arguments, without the program's name.
    """
    try:
        status = _dispatch(argv)
        streams.flush_output()
    except (UsageError, ConfigError) as error:
        return _fail(str(error), MISUSED)
    except AttnResError as error:
        return _fail(str(error), FAILED)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except OSError as error:
        if not streams.is_output_error(error):
            raise
        streams.give_up_output(error)
        return FAILED
    return status


def _dispatch(argv: list[str]) -> int:
    if not argv:
        raise UsageError(f"no command given; choose from {', '.join(COMMANDS)}")
    name = argv[0]
    if name not in _MODULES:
        raise UsageError(f"no command {name!r}{did_you_mean(name, COMMANDS)}; choose from {', '.join(COMMANDS)}")
    return _run(name, argv[1:])


def _run(name: str, arguments: list[str]) -> int:
    command = _MODULES[name]
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # torch's; nothing here needs numpy
    try:
        module = importlib.import_module(command.module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "attnres_aot":
            raise
        needs = f"{name!r} needs the module {error.name!r}, which is not installed: {INSTALL_RUNTIME}"
        if not {"-h", "--help"} & set(arguments):
            return _fail(needs, FAILED)
        print(f"usage: attnres-aot {name} ...\n\n{command.help}\n\n{needs}; then --help lists its options")
        return 0
    parser = _Parser(prog=f"attnres-aot {name}", description=command.help, allow_abbrev=False)
    module.add_arguments(parser)
    try:
        args = parser.parse_args(arguments)
    except SystemExit as stop:  # argparse exits by itself after --help and after a mistake
        return stop.code if isinstance(stop.code, int) else MISUSED
    args.echo = print
    status: int = module.run(args)
    return status


def _fail(message: str, status: int) -> int:
    streams.tell(f"error: {message}")
    return status

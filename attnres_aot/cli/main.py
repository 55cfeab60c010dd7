"""The click group: finds each command's module when it is called, and maps errors to exit statuses."""

from __future__ import annotations

import importlib
import warnings

import click

from attnres_aot._version import __version__
from attnres_aot.cli import streams
from attnres_aot.cli.commands import ANYWHERE, BUILD_MACHINE, COMMANDS, DEPLOYMENT, install_command
from attnres_aot.cli.wording import error_text
from attnres_aot.errors import AttnResError, ConfigError, UsageError, did_you_mean

DONE, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130
"""Exit statuses."""


class LazyGroup(click.Group):
    """A group whose commands are imported when called, so that help needs none of their modules."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Lists every command."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports one command.

        Raises:
          UsageError: something that it needs is not installed; says what to install.
        """
        if cmd_name not in COMMANDS:
            return None
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # torch's; nothing here needs numpy
        try:
            module = importlib.import_module(f"attnres_aot.cli.{cmd_name}_command")
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] == "attnres_aot":
                raise
            needs = f"{cmd_name!r} needs the module {error.name.split('.')[0]!r}, which is not installed"
            raise UsageError(f"{needs}: {install_command(COMMANDS[cmd_name].extra)}") from error
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the called command; an unknown one lists the choices."""
        name = args[0]
        names = self.list_commands(ctx)
        if name not in names and not name.startswith("-"):
            raise UsageError(f"no command {name!r}{did_you_mean(name, names)}; choose from {', '.join(names)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the commands by where they run, without importing them."""
        for place in (BUILD_MACHINE, DEPLOYMENT, ANYWHERE):
            with formatter.section(place):
                formatter.write_dl([(name, each.help) for name, each in COMMANDS.items() if each.where == place])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="attnres-aot", message="%(prog)s %(version)s")
def group() -> None:
    """Build AttnRes kernels ahead of time, on a machine with no GPU, and look after the bundles."""


def run(arguments: list[str]) -> int:
    """Runs one command and returns its exit status; messages go to stderr."""
    try:
        status = group.main(arguments, prog_name="attnres-aot", standalone_mode=False)
        streams.flush_output()
    except (UsageError, ConfigError) as error:
        return _fail(str(error), MISUSED)
    except AttnResError as error:
        return _fail(str(error), FAILED)
    except click.exceptions.NoArgsIsHelpError as error:
        streams.tell(error.format_message())
        return MISUSED
    except click.UsageError as error:
        hint = f"; see `{error.ctx.command_path} --help`" if error.ctx else ""
        return _fail(error.format_message().removesuffix(".") + hint, MISUSED)
    except click.ClickException as error:
        return _fail(error.format_message(), FAILED)
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted; run the same command again to go on", INTERRUPTED)
    except OSError as error:
        if not streams.is_output_error(error):
            raise
        streams.give_up_output(error)
        return FAILED
    return status if isinstance(status, int) else DONE


def _fail(message: str, status: int) -> int:
    streams.tell(error_text(message))
    return status

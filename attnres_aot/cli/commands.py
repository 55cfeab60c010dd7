"""Every command of `attnres-aot`: what it is for, where it runs, and the extra that installs what it needs.

A command NAME is the `command` of the module `attnres_aot.cli.NAME_command`, imported when it is called.
"""

from __future__ import annotations

from attnres_aot.records import record

BUILD_MACHINE, DEPLOYMENT, ANYWHERE = "On a build machine", "In a deployment image", "Anywhere"
"""Where a command runs, in the order in which help lists them."""


@record(frozen=True, slots=True, kw_only=True)
class Command:
    """What is known of a command before its module is imported."""

    help: str
    """One line for the list of commands."""
    where: str
    """Where it runs."""
    extra: str
    """The extra of the package that installs what it needs."""


COMMANDS: dict[str, Command] = {
    "plan": Command(help="Show which variants and images a configuration needs.", where=BUILD_MACHINE, extra="build"),
    "build": Command(
        help="Compile a configuration into one bundle per GPU architecture.", where=BUILD_MACHINE, extra="build"
    ),
    "selftest": Command(
        help="Check a bundle's kernels against an fp64 reference on this machine's GPU.",
        where=DEPLOYMENT,
        extra="runtime",
    ),
    "bench": Command(
        help="Measure a bundle's kernels, launches and cold start on this GPU.", where=DEPLOYMENT, extra="runtime"
    ),
    "tune": Command(
        help="Measure where statistics and launch shapes pay, and write the tables.", where=DEPLOYMENT, extra="runtime"
    ),
    "doctor": Command(
        help="Say whether bundles can be launched here, and how to fix it if not.", where=DEPLOYMENT, extra="runtime"
    ),
    "verify": Command(
        help="Check a bundle's files and binaries against its manifest.", where=ANYWHERE, extra="inspect"
    ),
    "inspect": Command(help="Show what a bundle holds and for which GPUs it is.", where=ANYWHERE, extra="inspect"),
    "config": Command(
        help="Print a configuration that ships, to start your own from.", where=ANYWHERE, extra="inspect"
    ),
}
"""Name -> command."""


def install_command(extra: str) -> str:
    """Returns the command that installs an extra."""
    return f"pip install 'attnres-aot[{extra}]'"

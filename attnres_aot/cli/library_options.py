"""The options of `build` for shared objects: which forms, for which hosts, and one library of several archs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click

from attnres_aot.errors import UsageError
from attnres_aot.launcher.compilers import HOSTS, find_compiler, find_headers, parse_host, this_host
from attnres_aot.spec.arch import Arch


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryOptions:
    """What was asked for."""

    hosts: tuple[str, ...]
    """Names of hosts; none without libraries."""
    fat: bool
    """One library of all archs in the place of one for each."""

    def check(self, archs: Sequence[Arch]) -> None:
        """Checks that it can be done, before anything is compiled.

        Raises:
          UsageError: one library of several archs is asked for, but not several archs.
          CompileError: a compiler or a header is missing.
        """
        if self.fat and (len(archs) < 2 or not self.hosts):
            raise UsageError("--fat makes one library of several archs: give at least two with --arch, and --format so")
        for host in self.hosts:
            find_compiler(HOSTS[host])
        if self.hosts:
            find_headers()


def _parse_hosts(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    names = [name.strip() for value in values for name in value.split(",")]
    return tuple(dict.fromkeys(parse_host(name).name for name in names))


def library_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--format`, `--host` and `--fat`, and passes them on as one `libraries`."""

    @click.option(
        "--format",
        "form",
        type=click.Choice(["cubin", "so", "both"]),
        default="cubin",
        show_default=True,
        help="cubin: a file per image, for this package's loader. so, both: a shared object of all images beside them, "
        "for whatever calls TVM-FFI functions.",
    )
    @click.option(
        "--host",
        "hosts",
        multiple=True,
        metavar="HOST",
        callback=_parse_hosts,
        help=f"Machine that shared objects are for; repeat it or separate by commas. Of {', '.join(HOSTS)}; this "
        "machine's when left out.",
    )
    @click.option("--fat", is_flag=True, help="One shared object of all archs, in DIR, that picks at load.")
    @functools.wraps(function)
    def wrapper(*args: Any, form: str, hosts: tuple[str, ...], fat: bool, **kwargs: Any) -> Any:
        if form == "cubin" and hosts:
            raise UsageError("--host is for shared objects; add --format so")
        asked = hosts or (parse_host(this_host()).name,) if form != "cubin" else ()
        return function(*args, libraries=LibraryOptions(hosts=asked, fat=fat), **kwargs)

    return wrapper

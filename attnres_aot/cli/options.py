"""Options that several commands share, as decorators that pass parsed values.

| decorator | parameter | value |
|---|---|---|
| `arch_option` | `archs` | `tuple[Arch, ...]`, at least one, without duplicates, in the order given |
| `config_option` | `config_path` | `Path`, for `attnres_aot.config.load_config` |
| `selection_options` | `selection` | `plan.Selection` |
| `device_option` | `device` | `str` or None |
| `json_option` | `as_json` | `bool` |
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from attnres_aot.config.shipped import DEFAULT_NAME, path_of
from attnres_aot.errors import UsageError
from attnres_aot.plan.plan import Selection
from attnres_aot.spec.arch import Arch, choices, parse_buildable_arch

Function = Callable[..., Any]


class Number(click.FloatRange):
    """A number within a range, which nan is not."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Reads the number."""
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"nan is not in the range {self._describe_range()}.", param, ctx)
        return number


def _parse_archs(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[Arch, ...]:
    """Splits at commas, parses every name and drops repetitions; reports all bad names together."""
    names = [name.strip() for value in values for name in value.split(",")]
    if not names:
        raise UsageError(f"--arch is missing; choose one or more from {choices()}")
    archs: dict[Arch, None] = {}
    problems = []
    for name in names:
        try:
            archs[parse_buildable_arch(name)] = None
        except UsageError as error:
            problems.append(f"--arch: {error}")
    if problems:
        raise UsageError("\n".join(problems))
    return tuple(archs)


arch_option = click.option(
    "--arch",
    "archs",
    multiple=True,
    metavar="ARCH",
    callback=_parse_archs,
    help=f"GPU architecture; repeat it or separate by commas for several. One of {choices()}.",
)
"""`--arch`, required, several at once."""

config_option = click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    default=path_of(DEFAULT_NAME),
    metavar="FILE",
    help="Configuration to read; the shipped kimi_k3.yaml when left out.",
)
"""`--config`."""

device_option = click.option("--device", help="CUDA device, e.g. cuda:1; the current one when left out.")
"""`--device`."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs, and nothing else.")
"""`--json`."""


def selection_options(function: Function) -> Function:
    """Adds `--tp`, `--dcp` and `--only`, and passes them on as one `selection`."""

    @click.option("--tp", multiple=True, type=int, metavar="N", help="Keep deployments of this tensor-parallel size.")
    @click.option("--dcp", multiple=True, type=int, metavar="N", help="Keep deployments of this DCP size.")
    @click.option(
        "--only",
        multiple=True,
        metavar="NAME",
        help="Keep variants and producers by name: a whole name, a pattern such as '*-ring8*', or a part of names; "
        "producers of what the kept variants take stay, too. Repeatable.",
    )
    @functools.wraps(function)
    def wrapped(*args: Any, tp: tuple[int, ...], dcp: tuple[int, ...], only: tuple[str, ...], **options: Any) -> Any:
        return function(*args, selection=Selection(tp=tp, dcp=dcp, only=only), **options)

    return wrapped

"""`attnres-aot tune`: measures where precomputed statistics and launch shapes pay, and writes the tables."""

from __future__ import annotations

from pathlib import Path

import click

from attnres_aot.bench.clock import QUICK, STANDARD
from attnres_aot.bench.points import MAX_ROWS, ROWS
from attnres_aot.cli.options import Number, device_option, json_option
from attnres_aot.cli.printing import show
from attnres_aot.spec.row_counts import parse_rows
from attnres_aot.tune.command import Request, run
from attnres_aot.tune.decide import EXPOSED, MARGIN, RULES

_FILE = click.Path(path_type=Path)


@click.command("tune")
@click.argument("bundle", required=False)
@device_option
@click.option("--rows", default=",".join(map(str, ROWS)), show_default=True, help="Row counts to measure.")
@click.option(
    "--rule",
    type=click.Choice(list(RULES)),
    default=EXPOSED,
    show_default=True,
    help=f"What decides: {'; '.join(f'{name}: {text}' for name, text in RULES.items())}. All are measured and shown.",
)
@click.option(
    "--margin",
    type=Number(0, 100, max_open=True),
    default=100 * MARGIN,
    show_default=True,
    metavar="PERCENT",
    help="A smaller win is a tie.",
)
@click.option("--pdl", type=click.Choice(["on", "off"]), default="on", show_default=True, help="Launch mode.")
@click.option("--quick", is_flag=True, help="Fewer repeats.")
@click.option("--config", type=_FILE, metavar="FILE", help="Configuration to put the tables into; the shipped one.")
@click.option("--out", type=_FILE, metavar="FILE", help="Write the configuration with measured tables to FILE.")
@click.option("--save", type=_FILE, metavar="FILE", help="Write every measured time to FILE, as JSON.")
@json_option
def command(
    bundle: str | None,
    *,
    device: str | None,
    rows: str,
    rule: str,
    margin: float,
    pdl: str,
    quick: bool,
    config: Path | None,
    out: Path | None,
    save: Path | None,
    as_json: bool,
) -> int:
    """Measure where statistics and launch shapes pay, and write the tables.

    BUNDLE is a bundle or a folder of bundles; when left out, one is searched for as load() does. It must have every
    statistics variant: build it from `attnres-aot config kimi_k3_all`.
    """
    request = Request(
        bundle=bundle,
        device=device,
        rows=tuple(sorted(parse_rows(rows, MAX_ROWS))),
        rule=rule,
        margin=margin / 100,
        pdl=pdl == "on",
        effort=QUICK if quick else STANDARD,
        config=config,
        out=out,
        save=save,
    )
    return run(request, show, as_json=as_json)

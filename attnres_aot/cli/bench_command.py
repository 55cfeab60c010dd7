"""`attnres-aot bench`: measures a bundle on this machine's GPU, or compares saved measurements."""

from __future__ import annotations

from pathlib import Path

import click

from attnres_aot.bench.clock import QUICK, STANDARD
from attnres_aot.bench.command import L2, MODES, PARTS, Request, run
from attnres_aot.bench.points import MAX_ROWS, QUICK_ROWS, Selection
from attnres_aot.bench.results import WARM
from attnres_aot.cli.options import Number, device_option, json_option
from attnres_aot.cli.printing import show
from attnres_aot.errors import UsageError
from attnres_aot.spec.row_counts import parse_rows

_FILE = click.Path(path_type=Path)
_MOST = 10**9  # launches, or seconds, of a soak


@click.command("bench")
@click.argument("bundle", required=False)
@device_option
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice([*PARTS, "none"]),
    help="Measure only this; may be repeated; 'none' leaves just the soak. All when left out.",
)
@click.option(
    "--variants",
    "globs",
    multiple=True,
    metavar="GLOB",
    help="GPU time of the variants whose whole names match, e.g. 'nb8-*'; may be repeated. A few that stand for the "
    "model when left out.",
)
@click.option("--rows", help=f"Row counts, 1 to {MAX_ROWS}, e.g. 1,16,64; 1 to 64 when left out.")
@click.option(
    "--pdl",
    type=click.Choice(list(MODES)),
    default="all",
    show_default=True,
    help="Launch modes; early is one of its own for mailboxes only.",
)
@click.option(
    "--l2",
    type=click.Choice(list(L2)),
    default="both",
    show_default=True,
    help="warm: every launch on the same memory; cold: on memory that the L2 no longer holds.",
)
@click.option("--quick", is_flag=True, help="Few row counts and repeats, PDL on and warm L2 only unless asked for.")
@click.option(
    "--soak", type=click.IntRange(0, _MOST), default=0, metavar="N", help="Also launch N times from 8 threads."
)
@click.option(
    "--soak-seconds",
    type=Number(0, _MOST, min_open=True),
    default=120.0,
    show_default=True,
    metavar="S",
    help="Time limit of the soak; fewer launches within it are a failure.",
)
@click.option("--save", type=_FILE, metavar="FILE", help="Write the result to FILE, as JSON.")
@click.option(
    "--compare",
    multiple=True,
    type=_FILE,
    metavar="FILE",
    help="Show ratios to a result saved before; may be repeated.",
)
@click.option("--load", type=_FILE, metavar="FILE", help="Measure nothing: compare the result saved in FILE.")
@click.option(
    "--threshold",
    type=Number(0, 1000),
    default=5.0,
    show_default=True,
    metavar="PERCENT",
    help="What counts as slower.",
)
@json_option
def command(
    bundle: str | None,
    *,
    device: str | None,
    parts: tuple[str, ...],
    globs: tuple[str, ...],
    rows: str | None,
    pdl: str,
    l2: str,
    quick: bool,
    soak: int,
    soak_seconds: float,
    save: Path | None,
    compare: tuple[Path, ...],
    load: Path | None,
    threshold: float,
    as_json: bool,
) -> int:
    """Measure a bundle's kernels, launches and cold start on this GPU.

    BUNDLE is a bundle or a folder of bundles; when left out, one is searched for as load() does. Exits with 1 when a
    compared number has become slower, or the soak found a problem.
    """
    if load is not None and not compare:
        raise UsageError("--load measures nothing, so there must be something to compare with: add --compare FILE")
    if quick and (pdl, l2) == ("all", "both"):
        pdl, l2 = "on", WARM
    counts = parse_rows(rows, MAX_ROWS) if rows is not None else QUICK_ROWS if quick else ()
    request = Request(
        bundle=bundle,
        device=device,
        parts=tuple(part for part in PARTS if not parts or part in parts),
        selection=Selection(globs=globs, rows=counts, pdl=MODES[pdl], cold=L2[l2]),
        effort=QUICK if quick else STANDARD,
        processes=1 if quick else 3,
        soak=soak,
        soak_seconds=soak_seconds,
        save=save,
        load=load,
        compare=compare,
        threshold=threshold / 100,
    )
    return run(request, show, as_json=as_json)

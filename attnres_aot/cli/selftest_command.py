"""`attnres-aot selftest`: a bundle's kernels against the fp64 reference, on this machine's GPU."""

from __future__ import annotations

import secrets

import click

from attnres_aot.cli.options import device_option, json_option
from attnres_aot.cli.printing import show
from attnres_aot.selftest.cases import MAX_ROWS, ROW_COUNTS
from attnres_aot.selftest.command import Request, run
from attnres_aot.spec.row_counts import parse_rows
from attnres_aot.spec.variants import PUBLISH, STATISTICS, Producer, Variant, parse_producer, parse_variant


@click.command("selftest")
@click.argument("bundle", required=False)
@click.option("--all-variants", is_flag=True, help="Every variant, not just enough to reach every image.")
@click.option(
    "--variant", "names", multiple=True, metavar="NAME", help="Only this variant or producer; may be repeated."
)
@click.option(
    "--rows",
    default=",".join(map(str, ROW_COUNTS)),
    show_default=True,
    help=f"Row counts, 1 to {MAX_ROWS} each.",
)
@click.option("--seed", type=int, help="Seed of the inputs; another one each time when left out. It is printed.")
@device_option
@json_option
def command(
    bundle: str | None,
    *,
    all_variants: bool,
    names: tuple[str, ...],
    rows: str,
    seed: int | None,
    device: str | None,
    as_json: bool,
) -> int:
    """Check a bundle's kernels against an fp64 reference on this machine's GPU.

    BUNDLE is a bundle or a folder of bundles; when left out, one is searched for as load() does.
    """
    request = Request(
        bundle=bundle,
        device=device,
        subjects=tuple(map(_parse_subject, names)),
        all_variants=all_variants,
        rows=parse_rows(rows, MAX_ROWS),
        seed=secrets.randbelow(1 << 31) if seed is None else seed,
    )
    return run(request, show, as_json=as_json)


def _parse_subject(name: str) -> Variant | Producer:
    return parse_producer(name) if name.startswith((STATISTICS, PUBLISH)) else parse_variant(name)

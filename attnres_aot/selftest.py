"""The command `attnres-aot selftest`: every image of a bundle against the fp64 reference on this machine's GPU.

Needs torch and this package, nothing else, so that it runs in a deployment image.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from attnres_aot.bundle import Bundle, read_manifest_bytes
from attnres_aot.checking import report
from attnres_aot.checking.cases import MAX_ROWS, ROW_COUNTS, draw_banks
from attnres_aot.checking.loaded import LoadedConsumer
from attnres_aot.checking.report import Setting
from attnres_aot.checking.suite import VariantResult, bundle_variants, check_variants, image_variants
from attnres_aot.errors import UsageError, did_you_mean
from attnres_aot.row_counts import parse_rows
from attnres_aot.variants import Variant, parse_variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a self-test is asked for."""

    bundle: str | None
    """A bundle or a folder of bundles; None searches as `attnres_aot.load` does."""
    device: str | None
    """CUDA device; None is torch's current one."""
    variants: tuple[Variant, ...]
    """Only these; empty: one or more per image."""
    all_variants: bool
    """Every variant of the bundle."""
    rows: tuple[int, ...]
    """Row counts of the launches."""
    seed: int
    """Seed of the input values."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("bundle", nargs="?", help="bundle or folder of bundles (default: search like load() does)")
    parser.add_argument(
        "--all-variants", action="store_true", help="every variant, not just enough to reach every image"
    )
    parser.add_argument("--variant", action="append", default=[], metavar="NAME", help="only this one; may be repeated")
    parser.add_argument(
        "--rows",
        default=",".join(map(str, ROW_COUNTS)),
        help=f"row counts, 1 to {MAX_ROWS} each (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, help="seed of the inputs (default: another one each time; it is printed)")
    parser.add_argument("--device", help="CUDA device, e.g. cuda:1 (default: the current one)")
    parser.add_argument("--json", action="store_true", help="print JSON only")


def run(args: argparse.Namespace) -> int:
    """Runs the command: 0 when everything asked for was checked and right, 1 otherwise."""
    request = Request(
        bundle=args.bundle,
        device=args.device,
        variants=tuple(parse_variant(name) for name in args.variant),
        all_variants=args.all_variants,
        rows=parse_rows(args.rows, MAX_ROWS),
        seed=secrets.randbelow(1 << 31) if args.seed is None else args.seed,
    )
    consumer = LoadedConsumer.open(request.bundle, request.device)
    variants = choose_variants(consumer.bundle, request)
    width = max(len("variant"), *(len(str(variant)) for variant in variants))

    def show(result: VariantResult) -> None:
        args.echo(report.text_row(result, width))

    if not args.json:
        args.echo(f"{len(variants)} variants of {consumer.bundle.path} on {consumer.device_name}, seed {request.seed}")
        args.echo(report.text_header(width))
    started = time.monotonic()
    results = check_bundle(consumer, variants, request, (lambda _: None) if args.json else show)
    setting = describe(consumer, request.rows, request.seed, time.monotonic() - started)
    if args.json:
        args.echo(json.dumps(report.to_json(results, setting), indent=1))
    else:
        args.echo(report.summary_line(results))
    complete = len(results) == len(variants) and all(result.cases for result in results)
    return 0 if complete and not any(result.problems for result in results) else 1


def check_bundle(
    consumer: LoadedConsumer,
    variants: Sequence[Variant],
    request: Request,
    finished: Callable[[VariantResult], None],
) -> list[VariantResult]:
    """Checks `variants` with inputs drawn from the request's seed; `finished` gets each result as it comes."""
    manifest = consumer.bundle.manifest
    banks = draw_banks(manifest.model.hidden, manifest.mailbox.capacity, request.seed, consumer.device)
    results = []
    for result in check_variants(variants, consumer, banks, request.rows):
        finished(result)
        results.append(result)
    return results


def choose_variants(bundle: Bundle, request: Request) -> list[Variant]:
    """Lists the variants that a request means.

    Raises:
      UsageError: a variant that the bundle does not hold, or contradictory options.
    """
    present = bundle_variants(bundle.manifest)
    if request.variants and request.all_variants:
        raise UsageError("--variant and --all-variants contradict each other; give one of them")
    for variant in request.variants:
        if variant not in present:
            hint = did_you_mean(str(variant), map(str, present))
            raise UsageError(
                f"{bundle.path} has no variant {str(variant)!r}{hint}; list its {len(present)} variants with "
                "'attnres-aot inspect'"
            )
    if request.variants:
        return list(request.variants)
    chosen = present if request.all_variants else image_variants(bundle.manifest)
    if not chosen:
        raise UsageError(f"{bundle.path} has no variants, so there is nothing to check")
    return chosen


def describe(consumer: LoadedConsumer, rows: tuple[int, ...], seed: int, seconds: float) -> Setting:
    """Gathers what a report says about the circumstances of a check."""
    bundle = consumer.bundle
    return Setting(
        bundle=f"{bundle.manifest.name}-{bundle.manifest.arch.requested}",
        manifest_sha256=hashlib.sha256(read_manifest_bytes(bundle.path)).hexdigest(),
        variants_in_bundle=len(bundle.manifest.variants),
        images_in_bundle=len(bundle.manifest.images),
        device=consumer.device_name,
        torch=f"{torch.__version__} (CUDA {torch.version.cuda})",
        seed=seed,
        rows=rows,
        seconds=seconds,
    )

"""What `attnres-aot selftest` does: every image of a bundle against the fp64 reference on this machine's GPU.

Needs torch and this package, nothing else, so that it runs in a deployment image.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from attnres_aot.bundle.reader import Bundle
from attnres_aot.errors import UsageError, did_you_mean
from attnres_aot.selftest import report
from attnres_aot.selftest.cases import draw_banks
from attnres_aot.selftest.loaded import LoadedConsumer
from attnres_aot.selftest.producers import ProducerResult, bundle_producers, check_producers
from attnres_aot.selftest.report import Setting
from attnres_aot.selftest.suite import VariantResult, bundle_variants, check_variants, image_variants
from attnres_aot.spec.variants import Producer, Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a self-test is asked for."""

    bundle: str | None
    """A bundle or a folder of bundles; None searches as `attnres_aot.load` does."""
    device: str | None
    """CUDA device; None is torch's current one."""
    variants: tuple[Variant, ...]
    """Only these and `producers`; both empty: one or more per image, and every producer."""
    producers: tuple[Producer, ...]
    """Only these and `variants`."""
    all_variants: bool
    """Every variant of the bundle."""
    rows: tuple[int, ...]
    """Row counts of the launches."""
    seed: int
    """Seed of the input values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What a self-test checks."""

    variants: tuple[Variant, ...]
    """Consumers."""
    producers: tuple[Producer, ...]
    """Producers."""


def run(request: Request, echo: Callable[[str], None], *, as_json: bool) -> int:
    """Runs the self-test and prints what it finds: 0 when everything asked for was checked and right, 1 otherwise."""
    consumer = LoadedConsumer.open(request.bundle, request.device)
    chosen = choose(consumer.bundle, request)
    width = max(len("variant"), *(len(str(each)) for each in (*chosen.variants, *chosen.producers)))

    def show(row: str) -> None:
        if not as_json:
            echo(row)

    counts = f"{len(chosen.variants)} variants and {len(chosen.producers)} producers"
    show(f"{counts} of {consumer.bundle.path} on {consumer.device_name}, seed {request.seed}")
    show(report.text_header(width))
    started = time.monotonic()
    results, made = check_bundle(consumer, chosen, request, show, width)
    setting = describe(consumer, request.rows, request.seed, time.monotonic() - started)
    whole = json.dumps(report.to_json(results, setting, made), indent=1) if as_json else ""
    echo(whole or report.summary_line(results, made))
    complete = (len(results), len(made)) == (len(chosen.variants), len(chosen.producers))
    right = all(each.cases and not each.problems for each in results)
    right &= all(each.cases and not each.problems for each in made)
    return 0 if complete and right else 1


def check_bundle(
    consumer: LoadedConsumer, chosen: Chosen, request: Request, show: Callable[[str], None], width: int
) -> tuple[list[VariantResult], list[ProducerResult]]:
    """Checks what was chosen with inputs from the request's seed; `show` gets a table row for each as it comes."""
    manifest = consumer.bundle.manifest
    banks = draw_banks(manifest.model.hidden, manifest.mailbox.capacity, request.seed, consumer.device)
    results: list[VariantResult] = []
    for result in check_variants(chosen.variants, consumer, banks, request.rows):
        show(report.text_row(result, width))
        results.append(result)
    made: list[ProducerResult] = []
    whole = len(results) == len(chosen.variants)  # a lost device ends the run
    for found in check_producers(chosen.producers if whole else (), consumer, banks, request.rows):
        show(report.text_row(found, width))
        made.append(found)
    return results, made


def choose(bundle: Bundle, request: Request) -> Chosen:
    """Lists the variants and producers that a request means.

    Raises:
      UsageError: one that the bundle does not hold, or contradictory options.
    """
    variants, producers = bundle_variants(bundle.manifest), bundle_producers(bundle.manifest)
    if not request.variants and not request.producers:
        chosen = variants if request.all_variants else image_variants(bundle.manifest)
        if not chosen and not producers:
            raise UsageError(f"{bundle.path} has no variants, so there is nothing to check")
        return Chosen(variants=tuple(chosen), producers=tuple(producers))
    if request.all_variants:
        raise UsageError("--variant and --all-variants contradict each other; give one of them")
    _refuse_missing(bundle, "variant", map(str, request.variants), list(map(str, variants)))
    _refuse_missing(bundle, "producer", map(str, request.producers), list(map(str, producers)))
    return Chosen(variants=request.variants, producers=request.producers)


def _refuse_missing(bundle: Bundle, what: str, names: Iterable[str], present: list[str]) -> None:
    for name in names:
        if name not in present:
            raise UsageError(
                f"{bundle.path} has no {what} {name!r:.140}{did_you_mean(name, present)}; "
                f"`attnres-aot inspect {shlex.quote(str(bundle.path))} --json` lists its {len(present)} {what}s"
            )


def describe(consumer: LoadedConsumer, rows: tuple[int, ...], seed: int, seconds: float) -> Setting:
    """Gathers what a report says about the circumstances of a check."""
    bundle = consumer.bundle
    return Setting(
        bundle=f"{bundle.manifest.name}-{bundle.manifest.arch.requested}",
        manifest_sha256=bundle.manifest_sha256,
        variants_in_bundle=len(bundle.manifest.variants),
        images_in_bundle=len(bundle.manifest.images),
        device=consumer.device_name,
        torch=f"{torch.__version__} (CUDA {torch.version.cuda})",
        seed=seed,
        rows=rows,
        seconds=seconds,
    )

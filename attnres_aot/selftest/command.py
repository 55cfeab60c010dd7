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
from attnres_aot.selftest.report import Setting
from attnres_aot.selftest.suite import Result, Subject, bundle_producers, bundle_variants, check_all, image_variants
from attnres_aot.spec.variants import Producer, Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a self-test is asked for."""

    bundle: str | None
    """A bundle or a folder of bundles; None searches as `attnres_aot.load` does."""
    device: str | None
    """CUDA device; None is torch's current one."""
    subjects: tuple[Subject, ...]
    """Only these variants and producers; none: one or more variants per image, and every producer."""
    all_variants: bool
    """Every variant of the bundle."""
    rows: tuple[int, ...]
    """Row counts of the launches."""
    seed: int
    """Seed of the input values."""


def run(request: Request, echo: Callable[[str], None], *, as_json: bool) -> int:
    """Runs the self-test and prints what it finds: 0 when everything asked for was checked and right, 1 otherwise."""
    consumer = LoadedConsumer.open(request.bundle, request.device)
    bundle = consumer.bundle
    subjects = choose(bundle, request)
    width = max(len("variant"), *(len(str(subject)) for subject in subjects))
    show: Callable[[str], None] = (lambda _: None) if as_json else echo
    variants = sum(isinstance(subject, Variant) for subject in subjects)
    counts = f"{variants} variants and {len(subjects) - variants} producers"
    show(f"{counts} of {bundle.path} on {consumer.device_name}, seed {request.seed}")
    show(report.text_header(width))
    started = time.monotonic()
    model, mailbox = bundle.manifest.model, bundle.manifest.mailbox
    banks = draw_banks(model.hidden, mailbox.capacity, request.seed, consumer.device)
    results: list[Result] = []
    for result in check_all(subjects, consumer, banks, request.rows):
        show(report.text_row(result, width))
        results.append(result)
    setting = describe(consumer, request.rows, request.seed, time.monotonic() - started)
    whole = json.dumps(report.report_json(results, setting), indent=1) if as_json else ""
    echo(whole or report.summary_line(results))
    right = all(result.launches and not result.problems for result in results)
    return 0 if right and len(results) == len(subjects) else 1


def choose(bundle: Bundle, request: Request) -> list[Subject]:
    """Lists the variants, then the producers, that a request means.

    Raises:
      UsageError: one that the bundle does not hold, or contradictory options.
    """
    variants, producers = bundle_variants(bundle.manifest), bundle_producers(bundle.manifest)
    if not request.subjects:
        chosen: list[Subject] = [*(variants if request.all_variants else image_variants(bundle.manifest)), *producers]
        if not chosen:
            raise UsageError(f"{bundle.path} has no variants, so there is nothing to check")
        return chosen
    if request.all_variants:
        raise UsageError("--variant and --all-variants contradict each other; give one of them")
    wanted = [subject for subject in request.subjects if isinstance(subject, Variant)]
    made = [subject for subject in request.subjects if isinstance(subject, Producer)]
    _refuse_missing(bundle, "variant", map(str, wanted), list(map(str, variants)))
    _refuse_missing(bundle, "producer", map(str, made), list(map(str, producers)))
    return [*wanted, *made]


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
        seconds=round(seconds, 1),
    )

#!/usr/bin/env python3
"""Launches every image of a bundle on exact, separate allocations: the program that scripts/sanitize.sh watches.

    python scripts/sanitize_launches.py BUNDLE [--rows 1,3] [--plant freed|unwritten]

`--plant` launches one image that reads weights which were freed, or a delta that was never written, so that a checker
which finds nothing in it is known to look at nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # torch reads it once, at import
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from attnres_aot import PreparedPublish, PreparedStatistics
from attnres_aot.selftest.cases import MAX_ROWS
from attnres_aot.selftest.loaded import LoadedConsumer
from attnres_aot.selftest.suite import bundle_variants
from attnres_aot.spec.row_counts import parse_rows
from tests.support.bare import BARE_EPS, bare_cases, check_bare, check_publish, check_statistics, draw_bare, rows_for


def launch_all(consumer: LoadedConsumer, rows: tuple[int, ...]) -> int:
    """Launches and checks everything; returns the exit status."""
    manifest = consumer.bundle.manifest
    generator = torch.Generator().manual_seed(1)
    problems: list[str] = []
    launches = 0
    for variant, count in bare_cases(manifest, rows):
        bare = draw_bare(variant, count, manifest.model.hidden, generator, consumer.device)
        problems += check_bare(bare, consumer)
        launches += 1
    for record in manifest.producers:
        for count in rows_for(record.choices, rows):
            problems += launch_producer(consumer, record.nb, count, generator)
            launches += 1
    print("\n".join([*problems, f"{launches} launches of {len(manifest.images)} images, {len(problems)} problems"]))
    return 1 if problems or not launches else 0


def launch_producer(consumer: LoadedConsumer, nb: int | None, rows: int, generator: torch.Generator) -> list[str]:
    """Launches a producer of statistics, or the publisher; returns what is wrong."""
    loaded, device = consumer.loaded, consumer.device
    if nb is None:

        def publish(source: torch.Tensor, mailbox: torch.Tensor, slot: int) -> None:
            PreparedPublish(mailbox, slot, loaded).run(source)

        return check_publish(rows, loaded.hidden, generator, device, publish)

    def make(
        norm: torch.Tensor, query: torch.Tensor, blocks: torch.Tensor, mixture: torch.Tensor, scal: torch.Tensor
    ) -> None:
        PreparedStatistics(norm, query, BARE_EPS, mixture, scal, nb=nb, bundle=loaded).run(blocks)

    return check_statistics(nb, rows, loaded.hidden, generator, device, make)


def captured(launch: Callable[[], object]) -> Callable[[], object]:
    """Captures a launch in a graph and returns what replays it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    replay: Callable[[], object] = graph.replay
    return replay


def plant(consumer: LoadedConsumer, defect: str) -> int:
    """Launches once with a defect that a memory checker must find; returns the exit status."""
    manifest = consumer.bundle.manifest
    variant = next(v for v in bundle_variants(manifest) if v.key.has_delta and not v.slots and not v.stats)
    bare = draw_bare(variant, 1, manifest.model.hidden, torch.Generator().manual_seed(1), consumer.device)
    views = bare.views
    launch: Callable[[], object] = consumer.bind(bare.case, views)
    launch()
    torch.cuda.synchronize(consumer.device)
    if defect == "freed":
        launch = captured(launch)  # a replay asks nobody whether its memory is still there; a launch would be refused
        views.norm.untyped_storage().resize_(0)
    else:
        launch = consumer.bind(bare.case, replace(views, source=torch.empty_like(views.source)))
    launch()
    torch.cuda.synchronize(consumer.device)
    print(f"planted: {defect}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program with `arguments`, or the command line's; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("bundle")
    parser.add_argument("--rows", default="1,3", help="row counts (default: %(default)s)")
    parser.add_argument("--plant", choices=("freed", "unwritten"), help="launch once with this defect instead")
    args = parser.parse_args(arguments)
    rows = parse_rows(args.rows, MAX_ROWS)
    consumer = LoadedConsumer.open(args.bundle)
    return plant(consumer, args.plant) if args.plant else launch_all(consumer, rows)


if __name__ == "__main__":
    sys.exit(main())

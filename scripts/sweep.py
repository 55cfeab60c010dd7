"""Compiles every image that any accepted configuration can need, and proves that each keeps its hard promises.

    python scripts/sweep.py [--arch sm_90 ...] [--hidden 2048,7168] [--sample N] [--shard I/N] [--jobs N] [--count]

What configurations differ in, as far as images go: the hidden size, and which of a fixed set of consumers, sources and
producers there are. So the sweep is over hidden sizes, and for each over all of that set. It compiles; nothing is run
and no bundle is written. A failure is an image that does not compile, spills, uses local memory, or does not leave room
on an SM for as many CTAs as its shape promises. `--sample N` takes N images of each arch at random, the same each time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from attnres_aot.binary.prove import prove_image
from attnres_aot.builder.budgets import budget_for
from attnres_aot.errors import AttnResError
from attnres_aot.kernels.compile import compile_image, launch_constants, prepare_environment
from attnres_aot.spec.arch import parse_buildable_arch
from attnres_aot.spec.params import KERNEL_PARAMS
from attnres_aot.spec.toolkits import DEFAULT_FLAVOUR
from attnres_aot.spec.variants import (
    ELEMS_PER_CTA,
    HIDDEN_STEP,
    MAX_BLOCKS,
    MAX_CLUSTER,
    MAX_SLOTS,
    ConsumerKey,
    ImageSpec,
    PublishSpec,
    StatisticsSpec,
    Variant,
    choices_for,
    kernel_symbol,
)

ARCHES = ("sm_90", "sm_100", "sm_120")
"""Architectures that are swept unless others are asked for."""
HIDDEN = tuple(range(HIDDEN_STEP, MAX_CLUSTER * ELEMS_PER_CTA + 1, HIDDEN_STEP))
"""Hidden sizes that the configuration reader accepts."""
RECYCLE = 200
"""Images after which a worker is replaced, because the compiler leaks thread pools."""


def every_spec(hidden: int) -> Iterator[ImageSpec]:
    """Yields every image that a model of this hidden size can need, each once."""
    keys = [ConsumerKey(nb=0, has_delta=False)]
    for nb in range(1, MAX_BLOCKS + 1):
        keys += [ConsumerKey(nb=nb, has_delta=has_delta) for has_delta in (False, True)]
        keys.append(ConsumerKey(nb=nb, has_delta=True, final=True))
    specs: dict[ImageSpec, None] = {}
    for key in keys:
        for slots in range(MAX_SLOTS + 1 if key.nb else 1):  # what comes before nb 0 publishes into no mailbox
            for stats in (False, True) if key.nb else (False,):
                for choice in choices_for(Variant(key=key, slots=slots, stats=stats), hidden):
                    specs.setdefault(choice.spec)
    yield from specs
    yield from (StatisticsSpec(hidden=hidden, nb=nb) for nb in range(1, MAX_BLOCKS + 1))
    yield PublishSpec(hidden=hidden)


def start(arch: str) -> None:
    """Readies a worker for one arch; what the compiler prints is not wanted."""
    prepare_environment(parse_buildable_arch(arch))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


def check(job: tuple[str, ImageSpec]) -> tuple[str, int, str]:
    """Compiles and proves one image; returns its name, registers, and what is wrong."""
    name, spec = job
    arch = parse_buildable_arch(name)
    launch = launch_constants(spec)
    try:
        facts = prove_image(
            compile_image(spec, arch).cubin,
            symbol=kernel_symbol(str(spec)),
            arch=arch,
            flavour=DEFAULT_FLAVOUR,
            params=KERNEL_PARAMS[spec.kernel],
            launch=launch,
            budget=budget_for(launch),
        )
    except AttnResError as error:
        return str(spec), 0, str(error)
    except Exception as error:  # noqa: BLE001 - whatever the compiler raises is a failure of this image
        return str(spec), 0, f"{type(error).__name__}: {str(error)[:300]}"
    return str(spec), facts.registers, ""


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", action="append", help=f"default: {', '.join(ARCHES)}")
    parser.add_argument("--hidden", help="hidden sizes, with commas between (default: all that are accepted)")
    parser.add_argument("--blocks", type=int, default=MAX_BLOCKS, help="most saved blocks (default: %(default)s)")
    parser.add_argument("--sample", type=int, metavar="N", help="only N images of each arch")
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="only the I-th of N parts (default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="worker processes (default: %(default)s)")
    parser.add_argument("--count", action="store_true", help="say how many images there are, and stop")
    options = parser.parse_args()
    sizes = [int(size) for size in options.hidden.split(",")] if options.hidden else HIDDEN
    part, parts = map(int, options.shard.split("/"))
    specs = [spec for hidden in sizes for spec in every_spec(hidden) if (getattr(spec, "nb", 0) or 0) <= options.blocks]
    if options.sample is not None:
        specs = random.Random(1).sample(specs, min(options.sample, len(specs)))  # noqa: S311 - a sample, no secret
    specs = specs[part - 1 :: parts]
    archs = options.arch or ARCHES
    print(f"{len(specs)} images for each of {', '.join(archs)}: {len(specs) * len(archs)}", flush=True)
    if options.count:
        return 0
    failed, begin = 0, time.monotonic()
    context = multiprocessing.get_context("spawn")
    for arch in archs:
        most = 0
        with context.Pool(options.jobs, start, (arch,), maxtasksperchild=RECYCLE) as pool:
            results = pool.imap_unordered(check, [(arch, spec) for spec in specs], chunksize=4)
            for number, (name, registers, problem) in enumerate(results, 1):
                most = max(most, registers)
                if problem:
                    failed += 1
                    print(f"FAILED {arch} {name}: {problem}", flush=True)
                if number % 500 == 0:
                    print(f"  {arch}: {number} of {len(specs)}, {time.monotonic() - begin:.0f} s", flush=True)
        print(f"{arch}: {len(specs)} images, at most {most} registers", flush=True)
    print(f"{len(specs) * len(archs)} images in {time.monotonic() - begin:.0f} s, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

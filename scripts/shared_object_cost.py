#!/usr/bin/env python3
r"""Measures what launching through a shared object costs the host, beside the bare driver call and the loader.

    scripts/shared_object_cost.py LIBRARY.so [--program PROGRAM] [--bundle FOLDER]

LIBRARY is the form of a bundle for this machine's kind and GPU. PROGRAM is scripts/shared_object_cost.cpp, compiled:

    T=$(python3 -c "import os, tvm_ffi; print(os.path.dirname(tvm_ffi.__file__))")
    g++ -std=c++17 -O2 scripts/shared_object_cost.cpp -I$T/include -L$T/lib -Wl,-rpath,$T/lib -ltvm_ffi -ldl \
        -lpthread -o PROGRAM

With `--bundle`, `run` of the Python loader is measured in the same rounds. Exits with 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import attnres_aot
from attnres_aot.bench.bare import Shape, bare_launch, pack_parameters
from attnres_aot.runtime.cuda.driver import open_driver
from attnres_aot.runtime.cuda.modules import LoadedKernel
from attnres_aot.runtime.shared.library import open_library
from attnres_aot.spec.variants import parse_variant

VARIANT = parse_variant("nb8-delta")
EPS, HIDDEN = 1e-5, 7168
ROUNDS, LAUNCHES = 15, 400
THREADS, TOTAL = 8, 1_000_000
MOST_IN_CPP, MOST_IN_PYTHON = 1.15, 1.4
"""What `run` may cost, as a multiple of the bare call of the same language."""


def main() -> int:
    """Runs all measurements and prints them, one JSON object a line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("library", type=Path)
    parser.add_argument("--program", type=Path)
    parser.add_argument("--bundle", type=Path)
    given = parser.parse_args()
    loaded = attnres_aot.load(given.library)
    kernel = loaded.kernel(VARIANT, 1)
    missed = []
    python = measure_python(given.library, given.bundle, loaded, kernel)
    print(json.dumps({"python": python}), flush=True)
    if min(python["run"], python["function"]) > MOST_IN_PYTHON * python["bare"]:
        missed.append(f"Python: {min(python['run'], python['function']) / python['bare']:.2f} x the bare call")
    if given.program is not None:
        image = kernel.image
        numbers = map(str, (ROUNDS, LAUNCHES, THREADS, TOTAL, image.block_threads))
        command = [str(given.program), str(given.library), image.name, *numbers]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        print(done.stdout.strip() or done.stderr.strip(), flush=True)
        found = json.loads(done.stdout) if done.returncode == 0 else {"bare_us": 1.0, "run_us": float("inf")}
        if found["run_us"] > MOST_IN_CPP * found["bare_us"]:
            missed.append(f"C++: {found['run_us'] / found['bare_us']:.2f} x the bare call")
    print(json.dumps({"threads": measure_threads(given.library)}), flush=True)
    print("; ".join(missed) or "all bars are kept")
    return 1 if missed else 0


def measure_python(library: Path, bundle: Path | None, loaded: Any, kernel: LoadedKernel) -> dict[str, float]:
    """Returns microseconds of one launch, by way of launching; the ways take turns."""
    weights, operands = make_tensors(HIDDEN)
    module = open_library(library)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        consumer = prepare(module, weights)
        function, planned = module.method(consumer, "run"), consumer.plan_run(*operands)
        addresses = [tensor.data_ptr() for tensor in operands]
        ways: dict[str, Callable[[], object]] = {
            "bare": bare(kernel, weights, operands, stream.cuda_stream),
            "run": lambda: consumer.run(*operands),
            "function": lambda: function(*operands),
            "planned": lambda: planned(stream.cuda_stream, *addresses),
        }
        through = attnres_aot.PreparedAttnRes(weights, VARIANT.key, EPS, loaded)
        ways["loader, this library"] = lambda: through.run(*operands)
        if bundle is not None:
            prepared = attnres_aot.PreparedAttnRes(weights, VARIANT.key, EPS, attnres_aot.load(bundle))
            ways["loader, cubins"] = lambda: prepared.run(*operands)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, call in ways.items():
                times[name].append(time_us(call))
                torch.cuda.synchronize()
    return {name: round(statistics.median(each), 3) for name, each in times.items()}


def measure_threads(library: Path) -> dict[str, float]:
    """Launches from threads on two streams; returns the time and what memory grew by."""
    module = open_library(library)
    streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
    weights, operands = make_tensors(HIDDEN)
    consumer = prepare(module, weights)

    def work(number: int) -> None:
        run = module.method(consumer, "run")
        with torch.cuda.stream(streams[number % 2]):
            for _ in range(TOTAL // THREADS):
                run(*operands)

    def everything() -> None:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.cuda.synchronize()

    work(0)
    before, free, start = resident_kb(), torch.cuda.mem_get_info()[0], time.perf_counter()
    everything()
    return {
        "seconds": round(time.perf_counter() - start, 2),
        "host_growth_kb": resident_kb() - before,
        "device_growth_bytes": free - torch.cuda.mem_get_info()[0],
    }


def prepare(module: Any, weights: tuple[torch.Tensor, ...]) -> Any:
    """Prepares the consumer by the library's own functions."""
    key = VARIANT.key
    return module.prepare_consumer(*weights, key.nb, key.has_delta, key.write, key.final, EPS, EPS)


def make_tensors(hidden: int) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Returns weights, and the operands of one row."""

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.bfloat16, device="cuda")

    weights = (ones(hidden), ones(hidden), ones(hidden))
    return weights, (ones(1, hidden), ones(1, hidden), ones(1, VARIANT.key.nb, hidden), ones(1, hidden))


def bare(
    kernel: LoadedKernel, weights: tuple[torch.Tensor, ...], operands: tuple[torch.Tensor, ...], stream: int
) -> Callable[[], object]:
    """Returns the driver's call alone, through ctypes."""
    names = ("norm", "query", "out_norm", "source", "prefix", "blocks", "out")
    values: dict[str, int | float] = {
        name: tensor.data_ptr() for name, tensor in zip(names, (*weights, *operands), strict=True)
    }
    vectors = operands[0].shape[1] // 8
    values |= {"write": -1, "rows": 1, "eps": EPS, "out_eps": EPS, "blocks_block_stride": vectors}
    image = kernel.image
    shape = Shape(grid=image.cluster, threads=image.block_threads, cluster=image.cluster)
    return bare_launch(open_driver(), kernel.function, shape, stream, pack_parameters(kernel, values), operands)


def time_us(call: Callable[[], object]) -> float:
    """Returns the time of one call in a tight loop."""
    start = time.perf_counter()
    for _ in range(LAUNCHES):
        call()
    return (time.perf_counter() - start) / LAUNCHES * 1e6


def resident_kb() -> int:
    """Returns the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4


if __name__ == "__main__":
    sys.exit(main())

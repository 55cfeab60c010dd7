#!/usr/bin/env python3
"""Measures what the loader costs on the host: launches, cold start, endurance.

    python scripts/host_cost.py BUNDLE [--json] [--cold-start] [--endurance LAUNCHES]

Launches are timed against the bare `cuLaunchKernelEx` of the same kernel through ctypes with everything prebuilt, in
the same run. `--driver FILE` uses another driver library, such as the stand-in that the unit tests build, with tensors
on the CPU: the times then show the Python part alone.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import attnres_aot
from attnres_aot.errors import VariantMissError
from attnres_aot.runtime import api, driver, guards
from attnres_aot.runtime.torch_device import TorchDevice

CALLS, BATCHES = 100, 60
ROWS, BLOCKS, EPS = 4, 8, 1e-5
SETS = 8

COLD_START = """
import json, sys, time
sys.path.insert(0, sys.argv[2])
import torch
device = torch.device("cuda", 0)
bf16 = lambda *shape: torch.zeros(shape, dtype=torch.bfloat16, device=device)
hidden, layers, size = (int(a) for a in sys.argv[3:6])
weights, mailbox = tuple(bf16(hidden) for _ in range(3)), bf16(8, 64, hidden)
mailbox.view(torch.int32).fill_(-0x80000000)
mixture, scal = torch.zeros(64, hidden, device=device), torch.zeros(64, 2, device=device)
operands = bf16(4, hidden), bf16(4, hidden), bf16(4, 9, hidden), bf16(4, hidden)
torch.cuda.synchronize()
marks = [time.perf_counter()]
import attnres_aot
marks.append(time.perf_counter())
attnres_aot.PreparedAttnRes, attnres_aot.load
marks.append(time.perf_counter())
bundle = attnres_aot.load(sys.argv[1])
marks.append(time.perf_counter())
keys = [
    attnres_aot.ConsumerKey(nb=-(-i // size), has_delta=i > 0, write=i // size if i % size == 0 else None)
    for i in range(layers)
] + [attnres_aot.ConsumerKey(nb=-(-layers // size), has_delta=True, final=True)]
rows, bound = bundle.statistics_rows(8, 1), []
for index, key in enumerate(keys):
    prepared = attnres_aot.PreparedAttnRes(weights, key, 1e-5, bundle).bind_aux()
    if index > 1:
        prepared.bind_ring(mailbox)
    if key.nb and rows:
        prepared.bind_statistics(mixture, scal, rows)
    bound.append(prepared)
marks.append(time.perf_counter())
bound[0].run(*operands)
torch.cuda.synchronize()
marks.append(time.perf_counter())
parts = [1e3 * (b - a) for a, b in zip(marks, marks[1:])]
print(json.dumps(dict(zip(["import", "import_loader", "load", "bind", "first_launch"], parts), total=sum(parts))))
"""


class Bench:
    """Operands and prepared consumers on one device."""

    def __init__(self, bundle: Any) -> None:
        self.bundle, self.device = bundle, bundle.device.device
        hidden = bundle.hidden
        self.weights = tuple(self.bf16(hidden) for _ in range(3))
        self.sets = [
            (self.bf16(ROWS, hidden), self.bf16(ROWS, hidden), self.bf16(ROWS, BLOCKS, hidden), self.bf16(ROWS, hidden))
            for _ in range(SETS)
        ]
        record = next(v for v in bundle.bundle.manifest.variants if v.has_delta and not v.slots and v.write is None)
        self.key = attnres_aot.ConsumerKey(nb=record.nb, has_delta=True, final=record.final)

    def bf16(self, *shape: int) -> torch.Tensor:
        """Returns a bf16 tensor of zeros on the device."""
        return torch.zeros(shape, dtype=torch.bfloat16, device=self.device)

    def prepare(self, **options: Any) -> attnres_aot.PreparedAttnRes:
        """Returns the consumer that is measured."""
        return attnres_aot.PreparedAttnRes(self.weights, self.key, EPS, self.bundle, **options)

    def wait(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def batch(self, call: Callable[[], object]) -> float:
        """Returns the median over batches of the time of one call, in microseconds."""
        call()
        times = []
        for _ in range(BATCHES):
            self.wait()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            times.append((time.perf_counter() - start) / CALLS)
        self.wait()
        return statistics.median(times) * 1e6

    def single(self, before: Callable[[], object], call: Callable[[], object]) -> float:
        """Returns the median time of single calls, in microseconds, each made ready by `before`."""
        times = []
        for index in range(CALLS * BATCHES // 4):
            before()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
            if index % CALLS == 0:
                self.wait()
        self.wait()
        return statistics.median(times) * 1e6


def launches(bench: Bench) -> dict[str, float]:
    """Times every way of launching, in microseconds."""
    first = bench.sets[0]
    checked, unchecked = bench.prepare(), bench.prepare(checks=False)
    checked.run(*first)
    bare: Callable[[], int] = checked._ordinary.plan.idle[0].call  # noqa: SLF001 - what a launch ends in
    turn = iter(range(1 << 62))
    result = {
        "bare": bench.batch(bare),
        "run, checks on": bench.batch(lambda_free(checked.run, first)),
        "run, checks off": bench.batch(lambda_free(unchecked.run, first)),
        "run, checks on, other operands each time": bench.batch(lambda: checked.run(*bench.sets[next(turn) % SETS])),
        "loop overhead of the line above": bench.batch(lambda: bench.sets[next(turn) % SETS]),
    }
    try:
        result |= ring_launches(bench)
    except VariantMissError:
        result["run_ring"] = float("nan")
    native, guards.native_guards_work = guards.native_guards_work, lambda: False  # type: ignore[assignment]
    plain = bench.prepare()
    result["run, checks on, without torch's native guards"] = bench.batch(lambda_free(plain.run, first))
    guards.native_guards_work = native
    result["bare, again"] = bench.batch(bare)
    return result


def lambda_free(function: Callable[..., object], arguments: tuple[Any, ...]) -> Callable[[], object]:
    """Binds arguments without a Python frame, so that only the function is timed."""
    from functools import partial

    return partial(function, *arguments)


def ring_launches(bench: Bench) -> dict[str, float]:
    """Times ring launches one by one, since each needs a full mailbox."""
    mailbox = bench.bf16(1, 64, bench.bundle.hidden)
    operands = bench.sets[0][1:]
    checked, unchecked = bench.prepare().bind_ring(mailbox), bench.prepare(checks=False).bind_ring(mailbox)
    mailbox.zero_()
    checked.run_ring(*operands)
    bare = checked._ring.plan.idle[0].call  # noqa: SLF001 - what a launch ends in
    return {
        "bare, one by one": bench.single(mailbox.zero_, bare),
        "run_ring, checks on, one by one": bench.single(mailbox.zero_, lambda_free(checked.run_ring, operands)),
        "run_ring, checks off, one by one": bench.single(mailbox.zero_, lambda_free(unchecked.run_ring, operands)),
    }


def endurance(bench: Bench, total: int) -> dict[str, float]:
    """Launches from 8 threads on 2 streams; returns the time and the growth of host and device memory."""
    prepared = bench.prepare()
    cuda = bench.device.type == "cuda"
    streams = [torch.cuda.Stream(bench.device) for _ in range(2)] if cuda else [None, None]  # type: ignore[no-untyped-call]
    errors: list[BaseException] = []

    def work(number: int, count: int) -> None:
        try:
            with torch.cuda.stream(streams[number % 2]):
                for _ in range(count):
                    prepared.run(*bench.sets[number % SETS])
        except BaseException as error:  # noqa: BLE001 - reported below
            errors.append(error)

    def everything(count: int) -> None:
        threads = [threading.Thread(target=work, args=(number, count)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        bench.wait()

    everything(total // 80)
    host, device = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, used_memory(cuda)
    start = time.perf_counter()
    everything(total // 8)
    seconds = time.perf_counter() - start
    if errors:
        raise errors[0]
    return {
        "launches": total,
        "seconds": seconds,
        "host_growth_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - host,
        "device_growth_bytes": used_memory(cuda) - device,
    }


def used_memory(cuda: bool) -> int:
    """Returns the device memory in use, in bytes."""
    if not cuda:
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def cold_start(path: str, bundle: Any) -> dict[str, float]:
    """Times a fresh process that has torch and a CUDA context already, in milliseconds; median of 5 after 1."""
    model = bundle.bundle.manifest.model
    command = [sys.executable, "-c", COLD_START, path, str(Path(__file__).resolve().parents[1])]
    command += [str(model.hidden), str(model.layers), str(model.block_size)]
    runs = [json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(6)]
    return {name: statistics.median(run[name] for run in runs[1:]) for name in runs[0]}


def stand_in(library: str) -> None:
    """Uses another driver library, with the CPU in place of its device."""
    import ctypes

    lib = ctypes.CDLL(library)
    lib.stub_reset()
    lib.stub_make_current(0)
    lib.stub_record(0)
    driver.LIBRARY_NAME = library
    device = TorchDevice(
        device=torch.device("cpu"), ordinal=0, tensor_index=-1, stream={0: 0}.__getitem__, current=None
    )
    vars(api)["pick_device"] = lambda _: device


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="Measures what the loader costs on the host.")
    parser.add_argument("bundle")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--endurance", type=int, default=0, metavar="LAUNCHES", help="also launch so often, 8 threads")
    parser.add_argument(
        "--cold-start", action="store_true", help="also time fresh processes; BUNDLE must be a whole one"
    )
    parser.add_argument("--driver", help="another driver library; tensors are on the CPU")
    args = parser.parse_args()
    if args.driver:
        stand_in(args.driver)
    bundle = attnres_aot.load(args.bundle)
    bench = Bench(bundle)
    result: dict[str, Any] = {"launch_us": launches(bench)}
    if args.endurance:
        result["endurance"] = endurance(bench, args.endurance)
    if args.cold_start:
        result["cold_start_ms"] = cold_start(args.bundle, bundle)
    if args.json:
        print(json.dumps(result))
        return 0
    for section, values in result.items():
        print(section)
        for name, value in values.items():
            ratio = f"  {value / result['launch_us']['bare']:5.2f} x bare" if section == "launch_us" else ""
            print(f"  {name:<48}{value:12.2f}{ratio}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

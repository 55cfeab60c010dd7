"""Cold start: what fresh processes pay for the package until their first launch, as medians over processes."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attnres_aot
from attnres_aot.bench.results import ColdStart
from attnres_aot.errors import DriverError

LIMIT_MS = 60.0
"""What import, load, binding everything and a first launch should not exceed together."""
IMPORT_LIMIT_MS = 20.0
"""What `import attnres_aot` should not exceed."""

_SECONDS = 180.0
_PACKAGE = Path(attnres_aot.__file__).parent
_CHILD = Path(__file__).with_name("cold_child.py")
_RUN_CHILD = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
IMPORT_ALONE = """
import sys, time
before = set(sys.modules)
start = time.perf_counter()
import attnres_aot
took = time.perf_counter() - start
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
foreign = sorted(loaded - sys.stdlib_module_names - {"attnres_aot"})
import json
print(json.dumps({"ms": took * 1e3, "foreign": foreign}))
"""
"""A program that says what importing the package costs a bare interpreter."""


def measure_cold_start(bundle: Path, device: str, processes: int) -> ColdStart:
    """Times fresh processes; one more before them writes bytecode, as installing does, and is not counted.

    Args:
      bundle: folder of the bundle.
      device: CUDA device, e.g. `cuda:0`.
      processes: how many to time.

    Raises:
      DriverError: a process failed; carries the end of what it said.
    """
    alone = [run_program(["-c", IMPORT_ALONE]) for _ in range(2 * processes + 1)][1:]
    child = ["-c", _RUN_CHILD, str(_CHILD), str(bundle), device]
    starts = [run_program(child) for _ in range(processes + 1)][1:]
    return summarise(alone, starts, bytecode=has_bytecode("attnres_aot.runtime.api"))


def summarise(alone: Sequence[dict[str, Any]], starts: Sequence[dict[str, Any]], *, bytecode: bool) -> ColdStart:
    """Returns medians over processes.

    Args:
      alone: what processes that only import the package said.
      starts: what processes that start cold said.
      bytecode: the package's modules had been compiled before.
    """
    names = list(starts[0]["phases_ms"])
    phases = {name: statistics.median(start["phases_ms"][name] for start in starts) for name in names}
    preload = phases.pop("preload")
    totals = [sum(ms for name, ms in start["phases_ms"].items() if name != "preload") for start in starts]
    return ColdStart(
        phases_ms=phases,
        total_ms=statistics.median(totals),
        limit_ms=LIMIT_MS,
        consumers=starts[0]["consumers"],
        preload_ms=preload,
        import_ms=statistics.median(run["ms"] for run in alone),
        import_limit_ms=IMPORT_LIMIT_MS,
        foreign=tuple(sorted({name for run in (*alone, *starts) for name in run["foreign"]})),
        processes=len(starts),
        bytecode=bytecode,
    )


def run_program(arguments: Sequence[str]) -> dict[str, Any]:
    """Runs Python on a program that ends by writing one line of JSON, and returns that.

    Raises:
      DriverError: it failed, or ran for too long.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    paths = [str(_PACKAGE.parent), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise DriverError(f"a fresh process did not start within {_SECONDS:g} s; is the GPU busy?") from error
    if done.returncode:
        raise DriverError(f"a fresh process failed with status {done.returncode}:\n{done.stderr.strip()[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def has_bytecode(module: str) -> bool:
    """Tells whether a module of the package has its compiled form beside it."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.cached is not None and Path(spec.cached).exists()

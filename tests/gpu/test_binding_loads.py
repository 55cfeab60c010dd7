"""Code is on the device once an object is bound: captures without preload, spinning consumers, threads, contexts.

Each check is a process of its own, one at a time, because code that is loaded stays; loading_programs.py holds them.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LIMIT_S = 180


def run_program(consumer, name: str, *arguments: str, **environment: str) -> str:
    """Runs a program on the bundle under test and returns what it printed; it is killed if it takes too long."""
    path = os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, str(HERE / "loading_programs.py"), name, str(consumer.bundle.path), *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment}, capture_output=True, text=True, timeout=LIMIT_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "right: " in done.stdout
    return done.stdout


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@pytest.mark.parametrize("where", ["before", "inside", "thread"])
def test_captures_need_no_preload(mode, where, consumer):
    """Spin budgets, producers and `load` included; with `thread` another thread binds during the capture."""
    run_program(consumer, "capture", mode, where)


@pytest.mark.parametrize("loading", ["LAZY", "EAGER"])
def test_first_launches_beside_a_spinning_consumer(loading, consumer):
    run_program(consumer, "beside", CUDA_MODULE_LOADING=loading, CUDA_DEVICE_MAX_CONNECTIONS="32")


def test_threads_without_a_context(consumer):
    run_program(consumer, "threads")


def test_another_context_is_current(consumer):
    run_program(consumer, "context")


def test_a_child_forked_after_torch_initialised_cuda(consumer):
    run_program(consumer, "fork")

"""Other processes: what importing costs and loads, forks that are refused, spawned workers that are not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import attnres_aot
from attnres_aot.runtime import api

ROOT = Path(__file__).parents[3]


def python(code: str, *arguments: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout


def test_import_loads_nothing_but_the_version():
    code = "import sys, json, typing; before = set(sys.modules); import attnres_aot; print(*set(sys.modules) - before)"
    assert set(python(code).split()) - {"__future__"} == {"attnres_aot", "attnres_aot._version"}


def test_loader_loads_only_the_standard_library_and_torch():
    code = (
        "import sys, json, torch\n"
        "before = set(sys.modules)\n"
        "import attnres_aot\n"
        "for name in attnres_aot.__all__: getattr(attnres_aot, name)\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(json.dumps(sorted(new - set(sys.stdlib_module_names))))\n"
    )
    assert set(json.loads(python(code))) - {"torch"} == {"attnres_aot"}


def test_every_public_name_is_there_and_documented():
    for name in attnres_aot.__all__:
        if name != "__version__":
            assert getattr(attnres_aot, name).__doc__
    assert set(attnres_aot.__all__) - {"__version__"} == set(attnres_aot._HOMES)
    assert set(attnres_aot.__all__) <= set(dir(attnres_aot))
    with pytest.raises(AttributeError, match=r"has no attribute 'lod'"):
        attnres_aot.lod  # noqa: B018


def forked(work) -> str:
    """Runs `work` in a forked child and returns the text of what it raised."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work()
            text = "nothing was raised"
        except BaseException as error:  # noqa: BLE001 - reported to the parent
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as pipe:
        return pipe.read()


def test_fork_after_load_is_refused_in_the_child_only(stub, bundles, bundle, weights, key, operands):
    prepared, given = attnres_aot.PreparedAttnRes(weights, key, 1e-5, bundle), operands()
    prepared.run(*given.ordinary)
    path = bundles.write(["nb2"], name="other")
    refusal = "DriverError: this process was forked after its parent had initialised CUDA, and CUDA does not survive"
    assert forked(lambda: prepared.run(*given.ordinary)).startswith(refusal)
    assert forked(lambda: api.load(path)).startswith(refusal)
    assert forked(lambda: attnres_aot.preload(bundle)).startswith(refusal)
    prepared.run(*given.ordinary)
    assert stub.launch_count() == 2


def test_fork_while_another_thread_opens_the_driver_does_not_hang(stub, bundle):
    from attnres_aot.runtime.cuda import driver

    held, done = threading.Event(), threading.Event()

    def hold():
        with driver._process.lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        assert forked(lambda: attnres_aot.preload(bundle)).startswith("DriverError: this process was forked")
    finally:
        done.set()
        thread.join()


def test_fork_before_load_is_fine(stub, bundles, weights, key, operands):
    path, given = bundles.write(["nb2-delta"]), operands()
    from attnres_aot.runtime.cuda import driver

    assert driver._process.driver is None

    def work():
        attnres_aot.PreparedAttnRes(weights, key, 1e-5, api.load(path)).run(*given.ordinary)

    assert forked(work) == "nothing was raised"


def test_spawned_worker_loads_for_itself(stub_library, stub, bundle):
    code = (
        "import ctypes, sys\n"
        "from attnres_aot.runtime.cuda import driver\n"
        "driver.LIBRARY_NAME = sys.argv[1]\n"
        "ctypes.CDLL(sys.argv[1]).stub_reset()\n"
        "print(driver.open_driver().capability(0))\n"
    )
    assert python(code, str(stub_library)).strip() == "(9, 0)"

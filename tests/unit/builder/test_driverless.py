"""Builds beside a driver: real compilations of which none loads it, and whose bytes it does not change."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnres_aot.spec.toolkits import FLAVOURS
from tests.support.children import PATIENCE, child

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "tests" / "stub_cuda" / "version_only.cpp"
CONFIG = """\
name: small
model: {hidden_size: 1024, layers: 2, block_size: 1, leading_dense_layers: 0}
mailbox: {capacity: 4, slots: [2]}
deployments:
  - {tp: 2, dcp: 1, attn_stats: "", attn_stats_blocks: ""}
"""
DRIVERS = {"11.8": 11080, "12.4": 12040, "13.0": 13000}
ODD = "my \"odd\" 'dir'\twith\\all"


def stand_in(folder: Path, serves: int) -> Path:
    """Compiles a driver library of a CUDA version; returns its folder."""
    folder.mkdir(parents=True)
    command = ["g++", "-std=c++17", "-shared", "-fPIC", f"-DSERVES={serves}", "-o", folder / "libcuda.so.1", SOURCE]
    subprocess.run(command, check=True, timeout=120)
    (folder / "libcuda.so").symlink_to("libcuda.so.1")
    return folder


def run_build(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "small.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "attnres_aot", "build", "--arch", "sm_90", "--config", "small.yaml"]
    return subprocess.run(
        [*command, "--only", "nb1-delta-write1", "--jobs", "1", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory, files_in) -> dict[str, bytes]:
    """The bundle as it is built without a driver."""
    folder = tmp_path_factory.mktemp("reference")
    done = run_build(folder)
    assert done.returncode == 0, done.stderr
    files = files_in(folder / "artifacts" / "small-sm_90")
    assert sorted(files) == ["h1024-nb1-delta-wide.cubin", "h1024-nb1-delta.cubin", "manifest.json"]
    return files


@pytest.fixture(scope="session")
def files_in():
    return lambda folder: {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("serves", DRIVERS.values(), ids=DRIVERS)
def test_a_driver_is_not_loaded_and_changes_no_byte(serves, tmp_path, reference, files_in):
    driver, loaded = stand_in(tmp_path / "driver", serves), tmp_path / "loaded"
    environment = {"LD_LIBRARY_PATH": str(driver), "STAND_IN_DRIVER_LOADED": str(loaded)}
    done = run_build(tmp_path / "work", **environment)
    assert done.returncode == 0, done.stderr
    assert not loaded.exists()
    assert files_in(tmp_path / "work" / "artifacts" / "small-sm_90") == reference


def test_the_stand_in_is_a_driver_and_would_be_seen(tmp_path):
    """Without this the test above would pass whatever a build did."""
    driver, loaded = stand_in(tmp_path / "driver", 12040), tmp_path / "loaded"
    program = "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuDriverGetVersion(ctypes.byref(ctypes.c_int())))"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver), "STAND_IN_DRIVER_LOADED": str(loaded)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "0\n"
    assert loaded.read_text() == "loaded\n"


def test_a_folder_of_any_name_takes_a_real_bundle_and_all_temporary_files(tmp_path, reference, files_in):
    system = tmp_path / "system-tmp"
    system.mkdir()
    done = run_build(tmp_path / "work", "--out", ODD, TMPDIR=str(system))
    assert done.returncode == 0, done.stderr
    assert files_in(tmp_path / "work" / ODD / "small-sm_90") == reference
    assert [path.name for path in (tmp_path / "work" / ODD).iterdir()] == ["small-sm_90"]
    assert list(system.iterdir()) == []


PROGRAM = """
import ctypes, json, sys
from pathlib import Path
from attnres_aot.kernels.driverless import stand_in_for_driver
original = ctypes.CDLL
stand_in_for_driver("cu12")
stand_in_for_driver(sys.argv[1])
found = []
for load in (ctypes.CDLL, ctypes.cdll.LoadLibrary):
    for name in ("libcuda.so.1", "libcuda.so", "/usr/lib/libcuda.so.1", b"libcuda.so.1", Path("/x/libcuda.so")):
        version = ctypes.c_int()
        library = load(name)
        found.append([library.cuDriverGetVersion(ctypes.byref(version)), version.value])
        pointed = ctypes.c_int()
        library.cuDriverGetVersion(ctypes.pointer(pointed))
        found.append([0, pointed.value])
others = [ctypes.CDLL(None).getpid(), ctypes.cdll.LoadLibrary("libc.so.6").getpid()]
print(json.dumps([found, others, isinstance(ctypes.CDLL(None), original)]))
"""


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_who_asks_for_the_driver_gets_one_of_the_flavours_version(flavour):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM, flavour]
    with child(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        out, _ = process.communicate(timeout=PATIENCE)
    version = FLAVOURS[flavour][0] * 1000
    assert out.strip() == f"[{[[0, version]] * 20}, [{process.pid}, {process.pid}], true]"


def test_this_process_keeps_its_driver():
    assert not hasattr(ctypes.CDLL, "_real")

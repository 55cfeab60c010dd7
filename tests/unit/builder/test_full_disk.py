"""A disk that is full while compiling: told as that, and not as a fault of the compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnres_aot.bundle import writer as bundle_writer
from attnres_aot.errors import BundleError
from attnres_aot.kernels import compile as compiler

ROOT = Path(__file__).resolve().parents[3]
CUBINS = ROOT / "tests" / "data" / "cubins"
CONFIG = """\
name: small
model: {hidden_size: 1024, layers: 2, block_size: 1, leading_dense_layers: 0}
mailbox: {capacity: 4, slots: [2]}
deployments:
  - {tp: 2, dcp: 1, attn_stats: "", attn_stats_blocks: ""}
"""
SMALL_DISK = """
mkdir out && mount -t tmpfs -o size=$1 tmpfs out && cd "$2" || exit 99
exec "$3" -m attnres_aot build --arch sm_90 --config small.yaml --only nb1-delta-write1 --jobs 1 --out out
"""


@pytest.mark.parametrize("size", ["4k", "48k"])
def test_a_real_disk_that_is_full_is_named(size, tmp_path):
    (tmp_path / "small.yaml").write_text(CONFIG)
    namespaces = ["--mount"] if os.geteuid() == 0 else ["--user", "--map-root-user", "--mount"]
    command = ["unshare", *namespaces, "sh", "-c", SMALL_DISK, "sh", size, str(tmp_path), sys.executable]
    try:
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if done.returncode == 99 or done.stderr.startswith("unshare"):
        pytest.skip(f"no tmpfs here: {done.stderr.strip()}")
    assert done.returncode == 1
    assert f"'{tmp_path}/out/" in done.stderr
    assert "No space left on device; make room there, or choose another disk with --out" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_cut_of_a_cubin_is_noticed():
    data = (CUBINS / "consumer.sm_100.cu12.cubin").read_bytes()
    assert compiler._is_whole(data)
    assert not any(compiler._is_whole(data[:size]) for size in range(0, len(data), 97))
    assert not compiler._is_whole(data[:-1])
    assert not compiler._is_whole(b"\x7fELX" + data[4:])


def test_a_cut_cubin_on_a_disk_with_room_is_the_compilers_fault(tmp_path):
    assert compiler._full_disk(str(tmp_path)) is None


def test_a_disk_that_fills_up_while_the_bundle_is_written_is_told_with_what_helps(tiny, monkeypatch, tmp_path):
    def full(path, data):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(bundle_writer, "write_flushed", full)
    with pytest.raises(BundleError, match=r"No space left on device; make room there, or change --out"):
        tiny()
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".tiny-sm_90.work"]

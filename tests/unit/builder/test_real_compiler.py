"""Builds with the real compiler: reproducible bytes, nothing heavy in the parent, and a quick unchanged build."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnres_aot.verify.bundle_check import verify_bundle

CONFIG = """\
name: small
model: {hidden_size: 1024, layers: 2, block_size: 1, leading_dense_layers: 0}
mailbox: {capacity: 4, slots: [2]}
variants: {before_mlp: false, aux: false}
deployments:
  - {tp: 2, dcp: 1, attn_stats: "1-4:1", attn_stats_blocks: "1:1"}
"""

OTHER_MODELS = {
    "odd-cluster": """\
name: other
model: {hidden_size: 5120, layers: 10, block_size: 4, leading_dense_layers: 3}
mailbox: {capacity: 7, slots: [3]}
deployments:
  - {tp: 2, dcp: 2, attn_stats: "7:1", attn_stats_blocks: "3:1"}
""",
    "widest": """\
name: other
model: {hidden_size: 8192, layers: 61, block_size: 8, leading_dense_layers: 0}
mailbox: {capacity: 128, slots: [tp]}
deployments:
  - {tp: 12, dcp: 4, attn_stats: "1-128:1", attn_stats_blocks: "1-8:1"}
""",
}

PROGRAM = """
import json, sys, time
start = time.process_time()
from attnres_aot.cli.entry import main
status = main(sys.argv[1:])
heavy = ("cutlass", "torch", "numpy", "rich", "cuda")
loaded = sorted(name for name in heavy if name in sys.modules)
print(json.dumps({"status": status, "heavy": loaded, "seconds": time.process_time() - start}))
"""


def run(folder: Path, *arguments: str, seed: str, config: str = CONFIG) -> dict:
    folder.mkdir(exist_ok=True)
    (folder / "small.yaml").write_text(config)
    root = str(Path(__file__).resolve().parents[3])
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": root, "CUTE_DSL_PRINT_IR": "1"}
    command = [sys.executable, "-c", PROGRAM, "build", "--config", "small.yaml", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["status"] == 0, done.stderr
    return result


@pytest.fixture(autouse=True)
def _one_shape() -> None:
    """These bundles have all launch shapes."""


@pytest.fixture(scope="module")
def builds(tmp_path_factory) -> dict[str, Path]:
    """The same bundles, built in different ways."""
    root = tmp_path_factory.mktemp("real")
    for name, jobs, seed in (("one", "1", "1"), ("other", "2", "77")):
        result = run(root / name, "--arch", "sm_90,sm_100a", "--jobs", jobs, "--out", f"{name}-out", seed=seed)
        assert result["heavy"] == []
    return {name: root / name / f"{name}-out" for name in ("one", "other")}


@pytest.mark.parametrize("bundle", ["small-sm_90", "small-sm_100a"])
def test_jobs_folder_and_hash_seed_do_not_change_a_byte(bundle, builds, files_of):
    one, other = files_of(builds["one"] / bundle), files_of(builds["other"] / bundle)
    assert one == other
    assert len(one) > 5


@pytest.mark.parametrize("bundle", ["small-sm_90", "small-sm_100a"])
def test_what_is_built_verifies(bundle, builds):
    assert verify_bundle(builds["one"] / bundle).problems == ()


def test_an_unchanged_build_takes_less_than_a_second_and_loads_nothing_heavy(builds):
    folder = builds["one"].parent
    runs = [run(folder, "--arch", "sm_90", "--out", "one-out", seed=seed) for seed in ("3", "4", "5")]
    assert {tuple(each["heavy"]) for each in runs} == {()}
    assert min(each["seconds"] for each in runs) < 1.0


@pytest.mark.parametrize(("model", "arch"), [("odd-cluster", "sm_90"), ("widest", "sm_100")])
def test_another_model_builds_and_verifies(model, arch, tmp_path):
    """The largest images of each kind; the build itself refuses spills and too many registers."""
    only = [
        f"--only={pattern}"
        for pattern in ("nb0-write0", "nb3-delta-aux-stats", "*-final-ring*-aux", "*-final-ring*-stats")
    ]
    run(tmp_path, "--arch", arch, *only, "--out", "out", seed="1", config=OTHER_MODELS[model])
    found = verify_bundle(tmp_path / "out" / f"other-{arch}")
    assert found.problems == ()
    assert [image.kernel for image in found.manifest.images].count("consumer") == 5

"""`build --format so`: the library in the bundle, what is made again, verification, one library of several archs."""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path

import pytest

from attnres_aot.bundle.manifest import seal
from attnres_aot.bundle.reader import read_bundle
from attnres_aot.bundle.shared_object import read_library
from attnres_aot.cli import build_command
from attnres_aot.cli.entry import main
from attnres_aot.launcher import compilers
from attnres_aot.launcher.compilers import this_host
from attnres_aot.verify.bundle_check import verify_bundle

pytest.importorskip("tvm_ffi", reason="building a shared object needs its headers")
CONFIG = """\
name: tiny
model: {hidden_size: 1024, layers: 2, block_size: 1, leading_dense_layers: 0}
mailbox: {capacity: 4, slots: [1]}
variants: {ring: false, aux: false, stats: false}
deployments:
  - {tp: 2, dcp: 1, attn_stats: "", attn_stats_blocks: ""}
"""
BUNDLE = Path("artifacts/tiny-sm_90")
LIBRARY = f"attnres_tiny_sm_90.{this_host()}.so"


@pytest.fixture
def cli(tmp_path, compiler, trusting, facts, monkeypatch, capfd):
    """Runs `attnres-aot build` and returns (status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(build_command, "gather_facts", lambda flavour: dataclasses.replace(facts, flavour=flavour))
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    Path("tiny.yaml").write_text(CONFIG)

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(["build", "--config", "tiny.yaml", "--jobs", "2", *arguments])
        out, err = capfd.readouterr()
        return status, out, err

    return run


def library_problems(path: Path = BUNDLE) -> list[str]:
    return [problem for problem in verify_bundle(path).problems if problem.startswith(("library", "file"))]


def test_the_library_holds_the_images_and_the_manifest_says_what_it_is(cli):
    status, _, _ = cli("--arch", "sm_90", "--format", "so")
    assert status == 0
    bundle = read_bundle(BUNDLE)
    (record,) = bundle.manifest.libraries
    assert (record.file, record.host, record.size) == (LIBRARY, this_host(), (BUNDLE / LIBRARY).stat().st_size)
    assert record.needed[0] == "libtvm_ffi.so"
    assert "__tvm_ffi_prepare_consumer" in record.exports
    (inside,) = read_library(BUNDLE / LIBRARY)
    assert inside.files == bundle.files
    assert inside.manifest == dataclasses.replace(bundle.manifest, libraries=())
    assert library_problems() == []


def test_nothing_is_made_again_that_is_there(cli):
    cli("--arch", "sm_90", "--format", "both")
    before = {path.name: (path.stat().st_ino, path.read_bytes()) for path in BUNDLE.iterdir()}
    _, out, _ = cli("--arch", "sm_90", "--format", "so")
    assert "unchanged" in out
    assert before == {path.name: (path.stat().st_ino, path.read_bytes()) for path in BUNDLE.iterdir()}
    (BUNDLE / LIBRARY).write_bytes((BUNDLE / LIBRARY).read_bytes() + b"\0")
    _, out, _ = cli("--arch", "sm_90", "--format", "so")
    assert "0 compiled, 5 reused" in out
    assert (BUNDLE / LIBRARY).read_bytes() == before[LIBRARY][1]


def test_a_bundle_without_libraries_is_what_it_was(cli):
    cli("--arch", "sm_90")
    manifest = (BUNDLE / "manifest.json").read_bytes()
    cli("--arch", "sm_90", "--format", "so")
    assert (BUNDLE / LIBRARY).exists()
    cli("--arch", "sm_90")
    assert not (BUNDLE / LIBRARY).exists()
    assert (BUNDLE / "manifest.json").read_bytes() == manifest


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda record: record.update(glibc="2.5"), "glibc: the manifest says 2.5, the library"),
        (lambda record: record.update(needed=["libc.so.6"]), "needed: the manifest says"),
        (lambda record: record.update(exports=[]), "exports: the manifest says ()"),
        (lambda record: record.update(size=5), "bytes, but the manifest says 5"),
        (lambda record: record.update(sha256="0" * 64), "sha256 is "),
    ],
)
def test_a_record_that_lies_is_found(cli, change, says):
    cli("--arch", "sm_90", "--format", "so")
    raw = json.loads((BUNDLE / "manifest.json").read_bytes())
    change(raw["libraries"][0])
    (BUNDLE / "manifest.json").write_bytes(seal(raw))
    assert any(says in problem for problem in library_problems()), library_problems()


def test_a_library_of_other_images_is_found(cli):
    cli("--arch", "sm_90", "--format", "so")
    data = bytearray((BUNDLE / LIBRARY).read_bytes())
    image = read_bundle(BUNDLE).files["h1024-nb1.cubin"]
    data[data.index(image) + len(image) // 2] ^= 1
    (BUNDLE / LIBRARY).write_bytes(data)
    problems = library_problems()
    assert any("sha256 is" in problem for problem in problems)
    assert any("changed after it was built" in problem for problem in problems)
    (BUNDLE / LIBRARY).unlink()
    assert any("missing" in problem for problem in library_problems())


def test_one_library_of_several_archs(cli):
    status, out, _ = cli("--arch", "sm_90,sm_100", "--format", "so", "--fat")
    path = Path(f"artifacts/attnres_tiny_sm_90_sm_100.{this_host()}.so")
    assert status == 0
    assert f"{path}: sm_90, sm_100, " in out
    bundles = read_library(path)
    assert [bundle.manifest.arch.proven for bundle in bundles] == ["sm_90", "sm_100"]
    assert [bundle.files for bundle in bundles] == [
        read_bundle(f"artifacts/tiny-{arch}").files for arch in ("sm_90", "sm_100")
    ]
    assert [file.name for file in Path("artifacts").glob("*/*.so")] == []
    assert {line.split(":")[0] for line in verify_bundle(path).problems} <= {"sm_90", "sm_100"}  # test cubins lie
    status, out, _ = cli("--arch", "sm_90,sm_100", "--format", "so", "--fat", "--json")
    assert json.loads(out)["fat"] == [str(path)]


def test_options_that_mean_nothing_are_refused(cli):
    for arguments, says in (
        (("--fat",), "--fat makes one library of several archs"),
        (("--fat", "--format", "so"), "--fat makes one library of several archs"),
        (("--host", "aarch64"), "--host is for shared objects; add --format so"),
        (("--host", "arm", "--format", "so"), "'arm' is no host"),
    ):
        status, _, err = cli("--arch", "sm_90", *arguments)
        assert status == 2
        assert says in err
    assert not BUNDLE.exists()


def test_a_missing_compiler_is_told_before_anything_is_compiled(cli, monkeypatch):
    monkeypatch.setattr(compilers.shutil, "which", lambda name: None)
    monkeypatch.setattr(compilers.importlib.util, "find_spec", lambda name: None)
    status, _, err = cli("--arch", "sm_90", "--format", "so", "--host", "aarch64")
    assert status == 1
    assert "no C++ compiler for aarch64 hosts" in err
    assert "pip install ziglang" in err
    assert not BUNDLE.exists()

"""Reading bundles: damage and malice of every kind end in a BundleError that says what is wrong."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from attnres_aot.bundle.folder import read_at_once
from attnres_aot.bundle.manifest import SCHEMA, seal
from attnres_aot.bundle.reader import image_bytes, read_bundle, read_image
from attnres_aot.errors import BundleError


@pytest.fixture
def folder(built_once, tmp_path) -> Path:
    """A bundle for a test to break."""
    return shutil.copytree(built_once, tmp_path / "out" / built_once.name)


def test_a_sound_bundle_reads(folder):
    bundle = read_bundle(str(folder))
    assert bundle.path == folder
    assert [image.name for image in bundle.manifest.images][:2] == ["h1024-nb0", "h1024-nb1-delta"]
    assert read_image(bundle, bundle.manifest.images[1]) == b"CUBIN of h1024-nb1-delta for sm_90"


def test_the_folder_may_be_reached_through_a_link(folder, tmp_path):
    link = tmp_path / "current"
    link.symlink_to(folder)
    bundle = read_bundle(link)
    assert read_image(bundle, bundle.manifest.images[0]) == b"CUBIN of h1024-nb0 for sm_90"


@dataclass(frozen=True)
class Edit:
    name: str
    path: tuple[Any, ...]
    value: Any
    message: str


EDITS = [
    Edit(
        "schema", ("schema",), 99, f"manifest schema 99, but this attnres-aot reads schema {SCHEMA}; rebuild the bundle"
    ),
    Edit("bundle-name", ("name",), "../tiny", "name: '../tiny' is not a safe file name"),
    Edit("arch", ("arch", "proven"), "sm_xx", "arch.proven: 'sm_xx' is not a GPU architecture name"),
    Edit("escape", ("images", 0, "file"), "../secret.cubin", "file '../secret.cubin' is not a safe file name"),
    Edit("absolute", ("images", 0, "file"), "/etc/passwd", "file '/etc/passwd' is not a safe file name"),
    Edit("hidden", ("images", 0, "file"), ".x.cubin", "file '.x.cubin' is not a safe file name"),
    Edit("newline", ("images", 0, "file"), "a\n", "it is plain ASCII without escapes"),
    Edit("empty-file-name", ("images", 0, "file"), "", "file '' is not a safe file name"),
    Edit("long", ("images", 0, "file"), "x" * 129, "is 129 characters long; at most 128 are allowed"),
    Edit("manifest-as-image", ("images", 0, "file"), "manifest.json", "file is 'manifest.json', not 'h1024-nb0.cubin'"),
    Edit("same-file", ("images", 0, "file"), "h1024-nb1.cubin", "image file 'h1024-nb1.cubin' occurs more than once"),
    Edit("same-image", ("images", 0, "name"), "h1024-nb1", "image name 'h1024-nb1' occurs more than once"),
    Edit("digest", ("images", 0, "sha256"), "A" * 64, "is not a lower-case sha256 digest"),
    Edit("abi", ("images", 0, "abi"), "other", "abi 'other' is not one of consumer"),
    Edit("cluster", ("images", 0, "cluster"), 2, "cluster is 2; its rows take clusters of 1"),
    Edit("rows", ("images", 0, "rows_per_cluster"), 3, "rows_per_cluster is 3; every kernel handles 1"),
    Edit("hidden-size", ("model", "hidden"), 2048, "its code is for rows of 1024 elements, the model has 2048"),
    Edit("symbol", ("images", 0, "symbol"), "other", "symbol is 'other', not 'attnres_h1024_nb0_cutlass_0'"),
    Edit(
        "other-code",
        ("variants", 0, "choices", 0, "image"),
        "h1024-nb1",
        "image 'h1024-nb1' is code for something else",
    ),
    Edit("other-write", ("variants", 0, "write"), 1, "write is 1; a block is only ever written at nb, which is 0"),
    Edit("no-threads", ("images", 0, "block_threads"), 0, "block_threads is 0; 1 to 1024 is possible"),
    Edit("big-cluster", ("images", 0, "cluster"), 17, "cluster is 17; 1 to 16 is possible"),
    Edit("kind", ("abis", "consumer", 0, "kind"), "f64", "'source': kind 'f64' is not one of pointer, i32, i64, f32"),
    Edit("param-size", ("abis", "consumer", 0, "size"), 4, "'source': a pointer has 8 bytes, not 4"),
    Edit("param-overlap", ("abis", "consumer", 1, "offset"), 0, "'prefix': offset 0 overlaps the parameter before it"),
    Edit("param-twice", ("abis", "consumer", 1, "name"), "source", "parameter 'source' occurs more than once"),
    Edit("variant-twice", ("variants", 1, "name"), "nb0-write0", "variant name 'nb0-write0' occurs more than once"),
    Edit(
        "variant-lies", ("variants", 1, "nb"), 2, "variant 'nb1-delta-write1': its fields describe 'nb2-delta-write1'"
    ),
    Edit("dangling", ("variants", 0, "choices", 0, "image"), "gone", "image 'gone' is not in the bundle"),
    Edit("no-choice", ("variants", 0, "choices"), [], "its row limits [] are not ascending with an open end"),
    Edit("closed-end", ("variants", 0, "choices", 0, "max_rows"), 8, "its row limits [8] are not ascending with an"),
    Edit("table-twice", ("tables", 1, "tp"), 2, "table 'tp 2, dcp 1' occurs more than once"),
]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.name)
def test_a_manifest_that_lies_is_refused(edit, folder):
    manifest = folder / "manifest.json"
    data = json.loads(manifest.read_text())
    place = data
    for step in edit.path[:-1]:
        place = place[step]
    assert place[edit.path[-1]] != edit.value
    place[edit.path[-1]] = edit.value
    manifest.write_bytes(seal(data))
    with pytest.raises(BundleError) as caught:
        read_bundle(folder)
    assert edit.message in str(caught.value)
    assert str(manifest) in str(caught.value)


def test_all_lies_are_reported_together(folder):
    manifest = folder / "manifest.json"
    text = manifest.read_text().replace('"block_threads": 128', '"block_threads": 0').replace('"sm_90"', '"sm90"')
    manifest.write_bytes(seal(json.loads(text)))
    with pytest.raises(BundleError) as caught:
        read_bundle(folder)
    assert str(caught.value).count("block_threads is 0") == 5
    assert str(caught.value).count("is not a GPU architecture name") == 2


def _remove_folder(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def _file_instead(folder: Path) -> None:
    _remove_folder(folder)
    folder.write_text("not a folder")


def _link_manifest(folder: Path) -> None:
    (folder / "manifest.json").rename(folder.parent / "manifest.json")
    (folder / "manifest.json").symlink_to(folder.parent / "manifest.json")


def _truncate_manifest(folder: Path) -> None:
    os.truncate(folder / "manifest.json", 1000)


def _pipe_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")


def _huge_manifest(folder: Path) -> None:
    os.truncate(folder / "manifest.json", 17 << 20)


@dataclass(frozen=True)
class Damage:
    name: str
    inflict: Callable[[Path], None]
    message: str


DAMAGES = [
    Damage("no-folder", _remove_folder, "there is no such folder; build one with `attnres-aot build"),
    Damage("not-a-folder", _file_instead, "it is not a folder; build one with `attnres-aot build"),
    Damage("no-manifest", lambda folder: (folder / "manifest.json").unlink(), "it holds no manifest.json"),
    Damage("linked-manifest", _link_manifest, "a symbolic link; a bundle holds plain files only"),
    Damage("dangling-link", lambda f: ((f / "manifest.json").unlink(), (f / "manifest.json").symlink_to("x")), "link"),
    Damage("truncated", _truncate_manifest, "not a manifest"),
    Damage("pipe", _pipe_manifest, "not a plain file"),
    Damage("huge", _huge_manifest, "larger than the 8388608 bytes that are allowed"),
    Damage(
        "folder-as-manifest", lambda f: ((f / "manifest.json").unlink(), (f / "manifest.json").mkdir()), "plain file"
    ),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name)
def test_a_bundle_without_a_good_manifest_file_is_refused(damage, folder):
    damage.inflict(folder)
    with pytest.raises(BundleError) as caught:
        read_bundle(folder)
    assert damage.message in str(caught.value)
    assert str(folder) in str(caught.value)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)


def _swap_with_next(path: Path) -> None:
    other = path.with_name("h1024-nb2.cubin")
    mine = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(mine)


def _link(path: Path) -> None:
    path.rename(path.parent.parent / path.name)
    path.symlink_to(path.parent.parent / path.name)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


IMAGE_DAMAGES = [
    Damage("flipped", _flip, "but the manifest says"),
    Damage("truncated", lambda path: os.truncate(path, 5), "5 bytes, but the manifest says 28"),
    Damage("longer", lambda path: path.write_bytes(path.read_bytes() + b"x"), "29 bytes, but the manifest says 28"),
    Damage("swapped", _swap_with_next, "sha256 is"),
    Damage("missing", Path.unlink, "the file is missing; rebuild the bundle"),
    Damage("linked", _link, "a symbolic link"),
    Damage("pipe", _pipe, "not a plain file"),
    Damage("folder", lambda path: (path.unlink(), path.mkdir()), "not a plain file"),
]


@pytest.mark.parametrize("damage", IMAGE_DAMAGES, ids=lambda damage: damage.name)
def test_a_damaged_image_file_is_refused(damage, folder):
    damage.inflict(folder / read_bundle(folder).manifest.images[2].file)
    bundle = read_bundle(folder)
    image = bundle.manifest.images[2]
    with pytest.raises(BundleError) as caught:
        read_image(bundle, image)
    assert damage.message in str(caught.value)
    assert image.file in str(caught.value)


def test_an_image_record_from_elsewhere_cannot_leave_the_folder(folder):
    bundle = read_bundle(folder)
    (folder.parent / "secret.cubin").write_bytes(b"secret")
    image = dataclasses.replace(bundle.manifest.images[0], file="../secret.cubin")
    with pytest.raises(BundleError, match="not a safe file name"):
        read_at_once(folder, lambda opened: image_bytes(opened, image))


def test_what_becomes_of_the_folder_later_does_not_matter(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder.parent)
    bundle = read_bundle(folder.name)
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(folder)
    assert read_image(bundle, bundle.manifest.images[1]) == b"CUBIN of h1024-nb1-delta for sm_90"


def test_no_descriptor_stays_open(folder):
    before = len(list(Path("/proc/self/fd").iterdir()))
    (folder / "h1024-nb1.cubin").unlink()
    read_bundle(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(BundleError):
        read_bundle(folder)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_reading_needs_the_standard_library_only():
    program = (
        "import sys, attnres_aot.bundle\n"
        "names = {name.split('.')[0] for name in sys.modules}\n"
        "print(sorted(names - set(sys.stdlib_module_names) - {'__main__', 'attnres_aot'}))\n"
    )
    root = Path(__file__).resolve().parents[3]
    run = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, cwd=root, check=True)
    assert run.stdout.strip() == "[]"

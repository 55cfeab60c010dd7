"""Replacing bundles: killed at any point, two writers, readers meanwhile, things that must not be replaced."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from attnres_aot.bundle import lock as lock_module
from attnres_aot.bundle import swap
from attnres_aot.bundle import writer as bundle_writer
from attnres_aot.bundle.manifest import Manifest
from attnres_aot.bundle.reader import read_bundle, read_image
from attnres_aot.bundle.writer import check_replaceable, has_leftovers, hold_target, work_folder, write_bundle
from attnres_aot.errors import BundleError


@pytest.fixture
def template(built_once) -> Manifest:
    return read_bundle(built_once).manifest


@pytest.fixture
def edition(template):
    """Makes (manifest, files) of the bundle whose every image holds a given text."""

    def make(text: str):
        files = {image.file: f"{text} {image.name}".encode() for image in template.images}
        images = tuple(
            dataclasses.replace(
                image, sha256=hashlib.sha256(files[image.file]).hexdigest(), size=len(files[image.file])
            )
            for image in template.images
        )
        return dataclasses.replace(template, images=images), files

    return make


@pytest.fixture
def target(tmp_path) -> Path:
    return tmp_path / "deep" / "out" / "tiny-sm_90"


def write(path: Path, edition) -> None:
    with hold_target(path) as held:
        write_bundle(held, *edition)


def text_of(path: Path) -> str:
    bundle = read_bundle(path)
    texts = {read_image(bundle, image).decode().split()[0] for image in bundle.manifest.images}
    assert len(texts) == 1
    return texts.pop()


def test_a_bundle_is_written_and_replaced_leaving_nothing_else(edition, target):
    for text in ("first", "second"):
        write(target, edition(text))
        assert text_of(target) == text
        assert [path.name for path in target.parent.iterdir()] == ["tiny-sm_90"]


def test_without_an_exchange_two_renames_do(edition, target, monkeypatch):
    monkeypatch.setattr(swap, "exchange", lambda first, second: False)
    test_a_bundle_is_written_and_replaced_leaving_nothing_else(edition, target)


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the writer runs after it."""


@dataclass(frozen=True)
class Death:
    name: str
    function: str
    call: int
    exchange: bool
    left: str


DEATHS = [
    Death("first-file", "write_flushed", 0, True, "first"),
    Death("third-file", "write_flushed", 2, True, "first"),
    Death("manifest", "write_flushed", 5, True, "first"),
    Death("before-the-exchange", "swap", 0, True, "first"),
    Death("after-the-exchange", "discard", 0, True, "second"),
    Death("between-two-renames", "_rename_new", 0, False, "first"),
]


@pytest.mark.parametrize("death", DEATHS, ids=lambda death: death.name)
def test_a_writer_killed_at_any_point_leaves_a_whole_bundle(death, edition, target, monkeypatch):
    write(target, edition("first"))
    with monkeypatch.context() as patch:
        patch.setattr(bundle_writer, "clean_up", lambda path: None)
        if not death.exchange:
            patch.setattr(swap, "exchange", lambda first, second: False)
            patch.setattr(Path, "rename", die_at(1, Path.rename))
        else:
            patch.setattr(bundle_writer, death.function, die_at(death.call, getattr(bundle_writer, death.function)))
        with pytest.raises(Killed):
            write(target, edition("second"))
    assert has_leftovers(target)
    with hold_target(target):
        assert text_of(target) == death.left
        assert [path.name for path in target.parent.iterdir()] != ["tiny-sm_90"]
    assert [path.name for path in target.parent.iterdir()] == ["tiny-sm_90"]
    assert not has_leftovers(target)


def die_at(call: int, function):
    calls = iter(range(1000))

    def dying(*args):
        if next(calls) == call:
            raise Killed
        return function(*args)

    return dying


@pytest.mark.parametrize("exchange", [True, False])
def test_a_reader_sees_one_bundle_or_the_other(exchange, edition, target, monkeypatch):
    if not exchange:
        monkeypatch.setattr(swap, "exchange", lambda first, second: False)
    write(target, edition("first"))
    stop = threading.Event()
    seen: list[str] = []
    wrong: list[Exception] = []

    def read() -> None:
        while not stop.is_set():
            try:
                bundle = read_bundle(target)
            except Exception as error:  # noqa: BLE001  # any is a failure of this test, shown below
                wrong.append(error)
                return
            try:
                texts = {read_image(bundle, image).split()[0].decode() for image in bundle.manifest.images}
            except Exception as error:  # noqa: BLE001  # likewise
                wrong.append(error)
                return
            seen.append(texts.pop())
            if texts:
                wrong.append(AssertionError(f"a mixture with {texts}"))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(30):
        write(target, edition(f"edition{number}"))
    stop.set()
    reader.join()
    assert wrong == []
    assert len(set(seen)) > 1


def test_a_second_writer_is_refused_with_the_first_ones_process_id(edition, target):
    refusal = rf"another build of .* is running \(process {os.getpid()}\); wait for it"
    with hold_target(target) as first:
        with pytest.raises(BundleError, match=refusal), hold_target(target):
            pass
        write_bundle(first, *edition("first"))
    write(target, edition("second"))
    assert text_of(target) == "second"


def test_a_lock_file_of_a_dead_writer_holds_nobody_up(edition, target):
    target.parent.mkdir(parents=True)
    (target.parent / ".tiny-sm_90.lock").write_text("12345\n")
    write(target, edition("first"))
    assert [path.name for path in target.parent.iterdir()] == ["tiny-sm_90"]


def test_a_writer_whose_lock_file_was_removed_under_it_takes_the_new_one(target, monkeypatch):
    target.parent.mkdir(parents=True)
    lock = target.parent / ".tiny-sm_90.lock"
    flock = lock_module.fcntl.flock
    removed: list[bool] = []

    def remove_first(descriptor, operation):
        if not removed:
            removed.append(True)
            lock.unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(lock_module.fcntl, "flock", remove_first)
    with hold_target(target):
        assert lock.read_text() == f"{os.getpid()}\n"


def test_images_of_an_interrupted_build_survive_the_cleaning_up(target):
    kept = work_folder(target) / "store" / "x.image"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"x")
    (target.parent / ".tiny-sm_90.new").mkdir()
    with hold_target(target):
        assert kept.exists()
        assert not (target.parent / ".tiny-sm_90.new").exists()


def _stranger(target: Path) -> None:
    target.mkdir(parents=True)
    (target / "thesis.tex").write_text("years of work")


def _folder_inside(target: Path) -> None:
    (target / "x.cubin").mkdir(parents=True)


def _link(target: Path) -> None:
    target.parent.mkdir(parents=True)
    target.symlink_to(target.parent)


def _file(target: Path) -> None:
    target.parent.mkdir(parents=True)
    target.write_text("a file")


def _out_is_a_file(target: Path) -> None:
    target.parent.parent.mkdir(parents=True)
    target.parent.write_text("a file")


@dataclass(frozen=True)
class Obstacle:
    name: str
    put: object
    message: str


OBSTACLES = [
    Obstacle("foreign-file", _stranger, "holds 'thesis.tex', which no build wrote; move that away or change --out"),
    Obstacle("folder-inside", _folder_inside, "holds 'x.cubin', which no build wrote"),
    Obstacle("link", _link, "is not a plain folder; a bundle cannot replace it"),
    Obstacle("file", _file, "is not a plain folder; a bundle cannot replace it"),
    Obstacle("out-is-a-file", _out_is_a_file, "change --out or its permissions"),
]


@pytest.mark.parametrize("obstacle", OBSTACLES, ids=lambda obstacle: obstacle.name)
def test_what_no_build_wrote_is_never_replaced(obstacle, target, edition):
    obstacle.put(target)
    with pytest.raises(BundleError) as caught:
        write(target, edition("first"))
    assert obstacle.message in str(caught.value)
    assert str(target) in str(caught.value)


def test_an_empty_folder_and_half_a_bundle_may_be_replaced(target, edition):
    target.mkdir(parents=True)
    check_replaceable(target)
    write(target, edition("first"))
    (target / "h1024-nb0.cubin").unlink()
    os.truncate(target / "manifest.json", 100)
    write(target, edition("second"))
    assert text_of(target) == "second"


@dataclass(frozen=True)
class Mismatch:
    name: str
    change: object
    message: str


MISMATCHES = [
    Mismatch("missing", lambda files: files.pop("h1024-nb0.cubin"), "file 'h1024-nb0.cubin' is missing"),
    Mismatch("extra", lambda files: files.update({"x.cubin": b""}), "file 'x.cubin' is not in the manifest"),
    Mismatch(
        "other", lambda files: files.update({"h1024-nb0.cubin": b"?"}), "is not the one that the manifest describes"
    ),
    Mismatch("suffix", lambda files: files.update({"x.txt": b""}), "file 'x.txt' does not end in .cubin"),
]


@pytest.mark.parametrize("mismatch", MISMATCHES, ids=lambda mismatch: mismatch.name)
def test_files_that_are_not_the_manifests_are_not_written(mismatch, target, edition):
    manifest, files = edition("first")
    mismatch.change(files)
    with pytest.raises(BundleError) as caught:
        write(target, (manifest, files))
    assert mismatch.message in str(caught.value)
    assert list(target.parent.iterdir()) == []

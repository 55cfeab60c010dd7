"""File systems and neighbours: layers of a container image, folders that cannot be written, others' files, links."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path

import pytest

from attnres_aot.bundle import swap
from attnres_aot.bundle.reader import read_bundle, read_image
from attnres_aot.bundle.writer import has_leftovers, hold_target, work_folder, write_bundle
from attnres_aot.errors import BundleError
from attnres_aot.plan.plan import Selection

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs another user's files, which only root can make")


@pytest.fixture
def edition(tiny, tmp_path):
    """Makes (manifest, files) of the bundle whose every image holds a given text."""
    tiny(out=tmp_path / "template")
    template = read_bundle(tmp_path / "template" / "tiny-sm_90").manifest

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
    folder = tmp_path / "out"
    folder.mkdir()
    return folder / "tiny-sm_90"


def write(path: Path, edition) -> tuple[str, ...]:
    with hold_target(path) as held:
        return write_bundle(held, *edition)


def text_of(path: Path) -> str:
    bundle = read_bundle(path)
    (text,) = {read_image(bundle, image).decode().split()[0] for image in bundle.manifest.images}
    return text


def names(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.iterdir())


@pytest.fixture
def lower_layer(target, monkeypatch):
    """Makes the folders named in the set it returns as unmovable as those of a lower layer of an overlay."""
    unmovable: set[int] = set()
    rename, exchange = Path.rename, swap.exchange

    def checked_rename(self, to):
        if self.is_dir() and self.stat().st_ino in unmovable:
            raise OSError(errno.EXDEV, "Invalid cross-device link", str(self))
        return rename(self, to)

    def checked_exchange(first, second):
        return exchange(first, second) if second.stat().st_ino not in unmovable else False

    monkeypatch.setattr(Path, "rename", checked_rename)
    monkeypatch.setattr(swap, "exchange", checked_exchange)
    return unmovable


def test_a_bundle_in_a_lower_layer_is_replaced(edition, target, lower_layer):
    write(target, edition("first"))
    lower_layer.add(target.stat().st_ino)
    assert write(target, edition("second")) == ()
    assert text_of(target) == "second"
    assert names(target) == ["tiny-sm_90"]
    assert write(target, edition("third")) == ()
    assert text_of(target) == "third"


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the writer runs after it."""


@dataclass(frozen=True)
class Death:
    name: str
    function: str
    call: int
    left: str


@pytest.mark.parametrize("call", range(7))
def test_a_writer_killed_while_it_replaces_a_lower_layers_bundle_leaves_a_whole_one(
    call, edition, target, lower_layer, monkeypatch
):
    write(target, edition("first"))
    lower_layer.add(target.stat().st_ino)
    steps = iter(range(100))

    def dying(function):
        def run(*arguments, **options):
            if next(steps) == call:
                raise Killed
            return function(*arguments, **options)

        return run

    died = True
    with monkeypatch.context() as patch:
        for place, name in (
            (swap.shutil, "copytree"),
            (swap.shutil, "rmtree"),
            (Path, "rename"),
            (Path, "unlink"),
            (swap, "discard"),
        ):
            patch.setattr(place, name, dying(getattr(place, name)))
        patch.setattr("attnres_aot.bundle.writer.clean_up", lambda path: None)
        try:
            write(target, edition("second"))
            died = False
        except Killed:
            pass
    assert died or call > 5
    with hold_target(target):
        assert text_of(target) in {"first", "second"}
    assert text_of(target) in {"first", "second"}
    assert names(target) == ["tiny-sm_90"]


def test_a_lower_layers_bundle_that_cannot_be_removed_stays_as_it_was(edition, target, lower_layer, monkeypatch):
    write(target, edition("first"))
    lower_layer.add(target.stat().st_ino)
    rmtree = swap.shutil.rmtree

    def refuse(path, **options):
        if path == target:
            (target / "h1024-nb0.cubin").unlink()
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        rmtree(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(swap.shutil, "rmtree", refuse)
        with pytest.raises(BundleError, match="Permission denied"):
            write(target, edition("second"))
    assert text_of(target) == "first"
    assert names(target) == ["tiny-sm_90"]


OVERLAY = """
set -e
cd "$1"
mkdir lower upper work merged
cp -r out lower/out
mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work merged
exec "$2" -c "$3" "$1/merged/out/tiny-sm_90" "$4"
"""
REPLACE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from attnres_aot.bundle.reader import read_bundle, read_image
from attnres_aot.bundle.writer import hold_target, write_bundle
path = Path(sys.argv[1])
bundle = read_bundle(path)
files = {image.file: read_image(bundle, image) for image in bundle.manifest.images}
with hold_target(path) as held:
    assert write_bundle(held, bundle.manifest, files) == ()
assert [each.name for each in path.parent.iterdir()] == [path.name], list(path.parent.iterdir())
print("replaced", len(read_bundle(path).manifest.images))
"""


def test_a_bundle_in_a_real_overlay_is_replaced(edition, target, tmp_path):
    write(target, edition("first"))
    root = str(Path(__file__).resolve().parents[3])
    inner = ["sh", "-c", OVERLAY, "sh", str(tmp_path), sys.executable, REPLACE, root]
    command = ["unshare", "--user", "--map-root-user", "--mount", *inner]
    if os.geteuid() == 0:
        command = ["unshare", "--mount", *inner]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if done.returncode and ("mount" in done.stderr or "unshare" in done.stderr):
        pytest.skip(f"no overlay here: {done.stderr.strip()}")
    assert (done.returncode, done.stdout) == (0, "replaced 5\n"), done.stderr


def as_nobody(work) -> None:
    """Runs `work` in a child process of a user without rights; fails if it raises."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            work()
            status = 0
        except BaseException:  # noqa: BLE001 - shown, and told by the status
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def give(path: Path, user: int) -> None:
    """Gives a folder and all in it to a user."""
    for each in (path, *path.rglob("*")):
        os.chown(each, user, user)


@pytest.fixture
def reachable():
    """A target in a folder that every user can reach, which those of pytest are not."""
    folder = Path(tempfile.mkdtemp(prefix="attnres-aot-test-"))
    folder.chmod(0o755)
    (folder / "out").mkdir()
    yield folder / "out" / "tiny-sm_90"
    shutil.rmtree(folder)


@as_root
def test_a_bundle_that_cannot_be_written_is_replaced_and_holds_no_later_build_up(edition, reachable):
    editions = [edition(text) for text in ("first", "second", "third")]
    give(reachable.parent, NOBODY)

    def work() -> None:
        write(reachable, editions[0])
        reachable.chmod(0o555)
        assert write(reachable, editions[1]) == ()
        assert text_of(reachable) == "second"
        assert write(reachable, editions[2]) == ()
        assert names(reachable) == ["tiny-sm_90"]

    as_nobody(work)


@as_root
def test_another_users_bundle_is_replaced_and_what_is_left_of_it_is_in_nobodys_way(edition, reachable):
    editions = [edition(text) for text in ("first", "second", "third")]
    write(reachable, editions[0])
    give(reachable.parent, NOBODY)
    for each in (reachable, *reachable.iterdir()):
        os.chown(each, 0, 0)

    def work() -> None:
        (warning,) = write(reachable, editions[1])
        assert text_of(reachable) == "second"
        assert "the previous bundle could not be removed and is now " in warning
        assert "Permission denied" in warning
        assert has_leftovers(reachable)
        assert write(reachable, editions[2]) == ()
        assert text_of(reachable) == "third"
        assert len(names(reachable)) == 2

    as_nobody(work)


@as_root
def test_what_another_user_has_left_holds_nobody_up(edition, reachable):
    first = edition("first")
    give(reachable.parent, NOBODY)
    lock = reachable.parent / ".tiny-sm_90.lock"
    lock.write_text("12345\n")
    (reachable.parent / ".tiny-sm_90.work" / "store").mkdir(parents=True)
    (reachable.parent / ".tiny-sm_90.new.01234567").mkdir()
    (reachable.parent / ".tiny-sm_90.new.01234567" / "x.cubin").touch()

    def work() -> None:
        assert write(reachable, first) == ()
        assert text_of(reachable) == "first"
        assert not lock.exists()
        assert work_folder(reachable).name == f".tiny-sm_90.work-{NOBODY}"

    as_nobody(work)


def test_what_cannot_be_removed_after_the_replacement_fails_nothing(
    tiny, edition, tmp_path, monkeypatch, files_of, facts
):
    tiny()
    rmtree = swap.shutil.rmtree

    def refuse(path, **options):
        if ".new." in Path(path).name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        rmtree(path, **options)

    monkeypatch.setattr(swap.shutil, "rmtree", refuse)
    changed = dataclasses.replace(facts, package_version="2")
    report = tiny(facts=changed)
    assert report.status == "built"
    (warning,) = report.warnings
    assert "Permission denied" in warning
    again = tiny(facts=changed)
    assert (again.status, again.warnings) == ("unchanged", ())
    assert tiny(selection=Selection(only=("nb0*",)), facts=changed, force=True).status == "built"
    monkeypatch.setattr(swap.shutil, "rmtree", rmtree)
    assert tiny(facts=changed).status == "built"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["tiny-sm_90"]


def test_a_folder_that_cannot_be_flushed_after_the_replacement_fails_nothing(edition, target, monkeypatch):
    flush = swap.flush_folder

    def refuse(path):
        if path == target.parent:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        flush(path)

    monkeypatch.setattr("attnres_aot.bundle.writer.flush_folder", refuse)
    assert write(target, edition("first")) == ()
    assert text_of(target) == "first"


@dataclass(frozen=True)
class Trap:
    name: str
    lay: object
    """Puts something in the lock file's place; gets its path and that of a victim."""


def _hard_link(lock: Path, victim: Path) -> None:
    lock.hardlink_to(victim)


def _fifo(lock: Path, victim: Path) -> None:
    os.mkfifo(lock)


def _folder(lock: Path, victim: Path) -> None:
    lock.mkdir()


def _own_text(lock: Path, victim: Path) -> None:
    lock.write_text("years of work")


TRAPS = [
    Trap("link", lambda lock, victim: lock.symlink_to(victim)),
    Trap("hard-link", _hard_link),
    Trap("dangling-link", lambda lock, victim: lock.symlink_to(victim.with_name("new"))),
    Trap("fifo", _fifo),
    Trap("folder", _folder),
    Trap("own-text", _own_text),
]


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.name)
def test_what_is_no_lock_file_is_refused_and_stays_untouched(trap, edition, target, tmp_path):
    victim = tmp_path / "precious"
    victim.write_text("years of work")
    lock = target.parent / ".tiny-sm_90.lock"
    trap.lay(lock, victim)
    with pytest.raises(BundleError, match=r"\.lock' is not the lock file of a build; remove it or change --out"):
        write(target, edition("first"))
    assert victim.read_text() == "years of work"
    assert [path.name for path in tmp_path.iterdir() if path.name == "new"] == []
    assert names(target) == [".tiny-sm_90.lock"]


def test_a_hard_link_to_anothers_lock_is_not_written_through(edition, target, tmp_path):
    other = tmp_path / "other.lock"
    other.write_text("12345\n")
    (target.parent / ".tiny-sm_90.lock").hardlink_to(other)
    write(target, edition("first"))
    assert other.read_text() == "12345\n"
    assert names(target) == ["tiny-sm_90"]


def test_a_work_folder_that_is_a_link_is_left_alone(tiny, tmp_path):
    victim = tmp_path / "victim"
    (victim / "scratch").mkdir(parents=True)
    (victim / "store").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".tiny-sm_90.work").symlink_to(victim)
    assert tiny().status == "built"
    assert sorted(path.name for path in victim.iterdir()) == ["scratch", "store"]


def test_work_folders_that_are_all_somebody_elses_are_refused_with_both_names(tiny, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    for name in (".tiny-sm_90.work", f".tiny-sm_90.work-{os.geteuid()}"):
        (out / name).write_text("a file")
    with pytest.raises(BundleError, match=r"neither '.*work' nor '.*work-\d+' can hold the builder's files"):
        tiny()


def test_an_old_bundle_beside_an_incomplete_one_is_put_back(edition, target):
    write(target, edition("first"))
    target.rename(target.parent / ".tiny-sm_90.old")
    target.mkdir()
    (target / "h1024-nb0.cubin").write_bytes(b"half")
    with hold_target(target):
        assert text_of(target) == "first"
    assert names(target) == ["tiny-sm_90"]


def test_what_is_no_rest_of_the_old_bundle_is_not_removed_for_it(edition, target):
    write(target, edition("first"))
    target.rename(target.parent / ".tiny-sm_90.old")
    target.mkdir()
    (target / "thesis.tex").write_text("years of work")
    with pytest.raises(BundleError, match=r"thesis\.tex"), hold_target(target):
        pass
    assert (target / "thesis.tex").read_text() == "years of work"
    assert text_of(target.parent / ".tiny-sm_90.old") == "first"


def test_a_file_system_that_turns_every_user_into_another_holds_no_build_up(tiny, target, compiler, monkeypatch):
    """As network file systems do with root: no file that this process makes seems to be its own."""
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    compiler.behave_at({"h1024-nb0": "raise"})
    assert tiny(keep_going=True).status == "failed"
    assert names(target) == [".tiny-sm_90.work"]
    (target.parent / ".tiny-sm_90.lock").write_text("12345\n")
    compiler.behave()
    compiler.forget()
    report = tiny()
    assert (report.status, compiler.compiled) == ("built", ["h1024-nb0"])
    assert names(target) == ["tiny-sm_90"]
    assert tiny().status == "unchanged"

"""Replacing a bundle folder as a whole, so that nobody ever meets half of one.

A writer holds the target (`hold_target`), then writes the new bundle into a staging folder beside it, manifest last,
everything flushed to disk, and exchanges the two folders in one step where the file system can. Beside a target
`DIR/NAME` these hidden names may exist while a writer is at work, and a later writer cleans up what a killed one left:

    DIR/.NAME.lock          held by the writer (flock), removed when it lets go
    DIR/.NAME.new.XXXXXXXX  the next bundle, then the previous one until it is removed
    DIR/.NAME.old           the previous bundle, between two renames on file systems without an exchange
    DIR/.NAME.work          the builder's own files: finished images, scratch folders; `.NAME.work-UID` where the
                            other belongs to somebody else

From the moment at which the new bundle is in place nothing fails: what cannot be removed then, be it another user's or
in a folder that cannot be written, is left, told, and in nobody's way, as names are new each time. The steps from one
bundle to the next are in `bundle.swap`, those of the lock in `bundle.lock`.

A second writer of the same target is refused at once with the process id of the first: whoever started two builds
into one folder most likely did not mean to, and waiting would hide it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from attnres_aot.bundle.lock import take_lock
from attnres_aot.bundle.manifest import IMAGE_SUFFIX, LIBRARY_SUFFIX, MANIFEST_NAME, Manifest, dump_manifest
from attnres_aot.bundle.manifest_check import manifest_problems
from attnres_aot.bundle.reader import read_manifest_bytes
from attnres_aot.bundle.swap import beside, clean_up, discard, flush_folder, leftovers, new_folder, swap
from attnres_aot.errors import BundleError

SUFFIXES = (IMAGE_SUFFIX, LIBRARY_SUFFIX)
"""How the names of a bundle's files end, those of images and of libraries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTarget:
    """A bundle folder that this process alone may replace; made by `hold_target`."""

    path: Path
    """The bundle folder; need not exist yet."""
    force: bool = False
    """Even a folder of images without a manifest may be replaced."""


def work_folder(path: Path) -> Path:
    """Returns the builder's own folder for the bundle at `path`; it outlives killed runs.

    Raises:
      BundleError: its names are taken by what belongs to somebody else.
    """
    names = [beside(path, "work"), beside(path, f"work-{os.geteuid()}")]
    for name in names:
        if not os.path.lexists(name) or _is_own_folder(name):
            return name
    raise BundleError(
        f"neither {str(names[0])!r} nor {str(names[1])!r} can hold the builder's files: they are no folders of this "
        "user; remove them or change --out"
    )


def has_leftovers(path: Path) -> bool:
    """Tells whether a writer of the bundle at `path` is at work or was killed."""
    return any(os.path.lexists(beside(path, what)) for what in ("lock", "old")) or bool(
        leftovers(path) or os.path.lexists(work_folder(path))
    )


def _is_own_folder(path: Path) -> bool:
    """Tells whether a folder is this user's: as the system names it, or as this file system does."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return False
    return found.st_uid == os.geteuid() or found.st_uid == _user_of_new_folders(path)


def _user_of_new_folders(path: Path) -> int:
    """Returns whose a new folder beside `path` is: network file systems may turn root, or everybody, into one user."""
    try:
        probe = new_folder(path)
        try:
            return probe.lstat().st_uid
        finally:
            probe.rmdir()
    except OSError:
        return os.geteuid()


@contextlib.contextmanager
def hold_target(path: Path, *, force: bool = False) -> Iterator[HeldTarget]:
    """Makes this process the only writer of the bundle at `path` and cleans up after killed writers.

    Args:
      path: The bundle folder; need not exist yet.
      force: Replace even a folder of images without a manifest.

    Raises:
      BundleError: another writer is at work, the target cannot be replaced, or its folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = take_lock(beside(path, "lock"), path)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        try:
            clean_up(path)
        except OSError as error:
            raise _unwritable(path, error) from error
        check_replaceable(path, force=force)
        yield HeldTarget(path=path, force=force)
    finally:
        with contextlib.suppress(OSError):
            clean_up(path)
        lock.release()


def check_replaceable(path: Path, *, force: bool = False) -> None:
    """Checks that what lies at `path` is a bundle (however damaged), an empty folder or nothing.

    Args:
      path: The bundle folder.
      force: Take a folder of image files for a bundle though it has no manifest of one.

    Raises:
      BundleError: something that no builder wrote is there.
    """
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        raise BundleError(f"{str(path)!r} is not a plain folder; a bundle cannot replace it: remove it or change --out")
    strange = strange_entries(path)
    if strange:
        raise BundleError(
            f"{str(path)!r} holds {', '.join(map(repr, strange[:5]))}{' and more' if len(strange) > 5 else ''}, "
            "which no build wrote; move that away or change --out"
        )
    if not force and any(os.scandir(path)) and not _was_bundle(path):
        raise BundleError(
            f"{str(path)!r} is not empty, and holds no manifest that a build wrote; move it away, change --out, "
            "or replace it with --force"
        )


def _was_bundle(path: Path) -> bool:
    """Tells whether the manifest in a folder is, or was before it was damaged, that of a bundle."""
    try:
        data = read_manifest_bytes(path)
    except BundleError:
        return False
    return data.startswith(b'{\n "abis": {') or b'"build_key"' in data


def strange_entries(path: Path) -> list[str]:
    """Lists the names in the folder `path` that are neither a manifest nor the file of an image or a library."""
    with os.scandir(path) as entries:
        return sorted(
            entry.name
            for entry in entries
            if not (entry.name == MANIFEST_NAME or entry.name.endswith(SUFFIXES)) or entry.is_dir()
        )


def write_bundle(target: HeldTarget, manifest: Manifest, images: Mapping[str, bytes]) -> tuple[str, ...]:
    """Writes a complete bundle (`images`: file name -> bytes) and puts it in the target's place.

    Returns:
      What did not work once the bundle was in place, one line each; the bundle is none the worse for it.

    Raises:
      BundleError: the files are not those of the manifest, the target cannot be replaced, or the disk refuses.
    """
    _check_files(manifest, images)
    check_replaceable(target.path, force=target.force)
    try:
        staging = new_folder(target.path)
        for name, data in sorted(images.items()):
            write_flushed(staging / name, data)
        write_flushed(staging / MANIFEST_NAME, dump_manifest(manifest))
        flush_folder(staging)
        previous = swap(staging, target.path)
    except OSError as error:
        raise _unwritable(target.path, error) from error
    with contextlib.suppress(OSError):
        flush_folder(target.path.parent)
    if previous is not None and (trouble := discard(previous)):
        return (f"the previous bundle could not be removed and is now {str(previous)!r}: {trouble}",)
    return ()


def write_flushed(path: Path, data: bytes) -> None:
    """Writes a new file and waits until its bytes are on disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _unwritable(path: Path, error: OSError) -> BundleError:
    where = error.filename or str(path.parent)
    full = error.errno in {errno.ENOSPC, errno.EDQUOT}
    step = "make room there, or change --out" if full else "change --out or its permissions"
    return BundleError(f"cannot write the bundle {str(path)!r}: {where}: {error.strerror or error}; {step}")


def _check_files(manifest: Manifest, images: Mapping[str, bytes]) -> None:
    problems = manifest_problems(manifest)
    promised = {record.file: record for record in manifest.files}
    problems += [f"file {name!r} is not in the manifest" for name in sorted(images.keys() - promised.keys())]
    problems += [f"file {name!r} is missing" for name in sorted(promised.keys() - images.keys())]
    for name, data in images.items():
        image = promised.get(name)
        if image and (image.size, image.sha256) != (len(data), hashlib.sha256(data).hexdigest()):
            problems.append(f"file {name!r} is not the one that the manifest describes")
        if not name.endswith(SUFFIXES):
            problems.append(f"file {name!r} does not end in {' or '.join(SUFFIXES)}")
    if problems:
        raise BundleError("not a bundle that can be written:" + "".join(f"\n  {line}" for line in problems))

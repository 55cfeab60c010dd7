"""Replacing a bundle folder as a whole, so that nobody ever meets half of one.

A writer holds the target (`hold_target`), then writes the new bundle into a staging folder beside it, manifest last,
everything flushed to disk, and exchanges the two folders in one step where the file system can. Beside a target
`DIR/NAME` these hidden names may exist while a writer is at work, and a later writer cleans up what a killed one left:

    DIR/.NAME.lock      held by the writer (flock), removed when it lets go
    DIR/.NAME.new/      the next bundle
    DIR/.NAME.old/      the previous bundle, between two renames on file systems without an exchange
    DIR/.NAME.work/     the builder's own files: finished images, scratch folders

A second writer of the same target is refused at once with the process id of the first: whoever started two builds
into one folder most likely did not mean to, and waiting would hide it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from attnres_aot.bundle.audit import audit_problems
from attnres_aot.bundle.manifest_check import manifest_problems
from attnres_aot.bundle.reader import read_manifest_bytes
from attnres_aot.errors import BundleError
from attnres_aot.manifest import IMAGE_SUFFIX, MANIFEST_NAME, Manifest, dump_manifest

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_EXCHANGE = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP})


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTarget:
    """A bundle folder that this process alone may replace; made by `hold_target`."""

    path: Path
    """The bundle folder; need not exist yet."""
    force: bool = False
    """Even a folder of images without a manifest may be replaced."""


def work_folder(path: Path) -> Path:
    """Returns the builder's own folder for the bundle at `path`; it outlives killed runs."""
    return _beside(path, "work")


def has_leftovers(path: Path) -> bool:
    """Tells whether a writer of the bundle at `path` is at work or was killed."""
    return any(os.path.lexists(_beside(path, what)) for what in ("lock", "new", "old", "work"))


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
        lock = _lock(path)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        try:
            _clean_up(path)
        except OSError as error:
            raise _unwritable(path, error) from error
        check_replaceable(path, force=force)
        yield HeldTarget(path=path, force=force)
    finally:
        with contextlib.suppress(OSError):
            _clean_up(path)
        _beside(path, "lock").unlink(missing_ok=True)
        os.close(lock)


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
    """Lists the names in the folder `path` that are neither a manifest nor an image file."""
    with os.scandir(path) as entries:
        return sorted(
            entry.name
            for entry in entries
            if not (entry.name == MANIFEST_NAME or entry.name.endswith(IMAGE_SUFFIX)) or entry.is_dir()
        )


def write_bundle(target: HeldTarget, manifest: Manifest, images: Mapping[str, bytes]) -> None:
    """Writes a complete bundle (`images`: file name -> bytes) and puts it in the target's place.

    Raises:
      BundleError: the files are not those of the manifest, the target cannot be replaced, or the disk refuses.
    """
    _check_files(manifest, images)
    check_replaceable(target.path, force=target.force)
    staging = _beside(target.path, "new")
    try:
        _remove(staging)
        staging.mkdir()
        for name, data in sorted(images.items()):
            write_flushed(staging / name, data)
        write_flushed(staging / MANIFEST_NAME, dump_manifest(manifest))
        _flush_folder(staging)
        _swap(staging, target.path)
        _flush_folder(target.path.parent)
    except OSError as error:
        raise _unwritable(target.path, error) from error


def write_flushed(path: Path, data: bytes) -> None:
    """Writes a new file and waits until its bytes are on disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _unwritable(path: Path, error: OSError) -> BundleError:
    where = error.filename or str(path.parent)
    return BundleError(
        f"cannot write the bundle {str(path)!r}: {where}: {error.strerror or error}; change --out or its permissions"
    )


def _beside(path: Path, what: str) -> Path:
    return path.with_name(f".{path.name}.{what}")


def _lock(path: Path) -> int:
    name = _beside(path, "lock")
    while True:
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            raise BundleError(
                f"another build of {str(path)!r} is running (process {holder}); wait for it or change --out"
            ) from error
        except OSError:
            os.close(descriptor)
            raise
        if _is_current(descriptor, name):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
            return descriptor
        os.close(descriptor)  # The previous holder removed this file between our open and our lock.


def _is_current(descriptor: int, name: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), name.stat())
    except FileNotFoundError:
        return False


def _clean_up(path: Path) -> None:
    old = _beside(path, "old")
    if old.is_dir() and not os.path.lexists(path):
        old.rename(path)
    _remove(old)
    _remove(_beside(path, "new"))


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _check_files(manifest: Manifest, images: Mapping[str, bytes]) -> None:
    problems = manifest_problems(manifest) or audit_problems(manifest)
    promised = {image.file: image for image in manifest.images}
    problems += [f"file {name!r} is not in the manifest" for name in sorted(images.keys() - promised.keys())]
    problems += [f"file {name!r} is missing" for name in sorted(promised.keys() - images.keys())]
    for name, data in images.items():
        image = promised.get(name)
        if image and (image.size, image.sha256) != (len(data), hashlib.sha256(data).hexdigest()):
            problems.append(f"file {name!r} is not the one that the manifest describes")
        if not name.endswith(IMAGE_SUFFIX):
            problems.append(f"file {name!r} does not end in {IMAGE_SUFFIX}")
    if problems:
        raise BundleError("not a bundle that can be written:" + "".join(f"\n  {line}" for line in problems))


def _swap(staging: Path, target: Path) -> None:
    if not os.path.lexists(target):
        staging.rename(target)
        return
    if _exchange(staging, target):
        _remove(staging)
        return
    old = _beside(target, "old")
    _remove(old)
    target.rename(old)
    staging.rename(target)
    _remove(old)


def _exchange(first: Path, second: Path) -> bool:
    """Exchanges two folders in one step; False where the C library or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(second))


def _flush_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

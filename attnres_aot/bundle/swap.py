"""The steps by which one bundle folder takes another's place, and what a writer leaves that is killed between them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
from pathlib import Path

from attnres_aot.bundle.manifest import MANIFEST_NAME

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_EXCHANGE = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EXDEV})
_NO_FLUSH = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})


def beside(path: Path, what: str) -> Path:
    """Returns the hidden name beside `path` for `what`."""
    return path.with_name(f".{path.name}.{what}")


def new_folder(path: Path) -> Path:
    """Makes an empty folder beside `path` of a name that nothing had before."""
    while True:
        folder = beside(path, f"new.{secrets.token_hex(4)}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder


def leftovers(path: Path) -> list[Path]:
    """Lists what `new_folder` made beside `path` and what is still there."""
    pattern = re.compile(re.escape(f".{path.name}.new") + r"(?:\.[0-9a-f]{8})?")
    try:
        with os.scandir(path.parent) as entries:
            return sorted(Path(entry.path) for entry in entries if pattern.fullmatch(entry.name))
    except OSError:
        return []


def clean_up(path: Path) -> None:
    """Removes what killed writers left beside `path`, as far as it can be removed, and gives back what they took away.

    Raises:
      OSError: the previous bundle lies beside its place and cannot be put back.
    """
    old = beside(path, "old")
    if old.is_dir() and not old.is_symlink():
        if _is_rest_of(path, old):
            discard(path)  # killed in `_move_by_copy`, which removes the manifest first
        if not os.path.lexists(path):
            old.rename(path)
    if (path / MANIFEST_NAME).exists() or not (old / MANIFEST_NAME).exists():
        discard(old)
    for folder in leftovers(path):
        discard(folder)


def _is_rest_of(path: Path, copy: Path) -> bool:
    """Tells whether `path` is a bundle of which `copy` has all files, and which has lost its manifest already."""
    if path.is_symlink() or not path.is_dir() or not (copy / MANIFEST_NAME).is_file():
        return False
    left = {entry.name for entry in path.iterdir()}
    return MANIFEST_NAME not in left and left <= {entry.name for entry in copy.iterdir()}


def discard(path: Path) -> str:
    """Removes a file, a link or a folder with all that it holds; returns why it could not, else an empty text."""
    try:
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
        else:
            with contextlib.suppress(OSError):
                path.chmod(0o700)
            shutil.rmtree(path)
    except OSError as error:
        return f"{error.filename or path}: {error.strerror or error}"
    return ""


def swap(staging: Path, target: Path) -> Path | None:
    """Puts the folder `staging` in the place of `target`.

    Returns:
      Where the previous target is now, for removal; None when there was none.

    Raises:
      OSError: the file system refuses; the target is as it was.
    """
    if not os.path.lexists(target):
        staging.rename(target)
        return None
    if exchange(staging, target):
        return staging
    old = beside(target, "old")
    if os.path.lexists(old) and (trouble := discard(old)):
        raise OSError(errno.EEXIST, f"in the way, and cannot be removed ({trouble})", str(old))
    try:
        target.rename(old)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _move_by_copy(target, old)
    try:
        staging.rename(target)
    except OSError:
        old.rename(target)
        raise
    return _out_of_the_way(old)


def exchange(first: Path, second: Path) -> bool:
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


def flush_folder(path: Path) -> None:
    """Waits until the names in a folder are on disk, where the file system can tell."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FLUSH:
            raise
    finally:
        os.close(descriptor)


def _out_of_the_way(old: Path) -> Path:
    """Gives the previous bundle a name that holds no later writer up if it cannot be removed."""
    path = old.with_name(old.name.removeprefix(".").removesuffix(".old"))
    free = beside(path, f"new.{secrets.token_hex(4)}")
    try:
        old.rename(free)
    except OSError:
        return old
    return free


def _move_by_copy(folder: Path, to: Path) -> None:
    """Moves a folder that cannot be renamed, as those of a container image's layers: copies it, then removes it.

    Whoever looks meanwhile finds no bundle. The manifest goes first, so that `clean_up` can tell that the copy counts.

    Raises:
      OSError: it cannot be copied or removed; it is as it was.
    """
    copy = new_folder(folder)
    shutil.copytree(folder, copy, symlinks=True, dirs_exist_ok=True)
    flush_folder(copy)
    copy.rename(to)
    try:
        (folder / MANIFEST_NAME).unlink(missing_ok=True)
        shutil.rmtree(folder)
    except OSError:
        shutil.copytree(to, folder, symlinks=True, dirs_exist_ok=True)
        discard(to)
        raise

"""Reading the files of a bundle folder at one moment, though a build may put another bundle in its place meanwhile.

A folder is opened once and its files are read relative to it, so they are never a mixture of two bundles. What a
writer replaced it removes, so files may be missing from a folder that was opened before: then the folder that is there
now is read instead.

Only regular files directly in the folder are ever read; links are not followed, and nothing waits for a pipe.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from attnres_aot.bundle.names import name_problem
from attnres_aot.errors import BundleError

_T = TypeVar("_T")

_ATTEMPTS = 100
_PAUSE_S = 0.01  # between looks at a path from which a writer has just moved the folder away
_PAUSES = 100
_FOLDER_FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Folder:
    """A folder that stays the same one whatever becomes of its path; made by `read_at_once`."""

    __slots__ = ("_descriptor", "path")

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    def names(self) -> list[str]:
        """Lists the names in the folder in order.

        Raises:
          BundleError: it cannot be listed.
        """
        try:
            listing = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._descriptor)
            try:
                return sorted(os.listdir(listing))  # noqa: PTH208 - a descriptor has no path
            finally:
                os.close(listing)
        except OSError as error:
            raise BundleError(f"{self.path}: cannot be listed: {error.strerror or error}") from error

    def holds(self, name: str) -> bool:
        """Tells whether anything in the folder has this name."""
        try:
            os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except OSError:
            return False
        return True

    def read(self, name: str, max_bytes: int) -> bytes:
        """Reads a regular file that lies directly in the folder.

        Raises:
          BundleError: unsafe name, missing, a link or anything else than a plain file, larger than `max_bytes`,
            unreadable.
        """
        problem = name_problem(name)
        if problem is not None:
            raise BundleError(f"{self.path}: {problem}")
        try:
            descriptor = os.open(name, _FILE_FLAGS, dir_fd=self._descriptor)
            try:
                return _read(descriptor, max_bytes)
            finally:
                os.close(descriptor)
        except BundleError as error:
            raise BundleError(f"{self.path / name}: {error}") from error
        except OSError as error:
            raise BundleError(f"{self.path / name}: {_unreadable(error)}") from error

    def was_replaced(self) -> bool:
        """Tells whether the path leads to another folder by now, or to none."""
        try:
            now = os.stat(self.path)  # noqa: PTH116 - through links, as the folder was opened
        except OSError:
            return True
        return not os.path.samestat(now, os.fstat(self._descriptor))


def read_at_once(path: Path, read: Callable[[Folder], _T], is_whole: Callable[[_T], bool] = lambda _: True) -> _T:
    """Returns what `read` makes of the folder at `path`; what it reads is of one folder.

    `read` may run several times: if it fails, or its result is not whole, and the folder was replaced meanwhile.

    Raises:
      BundleError: no such folder, or what `read` raises.
    """
    for left in reversed(range(_ATTEMPTS)):
        with _opened(path) as folder:
            try:
                result = read(folder)
            except BundleError:
                if not left or not folder.was_replaced():
                    raise
                continue
            if is_whole(result) or not left or not folder.was_replaced():
                return result
    raise AssertionError("the last attempt returns or raises")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Folder]:
    descriptor = _open(path)
    try:
        yield Folder(path, descriptor)
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    for _ in range(_PAUSES):
        try:
            return os.open(path, _FOLDER_FLAGS)
        except FileNotFoundError:
            if not is_being_replaced(path):
                break
        except (OSError, ValueError):
            break
        time.sleep(_PAUSE_S)
    try:
        return os.open(path, _FOLDER_FLAGS)
    except (OSError, ValueError) as error:
        raise BundleError(
            f"no bundle at {str(path)!r}: {_unopened(error)}; build one with `attnres-aot build --arch ARCH --out DIR`"
        ) from error


def is_being_replaced(path: Path) -> bool:
    """Tells whether a writer has moved the bundle at `path` aside, to put the next one there in a moment.

    It does so where the file system cannot exchange two folders in one step.
    """
    return os.path.lexists(path.with_name(f".{path.name}.old")) if path.name else False


def _unopened(error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such folder"
    if isinstance(error, NotADirectoryError):
        return "it is not a folder"
    return f"it cannot be opened: {getattr(error, 'strerror', None) or error}"


def _read(descriptor: int, max_bytes: int) -> bytes:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise BundleError("not a plain file; a bundle holds plain files only")
    if found.st_size > max_bytes:
        raise _too_large(max_bytes)
    data = os.read(descriptor, found.st_size + 1)
    if len(data) != found.st_size:  # it is being written to, or the system hands it out in parts
        while len(data) <= max_bytes and (more := os.read(descriptor, max_bytes + 1 - len(data))):
            data += more
    if len(data) > max_bytes:
        raise _too_large(max_bytes)
    return data


def _too_large(max_bytes: int) -> BundleError:
    return BundleError(f"larger than the {max_bytes} bytes that are allowed")


def _unreadable(error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return "the file is missing; rebuild the bundle"
    if error.errno == errno.ELOOP:
        return "a symbolic link; a bundle holds plain files only"
    if error.errno == errno.ENXIO:
        return "not a plain file; a bundle holds plain files only"
    return f"cannot be read: {error.strerror or error}"

"""The lock file of a bundle folder: taking it, whoever left it there, and giving it back."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from attnres_aot.errors import BundleError

_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CONTENT = re.compile(rb"[0-9]{0,20}\n?")
_CONTENT_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """A lock that this process holds."""

    name: Path
    """The lock file."""
    descriptor: int
    """Its open descriptor, whose flock is the lock."""

    def release(self) -> None:
        """Removes the file and lets go; fails nothing, as a file that stays holds nobody up."""
        with contextlib.suppress(OSError):
            self.name.unlink()
        with contextlib.suppress(OSError):
            os.close(self.descriptor)


def take_lock(name: Path, target: Path) -> Lock:
    """Takes the lock file `name`, which guards `target`.

    Only a plain file is taken, never what a link points to. What another user has left is locked as it is, or replaced
    where the folder allows that; a file with other content than a process id is nobody's lock and stays untouched.

    Raises:
      BundleError: another process holds it, or what has its name is no lock file.
      OSError: the folder or the file system refuses.
    """
    while True:
        descriptor, made = _open(name)
        try:
            lock = _lock_opened(name, descriptor, target, made=made)
        except BaseException:
            os.close(descriptor)
            raise
        if lock is not None:
            return lock
        os.close(descriptor)  # The file was another's, or its holder removed it between our open and our lock.


def _open(name: Path) -> tuple[int, bool]:
    """Opens the file; returns its descriptor and whether this call has made it."""
    for flags in (os.O_RDWR | os.O_CREAT | os.O_EXCL, os.O_RDWR, os.O_RDONLY):
        try:
            return os.open(name, flags | _FLAGS, 0o644), bool(flags & os.O_EXCL)
        except FileExistsError:
            continue
        except OSError as error:
            if error.errno in {errno.ELOOP, errno.EISDIR, errno.ENXIO}:
                raise _foreign(name) from error
            if flags & os.O_EXCL or flags == os.O_RDONLY or error.errno not in {errno.EACCES, errno.EPERM}:
                raise
    raise _foreign(name)


def _lock_opened(name: Path, descriptor: int, target: Path, *, made: bool) -> Lock | None:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise _foreign(name)
    content = os.pread(descriptor, _CONTENT_BYTES, 0)
    if not _CONTENT.fullmatch(content) or found.st_size > _CONTENT_BYTES:
        raise _foreign(name)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = content.decode("ascii").strip() or "unknown"
        raise BundleError(
            f"another build of {str(target)!r} is running (process {holder}); wait for it or change --out"
        ) from error
    if not _is_current(descriptor, name):
        return None
    if not made and (found.st_uid != os.geteuid() or found.st_nlink != 1):
        try:
            name.unlink()
        except OSError:  # in a sticky folder others' files stay; the lock on one is as good
            return Lock(name=name, descriptor=descriptor)
        return None
    os.ftruncate(descriptor, 0)  # as made here, whatever user the file system says it is of
    os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
    return Lock(name=name, descriptor=descriptor)


def _is_current(descriptor: int, name: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), name.lstat())
    except FileNotFoundError:
        return False


def _foreign(name: Path) -> BundleError:
    return BundleError(f"{str(name)!r} is not the lock file of a build; remove it or change --out")

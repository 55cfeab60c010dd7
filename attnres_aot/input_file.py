"""Reading a file that a command was given, whatever its path leads to: bounded in size and in time."""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from pathlib import Path

PIPE_S = 10.0
"""Longest that a pipe may take to deliver a whole file."""


def read_input(path: Path, most: int) -> bytes:
    """Reads a file or a pipe (`/dev/stdin`, a shell's `<(...)`).

    Args:
      path: what to read.
      most: the most bytes that it may have; of a larger one, this many and one more are returned.

    Raises:
      OSError: it cannot be read, is a folder, a socket or a device, or a pipe that delivers no end; its `strerror`
        says so.
    """
    try:
        # Without O_NONBLOCK, opening a pipe that nobody writes to would wait forever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except ValueError as error:  # a NUL in the path
        raise OSError(errno.EINVAL, str(error)) from error
    try:
        mode = os.fstat(descriptor).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise OSError(errno.EINVAL, f"it is {_kind(mode)}, not a file")
        return _read(descriptor, most + 1)
    finally:
        os.close(descriptor)


def _read(descriptor: int, most: int) -> bytes:
    parts: list[bytes] = []
    left, deadline = most, time.monotonic() + PIPE_S
    while left:
        try:
            part = os.read(descriptor, left)
        except BlockingIOError:  # a pipe that has a writer, and nothing to read at present
            wait = deadline - time.monotonic()
            if wait < 0 or not select.select([descriptor], [], [], wait)[0]:
                text = f"no whole file came through the pipe in {PIPE_S:g} s; save it to a file first"
                raise OSError(errno.ETIMEDOUT, text) from None
            continue
        if not part:
            break
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _kind(mode: int) -> str:
    """Says what a thing that is neither file nor pipe is."""
    if stat.S_ISDIR(mode):
        return "a folder"
    return "a socket" if stat.S_ISSOCK(mode) else "a device"

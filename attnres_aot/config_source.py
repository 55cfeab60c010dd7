"""Reading the bytes of a configuration, whatever the path leads to: bounded in size and in time.

Standard library only: `attnres-aot tune` reads configurations where PyYAML is not installed.
"""

from __future__ import annotations

import os
import select
import stat
import time
from pathlib import Path

from attnres_aot.errors import ConfigError

MAX_BYTES = 256 * 1024
"""Largest configuration that is read."""
PIPE_S = 10.0
"""Longest that a pipe may take to deliver one."""
START_FROM = "start from the shipped configuration: `attnres-aot config > my_model.yaml`"
"""What to do with a file that holds nothing, or is not there."""

_GIVE = "give --config the path of a configuration file, or " + START_FROM


def read_source(path: Path) -> bytes:
    """Reads a configuration file or a pipe (`/dev/stdin`, a shell's `<(...)`).

    Returns:
      The bytes, cut one after the most that a configuration may have.

    Raises:
      ConfigError: it cannot be read, or is a folder, a socket or a device.
    """
    try:
        # Without O_NONBLOCK, opening a pipe that nobody writes to would wait forever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            mode = os.fstat(descriptor).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
                raise ConfigError([f"{path}: is {_kind(mode)}, not a file; {_GIVE}"])
            return _read(descriptor, path)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError([f"{path}: cannot be read: {reason}; {_GIVE}"]) from error


def _read(descriptor: int, path: Path) -> bytes:
    data = b""
    deadline = time.monotonic() + PIPE_S
    while len(data) <= MAX_BYTES:
        try:
            part = os.read(descriptor, MAX_BYTES + 1 - len(data))
        except BlockingIOError:  # a pipe that has a writer, and nothing to read at present
            left = deadline - time.monotonic()
            if left < 0 or not select.select([descriptor], [], [], left)[0]:
                text = f"{path}: no whole file came through the pipe in {PIPE_S:g} s; save it to a file first"
                raise ConfigError([text]) from None
            continue
        if not part:
            break
        data += part
    return data


def _kind(mode: int) -> str:
    """Says what a thing that is neither file nor pipe is."""
    if stat.S_ISDIR(mode):
        return "a folder"
    return "a socket" if stat.S_ISSOCK(mode) else "a device"

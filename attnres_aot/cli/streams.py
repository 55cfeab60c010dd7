"""The standard streams of a command that are closed, full, or whose reader has gone.

A stream that cannot be written costs a command that shows something its success, and one line on the other stream
says so. A command that makes something (`Teller`) keeps its success: what it made is there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import TextIO

_STANDARD = (0, 1, 2)
_TROUBLES = frozenset(
    {errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EDQUOT, errno.EBADF, errno.EPIPE, errno.ECONNRESET, errno.ENXIO}
)


def open_closed() -> None:
    """Opens /dev/null in place of standard descriptors that are closed.

    Otherwise the next file that is opened, be it a bundle's manifest, would take the number, and with it whatever some
    library prints.
    """
    for number in _STANDARD:
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def flush_output() -> None:
    """Hands everything that was printed to the system.

    Raises:
      OSError: standard output is closed, full, or its reader has gone.
    """
    if sys.stdout is None:
        raise OSError(errno.EBADF, "it is closed")
    sys.stdout.flush()


def is_output_error(error: OSError) -> bool:
    """Tells whether an error came from printing: it names no file, and is of a kind that streams have."""
    return error.filename is None and error.errno in _TROUBLES


def give_up_output(error: OSError) -> None:
    """Says why standard output could not be written, and lets the end of the process not fail at it again.

    Says nothing where the reader has gone: it wanted no more.
    """
    silence(sys.stdout)
    if not isinstance(error, BrokenPipeError):
        tell(f"error: cannot write to standard output: {error.strerror or error}")


def tell(text: str) -> None:
    """Writes a line to standard error; where that cannot be written there is nobody to tell."""
    if sys.stderr is None:
        return
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        silence(sys.stderr)


def silence(stream: TextIO | None) -> None:
    """Points a stream's descriptor to /dev/null, so that what is left in its buffer fails no more."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        number = stream.fileno()  # type: ignore[union-attr]
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, number)
        os.close(null)


class Teller:
    """Prints for a command whose work counts whether or not anybody can read what it prints."""

    def __init__(self) -> None:
        self._lost: OSError | None = None

    def say(self, text: str) -> None:
        """Writes a line to standard output, as far as that goes."""
        if self._lost is not None:
            return
        try:
            if sys.stdout is not None:
                print(text)
            flush_output()
        except OSError as error:
            self._lost = error
            silence(sys.stdout)

    def close(self) -> None:
        """Says on standard error that something could not be printed, if so."""
        if self._lost is not None and not isinstance(self._lost, BrokenPipeError):
            tell(f"warning: cannot write to standard output, the report is lost: {self._lost.strerror}")
        if sys.stdout is None:
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - lives as long as the process

"""Child processes of tests: none outlives the test that started it, and each can be interrupted."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

PATIENCE = 120.0
"""Seconds that anything may take on a busy machine before a test gives up."""


@contextlib.contextmanager
def child(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Starts a process in a group of its own; at the end kills what is left of the group, however the test went."""
    with subprocess.Popen(command, start_new_session=True, **options) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def wait_until(condition: Callable[[], object], what: str = "it") -> None:
    """Waits until a condition holds.

    Raises:
      AssertionError: it does not within PATIENCE.
    """
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within {PATIENCE:.0f} s"
        time.sleep(0.02)

"""Progress that fails no build: where standard error is full, or its terminal has gone, nothing more is shown."""

from __future__ import annotations

from collections.abc import Callable

from attnres_aot.builder.pool import JobFailure
from attnres_aot.builder.progress import Progress


class UnfailingProgress:
    """Hands everything on to another progress until that cannot write any more."""

    def __init__(self, shown: Progress) -> None:
        """Shows what `shown` shows."""
        self._shown: Progress | None = shown

    def begin(self, bundle: str, to_compile: int, reused: int) -> None:
        """Hands it on."""
        self._try(lambda shown: shown.begin(bundle, to_compile, reused))

    def started(self, image: str) -> None:
        """Hands it on."""
        self._try(lambda shown: shown.started(image))

    def finished(self, image: str, seconds: float) -> None:
        """Hands it on."""
        self._try(lambda shown: shown.finished(image, seconds))

    def failed(self, failure: JobFailure) -> None:
        """Hands it on."""
        self._try(lambda shown: shown.failed(failure))

    def refused(self, failure: JobFailure) -> None:
        """Hands it on."""
        self._try(lambda shown: shown.refused(failure))

    def end(self) -> None:
        """Hands it on."""
        self._try(lambda shown: shown.end())

    def _try(self, call: Callable[[Progress], None]) -> None:
        if self._shown is None:
            return
        try:
            call(self._shown)
        except (OSError, ValueError):  # ValueError: the stream was closed by this process
            self._shown = None

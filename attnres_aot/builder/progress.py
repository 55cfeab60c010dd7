"""How a build shows that it is getting on: a bar where a person watches, plain lines where a log does.

Everything goes to standard error, so that standard output stays free for JSON.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING, Protocol, TextIO

from attnres_aot.builder.pool import JobFailure

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID


_CANNOT_DRAW = ("", "dumb", "unknown")
"""Values of TERM (unset is the first) of terminals that cannot move the cursor; a bar would show nothing there."""


class Progress(Protocol):
    """Who shows a build's progress."""

    def begin(self, bundle: str, to_compile: int, reused: int) -> None:
        """The build of `bundle` has found out what it has to do."""

    def started(self, image: str) -> None:
        """An image is being compiled."""

    def finished(self, image: str, seconds: float) -> None:
        """An image has been compiled in `seconds`, and proven."""

    def failed(self, failure: JobFailure) -> None:
        """An image has failed for good."""

    def refused(self, failure: JobFailure) -> None:
        """An image that was to be reused is not what it should be."""

    def end(self) -> None:
        """The build is over, well or not; nothing moves any more."""


class PlainProgress:
    """One line per image."""

    def __init__(self, stream: TextIO) -> None:
        """Writes lines to `stream`."""
        self._stream = stream
        self._done = 0
        self._total = 0

    def begin(self, bundle: str, to_compile: int, reused: int) -> None:
        """Says what there is to do."""
        self._done, self._total = 0, to_compile
        self._line(opening(bundle, to_compile, reused))

    def started(self, image: str) -> None:
        """Says nothing: a log has no use for it."""

    def finished(self, image: str, seconds: float) -> None:
        """Says which image is done."""
        self._line(f"{self._count()} {image} {seconds:.2f} s")

    def failed(self, failure: JobFailure) -> None:
        """Says which image has failed and why."""
        self._line(f"{self._count()} FAILED {failure.name}: {failure.reason}")

    def refused(self, failure: JobFailure) -> None:
        """Says which image cannot be reused; it is none of those that are counted."""
        self._line(f"FAILED {failure.name}: {failure.reason}")

    def end(self) -> None:
        """Says nothing."""

    def _count(self) -> str:
        self._done += 1
        width = len(str(self._total))
        return f"[{self._done:>{width + 1}}/{self._total}]"

    def _line(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


class BarProgress:
    """A progress bar with the images in work and the time left, anew for each bundle."""

    def __init__(self, stream: TextIO) -> None:
        """Draws on the terminal `stream`."""
        from rich.console import Console

        self._console = Console(file=stream, highlight=False)
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._at_work: list[str] = []

    def begin(self, bundle: str, to_compile: int, reused: int) -> None:
        """Shows the bar."""
        self._console.print(opening(bundle, to_compile, reused), markup=False)
        self._at_work = []
        if to_compile:
            self._bar = _new_bar(self._console)
            self._task = self._bar.add_task("starting the compiler", total=to_compile)
            self._bar.start()

    def started(self, image: str) -> None:
        """Shows the image among those in work."""
        self._at_work = [*(name for name in self._at_work if name != image), image]
        self._update(advance=0)

    def finished(self, image: str, seconds: float) -> None:
        """Moves the bar on."""
        del seconds
        self._remove(image)

    def failed(self, failure: JobFailure) -> None:
        """Prints the failure above the bar, and moves it on."""
        self.refused(failure)
        self._remove(failure.name)

    def refused(self, failure: JobFailure) -> None:
        """Prints the failure above the bar."""
        self._console.print(f"FAILED {failure.name}: {failure.reason}", markup=False, style="red")

    def end(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = None

    def _remove(self, image: str) -> None:
        self._at_work = [name for name in self._at_work if name != image]
        self._update(advance=1)

    def _update(self, advance: int) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=advance, description=", ".join(self._at_work))


def _new_bar(console: Console) -> RichProgress:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress
    from rich.table import Column

    # The names take the width that is left and are cut there; everything else stays whole.
    rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    return RichProgress(
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False, table_column=rest),
        console=console,
        transient=True,
        expand=True,
    )


def opening(bundle: str, to_compile: int, reused: int) -> str:
    """Says what a build has to do."""
    return f"{bundle}: {to_compile} image{'s' * (to_compile != 1)} to compile, {reused} reused"


def choose_progress(stream: TextIO | None = None) -> Progress:
    """Returns the bar for a terminal that can draw one, plain lines for anything else.

    Args:
      stream: where to show it; None is standard error.
    """
    stream = stream or sys.stderr or io.StringIO()  # there is no sys.stderr where the descriptor was closed
    draws = os.environ.get("TERM", "").lower() not in _CANNOT_DRAW
    return BarProgress(stream) if draws and stream.isatty() else PlainProgress(stream)

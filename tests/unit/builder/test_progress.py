"""What a person sees of a build: lines in a log, a bar on a terminal."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass

import pytest

from attnres_aot.builder.pool import JobFailure
from attnres_aot.builder.progress import BarProgress, PlainProgress, Progress, choose_progress

FAILURE = JobFailure(name="h1024-nb2", reason="ValueError: [no] registers", output="chatter")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def play(progress: Progress) -> None:
    progress.begin("tiny-sm_90", 12, 3)
    progress.started("h1024-nb1")
    progress.started("h1024-nb2")
    progress.finished("h1024-nb1", 0.412)
    progress.failed(FAILURE)
    progress.end()


def test_a_log_gets_one_line_per_image():
    stream = io.StringIO()
    play(PlainProgress(stream))
    assert stream.getvalue().splitlines() == [
        "tiny-sm_90: 12 images to compile, 3 reused",
        "[  1/12] h1024-nb1 0.41 s",
        "[  2/12] FAILED h1024-nb2: ValueError: [no] registers",
    ]


def test_each_bundle_is_counted_from_one():
    stream = io.StringIO()
    progress = PlainProgress(stream)
    play(progress)
    play(progress)
    assert stream.getvalue().count("[  1/12]") == 2


def test_a_terminal_gets_a_bar_with_the_images_in_work_and_the_time_left(monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    progress = BarProgress(stream)
    progress.begin("tiny-sm_90", 12, 0)
    progress.started("h1024-nb1")
    progress.started("h1024-nb2")
    progress._bar.refresh()
    assert "h1024-nb1, h1024-nb2" in stream.getvalue()
    assert "0/12" in stream.getvalue()
    assert "left" in stream.getvalue()
    progress.finished("h1024-nb1", 0.4)
    progress.failed(FAILURE)
    before = len(stream.getvalue())
    progress._bar.refresh()
    assert "2/12" in stream.getvalue()[before:]
    assert "FAILED h1024-nb2: ValueError: [no] registers" in stream.getvalue()
    progress.end()


def test_a_narrow_terminal_cuts_the_names_alone(monkeypatch):
    monkeypatch.setenv("COLUMNS", "64")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    progress = BarProgress(stream)
    progress.begin("tiny-sm_90", 81, 0)
    progress.started("h7168-stats-delta-final-ring16")
    progress._bar.refresh()
    line = stream.getvalue().splitlines()[-1]
    assert " 0/81 0:00:00 left -:--:-- h7168-sta" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line)
    progress.end()


def test_a_second_bundle_gets_a_bar_of_its_own(monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    progress = BarProgress(stream)
    play(progress)
    before = len(stream.getvalue())
    progress.begin("tiny-sm_100", 7, 0)
    progress._bar.refresh()
    assert "0/7" in stream.getvalue()[before:]
    assert "2/12" not in stream.getvalue()[before:]
    progress.end()


def test_nothing_to_compile_shows_no_bar():
    stream = Terminal()
    progress = BarProgress(stream)
    progress.begin("tiny-sm_90", 0, 3)
    progress.end()
    assert stream.getvalue().strip() == "tiny-sm_90: 0 images to compile, 3 reused"


def test_an_image_that_cannot_be_reused_is_not_counted_among_those_to_compile():
    stream = io.StringIO()
    progress = PlainProgress(stream)
    progress.begin("tiny-sm_90", 0, 3)
    progress.refused(FAILURE)
    progress.end()
    assert stream.getvalue().splitlines() == [
        "tiny-sm_90: 0 images to compile, 3 reused",
        "FAILED h1024-nb2: ValueError: [no] registers",
    ]


def test_a_bar_does_not_move_for_an_image_that_cannot_be_reused(monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    progress = BarProgress(stream)
    progress.begin("tiny-sm_90", 12, 3)
    progress.refused(FAILURE)
    progress._bar.refresh()
    progress.end()
    assert "FAILED h1024-nb2" in stream.getvalue()
    assert "1/12" not in stream.getvalue()


@dataclass(frozen=True)
class Choice:
    name: str
    stream: io.StringIO
    term: str | None
    kind: type


CHOICES = [
    Choice("terminal", Terminal(), "xterm-256color", BarProgress),
    Choice("log", io.StringIO(), "xterm-256color", PlainProgress),
    Choice("dumb", Terminal(), "dumb", PlainProgress),
    Choice("unknown", Terminal(), "Unknown", PlainProgress),
    Choice("unset", Terminal(), None, PlainProgress),
]


@pytest.mark.parametrize("case", CHOICES, ids=lambda case: case.name)
def test_only_a_terminal_that_can_draw_gets_a_bar(case, monkeypatch):
    monkeypatch.delenv("TERM", raising=False)
    if case.term is not None:
        monkeypatch.setenv("TERM", case.term)
    assert isinstance(choose_progress(case.stream), case.kind)

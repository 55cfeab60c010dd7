"""Standard streams that are closed or full, or whose reader has gone: what is built counts, one line says the rest."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from attnres_aot.builder.pool import JobFailure
from attnres_aot.builder.unfailing import UnfailingProgress
from attnres_aot.bundle.reader import read_bundle

ROOT = Path(__file__).resolve().parents[3]
CONFIG = """\
name: tiny
model: {hidden_size: 1024, layers: 2, block_size: 1, leading_dense_layers: 0}
mailbox: {capacity: 4, slots: [1]}
variants: {ring: false, aux: false, stats: false}
deployments:
  - {tp: 2, dcp: 1, attn_stats: "", attn_stats_blocks: ""}
"""
PROGRAM = """
import sys
sys.path[:0] = [sys.argv.pop(1), sys.argv.pop(1)]
import conftest
from attnres_aot.builder import assemble
from attnres_aot.builder.keys import BuildFacts
from attnres_aot.cli import build_command
from attnres_aot.cli.entry import main
assemble.prove_image = conftest.fake_proof
conftest.attnres_aot.plan.plan.choices_for = conftest.one_choice
build_command.gather_facts = lambda flavour: BuildFacts(
    toolchain={}, package_version="1", sources=dict.fromkeys(conftest.KERNEL_PARAMS, "0" * 64), compiler="fake_compiler"
)
sys.exit(main())
"""
FULL = "cannot write to standard output"


@pytest.fixture
def shell(tmp_path, compiler):
    """Runs the command line with a fake compiler under a shell's redirections; returns (status, stdout, stderr)."""
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    start = shlex.join([sys.executable, "-c", PROGRAM, str(Path(__file__).parent), str(compiler.folder)])

    def run(arguments: str, redirections: str) -> tuple[int, str, str]:
        done = subprocess.run(
            ["sh", "-c", f"{start} {arguments} {redirections}"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert not done.stderr.startswith("Traceback")
        assert "\nTraceback" not in done.stderr
        assert "Exception ignored" not in done.stderr
        return done.returncode, done.stdout, done.stderr

    return run


BUILD = "build --arch sm_90 --config tiny.yaml --jobs 1"


@dataclass(frozen=True)
class Streams:
    name: str
    redirections: str
    warned: str = ""
    """What standard error says of it."""


STREAMS = [
    Streams("stdout-closed", ">&-", "warning: cannot write to standard output, the report is lost: it is closed"),
    Streams("stdout-full", ">/dev/full", "the report is lost: No space left on device"),
    Streams("stderr-closed", "2>&-"),
    Streams("stderr-full", "2>/dev/full"),
    Streams("stdin-closed", "<&-"),
    Streams("all-closed", "<&- >&- 2>&-"),
    Streams("both-full", ">/dev/full 2>/dev/full"),
]


@pytest.mark.parametrize("case", STREAMS, ids=lambda case: case.name)
def test_a_build_succeeds_whatever_its_streams_are(case, shell, tmp_path, files_of):
    status, out, err = shell(BUILD, case.redirections)
    assert status == 0
    assert case.warned in err
    files = files_of(tmp_path / "artifacts" / "tiny-sm_90")
    assert len(read_bundle(tmp_path / "artifacts" / "tiny-sm_90").manifest.images) == 5
    assert files["manifest.json"].startswith(b"{\n")
    if ">" not in case.redirections.replace("2>", ""):
        assert "5 compiled" in out
    status, out, err = shell(f"{BUILD} --json", case.redirections)
    assert status == 0
    if ">" not in case.redirections.replace("2>", ""):
        assert json.loads(out)["bundles"][0]["status"] == "unchanged"
    assert case.warned in err


def test_a_build_whose_reader_has_gone_succeeds_without_a_word(shell, tmp_path):
    status, _, err = shell(f"{BUILD} 2>progress", "| true; exit ${PIPESTATUS:-0}")
    assert (status, err) == (0, "")
    assert (tmp_path / "artifacts" / "tiny-sm_90").exists()
    assert "warning" not in (tmp_path / "progress").read_text()


@pytest.mark.parametrize("stream", [">&-", ">/dev/full"])
def test_a_failed_build_stays_failed(stream, shell, compiler):
    compiler.behave_at({"h1024-nb0": "raise"})
    status, _, err = shell(BUILD, stream)
    assert status == 1
    assert "ValueError: register allocation failed" in err


SHOWING = [
    "plan --arch sm_100 --config tiny.yaml",
    "plan --arch sm_90 --config tiny.yaml --json",
    "--help",
    "--version",
]


@pytest.mark.parametrize("command", SHOWING)
def test_what_only_shows_something_fails_with_one_line_where_it_cannot(command, shell):
    assert shell(command, ">/dev/full") == (1, "", f"error: {FULL}: No space left on device\n")
    assert shell(command, ">&-") == (1, "", f"error: {FULL}: it is closed\n")
    assert shell(command, ">/dev/full 2>&-")[0] == 1


@pytest.mark.parametrize("command", ["doctor", "doctor --json", "doctor --help"])
def test_the_same_holds_in_a_deployment_image(command, shell):
    assert shell(command, ">/dev/full") == (1, "", f"error: {FULL}: No space left on device\n")
    assert shell(command, ">&-") == (1, "", f"error: {FULL}: it is closed\n")


@pytest.mark.parametrize("stream", ["2>&-", "2>/dev/full"])
@pytest.mark.parametrize(
    ("command", "status"), [("build", 2), ("nothing", 2), ("doctor --nothing", 2), ("doctor /x", 1)]
)
def test_an_error_that_cannot_be_told_has_its_status_still(command, status, stream, shell):
    assert shell(command, stream)[0] == status


class Full:
    """Progress on a stream that is full after some calls."""

    def __init__(self, calls: int) -> None:
        self.left, self.seen = calls, []

    def __getattr__(self, name):
        def call(*arguments):
            self.left -= 1
            if self.left < 0:
                raise OSError(28, "No space left on device")
            self.seen.append(name)

        return call


def test_progress_that_cannot_be_shown_any_more_fails_nothing():
    full = Full(2)
    progress = UnfailingProgress(full)
    progress.begin("tiny", 2, 0)
    progress.started("a")
    progress.finished("a", 0.1)
    progress.failed(JobFailure(name="b", reason="x"))
    progress.end()
    assert full.seen == ["begin", "started"]
    assert full.left == -1

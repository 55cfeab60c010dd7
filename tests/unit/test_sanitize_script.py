"""scripts/sanitize.sh with a stand-in for compute-sanitizer: what it runs, and what it makes of the outcome."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from attnres_aot.spec.variants import kernel_symbol

SCRIPT = Path(__file__).parents[2] / "scripts" / "sanitize.sh"
FAKE = """#!/usr/bin/env bash
echo "$*" >>"$FAKE_CALLS"
while [[ $1 == --* ]]; do
    case $1 in
        --log-file) log=$2 ;;
        --tool) tool=$2 ;;
    esac
    [[ $1 == --error-exitcode || $1 == --* ]] && shift 2
done
name=$tool
[[ $* == *--plant* ]] && name=$tool-planted
variable=FAKE_${name//-/_}
IFS='|' read -r status summary <<<"${!variable}"
[[ $status == sleep ]] && exec sleep 30
[[ -n $summary ]] && echo "========= $summary" >"$log"
echo "the program's own words"
exit "$status"
"""
CLEAN, CAUGHT = "0|ERROR SUMMARY: 0 errors", "86|ERROR SUMMARY: 384 errors"
GOOD = {
    "memcheck": CLEAN,
    "initcheck": CLEAN,
    "synccheck": CLEAN,
    "racecheck": "0|RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
    "memcheck-planted": CAUGHT,
    "initcheck-planted": CAUGHT,
}


@dataclass(frozen=True)
class Outcome:
    name: str
    changes: dict[str, str]
    says: str
    environment: dict[str, str] = field(default_factory=dict)


BAD = [
    Outcome("errors", {"memcheck": "86|ERROR SUMMARY: 2 errors"}, "FAILED  memcheck "),
    Outcome("hazards", {"racecheck": "0|RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)"}, "1 hazard"),
    Outcome("program-failed", {"synccheck": "1|ERROR SUMMARY: 0 errors"}, "status 1 (0 wanted)"),
    Outcome("no-summary", {"initcheck": "0|"}, "no summary"),
    Outcome("blind", {"memcheck-planted": CLEAN}, "FAILED  memcheck-planted"),
    Outcome("crash-instead-of-finding", {"initcheck-planted": "1|ERROR SUMMARY: 0 errors"}, "status 1 (86 wanted)"),
    Outcome("too-long", {"racecheck": "sleep|"}, "status 124 (0 wanted)", {"SANITIZE_SECONDS": "1"}),
]


@pytest.fixture
def run(tmp_path):
    fake = tmp_path / "fake-sanitizer"
    fake.write_text(FAKE)
    fake.chmod(0o755)

    def run(changes: dict[str, str], *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        answers = {f"FAKE_{name.replace('-', '_')}": answer for name, answer in {**GOOD, **changes}.items()}
        given = {"COMPUTE_SANITIZER": str(fake), "SANITIZE_LOGS": str(tmp_path / "logs"), **environment}
        calls = {"FAKE_CALLS": str(tmp_path / "calls")}
        return subprocess.run(
            [SCRIPT, *(arguments or ("some-bundle",))], env={**os.environ, **answers, **given, **calls},
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip

    return run


def test_clean_runs_whose_planted_defects_were_caught_pass(run, tmp_path):
    done = run({}, "some-bundle", "2,5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok ") == 6
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 6
    watched = {call.split("--kernel-name kns=")[1].split()[0] for call in calls}
    assert all(name in kernel_symbol("h7168-nb1") and len(name) > 6 for name in watched)
    assert all("--error-exitcode 86" in call for call in calls)
    assert all("sanitize_launches.py some-bundle" in call for call in calls)
    assert sum("--rows 2,5" in call for call in calls) == 4
    assert len({call.split("--port ")[1].split()[0] for call in calls}) == 6


@pytest.mark.parametrize("outcome", BAD, ids=lambda outcome: outcome.name)
def test_anything_else_fails_and_is_shown(outcome, run):
    done = run(outcome.changes, **outcome.environment)
    assert done.returncode == 1
    assert outcome.says in done.stdout
    assert done.stdout.count("FAILED") == 1


def test_a_missing_tool_is_misuse_and_says_where_to_get_it(run):
    done = run({}, COMPUTE_SANITIZER="/nowhere/compute-sanitizer")
    assert done.returncode == 2
    assert "it comes with the CUDA toolkit" in done.stderr


def test_no_bundle_is_misuse(run):
    done = run({}, "a", "b", "c")
    assert done.returncode == 2
    assert "usage" in done.stderr

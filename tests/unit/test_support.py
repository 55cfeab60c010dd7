"""tests/support: what tests rely on when something goes wrong."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import children
from tests.support.children import child, wait_until

ROOT = Path(__file__).parents[2]
SLEEPER = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_failed_test_leaves_no_child_nor_grandchild():
    with pytest.raises(ZeroDivisionError), child([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE) as process:  # noqa: PT012 - what follows is to be left by it
        grandchild = int(process.stdout.readline())
        assert is_alive(grandchild)
        raise ZeroDivisionError
    assert process.returncode == -signal.SIGKILL
    wait_until(lambda: not is_alive(grandchild))


def test_children_can_be_interrupted_though_the_shell_ignores_interrupts():
    program = (
        "import runpy, signal, subprocess, sys\n"
        "assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN\n"
        "runpy.run_path('tests/unit/conftest.py')\n"
        "sleeper = subprocess.Popen([sys.executable, '-c', 'import time; print(1, flush=True); time.sleep(600)'],"
        " stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)\n"
        "sleeper.stdout.readline(); sleeper.send_signal(signal.SIGINT); print(sleeper.wait())\n"
    )
    command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", program]
    with child(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        out, _ = process.communicate(timeout=children.PATIENCE)
    assert int(out) in (-signal.SIGINT, 1)


def test_waiting_in_vain_says_for_what(monkeypatch):
    monkeypatch.setattr(children, "PATIENCE", 0.05)
    with pytest.raises(AssertionError, match="the moon did not happen"):
        wait_until(lambda: False, "the moon")

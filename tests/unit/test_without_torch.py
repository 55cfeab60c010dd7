"""The package where torch is not installed: what needs torch says so, with the command that installs it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import attnres_aot

PROGRAM = """
import sys
sys.modules["torch"] = None  # what an import finds where it is not installed
import attnres_aot
try:
    {call}
except attnres_aot.AttnResError as error:
    assert isinstance(error, ModuleNotFoundError), type(error)
    assert error.__cause__.name == "torch"
    print(error)
"""


def run(call: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(call=call)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("name", ["load", "preload", "PreparedAttnRes", "new_mailbox", "publish", "AttnResWeights"])
def test_it_is_our_error_with_the_command(name):
    assert run(f"attnres_aot.{name}") == (
        f"attnres_aot.{name} launches on torch tensors, and torch is not installed in this environment; "
        "install it with `pip install 'attnres-aot[runtime]'`\n"
    )


def test_so_is_an_import_of_the_name():
    assert "pip install 'attnres-aot[runtime]'" in run("from attnres_aot import load")


def test_what_needs_no_torch_works():
    assert run("print(attnres_aot.parse_variant('nb1-delta'), attnres_aot.parse_arch('sm_90'))") == "nb1-delta sm_90\n"


def test_every_public_name_works_or_says_so():
    call = "\n    ".join(
        f"try: attnres_aot.{name}\n    except attnres_aot.AttnResError as error: assert 'pip install' in str(error)"
        for name in attnres_aot.__all__
    )
    assert run(call) == ""

"""The command line as a whole: help, lists of choices, exit statuses, and life without the build tools."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from attnres_aot._version import __version__
from attnres_aot.cli.commands import COMMANDS, install_command
from attnres_aot.cli.entry import main
from attnres_aot.cli.main import LazyGroup
from attnres_aot.errors import BundleError, CompileError, ConfigError, UsageError

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Misuse:
    name: str
    arguments: list[str]
    says: str


MISUSES = [
    Misuse("missing_arch", ["plan"], "--arch is missing; choose one or more from sm_90, sm_90a, sm_100"),
    Misuse(
        "unknown_arch", ["plan", "--arch", "sm_110"], "no bundle can be built for 'sm_110' (did you mean 'sm_120'?)"
    ),
    Misuse("misspelt_arch", ["plan", "--arch", "sm100"], "(did you mean 'sm_100'?); choose from sm_90, sm_90a"),
    Misuse("two_bad_archs", ["plan", "--arch", "sm_1,x"], "'x' is not a GPU architecture name"),
    Misuse("empty_arch", ["plan", "--arch", ""], "'' is not a GPU architecture name"),
    Misuse("unknown_command", ["plna"], "no command 'plna' (did you mean 'plan'?); choose from plan, build, selftest"),
    Misuse("unknown_option", ["plan", "--foo"], "--foo"),
    Misuse("misspelt_deployment_command", ["docter"], "no command 'docter' (did you mean 'doctor'?); choose from plan"),
    Misuse("unknown_option_of_doctor", ["doctor", "--fast"], "No such option '--fast'"),
    Misuse("abbreviated_option", ["doctor", "--js"], "No such option '--js'"),
    Misuse("option_without_value", ["plan", "--arch"], "--arch"),
    Misuse("text_for_number", ["plan", "--arch", "sm_100", "--tp", "x"], "'x' is not a valid integer"),
    Misuse("extra_argument", ["plan", "--arch", "sm_100", "extra"], "extra"),
    Misuse("no_such_config", ["plan", "--arch", "sm_100", "--config", "none.yaml"], "none.yaml: cannot be read"),
    Misuse("no_such_variant", ["plan", "--arch", "sm_100", "--only", "nb9"], "'nb9' matches none of the 295"),
]


@pytest.mark.parametrize("case", MISUSES, ids=lambda case: case.name)
def test_misuse_exits_with_2_and_says_why_on_stderr(case, capsys):
    assert main(case.arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error:")
    assert case.says in err


def test_config_mistakes_are_listed_one_a_line(tmp_path, capsys):
    path = tmp_path / "bad.yaml"
    path.write_text("name: x\nmodle: 3\n")
    assert main(["plan", "--arch", "sm_100", "--config", str(path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "error:"
    assert f"  {path}:2: 'modle': unknown field (did you mean 'model'?)" in lines[-1]
    assert len(lines) == 4


@dataclass(frozen=True)
class Outcome:
    name: str
    raised: BaseException | int | None
    status: int
    says: str


OUTCOMES = [
    Outcome("done", None, 0, ""),
    Outcome("own_status", 1, 1, ""),
    Outcome("usage", UsageError("no such thing"), 2, "error: no such thing\n"),
    Outcome("config", ConfigError(["f:1: a", "f:2: b"]), 2, "error:\n  f:1: a\n  f:2: b\n"),
    Outcome("compile", CompileError("image x failed"), 1, "error: image x failed\n"),
    Outcome("bundle", BundleError("damaged"), 1, "error: damaged\n"),
    Outcome("interrupt", KeyboardInterrupt(), 130, "error: interrupted; run the same command again to go on\n"),
    Outcome("click_file", click.FileError("f", "is locked"), 1, "error: Could not open file 'f': is locked\n"),
]


@pytest.mark.parametrize("case", OUTCOMES, ids=lambda case: case.name)
def test_outcome_decides_the_status(case, capsys, monkeypatch):
    @click.command()
    def command():
        if isinstance(case.raised, BaseException):
            raise case.raised
        return case.raised

    monkeypatch.setattr(LazyGroup, "get_command", lambda *_: command)
    assert main(["plan"]) == case.status
    assert capsys.readouterr().err.lstrip() == case.says


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_lists_every_command(option, capsys):
    assert main([option]) == 0
    out = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  {name} " in out
        assert command.help.split()[0] in out


def test_no_command_is_misuse_and_shows_help(capsys):
    assert main([]) == 2
    assert "On a build machine" in capsys.readouterr().err


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"attnres-aot {__version__}\n"


def run_without(modules, *arguments):
    """Runs the command line in an interpreter that cannot import some modules."""
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({list(modules)!r}))\n"
        "from attnres_aot.cli.entry import main; sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False, cwd=ROOT
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_without_click_a_command_says_what_to_install(name):
    result = run_without(["click"], name, "--help")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        f"error: the commands of attnres-aot {__version__} need the module 'click', which is not installed: "
        f"{install_command(COMMANDS[name].extra)}\n"
    )


LACKS = {
    "runtime": ("yaml", "rich", "elftools", "cutlass", "numpy"),
    "inspect": ("yaml", "rich", "torch", "cutlass", "numpy"),
    "build": ("torch", "numpy"),
}
"""Extra -> what an install with it alone does not have."""


@pytest.mark.parametrize("name", COMMANDS)
def test_an_extra_installs_what_its_commands_need(name):
    if name in ("selftest", "bench", "tune"):
        pytest.importorskip("torch")
    result = run_without(LACKS[COMMANDS[name].extra], name, "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"Usage: attnres-aot {name} [OPTIONS]")


@pytest.mark.parametrize(
    ("extra", "arguments", "status", "says"),
    [
        ("inspect", ["inspect", "none"], 1, "there is no such folder; build one with"),
        ("inspect", ["verify", "none"], 1, "there is no such folder; build one with"),
        ("inspect", ["config"], 0, "name: kimi_k3\n"),
        ("runtime", ["config"], 0, "name: kimi_k3\n"),
        ("runtime", ["doctor"], 1, "This machine\n"),
        ("inspect", ["doctor"], 1, "torch is not installed"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_commands_run_from_a_small_install(extra, arguments, status, says):
    result = run_without(LACKS[extra], *arguments)
    assert result.returncode == status, result.stderr
    assert says in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("name", "module"), [("plan", "yaml"), ("inspect", "elftools"), ("verify", "elftools"), ("bench", "torch")]
)
def test_what_a_command_lacks_is_named_with_the_extra_that_installs_it(name, module):
    result = run_without([module], name, "--help")
    assert (result.returncode, result.stdout) == (2, "")
    needs = f"{name!r} needs the module {module!r}, which is not installed"
    assert result.stderr.startswith(f"error: {needs}")
    assert result.stderr.endswith(f": {install_command(COMMANDS[name].extra)}\n")


def test_a_missing_module_of_the_package_itself_is_not_hidden(monkeypatch):
    monkeypatch.setitem(COMMANDS, "gone", COMMANDS["plan"])
    with pytest.raises(ModuleNotFoundError, match=r"attnres_aot\.cli\.gone_command"):
        main(["gone"])


def test_every_command_has_its_module_and_every_module_its_command():
    modules = {path.stem.removesuffix("_command") for path in (ROOT / "attnres_aot" / "cli").glob("*_command.py")}
    assert modules == set(COMMANDS)


def test_a_reader_that_leaves_early_causes_no_noise():
    program = [sys.executable, "-m", "attnres_aot", "doctor", "--json"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as running:
        running.stdout.close()
        assert running.wait() == 1
        assert running.stderr.read() == ""


@pytest.mark.parametrize("encoding", ["ascii", "utf-8:strict", "latin-1"])
@pytest.mark.parametrize("name", [b"\xc3\xbcber \xe2\x82\xac", b"not \xff utf-8"], ids=["unicode", "bytes"])
@pytest.mark.parametrize("command", [["verify"], ["inspect"], ["build", "--arch", "sm_90", "--dry-run", "--out"]])
def test_names_that_the_encoding_lacks_are_escaped(command, name, encoding, tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "attnres_aot", *command, os.fsencode(tmp_path) + b"/" + name],
        capture_output=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )
    assert result.returncode == (0 if "--dry-run" in command else 1)
    assert b"Traceback" not in result.stderr
    assert b"utf-8" in result.stdout + result.stderr or b"ber " in result.stdout + result.stderr


def test_runs_as_a_module():
    result = subprocess.run(
        [sys.executable, "-m", "attnres_aot", "--version"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (result.returncode, result.stdout) == (0, f"attnres-aot {__version__}\n")


def test_a_reader_that_goes_away_is_no_traceback():
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run(
        [sys.executable, "-m", "attnres_aot", "plan", "--arch", "sm_100", "--json"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        cwd=ROOT,
    )
    os.close(write)
    assert "Traceback" not in result.stderr
    assert "Exception ignored" not in result.stderr
    assert result.returncode == 1

"""The dispatcher of deployment commands: exit statuses, error texts, and what it leaves unimported."""

from __future__ import annotations

import argparse
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from attnres_aot.cli import device_cli
from attnres_aot.errors import BundleError, ConfigError, OperandError, UsageError


def install(monkeypatch: pytest.MonkeyPatch, run: Callable[[argparse.Namespace], int]) -> None:
    """Makes `probe` a command that takes --depth and runs `run`."""
    module = types.ModuleType("probe_command")
    module.add_arguments = lambda parser: parser.add_argument("--depth", type=int, default=1)
    module.run = run
    monkeypatch.setitem(sys.modules, "probe_command", module)
    probe = device_cli._Command(module="probe_command", help="Probe.")
    monkeypatch.setitem(device_cli._MODULES, "probe", probe)


@dataclass(frozen=True, kw_only=True)
class Raised:
    name: str
    error: BaseException
    status: int
    text: str


RAISED = [
    Raised(name="usage", error=UsageError("no arch 'x'"), status=2, text="error: no arch 'x'\n"),
    Raised(name="config", error=ConfigError(["a: 1", "b: 2"]), status=2, text="error: a: 1\nb: 2\n"),
    Raised(name="bundle", error=BundleError("damaged"), status=1, text="error: damaged\n"),
    Raised(name="operand", error=OperandError("rows"), status=1, text="error: rows\n"),
    Raised(name="interrupt", error=KeyboardInterrupt(), status=130, text="error: interrupted\n"),
]


@pytest.mark.parametrize("case", RAISED, ids=lambda case: case.name)
def test_errors_become_statuses(
    case: Raised, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise case.error

    install(monkeypatch, run)
    assert device_cli.main(["probe"]) == case.status
    assert capsys.readouterr() == ("", case.text)


def test_other_exceptions_are_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: argparse.Namespace) -> int:
        raise ZeroDivisionError

    install(monkeypatch, run)
    with pytest.raises(ZeroDivisionError):
        device_cli.main(["probe"])


def test_arguments_status_and_output_pass_through(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        args.echo(f"depth {args.depth}")
        return 1

    install(monkeypatch, run)
    assert device_cli.main(["probe", "--depth", "7"]) == 1
    assert capsys.readouterr() == ("depth 7\n", "")


@dataclass(frozen=True, kw_only=True)
class Misuse:
    name: str
    argv: list[str]
    text: str


MISUSES = [
    Misuse(name="no-command", argv=[], text="error: no command given; choose from config, doctor"),
    Misuse(
        name="misspelt", argv=["docter"], text="error: no command 'docter' (did you mean 'doctor'?); choose from config"
    ),
    Misuse(name="unknown-option", argv=["doctor", "--fast"], text="unrecognized arguments: --fast"),
    Misuse(name="abbreviated-option", argv=["doctor", "--js"], text="unrecognized arguments: --js"),
]


@pytest.mark.parametrize("case", MISUSES, ids=lambda case: case.name)
def test_misuse_is_status_2(case: Misuse, capsys: pytest.CaptureFixture[str]) -> None:
    assert device_cli.main(case.argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert case.text in err


def test_help_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert device_cli.main(["doctor", "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: attnres-aot doctor [-h] [--name NAME] [--json] [bundle]")
    assert device_cli.COMMANDS["doctor"] in out


def test_a_command_without_its_dependency_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, lambda args: 0)
    monkeypatch.delitem(sys.modules, "probe_command")

    def fail(name: str) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(device_cli.importlib, "import_module", fail)
    assert device_cli.main(["probe"]) == 1
    assert capsys.readouterr().err == (
        "error: 'probe' needs the module 'torch', which is not installed: pip install 'attnres-aot[runtime]'\n"
    )
    assert device_cli.main(["probe", "--help"]) == 0
    out = capsys.readouterr().out
    assert "Probe." in out
    assert "pip install 'attnres-aot[runtime]'; then --help lists its options" in out


def test_a_missing_module_of_the_package_itself_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = device_cli._Command(module="attnres_aot.gone", help="")
    monkeypatch.setitem(device_cli._MODULES, "gone", gone)
    with pytest.raises(ModuleNotFoundError, match=r"attnres_aot\.gone"):
        device_cli.main(["gone"])


def test_every_command_has_a_module_with_the_two_functions() -> None:
    for name, command in device_cli._MODULES.items():
        module = device_cli.importlib.import_module(command.module)
        assert callable(module.add_arguments), name
        assert callable(module.run), name


def test_doctor_needs_only_the_standard_library() -> None:
    program = (
        "import sys; before = set(sys.modules)\n"
        "from attnres_aot.cli.device_cli import main\n"
        "main(['doctor'])\n"
        "names = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print('foreign:', sorted(names - sys.stdlib_module_names - {'attnres_aot'}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "foreign: []"


def test_a_reader_that_leaves_early_causes_no_noise() -> None:
    program = "import sys; from attnres_aot.cli.device_cli import main; sys.exit(main(['doctor', '--json']))"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        running.stdout.close()
        assert running.wait(timeout=60) == 1
        assert running.stderr.read() == ""

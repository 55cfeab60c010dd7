"""Every command that a message, a help text or a document tells a person to run, run.

The commands are taken from the sources: from the strings of every module, in backticks or on a line of their own, and
from the documents' code. What stands for something of the reader's (BUNDLE, `{arch}`) is filled in. A command that is
added is found and run here without anybody remembering to; one that is written so that it is not found fails
`test_no_command_is_hidden`.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

from attnres_aot.cli.commands import COMMANDS
from attnres_aot.cli.entry import main
from attnres_aot.config.reader import DEFAULT_CONFIG, load_config

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "attnres_aot"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = "|".join(COMMANDS)
ADVISED = rf"attnres-aot (?:{NAMES})\b|pip install |python -c "
"""How a command in a message starts."""
DOCUMENTED = rf"{ADVISED}|make [a-z-]+|scripts/[a-z_]+\.sh"
"""How a command in a document starts."""
NEED_A_GPU = ("selftest", "bench", "tune")

PLACEHOLDERS = {
    "{arch}": "sm_90",
    "{end}": " --force",
    "{extra}": "inspect",
    "{name}": "kimi_k3_all",
    "{path.stem}": "kimi_k3_all",
    "{PACKAGE}": "nvidia-cuda-nvdisasm",
    "{library}": "nvidia-cutlass-dsl-libs-cu13",
    "{installed[COMPILER]}": "4.8.1",
    "{shlex.quote(str(bundle.path))}": "artifacts/kimi_k3-sm_100",
    "BUNDLE": "artifacts/kimi_k3-sm_100",
    "ARCH": "sm_90",
    "DIR": "elsewhere",
    "FILE": "my_model.yaml",
}
"""What a command may leave to its reader, as its source spells it, and what stands for it here."""

MENTIONS = [
    ("attnres_aot/bundle/reader.py", "by 'attnres-aot build'"),
    ("attnres_aot/bench/results.py", "of 'attnres-aot bench --save'"),
    ("attnres_aot/tune/show.py", "by 'attnres-aot tune'"),
]
"""Names of commands in the course of a sentence that are no advice to run them."""


@dataclass(frozen=True)
class Printed:
    """One command as its source spells it."""

    where: str
    text: str

    @property
    def filled(self) -> str:
        text = self.text
        for placeholder, value in PLACEHOLDERS.items():
            text = (
                text.replace(placeholder, value)
                if "{" in placeholder
                else re.sub(rf"\b{placeholder}\b(?!=)", value, text)
            )
        return text


def strings_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the strings of a module but for docstrings, with what is filled in as `{expression}`."""
    tree = ast.parse(path.read_text())
    passed_over = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    passed_over |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [
                part.value if isinstance(part, ast.Constant) else "{" + ast.unparse(part.value) + "}"
                for part in node.values
            ]
            yield node.lineno, "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in passed_over:
            yield node.lineno, node.value


def commands_in(text: str) -> list[str]:
    """Returns the commands in a message: in backticks, or alone on a line."""
    quoted = re.findall(rf"`((?:{ADVISED})[^`]*)`", text)
    return quoted + re.findall(rf"^ *((?:{ADVISED})[^`\n]*)$", text, re.MULTILINE)


def printed_by_modules() -> Iterator[Printed]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for line, text in strings_of(path):
            for command in commands_in(text):
                yield Printed(f"{path.relative_to(ROOT)}:{line}", command)


def printed_by_documents() -> Iterator[Printed]:
    for path in DOCUMENTS:
        for block in re.findall(r"^```sh\n(.*?)^```$|((?:^    \S.*\n)+)", path.read_text(), re.MULTILINE | re.DOTALL):
            for line in "".join(block).splitlines():
                command = line.split("  #")[0].strip()
                if re.match(DOCUMENTED, command):
                    yield Printed(path.name, command)
        for command in re.findall(rf"`((?:{DOCUMENTED})[^`\n]*)`", path.read_text()):
            yield Printed(path.name, command)


def unique(found: Iterator[Printed]) -> list[Printed]:
    return list({each.filled: each for each in found}.values())


COMMANDS_PRINTED = unique(iter([*printed_by_modules(), *printed_by_documents()]))
OURS = [each for each in COMMANDS_PRINTED if each.text.startswith("attnres-aot ")]
INLINE_NAMES = re.compile(rf"attnres-aot (?:{NAMES})")


def test_commands_are_found():
    where = {each.where.split(":")[0] for each in COMMANDS_PRINTED}
    assert {
        "attnres_aot/config/advice.py",
        "attnres_aot/plan/plan.py",
        "README.md",
        "stress.md",
        "benchmarks.md",
    } <= where
    assert len(COMMANDS_PRINTED) > 40


def test_no_command_is_hidden():
    """Whatever looks like a command stands in backticks or on a line of its own, so that it is run here."""
    for path in sorted(PACKAGE.rglob("*.py")):
        where = str(path.relative_to(ROOT))
        for line, text in strings_of(path):
            rest = text
            for command in commands_in(text):
                rest = rest.replace(command, "")
            for mentioned_in, mention in MENTIONS:
                rest = rest.replace(mention, "") if where == mentioned_in else rest
            assert not re.search(rf"attnres-aot (?:{NAMES})\b|pip install ", rest), f"{where}:{line}: {rest}"


@pytest.mark.parametrize("printed", COMMANDS_PRINTED, ids=lambda each: each.text)
def test_nothing_is_left_to_fill_in(printed):
    assert not re.search(r"\{[a-z_.()]+\}", printed.filled), f"{printed.where}: add what stands for it to PLACEHOLDERS"


@pytest.fixture(scope="session")
def shipped_bundle(tmp_path_factory, request):
    """A bundle of the shipped configuration, of test cubins, made once."""
    return tmp_path_factory.mktemp("shipped")


@pytest.fixture
def desk(shipped_bundle, make_bundle, tmp_path, monkeypatch) -> Path:
    """A folder such as the documents assume: bundles, configurations, results, and the commands on the PATH."""
    artifacts = shipped_bundle / "artifacts"
    if not artifacts.exists():
        for arch in ("sm_90", "sm_100"):
            made = make_bundle(arch, config=load_config(DEFAULT_CONFIG)).path
            shutil.copytree(made, artifacts / made.name)
    folder = tmp_path / "desk"
    folder.mkdir()
    shutil.copytree(artifacts, folder / "artifacts")
    shutil.copytree(ROOT / "configs", folder / "configs")
    shutil.copytree(ROOT / "tests" / "gpu", folder / "tests" / "gpu", ignore=shutil.ignore_patterns("*.py*"))
    shutil.copy(DEFAULT_CONFIG, folder / "my_model.yaml")
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, arguments in (("attnres-aot", "-m attnres_aot"), ("python", "")):
        shim(tools / name, f'exec "{sys.executable}" {arguments} "$@"')
    shim(tools / "nvdisasm", "echo disassembled")
    monkeypatch.setenv("PATH", os.pathsep.join([str(tools), os.environ["PATH"]]))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(folder)
    return folder


def shim(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def test_every_command_of_this_program_works_as_printed(desk):
    """Builds are previews: a build of everything is what other tests do. Those that need a GPU are parsed."""
    failures = []
    for printed in OURS:
        command = printed.filled
        name, *arguments = shlex.split(command)[1:]
        if INLINE_NAMES.fullmatch(command) and printed.where.endswith(".md"):
            continue  # a document names the command
        if name in NEED_A_GPU and find_spec("torch") is None:
            continue
        if name in NEED_A_GPU:
            failures += [] if parses(name, arguments) else [f"{printed.where}: {command}"]
            continue
        run = command.replace("attnres-aot build", "attnres-aot build --dry-run")
        done = subprocess.run(["sh", "-c", run], capture_output=True, text=True, check=False, timeout=300)
        if done.returncode not in ((0, 1) if name == "doctor" else (0,)) or "Traceback" in done.stderr:
            failures.append(f"{printed.where}: {command}\n{done.stderr}")
    assert not failures, "\n".join(failures)


def parses(name: str, arguments: list[str]) -> bool:
    command = importlib.import_module(f"attnres_aot.cli.{name}_command").command
    with contextlib.suppress(click.UsageError), click.Context(command) as context:
        return command.make_parser(context).parse_args(arguments)[1] == []
    return False


@pytest.mark.parametrize("printed", [each for each in COMMANDS_PRINTED if each.text.startswith("pip")], ids=str)
def test_what_pip_is_to_install_exists(printed):
    """An extra of this package, or a package that one of its extras names."""
    text = (ROOT / "pyproject.toml").read_text()
    wanted = [word for word in shlex.split(printed.filled)[2:] if not word.startswith("-")]
    assert wanted
    for asked in wanted:
        word = re.sub(r"-libs-cu\d+(?===)", "", asked)  # the compiler's libraries have the compiler's version
        extra = re.fullmatch(r"attnres-aot\[(\w+)\]", word)
        assert re.search(rf"^{extra[1]} = \[" if extra else rf'"{re.escape(word)}\b', text, re.MULTILINE), word


@pytest.mark.parametrize("printed", [each for each in COMMANDS_PRINTED if each.text.startswith("make ")], ids=str)
def test_a_make_target_exists(printed):
    targets = set(re.findall(r"^([a-z-]+):.* ## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {word for word in shlex.split(printed.filled)[1:] if "=" not in word} <= targets


@pytest.mark.parametrize("printed", [each for each in COMMANDS_PRINTED if each.text.startswith("scripts")], ids=str)
def test_a_script_exists(printed):
    assert os.access(ROOT / printed.filled.split()[0], os.X_OK)


@pytest.mark.parametrize("printed", [each for each in COMMANDS_PRINTED if each.text.startswith("python")], ids=str)
def test_a_line_of_python_works(printed):
    line = shlex.split(printed.filled)
    assert line[:2] == ["python", "-c"]
    assert subprocess.run([sys.executable, *line[1:]], check=False, timeout=300).returncode == 0


@dataclass(frozen=True)
class Mistake:
    """A mistake whose message prints commands."""

    name: str
    line: str
    says: str
    """What the commands begin with."""


MISTAKES = [
    Mistake("no_config", "plan --arch sm_90 --config none.yaml", "attnres-aot config >"),
    Mistake("empty_config", "plan --arch sm_90 --config empty.yaml", "attnres-aot config >"),
    Mistake(
        "no_name", "plan --arch sm_120 --config configs/kimi_k3_all.yaml --only nb9", "attnres-aot plan --arch sm_120"
    ),
    Mistake("no_such_option", "plan --archs sm_90", "attnres-aot plan --help"),
    Mistake("no_bundle", "inspect none", "attnres-aot build --arch"),
    Mistake("no_image", "inspect 'with space' --image none", "attnres-aot inspect 'with space' --json"),
    Mistake("no_variant", "inspect 'with space' --variant none", "attnres-aot inspect 'with space' --json"),
]


@pytest.mark.parametrize("case", MISTAKES, ids=lambda case: case.name)
def test_commands_of_a_message_work(case, bundle, tmp_path, monkeypatch, capsys):
    """The message itself is printed, and what it says is then run."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(bundle.path, "with space")
    shutil.copytree(ROOT / "configs", "configs")
    Path("empty.yaml").touch()
    assert main(shlex.split(case.line)) in (1, 2)
    (command,) = commands_in(capsys.readouterr().err)
    assert command.startswith(case.says)
    command = Printed("", command).filled
    words = shlex.split(command)[1:]
    words = words[: words.index(">")] if ">" in words else words
    assert main([*words, *(["--dry-run"] if words[0] == "build" else [])]) == 0

"""The README's examples: commands that exist, options that exist, code that parses, configurations that load."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

import attnres_aot
from attnres_aot.cli.commands import COMMANDS
from attnres_aot.cli.entry import main
from attnres_aot.config.reader import DEFAULT_CONFIG, parse_config
from attnres_aot.plan.plan import plan
from attnres_aot.spec.arch import BUILDABLE

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@dataclass(frozen=True)
class Example:
    name: str
    text: str


def blocks(language):
    found = re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [Example(f"{language}{number}", text) for number, text in enumerate(found)]


def commands(program):
    lines = [line.split("#")[0].strip() for block in blocks("sh") for line in block.text.splitlines()]
    return [line for line in lines if line.split()[:1] == [program]]


def test_every_line_of_a_shell_example_is_of_a_known_program():
    assert len(commands("attnres-aot")) + len(commands("make")) + len(commands("pip")) == sum(
        len(block.text.splitlines()) for block in blocks("sh")
    )


@pytest.mark.parametrize("line", commands("make"))
def test_make_target_exists(line):
    targets = set(re.findall(r"^([a-z-]+):.* ## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {word for word in line.split()[1:] if "=" not in word} <= targets


@pytest.mark.parametrize("line", [line for line in commands("attnres-aot") if line.split()[1] == "plan"])
def test_plan_example_runs(line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_model.yaml").write_bytes(DEFAULT_CONFIG.read_bytes())
    assert main(shlex.split(line)[1:]) == 0
    assert "kimi_k3" in capsys.readouterr().out


@pytest.mark.parametrize("line", [line for line in commands("attnres-aot") if line.split()[1] in COMMANDS])
def test_options_of_an_example_exist(line):
    _, name, *arguments = shlex.split(line.split(" > ")[0])
    command = importlib.import_module(f"attnres_aot.cli.{name}_command").command
    with click.Context(command) as context:
        _, rest, _ = command.make_parser(context).parse_args(arguments)
    assert rest == []


def test_examples_are_of_commands_that_exist():
    names = {line.split()[1] for line in commands("attnres-aot")}
    assert names <= COMMANDS.keys()


def test_build_options_in_the_table_exist():
    command = importlib.import_module("attnres_aot.cli.build_command").command
    have = {option for parameter in command.params for option in parameter.opts}
    table = README.split("Useful options of `build`:")[1].split("\n\n")[1]
    named = set(re.findall(r"(--[a-z][a-z-]+)", table))
    assert len(named) >= 8
    assert named <= have


def test_arch_table_is_complete():
    table = README.split("| `--arch` | runs on |")[1].split("\n\n")[0]
    assert set(re.findall(r"sm_[0-9a-z]+", table)) == set(map(str, BUILDABLE))


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: block.name)
def test_configuration_example_plans(block):
    assert plan(parse_config(block.text.encode(), "README.md"), BUILDABLE[0]).images


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.name)
def test_python_example_uses_names_that_exist(block):
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = {"attnres_aot": attnres_aot, "prepared": attnres_aot.PreparedAttnRes}.get(node.value.id)
            assert owner is None or hasattr(owner, node.attr), ast.unparse(node)


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#h][^)]*)\)", README))
def test_linked_file_exists(target):
    assert (ROOT / target).is_file()


def test_table_of_contents_is_complete():
    anchors = re.findall(r"^- \[.*\]\(#(.*)\)$", README, re.MULTILINE)
    titles = re.findall(r"^## (.*)$", README, re.MULTILINE)
    assert anchors == [re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles]

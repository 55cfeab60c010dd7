"""The pages: links lead somewhere, paths exist, and examples work as printed."""

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
PAGES = {path.name: path for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md")))}
TEXTS = {name: path.read_text() for name, path in PAGES.items()}
README, BUILDING, LAYOUT = (TEXTS[name] for name in ("README.md", "building.md", "layout.md"))


@dataclass(frozen=True)
class Example:
    name: str
    text: str


def blocks(language):
    return [
        Example(f"{name}-{language}{number}", text)
        for name, page in TEXTS.items()
        for number, text in enumerate(re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    ]


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
    if name in ("selftest", "bench", "tune"):
        pytest.importorskip("torch")
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
    table = BUILDING.split("Useful options of `build`:")[1].split("\n\n")[1]
    named = set(re.findall(r"(--[a-z][a-z-]+)", table))
    assert len(named) >= 8
    assert named <= have


def test_arch_table_is_complete():
    table = BUILDING.split("| `--arch` | runs on |")[1].split("\n\n")[0]
    assert set(re.findall(r"sm_[0-9a-z]+", table)) == set(map(str, BUILDABLE))


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: block.name)
def test_configuration_example_plans(block):
    assert plan(parse_config(block.text.encode(), "building.md"), BUILDABLE[0]).images


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.name)
def test_python_example_uses_names_that_exist(block):
    pytest.importorskip("torch")
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = {"attnres_aot": attnres_aot, "prepared": attnres_aot.PreparedAttnRes}.get(node.value.id)
            assert owner is None or hasattr(owner, node.attr), ast.unparse(node)


def anchors(page: str) -> set[str]:
    """Returns the anchors that GitHub gives the titles of a page."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^a-z0-9 _-]", "", title.lower()).replace(" ", "-") for title in titles}


LINKS = [(name, target) for name, page in TEXTS.items() for target in re.findall(r"\]\(([^)]+)\)", page)]


@pytest.mark.parametrize(("page", "target"), LINKS)
def test_links_lead_somewhere(page, target):
    if target.startswith("https://"):
        return
    file, _, anchor = target.partition("#")
    path = (PAGES[page].parent / file).resolve() if file else PAGES[page]
    assert path.is_file()
    assert not anchor or anchor in anchors(path.read_text())


def test_every_page_is_reached_from_the_readme():
    reached, waiting = set(), ["README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            targets = [target.partition("#")[0].split("/")[-1] for name, target in LINKS if name == page]
            waiting += [target for target in targets if target in PAGES]
    assert reached | {"CHANGELOG.md"} == set(PAGES)


def test_what_layout_says_to_change_exists():
    """A path is relative to the package or to the checkout; NAME stands for any."""
    table = LAYOUT.split("| to change | go to | and to |")[1].split("\n\n")[0]
    paths = re.findall(r"`([\w./]+/[\w./]*)`", table)
    assert len(paths) > 20
    for path in paths:
        found = path.replace("NAME", "*").replace("ARCH", "*")
        assert any(next(root.glob(found), None) for root in (ROOT, ROOT / "attnres_aot")), path


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 160

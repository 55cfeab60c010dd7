"""Who may import whom: the package's import graph against the table of docs/layout.md, and what imports load."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "attnres_aot"
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
MODULES = {name.removesuffix(".__init__"): path for name, path in MODULES.items()}
ROW = re.compile(r"^\| `([\w./]+?)/?` \|[^|]*\| ([^|]*) \| ([^|]*) \|$", re.MULTILINE)
TABLE = {
    room.replace("/", "."): (set(re.findall(r"`([\w.]+)`", imports)), set(re.findall(r"[a-z]+", loads)))
    for room, imports, loads in ROW.findall((ROOT / "docs" / "layout.md").read_text())
}
"""Room -> the rooms that it may import, and the third parties."""
DISTRIBUTIONS = {"click", "cutlass", "elftools", "pytest", "rich", "torch", "yaml"}


def imported(path: Path) -> Iterator[str]:
    """Yields the modules that a file imports, inside functions as well, but for what only a type checker sees."""
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            whole = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            yield from {full if full in MODULES else node.module for full in whole.values()}
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        waiting += ast.iter_child_nodes(node)


GRAPH = {name: set(imported(path)) for name, path in MODULES.items()}


def room_of(module: str) -> str:
    """The folder of a module; runtime's folders are rooms of their own, and a module at the top is one."""
    parts = module.split(".")[1:]
    if not parts:
        return "__init__"
    is_folder = MODULES[module].name == "__init__.py"
    depth = 2 if parts[0] == "runtime" and len(parts) - (not is_folder) > 1 else 1
    return ".".join(parts[:depth])


def test_no_module_imports_itself_in_a_circle():
    own = {name: {other for other in others if other in MODULES} - {name} for name, others in GRAPH.items()}
    try:
        list(TopologicalSorter(own).static_order())
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


def test_rooms_have_no_circle_either():
    rooms: dict[str, set[str]] = {}
    for name, others in GRAPH.items():
        rooms.setdefault(room_of(name), set()).update(room_of(other) for other in others if other in MODULES)
    TopologicalSorter({room: others - {room} for room, others in rooms.items()}).prepare()


def test_the_table_names_every_room_once():
    assert set(TABLE) == {room_of(name) for name in MODULES} - {"__main__", "__init__"}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_are_those_of_the_table(module):
    room = room_of(module)
    if room in ("__main__", "__init__"):
        return
    rooms, distributions = TABLE[room]
    own = {room_of(other) for other in GRAPH[module] if other in MODULES} - {room, "__init__"}
    assert own - {"errors", "records", "_version"} <= rooms
    foreign = {other.split(".")[0] for other in GRAPH[module]} & DISTRIBUTIONS
    assert foreign <= distributions


def test_the_table_allows_nothing_that_is_not_there():
    for room, (rooms, distributions) in TABLE.items():
        modules = [name for name in MODULES if room_of(name) == room]
        found = {room_of(other) for name in modules for other in GRAPH[name] if other in MODULES}
        assert rooms <= found, room
        assert distributions & DISTRIBUTIONS <= {o.split(".")[0] for name in modules for o in GRAPH[name]}, room


HEAVY = ("cutlass", "torch", "numpy", "cuda")
BUILD_TOOLS = ("click", "yaml", "rich", "elftools")


@dataclass(frozen=True)
class Start:
    """A module, and what importing it must not load, in whatever way."""

    module: str
    never: tuple[str, ...]


STARTS = [
    Start("spec.variants", HEAVY + BUILD_TOOLS),
    Start("bundle.reader", HEAVY + BUILD_TOOLS),
    Start("plan.plan", HEAVY + BUILD_TOOLS),
    Start("config.reader", (*HEAVY, "click", "rich", "elftools")),
    Start("config.shipped", HEAVY + BUILD_TOOLS),
    Start("cli.entry", HEAVY + BUILD_TOOLS),
    Start("cli.main", (*HEAVY, "yaml", "rich", "elftools")),
    Start("cli.plan_command", (*HEAVY, "elftools")),
    # Builds are compared, written and checked without the compiler; only workers load it.
    Start("cli.build_command", HEAVY),
    Start("verify.bundle_check", (*HEAVY, "click", "yaml", "rich")),
    Start("cli.verify_command", (*HEAVY, "yaml", "rich")),
    Start("cli.inspect_command", (*HEAVY, "yaml", "rich")),
    Start("cli.doctor_command", (*HEAVY, "yaml", "rich", "elftools")),
    Start("cli.config_command", (*HEAVY, "yaml", "rich", "elftools")),
    Start("cli.bench_command", ("cutlass", "numpy", "yaml", "rich", "elftools")),
    Start("runtime.api", ("cutlass", "numpy", *BUILD_TOOLS)),
    Start("bench.command", ("cutlass", "numpy", *BUILD_TOOLS)),
    Start("tune.command", ("cutlass", "numpy", *BUILD_TOOLS)),
    Start("selftest.command", ("cutlass", "numpy", *BUILD_TOOLS)),
    Start("verify.bundle_check", ("cutlass", "torch", "numpy", "cuda", "click", "yaml", "rich")),
    Start("kernels.compile", HEAVY + BUILD_TOOLS),
    Start("doctor.doctor", ("cutlass", "torch", *BUILD_TOOLS)),
]

PROBE = """
import contextlib, importlib, json, os, sys
for module in sys.argv[1:]:  # each in a process of its own, as fresh as this one
    if module == "torch":
        with contextlib.suppress(ModuleNotFoundError):
            import torch  # once for all that follow, which need it
        continue
    child = os.fork()
    if not child:
        try:
            importlib.import_module("attnres_aot." + module)
            loaded = sorted(sys.modules)
        except ModuleNotFoundError as error:
            loaded = error.name
        print(json.dumps([module, loaded]), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, module
"""


@pytest.fixture(scope="module")
def loaded():
    fresh = [start.module for start in STARTS if "torch" in start.never]
    others = [start.module for start in STARTS if "torch" not in start.never]
    command = [sys.executable, "-c", PROBE, *fresh, "torch", *others]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return dict(json.loads(line) for line in result.stdout.splitlines())


@pytest.mark.parametrize("start", STARTS, ids=lambda start: start.module)
def test_importing_loads_only_what_it_may(start, loaded):
    if loaded[start.module] == "torch" and "torch" not in start.never:
        pytest.skip("torch is not installed")
    assert f"attnres_aot.{start.module}" in loaded[start.module]
    assert [name for name in loaded[start.module] if name.split(".")[0] in start.never] == []

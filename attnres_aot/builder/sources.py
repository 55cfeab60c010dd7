"""Which of the package's code decides an image's bytes, and what else a manifest says, and the digests of it.

An image follows from what its build key holds by value (spec, symbol, parameters, launch constants, toolchain) and from
two pieces of code: its kernel's module with the device code which that imports in turn, and `COMPILING`. What else a
manifest says follows from `RULES`. Of all these only what Python does counts: a comment, a docstring, the layout or the
text of an error leaves every digest as it is.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attnres_aot.bundle.manifest import canonical_json
from attnres_aot.spec.params import KERNEL_PARAMS

PACKAGE = Path(__file__).resolve().parent.parent
"""Folder of the attnres_aot package."""
COMPILING = "kernels/compile.py"
"""The module that every image is compiled by, relative to the package; of it, ENTRIES and what they use of it."""
ENTRIES = ("compile_image", "prepare_environment")
"""What a worker calls."""
BY_VALUE = frozenset({"launch_constants"})
"""What those use of their module, but a build key holds the result of."""
RULES = (
    "builder/assemble.py",
    "builder/budgets.py",
    "builder/keys.py",
    "kernels/compile.py",
    "plan/plan.py",
    "plan/records.py",
    "plan/settings.py",
    "spec/params.py",
    "spec/tables.py",
    "spec/toolkits.py",
    "spec/variants.py",
)
"""What a manifest is derived by, relative to the package."""
MANIFEST = "manifest"
"""Key of the digest of RULES, beside those of the kernels."""

_DEVICE_CODE = "attnres_aot.kernels"
_SAYS_NOTHING = frozenset({"ctx", "kind", "msg", "type_comment", "type_ignores", "type_params"})


def source_files(kernel: str, package: Path = PACKAGE) -> tuple[Path, ...]:
    """Lists the device code of `kernel`, ascending by path."""
    found: set[Path] = set()
    waiting = [package / "kernels" / f"{kernel}.py"]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += (package / name for name in _device_imports(path) if (package / name).is_file())
    return tuple(sorted(found))


def sources_digests(package: Path = PACKAGE) -> dict[str, str]:
    """Returns kernel -> digest of the code that decides its images, and that of RULES as MANIFEST.

    The digests are over relative names and contents, wherever the package lies.
    """
    module = _read(package / COMPILING)
    compiling = _digest([_plain(part) for part in _used(module, ENTRIES)])
    found = {}
    for kernel in sorted(KERNEL_PARAMS):
        device = {_name(path, package): _file_digest(path) for path in source_files(kernel, package)}
        found[kernel] = combined_digest({**device, COMPILING: compiling})
    return {**found, MANIFEST: combined_digest({name: _file_digest(package / name) for name in RULES})}


@functools.cache
def own_sources() -> dict[str, str] | None:
    """Returns `sources_digests` of this package; None where its source files are not installed."""
    try:
        return sources_digests()
    except OSError:
        return None


def combined_digest(digests: Mapping[str, str]) -> str:
    """Returns the one digest that stands for several."""
    return _digest(dict(digests))


def _digest(value: Any) -> str:
    return hashlib.sha256(canonical_json(value).encode("ascii")).hexdigest()


def _file_digest(path: Path) -> str:
    return _digest(_plain(_read(path)))


def _read(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes())


def _name(path: Path, package: Path) -> str:
    return path.relative_to(package).as_posix()


def _plain(node: Any) -> Any:
    """Turns code into plain data that is the same for every version of Python, without what does not decide anything.

    Left out are comments, layout, texts that are statements of their own (docstrings), and what an error says.
    """
    if isinstance(node, list):
        return [_plain(item) for item in node if not _is_docstring(item)]
    if not isinstance(node, ast.AST):
        return node if isinstance(node, str | int | None) else repr(node)
    if isinstance(node, ast.Raise):
        return ["Raise"]
    fields = dict(ast.iter_fields(node))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("Error"):
        fields = {"func": node.func}
    said = {name: _plain(value) for name, value in fields.items() if name not in _SAYS_NOTHING}
    return [type(node).__name__, {name: value for name, value in said.items() if value not in (None, [])}]


def _is_docstring(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _used(module: ast.Module, entries: tuple[str, ...]) -> list[ast.stmt]:
    """Returns the definitions of `entries` in a module, and those of all names there that they use in turn, by name."""
    defined = dict(_definitions(module))
    found: dict[str, ast.stmt] = {}
    waiting = list(entries)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = defined[name]
            names = {node.id for node in ast.walk(defined[name]) if isinstance(node, ast.Name)}
            waiting += sorted((names & defined.keys()) - BY_VALUE)
    return [found[name] for name in sorted(found)]


def _definitions(module: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    for statement in module.body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            yield statement.name, statement
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from ((target.id, statement) for target in targets if isinstance(target, ast.Name))


def _device_imports(path: Path) -> Iterator[str]:
    """Yields the files, relative to the package, of the device code that a module may import."""
    for node in ast.walk(_read(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            if name.startswith(_DEVICE_CODE + "."):
                yield "/".join(name.split(".")[1:]) + ".py"

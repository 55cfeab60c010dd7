"""scripts/check_matrix.py: what it claims to cover is what pyproject.toml declares."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text()


@pytest.fixture(scope="module")
def matrix():
    spec = importlib.util.spec_from_file_location("check_matrix", ROOT / "scripts" / "check_matrix.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_covers_the_pythons_that_are_claimed(matrix):
    assert list(matrix.PYTHONS) == re.findall(r"Python :: (3\.\d+)", PYPROJECT)
    assert f">={matrix.PYTHONS[0]}" in re.search(r"requires-python = \"(.*)\"", PYPROJECT)[1]


def test_the_lowest_versions_are_those_declared(matrix):
    pins = matrix.lowest(
        'runtime = ["torch>=2.9"]\ninspect = ["click>=8.2"]\nbuild = ["attnres-aot[inspect]", "a==1.2"]'
    )
    assert pins == ["a==1.2", "click==8.2", "torch==2.9"]
    assert {pin.split("==")[0] for pin in matrix.lowest(PYPROJECT)} >= {"torch", "click", "pyyaml", "pyelftools"}
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", pin) for pin in matrix.lowest(PYPROJECT))


def test_a_python_that_does_not_run_is_not_found(matrix, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    shim = tmp_path / "python3.12"
    shim.write_text("#!/bin/sh\necho 3.12 is not active >&2; exit 127\n")
    shim.chmod(0o755)
    assert matrix.find("3.12") is None
    real = tmp_path / "versions" / "3.12.9" / "bin" / "python3.12"
    real.parent.mkdir(parents=True)
    real.write_text("#!/bin/sh\necho 3.12\n")
    real.chmod(0o755)
    assert matrix.find("3.12") == real

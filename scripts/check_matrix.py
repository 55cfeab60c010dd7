"""Runs the tests on every Python that the package claims, and once with the lowest versions of what it depends on.

    python scripts/check_matrix.py [--only 3.12 ...] [--lowest-only]

On each of PYTHONS that is installed: all tests that need no torch, with the versions of constraints.txt. On the lowest
of them besides: all tests, with the lowest version of every dependency that pyproject.toml declares. Environments are
made in .venv-matrix on first use. A Python that is not installed is named and skipped; the exit status is 1 if any test
failed or if no Python was found.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENVS = ROOT / ".venv-matrix"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
"""The versions that pyproject.toml claims; a test compares."""
EXTRAS = ("runtime", "inspect", "build")
"""Extras whose lowest versions are tested."""
TOOLS = ("pytest", "pytest-xdist", "hypothesis")
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")


def interpreters(version: str) -> Iterator[Path]:
    """Yields where a Python may be: on PATH, and under pyenv, whose shims may not be active."""
    found = shutil.which(f"python{version}")
    if found:
        yield Path(found)
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"))


def find(version: str) -> Path | None:
    """Returns an interpreter of that version that runs, or None."""
    program = "import sys; print('%d.%d' % sys.version_info[:2])"
    for path in interpreters(version):
        done = subprocess.run([path, "-c", program], capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return path
    return None


def lowest(pyproject: str, extras: Sequence[str] = EXTRAS) -> list[str]:
    """Returns the lowest version of every requirement of the extras, pinned."""
    pins = []
    for extra in extras:
        listed = re.search(rf"^{extra} = \[(.*)\]", pyproject, re.MULTILINE)
        assert listed, extra
        needs = (each for each in re.findall(r'"([^"]+)"', listed[1]) if not each.startswith("attnres-aot["))
        pins += [each.replace(">=", "==") for each in needs]
    return sorted(set(pins))


def environment(name: str, interpreter: Path, *installs: Sequence[str]) -> Path:
    """Makes an environment, once, and returns its interpreter."""
    folder = VENVS / name
    python, stamp = folder / "bin" / "python", folder / ".installed"
    if not stamp.exists():
        print(f"setting up {folder.relative_to(ROOT)}", flush=True)
        subprocess.run([interpreter, "-m", "venv", "--clear", folder], check=True)
        for arguments in installs:
            subprocess.run([python, *PIP, *arguments], check=True, cwd=ROOT)
        stamp.touch()
    return python


def needing_torch(python: Path) -> list[str]:
    """Returns the test files and folders that cannot be collected without torch."""
    done = subprocess.run(
        [python, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/unit"],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    failed = re.findall(r"^ERROR (\S+)", done.stdout, re.MULTILINE)
    missing = set(re.findall(r"^E +(\w*Error.*)", done.stdout, re.MULTILINE))
    if missing - {"ModuleNotFoundError: No module named 'torch'"}:
        raise SystemExit(f"tests cannot be collected, and torch is not why:\n{done.stdout[-3000:]}")
    return failed


def test(python: Path, ignored: Sequence[str]) -> bool:
    """Runs the tests but for those ignored; tells whether all passed."""
    command = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-n",
        "auto",
        "--dist",
        "worksteal",
        "tests/unit",
    ]
    command += [f"--ignore={path}" for path in ignored]
    return subprocess.run(command, check=False, cwd=ROOT).returncode == 0


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=PYTHONS, help="these versions")
    parser.add_argument("--lowest-only", action="store_true", help="only the lowest versions of the dependencies")
    options = parser.parse_args()
    found = {version: find(version) for version in options.only or PYTHONS}
    results = []
    for version, interpreter in found.items():
        if interpreter is None:
            results.append(f"Python {version}: not installed, skipped")
        elif not options.lowest_only:
            python = environment(version, interpreter, ["-c", "constraints.txt", "-e", ".[build]", *TOOLS])
            results.append(f"Python {version} without torch: {_word(test(python, needing_torch(python)))}")
    installed = [(version, interpreter) for version, interpreter in found.items() if interpreter]
    if installed:
        version, interpreter = installed[0]
        pins = lowest((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        python = environment(f"{version}-lowest", interpreter, pins, ["--no-deps", "-e", "."], TOOLS)
        results.append(f"Python {version}, everything, with {', '.join(pins)}: {_word(test(python, ()))}")
    print("\n".join(["", *results]))
    return 0 if installed and all("FAILED" not in result for result in results) else 1


def _word(passed: bool) -> str:
    return "passed" if passed else "FAILED"


if __name__ == "__main__":
    sys.exit(main())

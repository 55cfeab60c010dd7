"""Checks that a bundle's bytes depend on neither the compiler libraries beside the chosen one nor the machine's driver.

Run by `make check-flavours` with the python of a virtual environment of its own, into which it installs the compiler's
libraries and from which it removes them: both, then cu12 alone, then cu13 alone. With each it builds small bundles in
every installed flavour, without a driver and beside stand-ins that serve CUDA 11.8, 12.4 and 13.0. All bundles of one
flavour must be equal to the last byte and verify; no build may load the driver; those of two flavours must differ; and
a flavour that is not installed must be refused with the command that installs it. Needs g++ and a package index.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAND_IN = ROOT / "tests" / "stub_cuda" / "version_only.cpp"
COMPILER = "nvidia-cutlass-dsl"
FLAVOURS = ("cu12", "cu13")
INSTALLED = (("cu12", "cu13"), ("cu12",), ("cu13",))
DRIVERS = {"no driver": None, "CUDA 11.8": 11080, "CUDA 12.4": 12040, "CUDA 13.0": 13000}
ARCHS = ("sm_90", "sm_100f")
CONFIG = """\
name: small
model: {hidden_size: 1024, layers: 2, block_size: 1, leading_dense_layers: 0}
mailbox: {capacity: 4, slots: [2]}
deployments:
  - {tp: 2, dcp: 1, attn_stats: "", attn_stats_blocks: ""}
"""
TIME_LIMIT_S = 600


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command from the checkout and returns what became of it."""
    return subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIME_LIMIT_S,
    )


def pip(*arguments: str) -> None:
    """Runs pip in this environment."""
    done = run(sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments)
    if done.returncode:
        sys.exit(f"pip {' '.join(arguments)} failed:\n{done.stderr}")


def install(flavours: tuple[str, ...]) -> None:
    """Makes `flavours` the compiler libraries that are installed, each anew, as they share folders."""
    version = importlib.metadata.version(COMPILER)
    names = {flavour: f"{COMPILER}-libs-{flavour}" for flavour in FLAVOURS}
    pip("uninstall", "--yes", *names.values())
    pip("install", "--no-deps", "--force-reinstall", *(f"{names[flavour]}=={version}" for flavour in flavours))


def stand_in(folder: Path, serves: int) -> Path:
    """Compiles a driver library that serves one CUDA version; returns its folder."""
    folder.mkdir()
    done = run("g++", "-std=c++17", "-shared", "-fPIC", f"-DSERVES={serves}", "-o", folder / "libcuda.so.1", STAND_IN)
    if done.returncode:
        sys.exit(done.stderr)
    (folder / "libcuda.so").symlink_to("libcuda.so.1")
    return folder


def build(folder: Path, flavour: str, driver: Path | None) -> subprocess.CompletedProcess[str]:
    """Builds the small bundles into `folder`."""
    folder.mkdir()
    config = folder / "small.yaml"
    config.write_text(CONFIG)
    environment = {"STAND_IN_DRIVER_LOADED": str(folder / "loaded")}
    if driver is not None:
        environment["LD_LIBRARY_PATH"] = str(driver)
    command = (sys.executable, "-m", "attnres_aot")
    done = run(
        *(
            *command,
            "build",
            "--arch",
            ",".join(ARCHS),
            "--flavour",
            flavour,
            "--config",
            config,
            "--out",
            folder / "out",
        ),
        **environment,
    )
    return done if done.returncode else run(*command, "verify", folder / "out")


def digest(folder: Path) -> str:
    """Returns one digest of all files below a folder, by name and content."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    parts = [f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest() if parts else ""


def check(folder: Path) -> list[str]:
    """Builds everything below `folder`, prints one line per build and returns what is wrong."""
    problems: list[str] = []
    drivers = {
        name: None if serves is None else stand_in(folder / f"driver{serves}", serves)
        for name, serves in DRIVERS.items()
    }
    digests: dict[str, set[str]] = {flavour: set() for flavour in FLAVOURS}
    number = 0
    for installed in INSTALLED:
        install(installed)
        for name, driver in drivers.items():
            for flavour in FLAVOURS:
                number += 1
                work = folder / f"build{number}"
                done = build(work, flavour, driver)
                what = f"{'+'.join(installed)} installed, {name}, flavour {flavour}"
                if flavour not in installed:
                    said = f"pip install '{COMPILER}-libs-{flavour}=="
                    good = done.returncode == 1 and said in done.stderr and not (work / "out").exists()
                    outcome = "refused, with the command that installs it"
                else:
                    found = digest(work / "out")
                    digests[flavour].add(found)
                    good = done.returncode == 0 and len(digests[flavour]) == 1
                    outcome = found[:16]
                good = good and not (work / "loaded").exists()
                print(f"{what}: {outcome if good else 'WRONG'}", flush=True)
                if not good:
                    problems.append(f"{what}: status {done.returncode}\n{done.stdout}{done.stderr}")
    if digests["cu12"] & digests["cu13"]:
        problems.append("the two flavours gave equal bundles: one of them did not compile")
    return problems


def main() -> None:
    """Checks in a temporary folder; exits with 1 and what is wrong."""
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        problems = check(Path(folder))
    if problems:
        sys.exit("\n".join(problems))
    print("all bundles of a flavour are equal, and no build loaded a driver")


if __name__ == "__main__":
    main()

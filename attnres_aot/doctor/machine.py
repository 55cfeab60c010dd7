"""Gathers what `doctor` reports about the machine: package, torch, driver, GPUs, build tools and environment.

Everything here must work on a broken installation, so torch and the compiler are read from disk and never imported,
and the driver is asked through `runtime.cuda.driver` without creating a context. Nothing is judged here;
`doctor.diagnose` does that.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from attnres_aot._version import __version__
from attnres_aot.runtime.cuda.driver import (
    LIBRARY_NAME,
    STUB_NAME,
    error_name,
    missing_functions,
    open_library,
    served_cuda,
    start_and_list,
)
from attnres_aot.runtime.find.places import ENVIRONMENT_VARIABLE

BUILD_PACKAGES = ("nvidia-cutlass-dsl", "click", "pyyaml", "rich", "pyelftools")
"""Distributions that building needs and running does not."""
ENVIRONMENT = (ENVIRONMENT_VARIABLE, "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
"""Environment variables that explain a failure."""

_KERNEL_MODULE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True, kw_only=True)
class Torch:
    """The installed torch, read from its files."""

    version: str
    """Version, e.g. `2.11.0+cu130`."""
    cuda: str | None
    """CUDA version that it was built with, e.g. `13.0`; None for a build without CUDA."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU that the driver shows to this process."""

    index: int
    """Ordinal, as CUDA counts under CUDA_VISIBLE_DEVICES."""
    name: str
    """Product name."""
    capability: tuple[int, int]
    """Compute capability (major, minor)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """The CUDA driver as this process sees it."""

    load_error: str = ""
    """Why its library cannot be loaded; empty when it can."""
    cuda: tuple[int, int] | None = None
    """Newest CUDA version that it serves, (major, minor)."""
    missing: tuple[str, ...] = ()
    """Functions that the loader calls and the library lacks."""
    failure: str = ""
    """Name of the error with which a first call was refused, e.g. `CUDA_ERROR_NO_DEVICE`; empty when none was."""
    kernel_module: str | None = None
    """Version of the loaded kernel module, e.g. `580.65.06`; None when there is none."""
    gpus: tuple[Gpu, ...] = ()
    """GPUs by ordinal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Everything about the machine that decides whether bundles can be launched here."""

    package: str
    """Version of this package."""
    python: str
    """Version of Python."""
    system: str
    """Operating system and processor, e.g. `Linux x86_64`."""
    torch: Torch | None
    """The installed torch, or None."""
    driver: Driver
    """The CUDA driver."""
    build_packages: dict[str, str | None]
    """Version of each of BUILD_PACKAGES, None where it is not installed."""
    environment: dict[str, str]
    """Values of those of ENVIRONMENT that are set."""


def gather_machine() -> Machine:
    """Looks at this machine."""
    return Machine(
        package=__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        torch=gather_torch(),
        driver=gather_driver(),
        build_packages={name: _installed(name) for name in BUILD_PACKAGES},
        environment=_environment(os.environ),
    )


def gather_torch() -> Torch | None:
    """Reads the version facts of the installed torch without importing it."""
    try:
        spec = importlib.util.find_spec("torch")
    except ValueError:  # an object without a spec in sys.modules
        return None
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    found = _assigned(text, "__version__")
    return Torch(version=found or _installed("torch") or "unknown", cuda=_assigned(text, "cuda"))


def gather_driver(load: Callable[[str], Any] = open_library, kernel_module_file: Path = _KERNEL_MODULE) -> Driver:
    """Asks the driver for its version and GPUs; creates no context.

    Args:
      load: loads a shared library by name, as `open_library` does.
      kernel_module_file: the file in which the kernel module states its version.
    """
    kernel_module = _kernel_module(kernel_module_file)
    try:
        library = load(LIBRARY_NAME)
    except OSError as error:
        return Driver(load_error=str(error), kernel_module=kernel_module)
    missing = missing_functions(library)
    if "cuDriverGetVersion" in missing or "cuInit" in missing:
        return Driver(missing=missing, kernel_module=kernel_module)
    cuda = served_cuda(library)
    if cuda is None:
        return Driver(missing=missing, failure=STUB_NAME, kernel_module=kernel_module)
    status, devices = start_and_list(library)
    failure = error_name(library, status) if status else ""
    gpus = tuple(Gpu(index=i, name=name, capability=capability) for i, (name, capability) in enumerate(devices))
    return Driver(cuda=cuda, missing=missing, failure=failure, kernel_module=kernel_module, gpus=gpus)


def _kernel_module(file: Path) -> str | None:
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", text)
    return match[0] if match else "unknown version"


def _assigned(source: str, name: str) -> str | None:
    """Returns the string constant that a module's source assigns to `name`, without running it."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return None
    for node in body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = getattr(node, "value", None)
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                return value.value
    return None


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution) or "of unknown version"  # None where its metadata names none
    except PackageNotFoundError:
        return None
    except Exception:  # noqa: BLE001 - its metadata may be broken in any way
        return "of unknown version"


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: environ[name] for name in ENVIRONMENT if name in environ}

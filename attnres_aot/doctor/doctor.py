"""Says whether bundles can be launched on this machine: facts, the search for a bundle, and problems with fixes.

`diagnose` is pure: facts in, findings out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from attnres_aot.bundle.manifest import to_json
from attnres_aot.config.advice import build_command
from attnres_aot.doctor.machine import Driver, Machine, Torch, gather_machine
from attnres_aot.runtime.cuda.driver import LIBRARY_NAME, MIN_CUDA, MIN_DRIVER, STUB_ADVICE, STUB_FOUND, STUB_NAME
from attnres_aot.runtime.find.archs import dotted
from attnres_aot.runtime.find.places import Place, search_order
from attnres_aot.runtime.find.resolve import Request, Resolution, locate
from attnres_aot.spec.arch import BUILDABLE, parse_arch

_FAILURE_FIXES = {
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "library and kernel module are of different releases: reboot after the "
    "driver update, or remove the driver library that the container brings",
    "CUDA_ERROR_SYSTEM_NOT_READY": "start the fabric manager (nvidia-fabricmanager), which multi-GPU systems need",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "take the cuda-compat folder out of LD_LIBRARY_PATH",
}

Severity = Literal["problem", "note"]
"""`problem`: launching cannot work until it is fixed; `note`: worth knowing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What `diagnose` judges."""

    machine: Machine
    """The machine."""
    places: tuple[Place, ...]
    """Every place where bundles were looked for."""
    resolutions: tuple[Resolution, ...]
    """One per distinct compute capability among the GPUs, in order of appearance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that a reader should know."""

    severity: Severity
    """Whether it prevents launching."""
    what: str
    """What is the case."""
    fix: str
    """What to do about it."""


def gather_facts(path: str | None, name: str | None) -> Facts:
    """Looks at the machine and searches a bundle for each of its GPUs.

    Args:
      path: a bundle or a folder of bundles, or None for the usual search.
      name: configuration name, or None for any.
    """
    machine = gather_machine()
    places = tuple(search_order(path))
    capabilities = dict.fromkeys(gpu.capability for gpu in machine.driver.gpus)
    driver = machine.driver.cuda
    resolutions = tuple(
        locate(Request(capability=found, name=name, driver=driver), places)[0] for found in capabilities
    )
    return Facts(machine=machine, places=places, resolutions=resolutions)


def diagnose(facts: Facts) -> list[Finding]:
    """Turns facts into findings, problems first. Pure."""
    findings = [
        *_judge_driver(facts.machine),
        *_judge_torch(facts.machine.torch, facts.machine.driver.cuda),
        *_judge_bundles(facts.resolutions),
        *_judge_build_packages(facts.machine.build_packages),
    ]
    return sorted(findings, key=lambda finding: finding.severity != "problem")


def _judge_driver(machine: Machine) -> Iterator[Finding]:
    driver = machine.driver
    if driver.load_error:
        yield _no_library(driver)
        return
    if driver.failure == STUB_NAME:
        yield _problem(STUB_FOUND.format(name=LIBRARY_NAME), STUB_ADVICE)
        return
    if driver.cuda is not None and driver.cuda < MIN_CUDA:
        what = f"the driver serves CUDA {dotted(driver.cuda)}; launching needs {dotted(MIN_CUDA)}"
        yield _problem(what, f"install a driver of release {MIN_DRIVER} or later")
    elif driver.missing:
        what = f"the driver library lacks {', '.join(driver.missing)}"
        yield _problem(what, f"install a driver of release {MIN_DRIVER} or later")
    if driver.failure and driver.failure != "CUDA_ERROR_NO_DEVICE":
        fix = _FAILURE_FIXES.get(
            driver.failure, "run nvidia-smi, which says more; a reboot or a driver reinstall may help"
        )
        yield _problem(f"the driver refused to start: {driver.failure}", fix)
    elif not driver.gpus:
        yield _no_gpu(machine.environment.get("CUDA_VISIBLE_DEVICES"))


def _no_library(driver: Driver) -> Finding:
    if driver.kernel_module is not None:
        what = f"the host has driver {driver.kernel_module}, but its library is not visible here ({driver.load_error})"
        return _problem(
            what, "start the container with GPU access (NVIDIA Container Toolkit, e.g. docker run --gpus all)"
        )
    what = f"no NVIDIA driver ({driver.load_error}): fine for building bundles, not for running them"
    return _problem(what, f"to run them, use a machine with an NVIDIA driver of release {MIN_DRIVER} or later")


def _no_gpu(visible: str | None) -> Finding:
    if visible is not None:
        what = f"CUDA_VISIBLE_DEVICES={visible!r} leaves no GPU: fine for building bundles, not for running them"
        return _problem(what, "unset CUDA_VISIBLE_DEVICES, or name GPUs that exist")
    what = "the driver shows no GPU: fine for building bundles, not for running them"
    return _problem(what, "to run them, use a machine, or give the container access to a device, with a GPU")


def _judge_torch(torch: Torch | None, driver_cuda: tuple[int, int] | None) -> Iterator[Finding]:
    if torch is None:
        yield _problem(
            "torch is not installed; the loader launches on torch tensors", "`pip install 'attnres-aot[runtime]'`"
        )
    elif torch.cuda is None:
        yield _problem(f"torch {torch.version} is built without CUDA", "install a CUDA build of torch")
    elif driver_cuda is not None and _major(torch.cuda) > driver_cuda[0]:
        what = f"torch is built for CUDA {torch.cuda}, but the driver serves CUDA {dotted(driver_cuda)}"
        yield _problem(what, f"install a torch built for CUDA {driver_cuda[0]}, or a newer driver")


def _judge_bundles(resolutions: tuple[Resolution, ...]) -> Iterator[Finding]:
    for resolution in resolutions:
        capability = resolution.request.capability
        chosen = resolution.chosen
        if chosen is None:
            yield _problem(resolution.problem, resolution.next_step)
        elif parse_arch(chosen.arch).capability != capability:
            what = f"{chosen.path} for {chosen.arch} serves compute capability {dotted(capability)} by CUDA's rule"
            exact = next((arch for arch in BUILDABLE if arch.capability == capability), None)
            better = f"; an exact bundle would be preferred: {build_command(str(exact), chosen.name)}" if exact else ""
            yield Finding(severity="note", what=what, fix=f"nothing needed{better}")


def _judge_build_packages(packages: dict[str, str | None]) -> Iterator[Finding]:
    missing = [name for name, version in packages.items() if version is None]
    if missing:
        what = f"bundles cannot be built here ({', '.join(missing)} not installed); running does not need it"
        yield Finding(severity="note", what=what, fix="to build, `pip install 'attnres-aot[build]'`")


def _problem(what: str, fix: str) -> Finding:
    return Finding(severity="problem", what=what, fix=fix)


def _major(version: str) -> int:
    head = version.partition(".")[0]
    return int(head) if head.isdigit() else 0


def report(facts: Facts, findings: list[Finding]) -> Any:
    """Returns facts and findings as plain data for a program."""
    return to_json(
        {
            "can_launch": not any(finding.severity == "problem" for finding in findings),
            "findings": tuple(findings),
            "machine": facts.machine,
            "places": facts.places,
            "resolutions": facts.resolutions,
        }
    )

"""`attnres-aot doctor`: whether bundles can be launched on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

from attnres_aot.cli.options import json_option
from attnres_aot.cli.printing import show, show_facts, show_json, strong
from attnres_aot.cli.wording import count
from attnres_aot.doctor.doctor import Facts, Finding, diagnose, gather_facts, report
from attnres_aot.doctor.machine import Driver, Machine, Torch
from attnres_aot.runtime.cuda.driver import MIN_CUDA
from attnres_aot.runtime.find.archs import dotted, fitting_archs
from attnres_aot.runtime.find.places import ENVIRONMENT_VARIABLE, Place
from attnres_aot.runtime.find.resolve import unusable


@click.command("doctor")
@click.argument("bundle", required=False)
@click.option("--name", help="Configuration name, e.g. kimi_k3; any when left out.")
@json_option
def command(bundle: str | None, *, name: str | None, as_json: bool) -> int:
    """Say whether bundles can be launched here, and how to fix it if not.

    BUNDLE is a bundle or a folder of bundles; when left out, they are searched for as load() does. Exits with 1 when
    something prevents launching.
    """
    facts = gather_facts(bundle, name)
    findings = diagnose(facts)
    if as_json:
        show_json(report(facts, findings))
    else:
        show_report(facts, findings)
    return int(any(finding.severity == "problem" for finding in findings))


def show_report(facts: Facts, findings: Sequence[Finding]) -> None:
    """Prints the machine, the search for bundles, then what is wrong with the fixes."""
    show_facts("This machine", _machine(facts.machine))
    for resolution in facts.resolutions:
        lines = "".join(f"\n  {line}" for line in resolution.lines())
        show(f"\n{strong(f'Bundle for compute capability {dotted(resolution.request.capability)}')}{lines}")
    if not facts.resolutions:
        show(f"\n{strong('Bundles found')} (no GPU to choose for)")
        for line in _places(facts.places):
            show(f"  {line}")
    show()
    for finding in findings:
        show(f"{strong(finding.severity)}: {finding.what}\n  fix: {finding.fix}")
    problems = sum(finding.severity == "problem" for finding in findings)
    show(f"{count(problems, 'problem')}: this machine cannot launch" if problems else "This machine can launch.")


def _machine(machine: Machine) -> Iterator[tuple[str, str]]:
    yield "attnres-aot", f"{machine.package}, Python {machine.python}, {machine.system}"
    yield "torch", _torch(machine.torch)
    yield "driver", _driver(machine.driver)
    yield "build tools", ", ".join(f"{name} {found or '-'}" for name, found in machine.build_packages.items())
    for name, value in machine.environment.items():
        yield "environment", f"{name}={value}"
    if ENVIRONMENT_VARIABLE not in machine.environment:
        yield "environment", f"{ENVIRONMENT_VARIABLE} is not set"
    for gpu in machine.driver.gpus:
        archs = ", ".join(map(str, fitting_archs(gpu.capability))) or "none that can be built"
        yield f"GPU {gpu.index}", f"{gpu.name}, compute capability {dotted(gpu.capability)}; runs code for {archs}"


def _torch(torch: Torch | None) -> str:
    if torch is None:
        return "not installed"
    return f"{torch.version} ({f'CUDA {torch.cuda}' if torch.cuda else 'without CUDA'})"


def _driver(driver: Driver) -> str:
    module = f"kernel module {driver.kernel_module or 'not loaded'}"
    if driver.load_error:
        return f"not available: {driver.load_error}; {module}"
    serves = f"serves CUDA {dotted(driver.cuda)}" if driver.cuda else "CUDA version unknown"
    return f"{serves} (at least {dotted(MIN_CUDA)} is needed), {module}"


def _places(places: Sequence[Place]) -> Iterator[str]:
    for place in places:
        yield f"{place.label}: {place.note or f'{len(place.candidates)} found'}"
        for candidate in place.candidates:
            found = f"{candidate.name} for {candidate.arch}, needs a driver for CUDA {candidate.oldest_driver}"
            yield f"  {candidate.path}: {unusable(candidate) or found}"

"""Whether a machine's driver is new enough for a bundle's code, in words."""

from __future__ import annotations

from attnres_aot.config.advice import build_command
from attnres_aot.runtime.find.places import Candidate
from attnres_aot.spec.arch import BUILDABLE, parse_arch
from attnres_aot.spec.toolkits import FLAVOURS, Cuda, cuda_text, driver_text, oldest_driver, parse_cuda


def refusal(oldest: str, driver: Cuda | None) -> str:
    """Says why a driver that serves CUDA `driver` cannot run code that needs `oldest`; empty when it can, or for None.

    Args:
      oldest: what a manifest says, e.g. `12.8`.
      driver: the driver's CUDA version, or None where it is not known.
    """
    needed = parse_cuda(oldest)
    if needed is None or driver is None or driver >= needed:
        return ""
    return f"its code needs a driver for {driver_text(needed)} or later; this machine's serves CUDA {cuda_text(driver)}"


def next_step(candidate: Candidate, driver: Cuda) -> str:
    """Says what helps where the driver is too old for `candidate`: a newer driver, or code for older ones."""
    needed = parse_cuda(candidate.oldest_driver)
    step = f"install a driver for {driver_text(needed)} or later" if needed else "install a newer driver"
    arch = parse_arch(candidate.arch)
    buildable = FLAVOURS if arch in BUILDABLE else ()
    others = [flavour for flavour in buildable if oldest_driver(flavour, arch) <= driver]
    if others:
        step += f", or build for older ones: {build_command(str(arch), candidate.name, flavour=others[0])}"
    return step + "."

"""Build keys: the identity that decides whether an image has to be compiled again.

What a loader asks for (a variant name) is stable across rebuilds; a build key is not. It covers the spec, the arch,
the symbol, the parameters, the launch constants, the code that decides the bytes (`sources`), the toolchain and its
flavour.
"""

from __future__ import annotations

import hashlib
import importlib
from dataclasses import dataclass

from attnres_aot._version import __version__
from attnres_aot.builder.budgets import budget_for
from attnres_aot.builder.sources import combined_digest, sources_digests
from attnres_aot.builder.toolchain import toolchain_versions
from attnres_aot.bundle.manifest import BudgetRecord, canonical_json, to_json
from attnres_aot.plan.plan import Plan
from attnres_aot.spec.arch import Arch
from attnres_aot.spec.params import KERNEL_PARAMS, Param
from attnres_aot.spec.toolkits import DEFAULT_FLAVOUR
from attnres_aot.spec.variants import ImageSpec, kernel_symbol

DEFAULT_COMPILER = "attnres_aot.kernels.compile"
"""Module that compiles images."""
PACKAGE_COMPONENT = "attnres-aot"
"""Name under which a manifest records this package's own version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildFacts:
    """What this machine and this package would compile with; gathered once, then passed on."""

    toolchain: dict[str, str]
    """Component -> version of the compiler."""
    flavour: str = DEFAULT_FLAVOUR
    """Which of the compiler's libraries compiles, a key of `toolkits.FLAVOURS`."""
    package_version: str
    """Version of attnres-aot: recorded, but no part of a build key, as it changes no image."""
    sources: dict[str, str]
    """`sources_digests`: of the code that decides each kernel's images, and of what a manifest is derived by."""
    compiler: str = DEFAULT_COMPILER
    """Dotted name of the module that compiles images in the workers."""

    @property
    def sources_sha256(self) -> str:
        """Digest of all those sources, as a manifest records it."""
        return combined_digest(self.sources)

    @property
    def recorded(self) -> dict[str, str]:
        """The component versions that a manifest records: the compiler's and this package's."""
        return {PACKAGE_COMPONENT: self.package_version, **self.toolchain}


def gather_facts(flavour: str = DEFAULT_FLAVOUR) -> BuildFacts:
    """Reads the installed compiler's versions and the package's own sources.

    Raises:
      CompileError: the compiler, or its library of that flavour, is not installed.
    """
    return BuildFacts(
        toolchain=toolchain_versions(flavour), flavour=flavour, package_version=__version__, sources=sources_digests()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedImage:
    """An image that a plan needs, with its build identity."""

    spec: ImageSpec
    """What to compile."""
    launch: dict[str, int]
    """Launch constants that it is compiled with."""
    params: tuple[Param, ...]
    """Parameters that it must take."""
    budget: BudgetRecord
    """What it may use."""
    key: str
    """Build key."""

    @property
    def kernel(self) -> str:
        """Which kernel: a key of `params.KERNEL_PARAMS`."""
        return self.spec.kernel

    @property
    def name(self) -> str:
        """Image name, unique within a bundle."""
        return str(self.spec)


def wanted_images(plan: Plan, facts: BuildFacts) -> tuple[WantedImage, ...]:
    """Returns the images of a plan, in its order, with their build keys."""
    constants = importlib.import_module(facts.compiler).launch_constants
    wanted = []
    for spec in plan.images:
        launch = constants(spec)
        wanted.append(
            WantedImage(
                spec=spec,
                launch=launch,
                params=KERNEL_PARAMS[spec.kernel],
                budget=budget_for(launch),
                key=build_key(spec, launch, plan.arch, facts),
            )
        )
    return tuple(wanted)


def build_key(spec: ImageSpec, launch: dict[str, int], arch: Arch, facts: BuildFacts) -> str:
    """Returns the sha256 of everything that decides the bytes of the image of `spec` for `arch`."""
    identity = {
        "kernel": spec.kernel,
        "spec": to_json(spec),
        "symbol": kernel_symbol(str(spec)),
        "params": to_json(KERNEL_PARAMS[spec.kernel]),
        "launch": launch,
        "arch": str(arch),
        "toolchain": facts.toolchain,
        "flavour": facts.flavour,
        "sources": facts.sources[spec.kernel],
        "compiler": facts.compiler,
    }
    return hashlib.sha256(canonical_json(identity).encode("ascii")).hexdigest()

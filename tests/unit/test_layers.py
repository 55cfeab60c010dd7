"""Which modules may load which: each checked in a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("cutlass", "torch", "numpy", "cuda")
ANYWHERE = ("_version", "records")  # the package itself states its version; records are a decorator
BUILD_TOOLS = ("click", "yaml", "rich", "elftools")


@dataclass(frozen=True)
class Layer:
    """A module, and what importing it must not load."""

    module: str
    never: tuple[str, ...]
    own: tuple[str, ...] | None = None
    """The package's own modules that it may load, or None for any."""


CORE = ("errors", "spec", "bundle", "plan")
LAYERS = [
    Layer("errors", HEAVY + BUILD_TOOLS, ()),
    Layer("spec.arch", HEAVY + BUILD_TOOLS, ("errors",)),
    Layer("spec.tables", HEAVY + BUILD_TOOLS, ("errors",)),
    Layer("spec.variants", HEAVY + BUILD_TOOLS, ("errors",)),
    Layer("spec.params", HEAVY + BUILD_TOOLS, ()),
    Layer("bundle.manifest", HEAVY + BUILD_TOOLS, ("errors", "spec")),
    Layer("bundle.decoding", HEAVY + BUILD_TOOLS, ("errors",)),
    Layer("plan.settings", HEAVY + BUILD_TOOLS, ("errors", "spec", "bundle")),
    Layer("plan.plan", HEAVY + BUILD_TOOLS, CORE),
    Layer("config.shipped", HEAVY + BUILD_TOOLS, ("errors",)),
    Layer("config.advice", HEAVY + BUILD_TOOLS, ("errors", "spec")),
    Layer("input_file", HEAVY + BUILD_TOOLS, ()),
    Layer("config.source", HEAVY + BUILD_TOOLS, ("errors", "input_file")),
    Layer("config.reader", (*HEAVY, "click", "rich", "elftools"), (*CORE, "input_file")),
    Layer("cli.entry", HEAVY + BUILD_TOOLS, ("errors",)),
    Layer("cli.main", (*HEAVY, "yaml", "rich", "elftools"), ("errors",)),
    Layer(
        "cli.plan_command",
        (*HEAVY, "elftools"),
        (*CORE, "config", "input_file"),
    ),
    # Builds are compared, written and checked without the compiler; only workers load it.
    Layer("cli.build_command", HEAVY),
    Layer("cli.verify_command", HEAVY),
    Layer("cli.inspect_command", HEAVY),
    Layer("bundle.reader", HEAVY + BUILD_TOOLS, ("errors", "spec")),
    Layer("cli.device_cli", HEAVY + BUILD_TOOLS, ("errors",)),
    Layer("cli.streams", HEAVY + BUILD_TOOLS, ()),
    Layer("runtime.api", ("cutlass", "numpy", *BUILD_TOOLS)),
    Layer("bench.command", ("cutlass", "numpy", *BUILD_TOOLS)),
    Layer("tune.command", ("cutlass", "numpy", *BUILD_TOOLS)),
    Layer("selftest.command", ("cutlass", "numpy", *BUILD_TOOLS)),
    Layer("verify.bundle_check", ("cutlass", "torch", "numpy", "cuda", "click", "yaml", "rich")),
    Layer("spec.toolkits", HEAVY + BUILD_TOOLS, ("errors", "spec")),
    Layer("kernels.driverless", HEAVY + BUILD_TOOLS, ("errors", "spec")),
    Layer("kernels.compile", (*HEAVY, *BUILD_TOOLS), ("errors", "spec")),
    Layer("doctor.doctor", ("cutlass", "torch", *BUILD_TOOLS)),
]

PROBE = """
import importlib, json, sys
before = set(sys.modules)
importlib.import_module("attnres_aot." + sys.argv[1])
print(json.dumps(sorted(set(sys.modules) - before)))
"""


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.module)
def test_importing_loads_only_what_it_may(layer):
    result = subprocess.run(
        [sys.executable, "-c", PROBE, layer.module], capture_output=True, text=True, check=True, cwd=ROOT
    )
    loaded = json.loads(result.stdout)
    assert f"attnres_aot.{layer.module}" in loaded
    assert [name for name in loaded if name.split(".")[0] in layer.never] == []
    own = {name.split(".")[1] for name in loaded if name.startswith("attnres_aot.")} - {layer.module.split(".")[0]}
    if layer.own is not None:
        assert own - {*ANYWHERE, *layer.own} == set()

"""Attention-residual (AttnRes) kernels, compiled ahead of time and launched without a compiler.

A deployment needs `load` and `PreparedAttnRes`. Names are imported when they are first used, so that `import
attnres_aot` costs next to nothing and does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnres_aot._version import __version__

if TYPE_CHECKING:
    from attnres_aot.errors import (
        AttnResError,
        BundleError,
        CompileError,
        ConfigError,
        DriverError,
        MissingTorchError,
        OperandError,
        UsageError,
        VariantMissError,
    )
    from attnres_aot.runtime.api import compile_consumer, load, preload, ring_fault, statistics_blocks, statistics_rows
    from attnres_aot.runtime.consumer import Consumer
    from attnres_aot.runtime.cuda.fault import RingFault
    from attnres_aot.runtime.find.loaded import LoadedBundle
    from attnres_aot.runtime.launch.fallback import Missed
    from attnres_aot.runtime.operands.mailbox import arm, new_mailbox
    from attnres_aot.runtime.operands.weights import AttnResWeights
    from attnres_aot.runtime.prepared import PreparedAttnRes
    from attnres_aot.runtime.publish import PreparedPublish, publish
    from attnres_aot.runtime.statistics import PreparedStatistics, statistics
    from attnres_aot.spec.arch import Arch, parse_arch
    from attnres_aot.spec.variants import ConsumerKey, Variant, parse_variant

_HOMES = {
    "Arch": "spec.arch",
    "AttnResError": "errors",
    "AttnResWeights": "runtime.operands.weights",
    "BundleError": "errors",
    "CompileError": "errors",
    "ConfigError": "errors",
    "Consumer": "runtime.consumer",
    "ConsumerKey": "spec.variants",
    "DriverError": "errors",
    "LoadedBundle": "runtime.find.loaded",
    "Missed": "runtime.launch.fallback",
    "MissingTorchError": "errors",
    "OperandError": "errors",
    "PreparedAttnRes": "runtime.prepared",
    "PreparedPublish": "runtime.publish",
    "PreparedStatistics": "runtime.statistics",
    "RingFault": "runtime.cuda.fault",
    "UsageError": "errors",
    "Variant": "spec.variants",
    "VariantMissError": "errors",
    "arm": "runtime.operands.mailbox",
    "compile_consumer": "runtime.api",
    "load": "runtime.api",
    "new_mailbox": "runtime.operands.mailbox",
    "parse_arch": "spec.arch",
    "parse_variant": "spec.variants",
    "preload": "runtime.api",
    "publish": "runtime.publish",
    "ring_fault": "runtime.api",
    "statistics": "runtime.statistics",
    "statistics_blocks": "runtime.api",
    "statistics_rows": "runtime.api",
}
"""Public name -> module of this package that defines it."""

__all__ = [  # noqa: RUF022 - the version first
    "__version__",
    "Arch",
    "AttnResError",
    "AttnResWeights",
    "BundleError",
    "CompileError",
    "ConfigError",
    "Consumer",
    "ConsumerKey",
    "DriverError",
    "LoadedBundle",
    "Missed",
    "MissingTorchError",
    "OperandError",
    "PreparedAttnRes",
    "PreparedPublish",
    "PreparedStatistics",
    "RingFault",
    "UsageError",
    "Variant",
    "VariantMissError",
    "arm",
    "compile_consumer",
    "load",
    "new_mailbox",
    "parse_arch",
    "parse_variant",
    "preload",
    "publish",
    "ring_fault",
    "statistics",
    "statistics_blocks",
    "statistics_rows",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        module = import_module(f"{__name__}.{home}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from attnres_aot.errors import MissingTorchError

        raise MissingTorchError(
            f"attnres_aot.{name} launches on torch tensors, and torch is not installed in this environment; "
            "install it with `pip install 'attnres-aot[runtime]'`"
        ) from error
    value: object = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Tells when a launch has to go through its custom operator although Dynamo is not tracing.

`torch.export` (not strict), `make_fx` and other dispatch modes run a model's Python code and see only operators. A
launch that went to the driver there would be missing from the graph, or would be given tensors without memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from attnres_aot.errors import UsageError

_STAND_INS = (
    ("torch._subclasses.fake_tensor", "FakeTensor"),
    ("torch._subclasses.functional_tensor", "FunctionalTensor"),
)


def _count_modes() -> int:
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    return int(_get_current_dispatch_mode() is not None)


dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", _count_modes)  # noqa: SLF001
"""Returns how many dispatch modes are active; each launch asks."""


def stand_ins_among(tensors: Iterable[Any]) -> bool:
    """Tells whether any of these is a tracer's stand-in for a tensor (fake or functional)."""
    kinds = [getattr(sys.modules[home], name) for home, name in _STAND_INS if home in sys.modules]
    return bool(kinds) and any(isinstance(tensor, tuple(kinds)) for tensor in tensors)


def exporting() -> bool:
    """Tells whether torch.export is tracing.

    Reads what `torch.compiler.is_exporting` reads: Dynamo of torch 2.11 takes that function for True in everything that
    it compiles, and every layer would then have a graph of its own.
    """
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def check_bound_tensors_can_be_traced(what: str, tensors: Iterable[Any]) -> bool:
    """Tells whether tensors that are bound may be arguments in what is traced; they must not be mixed with stand-ins.

    Args:
      what: names the launch in the error.
      tensors: the operands that come with the launch.

    Raises:
      UsageError: a graph is recorded that would hold a copy of them, which nothing would keep up to date.
    """
    if not stand_ins_among(tensors):
        return True
    if exporting() or _recording():
        raise UsageError(
            f"{what} cannot be recorded with bound statistics by torch.export, nor by make_fx over fake tensors: the "
            "graph would hold a copy of them that nothing keeps up to date; use torch.compile, or make_fx with "
            "tracing_mode='real', or leave statistics unbound"
        )
    return False


def refuse_recording(what: str) -> None:
    """Refuses what is no operator while operators are being recorded.

    Raises:
      UsageError: a graph is recorded, which would lack the launch.
    """
    if exporting() or _recording():
        raise UsageError(
            f"{what} was called while a graph is being recorded, which would lack the launch; use PreparedAttnRes, "
            "whose launches are recorded"
        )


def _recording() -> bool:
    """Tells whether operators are being recorded into a graph."""
    module = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return module is not None and module.get_proxy_mode() is not None

"""The custom operators by which compiled graphs launch producers.

    statistics(SymInt handle, Tensor blocks, Tensor mixture!, Tensor scal!)
    publish(SymInt handle, Tensor rows, Tensor token!)

`handle` names a prepared producer that is alive. A compiler may pass copies of mixture and scal. A mailbox must never
be copied, as other GPUs read it, so it is no argument: `token` is written instead, in name only, which keeps the launch
in the graph, and in order for whoever takes the token after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attnres_aot.runtime.graphs.tracing import check_bound_tensors_can_be_traced, exporting
from attnres_aot.runtime.producer import producers
from attnres_aot.spec.variants import PUBLISH, STATISTICS


def compile_statistics(prepared: Any, blocks: torch.Tensor, mixture: torch.Tensor, scal: torch.Tensor) -> None:
    """Puts a launch of the statistics producer into the graph that Dynamo is tracing."""
    if exporting():
        raise RuntimeError("a statistics producer cannot be exported: the program would write into copies")
    torch.ops.attnres_aot.statistics(prepared.handle_tensor.size(0), blocks, mixture, scal)


def compile_publish(prepared: Any, rows: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Puts a launch of the publisher into the graph that Dynamo is tracing; returns its token."""
    if exporting():
        return dispatch_publish(prepared, rows)
    torch.ops.attnres_aot.publish(prepared.handle_tensor.size(0), rows, token)
    return token


def dispatch_statistics(prepared: Any, blocks: torch.Tensor, mixture: torch.Tensor, scal: torch.Tensor) -> None:
    """Calls the operator, for tracers and modes that see operators only.

    Raises:
      UsageError: a graph would write into copies of what is bound.
    """
    if check_bound_tensors_can_be_traced(f"a launch of {prepared!r}", (blocks,)):
        torch.ops.attnres_aot.statistics(prepared.handle, blocks, mixture, scal)


def dispatch_publish(prepared: Any, rows: torch.Tensor) -> torch.Tensor:
    """Calls the operator, likewise; returns a token made for this launch."""
    token = rows.new_empty((1,), dtype=torch.int8)
    torch.ops.attnres_aot.publish(prepared.handle, rows, token)
    return token


def _statistics(handle: int, blocks: torch.Tensor, mixture: torch.Tensor, scal: torch.Tensor) -> None:
    producers[STATISTICS].find(handle).with_outputs(mixture, scal).launch(blocks)


def _publish(handle: int, rows: torch.Tensor, token: torch.Tensor) -> None:
    del token  # only orders
    producers[PUBLISH].find(handle).launch(rows)


def _nothing(*_: object) -> None:
    """What the operators do to fake tensors: they return nothing and change no metadata."""


_library: Any = torch.library.Library("attnres_aot", "FRAGMENT")  # type: ignore[no-untyped-call]


def _define(name: str, schema: str, implementation: Callable[..., None]) -> None:
    _library.define(f"{name}(SymInt handle, {schema}) -> ()", tags=(torch.Tag.needs_fixed_stride_order,))
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    _library.impl(name, _nothing, "Meta")


_define("statistics", "Tensor blocks, Tensor(a!) mixture, Tensor(b!) scal", _statistics)
_define("publish", "Tensor rows, Tensor(a!) token", _publish)

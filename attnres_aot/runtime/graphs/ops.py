"""The custom operators of namespace `attnres_aot`, by which compiled graphs launch consumers and producers.

    run(SymInt handle, Tensor delta, Tensor prefix!, Tensor blocks, Tensor out!, Tensor? aux!,
        Tensor? mixture, Tensor? scal)
    run_ring(SymInt handle, Tensor prefix!, Tensor blocks, Tensor out!, Tensor? aux!,
        Tensor? mixture, Tensor? scal, Tensor? after)

and `run_write`, `run_ring_write`, which also write into `blocks`. Producers have

    statistics(SymInt handle, Tensor blocks, Tensor mixture!, Tensor scal!)
    publish(SymInt handle, Tensor rows, Tensor token!)

`handle` names a prepared object that is alive.
Statistics are arguments so that a compiler keeps them behind what computes them; a compiler may pass copies. A mailbox
must never be copied, as other GPUs write to it, so it is no argument: `after` is any tensor that comes from whatever
publishes into it, such as a publisher's `token`, and keeps the order. A publisher writes its token in name only, which
keeps the launch in the graph. Prepared objects call these by themselves where torch.compile traces them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from attnres_aot.errors import OperandError
from attnres_aot.runtime.graphs.handles import CONSUMERS, PUBLISHERS, STATISTICS, handles
from attnres_aot.runtime.graphs.tracing import check_bound_tensors_can_be_traced, exporting

if TYPE_CHECKING:
    from typing_extensions import Self

Tensors = tuple["torch.Tensor | None", ...]


class Launches(Protocol):
    """What the operators need of a PreparedAttnRes."""

    handle: int
    handle_tensor: torch.Tensor
    writes_block: bool

    @property
    def statistics(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The bound (mixture, scal)."""

    def launch(self, operands: tuple[torch.Tensor, ...], aux: torch.Tensor | None, *, ring: bool) -> None:
        """Launches without asking who is tracing."""

    def with_statistics(self, mixture: torch.Tensor, scal: torch.Tensor) -> Self:
        """Returns a stand-in with other statistics bound."""

    def forget_plans(self) -> None:
        """Makes every launch look for its plan again."""


def compile_run(prepared: Launches, operands: Tensors) -> None:
    """Puts a launch into the graph that Dynamo is tracing.

    Args:
      prepared: what launches.
      operands: (delta, prefix, blocks, out, aux).
    """
    operator = torch.ops.attnres_aot.run_write if prepared.writes_block else torch.ops.attnres_aot.run
    if exporting():
        operator(prepared.handle, *operands, *_exported_statistics(prepared))
    else:
        operator(prepared.handle_tensor.size(0), *operands, *prepared.statistics)


def compile_run_ring(prepared: Launches, operands: Tensors, after: torch.Tensor | None) -> None:
    """Puts a launch with a mailbox into the graph that Dynamo is tracing.

    Args:
      prepared: what launches.
      operands: (prefix, blocks, out, aux).
      after: what the launch comes after.
    """
    operator = torch.ops.attnres_aot.run_ring_write if prepared.writes_block else torch.ops.attnres_aot.run_ring
    if exporting():
        operator(prepared.handle, *operands, *_exported_statistics(prepared), after)
    else:
        operator(prepared.handle_tensor.size(0), *operands, *prepared.statistics, after)


def dispatch_run(prepared: Launches, operands: Tensors) -> None:
    """Calls the operator, for tracers and modes that see operators only; the arguments are those of `compile_run`.

    Raises:
      UsageError: a graph would hold copies of bound statistics.
    """
    operator = torch.ops.attnres_aot.run_write if prepared.writes_block else torch.ops.attnres_aot.run
    operator(prepared.handle, *operands, *_traced_statistics(prepared, operands))


def dispatch_run_ring(prepared: Launches, operands: Tensors, after: torch.Tensor | None) -> None:
    """Calls the operator with a mailbox, likewise; the arguments are those of `compile_run_ring`."""
    operator = torch.ops.attnres_aot.run_ring_write if prepared.writes_block else torch.ops.attnres_aot.run_ring
    operator(prepared.handle, *operands, *_traced_statistics(prepared, operands), after)


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


def _exported_statistics(prepared: Launches) -> tuple[None, None]:
    if prepared.statistics[0] is not None:
        raise RuntimeError("a consumer with bound statistics cannot be exported: the program would hold a copy of them")
    return None, None


def _traced_statistics(prepared: Launches, operands: Tensors) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    statistics = prepared.statistics
    if statistics[0] is None or check_bound_tensors_can_be_traced(f"a launch of {prepared!r}", operands):
        return statistics
    return None, None


def _run(
    handle: int,
    delta: torch.Tensor,
    prefix: torch.Tensor,
    blocks: torch.Tensor,
    out: torch.Tensor,
    aux: torch.Tensor | None,
    mixture: torch.Tensor | None,
    scal: torch.Tensor | None,
) -> None:
    prepared = _with_statistics(handles[CONSUMERS].find(handle), mixture, scal)
    prepared.launch((delta, prefix, blocks, out), aux, ring=False)


def _run_ring(
    handle: int,
    prefix: torch.Tensor,
    blocks: torch.Tensor,
    out: torch.Tensor,
    aux: torch.Tensor | None,
    mixture: torch.Tensor | None,
    scal: torch.Tensor | None,
    after: torch.Tensor | None,  # noqa: ARG001 - only orders
) -> None:
    prepared = _with_statistics(handles[CONSUMERS].find(handle), mixture, scal)
    prepared.launch((prefix, blocks, out), aux, ring=True)


def _statistics(handle: int, blocks: torch.Tensor, mixture: torch.Tensor, scal: torch.Tensor) -> None:
    handles[STATISTICS].find(handle).with_outputs(mixture, scal).launch(blocks)


def _publish(handle: int, rows: torch.Tensor, token: torch.Tensor) -> None:
    del token  # only orders
    handles[PUBLISHERS].find(handle).launch(rows)


def _with_statistics(prepared: Launches, mixture: torch.Tensor | None, scal: torch.Tensor | None) -> Launches:
    """Returns `prepared`, or one like it with the statistics given where a compiler has copied the bound ones."""
    bound_mixture, bound_scal = prepared.statistics
    if mixture is None and scal is None:
        return prepared
    if mixture is None or scal is None or bound_mixture is None or bound_scal is None:
        raise OperandError(
            "mixture and scal were passed, but this consumer has no statistics bound; bind them before tracing"
            if mixture is not None and scal is not None
            else "of mixture and scal only one was passed; pass both or none"
        )
    if mixture.data_ptr() == bound_mixture.data_ptr() and scal.data_ptr() == bound_scal.data_ptr():
        return prepared
    return prepared.with_statistics(mixture, scal)


def _nothing(*_: object) -> None:
    """What the operators do to fake tensors: they return nothing and change no metadata."""


_library: Any = torch.library.Library("attnres_aot", "DEF")  # type: ignore[no-untyped-call]


def _define(name: str, schema: str, implementation: Callable[..., None]) -> None:
    _library.define(f"{name}(SymInt handle, {schema}) -> ()", tags=(torch.Tag.needs_fixed_stride_order,))
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    _library.impl(name, _nothing, "Meta")  # what register_fake does too, after reading source files for 1 ms each


for _suffix, _blocks in (("", "Tensor"), ("_write", "Tensor(c!)")):
    _operands = f"Tensor(b!) prefix, {_blocks} blocks, Tensor(d!) out, Tensor(e!)? aux, Tensor? mixture, Tensor? scal"
    _define(f"run{_suffix}", f"Tensor delta, {_operands}", _run)
    _define(f"run_ring{_suffix}", f"{_operands}, Tensor? after", _run_ring)
_define("statistics", "Tensor blocks, Tensor(a!) mixture, Tensor(b!) scal", _statistics)
_define("publish", "Tensor rows, Tensor(a!) token", _publish)

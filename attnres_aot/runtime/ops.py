"""The custom operators of namespace `attnres_aot`, by which compiled graphs launch consumers.

    run(SymInt handle, Tensor delta, Tensor prefix!, Tensor blocks, Tensor out!, Tensor? aux!,
        Tensor? mixture, Tensor? scal)
    run_ring(SymInt handle, Tensor prefix!, Tensor blocks, Tensor out!, Tensor? aux!,
        Tensor? mixture, Tensor? scal, Tensor? after)

and `run_write`, `run_ring_write`, which also write into `blocks`. `handle` names a PreparedAttnRes that is alive.
Statistics are arguments so that a compiler keeps them behind what computes them; a compiler may pass copies. A mailbox
must never be copied, as other GPUs write to it, so it is no argument: `after` is any tensor that comes from whatever
publishes into it, and keeps the order. `PreparedAttnRes.run` and `run_ring` call these by themselves where
torch.compile traces them.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from attnres_aot.errors import OperandError, UsageError

if TYPE_CHECKING:
    from attnres_aot.runtime.prepared import PreparedAttnRes

_numbers = itertools.count(1)
_prepared: weakref.WeakValueDictionary[int, PreparedAttnRes] = weakref.WeakValueDictionary()


def register(prepared: PreparedAttnRes) -> int:
    """Returns a new handle for `prepared`, valid as long as it lives."""
    handle = next(_numbers)
    _prepared[handle] = prepared
    return handle


def registered() -> list[PreparedAttnRes]:
    """Returns every prepared object that is alive."""
    return list(_prepared.values())


def trace_run(
    prepared: PreparedAttnRes,
    delta: torch.Tensor,
    prefix: torch.Tensor,
    blocks: torch.Tensor,
    out: torch.Tensor,
    aux: torch.Tensor | None,
) -> None:
    """Puts a launch into the graph that is being traced."""
    operator = torch.ops.attnres_aot.run if prepared.key.write is None else torch.ops.attnres_aot.run_write
    operator(prepared.handle, delta, prefix, blocks, out, aux, *prepared.statistics)


def trace_run_ring(
    prepared: PreparedAttnRes,
    prefix: torch.Tensor,
    blocks: torch.Tensor,
    out: torch.Tensor,
    aux: torch.Tensor | None,
    after: torch.Tensor | None,
) -> None:
    """Puts a launch with a mailbox into the graph that is being traced."""
    operator = torch.ops.attnres_aot.run_ring if prepared.key.write is None else torch.ops.attnres_aot.run_ring_write
    operator(prepared.handle, prefix, blocks, out, aux, *prepared.statistics, after)


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
    prepared = _with_statistics(_find(handle), mixture, scal)
    prepared.run(delta, prefix, blocks, out, aux)


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
    prepared = _with_statistics(_find(handle), mixture, scal)
    prepared.run_ring(prefix, blocks, out, aux)


def _find(handle: int) -> PreparedAttnRes:
    found = _prepared.get(handle)
    if found is None:
        raise UsageError(
            f"handle {handle} names no PreparedAttnRes of this process; keep the object alive as long as graphs that "
            "call it, and trace again in a new process"
        )
    return found


def _with_statistics(
    prepared: PreparedAttnRes, mixture: torch.Tensor | None, scal: torch.Tensor | None
) -> PreparedAttnRes:
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

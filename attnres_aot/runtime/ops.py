"""The custom operators of namespace `attnres_aot`, by which compiled graphs launch consumers.

    run(int handle, Tensor delta, Tensor prefix!, Tensor blocks, Tensor out!, Tensor? aux!,
        Tensor? mixture, Tensor? scal)
    run_ring(int handle, Tensor mailbox!, Tensor prefix!, Tensor blocks, Tensor out!, Tensor? aux!,
        Tensor? mixture, Tensor? scal)

and `run_write`, `run_ring_write`, which also write into `blocks`. `handle` names a PreparedAttnRes that is alive.
Mailbox and statistics must be the bound ones: they are arguments so that a compiler keeps the order of whatever else
reads or writes them. `PreparedAttnRes.run` and `run_ring` call these by themselves where torch.compile traces them.
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
    operator(prepared.handle, delta, prefix, blocks, out, aux, prepared._mixture, prepared._scal)  # noqa: SLF001


def trace_run_ring(
    prepared: PreparedAttnRes,
    prefix: torch.Tensor,
    blocks: torch.Tensor,
    out: torch.Tensor,
    aux: torch.Tensor | None,
) -> None:
    """Puts a launch with a mailbox into the graph that is being traced."""
    operator = torch.ops.attnres_aot.run_ring if prepared.key.write is None else torch.ops.attnres_aot.run_ring_write
    mailbox = prepared._mailbox  # noqa: SLF001
    if mailbox is None:
        raise OperandError("no mailbox is bound; call bind_ring(mailbox) before run_ring")
    operator(prepared.handle, mailbox, prefix, blocks, out, aux, prepared._mixture, prepared._scal)  # noqa: SLF001


def _find(handle: int) -> PreparedAttnRes:
    found = _prepared.get(handle)
    if found is None:
        raise UsageError(
            f"handle {handle} names no PreparedAttnRes of this process; keep the object alive as long as graphs that "
            "call it, and trace again in a new process"
        )
    return found


def _check_bound(name: str, given: torch.Tensor | None, bound: torch.Tensor | None) -> None:
    if given is not None and (bound is None or given.data_ptr() != bound.data_ptr()):
        raise OperandError(
            f"{name} is not the tensor that is bound to this consumer; pass the bound one, or bind before tracing"
        )


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
    prepared = _find(handle)
    _check_bound("mixture", mixture, prepared._mixture)  # noqa: SLF001
    _check_bound("scal", scal, prepared._scal)  # noqa: SLF001
    prepared.run(delta, prefix, blocks, out, aux)


def _run_ring(
    handle: int,
    mailbox: torch.Tensor,
    prefix: torch.Tensor,
    blocks: torch.Tensor,
    out: torch.Tensor,
    aux: torch.Tensor | None,
    mixture: torch.Tensor | None,
    scal: torch.Tensor | None,
) -> None:
    prepared = _find(handle)
    _check_bound("mailbox", mailbox, prepared._mailbox)  # noqa: SLF001
    _check_bound("mixture", mixture, prepared._mixture)  # noqa: SLF001
    _check_bound("scal", scal, prepared._scal)  # noqa: SLF001
    prepared.run_ring(prefix, blocks, out, aux)


def _nothing(*_: object) -> None:
    """What the operators do to fake tensors: they return nothing and change no metadata."""


_library: Any = torch.library.Library("attnres_aot", "DEF")  # type: ignore[no-untyped-call]


def _define(name: str, first: str, blocks: str, implementation: Callable[..., None]) -> None:
    _library.define(
        f"{name}(SymInt handle, {first}, Tensor(b!) prefix, {blocks} blocks, Tensor(d!) out, Tensor(e!)? aux, "
        "Tensor? mixture, Tensor? scal) -> ()",
        tags=(torch.Tag.needs_fixed_stride_order,),
    )
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"attnres_aot::{name}", _nothing, lib=_library)


_define("run", "Tensor delta", "Tensor", _run)
_define("run_write", "Tensor delta", "Tensor(c!)", _run)
_define("run_ring", "Tensor(a!) mailbox", "Tensor", _run_ring)
_define("run_ring_write", "Tensor(a!) mailbox", "Tensor(c!)", _run_ring)

"""A launchable taken from a bundle by the facts of a consumer, for callers that pass everything with each call.

What it was called with is remembered by address and layout, as numbers alone: it keeps no tensor alive, and calls with
the same operands again cost a look-up.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, NoReturn

import torch

from attnres_aot.errors import OperandError, UsageError
from attnres_aot.runtime.cuda.device import check_device, stream_handle
from attnres_aot.runtime.find.loaded import LoadedBundle
from attnres_aot.runtime.graphs.tracing import dispatch_modes, refuse_recording
from attnres_aot.runtime.launch.binding import Binding, Ring, check_apart, make_ring, make_statistics
from attnres_aot.runtime.launch.packed import Launcher
from attnres_aot.runtime.launch.pdl import Pdl, check_pdl
from attnres_aot.runtime.launch.route import Route
from attnres_aot.runtime.operands.guards import Guard, make_guard
from attnres_aot.runtime.operands.weights import check_eps, check_weights
from attnres_aot.spec.variants import Variant

_MAX_CALLS = 4096
"""Addresses with row counts that are remembered; beyond it all are forgotten and made again."""
_MAX_ALIKE = 8
"""Layouts remembered for each."""

_Call = tuple[Guard, Launcher]
"""Tells whether tensors are laid out as those of an earlier call, and launches them."""
_alive: weakref.WeakSet[Consumer] = weakref.WeakSet()


class Consumer:
    """One variant of a bundle, on its device. Several threads may call the same object.

    `bundle` is where the code comes from, `variant` what is launched, `capacity` the rows per mailbox slot, 0 for an
    ordinary source.
    """

    __slots__ = ("__weakref__", "_calls", "bundle", "capacity", "variant")

    def __init__(self, bundle: LoadedBundle, variant: Variant, capacity: int) -> None:
        """Puts the code on the device.

        Raises:
          VariantMissError: the bundle does not hold the variant.
          BundleError: an image is damaged.
          DriverError: the driver refused.
        """
        bundle.record(variant)
        bundle.load_variants(variant.key, slots=(variant.slots,), aux=(variant.aux,), stats=(variant.stats,))
        self.bundle, self.variant, self.capacity = bundle, variant, capacity
        self._calls: dict[tuple[Any, ...], tuple[_Call, ...]] = {}
        _alive.add(self)

    def __copy__(self) -> Consumer:
        return self

    def __deepcopy__(self, memo: object) -> Consumer:
        return self  # it holds nothing of who calls it

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UsageError(
            f"{self!r} cannot be pickled: it holds code of this process; send the arguments of compile_consumer, and "
            "call that where it is to be used"
        )

    def __repr__(self) -> str:
        return f"<Consumer {self.variant} of {self.bundle!r}>"

    def __call__(  # noqa: PLR0913, PLR0917 - the operands of the kernel, in the order that callers know
        self,
        source: torch.Tensor,
        prefix: torch.Tensor,
        blocks: torch.Tensor,
        norm: torch.Tensor,
        query: torch.Tensor,
        out_norm: torch.Tensor,
        out: torch.Tensor,
        eps: float,
        out_eps: float,
        *rest: Any,
        pdl: Pdl = False,
    ) -> torch.Tensor:
        """Launches once; the operands are those of `PreparedAttnRes`. With no rows, launches nothing.

        Args:
          source: the delta [rows, H], or the mailbox [slots, capacity, H].
          prefix: [rows, H], updated.
          blocks: [rows, B, H].
          norm: [H], weight of the norm under the logits.
          query: [H] or [1, H], the projection.
          out_norm: [H], weight of the output norm.
          out: [rows, H], written.
          eps: epsilon under the logits.
          out_eps: epsilon of the output norm.
          *rest: what the variant takes besides, in this order: mixture [cap, H] and scal [cap, 2], fp32, for one with
            statistics; aux [rows, H] for one with an aux copy; last the stream, as torch's object, as a handle, or as
            anything that `int` takes; None, or nothing, is torch's current stream of the device.
          pdl: launch mode, as for `PreparedAttnRes`.

        Returns:
          `out`.

        Raises:
          OperandError: an operand is missing, too many, or cannot be launched.
          UsageError: `pdl` is no launch mode, or a tracer is recording, which sees no such call.
          DriverError: the driver refused.
        """
        if dispatch_modes():
            refuse_recording(repr(self))
        variant, pdl = self.variant, pdl is not False and check_pdl(pdl)
        extra = 2 * variant.stats + variant.aux
        if not extra <= len(rest) <= extra + 1:
            raise self._miscounted(rest)
        stream = rest[extra] if len(rest) > extra else None
        bound = (norm, query, out_norm, *rest[: 2 * variant.stats], *((source,) if variant.slots else ()))
        operands = (*(() if variant.slots else (source,)), prefix, blocks, out, *rest[2 * variant.stats : extra])
        try:
            key = (eps, out_eps, pdl, out.shape, *[tensor.data_ptr() for tensor in bound])
            known = self._calls.get(key, ())
        except (AttributeError, RuntimeError, TypeError):
            key, known = None, ()  # not even tensors and numbers, which is refused below
        plan = next((plan for accepts, plan in known if accepts(*bound, *operands)), None)
        if plan is None:
            plan = Route().find(self._bind(bound, out, (eps, out_eps), pdl=pdl), operands)
            self._remember(key, (make_guard((*bound, *operands)), plan))
        handle = None if stream is None else stream_handle(stream, self.bundle.device)
        plan.launch(tuple([tensor.data_ptr() for tensor in operands]), handle)
        return out

    def forget_calls(self) -> None:
        """Makes every call check and look for its plan again."""
        self._calls = {}

    def _bind(self, bound: tuple[Any, ...], out: Any, eps: tuple[float, float], *, pdl: Pdl) -> Binding:
        """Checks what an engine that binds would have bound: (norm, query, out_norm, [mixture, scal], [mailbox])."""
        variant, bundle = self.variant, self.bundle
        weights = check_weights(bound[:3], bundle.hidden)
        ring, statistics = None, None
        if variant.stats:
            rows = out.shape[:1] if isinstance(out, torch.Tensor) else ()
            statistics = make_statistics(bound[3], bound[4], [count for count in rows if count], bundle.hidden)
        if variant.slots:
            ring = self._take_mailbox(bound[-1])
        for name, tensor in zip(self._bound_names(), bound, strict=True):
            check_device(name, tensor, bundle.device)
        check_apart(weights, ring, statistics)
        return Binding(
            bundle=bundle,
            owner=None,
            key=variant.key,
            weights=weights,
            eps=check_eps(eps),
            ring=ring,
            mailbox=None if ring is None else ring.mailbox,
            aux=variant.aux,
            statistics=statistics,
            pdl=pdl,
            checks=True,
            watched=False,  # every call compares the addresses of what it is given
        )

    def _remember(self, key: tuple[Any, ...] | None, call: _Call) -> None:
        if key is not None:
            if len(self._calls) >= _MAX_CALLS:
                self._calls = {}
            self._calls[key] = (call, *self._calls.get(key, ())[: _MAX_ALIKE - 1])

    def _take_mailbox(self, source: Any) -> Ring:
        ring = make_ring(source, 0, self.bundle.hidden)
        if (ring.slots, ring.capacity) != (self.variant.slots, self.capacity):
            wanted = [self.variant.slots, self.capacity, self.bundle.hidden]
            raise OperandError(f"source is {list(source.shape)}; a mailbox {wanted} is wanted")
        return ring

    def _bound_names(self) -> tuple[str, ...]:
        variant = self.variant
        statistics = ("mixture", "scal") if variant.stats else ()
        return ("norm", "query", "out_norm", *statistics, *(("source",) if variant.slots else ()))

    def _miscounted(self, rest: tuple[Any, ...]) -> OperandError:
        variant = self.variant
        names = [*(("mixture", "scal") if variant.stats else ()), *(("aux",) if variant.aux else ()), "stream"]
        return OperandError(
            f"{len(rest)} arguments follow out_eps, but {variant} takes {', '.join(names)} there, of which the stream "
            "may be left out"
        )


def take_consumer(bundle: LoadedBundle, variant: Variant, capacity: int) -> Consumer:
    """Returns the one launchable of a bundle for a variant and a number of rows per mailbox slot."""
    found: Consumer | None = bundle.consumers.get((variant, capacity))
    if found is None:
        made = Consumer(bundle, variant, capacity)
        found = bundle.consumers.setdefault((variant, capacity), made)  # one step, so that threads get one object
    return found


def _forget_all_calls() -> None:
    """Makes every call in a forked child look for its plan again, which is refused there."""
    for consumer in list(_alive):
        consumer.forget_calls()


os.register_at_fork(after_in_child=_forget_all_calls)

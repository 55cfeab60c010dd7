"""Launching where it need not take the shortest way: geometries that are new, aux copies, operators, fallbacks.

`PreparedAttnRes` adds the two ways of launching that are used most.
"""

from __future__ import annotations

import torch

from attnres_aot.errors import OperandError, VariantMissError
from attnres_aot.runtime.graphs import ops
from attnres_aot.runtime.graphs.tracing import stand_ins_among
from attnres_aot.runtime.launch.binding import Binding
from attnres_aot.runtime.launch.bound import BoundConsumer
from attnres_aot.runtime.launch.packed import NOTHING_TO_DO, Launcher
from attnres_aot.runtime.launch.route import Route


class LaunchingConsumer(BoundConsumer):
    """A bound consumer that launches for any operands."""

    __slots__ = ()

    def launch(self, operands: tuple[torch.Tensor, ...], aux: torch.Tensor | None, *, ring: bool) -> None:
        """Launches without asking who is tracing; what the custom operators do.

        Args:
          operands: those of `run`, or with `ring` of `run_ring`, without aux.
          aux: as for `run`.
          ring: the source is the mailbox.
        """
        tensors = operands if aux is None else (*operands, aux)
        if aux is None:
            route = self._ring if ring else self._ordinary
        else:
            route = self._ring_aux if ring else self._ordinary_aux
        plan: Launcher = route.plan
        if not plan.accepts(*tensors) or plan.moved():
            plan = self._find(route, tensors, ring=ring, aux=aux is not None)
        plan.launch(tuple([tensor.data_ptr() for tensor in tensors]))

    def _launch_aux(self, route: Route, tensors: tuple[torch.Tensor, ...], *, ring: bool) -> torch.Tensor:
        """Launches with an aux copy, the last of the tensors; returns the one before, `out`."""
        plan: Launcher = route.plan
        if not plan.accepts(*tensors) or plan.moved():
            return self._launch_new(route, tensors, ring=ring)
        plan.launch(tuple([tensor.data_ptr() for tensor in tensors]))
        return tensors[-2]

    def _launch_new(self, route: Route, tensors: tuple[torch.Tensor, ...], *, ring: bool) -> torch.Tensor:
        """Launches for operands that the last plan does not take; returns `out`."""
        aux = route is self._ring_aux or route is self._ordinary_aux
        if stand_ins_among(tensors):
            operands = tensors if aux else (*tensors, None)
            if ring:
                ops.dispatch_run_ring(self, operands, None)
            else:
                ops.dispatch_run(self, operands)
        else:
            plan = self._find(route, tensors, ring=ring, aux=aux)
            plan.launch(tuple([tensor.data_ptr() for tensor in tensors]))
        return tensors[-2 if aux else -1]

    def _find(self, route: Route, tensors: tuple[torch.Tensor, ...], *, ring: bool, aux: bool) -> Launcher:
        """Returns the plan for operands that the last plan does not take."""
        if ring and self._mailbox is None:
            raise OperandError("no mailbox is bound; call bind_ring(mailbox) before run_ring")
        if aux and not self._aux:
            raise OperandError("aux was passed, but no aux copy is bound; call bind_aux() before")
        binding = self._binding(ring=ring, aux=aux)
        try:
            return route.find(binding, tensors)
        except VariantMissError:
            if self._fallback is None:
                raise
            self._fall_back(binding, tensors)
            return NOTHING_TO_DO

    def _fall_back(self, binding: Binding, tensors: tuple[torch.Tensor, ...]) -> None:
        from attnres_aot.runtime.launch.fallback import Missed

        assert self._fallback is not None
        operands = list(tensors)
        source = binding.ring.mailbox if binding.ring is not None else operands.pop(0)
        prefix, blocks, out, *rest = operands
        self._fallback(
            Missed(
                variant=binding.asked(out.shape[0]),
                weights=self._weights,
                eps=self._eps,
                source=source,
                prefix=prefix,
                blocks=blocks,
                out=out,
                aux=rest[0] if rest else None,
            )
        )

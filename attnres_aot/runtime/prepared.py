"""The object that a serving engine holds per consumer: bound once, launched in microseconds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from attnres_aot.errors import OperandError, VariantMissError
from attnres_aot.runtime import ops
from attnres_aot.runtime.launch import NOTHING_TO_DO, Launcher
from attnres_aot.runtime.loaded import LoadedBundle
from attnres_aot.runtime.mailbox import mailbox_problems
from attnres_aot.runtime.miss import variant_miss
from attnres_aot.runtime.operands import vector_problems
from attnres_aot.runtime.route import Binding, Ring, Route, Statistics
from attnres_aot.runtime.weights import AttnResWeights, check_eps, check_weights, read_target
from attnres_aot.variants import ConsumerKey, Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """A launch that the bundle holds no code for, handed to a fallback, which does all of its work in place."""

    variant: Variant
    """What was needed."""
    weights: AttnResWeights
    """Weights of the consumer."""
    eps: tuple[float, float]
    """Epsilons under the logits and of the output norm."""
    source: torch.Tensor
    """The delta [rows, H], or the mailbox [slots, capacity, H], which must be armed again."""
    prefix: torch.Tensor
    """[rows, H] bf16, updated."""
    blocks: torch.Tensor
    """[rows, B, H] bf16."""
    out: torch.Tensor
    """[rows, H] bf16, written."""
    aux: torch.Tensor | None
    """[rows, H] bf16, written; None without an aux copy."""


Fallback = Callable[[Missed], object]
"""Does in place what a missing variant would have done; what it returns is ignored."""


class PreparedAttnRes:
    """One consumer of a model with its weights, ready to launch.

    Bind what is needed, in any order; binding again replaces. Then `run` launches with an ordinary source and
    `run_ring` with the bound mailbox, on torch's current stream of the tensors' device. Several threads may launch the
    same object; binding is for one thread, before. All tensors are bf16, last stride 1, every row aligned to 16 bytes.

    The default launch is ordered after everything earlier on the stream. With `pdl=True` a launch may start while its
    predecessor still runs: prefix, blocks and weights must then have been complete before that predecessor started,
    only the delta may come from it (docs on programmatic dependent launch have the whole contract).

    `handle` is the number by which the custom operators of namespace `attnres_aot` know the object.
    """

    __slots__ = (
        "__weakref__",
        "_aux",
        "_bundle",
        "_checks",
        "_eps",
        "_fallback",
        "_key",
        "_mailbox",
        "_mixture",
        "_ordinary",
        "_ordinary_aux",
        "_pdl",
        "_ring",
        "_ring_aux",
        "_ring_binding",
        "_scal",
        "_statistics",
        "_weights",
        "handle",
    )

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        key: ConsumerKey,
        eps: float | tuple[float, float],
        bundle: LoadedBundle | None = None,
        *,
        pdl: bool = False,
        checks: bool = True,
        fallback: Fallback | None = None,
    ) -> None:
        """Binds a consumer to its weights.

        Args:
          weights: (norm, query, out_norm), contiguous bf16 [H]; query may be [1, H]. Their memory is kept alive, but
            weights that move must be bound anew.
          key: which consumer.
          eps: epsilon of both norms, or a pair (under the logits, of the output norm).
          bundle: where the code comes from; None finds the bundle for the weights' device as `load()` does.
          pdl: launch with programmatic stream serialization.
          checks: check the addresses of operands (alignment, overlap) whenever they change. Geometry is always checked.
          fallback: called with a `Missed` where the bundle lacks a variant, instead of raising.

        Raises:
          OperandError: weights or eps cannot be used; one line for every problem.
          VariantMissError: the bundle holds nothing for `key`, and there is no fallback.
        """
        if bundle is None:
            from attnres_aot.runtime.api import load

            bundle = load(device=weights[0].device)
        self._bundle, self._key, self._fallback = bundle, key, fallback
        self._weights = check_weights(weights, bundle.hidden)
        self._check_device("weights", self._weights.norm)
        self._eps = check_eps(eps)
        self._pdl, self._checks = pdl, checks
        self._aux = False
        self._ring_binding: Ring | None = None
        self._statistics: Statistics | None = None
        self._mailbox: torch.Tensor | None = None
        self._mixture: torch.Tensor | None = None
        self._scal: torch.Tensor | None = None
        if fallback is None and not bundle.holds_key(key):
            raise variant_miss(bundle.bundle, Variant(key=key))
        self.handle = ops.register(self)
        self._rebind()

    @classmethod
    def for_target(
        cls,
        layer: Any,
        *,
        final: bool = False,
        has_delta: bool | None = None,
        bundle: LoadedBundle | None = None,
        pdl: bool = False,
        checks: bool = True,
        fallback: Fallback | None = None,
    ) -> PreparedAttnRes:
        """Binds the consumer before a decoder layer's attention, or the one at the end of the model.

        Args:
          layer: a decoder layer with `self_attention_res_norm`, `self_attention_res_proj`, `input_layernorm`,
            `prev_valid_blocks`, `block_write_idx` and `is_block_write_layer`; with `final` a backbone with
            `output_attn_res_norm`, `output_attn_res_proj`, `norm` and `num_attn_res_blocks`. Norms have `weight` and
            `variance_epsilon`.
          final: `layer` is the backbone.
          has_delta: whether the source is added to the prefix; None: yes, unless there are no saved blocks.
          bundle: as for the constructor.
          pdl: as for the constructor.
          checks: as for the constructor.
          fallback: as for the constructor.

        Raises:
          UsageError: attributes are missing.
        """
        target = read_target(layer, final=final, has_delta=has_delta)
        return cls(target.weights, target.key, target.eps, bundle, pdl=pdl, checks=checks, fallback=fallback)

    def __repr__(self) -> str:
        bound = [f"ring {self._ring_binding.slots}x{self._ring_binding.capacity}"] if self._ring_binding else []
        bound += ["aux"] if self._aux else []
        bound += [f"statistics for {len(self._statistics.rows)} row counts"] if self._statistics else []
        return f"<PreparedAttnRes {Variant(key=self._key)}, bound: {', '.join(bound) or 'nothing'}>"

    @property
    def key(self) -> ConsumerKey:
        """Which consumer this is."""
        return self._key

    @property
    def checks(self) -> bool:
        """Whether addresses of operands are checked; may be set at any time."""
        return self._checks

    @checks.setter
    def checks(self, on: bool) -> None:
        self._checks = on
        self._rebind()

    def bind_ring(self, mailbox: torch.Tensor, *, spin_budget: int = 0) -> PreparedAttnRes:
        """Binds the mailbox that `run_ring` reads, or replaces it.

        Args:
          mailbox: [slots, capacity, H] bf16, contiguous, armed (see `new_mailbox`).
          spin_budget: polls of one fragment before a launch gives up and traps, which ends the CUDA context;
            0 waits for ever.

        Returns:
          This object.

        Raises:
          OperandError: the mailbox cannot be used; one line for every problem.
          VariantMissError: the bundle has no ring variant of that many slots, and there is no fallback.
        """
        problems = mailbox_problems(mailbox, hidden=self._bundle.hidden)
        if not 0 <= spin_budget < 2**31:
            problems.append(f"spin_budget is {spin_budget!r}; 0 to {2**31 - 1} is allowed")
        if problems:
            raise OperandError("\n".join(problems))
        self._check_device("mailbox", mailbox)
        ring = Ring(mailbox=mailbox, spin_budget=spin_budget)
        self._require([Variant(key=self._key, slots=ring.slots, aux=aux) for aux in (False, True)])
        self._ring_binding, self._mailbox = ring, mailbox
        self._rebind()
        return self

    def bind_aux(self) -> PreparedAttnRes:
        """Allows launches to write an aux copy: pass `aux=` to `run` or `run_ring`; without it none is written.

        Returns:
          This object.

        Raises:
          VariantMissError: the bundle has no aux variant of this consumer, and there is no fallback.
        """
        slots = (0, *self._bundle.bundle.manifest.mailbox.slots)
        self._require([Variant(key=self._key, slots=count, aux=True) for count in slots])
        self._aux = True
        self._rebind()
        return self

    def bind_statistics(self, mixture: torch.Tensor, scal: torch.Tensor, rows: Iterable[int]) -> PreparedAttnRes:
        """Binds precomputed statistics of the saved blocks, or replaces them.

        Launches of exactly a number of rows in `rows` take them, whatever else is bound; others read the blocks.

        Args:
          mixture: [cap, H] fp32, contiguous: sum over blocks of exp(logit - m) * block.
          scal: [cap, 2] fp32, contiguous: (m, l), the largest logit and the sum of exp(logit - m).
          rows: row counts, 1 to cap; `statistics_rows(tp, dcp)` gives a deployment's.

        Returns:
          This object.

        Raises:
          OperandError: a tensor or a row count cannot be used; one line for every problem.
          VariantMissError: the bundle has no statistics variant of this consumer, and there is no fallback.
        """
        counts = frozenset(rows)
        problems = vector_problems("mixture", mixture, (-1, self._bundle.hidden), torch.float32)
        problems += vector_problems("scal", scal, (-1, 2), torch.float32, alignment=8)
        if not problems and mixture.shape[0] != scal.shape[0]:
            problems.append(f"mixture holds {mixture.shape[0]} rows, but scal {scal.shape[0]}; the same is wanted")
        if not problems:
            bad = sorted(count for count in counts if not 1 <= count <= mixture.shape[0])
            if bad:
                problems.append(f"rows hold {bad}; 1 to {mixture.shape[0]}, the rows of mixture, are allowed")
        if problems:
            raise OperandError("\n".join(problems))
        self._check_device("mixture", mixture)
        self._check_device("scal", scal)
        slots = (0, *self._bundle.bundle.manifest.mailbox.slots)
        self._require([Variant(key=self._key, slots=n, aux=aux, stats=True) for n in slots for aux in (False, True)])
        self._statistics = Statistics(mixture=mixture, scal=scal, rows=counts)
        self._mixture, self._scal = mixture, scal
        self._rebind()
        return self

    def run(
        self,
        delta: torch.Tensor,
        prefix: torch.Tensor,
        blocks: torch.Tensor,
        out: torch.Tensor,
        aux: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Launches with an ordinary source. With no rows, launches nothing.

        Args:
          delta: [rows, H]: added to the prefix, or replaces it where the consumer has no delta.
          prefix: [rows, H]: updated in place.
          blocks: [rows, B, H]: the first nb are read, block `write` is written.
          out: [rows, H]: written.
          aux: [rows, H]: receives a copy of the updated prefix; `bind_aux` first.

        Returns:
          `out`.

        Raises:
          OperandError: an operand cannot be launched; one line for every problem.
          VariantMissError: the bundle lacks the variant, and there is no fallback.
          DriverError: the driver refused.
        """
        if is_dynamo_compiling():
            ops.trace_run(self, delta, prefix, blocks, out, aux)
            return out
        if aux is not None:
            return self._run_aux(delta, prefix, blocks, out, aux)
        plan: Launcher = self._ordinary.plan
        if not plan.accepts(delta, prefix, blocks, out):
            plan = self._find(self._ordinary, (delta, prefix, blocks, out))
        plan.launch((delta.data_ptr(), prefix.data_ptr(), blocks.data_ptr(), out.data_ptr()))
        return out

    def run_ring(
        self, prefix: torch.Tensor, blocks: torch.Tensor, out: torch.Tensor, aux: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Launches with the bound mailbox as source: waits for its rows 0..rows-1, and arms them again.

        Args:
          prefix: [rows, H]: updated in place; rows is at most the mailbox's capacity.
          blocks: [rows, B, H]: the first nb are read, block `write` is written.
          out: [rows, H]: written.
          aux: [rows, H]: receives a copy of the updated prefix; `bind_aux` first.

        Returns:
          `out`.

        Raises:
          OperandError: no mailbox is bound, or an operand cannot be launched; one line for every problem.
          VariantMissError: the bundle lacks the variant, and there is no fallback.
          DriverError: the driver refused.
        """
        if is_dynamo_compiling():
            ops.trace_run_ring(self, prefix, blocks, out, aux)
            return out
        if aux is not None:
            return self._run_ring_aux(prefix, blocks, out, aux)
        plan: Launcher = self._ring.plan
        if not plan.accepts(prefix, blocks, out):
            plan = self._find(self._ring, (prefix, blocks, out))
        plan.launch((prefix.data_ptr(), blocks.data_ptr(), out.data_ptr()))
        return out

    def _run_aux(
        self,
        delta: torch.Tensor,
        prefix: torch.Tensor,
        blocks: torch.Tensor,
        out: torch.Tensor,
        aux: torch.Tensor,
    ) -> torch.Tensor:
        plan: Launcher = self._ordinary_aux.plan
        if not plan.accepts(delta, prefix, blocks, out, aux):
            plan = self._find(self._ordinary_aux, (delta, prefix, blocks, out, aux))
        plan.launch((delta.data_ptr(), prefix.data_ptr(), blocks.data_ptr(), out.data_ptr(), aux.data_ptr()))
        return out

    def _run_ring_aux(
        self, prefix: torch.Tensor, blocks: torch.Tensor, out: torch.Tensor, aux: torch.Tensor
    ) -> torch.Tensor:
        plan: Launcher = self._ring_aux.plan
        if not plan.accepts(prefix, blocks, out, aux):
            plan = self._find(self._ring_aux, (prefix, blocks, out, aux))
        plan.launch((prefix.data_ptr(), blocks.data_ptr(), out.data_ptr(), aux.data_ptr()))
        return out

    def _find(self, route: Route, tensors: tuple[torch.Tensor, ...]) -> Launcher:
        """Returns the plan for operands that the last plan does not take."""
        binding = route.binding
        if binding.source_is_mailbox and binding.ring is None:
            raise OperandError("no mailbox is bound; call bind_ring(mailbox) before run_ring")
        if binding.aux and not self._aux:
            raise OperandError("aux was passed, but no aux copy is bound; call bind_aux() before")
        try:
            return route.find(tensors)
        except VariantMissError:
            if self._fallback is None:
                raise
            self._fall_back(binding, tensors)
            return NOTHING_TO_DO

    def _fall_back(self, binding: Binding, tensors: tuple[torch.Tensor, ...]) -> None:
        assert self._fallback is not None
        operands = list(tensors)
        source = binding.ring.mailbox if binding.ring is not None else operands.pop(0)
        prefix, blocks, out, *rest = operands
        self._fallback(
            Missed(
                variant=binding.variant(out.shape[0]),
                weights=self._weights,
                eps=self._eps,
                source=source,
                prefix=prefix,
                blocks=blocks,
                out=out,
                aux=rest[0] if rest else None,
            )
        )

    def _rebind(self) -> None:
        """Makes routes for what is bound now; plans of earlier bindings are dropped."""
        self._ordinary, self._ordinary_aux = self._route(ring=False, aux=False), self._route(ring=False, aux=True)
        self._ring, self._ring_aux = self._route(ring=True, aux=False), self._route(ring=True, aux=True)

    def _route(self, *, ring: bool, aux: bool) -> Route:
        return Route(
            Binding(
                bundle=self._bundle,
                key=self._key,
                weights=self._weights,
                eps=self._eps,
                source_is_mailbox=ring,
                ring=self._ring_binding if ring else None,
                aux=aux,
                statistics=self._statistics,
                pdl=self._pdl,
                checks=self._checks,
            )
        )

    def _require(self, variants: list[Variant]) -> None:
        """Raises unless the bundle holds one of `variants`, or there is a fallback."""
        if self._fallback is None and not any(variant in self._bundle for variant in variants):
            raise variant_miss(self._bundle.bundle, variants[0])

    def _check_device(self, name: str, tensor: torch.Tensor) -> None:
        device = self._bundle.device
        if tensor.get_device() != device.tensor_index or tensor.device.type != device.device.type:
            raise OperandError(f"{name}: on {tensor.device}, but the bundle was loaded for {device.device}")

    def _forget_plans(self) -> None:
        for route in (self._ordinary, self._ordinary_aux, self._ring, self._ring_aux):
            route.forget()


def _forget_all_plans() -> None:
    """Makes every launch in a forked child look for its plan again, which is refused there."""
    for prepared in ops.registered():
        prepared._forget_plans()  # noqa: SLF001 - of this module's own class


os.register_at_fork(after_in_child=_forget_all_plans)

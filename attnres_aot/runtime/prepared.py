"""The object that a serving engine holds per consumer: bound once, launched in microseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling

from attnres_aot.runtime.cuda.fault import Owner, RingFault, read_fault
from attnres_aot.runtime.find.loaded import LoadedBundle
from attnres_aot.runtime.graphs import ops
from attnres_aot.runtime.graphs.tracing import dispatch_modes
from attnres_aot.runtime.launch.indirect import LaunchingConsumer
from attnres_aot.runtime.launch.pdl import Pdl
from attnres_aot.runtime.operands.weights import first_device, read_target
from attnres_aot.spec.variants import KeyLike

if TYPE_CHECKING:
    from typing_extensions import Self

    from attnres_aot.runtime.launch.fallback import Fallback


class PreparedAttnRes(LaunchingConsumer):
    """One consumer of a model with its weights, ready to launch.

    Bind what is needed, in any order; binding again replaces. Then `run` launches with an ordinary source and
    `run_ring` with the bound mailbox, on torch's current stream of the tensors' device. Making and binding put on the
    device whatever launches need, so that a launch loads and allocates nothing; both work while streams are being
    captured. Several threads may launch the same object; binding is for one thread, before. All tensors are bf16, last
    stride 1, every row aligned to 16 bytes.

    The default launch is ordered after everything earlier on the stream. With `pdl=True` a launch may start while the
    kernel before it still runs: prefix, blocks and weights must then have been complete before that kernel started. All
    else may come from it or be in its use, as nothing else is read, polled or written before it has ended. With
    `pdl="early"` a launch with a mailbox does not wait for that: then the kernel before, and what may run beside it,
    must not touch what this launch writes, nor consume or arm its mailbox. `docs/loader.md` has both tables, what
    operands may share, and how graphs and compilers see launches.

    `handle` is the number by which the custom operators of namespace `attnres_aot` know the object. It is random, or
    made from `name`, so that it means the same object in every process or none. `copy.copy` gives an object with a
    handle of its own that shares all that is bound; deep copies and pickles are refused.
    """

    __slots__ = ("__weakref__",)

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        key: KeyLike,
        eps: float | tuple[float, float],
        bundle: LoadedBundle | None = None,
        *,
        pdl: Pdl = False,
        checks: bool = True,
        fallback: Fallback | None = None,
        name: str | None = None,
    ) -> None:
        """Binds a consumer to its weights and puts its code on the device.

        Args:
          weights: (norm, query, out_norm), contiguous bf16 [H]; query may be [1, H]. Their memory is kept alive, but
            weights that move must be bound anew.
          key: which consumer; a plain tuple (nb, has_delta, write, final), with write -1 for none, is taken, too.
          eps: epsilon of both norms, or a pair (under the logits, of the output norm); 1e-30 or more.
          bundle: where the code comes from; None finds the bundle for the weights' device as `load()` does.
          pdl: False, True or "early": how a launch may overlap the kernel before it (`attnres_aot.runtime.launch.pdl`).
          checks: check everything about operands and bound memory; `docs/loader.md` has what is left if off, and what
            the caller then promises.
          fallback: called with a `Missed` where the bundle lacks a variant, instead of raising.
          name: what graphs that are saved and loaded in other processes find the object by, such as the name of its
            module in the model; of one living object only.

        Raises:
          OperandError: weights or eps cannot be used; one line for every problem.
          UsageError: `key` is no key, or another object has the name.
          VariantMissError: the bundle holds nothing for `key`, and there is no fallback.
          BundleError: no bundle fits, or an image is damaged.
          DriverError: the driver refused code, or this process was forked.
        """
        if bundle is None:
            from attnres_aot.runtime.api import load

            bundle = load(device=first_device(weights))
        super().__init__(weights, key, eps, bundle, pdl=pdl, checks=checks, fallback=fallback)
        self._take_handle(name)

    @classmethod
    def for_target(
        cls,
        target: Any,
        *,
        final: bool = False,
        has_delta: bool | None = None,
        bundle: LoadedBundle | None = None,
        pdl: Pdl = False,
        checks: bool = True,
        fallback: Fallback | None = None,
        name: str | None = None,
    ) -> PreparedAttnRes:
        """Binds the consumer before a decoder layer's attention, or the one at the end of the model.

        Args:
          target: a decoder layer with `self_attention_res_norm`, `self_attention_res_proj`, `input_layernorm`,
            `prev_valid_blocks`, `block_write_idx` and `is_block_write_layer`; with `final` a backbone with
            `output_attn_res_norm`, `output_attn_res_proj`, `norm` and `num_attn_res_blocks`. Norms have `weight` and
            `variance_epsilon`.
          final: `target` is the backbone.
          has_delta: whether the source is added to the prefix; None: yes, unless there are no saved blocks.
          bundle: as for the constructor.
          pdl: as for the constructor.
          checks: as for the constructor.
          fallback: as for the constructor.
          name: as for the constructor.

        Raises:
          UsageError: attributes are missing, or another object has the name.
          OperandError: weights or epsilons cannot be used; one line for every problem.
          VariantMissError: the bundle holds nothing for the consumer, and there is no fallback.
          BundleError: no bundle fits, or an image is damaged.
          DriverError: the driver refused code, or this process was forked.
        """
        found = read_target(target, final=final, has_delta=has_delta)
        return cls(found.weights, found.key, found.eps, bundle, pdl=pdl, checks=checks, fallback=fallback, name=name)

    def __copy__(self) -> Self:
        twin = self._same_slots()
        twin._take_handle(None)  # noqa: SLF001
        twin._owner = self._owner and Owner(twin.handle, None)  # noqa: SLF001
        twin._renew_routes()  # noqa: SLF001
        return twin

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
            ops.compile_run(self, (delta, prefix, blocks, out, aux))
            return out
        if dispatch_modes():
            ops.dispatch_run(self, (delta, prefix, blocks, out, aux))
            return out
        if aux is not None:
            return self._launch_aux(self._ordinary_aux, (delta, prefix, blocks, out, aux), ring=False)
        accepts, trusts, moved, pop, push, current_stream, ordinal, current, plan = self._ordinary.steps
        if not (accepts(delta, prefix, blocks, out) and not moved() if trusts is None else trusts(out)):
            return self._launch_new(self._ordinary, (delta, prefix, blocks, out), ring=False)
        pointers = (delta.data_ptr(), prefix.data_ptr(), blocks.data_ptr(), out.data_ptr())
        try:
            slot = pop()
        except IndexError:
            slot = plan.make_slot()
        stream = current_stream(ordinal)
        if slot.pointers != pointers or slot.stream != stream:
            if trusts is not None and not accepts(delta, prefix, blocks, out):
                push(slot)
                return self._launch_new(self._ordinary, (delta, prefix, blocks, out), ring=False)
            plan.fill(slot, pointers, stream)
        call = slot.call
        if status := call() if current is None or current() == ordinal else plan.call_elsewhere(slot):
            plan.recover(slot, status)
        push(slot)
        return out

    def run_ring(
        self,
        prefix: torch.Tensor,
        blocks: torch.Tensor,
        out: torch.Tensor,
        aux: torch.Tensor | None = None,
        *,
        after: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Launches with the bound mailbox as source: waits for its rows 0..rows-1, and re-arms them.

        Args:
          prefix: [rows, H]: updated in place; rows is at most the mailbox's capacity.
          blocks: [rows, B, H]: the first nb are read, block `write` is written.
          out: [rows, H]: written.
          aux: [rows, H]: receives a copy of the updated prefix; `bind_aux` first.
          after: in a compiled graph, a tensor from whatever publishes into the mailbox, so that the compiler keeps this
            launch behind it; has no effect elsewhere.

        Returns:
          `out`.

        Raises:
          OperandError: no mailbox is bound, or an operand cannot be launched; one line for every problem.
          VariantMissError: the bundle lacks the variant, and there is no fallback.
          DriverError: the driver refused.
        """
        if is_dynamo_compiling():
            ops.compile_run_ring(self, (prefix, blocks, out, aux), after)
            return out
        if dispatch_modes():
            ops.dispatch_run_ring(self, (prefix, blocks, out, aux), after)
            return out
        if aux is not None:
            return self._launch_aux(self._ring_aux, (prefix, blocks, out, aux), ring=True)
        accepts, trusts, moved, pop, push, current_stream, ordinal, current, plan = self._ring.steps
        if not (accepts(prefix, blocks, out) and not moved() if trusts is None else trusts(out)):
            return self._launch_new(self._ring, (prefix, blocks, out), ring=True)
        pointers = (prefix.data_ptr(), blocks.data_ptr(), out.data_ptr())
        try:
            slot = pop()
        except IndexError:
            slot = plan.make_slot()
        stream = current_stream(ordinal)
        if slot.pointers != pointers or slot.stream != stream:
            if trusts is not None and not accepts(prefix, blocks, out):
                push(slot)
                return self._launch_new(self._ring, (prefix, blocks, out), ring=True)
            plan.fill(slot, pointers, stream)
        call = slot.call
        if status := call() if current is None or current() == ordinal else plan.call_elsewhere(slot):
            plan.recover(slot, status)
        push(slot)
        return out

    def fault(self) -> RingFault | None:
        """Returns what a launch of this object was waiting for when its spin budget ran out; None if none has.

        Makes no CUDA call, so it works after the trap has ended the CUDA context. `attnres_aot.ring_fault()` asks for
        any consumer's.
        """
        found = read_fault(self._bundle.device.ordinal)
        return found if found is not None and found.launch.handle == self.handle else None

"""A launchable taken from a bundle by the facts of a consumer, for callers that pass everything with each call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnres_aot.errors import OperandError
from attnres_aot.records import dataclass
from attnres_aot.runtime.loaded import LoadedBundle
from attnres_aot.runtime.pdl import Pdl
from attnres_aot.runtime.prepared import PreparedAttnRes
from attnres_aot.variants import Variant


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Consumer:
    """One variant of a bundle, loaded on its device. Calls check everything each time; bind once where time counts."""

    bundle: LoadedBundle
    """Where the code comes from."""
    variant: Variant
    """What is launched."""
    capacity: int
    """Rows per mailbox slot; 0 for an ordinary source."""

    def __call__(  # noqa: PLR0913 - the operands of the kernel
        self,
        source: torch.Tensor,
        prefix: torch.Tensor,
        blocks: torch.Tensor,
        weights: Sequence[torch.Tensor],
        out: torch.Tensor,
        *,
        eps: float | tuple[float, float],
        aux: torch.Tensor | None = None,
        mixture: torch.Tensor | None = None,
        scal: torch.Tensor | None = None,
        pdl: Pdl = False,
    ) -> torch.Tensor:
        """Launches once, on the current stream; the operands are those of `PreparedAttnRes`.

        Args:
          source: the delta [rows, H], or the mailbox [slots, capacity, H].
          prefix: [rows, H], updated.
          blocks: [rows, B, H].
          weights: (norm, query, out_norm), each [H].
          out: [rows, H], written.
          eps: one epsilon, or (under the logits, of the output norm).
          aux: [rows, H], for a variant with an aux copy.
          mixture: [cap, H] fp32, for a variant with statistics.
          scal: [cap, 2] fp32, for a variant with statistics.
          pdl: launch mode, as for `PreparedAttnRes`.

        Returns:
          `out`.

        Raises:
          OperandError: an operand is missing, too many, or cannot be launched.
          DriverError: the driver refused.
        """
        variant = self.variant
        for name, given, wanted in (
            ("aux", aux is not None, variant.aux),
            ("mixture", mixture is not None, variant.stats),
            ("scal", scal is not None, variant.stats),
        ):
            if given != wanted:
                raise OperandError(
                    f"{name} was {'' if given else 'not '}passed, but {variant} takes {'it' if wanted else 'none'}"
                )
        prepared = PreparedAttnRes(weights, variant.key, eps, self.bundle, pdl=pdl)
        if variant.aux:
            prepared.bind_aux()
        if mixture is not None and scal is not None and out.shape[0]:
            prepared.bind_statistics(mixture, scal, [out.shape[0]])
        if not variant.slots:
            return prepared.run(source, prefix, blocks, out, aux)
        if source.shape[:2] != (variant.slots, self.capacity):
            shape = [variant.slots, self.capacity, self.bundle.hidden]
            raise OperandError(f"source is {list(source.shape)}; a mailbox {shape} is wanted")
        return prepared.bind_ring(source).run_ring(prefix, blocks, out, aux)

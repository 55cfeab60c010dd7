"""Computes the statistics of saved blocks that consumers with bound statistics take instead of reading the blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from attnres_aot.errors import OperandError
from attnres_aot.runtime.cuda.device import check_device
from attnres_aot.runtime.find.loaded import LoadedBundle
from attnres_aot.runtime.graphs import ops
from attnres_aot.runtime.graphs.handles import STATISTICS as KIND
from attnres_aot.runtime.graphs.tracing import dispatch_modes, stand_ins_among
from attnres_aot.runtime.launch.binding import make_statistics
from attnres_aot.runtime.operands.geometry import VECTOR_ELEMS, Expected, View, vector_problems
from attnres_aot.runtime.operands.integers import whole
from attnres_aot.runtime.operands.memory import overlap_problems
from attnres_aot.runtime.operands.overlap import Fixed
from attnres_aot.runtime.operands.weights import as_vector, check_eps, first_device
from attnres_aot.runtime.producer import PreparedProducer
from attnres_aot.spec.variants import STATISTICS, Producer

_FP32_BYTES = 4


class PreparedStatistics(PreparedProducer):
    """The statistics of `nb` saved blocks, bound to the weights of a consumer and to where they go.

    `run` launches on torch's current stream of the tensors' device. The default launch is ordered after everything
    earlier on the stream. With `pdl=True` a launch may start while its predecessor still runs: blocks and weights must
    then have been complete before that predecessor started; mixture and scal may still be read by it.
    """

    __slots__ = ("_eps", "_nb", "_norm", "_query", "_statistics")
    _kind = KIND

    def __init__(  # noqa: PLR0913 - everything but the blocks
        self,
        norm: torch.Tensor,
        query: torch.Tensor,
        eps: float | tuple[float, float],
        mixture: torch.Tensor,
        scal: torch.Tensor,
        *,
        nb: int,
        bundle: LoadedBundle | None = None,
        pdl: bool = False,
        checks: bool = True,
        name: str | None = None,
    ) -> None:
        """Binds the producer and puts its code on the device.

        Args:
          norm: [H] bf16, contiguous: weight of the norm under the logits of the consumer that takes the statistics.
          query: [H] or [1, H] bf16, contiguous: its projection.
          eps: its epsilon under the logits, or its pair of epsilons, of which that is the first.
          mixture: [cap, H] fp32, contiguous, written: sum over blocks of exp(logit - m) * block.
          scal: [cap, 2] fp32, contiguous, written: (m, l), the largest logit and the sum of exp(logit - m).
          nb: saved blocks, that of the consumer.
          bundle: where the code comes from; None finds the bundle for the weights' device as `load()` does.
          pdl: launch with programmatic stream serialization.
          checks: as for `PreparedAttnRes`.
          name: as for `PreparedAttnRes`.

        Raises:
          OperandError: something cannot be bound; one line for every problem.
          UsageError: another object has the name.
          VariantMissError: the bundle does not make statistics of `nb` blocks.
          BundleError: no bundle fits, or an image is damaged.
          DriverError: the driver refused code, or this process was forked.
        """
        if bundle is None:
            from attnres_aot.runtime.api import load

            bundle = load(device=first_device((norm, query)))
        count = whole(nb)
        if count is None:
            raise OperandError(f"nb is {nb!r}; a whole number of saved blocks is wanted, that of the consumer")
        super().__init__(Producer(kernel=STATISTICS, nb=count), bundle, pdl=pdl, checks=checks)
        self._nb, self._norm, self._query = count, as_vector(norm, bundle.hidden), as_vector(query, bundle.hidden)
        problems = vector_problems("norm", self._norm, (bundle.hidden,), torch.bfloat16)
        problems += vector_problems("query", self._query, (bundle.hidden,), torch.bfloat16)
        if problems:
            raise OperandError("\n".join(problems))
        self._eps = check_eps(eps)[0]
        self._statistics = make_statistics(mixture, scal, (), bundle.hidden)
        for label, tensor in (("norm", norm), ("query", query), ("mixture", mixture), ("scal", scal)):
            check_device(label, tensor, bundle.device)
        self._check_apart()
        self._load()
        self._take_handle(name)

    def __repr__(self) -> str:
        return f"<PreparedStatistics of {self._nb} blocks, up to {self._statistics.mixture.shape[0]} rows>"

    def run(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Launches for the rows of `blocks`. With no rows, launches nothing.

        Args:
          blocks: [rows, B, H] bf16, B >= nb; any row and block stride, rows aligned to 16 bytes.

        Returns:
          (mixture, scal), of which rows 0..rows-1 are written; `PreparedAttnRes.bind_statistics` takes them.

        Raises:
          OperandError: the blocks cannot be launched; one line for every problem.
          DriverError: the driver refused.
        """
        mixture, scal = self._statistics.mixture, self._statistics.scal
        if is_dynamo_compiling():
            ops.compile_statistics(self, blocks, mixture, scal)
        elif dispatch_modes() or stand_ins_among((blocks,)):
            ops.dispatch_statistics(self, blocks, mixture, scal)
        else:
            self.launch(blocks)
        return mixture, scal

    def with_outputs(self, mixture: torch.Tensor, scal: torch.Tensor) -> PreparedStatistics:
        """Returns this object, or one like it that writes elsewhere."""
        bound = self._statistics
        if mixture.data_ptr() == bound.mixture.data_ptr() and scal.data_ptr() == bound.scal.data_ptr():
            return self
        twin = self._same_slots()
        twin._statistics = make_statistics(mixture, scal, (), self.bundle.hidden)  # noqa: SLF001
        twin._check_apart()  # noqa: SLF001
        twin.forget_plans()
        return twin

    def _check_apart(self) -> None:
        written = {"mixture", "scal"}
        if problems := overlap_problems(
            [(name, tensor, name in written) for name, tensor in self.bound(self.producer)]
        ):
            raise OperandError("\n".join(problems))

    def expected(self) -> tuple[Expected, ...]:
        """Returns what is wanted of the blocks."""
        return (Expected(name="blocks", reads=tuple(range(self._nb)), blocks=self._nb),)

    def bound(self, _asked: Producer, /) -> list[tuple[str, torch.Tensor]]:
        """Returns what launches take the addresses of."""
        outputs = [("mixture", self._statistics.mixture), ("scal", self._statistics.scal)]
        return [("norm", self._norm), ("query", self._query), *outputs]

    def plan_in(self, table: Any, give: Callable[[torch.Tensor], Any], _constants: object, /) -> Any:
        """Returns what plans launches in a library."""
        norm, query, mixture, scal = [give(tensor) for _, tensor in self.bound(self.producer)]
        return table.prepare_statistics(norm, query, self._eps, mixture, scal, self._nb, self.pdl, self.checks).plan_run

    def check_room(self, rows: int) -> None:
        """Refuses more rows than mixture has."""
        room = self._statistics.mixture.shape[0]
        if rows > room:
            raise OperandError(f"blocks has {rows} rows, but mixture holds {room}; bind a larger one")

    def constants(self, views: tuple[View, ...], _asked: Producer, /) -> dict[str, int | float]:
        """Returns the arguments that stay."""
        (view,), mixture, scal = views, self._statistics.mixture, self._statistics.scal
        return {
            "norm": self._norm.data_ptr(),
            "query": self._query.data_ptr(),
            "mixture": mixture.data_ptr(),
            "scal": scal.data_ptr(),
            "blocks_row_stride": view.row_stride // VECTOR_ELEMS,
            "blocks_block_stride": view.block_stride // VECTOR_ELEMS,
            "rows": view.rows,
            "eps": self._eps,
        }

    def fixed(self, views: tuple[View, ...], /) -> list[Fixed]:
        """Returns what a launch writes."""
        written = (("mixture", self._statistics.mixture), ("scal", self._statistics.scal))
        return [
            Fixed(name=name, address=each.data_ptr(), size=views[0].rows * each.shape[1] * _FP32_BYTES, written=True)
            for name, each in written
        ]


def statistics(  # noqa: PLR0913 - everything at once
    blocks: torch.Tensor,
    norm: torch.Tensor,
    query: torch.Tensor,
    eps: float | tuple[float, float],
    mixture: torch.Tensor,
    scal: torch.Tensor,
    *,
    nb: int,
    bundle: LoadedBundle | None = None,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes statistics once; binds and checks everything each time. `PreparedStatistics` says what is what.

    The first call loads code: beside a kernel that waits for what comes later, use `PreparedStatistics`.

    Returns:
      (mixture, scal), of which as many rows are written as `blocks` has.

    Raises:
      OperandError: something cannot be bound or launched; one line for every problem.
      UsageError: `pdl` is no launch mode of producers, or a graph is recorded that would write into copies.
      VariantMissError: the bundle does not make statistics of `nb` blocks.
      BundleError: no bundle fits, or an image is damaged.
      DriverError: the driver refused, or this process was forked.
    """
    return PreparedStatistics(norm, query, eps, mixture, scal, nb=nb, bundle=bundle, pdl=pdl).run(blocks)

"""Publishes rows into a mailbox slot, on this GPU or on one that it can write to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from attnres_aot.errors import OperandError
from attnres_aot.runtime.cuda.device import lasting_byte, open_memory_of
from attnres_aot.runtime.find.loaded import LoadedBundle
from attnres_aot.runtime.graphs import ops
from attnres_aot.runtime.graphs.handles import PUBLISHERS
from attnres_aot.runtime.graphs.tracing import dispatch_modes, stand_ins_among
from attnres_aot.runtime.launch.binding import check_unmoved
from attnres_aot.runtime.operands.geometry import VECTOR_ELEMS, Expected, View
from attnres_aot.runtime.operands.integers import whole
from attnres_aot.runtime.operands.mailbox import mailbox_problems
from attnres_aot.runtime.operands.overlap import Fixed
from attnres_aot.runtime.operands.weights import first_device
from attnres_aot.runtime.producer import PreparedProducer
from attnres_aot.spec.variants import PUBLISH, Producer

_BF16_BYTES = 2


class PreparedPublish(PreparedProducer):
    """One mailbox slot to publish rows into: copies them with -0.0 made +0.0, in whole 16-byte fragments.

    `run` launches on the device of the rows, on torch's current stream there; the mailbox may be in the memory of
    another GPU of this process. The rows that the slot held before must have been consumed: on one GPU, a consumer
    launched on the same stream in between has done so; between GPUs the caller has to order it.

    The default launch is ordered after everything earlier on the stream. With `pdl=True` a launch may start early but
    waits for its predecessor, and whatever that has waited for, before it reads the rows or writes any.
    """

    __slots__ = ("_address", "_mailbox", "_slot", "token")
    _kind = PUBLISHERS

    def __init__(
        self,
        mailbox: torch.Tensor,
        slot: int,
        bundle: LoadedBundle | None = None,
        *,
        pdl: bool = False,
        checks: bool = True,
        name: str | None = None,
    ) -> None:
        """Binds the slot, puts the code on the device, and opens the mailbox's memory to it if that is a peer's.

        Args:
          mailbox: [slots, capacity, H] bf16, contiguous (see `new_mailbox`).
          slot: which slot, 0 to slots - 1.
          bundle: where the code comes from, loaded for the device of the rows; None is `load()`, for torch's current
            device.
          pdl: launch with programmatic stream serialization.
          checks: as for `PreparedAttnRes`.
          name: as for `PreparedAttnRes`.

        Raises:
          OperandError: the mailbox cannot be used, there is no such slot, or the device cannot write to the mailbox's.
          UsageError: another object has the name.
          VariantMissError: the bundle does not publish.
          BundleError: no bundle fits, or an image is damaged.
          DriverError: the driver refused code, this process was forked, or the mailbox is a peer's that this process
            has not published to before and a graph is being captured.
        """
        if bundle is None:
            from attnres_aot.runtime.api import load

            bundle = load()
        super().__init__(Producer(kernel=PUBLISH), bundle, pdl=pdl, checks=checks)
        problems = mailbox_problems(mailbox, hidden=bundle.hidden)
        index = whole(slot)
        if index is None:
            problems.append(f"slot is {slot!r}; a whole number is wanted")
        elif not problems and not 0 <= index < mailbox.shape[0]:
            problems.append(f"slot is {slot!r}; 0 to {mailbox.shape[0] - 1} are the slots of the mailbox")
        if problems or index is None:
            raise OperandError("\n".join(problems))
        open_memory_of("mailbox", mailbox, bundle.device)
        self._mailbox, self._slot, self._address = mailbox, index, mailbox.data_ptr()
        self.token = lasting_byte(bundle.device)
        self._load()
        self._take_handle(name)

    def __repr__(self) -> str:
        return f"<PreparedPublish into slot {self._slot} of {list(self._mailbox.shape)} on {self._mailbox.device}>"

    def run(self, rows: torch.Tensor) -> torch.Tensor:
        """Publishes `rows` as rows 0.. of the slot. With no rows, launches nothing.

        Args:
          rows: [rows, H] bf16, at most the mailbox's capacity; any row stride, rows aligned to 16 bytes.

        Returns:
          A tensor that stands for the published rows: in a compiled graph, pass it as `after` to the
          `PreparedAttnRes.run_ring` that takes them, which keeps the two in order. It holds nothing.

        Raises:
          OperandError: the rows cannot be launched; one line for every problem.
          DriverError: the driver refused.
        """
        if is_dynamo_compiling():
            return ops.compile_publish(self, rows, self.token)
        if dispatch_modes() or stand_ins_among((rows,)):
            return ops.dispatch_publish(self, rows)
        self.launch(rows)
        return self.token

    def expected(self) -> tuple[Expected, ...]:
        """Returns what is wanted of the rows."""
        return (Expected(name="rows", reads=(0,)),)

    def bound(self, _asked: Producer, /) -> list[tuple[str, torch.Tensor]]:
        """Returns what launches take the addresses of."""
        return [("the mailbox", self._mailbox)]

    def plan_in(self, table: Any, give: Callable[[torch.Tensor], Any], _constants: object, /) -> Any:
        """Returns what plans launches in a library."""
        return table.prepare_publish(give(self._mailbox), self._slot, self.pdl, self.checks).plan_run

    def check_room(self, rows: int) -> None:
        """Refuses more rows than a slot has."""
        capacity = self._mailbox.shape[1]
        if rows > capacity:
            raise OperandError(f"rows has {rows} rows, but a slot of the mailbox holds {capacity}")

    def check_in_place(self) -> None:
        """Refuses a mailbox that has moved."""
        check_unmoved(self._mailbox, self._address)

    def constants(self, views: tuple[View, ...], _asked: Producer, /) -> dict[str, int | float]:
        """Returns the arguments that stay."""
        return {
            "mailbox": self._slot_address(),
            "source_row_stride": views[0].row_stride // VECTOR_ELEMS,
            "rows": views[0].rows,
        }

    def fixed(self, views: tuple[View, ...], /) -> list[Fixed]:
        """Returns what a launch writes."""
        size = views[0].rows * views[0].hidden * _BF16_BYTES
        return [Fixed(name="the mailbox", address=self._slot_address(), size=size, written=True)]

    def _slot_address(self) -> int:
        return self._address + self._slot * self._mailbox.stride(0) * _BF16_BYTES


def publish(
    rows: torch.Tensor, mailbox: torch.Tensor, slot: int, *, bundle: LoadedBundle | None = None, pdl: bool = False
) -> torch.Tensor:
    """Publishes once; binds and checks everything each time. `PreparedPublish` says what is what.

    The first call loads code, which never returns beside a consumer that waits for these rows: use `PreparedPublish`.

    Returns:
      `rows`.

    Raises:
      OperandError: mailbox, slot or rows cannot be used; one line for every problem.
      UsageError: `pdl` is no launch mode of producers.
      VariantMissError: the bundle does not publish.
      BundleError: no bundle fits, or an image is damaged.
      DriverError: the driver refused, this process was forked, or the mailbox is a peer's that this process has not
        published to before and a graph is being captured.
    """
    if bundle is None:
        from attnres_aot.runtime.api import load

        bundle = load(device=first_device((rows,)))
    PreparedPublish(mailbox, slot, bundle, pdl=pdl).run(rows)
    return rows

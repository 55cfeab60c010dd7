"""Binding: what a consumer was given ahead of launches, checked once, in any order.

`PreparedAttnRes` adds launching to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from attnres_aot.runtime.cuda.device import check_device
from attnres_aot.runtime.cuda.fault import Owner, open_record
from attnres_aot.runtime.find.loaded import LoadedBundle
from attnres_aot.runtime.find.miss import variant_miss
from attnres_aot.runtime.graphs.handles import CONSUMERS
from attnres_aot.runtime.launch.binding import Binding, Ring, Statistics, check_apart, make_ring, make_statistics
from attnres_aot.runtime.launch.copies import BoundToMemory
from attnres_aot.runtime.launch.pdl import Pdl, check_pdl
from attnres_aot.runtime.launch.route import Route
from attnres_aot.runtime.operands.weights import check_eps, check_weights
from attnres_aot.spec.variants import ConsumerKey, KeyLike, Variant, consumer_key

if TYPE_CHECKING:
    from typing_extensions import Self

    from attnres_aot.runtime.launch.fallback import Fallback


class BoundConsumer(BoundToMemory):
    """A consumer with its weights and whatever else is bound; holds a route for each way of launching it."""

    __slots__ = (
        "_aux",
        "_bundle",
        "_checks",
        "_eps",
        "_fallback",
        "_key",
        "_mailbox",
        "_ordinary",
        "_ordinary_aux",
        "_owner",
        "_pdl",
        "_ring",
        "_ring_aux",
        "_statistics",
        "_weights",
        "writes_block",
    )
    _kind = CONSUMERS

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        key: KeyLike,
        eps: float | tuple[float, float],
        bundle: LoadedBundle,
        *,
        pdl: Pdl,
        checks: bool,
        fallback: Fallback | None,
    ) -> None:
        """Checks and keeps what `PreparedAttnRes` was given; arguments and errors are described there."""
        self._bundle, self._key, self._fallback = bundle, consumer_key(key), fallback
        self._weights = check_weights(weights, bundle.hidden)
        check_device("weights", self._weights.norm, bundle.device)
        self._eps = check_eps(eps)
        self._pdl, self._checks = check_pdl(pdl), checks
        self.writes_block = self._key.write is not None
        self._aux = False
        self._owner: Owner | None = None
        self._mailbox: Ring | None = None
        self._statistics: Statistics | None = None
        if fallback is None and not bundle.holds_key(self._key):
            raise variant_miss(bundle.bundle, Variant(key=self._key))
        self._load()
        self._renew_routes()

    def __repr__(self) -> str:
        bound = [f"ring {self._mailbox.slots}x{self._mailbox.capacity}"] if self._mailbox else []
        bound += ["aux"] if self._aux else []
        bound += [f"statistics for {len(self._statistics.rows)} row counts"] if self._statistics else []
        return f"<PreparedAttnRes {Variant(key=self._key)}, bound: {', '.join(bound) or 'nothing'}>"

    @property
    def key(self) -> ConsumerKey:
        """Which consumer this is."""
        return self._key

    @property
    def device(self) -> torch.device:
        """Where it launches."""
        return self._bundle.device.device

    @property
    def eps(self) -> tuple[float, float]:
        """Epsilons under the logits and of the output norm."""
        return self._eps

    @property
    def ring(self) -> torch.Tensor | None:
        """The bound mailbox, None without one."""
        return self.mailbox

    @property
    def aux(self) -> bool:
        """Whether launches may write an aux copy."""
        return self._aux

    @property
    def stats(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The bound (mixture, scal), None without."""
        return None if self._statistics is None else (self._statistics.mixture, self._statistics.scal)

    @property
    def checks(self) -> bool:
        """Whether operands and bound memory are checked (see the constructor); may be set at any time."""
        return self._checks

    @checks.setter
    def checks(self, on: bool) -> None:
        self._checks = on
        self._renew_routes()

    def bind_ring(self, mailbox: torch.Tensor, *, spin_budget: int = 0) -> Self:
        """Binds the mailbox that `run_ring` reads, or replaces it.

        Args:
          mailbox: [slots, capacity, H] bf16, contiguous, armed (see `new_mailbox`).
          spin_budget: polls for its rows before a launch gives up; 0 waits for ever. Giving up is a trap, which
            ends the CUDA context: later CUDA calls of the process fail, and `fault()` says what was missing.

        Returns:
          This object.

        Raises:
          OperandError: the mailbox cannot be used; one line for every problem.
          VariantMissError: the bundle has no ring variant of that many slots, and there is no fallback.
          BundleError: an image is damaged.
          DriverError: the driver refused code, or the memory for a fault record, which a spin budget needs.
        """
        ring = make_ring(mailbox, spin_budget, self._bundle.hidden)
        check_device("mailbox", mailbox, self._bundle.device)
        check_apart(self._weights, ring, self._statistics)
        self._require(Variant(key=self._key, slots=ring.slots, aux=aux) for aux in (False, True))
        self._load(ring=ring)
        if ring.spin_budget:
            open_record(self._bundle.device.ordinal)
            self._owner = self._owner or Owner(self.handle, self.name)
        self._mailbox = ring
        self._rebind()
        return self

    def bind_aux(self) -> Self:
        """Allows launches to write an aux copy: pass `aux=` to `run` or `run_ring`; without it none is written.

        Returns:
          This object.

        Raises:
          VariantMissError: the bundle has no aux variant of this consumer, and there is no fallback.
          BundleError: an image is damaged.
          DriverError: the driver refused code.
        """
        slots = (0, *self._bundle.bundle.manifest.mailbox.slots)
        self._require(Variant(key=self._key, slots=count, aux=True) for count in slots)
        self._load(aux=True)
        self._aux = True
        self._rebind()
        return self

    def bind_statistics(self, mixture: torch.Tensor, scal: torch.Tensor, rows: Iterable[int]) -> Self:
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
          BundleError: an image is damaged.
          DriverError: the driver refused code.
        """
        statistics = make_statistics(mixture, scal, rows, self._bundle.hidden)
        check_device("mixture", mixture, self._bundle.device)
        check_device("scal", scal, self._bundle.device)
        check_apart(self._weights, self._mailbox, statistics)
        slots = (0, *self._bundle.bundle.manifest.mailbox.slots)
        self._require(Variant(key=self._key, slots=n, aux=aux, stats=True) for n in slots for aux in (False, True))
        self._load(statistics=statistics)
        self._statistics = statistics
        self._rebind()
        return self

    @property
    def mailbox(self) -> torch.Tensor | None:
        """The bound mailbox."""
        return None if self._mailbox is None else self._mailbox.mailbox

    @property
    def statistics(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The bound (mixture, scal)."""
        return (None, None) if self._statistics is None else (self._statistics.mixture, self._statistics.scal)

    def with_statistics(self, mixture: torch.Tensor, scal: torch.Tensor) -> Self:
        """Returns a stand-in for this object with other statistics bound, for the same row counts."""
        assert self._statistics is not None
        twin = self._same_slots()
        twin._statistics = make_statistics(mixture, scal, self._statistics.rows, self._bundle.hidden)  # noqa: SLF001
        check_apart(self._weights, self._mailbox, twin._statistics)  # noqa: SLF001
        twin._renew_routes()  # noqa: SLF001
        return twin

    def _rebind(self) -> None:
        """Drops the plans of what was bound before, if there are any."""
        if self._ordinary.used or self._ordinary_aux.used or self._ring.used or self._ring_aux.used:
            self._renew_routes()

    def _renew_routes(self) -> None:
        """Drops all plans, and what launches in flight may still find."""
        self._ordinary, self._ordinary_aux, self._ring, self._ring_aux = Route(), Route(), Route(), Route()

    def _binding(self, *, ring: bool, aux: bool) -> Binding:
        """Returns what launches of one route have in common."""
        return Binding(
            bundle=self._bundle,
            owner=self._owner if ring and self._mailbox is not None and self._mailbox.spin_budget else None,
            key=self._key,
            weights=self._weights,
            eps=self._eps,
            ring=self._mailbox if ring else None,
            mailbox=self.mailbox,
            aux=aux,
            statistics=self._statistics,
            pdl=self._pdl,
            checks=self._checks,
            watched=self._checks,
        )

    def _load(self, *, ring: Ring | None = None, aux: bool = False, statistics: Statistics | None = None) -> None:
        """Puts on the device all code that launches can need, what is bound and what is about to be taken together."""
        mailbox, taken = ring or self._mailbox, statistics or self._statistics
        self._bundle.load_variants(
            self._key,
            slots=(0,) if mailbox is None else (0, mailbox.slots),
            aux=(False, True) if aux or self._aux else (False,),
            stats=(False, True) if taken is not None and taken.rows else (False,),
        )

    def _require(self, variants: Iterable[Variant]) -> None:
        """Raises unless the bundle holds one of `variants`, or there is a fallback."""
        asked: Variant | None = None
        for variant in variants if self._fallback is None else ():
            if variant in self._bundle:
                return
            asked = asked or variant
        if asked is not None:
            raise variant_miss(self._bundle.bundle, asked)

    def forget_plans(self) -> None:
        """Makes every launch look for its plan again."""
        for route in (self._ordinary, self._ordinary_aux, self._ring, self._ring_aux):
            route.forget()

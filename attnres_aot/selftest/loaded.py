"""The loader as a consumer to check: every case goes through `PreparedAttnRes`, as a serving engine's launches do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from attnres_aot.bundle.reader import Bundle
from attnres_aot.runtime.api import load
from attnres_aot.runtime.find.loaded import LoadedBundle
from attnres_aot.runtime.launch.pdl import Pdl
from attnres_aot.runtime.prepared import PreparedAttnRes
from attnres_aot.runtime.publish import publish
from attnres_aot.runtime.statistics import statistics
from attnres_aot.selftest.arena import Arena
from attnres_aot.selftest.cases import Case
from attnres_aot.selftest.producers import ProducerCase
from attnres_aot.selftest.reference import Operands

SPIN_BUDGET = 1 << 22
"""Polls, of some hundred nanoseconds each, after which a ring kernel that is being checked gives up."""


class LoadedConsumer:
    """Launches cases from a bundle on one GPU, which `device_name` names."""

    def __init__(self, loaded: LoadedBundle) -> None:
        self.loaded = loaded
        self.device_name = torch.cuda.get_device_name(loaded.device.device)

    @classmethod
    def open(cls, path: str | None, device: str | None = None) -> LoadedConsumer:
        """Finds and reads a bundle as `attnres_aot.load` does.

        Raises:
          BundleError: there is no fitting bundle.
          DriverError: there is no usable GPU.
        """
        return cls(load(path, device))

    @property
    def bundle(self) -> Bundle:
        """Path and manifest."""
        return self.loaded.bundle

    @property
    def device(self) -> torch.device:
        """The GPU."""
        return self.loaded.device.device

    def launch(self, case: Case, views: Operands) -> None:
        """Binds and launches `case` once, the safe way (no programmatic dependent launch)."""
        self.bind(case, views)()

    def produce(self, case: ProducerCase, arena: Arena) -> None:
        """Launches a case of a producer once, the safe way."""
        tensor, nb = arena.tensor, case.producer.nb
        if nb is None:
            publish(tensor("source"), tensor("mailbox"), case.slot, bundle=self.loaded)
            return
        weights, written = (tensor("norm"), tensor("query")), (tensor("mixture"), tensor("scal"))
        statistics(tensor("blocks"), *weights, case.eps, *written, nb=nb, bundle=self.loaded)

    def bind(
        self, case: Case, views: Operands, *, pdl: Pdl = False, spin_budget: int = SPIN_BUDGET
    ) -> Callable[[], torch.Tensor]:
        """Binds everything that `case` needs and returns what launches it and returns `views.out`.

        Args:
          case: which variant, and with what epsilons.
          views: operands of the launch.
          pdl: launch mode.
          spin_budget: polls for its rows before a ring kernel gives up; 0 waits for ever.
        """
        variant = case.variant
        weights = (views.norm, views.query, views.out_norm)
        prepared = PreparedAttnRes(weights, variant.key, (case.eps, case.out_eps), self.loaded, pdl=pdl)
        if variant.aux:
            prepared.bind_aux()
        if views.mixture is not None and views.scal is not None:
            prepared.bind_statistics(views.mixture, views.scal, (case.rows,))
        if variant.slots:
            prepared.bind_ring(views.source, spin_budget=spin_budget)
            return partial(prepared.run_ring, views.prefix, views.blocks, views.out, views.aux)
        return partial(prepared.run, views.source, views.prefix, views.blocks, views.out, views.aux)

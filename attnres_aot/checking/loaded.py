"""The loader as a consumer to check: every case goes through `PreparedAttnRes`, as a serving engine's launches do."""

from __future__ import annotations

import torch

import attnres_aot
from attnres_aot.bundle import Bundle
from attnres_aot.checking.arena import Views
from attnres_aot.checking.cases import Case
from attnres_aot.runtime.loaded import LoadedBundle


class LoadedConsumer:
    """Launches cases from a bundle on one GPU."""

    def __init__(self, loaded: LoadedBundle) -> None:
        self.loaded = loaded

    @classmethod
    def open(cls, path: str | None, device: str | None = None) -> LoadedConsumer:
        """Finds and reads a bundle as `attnres_aot.load` does.

        Raises:
          BundleError: there is no fitting bundle.
          DriverError: there is no usable GPU.
        """
        return cls(attnres_aot.load(path, device))

    @property
    def bundle(self) -> Bundle:
        """Path and manifest."""
        return self.loaded.bundle

    @property
    def device(self) -> torch.device:
        """The GPU."""
        return self.loaded.device.device

    @property
    def device_name(self) -> str:
        """What the GPU is called."""
        return torch.cuda.get_device_name(self.device)

    def launch(self, case: Case, views: Views, *, pdl: bool = False) -> None:
        """Binds and launches `case`; `pdl` launches with programmatic stream serialization."""
        variant = case.variant
        prepared = attnres_aot.PreparedAttnRes(
            (views.norm, views.query, views.out_norm), variant.key, (case.eps, case.out_eps), bundle=self.loaded
        )
        if variant.slots:
            prepared.bind_ring(views.source)
        if variant.aux:
            prepared.bind_aux()
        if variant.stats:
            prepared.bind_statistics(views.mixture, views.scal, (case.rows,))
        if variant.slots:
            prepared.run_ring(views.prefix, views.blocks, views.out, views.aux)
        else:
            prepared.run(views.source, views.prefix, views.blocks, views.out, views.aux)

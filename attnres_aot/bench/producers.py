"""Where measurements reach the bundle's statistics kernel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from attnres_aot.bench.clock import Call
from attnres_aot.runtime.find.loaded import LoadedBundle
from attnres_aot.runtime.statistics import PreparedStatistics


def has_statistics_kernel(loaded: LoadedBundle, nb: int) -> bool:
    """Tells whether the bundle can compute the statistics of `nb` saved blocks."""
    return any(record.name == f"statistics-nb{nb}" for record in loaded.bundle.manifest.producers)


def bind_statistics_kernel(
    loaded: LoadedBundle,
    nb: int,
    *,
    weights: Sequence[torch.Tensor],
    eps: float,
    blocks: torch.Tensor,
    mixture: torch.Tensor,
    scal: torch.Tensor,
    pdl: bool,
) -> Call:
    """Returns what launches the statistics kernel, without checks of addresses.

    Raises:
      VariantMissError: the bundle has none for `nb`.
    """
    norm, query, *_ = weights
    prepared = PreparedStatistics(norm, query, eps, mixture, scal, nb=nb, bundle=loaded, pdl=pdl, checks=False)
    return partial(prepared.run, blocks)

"""Where measurements reach the bundle's statistics kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnres_aot.bench.clock import Call
from attnres_aot.errors import UsageError
from attnres_aot.runtime.loaded import LoadedBundle


def has_statistics_kernel(loaded: LoadedBundle, nb: int) -> bool:
    """Tells whether the bundle can compute the statistics of `nb` saved blocks."""
    return any(str(record.name) == f"statistics-nb{nb}" for record in getattr(loaded.bundle.manifest, "producers", ()))


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
    """Returns what launches the statistics kernel.

    Raises:
      UsageError: the bundle has none for `nb`.
    """
    raise UsageError(f"{loaded.bundle.path} has no statistics kernel for {nb} saved blocks")

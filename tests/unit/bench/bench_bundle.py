"""Manifests of bundles that hold given variants of a model of many blocks, with no code behind them."""

from __future__ import annotations

from collections.abc import Iterable

from attnres_aot.bundle.manifest import Manifest, ModelRecord
from tests.support.manifests import make_manifest


def manifest_of(
    names: Iterable[str], producers: Iterable[str] = (), *, blocks: int = 8, hidden: int = 1024
) -> Manifest:
    model = ModelRecord(hidden=hidden, layers=12 * blocks, block_size=12, leading_dense_layers=1)
    return make_manifest(names, producers, model=model)

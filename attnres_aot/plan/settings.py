"""What a bundle is asked to serve, as parsed values: model, mailboxes, option switches and deployments.

`attnres_aot.config` reads these from YAML; `attnres_aot.plan.plan` derives from them what must be compiled.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from attnres_aot.bundle.manifest import canonical_json, to_json
from attnres_aot.spec.tables import EMPTY, BatchTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Geometry of an AttnRes model."""

    hidden_size: int
    """Row length H in elements."""
    layers: int
    """Decoder layers."""
    block_size: int
    """Layers per saved block."""
    leading_dense_layers: int
    """Layers at the start of the model whose MLP is dense, and so feeds no mailbox."""

    @property
    def blocks(self) -> int:
        """Saved blocks at the end of the model."""
        return self.blocks_before(self.layers)

    def blocks_before(self, layer: int) -> int:
        """Saved blocks that exist when `layer` (0-based) starts."""
        return -(-layer // self.block_size)

    def written_block(self, layer: int) -> int | None:
        """The block that `layer` writes before its attention, or None."""
        return layer // self.block_size if layer % self.block_size == 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mailbox:
    """Geometry of the Lamport mailboxes that ring consumers read."""

    capacity: int
    """Rows per slot."""
    fixed_slots: tuple[int, ...]
    """Slot counts wanted whatever the deployment, ascending."""
    slot_per_rank: bool
    """Also wants as many slots as the deployment has tensor-parallel ranks."""

    def slots_for(self, tp: int) -> tuple[int, ...]:
        """Slot counts that a deployment of `tp` ranks uses, ascending."""
        return tuple(sorted({*self.fixed_slots, *([tp] if self.slot_per_rank else [])}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Which optional variants are built; ordinary sources before attention and at the end always are."""

    before_mlp: bool = True
    """Consumers between attention and MLP."""
    ring: bool = True
    """Consumers that read a mailbox."""
    aux: bool = True
    """Consumers that write a second copy of the updated prefix."""
    stats: bool = True
    """Consumers that take precomputed statistics, as far as the deployments' tables turn them on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One (tp, dcp) that the bundle serves, with its statistics tables in canonical form."""

    tp: int
    """Tensor-parallel size."""
    dcp: int
    """Decode-context-parallel size."""
    attn_stats: BatchTable = EMPTY
    """Rows -> 1 where precomputed statistics are used."""
    attn_stats_blocks: BatchTable = EMPTY
    """Saved blocks -> 1 where precomputed statistics are used."""

    @property
    def pair(self) -> tuple[int, int]:
        """(tp, dcp)."""
        return (self.tp, self.dcp)

    def uses_stats(self, nb: int) -> bool:
        """Tells whether some row count takes precomputed statistics of `nb` saved blocks."""
        return nb > 0 and self.attn_stats_blocks.get(nb) == 1 and any(span.value == 1 for span in self.attn_stats.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A whole configuration file."""

    name: str
    """Name of the bundles built from it; a safe file name."""
    model: Model
    """Model geometry."""
    mailbox: Mailbox
    """Mailbox geometry."""
    options: Options
    """Which optional variants are built."""
    deployments: tuple[Deployment, ...]
    """Deployments, ascending by (tp, dcp)."""

    @property
    def source(self) -> dict[str, Any]:
        """The configuration as plain data in the form of its file, every field given; `config.schema` reads it back."""
        slots = [*self.mailbox.fixed_slots, *(["tp"] if self.mailbox.slot_per_rank else [])]
        return {
            "name": self.name,
            "model": to_json(self.model),
            "mailbox": {"capacity": self.mailbox.capacity, "slots": slots},
            "variants": to_json(self.options),
            "deployments": [
                {
                    "tp": deployment.tp,
                    "dcp": deployment.dcp,
                    "attn_stats": str(deployment.attn_stats),
                    "attn_stats_blocks": str(deployment.attn_stats_blocks),
                }
                for deployment in self.deployments
            ],
        }

    @property
    def digest(self) -> str:
        """sha256 of `source`: comments, layout and the order of entries in the file do not change it."""
        return hashlib.sha256(canonical_json(self.source).encode("ascii")).hexdigest()

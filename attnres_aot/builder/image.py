"""A finished image: compiled code with its launch facts, and its one serialised form (store files, worker replies)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from attnres_aot.bundle.manifest import canonical_json

_FIELDS = {"key": str, "block_threads": int, "smem_dynamic_bytes": int, "rows_per_cluster": int, "pdl": bool}


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedImage:
    """Compiled code that is ready to be proven and bundled."""

    key: str
    """Build key."""
    cubin: bytes
    """The binary."""
    block_threads: int
    """Threads per CTA."""
    smem_dynamic_bytes: int
    """Shared memory that a launch must add, bytes per CTA."""
    rows_per_cluster: int
    """Rows that one cluster handles."""
    pdl: bool
    """May be launched with programmatic stream serialization."""


def encode_image(image: FinishedImage) -> bytes:
    """Serialises an image: a line with the digest of the rest, a line of JSON facts, then the binary."""
    facts = canonical_json({name: getattr(image, name) for name in _FIELDS})
    body = facts.encode("ascii") + b"\n" + image.cubin
    return hashlib.sha256(body).hexdigest().encode("ascii") + b"\n" + body


def decode_image(data: bytes) -> FinishedImage | None:
    """Reads an image as written by `encode_image`; None when a single bit of it is not as it was written."""
    digest, _, body = data.partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode("ascii") != digest:
        return None
    line, _, cubin = body.partition(b"\n")
    try:
        facts = json.loads(line)
    except ValueError:
        return None
    if not isinstance(facts, dict) or {name: type(value) for name, value in facts.items()} != _FIELDS or not cubin:
        return None
    return FinishedImage(cubin=cubin, **facts)

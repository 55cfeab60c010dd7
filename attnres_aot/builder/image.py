"""A finished image: compiled code with its build key, and its one serialised form (store files, worker replies)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from attnres_aot.bundle.names import is_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedImage:
    """Compiled code that is ready to be proven and bundled."""

    key: str
    """Build key."""
    cubin: bytes
    """The binary."""


def encode_image(image: FinishedImage) -> bytes:
    """Serialises an image: a line with the digest of the rest, a line with its key, then the binary."""
    body = image.key.encode("ascii") + b"\n" + image.cubin
    return hashlib.sha256(body).hexdigest().encode("ascii") + b"\n" + body


def decode_image(data: bytes) -> FinishedImage | None:
    """Reads an image as written by `encode_image`; None when a single bit of it is not as it was written."""
    digest, _, body = data.partition(b"\n")
    key, _, cubin = body.partition(b"\n")
    text = key.decode("ascii", "replace")
    if hashlib.sha256(body).hexdigest().encode("ascii") != digest or not is_digest(text) or not cubin:
        return None
    return FinishedImage(key=text, cubin=cubin)

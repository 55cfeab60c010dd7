"""Which names of files, images and bundles are safe, and what a digest looks like."""

from __future__ import annotations

MAX_NAME_CHARS = 128
"""Longest file, image or bundle name."""

_PUNCTUATION = "._+-"
_SAFE = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ" + _PUNCTUATION)
_HEX = frozenset("0123456789abcdef")
_DIGEST_CHARS = 64


def is_digest(text: str) -> bool:
    """Tells whether a text is a sha256 digest in lower-case hex."""
    return len(text) == _DIGEST_CHARS and _HEX.issuperset(text)


def name_problem(name: str) -> str | None:
    """Says why `name` cannot name a file of a bundle, or None when it can.

    A good name is one path component of letters, digits and `._+-` that does not start with a dot, so it can neither
    leave the folder nor hide in it.
    """
    if len(name) > MAX_NAME_CHARS:
        return f"{name[:40]!r}... is {len(name)} characters long; at most {MAX_NAME_CHARS} are allowed"
    if not name or name[0] in _PUNCTUATION or not _SAFE.issuperset(name):
        return f"{name!r} is not a safe file name (letters, digits and ._+- only, no leading dot)"
    return None

"""The store of finished images: what comes out is what went in, or nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import os

import pytest

from attnres_aot.builder.image import FinishedImage, decode_image, encode_image
from attnres_aot.builder.store import ImageStore

IMAGE = FinishedImage(
    key="ab" * 32,
    cubin=bytes(range(256)) + b"\n\n" + b"tail",
)


@pytest.fixture
def store(tmp_path) -> ImageStore:
    return ImageStore(folder=tmp_path / "deep" / "store")


def test_an_image_comes_back_as_it_was(store):
    assert store.get(IMAGE.key) is None
    store.put(IMAGE)
    store.put(IMAGE)
    assert store.get(IMAGE.key) == IMAGE
    assert [path.name for path in store.folder.iterdir()] == [f"{IMAGE.key}.image"]
    store.clear()
    assert store.get(IMAGE.key) is None


@pytest.mark.parametrize("kind", ["pipe", "endless", "folder", "device"])
def test_what_is_no_image_file_is_none(store, kind):
    store.put(IMAGE)
    path = store.folder / f"{IMAGE.key}.image"
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)
    assert store.get(IMAGE.key) is None


def test_no_flipped_bit_goes_unnoticed():
    data = encode_image(IMAGE)
    for position in range(len(data)):
        flipped = data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :]
        assert decode_image(flipped) is None, position


def test_no_truncation_goes_unnoticed():
    data = encode_image(IMAGE)
    assert [end for end in range(len(data)) if decode_image(data[:end]) is not None] == []


@pytest.mark.parametrize(
    "line", [b"", b"7", b"a key", b"AB" * 32, b"ab" * 33, b"\xff" * 64], ids=lambda line: repr(line[:8])
)
def test_a_correct_digest_does_not_make_nonsense_an_image(line):
    body = line + b"\ncubin"
    assert decode_image(hashlib.sha256(body).hexdigest().encode() + b"\n" + body) is None


def test_an_image_under_another_key_is_not_taken(store):
    store.put(dataclasses.replace(IMAGE, key="cd" * 32))
    (store.folder / f"{'cd' * 32}.image").rename(store.folder / f"{IMAGE.key}.image")
    assert store.get(IMAGE.key) is None

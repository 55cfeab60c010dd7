"""The store of finished images, by build key, that lets an interrupted build continue where it stopped.

It lives in the builder's work folder beside the bundle and goes away when the bundle is complete; from then on the
bundle itself is what the next build reuses images from. One file per image, written under another name and renamed.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from attnres_aot.builder.image import FinishedImage, decode_image, encode_image
from attnres_aot.input_file import read_input

MAX_BYTES = 64 << 20
"""Largest file that is looked at; images have some ten thousand bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageStore:
    """Finished images in a folder."""

    folder: Path
    """Where they lie; made on the first `put`."""

    def get(self, key: str) -> FinishedImage | None:
        """Returns the image with build key `key`; None when there is none, or its file is damaged."""
        try:
            image = decode_image(read_input(self._path(key), MAX_BYTES))
        except OSError:
            return None
        return image if image is not None and image.key == key else None

    def put(self, image: FinishedImage) -> None:
        """Adds an image; a reader sees all of it or nothing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(image.key)
        partial = path.with_suffix(".part")
        partial.write_bytes(encode_image(image))
        partial.replace(path)

    def clear(self) -> None:
        """Removes the store."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.image"

"""The folder in which the workers of one build put their files: beside the bundle, and gone when the build is over."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from attnres_aot.bundle.writer import work_folder


@contextlib.contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """Gives an empty folder for the workers, and leaves nothing but finished images in the work folder."""
    work = work_folder(path)
    work.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):
        work.chmod(0o700)
    _remove_scratch(work)
    scratch = work / f"scratch-{secrets.token_hex(4)}"
    scratch.mkdir()
    try:
        yield scratch.absolute()
    finally:
        _remove_scratch(work)
        with contextlib.suppress(OSError):
            work.rmdir()


def _remove_scratch(work: Path) -> None:
    for folder in work.glob("scratch-*"):
        shutil.rmtree(folder, ignore_errors=True)

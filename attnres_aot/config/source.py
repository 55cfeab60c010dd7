"""The bytes of a configuration file, and what to do when there are none.

Standard library only: `attnres-aot tune` reads configurations where PyYAML is not installed.
"""

from __future__ import annotations

import os
from pathlib import Path

from attnres_aot.errors import ConfigError
from attnres_aot.input_file import read_input

MAX_BYTES = 256 * 1024
"""Largest configuration that is read."""
START_FROM = "start from the shipped configuration: `attnres-aot config > my_model.yaml`"
"""What to do with a file that holds nothing, or is not there."""


def read_source(path: Path) -> bytes:
    """Reads a configuration file or a pipe.

    Returns:
      The bytes, cut one after the most that a configuration may have.

    Raises:
      ConfigError: it cannot be read, or is a folder, a socket or a device.
    """
    try:
        return read_input(path, MAX_BYTES)
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}; {_next_step(path)}"]) from error


def _next_step(path: Path) -> str:
    """Says how to come by a configuration; who names a shipped one is told how to have it as a file."""
    from attnres_aot.config.shipped import names  # only errors need it

    if path.stem in names() and not os.path.lexists(path):
        return f"`attnres-aot config {path.stem} > {path.stem}.yaml` writes the one that ships, for --config to name"
    return f"give --config the path of a configuration file, or {START_FROM}"

"""Reading a configuration file."""

from __future__ import annotations

from pathlib import Path

from attnres_aot.config.problems import Problems
from attnres_aot.config.schema import read_config
from attnres_aot.config.shipped import DEFAULT_NAME, path_of
from attnres_aot.config.source import read_source
from attnres_aot.config.yaml_tree import read_tree
from attnres_aot.plan.settings import Config

DEFAULT_CONFIG = path_of(DEFAULT_NAME)
"""The configuration that ships with the package."""


def load_config(path: Path) -> Config:
    """Reads a configuration file.

    Raises:
      ConfigError: the file cannot be read, or has mistakes; lists all of them.
    """
    return parse_config(read_source(path), str(path))


def parse_config(data: bytes, where: str) -> Config:
    """Parses the bytes of a configuration file; `where` names it in messages.

    Raises:
      ConfigError: there are mistakes; lists all of them.
    """
    problems = Problems(where)
    return read_config(read_tree(data, problems), problems)

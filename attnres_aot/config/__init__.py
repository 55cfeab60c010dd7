"""Configuration files: reading YAML into `attnres_aot.settings`, with every mistake of a file reported at once."""

from attnres_aot.config.reader import DEFAULT_CONFIG, load_config, parse_config

__all__ = ["DEFAULT_CONFIG", "load_config", "parse_config"]

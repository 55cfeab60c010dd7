"""Choosing by measurement: where precomputed statistics pay, and which launch shape is best; the command `tune`."""

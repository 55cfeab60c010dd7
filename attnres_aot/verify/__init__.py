"""Verifying bundles: the manifest against itself, the files, the binaries, and what would be built today."""

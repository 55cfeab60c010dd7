"""Verifying bundles: the manifest against the one that is assembled again from configuration and binaries."""

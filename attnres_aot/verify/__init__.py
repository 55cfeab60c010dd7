"""Verifying bundles: the manifest against itself, the files, the binaries, and what would be built today."""

from attnres_aot.verify.bundle_check import VerifyReport, verify_bundle

__all__ = ["VerifyReport", "verify_bundle"]

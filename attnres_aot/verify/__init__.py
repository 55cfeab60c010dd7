"""Verifying bundles: a manifest's promises against each other, the files, the binaries and a build of today's sources."""

from attnres_aot.verify.bundle_check import VerifyReport, verify_bundle

__all__ = ["VerifyReport", "verify_bundle"]

"""Bundle folders: reading, checking and writing them. The reader, which deployments import, is offered here."""

from attnres_aot.bundle.reader import (
    MAX_MANIFEST_BYTES,
    Bundle,
    read_bundle,
    read_image,
    read_manifest_bytes,
    read_plain_file,
)

__all__ = ["MAX_MANIFEST_BYTES", "Bundle", "read_bundle", "read_image", "read_manifest_bytes", "read_plain_file"]

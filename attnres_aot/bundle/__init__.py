"""Bundle folders: reading, checking and writing them. The reader, which deployments import, is offered here."""

from attnres_aot.bundle.reader import Bundle, read_bundle, read_image, read_manifest_bytes

__all__ = ["Bundle", "read_bundle", "read_image", "read_manifest_bytes"]

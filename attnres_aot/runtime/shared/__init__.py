"""The shared-object form of bundles: its launcher, called through TVM-FFI in the place of the loader's own launches."""

"""Building bundles: from a plan to a folder of proven images, with worker processes and an incremental store.

Reading order: `toolchain`, `sources`, `keys` (what decides an image's bytes); `image`, `store` (finished images);
`worker`, `process`, `pool` (compiling them); `budgets`, `assemble` (proofs and the manifest); `builder` (the whole
path); `progress`, `report` (what a person sees).
"""

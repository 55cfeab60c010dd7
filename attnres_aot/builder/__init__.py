"""Building bundles: from a plan to a folder of proven images, with worker processes and an incremental store.

Reading order: `toolchain`, `sources`, `keys` (what decides an image's bytes); `image`, `store` (finished images);
`inventory` (what is there already); `worker`, `process`, `pool` (compiling the rest); `budgets`, `assemble` (proofs and
the manifest); `builder` (the whole path); `progress`, `report` (what a person sees).
"""

"""What an image's record must say, given the image's name: the name says for what rows and consumers its code is.

So a launch shape that was changed, or taken from another image, does not pass for the image's own.
"""

from __future__ import annotations

from collections.abc import Iterator

from attnres_aot.bundle.limits import MAX_IMAGE_BYTES
from attnres_aot.bundle.manifest import IMAGE_SUFFIX, ImageRecord, Manifest
from attnres_aot.bundle.names import is_digest, name_problem
from attnres_aot.errors import UsageError
from attnres_aot.spec.variants import (
    ELEMS_PER_CTA,
    ROWS_PER_CLUSTER,
    ConsumerSpec,
    ImageSpec,
    PublishSpec,
    kernel_symbol,
    parse_image,
)

MAX_CLUSTER_CTAS = 16
"""Largest cluster that any GPU launches."""
MAX_BLOCK_THREADS = 1024
"""Largest CTA that any GPU launches."""
VECTOR_ELEMS = 8
"""bf16 elements of one 16-byte access."""

ImageFit = tuple[str, int | None, bool, bool, int]
"""What an image's code does: kernel, saved blocks that it reads, has_delta, final, mailbox slots."""


def spec_of(name: str) -> ImageSpec | None:
    """Returns what the image called `name` is compiled from; None where that is no image's name."""
    try:
        return parse_image(name)
    except UsageError:
        return None


def fit_of(spec: ImageSpec) -> ImageFit:
    """Returns what the code of `spec` does."""
    if isinstance(spec, ConsumerSpec):
        return (spec.kernel, spec.nb, spec.has_delta, spec.final, spec.slots)
    return (spec.kernel, None if isinstance(spec, PublishSpec) else spec.nb, False, False, 0)


def image_problems(image: ImageRecord, spec: ImageSpec | None, manifest: Manifest) -> Iterator[str]:
    """Yields what is wrong with one image's record; `spec` is what its name says."""
    for field, name in (("name", image.name), ("file", image.file)):
        if (problem := name_problem(name)) is not None:
            yield f"{field} {problem}"
    if spec is None:
        yield f"{image.name!r:.80} does not name an image"
    else:
        yield from _shape_problems(image, spec, manifest)
    if image.file != image.name + IMAGE_SUFFIX:
        yield f"file is {image.file!r:.80}, not {image.name + IMAGE_SUFFIX!r:.80}"
    if image.symbol != kernel_symbol(image.name):
        yield f"symbol is {image.symbol!r:.200}, not {kernel_symbol(image.name)!r:.200}"
    for field, digest in (("sha256", image.sha256), ("build_key", image.build_key)):
        if not is_digest(digest):
            yield f"{field} {digest!r:.80} is not a lower-case sha256 digest"
    if image.abi not in manifest.abis:
        yield f"abi {image.abi!r:.80} is not one of {', '.join(manifest.abis) or 'none'}"
    yield from _range_problems(image)


def _range_problems(image: ImageRecord) -> Iterator[str]:
    for field, value, low, high in (
        ("size", image.size, 1, MAX_IMAGE_BYTES),
        ("cluster", image.cluster, 1, MAX_CLUSTER_CTAS),
        ("block_threads", image.block_threads, 1, MAX_BLOCK_THREADS),
        ("smem_static_bytes", image.smem_static_bytes, 0, 1 << 20),
        ("smem_dynamic_bytes", image.smem_dynamic_bytes, 0, 1 << 20),
        ("registers", image.registers, 0, 255),
        ("stack_bytes", image.stack_bytes, 0, 1 << 20),
        ("spill_bytes", image.spill_bytes, 0, 1 << 20),
        ("critical_instructions", image.critical_instructions, 0, MAX_IMAGE_BYTES),
    ):
        if not low <= value <= high:
            yield f"{field} is {value}; {low} to {high} is possible"


def _shape_problems(image: ImageRecord, spec: ImageSpec, manifest: Manifest) -> Iterator[str]:
    hidden = manifest.model.hidden
    if image.kernel != spec.kernel or image.abi != spec.kernel:
        yield f"kernel {image.kernel!r:.40} and abi {image.abi!r:.40}; its name is one of kernel {spec.kernel!r}"
    if spec.hidden != hidden:
        yield f"its code is for rows of {spec.hidden} elements, the model has {hidden}"
    if image.cluster != spec.cluster:
        yield f"cluster is {image.cluster}; its rows take clusters of {spec.cluster}"
    if image.rows_per_cluster != ROWS_PER_CLUSTER:
        yield f"rows_per_cluster is {image.rows_per_cluster}; every kernel handles {ROWS_PER_CLUSTER}"
    share = image.block_threads * VECTOR_ELEMS
    if share < 1 or ELEMS_PER_CTA % share:
        yield (
            f"{image.block_threads} threads do not share the {ELEMS_PER_CTA} elements of a CTA evenly in vectors of "
            f"{VECTOR_ELEMS}"
        )

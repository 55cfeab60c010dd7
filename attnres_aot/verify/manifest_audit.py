"""What a manifest says that follows from this package's own sources: derived again, and compared.

Only a bundle that was built from these sources can be compared; of any other, `underivable` says what is left open.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

from attnres_aot.builder.budgets import budget_for
from attnres_aot.builder.keys import LAUNCH_FIELDS, PACKAGE_COMPONENT, BuildFacts, build_key
from attnres_aot.builder.sources import combined_digest, sources_digests
from attnres_aot.bundle.manifest import Choice, Manifest, VariantRecord
from attnres_aot.bundle.manifest_check import variant_of
from attnres_aot.kernels.compile import launch_constants
from attnres_aot.spec.arch import parse_arch
from attnres_aot.spec.params import KERNEL_PARAMS
from attnres_aot.spec.variants import choices_for, parse_image


def is_of_this_release(manifest: Manifest) -> bool:
    """Tells whether the bundle was built from the same kernel and compiler sources as this package's."""
    return manifest.sources_sha256 == combined_digest(_own_sources())


@functools.cache
def _own_sources() -> dict[str, str]:
    return sources_digests()


def derivation_problems(manifest: Manifest) -> Iterator[str]:
    """Derives launch shapes, parameter lists, choices and build keys again and yields what differs from the manifest's.

    Only meaningful where `is_of_this_release`, for a manifest in which `manifest_problems` finds nothing.
    """
    for kernel, params in KERNEL_PARAMS.items():
        if manifest.abis.get(kernel, params) != params:
            yield f"abis.{kernel}: not the parameter list of the sources that the manifest names"
    for variant in manifest.variants:
        yield from _choice_problems(variant, manifest.model.hidden)
    toolchain = {name: version for name, version in manifest.toolchain.items() if name != PACKAGE_COMPONENT}
    facts = BuildFacts(
        toolchain=toolchain,
        flavour=manifest.flavour,
        package_version=manifest.toolchain.get(PACKAGE_COMPONENT, ""),
        sources=_own_sources(),
    )
    for image in manifest.images:
        spec = parse_image(image.name)
        launch = launch_constants(spec)
        for constant, field in LAUNCH_FIELDS.items():
            found = getattr(image, field)
            if found != launch[constant]:
                yield f"image {image.name!r}: {field} is {found}, its sources say {launch[constant]}"
        if image.budget != budget_for(launch):
            yield f"image {image.name!r}: budget is not what its sources allow"
        if image.build_key != build_key(spec, launch, parse_arch(manifest.arch.requested), facts):
            yield f"image {image.name!r}: build_key is not that of its spec, arch, launch shape, sources and toolchain"


def underivable(manifest: Manifest) -> Iterator[str]:
    """Yields what cannot be checked of a bundle that was built from other sources, one line each."""
    yield (
        "built from other kernel sources than this release's, so not derived again: build keys, dynamic shared memory, "
        "and up to how many rows each image of a variant is used"
    )
    for kernel, params in manifest.abis.items():
        if params != KERNEL_PARAMS.get(kernel):
            yield (
                f"abis.{kernel}: not the parameters that this release fills, so which argument is which was not "
                "checked, and this release's loader refuses the bundle"
            )


def _choice_problems(record: VariantRecord, hidden: int) -> Iterator[str]:
    wanted = choices_for(variant_of(record), hidden)
    expected = tuple(Choice(image=str(choice.spec), max_rows=choice.max_rows) for choice in wanted)
    if record.choices != expected:
        yield (
            f"variant {record.name!r:.80}: its images are {_images(record.choices)}; "
            f"its code would be {_images(expected)}"
        )


def _images(choices: Iterable[Choice]) -> str:
    return ", ".join(
        repr(choice.image) + (" for all rows" if choice.max_rows is None else f" up to {choice.max_rows} rows")
        for choice in choices
    )

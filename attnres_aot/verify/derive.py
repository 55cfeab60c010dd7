"""The manifest that a bundle would have: assembled again from its configuration, its selection and its binaries.

Of a bundle that was built from this package's own sources all of it is derived. Of any other, what follows from
those sources is taken from the bundle's own manifest (`FROM_SOURCES` says what that is), and the rest is derived.
"""

from __future__ import annotations

from dataclasses import replace

from attnres_aot.builder.assemble import assemble, prove_record
from attnres_aot.builder.keys import PACKAGE_COMPONENT, BuildFacts, WantedImage, wanted_images
from attnres_aot.builder.sources import combined_digest, own_sources
from attnres_aot.bundle.manifest import MANIFEST_NAME, Choice, ImageRecord, Manifest
from attnres_aot.config.schema import config_from
from attnres_aot.plan.plan import Plan, Selection, plan
from attnres_aot.spec.arch import BUILDABLE, parse_arch
from attnres_aot.spec.params import KERNEL_PARAMS
from attnres_aot.spec.toolkits import FLAVOURS
from attnres_aot.spec.variants import SpecChoice, parse_image

FROM_SOURCES = (
    "built from other sources than this release's, so not derived again: build keys, budgets, launch shapes "
    "beyond what image names say, and up to how many rows each image of a variant is used"
)
"""What is not checked of a bundle of another release."""


class Derivation:
    """Derives the manifest of one bundle again.

    Args:
      manifest: what the bundle says, in which `manifest_problems` finds nothing.

    Raises:
      ConfigError: the configuration that it names is none.
      UsageError: the selection that it names selects nothing.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.own = is_of_this_release(manifest)
        """Whether the bundle was built from this package's own sources."""
        config = config_from(manifest.config, f"{MANIFEST_NAME}: config")
        selected = manifest.selection
        selection = Selection(tp=selected.tp, dcp=selected.dcp, only=selected.only)
        self._plan = plan(config, parse_arch(manifest.arch.requested), selection=selection)
        if not self.own:
            self._plan = _with_choices_of(manifest, self._plan)
        self._facts = BuildFacts(
            toolchain={name: version for name, version in manifest.toolchain.items() if name != PACKAGE_COMPONENT},
            flavour=manifest.flavour,
            package_version=manifest.toolchain.get(PACKAGE_COMPONENT, ""),
            sources=own_sources() or {},
        )
        wanted = wanted_images(self._plan, self._facts) if self.own else map(self._as_recorded, manifest.images)
        self._wanted = {image.name: image for image in wanted}

    def prove(self, image: ImageRecord, cubin: bytes) -> ImageRecord:
        """Returns what the manifest should say of an image whose code is `cubin`.

        Raises:
          CompileError: the code is not that of the image; says what was asked and what was found.
        """
        wanted = self._wanted.get(image.name) or self._as_recorded(image)
        return prove_record(wanted, cubin, self._plan.arch, self._facts.flavour)

    def assemble(self, records: dict[str, ImageRecord]) -> Manifest:
        """Returns the manifest of a bundle with these images, by name; those that are not needed are left out."""
        images = [records[name] for name in map(str, self._plan.images) if name in records]
        known = self.manifest.flavour in FLAVOURS and self._plan.arch in BUILDABLE
        oldest = None if known else self.manifest.oldest_driver
        if self.own:
            return assemble(self._plan, self._facts, images, oldest=oldest)
        abis = {**KERNEL_PARAMS, **self.manifest.abis}
        made = assemble(self._plan, self._facts, images, abis=abis, oldest=oldest)
        return replace(made, sources_sha256=self.manifest.sources_sha256)

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of images that the bundle needs and does not list."""
        listed = {image.name for image in self.manifest.images}
        return tuple(name for name in map(str, self._plan.images) if name not in listed)

    def _as_recorded(self, image: ImageRecord) -> WantedImage:
        return WantedImage(
            spec=parse_image(image.name),
            launch={
                "cluster": image.cluster,
                "threads": image.block_threads,
                "rows_per_cluster": image.rows_per_cluster,
                "smem_dynamic_bytes": image.smem_dynamic_bytes,
                "pdl": image.pdl,
            },
            params=self.manifest.abis[image.abi],
            budget=image.budget,
            key=image.build_key,
        )


def is_of_this_release(manifest: Manifest) -> bool:
    """Tells whether the bundle was built from the same sources as this package's, as far as they decide it."""
    sources = own_sources()
    return sources is not None and manifest.sources_sha256 == combined_digest(sources)


def _with_choices_of(manifest: Manifest, plan: Plan) -> Plan:
    """Returns the plan with the images that the manifest gives its variants, in the manifest's order of images."""
    chosen = {variant.name: variant.choices for variant in manifest.variants}
    variants = tuple(
        replace(planned, choices=_specs(chosen[str(planned.variant)])) if str(planned.variant) in chosen else planned
        for planned in plan.variants
    )
    used = {str(choice.spec) for planned in variants for choice in planned.choices}
    used |= {str(planned.spec) for planned in plan.producers}
    order = {image.name: None for image in manifest.images if image.name in used}
    order |= dict.fromkeys(sorted(used - order.keys()))
    return replace(plan, variants=variants, images=tuple(map(parse_image, order)))


def _specs(choices: tuple[Choice, ...]) -> tuple[SpecChoice, ...]:
    return tuple(
        SpecChoice(spec=parse_image(choice.image), max_rows=choice.max_rows)  # type: ignore[arg-type] # a consumer's
        for choice in choices
    )

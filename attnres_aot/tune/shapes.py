"""Launch shapes: times every image that a bundle offers for a variant, and says which is best at which row count."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from attnres_aot.bench.rig import Job, Rig
from attnres_aot.bundle.manifest import Choice
from attnres_aot.runtime.find.loaded import LoadedBundle
from attnres_aot.spec.variants import Variant, parse_variant


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeTimes:
    """Times of one variant with one image."""

    variant: str
    """Variant name."""
    image: str
    """Image name."""
    us: dict[int, float]
    """Rows -> microseconds per launch."""


def variants_with_choice(loaded: LoadedBundle) -> list[Variant]:
    """Returns variants that the bundle has several images for: one, the plainest, for each set of images."""
    plainest: dict[tuple[str, ...], Variant] = {}
    for record in loaded.bundle.manifest.variants:
        images = tuple(dict.fromkeys(choice.image for choice in record.choices))
        variant = parse_variant(record.name)
        best = plainest.get(images)
        if len(images) > 1 and (best is None or _options(variant) < _options(best)):
            plainest[images] = variant
    return list(plainest.values())


def _options(variant: Variant) -> int:
    return (variant.key.write is not None) + variant.aux


def with_one_image(loaded: LoadedBundle, variant: Variant, image: str) -> LoadedBundle:
    """Returns the bundle as if `image` were the only one for `variant`."""
    manifest = loaded.bundle.manifest
    only = (Choice(image=image, max_rows=None),)
    variants = tuple(
        dataclasses.replace(record, choices=only) if record.name == str(variant) else record
        for record in manifest.variants
    )
    changed = dataclasses.replace(manifest, variants=variants)
    return LoadedBundle(dataclasses.replace(loaded.bundle, manifest=changed), loaded.device)


def time_shapes(rig: Rig, variant: Variant, rows: Sequence[int], *, pdl: bool) -> list[ShapeTimes]:
    """Times every image of a variant; with a mailbox, the copy into it is in all of the times alike."""
    images = dict.fromkeys(choice.image for choice in rig.loaded.record(variant).choices)
    times = []
    for image in images:
        forced = Rig(with_one_image(rig.loaded, variant, image), rig.timer, rig.l2_bytes)
        us = {count: forced.time_us(Job(variant=variant, rows=count, pdl=pdl)) for count in rows}
        times.append(ShapeTimes(variant=str(variant), image=image, us=us))
    return times


def best_choices(times: Sequence[ShapeTimes]) -> tuple[Choice, ...]:
    """Returns the choices that these times of one variant make best: an image per span of row counts.

    A span ends at its largest measured row count; the last has no end.
    """
    rows = sorted(times[0].us)
    best = [min(times, key=lambda shape: shape.us[count]).image for count in rows]
    choices = []
    for index, (count, image) in enumerate(zip(rows, best, strict=True)):
        if index + 1 == len(rows):
            choices.append(Choice(image=image, max_rows=None))
        elif best[index + 1] != image:
            choices.append(Choice(image=image, max_rows=count))
    return tuple(choices)

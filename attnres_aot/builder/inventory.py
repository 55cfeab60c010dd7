"""What is there already: the existing bundle and the store, and which wanted images they can supply."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from attnres_aot.builder.image import FinishedImage
from attnres_aot.builder.keys import PACKAGE_COMPONENT, BuildFacts, WantedImage
from attnres_aot.builder.store import ImageStore
from attnres_aot.bundle.manifest import ImageRecord, Manifest
from attnres_aot.bundle.reader import Bundle, read_bundle, read_image
from attnres_aot.bundle.writer import work_folder
from attnres_aot.errors import BundleError


class Source(enum.Enum):
    """Where an image comes from."""

    BUNDLE = "the existing bundle"
    STORE = "an interrupted build"
    COMPILER = "the compiler"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """How one wanted image is come by."""

    wanted: WantedImage
    """Which image."""
    source: Source
    """Where it comes from."""
    reason: str
    """Why from there."""
    image: FinishedImage | None = None
    """The image, unless it has to be compiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What is there already."""

    bundle: Bundle | None
    """The existing bundle, if it can be read."""
    trouble: str
    """Why there is no existing bundle to use; empty when there is one."""
    store: ImageStore
    """Images of interrupted builds."""


def take_stock(path: Path) -> Inventory:
    """Looks at the bundle at `path` and the store beside it; changes nothing."""
    store = ImageStore(folder=work_folder(path) / "store")
    if not path.exists():
        return Inventory(bundle=None, trouble="there is no bundle yet", store=store)
    try:
        return Inventory(bundle=read_bundle(path), trouble="", store=store)
    except BundleError as error:
        return Inventory(bundle=None, trouble=f"the existing bundle cannot be used: {error}", store=store)


def steps(wanted: tuple[WantedImage, ...], inventory: Inventory, facts: BuildFacts, *, force: bool) -> tuple[Step, ...]:
    """Decides for each wanted image whether it is reused or compiled, in the order of `wanted`."""
    if force:
        return tuple(Step(wanted=image, source=Source.COMPILER, reason="forced") for image in wanted)
    bundle = inventory.bundle
    records = {} if bundle is None else {record.name: record for record in bundle.manifest.images}
    return tuple(_step(image, records.get(image.name), inventory, facts) for image in wanted)


def _step(wanted: WantedImage, record: ImageRecord | None, inventory: Inventory, facts: BuildFacts) -> Step:
    bundle = inventory.bundle
    if bundle is None:
        reason = inventory.trouble
    elif record is None:
        reason = "not in the existing bundle"
    elif record.build_key != wanted.key:
        reason = _what_changed(bundle.manifest, facts)
    else:
        try:
            image = FinishedImage(key=record.build_key, cubin=read_image(bundle, record))
        except BundleError as error:
            reason = str(error)
        else:
            return Step(wanted=wanted, source=Source.BUNDLE, reason="unchanged", image=image)
    stored = inventory.store.get(wanted.key)
    if stored is not None:
        return Step(wanted=wanted, source=Source.STORE, reason="compiled by an interrupted build", image=stored)
    return Step(wanted=wanted, source=Source.COMPILER, reason=reason)


def _what_changed(manifest: Manifest, facts: BuildFacts) -> str:
    before = {name: version for name, version in manifest.toolchain.items() if name != PACKAGE_COMPONENT}
    changes = [
        f"{name} {before.get(name, 'absent')} -> {facts.toolchain.get(name, 'absent')}"
        for name in sorted(before.keys() | facts.toolchain.keys())
        if before.get(name) != facts.toolchain.get(name)
    ]
    if manifest.flavour != facts.flavour:
        changes.append(f"flavour {manifest.flavour} -> {facts.flavour}")
    if manifest.sources_sha256 != facts.sources_sha256:
        changes.append("the kernel or compiler sources changed")
    return ", ".join(changes) or "its launch constants changed"

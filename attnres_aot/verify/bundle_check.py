"""Verifying a bundle: everything that its manifest promises, against the folder, the files and the binaries."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from attnres_aot.binary.cubin import CubinFacts, read_cubin
from attnres_aot.binary.kernel_facts import KernelFacts
from attnres_aot.binary.prove import convergence_problems, flavour_problems, launch_problems
from attnres_aot.bundle.audit import audit_problems
from attnres_aot.bundle.folder import Folder, read_at_once
from attnres_aot.bundle.manifest import (
    MANIFEST_NAME,
    ImageRecord,
    Manifest,
    decode_manifest,
    digest_problem,
    dump_manifest,
    parse_manifest,
)
from attnres_aot.bundle.manifest_check import MAX_PROBLEMS, manifest_problems
from attnres_aot.bundle.reader import image_bytes, manifest_bytes
from attnres_aot.errors import BundleError, clip
from attnres_aot.verify.manifest_audit import derivation_problems, is_of_this_release, underivable

_SHOWN_CHARS = 500  # of one problem


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What the verification of one bundle found."""

    path: Path
    """The bundle folder, as given."""
    problems: tuple[str, ...]
    """One line per broken promise, at most some hundred; empty when the bundle is as it says."""
    notes: tuple[str, ...]
    """What could not be checked, and why."""
    manifest: Manifest | None
    """The manifest, if it could be read."""

    @property
    def ok(self) -> bool:
        """The bundle keeps every promise that could be checked."""
        return not self.problems


def verify_bundle(path: str | os.PathLike[str]) -> VerifyReport:
    """Checks everything that a bundle promises; needs no compiler, torch or GPU, and raises nothing.

    All of it is checked as it is at one moment, though a build may replace the bundle meanwhile.

    Args:
      path: The bundle folder.

    Returns:
      The problems found: in the manifest, in the folder, and image by image.
    """
    folder = Path(path)
    try:
        return read_at_once(folder, _verify, lambda report: report.ok)
    except BundleError as error:
        return VerifyReport(path=folder, problems=(str(error),), notes=(), manifest=None)


def _verify(folder: Folder) -> VerifyReport:
    data = manifest_bytes(folder)
    manifest = decode_manifest(parse_manifest(data, MANIFEST_NAME), MANIFEST_NAME)
    own = is_of_this_release(manifest)
    notes = () if own else tuple(clip(note, _SHOWN_CHARS) for note in islice(underivable(manifest), MAX_PROBLEMS))
    found = list(islice(_problems(folder, data, manifest, derive=own), MAX_PROBLEMS + 1))
    shown = [clip(problem, _SHOWN_CHARS) for problem in found[:MAX_PROBLEMS]]
    if len(found) > MAX_PROBLEMS:
        shown.append("and more")
    return VerifyReport(path=folder.path, problems=tuple(shown), notes=notes, manifest=manifest)


def _problems(folder: Folder, data: bytes, manifest: Manifest, *, derive: bool) -> Iterator[str]:
    unusable = manifest_problems(manifest)
    if (problem := digest_problem(data)) is not None:
        yield f"{MANIFEST_NAME}: changed after the build: {problem}"
    elif data != dump_manifest(manifest):
        yield f"{MANIFEST_NAME}: not in canonical form; it was edited after the build"
    yield from unusable
    if not unusable:  # Past this point names are safe and references resolve.
        yield from audit_problems(manifest)
        if derive:
            yield from derivation_problems(manifest)
    yield from _folder_problems(folder, manifest.images)
    for image in manifest.images:
        for problem in _image_problems(folder, image, manifest):
            yield f"image {image.name!r:.140}: {problem}"


def _folder_problems(folder: Folder, images: Iterable[ImageRecord]) -> Iterator[str]:
    expected = {MANIFEST_NAME, *(image.file for image in images)}
    try:
        names = folder.names()
    except BundleError as error:
        yield str(error)
        return
    yield from (f"file {name!r:.140} is not in the manifest" for name in names if name not in expected)


def _image_problems(folder: Folder, image: ImageRecord, manifest: Manifest) -> Iterator[str]:
    try:
        facts = read_cubin(image_bytes(folder, image))
    except BundleError as error:
        yield str(error)
        return
    if str(facts.arch) != manifest.arch.proven:
        yield f"the binary is for {facts.arch}, the manifest says {manifest.arch.proven!r:.40}"
    yield from flavour_problems(facts, manifest.flavour)
    kernel = _only_kernel(facts)
    if kernel is None or kernel.symbol != image.symbol:
        found = ", ".join(kernel.symbol for kernel in facts.kernels) or "none"
        yield f"symbol: the manifest says {image.symbol!r:.150}, the binary has {found:.250}"
    if kernel is not None:
        yield from _kernel_problems(kernel, image, manifest)


def _only_kernel(facts: CubinFacts) -> KernelFacts | None:
    return facts.kernels[0] if len(facts.kernels) == 1 else None


def _kernel_problems(kernel: KernelFacts, image: ImageRecord, manifest: Manifest) -> Iterator[str]:
    params = manifest.abis.get(image.abi)
    if params is not None:
        yield from launch_problems(kernel, params=params, block_threads=image.block_threads)
    for field, promised, found in (
        ("registers", image.registers, kernel.registers),
        ("stack_bytes", image.stack_bytes, kernel.stack_bytes),
        ("spill_bytes", image.spill_bytes, kernel.spill_bytes),
        ("smem_static_bytes", image.smem_static_bytes, kernel.smem_static_bytes),
        ("critical_instructions", image.critical_instructions, kernel.critical_instructions),
        ("pdl", image.pdl, kernel.pdl),
    ):
        if promised != found:
            yield f"{field}: the manifest says {promised}, the binary {found}"
    yield from convergence_problems(kernel)
    if image.smem_dynamic_bytes and not kernel.uses_smem:
        yield f"smem_dynamic_bytes: the manifest says {image.smem_dynamic_bytes}, the binary uses no shared memory"

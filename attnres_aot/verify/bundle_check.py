"""Verifying a bundle: everything that its manifest promises, against the folder, the files and the binaries."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from attnres_aot.binary.cubin import CubinFacts, read_cubin
from attnres_aot.binary.kernel_facts import KernelFacts
from attnres_aot.binary.prove import convergence_problems, launch_problems
from attnres_aot.bundle.manifest_check import manifest_problems
from attnres_aot.bundle.reader import Bundle, read_image, read_manifest_bytes
from attnres_aot.errors import BundleError
from attnres_aot.manifest import MANIFEST_NAME, ImageRecord, Manifest, dump_manifest, load_manifest
from attnres_aot.verify.manifest_audit import audit_problems, derivation_problems, is_of_this_release


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What the verification of one bundle found."""

    path: Path
    """The bundle folder, as given."""
    problems: tuple[str, ...]
    """One line per broken promise; empty when the bundle is as it says."""
    notes: tuple[str, ...]
    """What could not be checked, and why."""
    manifest: Manifest | None
    """The manifest, if it could be read."""

    @property
    def ok(self) -> bool:
        """The bundle keeps every promise."""
        return not self.problems


def verify_bundle(path: str | os.PathLike[str]) -> VerifyReport:
    """Checks everything that a bundle promises; needs no compiler, torch or GPU, and raises nothing.

    Args:
      path: The bundle folder.

    Returns:
      Every problem found: in the manifest, in the folder, and image by image.
    """
    folder = Path(path)
    try:
        data = read_manifest_bytes(folder)
        manifest = load_manifest(data, MANIFEST_NAME)
    except BundleError as error:
        return VerifyReport(path=folder, problems=(str(error),), notes=(), manifest=None)
    problems = manifest_problems(manifest)
    notes = []
    if not problems:  # Past this point names are safe and references resolve.
        problems += audit_problems(manifest)
        if is_of_this_release(manifest):
            problems += derivation_problems(manifest)
        else:
            notes.append(
                "built from other kernel sources than this release: launch shapes and build keys were not derived again"
            )
    if data != dump_manifest(manifest):
        problems.append(f"{MANIFEST_NAME}: not in canonical form; it was edited after the build")
    problems += _folder_problems(folder, manifest)
    bundle = Bundle(path=folder, manifest=manifest)
    for image in manifest.images:
        problems += (f"image {image.name!r:.140}: {problem}" for problem in _image_problems(bundle, image))
    return VerifyReport(path=folder, problems=tuple(problems), notes=tuple(notes), manifest=manifest)


def _folder_problems(folder: Path, manifest: Manifest) -> Iterator[str]:
    expected = {MANIFEST_NAME, *(image.file for image in manifest.images)}
    try:
        names = sorted(entry.name for entry in os.scandir(folder))
    except OSError as error:
        yield f"{folder}: cannot be listed: {error.strerror or error}"
        return
    yield from (f"file {name!r:.140} is not in the manifest" for name in names if name not in expected)


def _image_problems(bundle: Bundle, image: ImageRecord) -> Iterator[str]:
    try:
        facts = read_cubin(read_image(bundle, image))
    except BundleError as error:
        yield str(error)
        return
    if str(facts.arch) != bundle.manifest.arch.proven:
        yield f"the binary is for {facts.arch}, the manifest says {bundle.manifest.arch.proven!r}"
    kernel = _only_kernel(facts)
    if kernel is None or kernel.symbol != image.symbol:
        found = ", ".join(kernel.symbol for kernel in facts.kernels) or "none"
        yield f"symbol: the manifest says {image.symbol!r:.300}, the binary has {found:.600}"
    if kernel is not None:
        yield from _kernel_problems(kernel, image, bundle.manifest)


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

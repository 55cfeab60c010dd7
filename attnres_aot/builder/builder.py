"""Building one bundle: taking stock, compiling what is missing, proving everything, replacing the bundle.

An image is proven as soon as it is compiled and stored as soon as it is proven, so a build that is interrupted or
fails loses at most the images in work. The bundle itself changes in one step at the end, or not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import resource
import time
from dataclasses import dataclass, replace
from pathlib import Path

from attnres_aot.builder.assemble import assemble, prove_record
from attnres_aot.builder.image import FinishedImage
from attnres_aot.builder.inventory import Inventory, Source, Step, steps, take_stock
from attnres_aot.builder.keys import BuildFacts, WantedImage, wanted_images
from attnres_aot.builder.pool import Job, JobFailure, Pool, PoolSettings, Target
from attnres_aot.builder.progress import Progress
from attnres_aot.builder.report import BuildReport
from attnres_aot.builder.scratch import scratch_folder
from attnres_aot.bundle.manifest import MANIFEST_NAME, ImageRecord, Manifest, dump_manifest
from attnres_aot.bundle.reader import read_manifest_bytes
from attnres_aot.bundle.writer import check_replaceable, has_leftovers, hold_target, work_folder, write_bundle
from attnres_aot.errors import BundleError, CompileError
from attnres_aot.launcher.libraries import find_libraries, make_libraries
from attnres_aot.plan.plan import Plan

_SHOWN_NAMES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """What to build and how."""

    plan: Plan
    """What the bundle is to hold."""
    out: Path
    """Folder that holds the bundle."""
    pool: PoolSettings
    """How to compile."""
    force: bool = False
    """Compile everything again, and replace a bundle though something that it holds is lost."""
    keep_going: bool = False
    """After a failure, go on with the other images."""
    hosts: tuple[str, ...] = ()
    """Names of hosts for which a shared object is made, too."""

    @property
    def path(self) -> Path:
        """The bundle folder."""
        return self.out / self.plan.bundle_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """What a build would do."""

    steps: tuple[Step, ...]
    """How each image would be come by."""
    unchanged: bool
    """The bundle is there already, to the last bit."""


def preview(request: BuildRequest, facts: BuildFacts) -> Preview:
    """Finds out what building would do; changes nothing.

    Raises:
      BundleError: the build would be refused.
    """
    try:
        check_replaceable(request.path, force=request.force)
        inventory = take_stock(request.path)
        _refuse_to_lose_variants(request, inventory)
        decided = steps(wanted_images(request.plan, facts), inventory, facts, force=request.force)
        return Preview(steps=decided, unchanged=_is_unchanged(request, facts, inventory, decided))
    except OSError as error:
        raise _impossible(request, error) from error


def build(request: BuildRequest, facts: BuildFacts, progress: Progress) -> BuildReport:
    """Builds the bundle, or finds that there is nothing to do.

    Returns:
      What was done. When images failed, the report lists them and the bundle is as it was before.

    Raises:
      BundleError: another build of the same bundle is running, or the target must not or cannot be replaced.
      CompileError: the compiler cannot be started at all.
    """
    start = time.perf_counter()
    try:
        seen = preview(request, facts)
        if seen.unchanged:
            _remove_leftovers(request.path)
            return _unchanged_report(request, seen.steps, start)
        return _build_alone(request, facts, progress, start)
    except OSError as error:
        raise _impossible(request, error) from error


def _impossible(request: BuildRequest, error: OSError) -> BundleError:
    """Returns the error for a system that refuses what building needs."""
    where = f"{error.filename}: " if error.filename and str(error.filename) != str(request.path) else ""
    return BundleError(
        f"cannot build {str(request.path)!r}: {where}{error.strerror or error}; make room or choose another folder "
        "with --out, then run the same command again: finished images are kept"
    )


def refused_report(request: BuildRequest, reason: str) -> BuildReport:
    """Returns the report of a build that was refused."""
    return BuildReport(
        path=str(request.path),
        arch=str(request.plan.arch),
        status="refused",
        variants=len(request.plan.variants),
        producers=len(request.plan.producers),
        images=len(request.plan.images),
        reason=reason,
    )


def _remove_leftovers(path: Path) -> None:
    """Removes what killed builds left beside a bundle that is as it should be; fails nothing."""
    if has_leftovers(path):
        with contextlib.suppress(BundleError, OSError), hold_target(path):
            take_stock(path).store.clear()
            work_folder(path).rmdir()


def _build_alone(request: BuildRequest, facts: BuildFacts, progress: Progress, start: float) -> BuildReport:
    """Builds as the only builder of the target."""
    with hold_target(request.path, force=request.force) as target, scratch_folder(request.path) as scratch:
        seen = preview(request, facts)
        if seen.unchanged:
            take_stock(request.path).store.clear()
            return _unchanged_report(request, seen.steps, start)
        run = _Run(request, facts, seen.steps, progress)
        try:
            missing = sum(step.image is None for step in seen.steps)
            progress.begin(request.plan.bundle_name, missing, len(seen.steps) - missing)
            run.prove_reused()
            run.compile_missing(scratch)
        finally:
            progress.end()
        size = 0
        if not run.failures:
            manifest = assemble(request.plan, facts, run.records())
            files = {record.file: run.images[record.name].cubin for record in manifest.images}
            libraries = make_libraries([(manifest, files)], request.hosts)
            manifest = replace(manifest, libraries=tuple(library.record for library in libraries))
            files |= {library.record.file: library.data for library in libraries}
            run.warnings = write_bundle(target, manifest, files)
            run.store.clear()
            size = _size_bytes(manifest)
    return run.report(time.perf_counter() - start, size)


class _Run:
    """The images of one build as they become finished."""

    def __init__(self, request: BuildRequest, facts: BuildFacts, decided: tuple[Step, ...], progress: Progress) -> None:
        self.request, self.facts, self.progress, self.steps = request, facts, progress, decided
        self.wanted: dict[str, WantedImage] = {step.wanted.name: step.wanted for step in decided}
        self.images: dict[str, FinishedImage] = {}
        self.proven: dict[str, ImageRecord] = {}
        self.failures: list[JobFailure] = []
        self.warnings: tuple[str, ...] = ()
        self.store = take_stock(request.path).store
        self.compile_seconds = 0.0
        self.pool_bytes = 0

    def prove_reused(self) -> None:
        """Proves the images that need no compiling."""
        for step in self.steps:
            if step.image is not None and self._may_go_on():
                try:
                    self._accept(step.wanted.name, step.image)
                except CompileError as error:
                    self.failures.append(JobFailure(name=step.wanted.name, reason=str(error)))
                    self.progress.refused(self.failures[-1])

    def compile_missing(self, scratch: Path) -> None:
        """Compiles and proves the other images."""
        request, facts = self.request, self.facts
        jobs = [_job(step.wanted) for step in self.steps if step.image is None]
        if not jobs or not self._may_go_on():
            return
        target = Target(compiler=facts.compiler, arch=request.plan.arch, flavour=facts.flavour)
        pool = Pool(target, scratch, request.pool, self, keep_going=request.keep_going)
        try:
            pool.compile_all(jobs)
        finally:
            self.compile_seconds, self.pool_bytes = pool.compile_seconds, pool.peak_bytes

    def started(self, name: str) -> None:
        """The pool has handed an image to a worker."""
        self.progress.started(name)

    def finished(self, name: str, image: FinishedImage, seconds: float) -> None:
        """The pool has compiled an image: proves and stores it.

        Raises:
          CompileError: the binary is not what was asked for.
        """
        self._accept(name, image)
        self.store.put(image)
        self.progress.finished(name, seconds)

    def failed(self, failure: JobFailure) -> None:
        """An image has failed for good."""
        self.failures.append(failure)
        self.progress.failed(failure)

    def records(self) -> list[ImageRecord]:
        """Returns the proven images in the plan's order."""
        return [self.proven[step.wanted.name] for step in self.steps]

    def report(self, wall_seconds: float, size_bytes: int) -> BuildReport:
        """Returns what was done."""
        own_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        done = [step for step in self.steps if step.wanted.name in self.proven]
        return BuildReport(
            path=str(self.request.path),
            arch=str(self.request.plan.arch),
            status="failed" if self.failures else "built",
            variants=len(self.request.plan.variants),
            producers=len(self.request.plan.producers),
            images=len(self.steps),
            compiled=tuple(step.wanted.name for step in done if step.source is Source.COMPILER),
            reused=tuple(step.wanted.name for step in done if step.source is not Source.COMPILER),
            failures=tuple(sorted(self.failures, key=lambda failure: list(self.wanted).index(failure.name))),
            warnings=self.warnings,
            jobs=self.request.pool.workers,
            wall_seconds=wall_seconds,
            compile_seconds=self.compile_seconds,
            peak_memory_bytes=own_bytes + self.pool_bytes,
            size_bytes=size_bytes,
        )

    def _accept(self, name: str, image: FinishedImage) -> None:
        self.proven[name] = prove_record(self.wanted[name], image.cubin, self.request.plan.arch, self.facts.flavour)
        self.images[name] = image

    def _may_go_on(self) -> bool:
        return self.request.keep_going or not self.failures


def _job(wanted: WantedImage) -> Job:
    return Job(name=wanted.name, kernel=wanted.kernel, key=wanted.key, spec=wanted.spec)


def _is_unchanged(request: BuildRequest, facts: BuildFacts, inventory: Inventory, decided: tuple[Step, ...]) -> bool:
    """Tells whether the existing bundle is byte for byte what a build would write.

    The binaries are proven anew, so that a manifest which says something else than they do is not left as it is.
    """
    if inventory.bundle is None:
        return False
    images = [(step.wanted, step.image) for step in decided if step.source is Source.BUNDLE and step.image is not None]
    if len(images) != len(decided):
        return False
    try:
        records = [prove_record(wanted, image.cubin, request.plan.arch, facts.flavour) for wanted, image in images]
    except CompileError:
        return False
    manifest = assemble(request.plan, facts, records)
    files = {record.file: image.cubin for record, (_, image) in zip(records, images, strict=True)}
    libraries = find_libraries([(manifest, files)], request.hosts, request.path, inventory.bundle.manifest)
    if len(libraries) != len(request.hosts):
        return False
    manifest = replace(manifest, libraries=tuple(library.record for library in libraries))
    names = {MANIFEST_NAME, *(record.file for record in manifest.files)}
    if {entry.name for entry in request.path.iterdir()} != names:
        return False
    return inventory.bundle.manifest_sha256 == hashlib.sha256(dump_manifest(manifest)).hexdigest()


def _refuse_to_lose_variants(request: BuildRequest, inventory: Inventory) -> None:
    """Refuses to replace a bundle by one that holds less, or that is of another model."""
    if request.force or inventory.bundle is None:
        return
    manifest = inventory.bundle.manifest
    lost = []
    if manifest.model.hidden != request.plan.config.model.hidden_size:
        lost.append(f"all code for rows of {manifest.model.hidden} elements")
    variants = {record.name for record in manifest.variants} - {str(item.variant) for item in request.plan.variants}
    producers = {record.name for record in manifest.producers}
    producers -= {str(item.producer) for item in request.plan.producers}
    tables = {(table.tp, table.dcp) for table in manifest.tables} - {item.pair for item in request.plan.deployments}
    for names, noun in ((variants, "variant"), (producers, "producer")):
        if names:
            shown = ", ".join(sorted(names)[:_SHOWN_NAMES]) + (", ..." if len(names) > _SHOWN_NAMES else "")
            lost.append(f"{len(names)} {noun}{'s' * (len(names) != 1)} ({shown})")
    lost += [f"(tp, dcp) {pair}" for pair in sorted(tables)]
    if lost:
        raise BundleError(
            f"this plan would replace {str(request.path)!r} and lose {', '.join(lost)} that it holds; "
            "write elsewhere with --out, or replace it with --force"
        )


def _unchanged_report(request: BuildRequest, decided: tuple[Step, ...], start: float) -> BuildReport:
    names = tuple(step.wanted.name for step in decided)
    size = sum(len(step.image.cubin) for step in decided if step.image) + len(read_manifest_bytes(request.path))
    return BuildReport(
        path=str(request.path),
        arch=str(request.plan.arch),
        status="unchanged",
        variants=len(request.plan.variants),
        producers=len(request.plan.producers),
        images=len(names),
        reused=names,
        wall_seconds=time.perf_counter() - start,
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        size_bytes=size,
    )


def _size_bytes(manifest: Manifest) -> int:
    sizes = [record.size for record in manifest.files]
    return sum(sizes) + len(dump_manifest(manifest))

"""Gathers where bundles may lie: the facts on paths, manifests, environment and entry points that `resolve` judges.

Nothing here decides anything. Places come in order and one at a time, so that a place whose turn never comes costs
nothing: looking at one manifest takes about a millisecond, importing `importlib.metadata` for the entry points tens.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from attnres_aot.bundle.folder import is_being_replaced
from attnres_aot.bundle.manifest import MANIFEST_NAME, check_digest, parse_manifest
from attnres_aot.bundle.names import name_problem
from attnres_aot.bundle.reader import read_manifest_bytes
from attnres_aot.bundle.shared_object import is_library, read_library
from attnres_aot.errors import BundleError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENVIRONMENT_VARIABLE = "ATTNRES_AOT_BUNDLE"
"""Environment variable that names a bundle, or a folder of bundles."""
ENTRY_POINT_GROUP = "attnres_aot.bundles"
"""Entry-point group in which installed packages register bundles (see `docs/finding_bundles.md`)."""
DEFAULT_FOLDER = "artifacts"
"""Folder of bundles in the working directory, searched last."""
LIBRARY_PATTERN = "attnres_*.so"
"""Names of shared objects that are found in a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One folder that may be a bundle, with what a first look at its manifest says."""

    path: str
    """Folder or library, absolute."""
    real_path: str
    """The same with symbolic links resolved."""
    origin: str = ""
    """Which entry point named it; empty for the other places."""
    trouble: str = ""
    """Why the manifest could not be looked at; empty when it could."""
    schema: Any = None
    """The manifest's schema number as found, of whatever type."""
    name: str = ""
    """Configuration name that the manifest gives."""
    arch: str = ""
    """Arch that the binaries name, according to the manifest."""
    oldest_driver: str = ""
    """Oldest CUDA version whose driver can run the binaries, according to the manifest."""
    manifest_sha256: str = ""
    """Digest of the manifest file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One place of the search order and the candidates found there."""

    label: str
    """What the place is called in traces."""
    binding: bool = False
    """The caller asked for this place by name, so no later place is searched."""
    note: str = ""
    """What was found, when that is not just candidates: `not set`, `does not exist`."""
    candidates: tuple[Candidate, ...] = ()
    """Candidates in a fixed order."""


def search_order(path: str | os.PathLike[str] | None = None) -> Iterator[Place]:
    """Yields the places in search order, each gathered when its turn comes; a binding place is the last.

    Args:
      path: a bundle or a folder of bundles that the caller named, or None.
    """
    if path is not None:
        folder = os.fsdecode(path)
        yield place_at(f"path {folder!r}", folder, binding=True)
        return
    yield Place(label="path", note="not given")
    value = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if value:
        yield place_at(f"{ENVIRONMENT_VARIABLE}={value}", value, binding=True)
        return
    yield Place(label=ENVIRONMENT_VARIABLE, note="not set")
    yield installed_place()
    yield place_at(f"./{DEFAULT_FOLDER}", DEFAULT_FOLDER)


def place_at(label: str, path: str, *, binding: bool = False) -> Place:
    """Looks at `path`, a bundle or a folder of bundles, relative to the working directory."""
    if not path:
        return Place(label=label, binding=binding, note="an empty path names no folder")
    try:
        folder = Path(path).absolute()
    except OSError as error:
        return Place(label=label, binding=binding, note=f"the working directory is gone: {error.strerror}")
    note, candidates = _look_at(folder, "")
    return Place(label=label, binding=binding, note=note, candidates=candidates)


def installed_place() -> Place:
    """Looks at the bundles that installed packages register."""
    from attnres_aot.runtime.find.entry_points import registered  # slow to import, and only needed here

    candidates: list[Candidate] = []
    entries, notes = registered(ENTRY_POINT_GROUP)
    for entry in entries:
        origin = f"entry point {entry.name!r}"
        try:
            folder = _entry_point_folder(entry)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a package may raise anything; the trace reports it
            notes.append(f"{origin} ({entry.value}) failed: {type(error).__name__}: {error}")
            continue
        note, found = _look_at(folder, origin)
        candidates += found
        if note:
            notes.append(f"{origin}: {note}")
    return Place(
        label=f"installed packages (entry points {ENTRY_POINT_GROUP!r})",
        note="; ".join(notes if entries else ["none registered", *notes]),
        candidates=tuple(candidates),
    )


def _entry_point_folder(entry: EntryPoint) -> Path:
    target = entry.load()
    if isinstance(target, ModuleType):
        paths = list(getattr(target, "__path__", ()))
        if len(paths) != 1:
            raise TypeError(f"module {target.__name__!r} is not a package with one folder")
        target = paths[0]
    elif callable(target):
        target = target()
    folder = os.fspath(target)
    if not isinstance(folder, str):
        raise TypeError(f"expected a folder as str or PathLike, found {type(folder).__name__}")
    if not Path(folder).is_absolute():
        raise ValueError(f"expected an absolute path, found {folder!r}: it would lead into the working directory")
    return Path(folder)


def _look_at(path: Path, origin: str) -> tuple[str, tuple[Candidate, ...]]:
    """Returns a note and the candidates at an absolute path."""
    if is_library(path) and path.is_file():
        return "", look_at_library(path, origin)
    if _has_manifest(path) or is_being_replaced(path):
        return "", (look_at_bundle(path, origin),)
    try:
        folders = sorted(
            entry for entry in path.iterdir() if not entry.name.startswith((".", "__")) and _is_folder(entry)
        )
    except (OSError, ValueError) as error:
        return _unlisted(path, error), ()
    bundles = tuple(look_at_bundle(folder, origin) for folder in folders if _has_manifest(folder))
    others = len(folders) - len(bundles)
    bundles += tuple(each for file in sorted(path.glob(LIBRARY_PATTERN)) for each in look_at_library(file, origin))
    if not bundles:
        return f"{path} holds no bundle" + (
            f" (none of its {others} folders has a {MANIFEST_NAME})" if others else ""
        ), ()
    return (f"{len(bundles)} of {len(folders)} folders in {path} are bundles" if others else ""), bundles


def _unlisted(path: Path, error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        link = f" (a symbolic link to {str(path.readlink())!r})" if path.is_symlink() else ""
        return f"{path} does not exist{link}"
    if isinstance(error, NotADirectoryError):
        return f"{path} is a file; give the bundle's folder"
    return f"{str(path)!r} cannot be listed: {getattr(error, 'strerror', None) or error}"


def _has_manifest(folder: Path) -> bool:
    return os.path.lexists(folder / MANIFEST_NAME)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a loop of links, before Python 3.13
        return False


def look_at_bundle(path: Path, origin: str = "") -> Candidate:
    """Takes the first look at one bundle: schema, name and arch of its manifest, nothing else checked.

    Args:
      path: folder of the bundle, absolute.
      origin: which entry point named it.
    """
    real_path = os.path.realpath(path)
    try:
        data = read_manifest_bytes(path)
        raw = parse_manifest(data, MANIFEST_NAME)
        check_digest(data, MANIFEST_NAME)
    except BundleError as error:
        return _troubled(path, real_path, origin, str(error))
    name, arch = raw.get("name"), raw.get("arch")
    if isinstance(name, str) and (problem := name_problem(name)) is not None:
        return _troubled(path, real_path, origin, f"{MANIFEST_NAME}: name: {problem}")
    proven = arch.get("proven") if isinstance(arch, dict) else None
    return Candidate(
        path=str(path),
        real_path=real_path,
        origin=origin,
        schema=raw["schema"],
        name=_text(name),
        arch=_text(proven),
        oldest_driver=_text(raw.get("oldest_driver")),
        manifest_sha256=hashlib.sha256(data).hexdigest(),
    )


def look_at_library(path: Path, origin: str = "") -> tuple[Candidate, ...]:
    """Looks at the bundles inside a shared object; all that it embeds is read and checked.

    Args:
      path: the library, absolute.
      origin: which entry point named it.
    """
    real_path = os.path.realpath(path)
    try:
        inside = read_library(path)
    except BundleError as error:
        return (_troubled(path, real_path, origin, str(error)),)
    return tuple(
        Candidate(
            path=str(path),
            real_path=real_path,
            origin=origin,
            schema=bundle.manifest.schema,
            name=bundle.manifest.name,
            arch=bundle.manifest.arch.proven,
            oldest_driver=bundle.manifest.oldest_driver,
            manifest_sha256=bundle.manifest_sha256,
        )
        for bundle in inside
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _troubled(path: Path, real_path: str, origin: str, trouble: str) -> Candidate:
    return Candidate(path=str(path), real_path=real_path, origin=origin, trouble=trouble)

"""Making the libraries of a bundle: what they embed, whether those that are there will do, and the proof of each."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from attnres_aot.bundle.manifest import LibraryRecord, Manifest, canonical_json
from attnres_aot.bundle.shared_object import payload_of, read_file
from attnres_aot.config.advice import build_changed
from attnres_aot.errors import BundleError, CompileError
from attnres_aot.launcher import compile as compile_module
from attnres_aot.launcher.compile import LauncherObjects, library_name
from attnres_aot.launcher.compilers import HOSTS, Compiler, find_compiler, find_headers
from attnres_aot.launcher.elf import facts_problems, glibc_text, read_facts
from attnres_aot.launcher.payload import pack_payload

Contents = Sequence[tuple[Manifest, Mapping[str, bytes]]]
"""What a library embeds: manifests, each with its image files by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A library that has been made, or found, and proven."""

    record: LibraryRecord
    """What a manifest says of it."""
    data: bytes
    """The file."""


def payload_for(contents: Contents) -> bytes:
    """Returns what a library of these bundles embeds: their manifests without libraries, and all images."""
    bare = [(replace(manifest, libraries=()), files) for manifest, files in contents]
    advice = {
        manifest.arch.proven: "\n".join(build_changed(manifest.arch.requested, manifest.name)) for manifest, _ in bare
    }
    return pack_payload(bare, advice)


def file_name(contents: Contents, host: str) -> str:
    """Returns the name of the file that a library of these bundles has."""
    archs = "_".join(manifest.arch.requested for manifest, _ in contents)
    return library_name(f"{contents[0][0].name}_{archs}", host)


def find_libraries(contents: Contents, hosts: Sequence[str], folder: Path, known: Manifest | None) -> list[Library]:
    """Returns the libraries that are there already, byte for byte what would be made; fewer than `hosts` if some lack.

    Args:
      contents: what they embed.
      hosts: names of hosts.
      folder: where the files lie.
      known: the manifest that lists them.

    Raises:
      CompileError: there is no compiler for a host.
    """
    records = {record.file: record for record in (known.libraries if known is not None else ())}
    found: list[Library] = []
    if not hosts or not records:
        return found
    payload = payload_for(contents)
    for host in hosts:
        record = records.get(file_name(contents, host))
        if record is None or record.build_key != _build_key(record.file, payload, find_compiler(HOSTS[host])):
            continue
        with contextlib.suppress(BundleError, CompileError):
            data = read_file(folder / record.file)
            library = _prove(record.file, data, payload, host, (record.compiler, record.build_key))
            if library.record == record:
                found.append(library)
    return found


def make_libraries(contents: Contents, hosts: Sequence[str], found: Sequence[Library] = ()) -> list[Library]:
    """Returns a library of these bundles for each host, ascending by file name; compiles those not in `found`.

    Raises:
      CompileError: there is no compiler for a host, it failed, or what it made is not what a library must be.
    """
    present = {library.record.host: library for library in found}
    compilers = {host: find_compiler(HOSTS[host]) for host in hosts if host not in present}
    payload = payload_for(contents) if compilers else b""

    def make(compiler: Compiler) -> Library:
        name = file_name(contents, compiler.host.name)
        with LauncherObjects(compiler) as objects:
            data = objects.link(name, payload)
        origin = (compiler.version, _build_key(name, payload, compiler))
        return _prove(name, data, payload, compiler.host.name, origin)

    with ThreadPoolExecutor(max_workers=len(HOSTS)) as threads:  # compilers are processes of their own
        made = [*present.values(), *threads.map(make, compilers.values())]
    return sorted(made, key=lambda library: library.record.file)


def _prove(name: str, data: bytes, payload: bytes, host: str, origin: tuple[str, str]) -> Library:
    try:
        facts, embedded = read_facts(data), payload_of(data, name)
    except BundleError as error:
        raise CompileError(f"{name}: {error}") from error
    problems = list(facts_problems(facts, host, name))
    if embedded != payload:
        problems.append("what it embeds is not what was put into it")
    if problems:
        raise CompileError("\n".join(f"{name}: {problem}" for problem in problems))
    record = LibraryRecord(
        file=name,
        sha256=hashlib.sha256(data).hexdigest(),
        size=len(data),
        host=host,
        needed=facts.needed,
        glibc=glibc_text(facts.glibc),
        exports=facts.exports,
        compiler=origin[0],
        build_key=origin[1],
    )
    return Library(record=record, data=data)


def _build_key(name: str, payload: bytes, compiler: Compiler) -> str:
    """Returns the digest of everything that decides a library's bytes."""
    find_headers()
    parts = {
        "name": name,
        "payload": hashlib.sha256(payload).hexdigest(),
        "host": compiler.host.name,
        "compiler": compiler.version,
        "headers": importlib.metadata.version("apache-tvm-ffi"),
        "sources": _sources(),
    }
    return hashlib.sha256(canonical_json(parts).encode("ascii")).hexdigest()


@functools.cache
def _sources() -> str:
    sources = (compile_module.SOURCE, compile_module.EMBED, Path(compile_module.__file__))
    return hashlib.sha256(b"".join(hashlib.sha256(source.read_bytes()).digest() for source in sources)).hexdigest()

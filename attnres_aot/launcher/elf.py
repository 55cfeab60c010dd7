"""What a library says of itself as an ELF file, and whether that is what a host can load anywhere."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import NoteSection, SymbolTableSection

from attnres_aot.bundle.manifest import LibraryRecord
from attnres_aot.errors import BundleError
from attnres_aot.launcher.compile import TVM_FFI_FUNCTIONS
from attnres_aot.launcher.compilers import HOSTS

ALLOWED = frozenset({"libtvm_ffi.so", "libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2"})
"""Libraries that a library may need."""
NEWEST_GLIBC = (2, 28)
"""The newest glibc whose symbols a library may need."""
EXPORT_PREFIX = "__tvm_ffi_"
"""How every exported name begins."""

_ISA_NEEDED, _BASELINE = 0xC0008002, 1  # GNU_PROPERTY_X86_ISA_1_NEEDED, GNU_PROPERTY_X86_ISA_1_BASELINE
_DAMAGE = (ELFError, AssertionError, ArithmeticError, LookupError, MemoryError, OSError, TypeError, ValueError)


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryFacts:
    """What the file says."""

    machine: str
    """Its machine, as pyelftools names it."""
    needed: tuple[str, ...]
    """Libraries that it needs, in order."""
    search_paths: tuple[str, ...]
    """RPATH and RUNPATH."""
    soname: str
    """Its own name."""
    glibc: tuple[int, int]
    """Highest version of a glibc symbol that it takes."""
    exports: tuple[str, ...]
    """Names that it defines for others, ascending."""
    undefined: tuple[str, ...]
    """Names without a version that others must define, ascending; weak ones aside."""
    executable_stack: bool
    """It asks for a stack that can be executed."""
    newer_cpu: bool
    """It asks for a CPU beyond the baseline."""


def read_facts(data: bytes) -> LibraryFacts:
    """Reads what a library says of itself.

    Raises:
      BundleError: it is no shared object, or damaged.
    """
    try:
        return _facts(ELFFile(io.BytesIO(data)))
    except _DAMAGE as error:
        raise BundleError(f"not a shared object that can be read: {error}") from error


def glibc_text(version: tuple[int, int]) -> str:
    """Writes a glibc version as a manifest holds it."""
    return f"{version[0]}.{version[1]}"


def facts_problems(facts: LibraryFacts, host: str, file: str) -> Iterator[str]:
    """Yields what keeps a library from being loaded wherever it should be."""
    if host not in HOSTS or facts.machine != HOSTS[host].machine:
        yield f"it is for {facts.machine}, not for {host!r:.40} hosts"
    if facts.soname != file:
        yield f"it calls itself {facts.soname!r:.140}, not {file!r:.140}"
    if strange := sorted(set(facts.needed) - ALLOWED):
        yield f"it needs {', '.join(strange)}; allowed are {', '.join(sorted(ALLOWED))}"
    if facts.search_paths:
        yield f"it looks for libraries in {', '.join(facts.search_paths)}"
    if facts.glibc > NEWEST_GLIBC:
        yield f"it needs glibc {glibc_text(facts.glibc)}; {glibc_text(NEWEST_GLIBC)} is the newest allowed"
    if foreign := [name for name in facts.exports if not name.startswith(EXPORT_PREFIX)]:
        yield f"it exports {', '.join(foreign[:5])}, which are no functions of the TVM-FFI ABI"
    if unknown := sorted(set(facts.undefined) - set(TVM_FFI_FUNCTIONS)):
        yield f"it takes {', '.join(unknown[:5])} from other libraries than the C library and libtvm_ffi"
    if facts.executable_stack:
        yield "it asks for an executable stack"
    if facts.newer_cpu:
        yield "it needs a newer CPU than the oldest of its kind"


def record_problems(facts: LibraryFacts, record: LibraryRecord) -> Iterator[str]:
    """Yields the differences between a library and its record in a manifest."""
    for field, promised, found in (
        ("needed", record.needed, facts.needed),
        ("glibc", record.glibc, glibc_text(facts.glibc)),
        ("exports", record.exports, facts.exports),
    ):
        if promised != found:
            yield f"{field}: the manifest says {promised}, the library {found}"


def _facts(elf: ELFFile) -> LibraryFacts:
    tags = [
        tag for section in elf.iter_sections() if isinstance(section, DynamicSection) for tag in section.iter_tags()
    ]
    stack = [segment for segment in elf.iter_segments() if segment.header.p_type == "PT_GNU_STACK"]
    exports, undefined = _symbols(elf)
    return LibraryFacts(
        machine=elf.header.e_machine,
        needed=tuple(tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"),
        search_paths=(
            *(tag.rpath for tag in tags if tag.entry.d_tag == "DT_RPATH"),
            *(tag.runpath for tag in tags if tag.entry.d_tag == "DT_RUNPATH"),
        ),
        soname=next((tag.soname for tag in tags if tag.entry.d_tag == "DT_SONAME"), ""),
        glibc=max((_glibc(name) for name in _versions(elf)), default=(0, 0)),
        exports=exports,
        undefined=undefined,
        executable_stack=not stack or bool(stack[0].header.p_flags & 1),
        newer_cpu=any(_asks_for_newer_cpu(each) for each in elf.iter_sections() if isinstance(each, NoteSection)),
    )


def _versions(elf: ELFFile) -> Iterator[str]:
    """Yields the versions of symbols that the library takes, such as `GLIBC_2.14`."""
    for section in elf.iter_sections():
        if isinstance(section, GNUVerNeedSection):
            for _, auxiliaries in section.iter_versions():
                yield from (each.name for each in auxiliaries)


def _symbols(elf: ELFFile) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns what the library defines for others, and what others must define without a version."""
    exports, undefined = set(), set()
    versions, table = elf.get_section_by_name(".gnu.version"), elf.get_section_by_name(".dynsym")
    for number, symbol in enumerate(table.iter_symbols() if isinstance(table, SymbolTableSection) else ()):
        bind = symbol.entry.st_info.bind
        if not symbol.name or bind == "STB_LOCAL":
            continue
        if symbol.entry.st_shndx != "SHN_UNDEF":
            exports.add(symbol.name)
        elif bind != "STB_WEAK" and _unversioned(versions, number):
            undefined.add(symbol.name)
    return tuple(sorted(exports)), tuple(sorted(undefined))


def _unversioned(versions: Any, number: int) -> bool:
    if versions is None:
        return True
    index = versions.get_symbol(number).entry["ndx"]
    return index in ("VER_NDX_LOCAL", "VER_NDX_GLOBAL", 0, 1)


def _glibc(name: str) -> tuple[int, int]:
    """Returns a glibc version as numbers; (0, 0) for a version of something else."""
    family, _, version = name.partition("_")
    numbers = version.split(".")
    return (int(numbers[0]), int(numbers[1])) if family == "GLIBC" and len(numbers) > 1 else (0, 0)


def _asks_for_newer_cpu(section: NoteSection) -> bool:
    if section.name != ".note.gnu.property":
        return False
    for note in section.iter_notes():
        for each in note["n_desc"] if isinstance(note["n_desc"], list) else ():
            if each["pr_type"] == _ISA_NEEDED and int(each["pr_data"]) & ~_BASELINE:
                return True
    return False

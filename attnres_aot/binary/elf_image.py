"""The ELF container of a cubin: opening it with pyelftools, safely for damaged input, into plain values."""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass, field

from elftools.common.exceptions import ELFError
from elftools.common.utils import struct_parse
from elftools.construct import ConstructError, Container
from elftools.elf.elffile import ELFFile

from attnres_aot.errors import BundleError

MAX_SECTIONS = 4096
"""Most sections that a cubin may have; ours have about 25."""

MAX_SYMBOLS = 4096
"""Most symbols that a cubin may have; ours have about 10."""

MAX_NAME_BYTES = 4096
"""Longest section or symbol name; a C++ or DSL symbol has some hundreds of bytes."""

_EI_OSABI = 7
_NOT_IN_FILE = ("SHT_NULL", "SHT_NOBITS")
_STT_FUNC = 2
_SYMBOL = struct.Struct("<IBBHQQ")
# What pyelftools raises on damaged headers, string tables and offsets.
_DAMAGE = (
    ELFError,
    ConstructError,
    AssertionError,
    ArithmeticError,
    LookupError,
    MemoryError,
    OSError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One section."""

    name: str
    """Section name."""
    size: int
    """Bytes that the section has when loaded."""
    data: bytes = field(repr=False)
    """Its bytes; empty for a section that takes no space in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Symbol:
    """One symbol of the symbol table."""

    name: str
    """Symbol name."""
    is_function: bool
    """The symbol names code."""
    other: int
    """The symbol's `st_other` byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElfImage:
    """A CUDA ELF file as plain values."""

    flags: int
    """The header's `e_flags`."""
    os_abi: int
    """The header's OS ABI byte."""
    sections: tuple[Section, ...]
    """Sections in file order."""
    symbols: tuple[Symbol, ...]
    """Symbols in table order, the null symbol included."""

    def find(self, name: str) -> Section | None:
        """Returns the section called `name`, or None."""
        return next((section for section in self.sections if section.name == name), None)


def open_elf(data: bytes) -> ElfImage:
    """Opens a CUDA ELF executable.

    Raises:
      BundleError: `data` is not a complete one.
    """
    try:
        elf = ELFFile(io.BytesIO(data))
        _check_header(elf, len(data))
        sections = _sections(elf, data)
    except _DAMAGE as error:
        raise BundleError(f"not a cubin: {str(error) or type(error).__name__}") from error
    by_name = {section.name: section for section in sections}
    if len(by_name) != len(sections):
        raise BundleError("not a cubin: two sections have the same name")
    if ".symtab" not in by_name or ".strtab" not in by_name:
        raise BundleError("not a cubin: no symbol table")
    return ElfImage(
        flags=int(elf["e_flags"]),
        os_abi=data[_EI_OSABI],
        sections=sections,
        symbols=_symbols(by_name[".symtab"].data, by_name[".strtab"].data),
    )


def _check_header(elf: ELFFile, size: int) -> None:
    if elf["e_machine"] != "EM_CUDA" or elf.elfclass != 64 or not elf.little_endian:
        raise BundleError(f"not a cubin: ELF machine {elf['e_machine']}, expected EM_CUDA, 64 bits, little-endian")
    if elf["e_type"] != "ET_EXEC":
        raise BundleError(f"not a cubin: ELF type {elf['e_type']}, expected ET_EXEC")
    count, entry, offset = elf["e_shnum"], elf["e_shentsize"], elf["e_shoff"]
    if not 0 < count <= MAX_SECTIONS or entry != elf.structs.Elf_Shdr.sizeof() or offset + count * entry > size:
        raise BundleError(f"not a cubin: {count} section headers at byte {offset} do not fit in {size} bytes")


def _sections(elf: ELFFile, data: bytes) -> tuple[Section, ...]:
    stream = io.BytesIO(data)
    headers = [
        struct_parse(elf.structs.Elf_Shdr, stream, elf["e_shoff"] + index * elf["e_shentsize"])
        for index in range(elf["e_shnum"])
    ]
    if sum(header["sh_size"] for header in headers if header["sh_type"] not in _NOT_IN_FILE) > 2 * len(data):
        raise BundleError(f"not a cubin: its sections hold more than a file of {len(data)} bytes can")
    names = _content(headers[elf["e_shstrndx"]], data)
    return tuple(
        Section(name=_name(names, header["sh_name"]), size=header["sh_size"], data=_content(header, data))
        for header in headers
    )


def _content(header: Container, data: bytes) -> bytes:
    if header["sh_type"] in _NOT_IN_FILE:
        return b""
    offset, size = header["sh_offset"], header["sh_size"]
    if offset + size > len(data):
        raise BundleError(f"not a cubin: a section at byte {offset} of {size} bytes does not fit in {len(data)} bytes")
    return data[offset : offset + size]


def _symbols(table: bytes, names: bytes) -> tuple[Symbol, ...]:
    if len(table) % _SYMBOL.size or len(table) > MAX_SYMBOLS * _SYMBOL.size:
        raise BundleError(f"not a cubin: a symbol table of {len(table)} bytes")
    return tuple(
        Symbol(name=_name(names, name), is_function=info & 0xF == _STT_FUNC, other=other)
        for name, info, other, _, _, _ in _SYMBOL.iter_unpack(table)
    )


def _name(table: bytes, offset: int) -> str:
    end = table.find(b"\0", offset, offset + MAX_NAME_BYTES + 1)
    if end < 0 and offset + MAX_NAME_BYTES < len(table):
        raise BundleError(f"not a cubin: a name of more than {MAX_NAME_BYTES} bytes, which is the limit")
    if end < 0:
        raise BundleError("not a cubin: a name lies outside of its string table")
    return table[offset:end].decode("ascii", "backslashreplace")

"""Facts of a cubin, read from the binary itself: its arch, the tool that made it, and its kernels.

A cubin is an ELF64 file. `elf_image` opens the container, `kernel_facts` reads the kernels; this module knows how
the target is written down. The arch number is in `e_flags`: bits 0-7 in the older layout (OS ABI 0x33, where bit 11
marks an `a` target), bits 8-15 in the newer one (OS ABI 0x41). The newer layout's flags do not tell `sm_100` from
`sm_100f`, and those of CUDA 13 compilers do not show `a` either, so there the compiler's own command line in
`.note.nv.tkinfo` decides, and must agree with the flags.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from attnres_aot.binary.elf_image import ElfImage, open_elf
from attnres_aot.binary.kernel_facts import KernelFacts, read_kernels
from attnres_aot.errors import BundleError, UsageError
from attnres_aot.spec.arch import Arch, parse_arch

MAX_CUBIN_BYTES = 1 << 20
"""Largest file that is read as a cubin; ours are tens of kilobytes."""

_OSABI_OLD, _OSABI_NEW = 0x33, 0x41
_NOTE_TKINFO = 2000
_TKINFO_HEAD = struct.Struct("<6I")
_LAST_OLD_LAYOUT = "cu12"
_RELEASE = re.compile(r"\brelease ([1-9][0-9]*)\.[0-9]+")
_ARCH_OPTION = re.compile(r"-(?:arch|-gpu-name)[= ](sm_\w+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class CubinFacts:
    """What a cubin says about itself."""

    arch: Arch
    """The target that the binary names."""
    toolkit: str | None
    """Version line of the tool that made the binary, or None where the layout does not record it."""
    options: str | None
    """Command line of that tool, or None where the layout does not record it."""
    flavour: str | None
    """CUDA major version of that tool, e.g. `cu12`, or None where the note does not tell. Binaries of the older layout
    record none and count as `cu12`: CUDA 12 was the last to write it."""
    kernels: tuple[KernelFacts, ...]
    """Kernels in ascending order of symbol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ToolNote:
    """The part of `.note.nv.tkinfo` that is used."""

    version: str
    """Tool version line."""
    options: str
    """Tool command line."""


def read_cubin(data: bytes) -> CubinFacts:
    """Reads the facts of a cubin.

    Args:
      data: The whole file.

    Raises:
      BundleError: `data` is not a complete cubin of a known layout, or contradicts itself.
    """
    if len(data) > MAX_CUBIN_BYTES:
        raise BundleError(f"not a cubin: {len(data)} bytes; the limit is {MAX_CUBIN_BYTES}")
    elf = open_elf(data)
    note = _tool_note(elf)
    arch = _arch(elf, note)
    return CubinFacts(
        arch=arch,
        toolkit=note.version if note else None,
        options=note.options if note else None,
        flavour=_flavour(elf, note),
        kernels=read_kernels(elf),
    )


def _arch(elf: ElfImage, note: _ToolNote | None) -> Arch:
    flags = elf.flags
    if elf.os_abi == _OSABI_OLD:
        number, flagged = flags & 0xFF, bool(flags & 0x800)
    elif elf.os_abi == _OSABI_NEW:
        number, flagged = flags >> 8 & 0xFF, bool(flags & 0x8)
    else:
        raise BundleError(f"not a cubin of a known layout: OS ABI {elf.os_abi:#x}, known are 0x33 and 0x41")
    if not 10 <= number < 200:
        raise BundleError(f"not a cubin of a known layout: e_flags {flags:#x} name no arch")
    from_flags = Arch(*divmod(number, 10), "a" if flagged else "")
    if note is None:
        if elf.os_abi == _OSABI_NEW:
            raise BundleError(
                f"cubin e_flags {flags:#x} name {from_flags} or a suffixed form of it, and there is no usable "
                ".note.nv.tkinfo section to tell which"
            )
        return from_flags
    from_note = _arch_option(note)
    if from_note.capability != from_flags.capability or (flagged and from_note.suffix != "a"):
        raise BundleError(f"cubin contradicts itself: e_flags name {from_flags}, .note.nv.tkinfo names {from_note}")
    return from_note


def _flavour(elf: ElfImage, note: _ToolNote | None) -> str | None:
    if note is None:
        return _LAST_OLD_LAYOUT if elf.os_abi == _OSABI_OLD else None
    release = _RELEASE.search(note.version)
    return f"cu{release[1]}" if release else None


def _arch_option(note: _ToolNote) -> Arch:
    names = set(_ARCH_OPTION.findall(note.options))
    if len(names) != 1:
        raise BundleError(
            f"cubin's .note.nv.tkinfo names {len(names)} archs, expected one: options {note.options!r:.200}"
        )
    try:
        return parse_arch(names.pop())
    except UsageError as error:
        raise BundleError(f"cubin's .note.nv.tkinfo: {error}") from error


def _tool_note(elf: ElfImage) -> _ToolNote | None:
    section = elf.find(".note.nv.tkinfo")
    if section is None:
        return None
    data = section.data
    if len(data) < 12:
        raise BundleError("cubin's .note.nv.tkinfo is truncated")
    name_bytes, text_bytes, kind = struct.unpack_from("<3I", data)
    start = 12 + (name_bytes + 3 & ~3)
    note = data[start : start + text_bytes]
    if kind != _NOTE_TKINFO or len(note) != text_bytes or text_bytes < _TKINFO_HEAD.size:
        raise BundleError("cubin's .note.nv.tkinfo is truncated or of an unknown kind")
    _, _, _, version, _, options = _TKINFO_HEAD.unpack_from(note)
    strings = note[_TKINFO_HEAD.size :]
    return _ToolNote(version=_string(strings, version), options=_string(strings, options).strip())


def _string(table: bytes, offset: int) -> str:
    end = table.find(b"\0", offset)
    if not 0 <= offset < len(table) or end < 0:
        raise BundleError("cubin's .note.nv.tkinfo is damaged: a string lies outside of it")
    return table[offset:end].decode("ascii", "backslashreplace")

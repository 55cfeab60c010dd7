"""Gives the kernel of a cubin another symbol, as two images that share their code have two symbols."""

from __future__ import annotations

import struct

HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SECTION = struct.Struct("<IIQQQQIIQQ")
SYMBOL_BYTES = 24
SYMTAB, STRTAB = 2, 3


def rename_kernel(cubin: bytes, old: str, new: str) -> bytes:
    """Renames the kernel `old` and its sections: string tables at the end of the file take the old ones' place."""
    header = HEADER.unpack_from(cubin)
    start, count, names_index = header[6], header[12], header[13]
    sections = [list(SECTION.unpack_from(cubin, start + index * SECTION.size)) for index in range(count)]
    data = bytearray(cubin)

    def retable(table: list[int], offsets: list[int]) -> list[int]:
        """Writes a table of the renamed texts at `offsets` in `table`, and returns where they are in it."""
        text = bytes(data[table[4] : table[4] + table[5]])
        made, places = bytearray(b"\0"), []
        for offset in offsets:
            name = text[offset : text.index(b"\0", offset)].decode()
            if name == old or name.endswith(f".{old}"):
                name = name[: len(name) - len(old)] + new
            places.append(len(made) if name else 0)
            made += name.encode() + b"\0" if name else b""
        table[4], table[5] = len(data), len(made)
        data.extend(made)
        return places

    for section in sections:
        if section[1] == SYMTAB:
            entries = range(section[4], section[4] + section[5], SYMBOL_BYTES)
            offsets = [struct.unpack_from("<I", data, entry)[0] for entry in entries]
            for entry, place in zip(entries, retable(sections[section[6]], offsets), strict=True):
                struct.pack_into("<I", data, entry, place)
    for section, place in zip(sections, retable(sections[names_index], [s[0] for s in sections]), strict=True):
        section[0] = place
    for index, section in enumerate(sections):
        SECTION.pack_into(data, start + index * SECTION.size, *section)
    return bytes(data)

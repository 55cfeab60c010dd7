"""Facts of the kernels in a cubin: parameters, launch bounds, registers, stack, spills and shared memory.

`.nv.info` holds registers and stack per kernel symbol. `.nv.info.<symbol>` holds parameters, block size, cluster size
and a list of the instructions that spill or refill a register. Spilled bytes are the widths of the listed local
stores, summed: the number that ptxas prints as "spill stores". The static shared memory section includes the 1024
bytes that the system reserves per CTA on compute capability 9.0 and later; the kernel's own part is the rest, which
again is the number that ptxas prints.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from attnres_aot.binary.elf_image import ElfImage, Section, Symbol
from attnres_aot.errors import BundleError

MAX_KERNELS = 16
"""Most kernels that a cubin may have; ours have one."""
INSTRUCTION_BYTES = 16
"""Size of one SASS instruction on every supported arch."""
RESERVED_SMEM_BYTES = 1024
"""Shared memory that the system reserves per CTA on compute capability 9.0 and later."""

_ENTRY = 0x10  # st_other bit of a kernel, as opposed to a device function
_MAX_THREADS, _REQNTID = 0x05, 0x10
_PARAM_CBANK, _FRAME_SIZE, _MIN_STACK_SIZE = 0x0A, 0x11, 0x12
_KPARAM_INFO, _CBANK_PARAM_SIZE = 0x17, 0x19
_REGCOUNT, _CTA_PER_CLUSTER, _ANNOTATIONS = 0x2F, 0x3D, 0x55
_FORMAT_SIZED = 4
_SPILL_REFILL = 1  # annotation kind
_LDL, _STL = 0x983, 0x387  # low 12 bits of an instruction
_PREEXIT, _ACQBULK = 0x82D, 0x82E  # griddepcontrol.launch_dependents and .wait
_EXIT = 0x94D
_YIELD = 0x946  # in a loop that the threads of a warp leave one by one
_WARPSYNC, _SHFL = (0x348, 0x948), (0x389, 0x589, 0x989, 0xF89)
_BRA, _DIV = 0x947, 1 << 91  # with this bit it is BRA.DIV, which leaves for a WARPSYNC unless the warp is whole
_LAST_WAIT = 8  # a wait with fewer instructions than these between it and the exit ends the kernel
_ACCESS_BYTES = (1, 1, 2, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class KernelParam:
    """One kernel parameter, as the binary declares it."""

    offset: int
    """Byte offset in the parameter block."""
    size: int
    """Bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFacts:
    """What a binary says about one of its kernels."""

    symbol: str
    """Name to look the kernel up by."""
    params: tuple[KernelParam, ...]
    """Parameters in order."""
    param_base: int
    """Offset of the parameter block in constant bank 0."""
    param_bytes: int
    """Size of the parameter block."""
    block: tuple[int, int, int] | None
    """Threads per CTA in x, y, z that a launch must use, or None when the kernel does not fix them."""
    max_threads: int | None
    """Largest number of threads per CTA, or None when the kernel states no bound."""
    cluster: tuple[int, int, int] | None
    """CTAs per cluster in x, y, z baked into the binary, or None when the launch decides."""
    registers: int
    """Registers per thread."""
    stack_bytes: int
    """Stack, bytes per thread, callees included."""
    spill_bytes: int
    """Bytes per thread that register spills store."""
    local_instructions: int
    """Instructions that load or store local memory, spills included."""
    smem_static_bytes: int
    """Shared memory that the kernel declares, bytes per CTA, without the system's reserve."""
    uses_smem: bool
    """The kernel has shared memory at all, static or dynamic."""
    pdl: bool
    """The kernel releases its dependents or waits for what it depends on, as programmatic launches need."""
    instructions: int
    """SASS instructions, padding at the end included."""
    critical_instructions: int
    """Instructions that a chain of dependent launches cannot overlap, in the order of the code: those from the wait for
    what the kernel depends on to the next exit, which rare cases follow; from its start where it does not wait, or only
    waits at its end."""
    split_shuffles: int
    """Shuffles that a warp may come to in parts, in the order of the code: after a loop that its threads leave one by
    one, with neither WARPSYNC nor BRA.DIV between. ptxas has been seen to take such a warp for whole."""


def read_kernels(elf: ElfImage) -> tuple[KernelFacts, ...]:
    """Reads the facts of every kernel in a cubin, in ascending order of symbol.

    Raises:
      BundleError: the cubin's records are damaged or contradict each other.
    """
    totals = _totals(elf)
    entries = [
        (index, symbol) for index, symbol in enumerate(elf.symbols) if symbol.is_function and symbol.other & _ENTRY
    ]
    if len(entries) > MAX_KERNELS:
        raise BundleError(f"not a cubin of ours: {len(entries)} kernels; the limit is {MAX_KERNELS}")
    kernels = [_kernel(elf, symbol, totals[index]) for index, symbol in entries]
    return tuple(sorted(kernels, key=lambda kernel: kernel.symbol))


def _attributes(section: Section | None) -> Iterator[tuple[int, bytes]]:
    """Yields the (attribute, value) pairs of an info section; a sized value is bytes, any other is two bytes."""
    if section is None:
        return
    data, position = section.data, 0
    while position < len(data):
        if position + 4 > len(data):
            raise BundleError(f"cubin section {section.name!r:.200} is truncated")
        kind, attribute, value = data[position], data[position + 1], data[position + 2 : position + 4]
        position += 4
        if kind == _FORMAT_SIZED:
            size = int.from_bytes(value, "little")
            value = data[position : position + size]
            position += size
            if len(value) != size:
                raise BundleError(f"cubin section {section.name!r:.200} is truncated")
        elif kind not in (1, 2, 3):
            raise BundleError(f"cubin section {section.name!r:.200} is damaged: attribute format {kind}")
        yield attribute, value


def _words(value: bytes, count: int, what: str) -> tuple[int, ...]:
    if len(value) != 4 * count:
        raise BundleError(f"cubin is damaged: {what} has {len(value)} bytes, expected {4 * count}")
    return struct.unpack(f"<{count}I", value)


def _totals(elf: ElfImage) -> Mapping[int, Mapping[int, int]]:
    """Reads `.nv.info`: symbol index -> attribute -> value."""
    totals: dict[int, dict[int, int]] = defaultdict(dict)
    for attribute, value in _attributes(elf.find(".nv.info")):
        if attribute in (_REGCOUNT, _FRAME_SIZE, _MIN_STACK_SIZE):
            symbol, number = _words(value, 2, f".nv.info attribute {attribute:#x}")
            if attribute in totals[symbol]:
                raise BundleError(f"cubin is damaged: .nv.info gives attribute {attribute:#x} of a symbol twice")
            totals[symbol][attribute] = number
    return totals


def _kernel(elf: ElfImage, symbol: Symbol, totals: Mapping[int, int]) -> KernelFacts:
    text = elf.find(f".text.{symbol.name}")
    info = elf.find(f".nv.info.{symbol.name}")
    if text is None or info is None or not text.data or _REGCOUNT not in totals or _FRAME_SIZE not in totals:
        raise BundleError(f"cubin is damaged: kernel {symbol.name!r:.200} has no code, info or register count")
    values: dict[int, bytes] = {}
    params: dict[int, KernelParam] = {}
    for attribute, value in _attributes(info):
        if attribute == _KPARAM_INFO:
            _, place, packed = _words(value, 3, "a parameter record")
            params[place & 0xFFFF] = KernelParam(offset=place >> 16, size=packed >> 18)
        elif attribute in values and attribute in (_REQNTID, _MAX_THREADS, _PARAM_CBANK, _CTA_PER_CLUSTER):
            raise BundleError(f"cubin is damaged: kernel {symbol.name!r:.200} gives attribute {attribute:#x} twice")
        else:
            values[attribute] = value
    base, param_bytes = _param_block(values)
    shared = elf.find(f".nv.shared.{symbol.name}")
    opcodes = _opcodes(text.data)
    limit = _extent(values, _MAX_THREADS)
    return KernelFacts(
        symbol=symbol.name,
        params=_param_list(params, param_bytes),
        param_base=base,
        param_bytes=param_bytes,
        block=_extent(values, _REQNTID),
        max_threads=limit[0] * limit[1] * limit[2] if limit else None,
        cluster=_extent(values, _CTA_PER_CLUSTER),
        registers=totals[_REGCOUNT],
        stack_bytes=max(totals[_FRAME_SIZE], totals.get(_MIN_STACK_SIZE, 0)),
        spill_bytes=_spill_bytes(text.data, values.get(_ANNOTATIONS, b"")),
        local_instructions=_count(opcodes, (_LDL, _STL)),
        smem_static_bytes=_smem_bytes(shared),
        uses_smem=shared is not None and shared.size > 0,
        pdl=_count(opcodes, (_PREEXIT, _ACQBULK)) > 0,
        instructions=len(text.data) // INSTRUCTION_BYTES,
        critical_instructions=_critical_instructions(opcodes),
        split_shuffles=_split_shuffles(text.data, opcodes),
    )


def _extent(values: Mapping[int, bytes], attribute: int) -> tuple[int, int, int] | None:
    if attribute not in values:
        return None
    x, y, z = _words(values[attribute], 3, f"attribute {attribute:#x}")
    return x, y, z


def _param_block(values: Mapping[int, bytes]) -> tuple[int, int]:
    if _PARAM_CBANK not in values:
        return 0, 0
    _, place = _words(values[_PARAM_CBANK], 2, "the parameter block record")
    size = place >> 16
    if int.from_bytes(values.get(_CBANK_PARAM_SIZE, b""), "little") != size:
        raise BundleError("cubin is damaged: two different sizes of the parameter block")
    return place & 0xFFFF, size


def _param_list(params: Mapping[int, KernelParam], param_bytes: int) -> tuple[KernelParam, ...]:
    ordered = [params[ordinal] for ordinal in sorted(params)]
    end = max((param.offset + param.size for param in ordered), default=0)
    if sorted(params) != list(range(len(params))) or end > param_bytes:
        raise BundleError("cubin is damaged: its parameter records do not make one list")
    return tuple(ordered)


def _instruction(code: bytes, offset: int) -> int:
    return int.from_bytes(code[offset : offset + INSTRUCTION_BYTES], "little")


def _spill_bytes(code: bytes, annotations: bytes) -> int:
    words: Sequence[int] = _words(annotations, len(annotations) // 8 * 2, "the annotation list")
    total = 0
    for kind, offset in zip(words[::2], words[1::2], strict=True):
        if offset % INSTRUCTION_BYTES or offset >= len(code):
            raise BundleError("cubin is damaged: an annotation points outside of the code")
        word = _instruction(code, offset)
        if kind == _SPILL_REFILL and word & 0xFFF == _STL:
            width = word >> 73 & 7
            total += _ACCESS_BYTES[min(width, len(_ACCESS_BYTES) - 1)]
    return total


def _count(opcodes: list[int], wanted: tuple[int, ...]) -> int:
    return sum(map(opcodes.count, wanted))


def _opcodes(code: bytes) -> list[int]:
    """Returns the low 12 bits of every instruction."""
    whole = code[: len(code) // INSTRUCTION_BYTES * INSTRUCTION_BYTES]
    words = struct.unpack(f"<{len(whole) // 2}H", whole)
    return [word & 0xFFF for word in words[:: INSTRUCTION_BYTES // 2]]


def _critical_instructions(opcodes: list[int]) -> int:
    exits = [i for i, opcode in enumerate(opcodes) if opcode == _EXIT] or [len(opcodes) - 1]
    wait = next((i for i, opcode in enumerate(opcodes[: exits[-1]]) if opcode == _ACQBULK), None)
    if wait is not None:
        end = next(i for i in exits if i > wait)
        if end - wait > _LAST_WAIT:
            return end - wait
    return exits[0] + 1


def _split_shuffles(code: bytes, opcodes: list[int]) -> int:
    whole, found = True, 0
    for index, opcode in enumerate(opcodes):
        if opcode == _YIELD:
            whole = False
        elif opcode in _WARPSYNC or (opcode == _BRA and _instruction(code, INSTRUCTION_BYTES * index) & _DIV):
            whole = True
        elif opcode in _SHFL and not whole:
            found += 1
    return found


def _smem_bytes(section: Section | None) -> int:
    if section is None or section.size == 0:
        return 0
    if section.size < RESERVED_SMEM_BYTES:
        raise BundleError(f"cubin is damaged: {section.name!r:.200} is smaller than the system's reserve")
    return section.size - RESERVED_SMEM_BYTES

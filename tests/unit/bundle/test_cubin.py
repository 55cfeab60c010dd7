"""Facts read from real cubins, and damaged cubins that must be refused in one sentence."""

from __future__ import annotations

import dataclasses
import random
import struct
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnres_aot.binary.cubin import MAX_CUBIN_BYTES, read_cubin
from attnres_aot.binary.elf_image import MAX_NAME_BYTES, MAX_SYMBOLS, _name, _symbols, open_elf
from attnres_aot.binary.kernel_facts import MAX_KERNELS, read_kernels
from attnres_aot.errors import BundleError
from attnres_aot.spec.params import CONSUMER_PARAMS

ALL_CONSUMERS = [
    *(
        (arch, "cu12")
        for arch in ["sm_90", "sm_90a", "sm_100", "sm_100a", "sm_100f", "sm_103", "sm_103a", "sm_120", "sm_120a"]
    ),
    *((arch, "cu13") for arch in ["sm_90", "sm_90a", "sm_100a", "sm_100f"]),
]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What `ptxas -v` printed and what the PTX of the kernel says."""

    kernel: str
    registers: int
    block: tuple[int, int, int] | None = (128, 1, 1)
    max_threads: int | None = None
    cluster: tuple[int, int, int] | None = None
    stack: int = 0
    spills: int = 0
    local: int = 0
    smem: int = 0
    uses_smem: bool = False
    pdl: bool = False
    params: tuple[tuple[int, int], ...] = ((0, 8),)


CONSUMER_LAYOUT = tuple((param.offset, param.size) for param in CONSUMER_PARAMS)
EXPECTED = [
    Expected(kernel="consumer", registers=8, smem=40, uses_smem=True, pdl=True, params=CONSUMER_LAYOUT),
    Expected(kernel="wide", registers=32, params=CONSUMER_LAYOUT),
    Expected(kernel="spill", registers=32, stack=424, spills=420, local=210),
    Expected(kernel="local", registers=10, stack=512, local=2),
    Expected(kernel="dynamic", registers=8, uses_smem=True),
    Expected(kernel="cluster", registers=4, cluster=(7, 1, 1)),
    Expected(kernel="bounded", registers=4, block=None, max_threads=256),
    Expected(kernel="bare", registers=4, block=(32, 2, 1), params=()),
]


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("expected", EXPECTED, ids=lambda case: case.kernel)
def test_kernel_facts_are_those_that_the_assembler_printed(cubin, expected, arch):
    (kernel,) = read_cubin(cubin(expected.kernel, arch)).kernels
    found = Expected(
        kernel=expected.kernel,
        registers=kernel.registers,
        block=kernel.block,
        max_threads=kernel.max_threads,
        cluster=kernel.cluster,
        stack=kernel.stack_bytes,
        spills=kernel.spill_bytes,
        local=kernel.local_instructions,
        smem=kernel.smem_static_bytes,
        uses_smem=kernel.uses_smem,
        pdl=kernel.pdl,
        params=tuple((param.offset, param.size) for param in kernel.params),
    )
    assert found == expected


@pytest.mark.parametrize(("arch", "toolkit"), ALL_CONSUMERS)
def test_the_arch_is_the_one_that_was_compiled_for(cubin, arch, toolkit):
    assert str(read_cubin(cubin("consumer", arch, toolkit)).arch) == arch


def test_kernels_come_in_order_of_symbol(cubin):
    assert [kernel.symbol for kernel in read_cubin(cubin("two")).kernels] == ["one", "two"]
    assert read_cubin(cubin("none")).kernels == ()


def test_the_tool_that_made_it_is_named_where_the_layout_records_it(cubin):
    facts = read_cubin(cubin("consumer", "sm_100f"))
    assert facts.toolkit == "Cuda compilation tools, release 12.9, V12.9.86"
    assert facts.options == "-arch sm_100f"
    assert read_cubin(cubin("consumer", "sm_90")).toolkit is None


def patched(data: bytes, offset: int, form: str, value: int) -> bytes:
    damaged = bytearray(data)
    struct.pack_into(form, damaged, offset, value)
    return bytes(damaged)


def section_header(data: bytes, name: bytes) -> int:
    """Returns the byte offset of a section's header."""
    start, names = struct.unpack_from("<Q", data, 40)[0], struct.unpack_from("<H", data, 62)[0]
    table = struct.unpack_from("<Q", data, start + 64 * names + 24)[0]
    for index in range(struct.unpack_from("<H", data, 60)[0]):
        text = table + struct.unpack_from("<I", data, start + 64 * index)[0]
        if data[text : data.index(0, text)] == name:
            return start + 64 * index
    raise AssertionError(name)


@pytest.mark.parametrize(
    ("waits", "exits", "found"),
    [
        ((), (), 16),
        ((4,), (), 11),
        ((4, 9), (), 11),
        ((6, 14), (), 9),
        ((7,), (), 16),
        ((14,), (), 16),
        ((20,), (), 16),
        ((4,), (13,), 9),
        ((4,), (2, 13), 9),
        ((6, 14), (8,), 9),
        ((), (9,), 10),
    ],
)
def test_the_critical_path_is_what_follows_the_wait(cubin, waits, exits, found):
    """A kernel of 16 instructions, the last an exit, and padding; some instructions become waits or exits."""
    data = cubin("consumer", "sm_90")
    (code,) = struct.unpack_from("<Q", data, section_header(data, b".text.consumer") + 24)
    for index, opcode in [*((wait, 0x82E) for wait in waits), *((leave, 0x94D) for leave in exits)]:
        place = code + 16 * index
        data = patched(data, place, "<H", struct.unpack_from("<H", data, place)[0] & 0xF000 | opcode)
    (kernel,) = read_cubin(data).kernels
    assert (kernel.critical_instructions, kernel.instructions) == (found, 32)


YIELD, WARPSYNC, WARPSYNC_COLLECTIVE, SHFL, SHFL_OF_REGISTER = 0x946, 0x948, 0x348, 0xF89, 0x389
BRA, BRA_DIV = 0x947, 0x947 | 1 << 91


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ((SHFL, SHFL), 0),
        ((YIELD, SHFL, SHFL_OF_REGISTER), 2),
        ((YIELD, BRA, SHFL), 1),
        ((YIELD, WARPSYNC, SHFL, SHFL), 0),
        ((YIELD, WARPSYNC_COLLECTIVE, SHFL), 0),
        ((YIELD, BRA_DIV, SHFL), 0),
        ((SHFL, YIELD, WARPSYNC, YIELD, SHFL), 1),
    ],
)
def test_shuffles_of_a_warp_that_may_be_apart_are_counted(cubin, code, found):
    data = cubin("consumer", "sm_90")
    (start,) = struct.unpack_from("<Q", data, section_header(data, b".text.consumer") + 24)
    words = b"".join(word.to_bytes(16, "little") for word in code)
    (kernel,) = read_cubin(data[:start] + words + data[start + len(words) :]).kernels
    assert kernel.split_shuffles == found


def replaced(data: bytes, old: bytes, new: bytes) -> bytes:
    assert old in data
    return data.replace(old, new)


FLAGS, TYPE, MACHINE, SECTIONS, OS_ABI = 48, 16, 18, 60, 7
BROKEN = {
    "empty": (lambda data: b"", "not a cubin"),
    "text": (lambda data: b"#!/bin/sh\n" * 50, "not a cubin"),
    "host program": (lambda data: patched(data, MACHINE, "<H", 62), "EM_X86_64"),
    "relocatable": (lambda data: patched(data, TYPE, "<H", 1), "ET_REL"),
    "32 bits": (lambda data: patched(data, 4, "<B", 1), "not a cubin"),
    "no sections": (lambda data: patched(data, SECTIONS, "<H", 0), "section headers"),
    "too many sections": (lambda data: patched(data, SECTIONS, "<H", 0xFFF0), "section headers"),
    "unknown layout": (lambda data: patched(data, OS_ABI, "<B", 0x42), "OS ABI 0x42"),
    "no arch": (lambda data: patched(data, FLAGS, "<I", 0x6000002), "name no arch"),
    "flags of another arch": (lambda data: patched(data, FLAGS, "<I", 0x6006702), "contradicts itself"),
    "flags of an a target": (lambda data: patched(data, FLAGS, "<I", 0x600640A), "contradicts itself"),
    "note of another arch": (lambda data: replaced(data, b"-arch sm_100 ", b"-arch sm_103 "), "contradicts itself"),
    "note of no arch": (lambda data: replaced(data, b"-arch sm_100 ", b"-ar-h sm_100 "), "names 0 archs"),
    "note of a strange arch": (lambda data: replaced(data, b"-arch sm_100 ", b"-arch sm_x   "), "not a GPU arch"),
    "no note": (lambda data: replaced(data, b".note.nv.tkinfo", b".note.nv.tkinfX"), "to tell which"),
    "no symbols": (lambda data: replaced(data, b"\0.symtab\0", b"\0.symtaX\0"), "no symbol table"),
    "no code": (lambda data: replaced(data, b"\0.text.consumer\0", b"\0.text.consumeX\0"), "no code"),
    "two sections of one name": (lambda data: replaced(data, b"\0.symtab\0", b"\0.strtab\0"), "the same name"),
    "huge section": (
        lambda data: patched(data, section_header(data, b".nv.info") + 32, "<Q", 1 << 62),
        r"its sections hold more than a file of \d+ bytes can",
    ),
    "half an attribute": (
        lambda data: patched(data, section_header(data, b".nv.info.consumer") + 32, "<Q", 30),
        "is truncated",
    ),
    "shared memory below the reserve": (
        lambda data: patched(data, section_header(data, b".nv.shared.consumer") + 32, "<Q", 512),
        "smaller than the system's reserve",
    ),
    "too large": (lambda data: data + bytes(MAX_CUBIN_BYTES), "the limit is"),
}


@pytest.mark.parametrize("damage", BROKEN, ids=str)
def test_a_damaged_cubin_is_refused(cubin, damage):
    change, message = BROKEN[damage]
    with pytest.raises(BundleError, match=message) as caught:
        read_cubin(change(cubin("consumer")))
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_no_part_of_a_cubin_can_be_missing_at_its_end(cubin, arch):
    """The section headers lie at the end, so every shorter file has lost some."""
    data = cubin("consumer", arch)
    headers_end = struct.unpack_from("<Q", data, 40)[0] + 64 * struct.unpack_from("<H", data, SECTIONS)[0]
    for size in range(0, headers_end, 61):
        with pytest.raises(BundleError):
            read_cubin(data[:size])


@pytest.mark.parametrize("seed", range(8))
def test_random_bytes_are_refused(seed):
    with pytest.raises(BundleError, match="not a cubin"):
        read_cubin(random.Random(seed).randbytes(5000))


@settings(max_examples=300, deadline=None)
@given(
    kernel=st.sampled_from(["consumer", "spill", "two"]),
    arch=st.sampled_from(["sm_90", "sm_100"]),
    edits=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=8)), min_size=1, max_size=6
    ),
)
def test_any_damage_gives_facts_or_an_error_of_ours(cubin, kernel, arch, edits):
    data = bytearray(cubin(kernel, arch))
    for place, new in edits:
        start = int(place * len(data))
        data[start : start + len(new)] = new
    try:
        facts = read_cubin(bytes(data))
    except BundleError as error:
        message = str(error)
    else:
        message = "ok"
        assert all(kernel.instructions > 0 for kernel in facts.kernels)
    assert 0 < len(message) < 6000


def test_more_symbols_than_any_cubin_has_are_not_looked_at():
    with pytest.raises(BundleError, match="a symbol table of 98328 bytes"):
        _symbols(bytes(24 * (MAX_SYMBOLS + 1)), b"\0")
    assert len(_symbols(bytes(24 * MAX_SYMBOLS), b"\0")) == MAX_SYMBOLS


def test_a_name_is_looked_for_no_further_than_it_may_be_long():
    table = b"x" * MAX_NAME_BYTES + b"\0" + b"y" * (1 << 20)
    assert _name(table, 0) == "x" * MAX_NAME_BYTES
    with pytest.raises(BundleError, match="a name of more than 4096 bytes"):
        _name(table, MAX_NAME_BYTES + 1)
    with pytest.raises(BundleError, match="a name lies outside of its string table"):
        _name(table, len(table) - 10)


def test_more_kernels_than_ours_have_are_not_looked_at(cubin):
    elf = open_elf(cubin("consumer"))
    entry = next(symbol for symbol in elf.symbols if symbol.is_function)
    many = dataclasses.replace(elf, symbols=(entry,) * (MAX_KERNELS + 1))
    with pytest.raises(BundleError, match="17 kernels; the limit is 16"):
        read_kernels(many)


def test_sections_that_share_their_bytes_are_refused(cubin):
    """Each of them would be a copy of its bytes."""
    data = bytearray(cubin("consumer"))
    start, count = struct.unpack_from("<Q", data, 40)[0], struct.unpack_from("<H", data, 60)[0]
    for index in range(1, count):
        struct.pack_into("<QQ", data, start + 64 * index + 24, 0, len(data))
    with pytest.raises(BundleError, match="its sections hold more than a file of"):
        open_elf(bytes(data))

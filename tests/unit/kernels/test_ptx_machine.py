"""The machine's own arithmetic and scheduling, on exact values and small kernels."""

import random
import struct
from fractions import Fraction

import pytest
import torch
from ptx_machine.arithmetic import MAX_ERROR, OPERATIONS, add_bf16, approximations, fma, low32, maximum, pack_bf16
from ptx_machine.machine import DeadlockError, Launch
from ptx_machine.memory import GlobalMemory, Segment
from ptx_machine.program import PtxError, parse
from ptx_machine.schedule import run

RANDOM = random.Random(11)
SPECIAL = [0x00000000, 0x80000000, 1, 0x807FFFFF, 0x00800000, 0x3F800000, 0x3F800001, 0x7F7FFFFF, 0x33800000]


def words(*values: int) -> torch.Tensor:
    return low32(torch.tensor(values, dtype=torch.int64))


def number(bits: int) -> Fraction:
    return Fraction(struct.unpack("<f", struct.pack("<I", bits))[0])


def nearest(value: Fraction) -> int:
    """Bits of the fp32 number nearest to a value whose magnitude is not too large, ties to even."""
    magnitude, exponent = abs(value), -149
    while magnitude / Fraction(2) ** exponent >= 1 << 24:
        exponent += 1
    steps = round(magnitude / Fraction(2) ** exponent)  # to even
    bits = steps if exponent == -149 else (exponent + 149 << 23) + steps
    return bits | (0x80000000 if value < 0 else 0)


def test_fma_rounds_once():
    def draw() -> int:
        return RANDOM.choice(
            SPECIAL[:-2] + [RANDOM.getrandbits(23) | RANDOM.randrange(60, 160) << 23 for _ in range(9)]
        )

    triples = [(draw(), draw(), draw()) for _ in range(3000)]
    # halfway between two fp32 numbers but for a term far below the last bit of fp64
    triples += [(0x3F800001, 0x3F800001, 0x33800000), (0x3F800000, 0x4B800001, 0x00000001), (0x4B800001, 0x3F000000, 1)]
    results = fma(*(words(*column) for column in zip(*triples, strict=True))).tolist()
    for (a, b, c), found in zip(triples, results, strict=True):
        exact = number(a) * number(b) + number(c)
        if exact:
            assert found & 0xFFFFFFFF == nearest(exact), (hex(a), hex(b), hex(c))


def test_bf16_is_rounded_as_torch_rounds():
    values = words(*SPECIAL, *(RANDOM.getrandbits(32) for _ in range(20_000)), *(i << 15 for i in range(1 << 17)))
    found = pack_bf16(values, values).view(torch.int16).view(-1, 2)
    wanted = values.view(torch.float32).bfloat16()
    nan = wanted.isnan()
    assert torch.equal(found[~nan], wanted.view(torch.int16)[~nan, None].expand(-1, 2))
    assert (found[nan] == 0x7FFF).all()


def test_bf16_is_added_as_torch_adds():
    halves = [0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x3F80, 0xBF80, 0x3C00, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80]
    halves += [RANDOM.getrandbits(16) for _ in range(600)]
    bits = torch.tensor(halves, dtype=torch.int32)
    left, right = torch.meshgrid(bits, bits, indexing="ij")
    found = add_bf16(left.flatten() << 16 | right.flatten(), right.flatten() << 16 | left.flatten())
    found = found.view(torch.int16).view(*left.shape, 2)
    wanted = left.short().view(torch.bfloat16) + right.short().view(torch.bfloat16)
    nan = wanted.isnan()
    assert torch.equal(found[~nan], wanted.view(torch.int16)[~nan, None].expand(-1, 2))
    assert (found[nan] == 0x7FFF).all()


def test_integers_wrap_and_compare_without_signs():
    a, b = words(0xFFFFFFFF, 0x80000000, 7), words(0xFFFFFFFF, 3, 0x92492493)
    assert OPERATIONS["mul.hi.u32"](a, b).tolist() == [-2, 1, 4]
    assert OPERATIONS["mul.lo.s32"](a, b).tolist() == [1, -0x80000000, 5]
    assert OPERATIONS["mul.wide.u32"](a, words(16, 16, 16)).tolist() == [0xFFFFFFFF0, 0x800000000, 112]
    assert OPERATIONS["setp.lt.u32"](a, b).tolist() == [False, False, True]
    assert OPERATIONS["shr.u32"](a, words(31)).tolist() == [1, 1, 0]


def test_a_nan_loses_and_approximations_keep_subnormals_unless_told():
    nan, one, least = words(0x7FC00000), words(0x3F800000), words(0xC3150000)  # least: -149
    assert maximum(nan, one).tolist() == maximum(one, nan).tolist() == one.tolist()
    assert maximum(words(0x80000000), words(0)).tolist() == [0]
    assert OPERATIONS["ex2.approx.f32"](least).tolist() == [1]
    assert OPERATIONS["ex2.approx.ftz.f32"](least).tolist() == [0]


def test_approximations_may_be_off_but_not_too_far_and_always_alike():
    values = words(*(RANDOM.getrandbits(23) | 127 << 23 for _ in range(5000)))
    exact = OPERATIONS["rsqrt.approx.ftz.f32"](values).view(torch.float32)
    off = approximations(seed=3)["rsqrt.approx.ftz.f32"](values)
    error = (off.view(torch.float32).double() / exact.double() - 1).abs()
    assert MAX_ERROR / 2 < error.max() < MAX_ERROR * 1.3  # and two roundings
    assert torch.equal(off, approximations(seed=3)["rsqrt.approx.ftz.f32"](values))
    assert not torch.equal(off, approximations(seed=4)["rsqrt.approx.ftz.f32"](values))


HEAD = """
.version 8.8
.target sm_90
.address_size 64
.visible .entry k(
	.param .u64 .ptr .global .align 16 k_param_0
)
.reqntid 64, 1, 1
{
	.reg .pred 	%p<3>;
	.reg .b32 	%r<9>;
	.reg .b64 	%rd<5>;
	.shared .align 16 .b8 room[256];
	ld.param.b64 	%rd1, [k_param_0];
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd2, %r1, 16;
	add.s64 	%rd3, %rd1, %rd2;
	griddepcontrol.launch_dependents;
"""


def launch(body: str, *, steps: int = 300, seed: int | None = None) -> torch.Tensor:
    """Runs a kernel of two warps on 64 vectors, which it may read and write."""
    data = torch.zeros(256, dtype=torch.int32)
    memory = Segment.over(data)
    memory.allow(data, "readable", "writable")
    program = parse(HEAD + body + "\tret;\n}\n")
    run(
        Launch(program=program, params=[data.data_ptr()], ctas=1, cluster=1),
        GlobalMemory(memory), seed=seed, max_steps=steps,
    )  # fmt: skip
    return data.view(64, 4)


STORE = "\tst.global.v4.b32 [%rd3], {%r2, %r2, %r2, %r2};\n"


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_parted_threads_meet_again(seed):
    """Odd threads take another way; the shuffle waits for all of the warp."""
    body = """
	mov.b32 	%r2, 5;
	and.b32 	%r3, %r1, 1;
	setp.eq.b32 	%p1, %r3, 0;
	@%p1 bra 	$L1;
	mov.b32 	%r2, 8;
$L1:
	shfl.sync.bfly.b32 	%r2, %r2, 1, 31, -1;
"""
    assert launch(body + STORE, seed=seed)[:, 0].tolist() == [8, 5] * 32


@pytest.mark.parametrize("seed", [None, 4])
def test_a_barrier_that_not_all_reach_is_a_deadlock(seed):
    body = "\tsetp.eq.b32 %p1, %r1, 3;\n\t@%p1 bra $L1;\n\tbar.sync 0;\n$L1:\n"
    with pytest.raises(DeadlockError, match=r"nobody can go on; 63 threads of 1 CTAs at `bar.sync 0`"):
        launch(body, seed=seed)


def test_an_endless_loop_ends():
    with pytest.raises(DeadlockError, match="no end after 300 steps"):
        launch("$L1:\n\tbra.uni $L1;\n")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("\tmov.b32 %r2, 1;\n\tmul.wide.u32 %rd2, %r1, 8;\n\tadd.s64 %rd3, %rd1, %rd2;\n" + STORE,
         "an access of 16 bytes is not aligned"),
        ("\tmov.b32 %r2, 1;\n\tadd.s64 %rd3, %rd3, 16;\n" + STORE, "in no allocation"),
        ("\tmov.b32 %r2, 1;\n\tmov.b32 %r3, 0;\n\tcvt.s64.s32 %rd3, %r3;\n\tadd.s64 %rd3, %rd1, %rd3;\n" + STORE,
         "two threads write"),
        ("\tmov.b32 %r2, 1;\n" + 2 * STORE, "written twice"),
        ("\tmov.b32 %r2, 1;\n" + STORE + "\tld.global.nc.v4.b32 {%r3, %r4, %r5, %r6}, [%rd3];\n", "read-only load"),
        ("\tmov.b32 %r2, 0f3F800000;\n\tst.shared.f32 [%r1], %r2;\n", "out of bounds"),
        ("\tadd.s32 %r2, %r3, 1;\n", "read before anything is written"),
        ("\tmov.b32 %r1, %clusterid;\n", "does not know"),
    ],
    ids=["alignment", "bounds", "collision", "twice", "constant", "shared", "register", "special"],
)  # fmt: skip
def test_what_a_kernel_may_not_do_is_an_error(body, says):
    with pytest.raises(PtxError, match=says):
        launch(body)


def test_what_is_no_kernel_of_ours_is_an_error():
    for text in (HEAD.replace(".b64 ", ".f64 "), HEAD.replace("room[256]", "room"), "nothing"):
        with pytest.raises(PtxError, match=r"unknown declaration|not the text"):
            parse(text + "\tret;\n}\n")


def test_only_its_writer_may_write_a_word_again_and_only_where_that_is_allowed():
    data = torch.zeros(8, dtype=torch.int32)
    segment = Segment.over(data)
    segment.allow(data.view(torch.bfloat16), "writable")
    segment.allow(data[:4].view(torch.bfloat16), "rewritable")
    memory = GlobalMemory(segment)

    def store(word: int, value: int, thread: int) -> None:
        address = torch.tensor([data.data_ptr() + 4 * word])
        memory.store(address, torch.tensor([[value]], dtype=torch.int32), torch.tensor([True]), torch.tensor([thread]))

    store(0, 1, thread=5)
    store(0, 2, thread=5)
    assert data[0] == 2
    with pytest.raises(PtxError, match="written twice"):
        store(0, 3, thread=6)
    store(4, 1, thread=5)
    with pytest.raises(PtxError, match="written twice"):
        store(4, 2, thread=5)
    assert data[4] == 1

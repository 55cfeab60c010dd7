"""PTX instructions that the kernels need by name: 16-byte accesses, mailbox accesses, DSMEM exchange, bf16 packing.

A vector is 16 bytes: four 32-bit words, each a pair of bf16 (low half = even element). Global addresses are Int64,
shared-memory addresses Int32 (`shared::cta` window). Memory instructions are volatile to the compiler, so they stay
in program order among themselves and around `griddepcontrol`. An `on` that is not given is true.
"""

from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

_LETTERS = {Int32: "r", Int64: "l", Float32: "f"}
"""Constraint of an operand, by its type."""
_RESULTS = {"r": Int32, "f": Float32}
"""Type of a result, by its constraint."""


@dsl_user_op
def _asm(text, results, *operands, pure=False, early="", clobbers=(), loc=None, ip=None):
    """Emits instructions; returns what they write, by the letters of `results`: None, a value, or a tuple.

    Args:
      text: the instructions; $0 and so on are first the results, then the operands.
      results: a letter for each result.
      operands: Int32, Int64 and Float32.
      pure: the instructions only compute: they may be moved, merged and left out.
      early: "&" if results are written before all operands are read.
      clobbers: what else the compiler must take for changed.
    """
    types = [T.i32() if letter == "r" else T.f32() for letter in results]
    one = types[0] if len(types) == 1 else llvm.StructType.get_literal(types) if types else None
    constraints = [f"={early}{letter}" for letter in results] + [_LETTERS[type(each)] for each in operands]
    out = llvm.inline_asm(
        one,
        [each.ir_value(loc=loc, ip=ip) for each in operands],
        text,
        ",".join([*constraints, *clobbers]),
        has_side_effects=not pure,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    if len(types) < 2:
        return _RESULTS[results](out) if types else None
    fields = [llvm.extractvalue(kind, out, [i], loc=loc, ip=ip) for i, kind in enumerate(types)]
    return tuple(_RESULTS[letter](field) for letter, field in zip(results, fields, strict=True))


def _where(on, text, *operands):
    """Makes `text`, whose operands are `operands`, conditional on `on`; returns the text and all operands."""
    if on is None:
        return text, operands
    return f"{{ .reg .pred on; setp.ne.s32 on, ${len(operands)}, 0; @on {text} }}", (*operands, Int32(on))


def _load_vec(opcode, address, on):
    if on is None:
        return _asm(f"{opcode} {{$0, $1, $2, $3}}, [$4];", "rrrr", Int64(address))
    zeros = "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
    text = f"{{ .reg .pred on; setp.ne.s32 on, $5, 0; {zeros} @on {opcode} {{$0, $1, $2, $3}}, [$4]; }}"
    return _asm(text, "rrrr", Int64(address), Int32(on), early="&")


def _store_vec(opcode, address, words, on):
    text, operands = _where(on, f"{opcode} [$0], {{$1, $2, $3, $4}};", Int64(address), *(Int32(w) for w in words))
    _asm(text, "", *operands)


def ld_vec_const(address, on=None):
    """Loads a vector that nothing writes while the kernel runs; zeros where `on` is 0."""
    return _load_vec("ld.global.nc.v4.b32", address, on)


def ld_vec(address, on=None):
    """Loads a vector with ordinary (weak) semantics; zeros where `on` is 0."""
    return _load_vec("ld.global.v4.b32", address, on)


def ld_vec_mailbox(address, on=None):
    """Loads a vector that another GPU may be writing; every poll reaches memory. Zeros where `on` is 0."""
    return _load_vec("ld.relaxed.sys.global.v4.b32", address, on)


def ld_vec_mailbox_where(address, words, enabled):
    """Where `enabled`, loads a vector as `ld_vec_mailbox` does; returns `words` elsewhere."""
    text = (
        "{ .reg .pred on; setp.ne.s32 on, $5, 0;"
        " mov.b32 $0, $6; mov.b32 $1, $7; mov.b32 $2, $8; mov.b32 $3, $9;"
        " @on ld.relaxed.sys.global.v4.b32 {$0, $1, $2, $3}, [$4]; }"
    )
    return _asm(text, "rrrr", Int64(address), Int32(enabled), *(Int32(word) for word in words), early="&")


def prefetch(address):
    """Hints that the line at a global address will be wanted; no value is read, so it may still be written."""
    _asm("prefetch.global.L2 [$0];", "", Int64(address))


def st_vec(address, words, on=None):
    """Stores a vector with ordinary (weak) semantics, unless `on` is 0."""
    _store_vec("st.global.v4.b32", address, words, on)


def st_vec_mailbox(address, words, on=None):
    """Stores a vector that another GPU may be polling, unless `on` is 0."""
    _store_vec("st.relaxed.sys.global.v4.b32", address, words, on)


def ld_scalar_pair(address):
    """Loads two consecutive fp32 from an 8-byte aligned global address."""
    return _asm("ld.global.v2.f32 {$0, $1}, [$2];", "ff", Int64(address))


def st_f32(address, values, on=None):
    """Stores 2 or 4 consecutive fp32 to a global address that is aligned to all of them, unless `on` is 0."""
    names = ", ".join(f"${i + 1}" for i in range(len(values)))
    store = f"st.global.v{len(values)}.f32 [$0], {{{names}}};"
    text, operands = _where(on, store, Int64(address), *(Float32(value) for value in values))
    _asm(text, "", *operands)


def pack_bf16(low, high):
    """Rounds two fp32 to bf16 (nearest even) and packs them into one word."""
    return _asm("cvt.rn.bf16x2.f32 $0, $1, $2;", "r", Float32(high), Float32(low), pure=True)


def add_bf16(a, b):
    """Adds two words of two bf16 each, rounding once (nearest even, subnormals kept): the bits of an fp32 add, rounded.

    The sum of two bf16 is inexact in fp32 only where one is below 2**-16 of the other, and then both round to the other.
    """
    return _asm("add.rn.bf16x2 $0, $1, $2;", "r", Int32(a), Int32(b), pure=True)


def launder(word):
    """Returns `word`; what was computed from it before is recomputed after, instead of held in registers."""
    return _asm("mov.b32 $0, $1;", "r", Int32(word))


def keep(word):
    """Returns `word`, alike in the whole warp, in a form that is held in a register and never worked out again."""
    return _asm("shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "r", Int32(word))


@dsl_user_op
def bits_to_f32(word, *, loc=None, ip=None):
    """Reinterprets 32 bits as fp32."""
    return Float32(llvm.bitcast(T.f32(), Int32(word).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def _f32_to_bits(value, *, loc=None, ip=None):
    return Int32(llvm.bitcast(T.i32(), Float32(value).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


def rsqrt(x):
    """Reciprocal square root of a normal number, relative error below 2**-22."""
    return _asm("rsqrt.approx.ftz.f32 $0, $1;", "f", Float32(x), pure=True)


def exp2(x):
    """Power of two, relative error below 2**-22; subnormal results are kept."""
    return _asm("ex2.approx.f32 $0, $1;", "f", Float32(x), pure=True)


def exp2_normal(x):
    """Power of two, relative error below 2**-22; subnormal operands and results are zeros."""
    return _asm("ex2.approx.ftz.f32 $0, $1;", "f", Float32(x), pure=True)


def reciprocal(x):
    """Reciprocal of a normal number, within one unit in the last place."""
    return _asm("rcp.approx.ftz.f32 $0, $1;", "f", Float32(x), pure=True)


def fabs(x):
    """Magnitude of an fp32."""
    return _asm("abs.f32 $0, $1;", "f", Float32(x), pure=True)


def imin(a, b):
    """Minimum of two signed words."""
    return _asm("min.s32 $0, $1, $2;", "r", Int32(a), Int32(b), pure=True)


def fmax(a, b):
    """Maximum; a NaN loses."""
    return _asm("max.f32 $0, $1, $2;", "f", Float32(a), Float32(b), pure=True)


def mbarrier_expect(barrier, tx_bytes):
    """Initialises a one-arrival mbarrier and makes its only arrival, which expects `tx_bytes` of st.async data."""
    text = (
        "{ .reg .b64 state; mbarrier.init.shared::cta.b64 [$0], 1;"
        " mbarrier.arrive.expect_tx.relaxed.cluster.shared::cta.b64 state, [$0], $1; }"
    )
    _asm(text, "", Int32(barrier), Int32(tx_bytes))


def fence_async_shared():
    """Orders this thread's ordinary accesses to its CTA's shared memory before asynchronous ones to it."""
    _asm("fence.proxy.async.shared::cta;", "", clobbers=["~{memory}"])


def mbarrier_wait(barrier):
    """Waits until phase 0 of an mbarrier is complete; what st.async delivered to it is then visible."""
    text = "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], 0; @!done bra again; }"
    _asm(text, "", Int32(barrier), clobbers=["~{memory}"])


def peer_offset(address, rank):
    """What to add to addresses in this CTA's shared memory for those of the same variables in CTA `rank` of the cluster.

    `address` is any of this CTA's. The sums are `shared::cluster` addresses.
    """
    text = "{ .reg .b32 there; mapa.shared::cluster.u32 there, $1, $2; sub.s32 $0, there, $1; }"
    return _asm(text, "r", Int32(address), Int32(rank))


def st_async(address, barrier, value):
    """Stores one fp32 in the shared memory of a CTA of the cluster.

    `address` and `barrier` are `shared::cluster` addresses in that CTA, on whose barrier the store counts its bytes.
    """
    text = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [$0], $2, [$1];"
    _asm(text, "", Int32(address), Int32(barrier), _f32_to_bits(value))


def st_shared(address, value, on=None):
    """Stores one fp32 to this CTA's shared memory, unless `on` is 0."""
    text, operands = _where(on, "st.shared.f32 [$0], $1;", Int32(address), Float32(value))
    _asm(text, "", *operands)


def ld_shared(address):
    """Loads one fp32 from this CTA's shared memory."""
    return _asm("ld.shared.f32 $0, [$1];", "f", Int32(address))


def ld_shared_vec(address):
    """Loads four fp32 from a 16-byte aligned address in this CTA's shared memory."""
    return _asm("ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", "ffff", Int32(address))


def griddepcontrol_wait_unless(flag):
    """Waits for the grids that this one depends on, unless `flag`, alike in the whole grid, is nonzero."""
    text = "{ .reg .pred on; setp.ne.s32 on, $0, 0; @!on griddepcontrol.wait; }"
    _asm(text, "", Int32(flag), clobbers=["~{memory}"])


def trap_with_record(fault, tag, row, slot, column):
    """Writes {tag, row, slot, column} to `fault` (a host-visible address, 0 for none) and stops the kernel."""
    text = (
        "{ .reg .pred on; setp.ne.s64 on, $0, 0;"
        " @on st.relaxed.sys.global.v4.b32 [$0], {$1, $2, $3, $4}; @on fence.acq_rel.sys; trap; }"
    )
    _asm(text, "", Int64(fault), *(Int32(x) for x in (tag, row, slot, column)))

"""PTX instructions that the kernels need by name: 16-byte accesses, mailbox accesses, DSMEM exchange, bf16 packing.

A vector is 16 bytes: four 32-bit words, each a pair of bf16 (low half = even element). Global addresses are Int64,
shared-memory addresses Int32 (`shared::cta` window). Memory instructions are volatile to the compiler, so they stay
in program order among themselves and around `griddepcontrol`.
"""

from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


def _asm(result, operands, text, constraints, *, volatile, loc, ip):
    return llvm.inline_asm(
        result,
        operands,
        text,
        constraints,
        has_side_effects=volatile,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


def _load_vec(opcode, address, on, loc, ip):
    """Loads four words; where `on` is given and 0, returns zeros instead."""
    struct = llvm.StructType.get_literal([T.i32()] * 4)
    operands = [Int64(address).ir_value(loc=loc, ip=ip)]
    text, constraints = f"{opcode} {{$0, $1, $2, $3}}, [$4];", "=r,=r,=r,=r,l"
    if on is not None:
        operands.append(Int32(on).ir_value(loc=loc, ip=ip))
        zeros = "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
        text = f"{{ .reg .pred on; setp.ne.s32 on, $5, 0; {zeros} @on {text} }}"
        constraints = "=&r,=&r,=&r,=&r,l,r"
    words = _asm(struct, operands, text, constraints, volatile=True, loc=loc, ip=ip)
    return tuple(Int32(llvm.extractvalue(T.i32(), words, [i], loc=loc, ip=ip)) for i in range(4))


def _store_vec(opcode, address, words, on, loc, ip):
    """Stores four words, where `on` is not given or not 0."""
    operands = [Int64(address).ir_value(loc=loc, ip=ip)]
    operands += [Int32(word).ir_value(loc=loc, ip=ip) for word in words]
    text, constraints = f"{opcode} [$0], {{$1, $2, $3, $4}};", "l,r,r,r,r"
    if on is not None:
        operands.append(Int32(on).ir_value(loc=loc, ip=ip))
        text, constraints = f"{{ .reg .pred on; setp.ne.s32 on, $5, 0; @on {text} }}", constraints + ",r"
    _asm(None, operands, text, constraints, volatile=True, loc=loc, ip=ip)


@dsl_user_op
def ld_vec_const(address, on=None, *, loc=None, ip=None):
    """Loads a vector that nothing writes while the kernel runs; zeros where `on` is 0."""
    return _load_vec("ld.global.nc.v4.b32", address, on, loc, ip)


@dsl_user_op
def ld_vec(address, on=None, *, loc=None, ip=None):
    """Loads a vector with ordinary (weak) semantics; zeros where `on` is 0."""
    return _load_vec("ld.global.v4.b32", address, on, loc, ip)


@dsl_user_op
def ld_vec_mailbox(address, on=None, *, loc=None, ip=None):
    """Loads a vector that another GPU may be writing; every poll reaches memory. Zeros where `on` is 0."""
    return _load_vec("ld.relaxed.sys.global.v4.b32", address, on, loc, ip)


@dsl_user_op
def ld_vec_mailbox_where(address, words, enabled, *, loc=None, ip=None):
    """Where `enabled`, loads a vector as `ld_vec_mailbox` does; returns `words` elsewhere."""
    operands = [Int64(address).ir_value(loc=loc, ip=ip), Int32(enabled).ir_value(loc=loc, ip=ip)]
    operands += [Int32(word).ir_value(loc=loc, ip=ip) for word in words]
    text = (
        "{ .reg .pred on; setp.ne.s32 on, $5, 0;"
        " mov.b32 $0, $6; mov.b32 $1, $7; mov.b32 $2, $8; mov.b32 $3, $9;"
        " @on ld.relaxed.sys.global.v4.b32 {$0, $1, $2, $3}, [$4]; }"
    )
    struct = llvm.StructType.get_literal([T.i32()] * 4)
    out = _asm(struct, operands, text, "=&r,=&r,=&r,=&r,l,r,r,r,r,r", volatile=True, loc=loc, ip=ip)
    return tuple(Int32(llvm.extractvalue(T.i32(), out, [i], loc=loc, ip=ip)) for i in range(4))


@dsl_user_op
def prefetch(address, *, loc=None, ip=None):
    """Hints that the line at a global address will be wanted; no value is read, so it may still be written."""
    _asm(
        None, [Int64(address).ir_value(loc=loc, ip=ip)], "prefetch.global.L2 [$0];", "l", volatile=True, loc=loc, ip=ip
    )


@dsl_user_op
def st_vec(address, words, on=None, *, loc=None, ip=None):
    """Stores a vector with ordinary (weak) semantics, unless `on` is 0."""
    _store_vec("st.global.v4.b32", address, words, on, loc, ip)


@dsl_user_op
def st_vec_mailbox(address, words, on=None, *, loc=None, ip=None):
    """Stores a vector that another GPU may be polling, unless `on` is 0."""
    _store_vec("st.relaxed.sys.global.v4.b32", address, words, on, loc, ip)


@dsl_user_op
def ld_scalar_pair(address, *, loc=None, ip=None):
    """Loads two consecutive fp32 from an 8-byte aligned global address."""
    struct = llvm.StructType.get_literal([T.f32()] * 2)
    pair = _asm(
        struct,
        [Int64(address).ir_value(loc=loc, ip=ip)],
        "ld.global.v2.f32 {$0, $1}, [$2];",
        "=f,=f,l",
        volatile=True,
        loc=loc,
        ip=ip,
    )
    return tuple(Float32(llvm.extractvalue(T.f32(), pair, [i], loc=loc, ip=ip)) for i in range(2))


@dsl_user_op
def pack_bf16(low, high, *, loc=None, ip=None):
    """Rounds two fp32 to bf16 (nearest even) and packs them into one word."""
    operands = [Float32(high).ir_value(loc=loc, ip=ip), Float32(low).ir_value(loc=loc, ip=ip)]
    return Int32(_asm(T.i32(), operands, "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", volatile=False, loc=loc, ip=ip))


@dsl_user_op
def add_bf16(a, b, *, loc=None, ip=None):
    """Adds two words of two bf16 each, rounding once (nearest even, subnormals kept): the bits of an fp32 add, rounded.

    The sum of two bf16 is inexact in fp32 only where one is below 2**-16 of the other, and then both round to the other.
    """
    operands = [Int32(word).ir_value(loc=loc, ip=ip) for word in (a, b)]
    return Int32(_asm(T.i32(), operands, "add.rn.bf16x2 $0, $1, $2;", "=r,r,r", volatile=False, loc=loc, ip=ip))


@dsl_user_op
def launder(word, *, loc=None, ip=None):
    """Returns `word`; what was computed from it before is recomputed after, instead of held in registers."""
    return Int32(
        _asm(T.i32(), [Int32(word).ir_value(loc=loc, ip=ip)], "mov.b32 $0, $1;", "=r,r", volatile=True, loc=loc, ip=ip)
    )


@dsl_user_op
def keep(word, *, loc=None, ip=None):
    """Returns `word`, alike in the whole warp, in a form that is held in a register and never worked out again."""
    text = "shfl.sync.idx.b32 $0, $1, 0, 31, -1;"
    return Int32(_asm(T.i32(), [Int32(word).ir_value(loc=loc, ip=ip)], text, "=r,r", volatile=True, loc=loc, ip=ip))


@dsl_user_op
def bits_to_f32(word, *, loc=None, ip=None):
    """Reinterprets 32 bits as fp32."""
    return Float32(llvm.bitcast(T.f32(), Int32(word).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def rsqrt(x, *, loc=None, ip=None):
    """Reciprocal square root of a normal number, relative error below 2**-22."""
    return _unary("rsqrt.approx.ftz.f32", x, loc, ip)


@dsl_user_op
def exp2(x, *, loc=None, ip=None):
    """Power of two, relative error below 2**-22; subnormal results are kept."""
    return _unary("ex2.approx.f32", x, loc, ip)


@dsl_user_op
def exp2_normal(x, *, loc=None, ip=None):
    """Power of two, relative error below 2**-22; subnormal operands and results are zeros."""
    return _unary("ex2.approx.ftz.f32", x, loc, ip)


@dsl_user_op
def reciprocal(x, *, loc=None, ip=None):
    """Reciprocal of a normal number, within one unit in the last place."""
    return _unary("rcp.approx.ftz.f32", x, loc, ip)


@dsl_user_op
def fabs(x, *, loc=None, ip=None):
    """Magnitude of an fp32."""
    return _unary("abs.f32", x, loc, ip)


@dsl_user_op
def imin(a, b, *, loc=None, ip=None):
    """Minimum of two signed words."""
    operands = [Int32(a).ir_value(loc=loc, ip=ip), Int32(b).ir_value(loc=loc, ip=ip)]
    return Int32(_asm(T.i32(), operands, "min.s32 $0, $1, $2;", "=r,r,r", volatile=False, loc=loc, ip=ip))


@dsl_user_op
def fmax(a, b, *, loc=None, ip=None):
    """Maximum; a NaN loses."""
    operands = [Float32(a).ir_value(loc=loc, ip=ip), Float32(b).ir_value(loc=loc, ip=ip)]
    return Float32(_asm(T.f32(), operands, "max.f32 $0, $1, $2;", "=f,f,f", volatile=False, loc=loc, ip=ip))


def _unary(opcode, x, loc, ip):
    operand = [Float32(x).ir_value(loc=loc, ip=ip)]
    return Float32(_asm(T.f32(), operand, f"{opcode} $0, $1;", "=f,f", volatile=False, loc=loc, ip=ip))


@dsl_user_op
def mbarrier_expect(barrier, tx_bytes, *, loc=None, ip=None):
    """Initialises a one-arrival mbarrier and makes its only arrival, which expects `tx_bytes` of st.async data."""
    operands = [Int32(barrier).ir_value(loc=loc, ip=ip), Int32(tx_bytes).ir_value(loc=loc, ip=ip)]
    text = (
        "{ .reg .b64 state; mbarrier.init.shared::cta.b64 [$0], 1;"
        " mbarrier.arrive.expect_tx.relaxed.cluster.shared::cta.b64 state, [$0], $1; }"
    )
    _asm(None, operands, text, "r,r", volatile=True, loc=loc, ip=ip)


@dsl_user_op
def fence_async_shared(*, loc=None, ip=None):
    """Orders this thread's ordinary accesses to its CTA's shared memory before asynchronous ones to it."""
    _asm(None, [], "fence.proxy.async.shared::cta;", "~{memory}", volatile=True, loc=loc, ip=ip)


@dsl_user_op
def mbarrier_wait(barrier, *, loc=None, ip=None):
    """Waits until phase 0 of an mbarrier is complete; what st.async delivered to it is then visible."""
    text = "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], 0; @!done bra again; }"
    _asm(None, [Int32(barrier).ir_value(loc=loc, ip=ip)], text, "r,~{memory}", volatile=True, loc=loc, ip=ip)


@dsl_user_op
def peer_offset(address, rank, *, loc=None, ip=None):
    """What to add to addresses in this CTA's shared memory for those of the same variables in CTA `rank` of the cluster.

    `address` is any of this CTA's. The sums are `shared::cluster` addresses.
    """
    operands = [Int32(x).ir_value(loc=loc, ip=ip) for x in (address, rank)]
    text = "{ .reg .b32 there; mapa.shared::cluster.u32 there, $1, $2; sub.s32 $0, there, $1; }"
    return Int32(_asm(T.i32(), operands, text, "=r,r,r", volatile=True, loc=loc, ip=ip))


@dsl_user_op
def st_async(address, barrier, value, *, loc=None, ip=None):
    """Stores one fp32 in the shared memory of a CTA of the cluster.

    `address` and `barrier` are `shared::cluster` addresses in that CTA, on whose barrier the store counts its bytes.
    """
    operands = [Int32(x).ir_value(loc=loc, ip=ip) for x in (address, barrier)]
    operands.append(llvm.bitcast(T.i32(), Float32(value).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))
    text = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [$0], $2, [$1];"
    _asm(None, operands, text, "r,r,r", volatile=True, loc=loc, ip=ip)


@dsl_user_op
def st_shared(address, value, *, loc=None, ip=None):
    """Stores one fp32 to this CTA's shared memory."""
    operands = [Int32(address).ir_value(loc=loc, ip=ip), Float32(value).ir_value(loc=loc, ip=ip)]
    _asm(None, operands, "st.shared.f32 [$0], $1;", "r,f", volatile=True, loc=loc, ip=ip)


@dsl_user_op
def st_shared_where(address, value, enabled, *, loc=None, ip=None):
    """Stores one fp32 to this CTA's shared memory where `enabled` is nonzero."""
    operands = [Int32(address).ir_value(loc=loc, ip=ip), Float32(value).ir_value(loc=loc, ip=ip)]
    operands.append(Int32(enabled).ir_value(loc=loc, ip=ip))
    text = "{ .reg .pred on; setp.ne.s32 on, $2, 0; @on st.shared.f32 [$0], $1; }"
    _asm(None, operands, text, "r,f,r", volatile=True, loc=loc, ip=ip)


@dsl_user_op
def ld_shared(address, *, loc=None, ip=None):
    """Loads one fp32 from this CTA's shared memory."""
    operand = [Int32(address).ir_value(loc=loc, ip=ip)]
    return Float32(_asm(T.f32(), operand, "ld.shared.f32 $0, [$1];", "=f,r", volatile=True, loc=loc, ip=ip))


@dsl_user_op
def ld_shared_vec(address, *, loc=None, ip=None):
    """Loads four fp32 from a 16-byte aligned address in this CTA's shared memory."""
    struct = llvm.StructType.get_literal([T.f32()] * 4)
    operand = [Int32(address).ir_value(loc=loc, ip=ip)]
    text = "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];"
    vec = _asm(struct, operand, text, "=f,=f,=f,=f,r", volatile=True, loc=loc, ip=ip)
    return [Float32(llvm.extractvalue(T.f32(), vec, [i], loc=loc, ip=ip)) for i in range(4)]


@dsl_user_op
def griddepcontrol_wait_unless(flag, *, loc=None, ip=None):
    """Waits for the grids that this one depends on, unless `flag`, alike in the whole grid, is nonzero."""
    text = "{ .reg .pred on; setp.ne.s32 on, $0, 0; @!on griddepcontrol.wait; }"
    _asm(None, [Int32(flag).ir_value(loc=loc, ip=ip)], text, "r,~{memory}", volatile=True, loc=loc, ip=ip)


@dsl_user_op
def trap_with_record(fault, tag, row, slot, column, *, loc=None, ip=None):
    """Writes {tag, row, slot, column} to `fault` (a host-visible address, 0 for none) and stops the kernel."""
    operands = [Int64(fault).ir_value(loc=loc, ip=ip)]
    operands += [Int32(x).ir_value(loc=loc, ip=ip) for x in (tag, row, slot, column)]
    text = (
        "{ .reg .pred on; setp.ne.s64 on, $0, 0;"
        " @on st.relaxed.sys.global.v4.b32 [$0], {$1, $2, $3, $4}; @on fence.acq_rel.sys; trap; }"
    )
    _asm(None, operands, text, "l,r,r,r,r", volatile=True, loc=loc, ip=ip)


@dsl_user_op
def st_f32(address, values, on=None, *, loc=None, ip=None):
    """Stores 2 or 4 consecutive fp32 to a global address that is aligned to all of them, unless `on` is 0."""
    operands = [Int64(address).ir_value(loc=loc, ip=ip)]
    operands += [Float32(value).ir_value(loc=loc, ip=ip) for value in values]
    names = ", ".join(f"${i + 1}" for i in range(len(values)))
    text, constraints = f"st.global.v{len(values)}.f32 [$0], {{{names}}};", "l" + ",f" * len(values)
    if on is not None:
        operands.append(Int32(on).ir_value(loc=loc, ip=ip))
        text = f"{{ .reg .pred on; setp.ne.s32 on, ${len(values) + 1}, 0; @on {text} }}"
        constraints += ",r"
    _asm(None, operands, text, constraints, volatile=True, loc=loc, ip=ip)

"""The AttnRes consumer: one fused pass over a token row of H bf16 elements, one cluster of CTAs per row.

Per row, with w = norm * query, over sources v_0 .. v_{nb-1} (saved blocks) and P (updated prefix):

    P       = bf16(prefix + d)            or d without delta;  d = delta row, or bf16(sum over mailbox slots)
    logit_s = (v_s . w) * rsqrt(v_s . v_s / H + eps)
    m       = max_s logit_s,  l = sum_s exp(logit_s - m),  M = sum_s exp(logit_s - m) v_s          over the saved blocks
    A, B    = exp(m - t), exp(logit_P - t),  t = max(m, logit_P)
    mix     = (A M + B P) / (A l + B)
    out     = bf16(mix * rsqrt(mix . mix / H + out_eps) * out_norm)

Only `final` divides by s = A l + B: the output of s * mix with out_eps * s^2 in the place of out_eps is the same. l, M and B
are kept 2**SPARE smaller than above, so that s is from 1/16 to 1 and no intermediate exceeds the largest source. Two orders
of the same work:

split   For an ordinary source, and for many blocks. What depends on the saved blocks alone (m, l, M) is computed before
        the delta is needed, with an exchange of 2 nb sums. One exchange of four sums remains after it, because
        s^2 mix . mix = A^2 (M . M) + 2 A B (M . P) + B^2 (P . P). With statistics only that one is left.
gram    For a mailbox and few blocks: all products of all sources in one exchange, shares p_s of all of them, and
        s^2 mix . mix = sum_st p_s p_t (v_s . v_t).

Where the sum for mix . mix cancels (below CANCEL of its positive terms) its rounding error would show, and the cluster
agrees, from identical bits, to sum the squares of mix itself and to store the output once more: the store before it is
what everybody else waits for. `final` always sums them, since it rounds mix to bf16 first.

| operand  | shape                | type | strides             | align | read, and when | written, and when |
|----------|----------------------|------|---------------------|-------|----------------|-------------------|
| source   | [rows, H]            | bf16 | row dynamic, last 1 | 16 B  | after the wait | |
| (ring)   | [slots, capacity, H] | bf16 | slot, row dynamic   | 16 B  | polled after the wait (early: before) | armed when complete |
| prefix   | [rows, H]            | bf16 | row dynamic         | 16 B  | with delta: before the wait | while the last sums travel |
| blocks   | [rows, B, H]         | bf16 | row, block dynamic  | 16 B  | 0..nb-1: before the wait | `write`: as prefix |
| norm, query, out_norm | [H]     | bf16 | 1                   | 16 B  | before the wait | |
| mixture  | [cap, H]             | fp32 | H, 1                | 16 B  | after the wait (statistics) | |
| scal     | [cap, 2]             | fp32 | 2, 1                | 8 B   | after the wait (statistics) | |
| aux      | [rows, H]            | bf16 | row dynamic         | 16 B  | | as prefix |
| out      | [rows, H]            | bf16 | row dynamic         | 16 B  | | last; a second time where sums cancelled |

"The wait" is the dependency wait, for the grid before this one: with it, everything is written, and a mailbox looked at, when that
grid has ended and its memory is visible. Parameter `early` puts it at the end of a kernel with a mailbox, where the caller promises that
nobody minds (`attnres_aot.runtime.launch.pdl` has the promise).

Threads to elements: CTA `rank` of the cluster's K and thread `tid` of T own the vectors (8 elements)
(rank * V + i) * T + tid of the row, i < V, as far as the row has them: K * T * V * 8 is H, or the next multiple of 1024,
and threads beyond the row hold zeros and store nothing.

Shared memory and synchronisation are those of `row_sums`: up to three exchanges, of which the third (mix . mix itself) is
entered by the whole cluster or not at all.

Dependents are released at entry, so that their work before the delta overlaps. A kernel that has little (no blocks, or
statistics) releases them when that is done, which keeps the grids that follow from crowding it.

In a chain of dependent launches what follows the wait is the critical path, so as much as possible is done before it, or
while the last exchange's sums travel: the delta's address is translated (a prefetch), the cluster barrier is passed, M . M
is added up and left in shared memory, which also keeps the compiler from putting M off, and the updated prefix is stored
when the sums are under way, to addresses that are worked out then. With a mailbox the wait comes
before the first look, and the blocks are mixed in the shadow of that look. There the cluster barrier is passed while the loads are under way, and the mailbox vectors of up
to 8 slots are looked at together: in the common case all are full, and one branch says so.

Shares are right down to fp32's smallest normal number, 2**-126 of the largest, and nothing from 2**-145 on.
A source whose squares fp32 cannot add up makes its row NaN: its logit would be 0, and the output wrong.

Rounding points: d (several slots), P, mix (final), out. Everything else is fp32; w is a product of two bf16 and exact.
"""

from functools import partial

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from attnres_aot.kernels import ptx
from attnres_aot.kernels.row_sums import RowSums, padded
from attnres_aot.kernels.source import Source
from attnres_aot.kernels.vectors import (
    LOG2_E,
    VEC,
    add_bf16,
    col_address,
    combine,
    dot,
    inside,
    logit,
    overflow,
    pack,
    quick_exp,
    round_bf16,
    select,
    softmax,
    tree_sum,
    unpack,
    unpack_all,
    vec_address,
)

GRAM_BLOCKS = 5
"""Most saved blocks whose dot products go in one exchange: those of 6 sources are 27, and a warp has 32 lanes."""
SPARE = 4.0
"""Halvings of all shares, so that those of 9 sources add up to no more than 1; even, so that the largest share is exact."""
CANCEL = 2.0**-6
"""Share of its positive terms below which mix . mix is summed exactly: at 2**-6 an error of 2e-6 of the terms (18
roundings of fp32) becomes 1.3e-4 of the sum and 6.5e-5 of the output, well inside half a bf16 ulp (2e-3)."""


class Consumer:
    """Compiles to one image; the constructor's arguments are everything the code depends on."""

    def __init__(self, hidden, nb, has_delta, final, slots, cluster, threads, vectors, min_ctas_per_sm, early_loads):
        """Fixes the code's constants.

        Args:
          hidden: row length H in elements, at most cluster * threads * vectors * 8.
          nb: saved blocks read, 0..16, or None to take precomputed statistics.
          has_delta: add the source to the prefix.
          final: round the mixture to bf16 before the output norm.
          slots: mailbox slots, or 0 for an ordinary source.
          cluster: CTAs per row, at most 8.
          threads: threads per CTA, a multiple of 32.
          vectors: 16-byte vectors per thread.
          min_ctas_per_sm: CTAs that must fit one SM together, which bounds the registers per thread.
          early_loads: load what is needed besides the blocks while the sums of the blocks travel, not after that.
        """
        self.early_loads = early_loads
        self.stats = nb is None
        self.nb = 0 if nb is None else nb
        self.has_delta, self.final, self.slots = has_delta, final, slots
        self.cluster, self.threads, self.vectors = cluster, threads, vectors
        self.min_ctas_per_sm = min_ctas_per_sm
        self.inv_hidden = 1.0 / hidden
        self.row_vecs = hidden // VEC
        self.mixes = self.stats or self.nb > 0
        self.gram = not self.mixes or (slots > 0 and not self.stats and self.nb <= GRAM_BLOCKS)
        self.split = not self.gram and not self.stats
        self.delta = Source(slots, vectors)
        self.sums = RowSums(cluster, threads, self._counts())

    def _counts(self):
        """Numbers of values in the exchanges: of the blocks alone, of everything, of mix itself."""
        sources = self.nb + 1
        if not self.mixes:
            return 0, 1, 0
        if self.gram:
            return 0, padded(2 * sources + sources * (sources - 1) // 2), 1
        return 0 if self.stats else max(4, padded(2 * self.nb)), 4, 1

    @cute.jit
    def __call__(
        self,
        source: cute.Pointer,
        prefix: cute.Pointer,
        blocks: cute.Pointer,
        norm: cute.Pointer,
        query: cute.Pointer,
        out_norm: cute.Pointer,
        out: cute.Pointer,
        aux: cute.Pointer,
        mixture: cute.Pointer,
        scal: cute.Pointer,
        fault: cute.Pointer,
        source_row_stride: Int32,
        source_slot_stride: Int32,
        prefix_row_stride: Int32,
        blocks_row_stride: Int32,
        blocks_block_stride: Int32,
        out_row_stride: Int32,
        aux_row_stride: Int32,
        write: Int32,
        rows: Int32,
        spin_budget: Int32,
        fault_tag: Int32,
        early: Int32,
        eps: Float32,
        out_eps: Float32,
        stream,
    ):
        """Launches one cluster per row; parameters are `attnres_aot.spec.params.CONSUMER_PARAMS`, strides in vectors."""
        self.kernel(
            source,
            prefix,
            blocks,
            norm,
            query,
            out_norm,
            out,
            aux,
            mixture,
            scal,
            fault,
            source_row_stride,
            source_slot_stride,
            prefix_row_stride,
            blocks_row_stride,
            blocks_block_stride,
            out_row_stride,
            aux_row_stride,
            write,
            rows,
            spin_budget,
            fault_tag,
            early,
            eps,
            out_eps,
        ).launch(
            grid=(self.cluster * rows, 1, 1),
            block=(self.threads, 1, 1),
            cluster=(self.cluster, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=self.min_ctas_per_sm,
            preferred_smem_carveout=0,  # unused by our launches; unset, the DSL would ask a driver for it
        )

    @cute.kernel
    def kernel(
        self,
        source: cute.Pointer,
        prefix: cute.Pointer,
        blocks: cute.Pointer,
        norm: cute.Pointer,
        query: cute.Pointer,
        out_norm: cute.Pointer,
        out: cute.Pointer,
        aux: cute.Pointer,
        mixture: cute.Pointer,
        scal: cute.Pointer,
        fault: cute.Pointer,
        source_row_stride: Int32,
        source_slot_stride: Int32,
        prefix_row_stride: Int32,
        blocks_row_stride: Int32,
        blocks_block_stride: Int32,
        out_row_stride: Int32,
        aux_row_stride: Int32,
        write: Int32,
        rows: Int32,
        spin_budget: Int32,
        fault_tag: Int32,
        early: Int32,
        eps: Float32,
        out_eps: Float32,
    ):
        """Device body: one row per cluster."""
        if const_expr(self.nb > 0):
            cute.arch.griddepcontrol_launch_dependents()
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        row, rank = Int32(Uint32(cta) // self.cluster), Int32(Uint32(cta) % self.cluster)
        exchanges = None if self.slots else self.sums.open(tid, rank)
        cols = [(rank * self.vectors + i) * self.threads + tid for i in range(self.vectors)]
        on = inside(cols, self.row_vecs, self.cluster * self.threads * self.vectors)
        load = ptx.ld_vec if self.slots else ptx.ld_vec_const  # ptxas puts read-only loads off, until after the wait
        vw = zip(_load_weight(norm, cols, on, load), _load_weight(query, cols, on, load), strict=True)
        blocks_from = [vec_address(blocks, row, blocks_row_stride, col) for col in cols]
        block_bytes = Int64(Uint32(blocks_block_stride)) * 16
        vb = [[load(at + block_bytes * s, o) for at, o in zip(blocks_from, on, strict=True)] for s in range(self.nb)]
        w = [a * b for n, q in vw for a, b in zip(unpack(n), unpack(q), strict=True)]
        look = partial(self.delta.look, source, row, cols, on, source_row_stride, source_slot_stride)
        looked, m, l, mixed = None, Float32(0.0), Float32(1.0), None
        if const_expr(self.slots and self.split):
            exchanges = self._open_and_wait(tid, rank)
        if const_expr(self.split):
            self.sums.send_products(exchanges[0], [unpack_all(vecs) for vecs in vb], w, cluster_waits=not self.slots)
        if const_expr(self.split and not self.early_loads):
            m, l, mixed = self._mix_blocks(exchanges, vb, eps)
        vp = None
        if const_expr(self.has_delta):
            prefix_at = [vec_address(prefix, row, prefix_row_stride, col) for col in cols]
            vp = [ptx.ld_vec(at, o) for at, o in zip(prefix_at, on, strict=True)]
        vo = None
        if const_expr(self.early_loads or not self.slots):
            vo = _load_weight(out_norm, cols, on, load)
        if const_expr(self.slots):
            ptx.griddepcontrol_wait_unless(early)
            looked = look()
        if const_expr(self.split and self.early_loads):
            m, l, mixed = self._mix_blocks(exchanges, vb, eps)
        if const_expr(not self.slots):
            for i in range_constexpr(self.vectors):
                ptx.prefetch(vec_address(source, row, source_row_stride, cols[i]))
        if const_expr(self.slots and not self.split):
            exchanges = self._open_and_wait(tid, rank)
        if const_expr(self.nb == 0 and not self.slots):
            cute.arch.cluster_wait()
        if const_expr(self.nb == 0):
            cute.arch.griddepcontrol_launch_dependents()
        if const_expr(self.stats or not self.slots):
            cute.arch.griddepcontrol_wait()
        if const_expr(self.stats):
            m, l, mixed = self._load_statistics(mixture, scal, row, cols, on)

        if const_expr(not self.slots):
            looked = look()
        vd = self.delta.take(looked, row, cols, on, source_slot_stride, fault, fault_tag, spin_budget)
        vx = add_bf16(vp, vd) if self.has_delta else vd
        if const_expr(vo is None):
            vo = _load_weight(out_norm, cols, on, load)
        written = (
            (prefix, prefix_row_stride, Int64(0)),
            (blocks, blocks_row_stride, block_bytes * write),
            (aux, aux_row_stride, Int64(0)),
            (out, out_row_stride, Int64(0)),
        )
        meanwhile = partial(self._meanwhile, vx, vo, written, row, cols, on, write >= 0, aux.toint() != 0)
        x = unpack_all(vx)
        if const_expr(self.gram):
            self._mix_all(exchanges, vb, x, w, eps, out_eps, meanwhile)
        else:
            self._fold(exchanges, x, w, m, l, mixed, eps, out_eps, meanwhile)
        if const_expr(self.slots and not self.stats):
            # Later launches wait for this grid alone, so it must not finish before the grid that it follows.
            cute.arch.griddepcontrol_wait()

    def _open_and_wait(self, tid, rank):
        """Opens the exchanges when loads are under way, in whose shadow the CTAs of a row wait for one another."""
        exchanges = self.sums.open(tid, rank)
        cute.arch.cluster_wait()
        return exchanges

    def _mix_blocks(self, exchanges, vb, eps):
        """Returns (m, l, M) over the saved blocks, l and M by 2**SPARE too small: softmax in every thread, M per element."""
        logits = self.sums.receive_logits(exchanges[0], self.nb, self.inv_hidden, eps)
        m, e, l = softmax(logits, partial(quick_exp, halvings=SPARE))
        mixed = combine(e, [unpack_all(vecs, launder=True) for vecs in vb])
        if not self.slots:
            self.sums.leave_early(exchanges[1], dot(mixed, mixed))
        return m, l, mixed

    def _mix_all(self, exchanges, vb, x, w, eps, out_eps, meanwhile):
        """Stores the output over the saved blocks and the updated prefix `x`, by one exchange of all sums.

        `meanwhile` is called while they travel and returns the output norm's weight and the output's addresses.
        """
        if self.nb == 0:
            self.sums.send(exchanges[1], [dot(x, x)])
            weight, out_at = meanwhile()
            (square,) = self.sums.receive(exchanges[1], 1)
            _store(out_at, x, self._inv_rms(square, out_eps) + overflow(square), weight)
            return
        v = [*(unpack_all(vecs) for vecs in vb), x]
        n = len(v)
        pairs = [(i, j) for i in range(n) for j in range(i)]
        sums = [dot(a, a) for a in v] + [dot(a, w) for a in v] + [dot(v[i], v[j]) for i, j in pairs]
        self.sums.send(exchanges[1], sums + [None] * (exchanges[1].count - len(sums)))
        weight, out_at = meanwhile()
        sums = self.sums.receive(exchanges[1], len(sums))
        squares, dots, crosses = sums[:n], sums[n : 2 * n], sums[2 * n :]
        logits = [logit(vv, vw, self.inv_hidden, eps) for vv, vw in zip(squares, dots, strict=True)]
        _, p, s = softmax(logits, partial(quick_exp, halvings=SPARE))
        mix = combine(p, [*(unpack_all(vecs, launder=True) for vecs in vb), x])
        terms = tree_sum([a * sq * a for a, sq in zip(p, squares, strict=True)])
        twice = tree_sum([p[i] * cross * p[j] for (i, j), cross in zip(pairs, crosses, strict=False)])
        square = (terms + 2.0 * twice) * self.inv_hidden + out_eps * (s * s)
        cancelled = square < terms * (CANCEL * self.inv_hidden)
        self._finish(exchanges[2], mix, s, square, cancelled, weight, out_eps, out_at)

    def _load_statistics(self, mixture, scal, row, cols, on):
        """Returns (m, l, M), as `_mix_blocks` does, from the caller's statistics."""
        m, l = ptx.ld_scalar_pair(scal.toint() + Int64(row) * 8)
        words = []
        for col, o in zip(cols, on, strict=True):
            address = mixture.toint() + (Int64(row) * self.row_vecs + Int64(col)) * 32
            words += ptx.ld_vec(address, o) + ptx.ld_vec(address + 16, o)
        return m, l * 2.0**-SPARE, [ptx.bits_to_f32(word) * 2.0**-SPARE for word in words]

    def _meanwhile(self, vx, vo, written, row, cols, on, has_block, has_aux):
        """Stores the updated prefix while the last exchange's sums travel.

        `written` are (pointer, row stride in vectors, offset in bytes) of the prefix, the written block, aux and the output.
        Returns the output norm's weight, and the addresses of the output with which of them the row has.
        """
        at = [[vec_address(pointer, row, stride, col) + offset for col in cols] for pointer, stride, offset in written]
        self._store_prefix(vx, *at[:3], on, has_block, has_aux)
        return unpack_all(vo), list(zip(at[3], on, strict=True))

    @cute.jit
    def _store_prefix(self, vx, prefix_at, block_at, aux_at, on, has_block: Boolean, has_aux: Boolean):
        """Copies the updated prefix, bit for bit, to everywhere it is wanted."""
        for i in range_constexpr(self.vectors):
            ptx.st_vec(prefix_at[i], vx[i], on[i])
        if has_block:
            for i in range_constexpr(self.vectors):
                ptx.st_vec(block_at[i], vx[i], on[i])
        if has_aux:
            for i in range_constexpr(self.vectors):
                ptx.st_vec(aux_at[i], vx[i], on[i])

    def _fold(self, exchanges, x, w, m, l, mixed, eps, out_eps, meanwhile):
        """Stores the output: folds the updated prefix `x` into the mixture of the saved blocks.

        With the larger of exp(m) and exp(logit) as the unit, the shares are a of M, or `mixed`, and b of `x`, of which one is
        constant and the other has the factor e <= 1, the square of an exponential of half the difference. The mean square of
        a M + b x, and out_eps s^2, are a polynomial in e whose coefficients are there before e is. It has cancelled by
        1 / CANCEL only where its first and last terms are alike, so the first tells.
        `meanwhile` is called while the sums travel and returns the output norm's weight and the output's addresses.
        """
        h, unit, most_b = self.inv_hidden, 0.5 * LOG2_E, 2.0**-SPARE
        m = m * unit
        early = not self.slots and not self.stats
        own = None if early else dot(mixed, mixed)
        self.sums.send(exchanges[1], [dot(x, w), dot(x, x), dot(mixed, x), own], early)
        weight, out_at = meanwhile()
        xw, xx, mx, mm = self.sums.receive(exchanges[1], 4)
        over = logit(xx, xw * unit, h, eps) - m
        if self.stats:  # those of blocks have their logits to say so
            over = over + overflow(mm)
        half = ptx.exp2_normal(-ptx.fabs(over))
        above = over > 0.0
        of_mixed = mm * h + out_eps * (l * l)
        of_x = xx * (h * most_b**2) + out_eps * most_b**2
        of_both = mx * (h * 2.0 * most_b) + out_eps * (2.0 * most_b) * l
        first, last = select(above, of_x, of_mixed), select(above, of_mixed, of_x)
        e = half * half
        square = (last * e + of_both) * e + first
        a, b = select(above, e, Float32(1.0)), select(above, Float32(most_b), most_b * e)
        cancelled = square < first * (2.5 * CANCEL)
        self._finish(exchanges[2], combine([a, b], [mixed, x]), a * l + b, square, cancelled, weight, out_eps, out_at)

    def _finish(self, exchange, mix, s, square, cancelled, weight, out_eps, out_at):
        """Stores the output from `mix`, s times the mixture.

        `square` is its mean square plus out_eps s^2, unless that has `cancelled`. What is multiplied in which order matters:
        a share and rsqrt may be so small that their product is none.
        """
        if self.final:
            scale = ptx.reciprocal(s)
            mix = round_bf16([scale * value for value in mix])
            (square,) = self.sums.exchange(exchange, [dot(mix, mix)])
            _store(out_at, mix, self._inv_rms(square, out_eps), weight)
        else:
            _store(out_at, mix, ptx.rsqrt(square), weight)
            self._store_again(exchange, mix, cancelled, out_eps * (s * s), weight, out_at)

    def _inv_rms(self, square, floor):
        return ptx.rsqrt(square * self.inv_hidden + floor)

    @cute.jit
    def _store_again(self, exchange, mix, cancelled: Boolean, floor: Float32, weight, out_at):
        """Where `cancelled`, stores the output once more, from the exchanged sum of its squares."""
        if cancelled:
            (square,) = self.sums.exchange(exchange, [dot(mix, mix)])
            _store(out_at, mix, self._inv_rms(square, floor), weight)


def _load_weight(weight, cols, on, load):
    """The thread's vectors of a weight of H elements."""
    return [load(col_address(weight, col), o) for col, o in zip(cols, on, strict=True)]


def _store(places, values, inv, weight):
    """Stores (value * inv) * weight: in this order neither a large nor a small value leaves fp32's range before its time."""
    y = [value * inv * factor for value, factor in zip(values, weight, strict=True)]
    for i, (address, on) in enumerate(places):
        ptx.st_vec(address, pack(y[i * VEC : (i + 1) * VEC]), on)

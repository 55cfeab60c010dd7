"""The AttnRes consumer: one fused pass over a token row of H bf16 elements, one cluster of CTAs per row.

Per row, with w = norm * query, over sources v_0 .. v_{nb-1} (saved blocks) and P (updated prefix):

    P       = bf16(prefix + d)            or d without delta;  d = delta row, or bf16(sum over mailbox slots)
    logit_s = (v_s . w) * rsqrt(v_s . v_s / H + eps)
    p       = softmax(logit_0 .. logit_{nb-1}),  M = sum_s p_s v_s,  m = max_s logit_s,  l = sum_s exp(logit_s - m)
    A : B   = l exp(m - t) : exp(logit_P - t),  t = max(m, logit_P),  A + B = 1
    mix     = A M + B P
    out     = bf16(mix * rsqrt(mix . mix / H + out_eps) * out_norm)

M is normalised, so no intermediate exceeds the largest source. A and B need not be: with A + B = s, the kernel takes
any s from 1/16 to 1 and puts out_eps * s^2 in the place of out_eps, which spares a division. Two orders of the same work:

split   For an ordinary source, and for many blocks. What depends on the saved blocks alone (m, l, M) is computed before
        the delta is needed, with an exchange of 2 nb sums. One exchange of four sums remains after it, because
        mix . mix = A^2 (M . M) + 2 A B (M . P) + B^2 (P . P). With statistics only that one is left.
gram    For a mailbox and few blocks: all products of all sources in one exchange, p over all of them, and
        mix . mix = sum_st p_s p_t (v_s . v_t).

Where the sum for mix . mix cancels (below CANCEL of its positive terms) its rounding error would show, and the cluster
agrees, from identical bits, to sum the squares of mix itself. `final` always does, since it rounds mix to bf16 first.

| operand  | shape                | type | strides             | align | access |
|----------|----------------------|------|---------------------|-------|--------|
| source   | [rows, H]            | bf16 | row dynamic, last 1 | 16 B  | read after the dependency wait |
| (ring)   | [slots, capacity, H] | bf16 | slot, row dynamic   | 16 B  | polled without a wait, re-armed |
| prefix   | [rows, H]            | bf16 | row dynamic         | 16 B  | read with delta; always written |
| blocks   | [rows, B, H]         | bf16 | row, block dynamic  | 16 B  | 0..nb-1 read, `write` written |
| norm, query, out_norm | [H]     | bf16 | 1                   | 16 B  | read |
| mixture  | [cap, H]             | fp32 | H, 1                | 16 B  | read after the dependency wait (statistics) |
| scal     | [cap, 2]             | fp32 | 2, 1                | 8 B   | read after the dependency wait (statistics) |
| out, aux | [rows, H]            | bf16 | row dynamic         | 16 B  | written |

Threads to elements: CTA `rank` of the cluster's K and thread `tid` of T own the vectors (8 elements)
(rank * V + i) * T + tid of the row, i < V, where K * T * V * 8 = H.

Shared memory and synchronisation are those of `row_sums`: up to three exchanges, of which the third (mix . mix itself) is
entered by the whole cluster or not at all.

Dependents are released at entry, so that their work before the delta overlaps. With `patient`, those of an ordinary
kernel are released when its products of the blocks are there, which keeps the grids that follow from crowding it; a
kernel that has no work before the delta (no blocks, or statistics) releases them after its own wait for the same reason.

In a chain of dependent launches what follows the wait is the critical path. So the delta's address is translated before
it (a prefetch), and with `late_stores` the updated prefix is stored while the last exchange's sums travel. Where the GPU
is full, stores that start early are worth more.

Rounding points: d (several slots), P, mix (final), out. Everything else is fp32; w is a product of two bf16 and exact.
"""

from functools import partial

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from attnres_aot.kernels import ptx
from attnres_aot.kernels.row_sums import RowSums, bounce, padded
from attnres_aot.kernels.vectors import (
    LOG2_E,
    VEC,
    add_bf16,
    col_address,
    combine,
    dot,
    pack,
    round_bf16,
    select,
    softmax,
    tree_sum,
    unpack,
    unpack_all,
    vec_address,
)

ARMED = -0x80000000
"""An empty mailbox word (0x80000000), as the signed integer that the compiler compares."""
GRAM_BLOCKS = 5
"""Most saved blocks whose dot products go in one exchange: those of 6 sources are 27, and a warp has 32 lanes."""
SPARE = 3.0
"""Halvings of the shares of all sources together, so that they add up to no more than 1."""
CANCEL = 2.0**-6
"""Share of its positive terms below which mix . mix is summed exactly: at 2**-6 an error of 2e-6 of the terms (18
roundings of fp32) becomes 1.3e-4 of the sum and 6.5e-5 of the output, well inside half a bf16 ulp (2e-3)."""


class Consumer:
    """Compiles to one image; the constructor's arguments are everything the code depends on."""

    def __init__(
        self, hidden, nb, has_delta, final, slots, cluster, threads, vectors, min_ctas_per_sm, patient, late_stores
    ):
        """Fixes the code's constants.

        Args:
          hidden: row length H in elements, cluster * threads * vectors * 8.
          nb: saved blocks read, 0..8, or None to take precomputed statistics.
          has_delta: add the source to the prefix.
          final: round the mixture to bf16 before the output norm.
          slots: mailbox slots, or 0 for an ordinary source.
          cluster: CTAs per row, at most 8.
          threads: threads per CTA, a multiple of 32.
          vectors: 16-byte vectors per thread.
          min_ctas_per_sm: CTAs that must fit one SM together, which bounds the registers per thread.
          patient: release dependents only when the products of the saved blocks are there; of an ordinary source only.
          late_stores: store the updated prefix after the last exchange's sums are sent.
        """
        self.patient, self.late_stores = patient, late_stores
        self.stats = nb is None
        self.nb = 0 if nb is None else nb
        self.has_delta, self.final, self.slots = has_delta, final, slots
        self.cluster, self.threads, self.vectors = cluster, threads, vectors
        self.min_ctas_per_sm = min_ctas_per_sm
        self.inv_hidden = 1.0 / hidden
        self.row_vecs = hidden // VEC
        self.mixes = self.stats or self.nb > 0
        self.gram = not self.mixes or (slots > 0 and not self.stats and self.nb <= GRAM_BLOCKS)
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
        eps: Float32,
        out_eps: Float32,
        stream,
    ):
        """Launches one cluster per row; parameters are `attnres_aot.abi.CONSUMER_PARAMS`, strides in vectors."""
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
        eps: Float32,
        out_eps: Float32,
    ):
        """Device body: one row per cluster."""
        if const_expr(self.nb > 0 and not self.patient):
            cute.arch.griddepcontrol_launch_dependents()
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        row, rank = Int32(Uint32(cta) // self.cluster), Int32(Uint32(cta) % self.cluster)
        exchanges = self.sums.open(tid, rank)

        cols = [(rank * self.vectors + i) * self.threads + tid for i in range(self.vectors)]
        vw = [(ptx.ld_vec_const(col_address(norm, c)), ptx.ld_vec_const(col_address(query, c))) for c in cols]
        blocks_from = [vec_address(blocks, row, blocks_row_stride, col) for col in cols]
        block_bytes = Int64(Uint32(blocks_block_stride)) * 16
        vb = [[ptx.ld_vec_const(at + block_bytes * s) for at in blocks_from] for s in range(self.nb)]
        w = [a * b for n, q in vw for a, b in zip(unpack(n), unpack(q), strict=True)]
        m, l, mean = Float32(0.0), Float32(1.0), None
        if const_expr(not self.gram and not self.stats):
            m, l, mean = self._mix_blocks(exchanges[0], vb, w, eps)
        prefix_at = [vec_address(prefix, row, prefix_row_stride, col) for col in cols]
        vp = [ptx.ld_vec(address) for address in prefix_at] if self.has_delta else None
        vo = [ptx.ld_vec_const(col_address(out_norm, col)) for col in cols]
        if const_expr(not self.slots):
            for i in range_constexpr(self.vectors):
                ptx.prefetch(vec_address(source, row, source_row_stride, cols[i]))
        if const_expr(self.stats or not self.slots):
            cute.arch.griddepcontrol_wait()
        if const_expr(self.nb == 0):
            cute.arch.griddepcontrol_launch_dependents()
        if const_expr(self.stats):
            m, l, mean = self._load_statistics(mixture, scal, row, cols)

        vd = self._take_source(source, row, cols, source_row_stride, source_slot_stride, fault, fault_tag, spin_budget)
        vx = add_bf16(vp, vd) if self.has_delta else vd
        blocks_at = [address + block_bytes * write for address in blocks_from]
        aux_at = [vec_address(aux, row, aux_row_stride, col) for col in cols]
        store = partial(self._store_prefix, vx, prefix_at, blocks_at, write >= 0, aux_at, aux.toint() != 0)
        if const_expr(not self.late_stores):
            store()

        meanwhile = store if self.late_stores else _nothing
        x = unpack_all(vx)
        if const_expr(self.gram):
            mix, square, s = self._mix_all(exchanges, vb, x, w, eps, meanwhile)
        else:
            mix, square, s = self._fold(exchanges, x, w, m, l, mean, eps, meanwhile)
        inv = ptx.rsqrt(square * self.inv_hidden + out_eps * (s * s))
        weight = unpack_all(vo)
        y = [value * inv * weight[i] for i, value in enumerate(mix)]
        for i in range_constexpr(self.vectors):
            ptx.st_vec(vec_address(out, row, out_row_stride, cols[i]), pack(y[i * VEC : (i + 1) * VEC]))
        if const_expr(self.slots and not self.stats):
            # Later launches wait for this grid alone, so it must not finish before the grid that it follows.
            cute.arch.griddepcontrol_wait()

    def _mix_blocks(self, exchange, vb, w, eps):
        """Returns (m, l, M) over the saved blocks: logits by one exchange, softmax in every thread, M per element."""
        release = cute.arch.griddepcontrol_launch_dependents if self.patient else None
        logits = self.sums.logits(exchange, [unpack_all(vecs) for vecs in vb], w, self.inv_hidden, eps, release)
        m, e, l = softmax(logits)
        scale = ptx.reciprocal(l)
        return m, l, combine([p * scale for p in e], [unpack_all(vecs, launder=True) for vecs in vb])

    def _mix_all(self, exchanges, vb, x, w, eps, meanwhile):
        """Returns (s mix, s^2 mix . mix, s) over the saved blocks and the updated prefix `x`, by one exchange of all sums.

        `meanwhile` is called while they travel.
        """
        cute.arch.cluster_wait()
        if self.nb == 0:
            self.sums.send(exchanges[1], [dot(x, x)])
            meanwhile()
            return x, self.sums.receive(exchanges[1], 1)[0], Float32(1.0)
        v = [*(unpack_all(vecs) for vecs in vb), x]
        n = len(v)
        pairs = [(i, j) for i in range(n) for j in range(i)]
        sums = [dot(a, a) for a in v] + [dot(a, w) for a in v] + [dot(v[i], v[j]) for i, j in pairs]
        self.sums.send(exchanges[1], sums + [None] * (exchanges[1][0] - len(sums)))
        meanwhile()
        sums = self.sums.receive(exchanges[1], len(sums))
        squares, dots, crosses = sums[:n], sums[n : 2 * n], sums[2 * n :]
        logits = [vw * ptx.rsqrt(vv * self.inv_hidden + eps) for vv, vw in zip(squares, dots, strict=True)]
        _, p, s = softmax(logits, SPARE)
        if self.final:
            scale = ptx.reciprocal(s)
            p, s = [value * scale for value in p], Float32(1.0)
        mix = combine(p, [*(unpack_all(vecs, launder=True) for vecs in vb), x])
        terms = tree_sum([a * a * sq for a, sq in zip(p, squares, strict=True)])
        twice = tree_sum([p[i] * p[j] * cross for (i, j), cross in zip(pairs, crosses, strict=False)])
        return *self._square(exchanges[2], mix, terms, terms + 2.0 * twice), s

    def _load_statistics(self, mixture, scal, row, cols):
        """Returns (m, l, M) from the caller's statistics: mixture is un-normalised."""
        m, l = ptx.ld_scalar_pair(scal.toint() + Int64(row) * 8)
        scale = ptx.reciprocal(l)
        mean = []
        for col in cols:
            address = mixture.toint() + (Int64(row) * self.row_vecs + Int64(col)) * 32
            words = ptx.ld_vec(address) + ptx.ld_vec(address + 16)
            mean += [ptx.bits_to_f32(word) * scale for word in words]
        return m, l, mean

    def _take_source(self, source, row, cols, row_stride, slot_stride, fault, fault_tag, spin_budget):
        """Returns the delta row's vectors: loaded, or taken from the mailbox, which is re-armed."""
        addresses = [vec_address(source, row, row_stride, col) for col in cols]
        if not self.slots:
            return [ptx.ld_vec(address) for address in addresses]
        step = Int64(slot_stride) * 16
        frags = [[ptx.ld_vec_mailbox(address + step * slot) for address in addresses] for slot in range(self.slots)]
        step, totals = Int64(ptx.launder(slot_stride)) * 16, [None] * self.vectors
        for slot in range(self.slots):
            for i, address in enumerate(addresses):
                at = address + step * slot
                frag = _poll(at, frags[slot][i], fault, fault_tag, row, slot, cols[i], spin_budget)
                ptx.st_vec_mailbox(at, (Int32(ARMED),) * 4)
                if self.slots == 1:
                    totals[i] = frag
                elif slot == 0:
                    totals[i] = unpack(frag)
                else:
                    totals[i] = [a + b for a, b in zip(totals[i], unpack(frag), strict=True)]
        return totals if self.slots == 1 else [pack(total) for total in totals]

    @cute.jit
    def _store_prefix(self, vx, prefix_at, blocks_at, has_block: Boolean, aux_at, has_aux: Boolean):
        """Copies the updated prefix, bit for bit, to everywhere it is wanted."""
        for i in range_constexpr(self.vectors):
            ptx.st_vec(prefix_at[i], vx[i])
        if has_block:
            for i in range_constexpr(self.vectors):
                ptx.st_vec(blocks_at[i], vx[i])
        if has_aux:
            for i in range_constexpr(self.vectors):
                ptx.st_vec(aux_at[i], vx[i])

    def _fold(self, exchanges, x, w, m, l, mean, eps, meanwhile):
        """Returns (s mix, s^2 mix . mix, s): folds the updated prefix `x` into the mixture of the saved blocks.

        A : B = l exp(m) : exp(logit), divided by 2 l and by the larger exponential: A <= 1/2, B <= 1 / (2 l) or <= 1/2.
        `meanwhile` is called while the sums travel.
        """
        if self.stats:
            cute.arch.cluster_wait()
        share = 0.5 * ptx.reciprocal(l)
        self.sums.send(exchanges[1], [dot(x, w), dot(x, x), dot(mean, x), dot(mean, mean)])
        meanwhile()
        xw, xx, mx, mm = self.sums.receive(exchanges[1], 4)
        logit = xw * ptx.rsqrt(xx * self.inv_hidden + eps)
        larger = logit > m
        e = ptx.exp2(select(larger, m - logit, logit - m) * LOG2_E)
        a, b = select(larger, 0.5 * e, Float32(0.5)), select(larger, share, share * e)
        s = a + b
        if self.final:
            scale = ptx.reciprocal(s)
            a, b, s = a * scale, b * scale, Float32(1.0)
        terms = a * a * mm + b * b * xx
        return *self._square(exchanges[2], combine([a, b], [mean, x]), terms, terms + 2.0 * (a * b * mx)), s

    def _square(self, exchange, mix, terms, folded):
        """Returns (mix, mix . mix): from `folded` where that is sound, else from the elements."""
        if self.final:
            mix = round_bf16(mix)
            return mix, self.sums.exchange(exchange, [dot(mix, mix)])[0]
        return mix, self._sum_squares(exchange, mix, terms, folded)

    @cute.jit
    def _sum_squares(self, exchange, mix, terms: Float32, folded: Float32):
        """Returns mix . mix: `folded`, or an exchanged sum where `folded` has cancelled against its `terms`."""
        square = folded
        if folded < terms * CANCEL:
            (square,) = self.sums.exchange(exchange, [dot(mix, mix)])
        return square


def _nothing():
    pass


@cute.jit
def _poll(
    address: Int64, words, fault: cute.Pointer, tag: Int32, row: Int32, slot: Int32, col: Int32, spin_budget: Int32
):
    """Returns a mailbox vector once none of its words is the armed pattern; `words` is the first load."""
    w0, w1, w2, w3 = words
    polls = Int32(0)
    while (w0 == ARMED) | (w1 == ARMED) | (w2 == ARMED) | (w3 == ARMED):
        polls = polls + 1
        if (polls == spin_budget) & (spin_budget != 0):
            ptx.trap_with_record(fault.toint(), tag, row, slot, col)
        w0, w1, w2, w3 = ptx.ld_vec_mailbox(address)
    return w0, w1, w2, w3

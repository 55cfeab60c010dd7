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

Dependents are released at entry, so that their work before the delta overlaps. A kernel that has little (no blocks, or
statistics) releases them when that is done, which keeps the grids that follow from crowding it.

In a chain of dependent launches what follows the wait is the critical path, so as much as possible is done before it: the
delta's address is translated (a prefetch), the cluster barrier is passed, M . M is added up and left in shared memory,
which also keeps the compiler from putting M off. `late_stores` then store the updated prefix while the last exchange's
sums travel; where the GPU is full, stores that start early are worth more. With a mailbox nothing is waited for, the
whole kernel is the critical path, and its loads come before everything else.

Rounding points: d (several slots), P, mix (final), out. Everything else is fp32; w is a product of two bf16 and exact.
"""

from functools import partial

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from attnres_aot.kernels import ptx
from attnres_aot.kernels.row_sums import RowSums, bounce, padded
from attnres_aot.kernels.vectors import (
    VEC,
    add_bf16,
    col_address,
    combine,
    dot,
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
        self, hidden, nb, has_delta, final, slots, cluster, threads, vectors, min_ctas_per_sm, late_stores, early_look
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
          late_stores: store the updated prefix after the last exchange's sums are sent.
          early_look: load the mailbox before the exchange of the saved blocks' sums.
        """
        self.late_stores, self.early_look = late_stores, early_look
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
        if const_expr(self.nb > 0):
            cute.arch.griddepcontrol_launch_dependents()
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        row, rank = Int32(Uint32(cta) // self.cluster), Int32(Uint32(cta) % self.cluster)
        exchanges = None if self.slots else self.sums.open(tid, rank)
        cols = [(rank * self.vectors + i) * self.threads + tid for i in range(self.vectors)]
        vw = [(ptx.ld_vec_const(col_address(norm, c)), ptx.ld_vec_const(col_address(query, c))) for c in cols]
        blocks_from = [vec_address(blocks, row, blocks_row_stride, col) for col in cols]
        block_bytes = Int64(Uint32(blocks_block_stride)) * 16
        vb = [[ptx.ld_vec_const(at + block_bytes * s) for at in blocks_from] for s in range(self.nb)]
        w = [a * b for n, q in vw for a, b in zip(unpack(n), unpack(q), strict=True)]
        look = partial(self._look, source, row, cols, source_row_stride, source_slot_stride)
        looked = look() if self.early_look else None
        if const_expr(self.slots and self.split):
            exchanges = self.sums.open(tid, rank)
        m, l, mean = Float32(0.0), Float32(1.0), None
        if const_expr(self.split):
            m, l, mean = self._mix_blocks(exchanges, vb, w, eps)
        prefix_at = [vec_address(prefix, row, prefix_row_stride, col) for col in cols]
        vp = [ptx.ld_vec(address) for address in prefix_at] if self.has_delta else None
        vo = [ptx.ld_vec_const(col_address(out_norm, col)) for col in cols]
        if const_expr(self.slots and not self.early_look):
            looked = look()
        if const_expr(not self.slots):
            for i in range_constexpr(self.vectors):
                ptx.prefetch(vec_address(source, row, source_row_stride, cols[i]))
        if const_expr(self.slots and not self.split):
            exchanges = self.sums.open(tid, rank)
        if const_expr(self.nb == 0 and not self.slots):
            cute.arch.cluster_wait()
        if const_expr(self.nb == 0):
            cute.arch.griddepcontrol_launch_dependents()
        if const_expr(self.stats or not self.slots):
            cute.arch.griddepcontrol_wait()
        if const_expr(self.stats):
            m, l, mean = self._load_statistics(mixture, scal, row, cols)

        if const_expr(not self.slots):
            looked = look()
        vd = self._take(looked, row, cols, source_slot_stride, fault, fault_tag, spin_budget)
        vx = add_bf16(vp, vd) if self.has_delta else vd
        blocks_at = [address + block_bytes * write for address in blocks_from]
        aux_at = [vec_address(aux, row, aux_row_stride, col) for col in cols]
        store = partial(self._store_prefix, vx, prefix_at, blocks_at, write >= 0, aux_at, aux.toint() != 0)
        if const_expr(not self.late_stores):
            store()

        meanwhile = partial(self._meanwhile, store, vo)
        x = unpack_all(vx)
        if const_expr(self.gram):
            y = self._mix_all(exchanges, vb, x, w, eps, out_eps, meanwhile)
        else:
            y = self._fold(exchanges, x, w, m, l, mean, eps, out_eps, meanwhile)
        for i in range_constexpr(self.vectors):
            ptx.st_vec(vec_address(out, row, out_row_stride, cols[i]), pack(y[i * VEC : (i + 1) * VEC]))
        if const_expr(self.slots and not self.stats):
            # Later launches wait for this grid alone, so it must not finish before the grid that it follows.
            cute.arch.griddepcontrol_wait()

    def _mix_blocks(self, exchanges, vb, w, eps):
        """Returns (m, l, M) over the saved blocks: logits by one exchange, softmax in every thread, M per element."""
        logits = self.sums.logits(exchanges[0], [unpack_all(vecs) for vecs in vb], w, self.inv_hidden, eps)
        m, e, l = softmax(logits)
        scale = ptx.reciprocal(l)
        mean = combine([p * scale for p in e], [unpack_all(vecs, launder=True) for vecs in vb])
        if not self.slots:
            self.sums.leave_early(exchanges[1], dot(mean, mean))
        return m, l, mean

    def _mix_all(self, exchanges, vb, x, w, eps, out_eps, meanwhile):
        """Returns the output over the saved blocks and the updated prefix `x`, by one exchange of all sums.

        `meanwhile` is called while they travel and returns the output norm's weight.
        """
        if self.slots or self.nb > 0:
            cute.arch.cluster_wait()
        if self.nb == 0:
            self.sums.send(exchanges[1], [dot(x, x)])
            weight = meanwhile()
            (square,) = self.sums.receive(exchanges[1], 1)
            return _scale(x, self._inv_rms(square, out_eps), weight)
        v = [*(unpack_all(vecs) for vecs in vb), x]
        n = len(v)
        pairs = [(i, j) for i in range(n) for j in range(i)]
        sums = [dot(a, a) for a in v] + [dot(a, w) for a in v] + [dot(v[i], v[j]) for i, j in pairs]
        self.sums.send(exchanges[1], sums + [None] * (exchanges[1].count - len(sums)))
        weight = meanwhile()
        sums = self.sums.receive(exchanges[1], len(sums))
        squares, dots, crosses = sums[:n], sums[n : 2 * n], sums[2 * n :]
        logits = [vw * ptx.rsqrt(vv * self.inv_hidden + eps) for vv, vw in zip(squares, dots, strict=True)]
        _, p, s = softmax(logits, partial(quick_exp, halvings=SPARE))
        mix = combine(p, [*(unpack_all(vecs, launder=True) for vecs in vb), x])
        terms = tree_sum([a * a * sq for a, sq in zip(p, squares, strict=True)])
        twice = tree_sum([p[i] * p[j] * cross for (i, j), cross in zip(pairs, crosses, strict=False)])
        return self._norm(exchanges[2], mix, s, terms, terms + 2.0 * twice, weight, out_eps)

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

    def _look(self, source, row, cols, row_stride, slot_stride):
        """Returns the delta row's vectors by slot and the addresses of the first slot's; a mailbox may not be full yet."""
        addresses = [vec_address(source, row, row_stride, col) for col in cols]
        if not self.slots:
            return [[ptx.ld_vec(address) for address in addresses]], addresses
        step = Int64(slot_stride) * 16
        frags = [[ptx.ld_vec_mailbox(address + step * slot) for address in addresses] for slot in range(self.slots)]
        return frags, addresses

    def _take(self, looked, row, cols, slot_stride, fault, fault_tag, spin_budget):
        """Returns the delta row's vectors from what `_look` returned; a mailbox is polled until it is full, and re-armed."""
        frags, addresses = looked
        if not self.slots:
            return frags[0]
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

    def _meanwhile(self, store, vo):
        """What is done while the last exchange's sums travel; returns the output norm's weight."""
        if not self.late_stores:
            return unpack_all(vo)
        store()
        return [ptx.settle(element) for element in unpack_all(vo)]

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

    def _fold(self, exchanges, x, w, m, l, mean, eps, out_eps, meanwhile):
        """Returns the output: folds the updated prefix `x` into the mixture of the saved blocks.

        A : B = l exp(m) : exp(logit), divided by 2 l and by the larger exponential: A <= 1/2, B <= 1 / (2 l) or <= 1/2.
        `meanwhile` is called while the sums travel and returns the output norm's weight.
        """
        if self.stats and self.slots:
            cute.arch.cluster_wait()
        share = 0.5 * ptx.reciprocal(l)
        early = not self.slots and not self.stats
        last = None if early else dot(mean, mean)
        self.sums.send(exchanges[1], [dot(x, w), dot(x, x), dot(mean, x), last], early)
        weight = meanwhile()
        xw, xx, mx, mm = self.sums.receive(exchanges[1], 4)
        over = xw * ptx.rsqrt(xx * self.inv_hidden + eps) - m
        e = quick_exp(-ptx.fabs(over))
        a, b = select(over > 0.0, 0.5 * e, Float32(0.5)), select(over > 0.0, share, share * e)
        terms = a * a * mm + b * b * xx
        mix = combine([a, b], [mean, x])
        return self._norm(exchanges[2], mix, a + b, terms, terms + 2.0 * (a * b * mx), weight, out_eps)

    def _norm(self, exchange, mix, s, terms, folded, weight, out_eps):
        """Returns the output from s times the mixture: its square from `folded` where that is sound, else from the elements.

        What is multiplied in which order matters: a share and rsqrt may be so small that their product is none.
        """
        if self.final:
            scale = ptx.reciprocal(s)
            mix = round_bf16([scale * value for value in mix])
            (square,) = self.sums.exchange(exchange, [dot(mix, mix)])
            return _scale(mix, self._inv_rms(square, out_eps), weight)
        return _scale(mix, self._inv_rms_of(exchange, mix, terms, folded, out_eps * (s * s)), weight)

    def _inv_rms(self, square, floor):
        return ptx.rsqrt(square * self.inv_hidden + floor)

    @cute.jit
    def _inv_rms_of(self, exchange, mix, terms: Float32, folded: Float32, floor: Float32):
        """Returns rsqrt(mix . mix / H + floor): from `folded`, or an exchanged sum where that has cancelled against `terms`."""
        inv = self._inv_rms(folded, floor)
        if folded < terms * CANCEL:
            (square,) = self.sums.exchange(exchange, [dot(mix, mix)])
            inv = self._inv_rms(square, floor)
        return inv


def _scale(values, inv, weight):
    """(value * inv) * weight: in this order neither a large nor a small value leaves fp32's range before its time."""
    return [value * inv * factor for value, factor in zip(values, weight, strict=True)]


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

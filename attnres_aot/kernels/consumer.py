"""The AttnRes consumer: one fused pass over a token row of H bf16 elements, one cluster of CTAs per row.

Per row, with w = norm * query, over sources v_0 .. v_{nb-1} (saved blocks) and P (updated prefix):

    P       = bf16(prefix + d)            or d without delta;  d = delta row, or bf16(sum over mailbox slots)
    logit_s = (v_s . w) * rsqrt(v_s . v_s / H + eps)
    p       = softmax(logit_0 .. logit_{nb-1}),  M = sum_s p_s v_s,  m = max_s logit_s,  l = sum_s exp(logit_s - m)
    A : B   = l exp(m - t) : exp(logit_P - t),  t = max(m, logit_P),  A + B = 1
    mix     = A M + B P
    out     = bf16(mix * rsqrt(mix . mix / H + out_eps) * out_norm)

M is normalised, so no intermediate exceeds the largest source. What depends on the saved blocks alone (m, l, M) is
computed before the dependency wait; after it, one exchange of four sums remains, because

    mix . mix = A^2 (M . M) + 2 A B (M . P) + B^2 (P . P)

Where that sum cancels (below CANCEL of its positive terms) its rounding error would show, and the cluster agrees,
from identical bits, to sum the squares of mix itself. `final` always does, since it rounds mix to bf16 first.

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

Shared memory: three receive buffers of fp32 [K * T/32 senders][values], one per exchange, and three 8-byte mbarriers.

Synchronisation: thread 0 initialises the mbarriers, each with one arrival (its own) and the expected bytes, then the
cluster barrier shows them to every CTA before anybody sends. In an exchange each warp reduces its values with
shuffles and st.asyncs them to every CTA of the cluster; each CTA waits on its own mbarrier and every warp adds up the
same numbers in the same order, so all threads of the cluster hold the same bits. A mbarrier is used once. A CTA waits
for everything that is sent to it (the third exchange is entered by all or by none), so none exits while a peer still
writes to its memory.

Rounding points: d (several slots), P, mix (final), out. Everything else is fp32; w is a product of two bf16 and exact.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from attnres_aot.kernels import ptx

VEC = 8
"""bf16 elements in a 16-byte vector."""
WARP = 32
"""Threads of a warp."""
ARMED = -0x80000000
"""An empty mailbox word (0x80000000), as the signed integer that the compiler compares."""
LOG2_E = 1.4426950408889634
"""log2(e)."""
CANCEL = 2.0**-6
"""Share of its positive terms below which mix . mix is summed exactly: at 2**-6 an error of 2e-6 of the terms (18
roundings of fp32) becomes 1.3e-4 of the sum and 6.5e-5 of the output, well inside half a bf16 ulp (2e-3)."""


class Consumer:
    """Compiles to one image; the constructor's arguments are everything the code depends on."""

    def __init__(self, hidden, nb, has_delta, final, slots, cluster, threads, vectors, min_ctas_per_sm):
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
        """
        self.stats = nb is None
        self.nb = 0 if nb is None else nb
        self.has_delta, self.final, self.slots = has_delta, final, slots
        self.cluster, self.threads, self.vectors = cluster, threads, vectors
        self.min_ctas_per_sm = min_ctas_per_sm
        self.warps = threads // WARP
        self.part_stride = _round_up(self.warps, 4)
        self.inv_hidden = 1.0 / hidden
        self.row_vecs = hidden // VEC
        self.mixes = self.stats or self.nb > 0

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
        cute.arch.griddepcontrol_launch_dependents()
        tid, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.cluster_idx()
        rank = cute.arch.block_idx_in_cluster()
        exchanges = self._open_exchanges(tid, rank)

        cols = [(rank * self.vectors + i) * self.threads + tid for i in range(self.vectors)]
        blocks_from = [_vec_address(blocks, row, blocks_row_stride, col) for col in cols]
        block_bytes = Int64(blocks_block_stride) * 16
        vb = [
            [ptx.ld_vec_const(address + block_bytes * s) for address in blocks_from]
            for s in range(self.nb)
        ]
        vw = [(ptx.ld_vec_const(_col_address(norm, c)), ptx.ld_vec_const(_col_address(query, c))) for c in cols]
        prefix_at = [_vec_address(prefix, row, prefix_row_stride, col) for col in cols]
        vp = [ptx.ld_vec(address) for address in prefix_at] if self.has_delta else None
        vo = [ptx.ld_vec_const(_col_address(out_norm, col)) for col in cols]
        w = [a * b for n, q in vw for a, b in zip(_unpack(n), _unpack(q), strict=True)]

        m, l, mean = Float32(0.0), Float32(1.0), None
        if const_expr(self.nb > 0):
            m, l, mean = self._mix_blocks(exchanges[0], vb, w, eps)
        if const_expr(self.stats or not self.slots):
            cute.arch.griddepcontrol_wait()
        if const_expr(self.stats):
            m, l, mean = self._load_statistics(mixture, scal, row, cols)

        vd = self._take_source(
            source, row, cols, source_row_stride, source_slot_stride, fault, fault_tag, spin_budget
        )
        vx = _add_bf16(vp, vd) if self.has_delta else vd
        blocks_at = [address + block_bytes * write for address in blocks_from]
        aux_at = [_vec_address(aux, row, aux_row_stride, col) for col in cols]
        self._store_prefix(vx, prefix_at, blocks_at, write >= 0, aux_at, aux.toint() != 0)

        x = [element for vec in vx for element in _unpack(vec)]
        mix, inv = self._fold(exchanges, x, w, m, l, mean, eps, out_eps)
        weight = [element for vec in vo for element in _unpack(vec)]
        y = [value * inv * weight[i] for i, value in enumerate(mix)]
        for i in range_constexpr(self.vectors):
            ptx.st_vec(_vec_address(out, row, out_row_stride, cols[i]), _pack(y[i * VEC : (i + 1) * VEC]))
        if const_expr(self.slots and not self.stats):
            # Later launches wait for this grid alone, so it must not finish before the grid that it follows.
            cute.arch.griddepcontrol_wait()

    @cute.jit
    def _open_exchanges(self, tid: Int32, rank: Int32):
        """Declares shared memory, arms the mbarriers and arrives at the cluster barrier that shows them to peers."""
        counts = [max(4, _padded(2 * self.nb)) if self.nb else 0, 4 if self.mixes else 1, 1 if self.mixes else 0]
        bars = cute.arch.alloc_smem(cutlass.Int64, len(counts), alignment=8)
        sizes = [count * (self.part_stride + _round_up(self.cluster, 4)) for count in counts]
        floats = cute.arch.alloc_smem(Float32, sum(sizes), alignment=16)
        bar, base = Int32(bars.toint()), Int32(floats.toint())
        exchanges = []
        for i, count in enumerate(counts):
            parts = base + 4 * sum(sizes[:i])
            exchanges.append((count, parts, parts + 4 * count * self.part_stride, bar + 8 * i, rank, tid))
        if tid == 0:
            for i, count in enumerate(counts):
                if const_expr(count > 0):
                    ptx.mbarrier_expect(bar + 8 * i, 4 * self.cluster * count)
            cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()
        return exchanges

    def _mix_blocks(self, exchange, vb, w, eps):
        """Returns (m, l, M) over the saved blocks: logits by one exchange, softmax in every warp, M per element."""
        count, half = exchange[0], exchange[0] // 2
        sums = [Float32(0.0)] * count
        for s, vecs in enumerate(vb):
            v = [element for vec in vecs for element in _unpack(vec)]
            sums[s], sums[half + s] = _dot(v, v), _dot(v, w)
        cute.arch.cluster_wait()
        lane = cute.arch.lane_idx()
        totals = self._exchange(exchange, sums)
        mine = totals[0] if count > 4 else _pick(totals, lane)
        other = cute.arch.shuffle_sync_bfly(mine, half)
        is_square = (lane & half) == 0
        square, dot = _select(is_square, mine, other), _select(is_square, other, mine)
        logit = dot * ptx.rsqrt(square * self.inv_hidden + eps)
        logit = _select((lane & (half - 1)) < self.nb, logit, Float32(-float("inf")))
        m = logit
        for offset in _offsets(half // 2):
            m = ptx.fmax(m, cute.arch.shuffle_sync_bfly(m, offset))
        e = ptx.exp2((logit - m) * LOG2_E)
        l = e
        for offset in _offsets(half // 2):
            l = l + cute.arch.shuffle_sync_bfly(l, offset)
        share = e * ptx.reciprocal(l)
        mean = [Float32(0.0)] * len(w)
        for s, vecs in enumerate(vb):
            p = cute.arch.shuffle_sync(share, s)
            v = [element for vec in vecs for element in _unpack([ptx.launder(word) for word in vec])]
            mean = [total + p * element for total, element in zip(mean, v, strict=True)]
        return m, l, mean

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
        addresses = [_vec_address(source, row, row_stride, col) for col in cols]
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
                    totals[i] = _unpack(frag)
                else:
                    totals[i] = [a + b for a, b in zip(totals[i], _unpack(frag), strict=True)]
        return totals if self.slots == 1 else [_pack(total) for total in totals]

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

    def _fold(self, exchanges, x, w, m, l, mean, eps, out_eps):
        """Returns (mix, output norm factor): folds the updated prefix `x` into the mixture of the saved blocks."""
        if self.nb == 0:
            cute.arch.cluster_wait()
        if not self.mixes:
            (square,) = self._exchange(exchanges[1], [_dot(x, x)])
            return x, ptx.rsqrt(square * self.inv_hidden + out_eps)
        sums = [_dot(x, w), _dot(x, x), _dot(mean, x), _dot(mean, mean)]
        xw, xx, mx, mm = self._exchange(exchanges[1], sums)
        logit = xw * ptx.rsqrt(xx * self.inv_hidden + eps)
        top = ptx.fmax(m, logit)
        a = l * ptx.exp2((m - top) * LOG2_E)
        b = ptx.exp2((logit - top) * LOG2_E)
        scale = ptx.reciprocal(a + b)
        a, b = a * scale, b * scale
        mix = [a * mean[i] + b * element for i, element in enumerate(x)]
        if self.final:
            mix = _round_bf16(mix)
            (square,) = self._exchange(exchanges[2], [_dot(mix, mix)])
        else:
            terms = a * a * mm + b * b * xx
            square = self._sum_squares(exchanges[2], mix, terms, terms + 2.0 * (a * b * mx))
        return mix, ptx.rsqrt(square * self.inv_hidden + out_eps)

    @cute.jit
    def _sum_squares(self, exchange, mix, terms: Float32, folded: Float32):
        """Returns mix . mix: `folded`, or an exchanged sum where `folded` has cancelled against its `terms`."""
        square = folded
        if folded < terms * CANCEL:
            (square,) = self._exchange(exchange, [_dot(mix, mix)])
        return square

    def _exchange(self, exchange, values):
        """Adds `values` (1, 4 or a larger power of two) over the row.

        Returns the sums as a list of up to four, alike in all lanes; of more values, the list holds one sum, and lane
        i has that of values[i % count].
        """
        count, parts, received, barrier, rank, tid = exchange
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        mine = _reduce_scatter(values, lane)
        ptx.st_shared(parts + ((lane // (WARP // count)) * self.part_stride + warp) * 4, mine)
        cute.arch.sync_threads()
        packet = min(count, 4)
        for begin in range(0, count, self.warps * packet):
            first = begin + warp * packet
            owned = _select(first < count, first, Int32(0))
            sums = [self._sum_warps(parts + (owned + i) * self.part_stride * 4) for i in range(packet)]
            sends = Int32((first < count) & (lane < self.cluster))
            ptx.st_async(received + (rank * count + owned) * 4, barrier, lane, sums, sends)
        ptx.mbarrier_wait(barrier)
        if count == 1:
            parts = []
            for sender in range(0, self.cluster, 4):
                parts += ptx.ld_shared_vec(received + sender * 4)[: self.cluster - sender]
            return [_tree_sum(parts)]
        if count == 4:
            vecs = [ptx.ld_shared_vec(received + sender * 16) for sender in range(self.cluster)]
            return [_tree_sum(list(column)) for column in zip(*vecs, strict=True)]
        column = received + (lane % count) * 4
        return [_tree_sum([ptx.ld_shared(column + sender * count * 4) for sender in range(self.cluster)])]

    def _sum_warps(self, address):
        """Adds one value's partial sums over the warps of this CTA."""
        parts = []
        for warp in range(0, self.warps, 4):
            parts += ptx.ld_shared_vec(address + warp * 4)[: self.warps - warp]
        return _tree_sum(parts)


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


def _reduce_scatter(values, lane):
    """Adds each of `values` over the warp's lanes; lane i returns the sum of values[i // (32 / count)]."""
    offset = WARP // 2
    while len(values) > 1:
        half = len(values) // 2
        upper = (lane & offset) != 0
        keep = [_select(upper, values[half + i], values[i]) for i in range(half)]
        send = [_select(upper, values[i], values[half + i]) for i in range(half)]
        values = [k + cute.arch.shuffle_sync_bfly(s, offset) for k, s in zip(keep, send, strict=True)]
        offset //= 2
    total = values[0]
    for step in _offsets(offset):
        total = total + cute.arch.shuffle_sync_bfly(total, step)
    return total


def _pick(values, lane):
    """values[lane % len(values)], for a power of two of them."""
    bit = 1
    while len(values) > 1:
        odd = (lane & bit) != 0
        values = [_select(odd, b, a) for a, b in zip(values[::2], values[1::2], strict=True)]
        bit *= 2
    return values[0]


def _tree_sum(parts):
    """Adds fp32 values pairwise."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)] + parts[len(parts) // 2 * 2 :]
    return parts[0]


def _round_up(count, multiple):
    return -(-count // multiple) * multiple


def _offsets(first, last=1):
    """Powers of two from `first` down to `last`; empty when first < last."""
    offsets = []
    while first >= last:
        offsets.append(first)
        first //= 2
    return offsets


def _padded(count):
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def _select(condition, yes, no):
    return cutlass.select_(condition, yes, no)


def _col_address(pointer, col):
    return pointer.toint() + Int64(Uint32(col) * 16)


def _vec_address(pointer, row, row_stride, col):
    return pointer.toint() + Int64(row) * Int64(row_stride) * 16 + Int64(Uint32(col) * 16)


def _unpack(words):
    """The 8 bf16 of a vector as fp32."""
    return [ptx.bits_to_f32(bits) for word in words for bits in (word << 16, word & -0x10000)]


def _pack(elements):
    """Rounds 8 fp32 to a vector of bf16."""
    return tuple(ptx.pack_bf16(elements[i], elements[i + 1]) for i in range(0, VEC, 2))


def _round_bf16(elements):
    """Rounds fp32 values to bf16 and back."""
    return [r for i in range(0, len(elements), VEC) for r in _unpack(_pack(elements[i : i + VEC]))]


def _add_bf16(va, vb):
    """Adds vectors in fp32 and rounds once, as torch adds bf16."""
    return [
        _pack([x + y for x, y in zip(_unpack(a), _unpack(b), strict=True)]) for a, b in zip(va, vb, strict=True)
    ]


def _dot(a, b):
    """Dot product of two lists of fp32, in two chains."""
    chains = [a[0] * b[0], a[1] * b[1]]
    for i in range(2, len(a)):
        chains[i % 2] = chains[i % 2] + a[i] * b[i]
    return chains[0] + chains[1]

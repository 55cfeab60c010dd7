"""Statistics of the saved blocks: what a consumer with precomputed statistics takes instead of reading them.

Per row, with w = norm * query, over saved blocks v_0 .. v_{nb-1}:

    logit_s = (v_s . w) * rsqrt(v_s . v_s / H + eps)
    m       = max_s logit_s
    e_s     = exp(logit_s - m)
    l       = sum_s e_s
    mixture = sum_s e_s v_s          (un-normalised: the consumer divides by l)

| operand     | shape        | type | strides            | align | access |
|-------------|--------------|------|--------------------|-------|--------|
| blocks      | [rows, B, H] | bf16 | row, block dynamic | 16 B  | 0..nb-1 read before the dependency wait |
| norm, query | [H]          | bf16 | 1                  | 16 B  | read before the dependency wait |
| mixture     | [cap, H]     | fp32 | H, 1               | 16 B  | written after the dependency wait |
| scal        | [cap, 2]     | fp32 | 2, 1               | 8 B   | written after the dependency wait: (m, l) |

Threads to elements: CTA `rank` of the cluster's K and thread `tid` of T own the vectors (8 elements)
(rank * V + i) * T + tid of the row, i < V, where K * T * V * 8 = H. A vector of blocks is 16 bytes, one of mixture 32.

Shared memory, fp32: the warps' sums [values][T/32], the receive buffer [K senders][values], and one 8-byte mbarrier;
values = max(4, 2 nb rounded up to a power of two): v_s . v_s in the lower half, v_s . w in the upper.

Synchronisation: thread 0 initialises the mbarrier with one arrival (its own) and the bytes to expect, and the cluster
barrier shows it to every CTA before anybody sends. Each warp reduces its values with shuffles; after a CTA barrier the
sums over the CTA's warps are st.async'd to every CTA of the cluster, four at a time; each CTA waits on its own
mbarrier, so it has received all that is ever sent to it before it exits. Every warp adds the same numbers in the same
order, so the whole row is weighted by the same bits.

Order of launches: dependents are released at entry, so a consumer may start early; it waits for this grid before it
reads statistics. This grid waits before it writes them, because the grid before it may be a consumer that still reads
the last ones, and because later grids that wait for this one rely on everything before it being complete too.

Rounding points: none but fp32's own; w is a product of two bf16 and exact.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, range_constexpr

from attnres_aot.kernels import ptx
from attnres_aot.kernels.consumer import (
    LOG2_E,
    VEC,
    WARP,
    _col_address,
    _dot,
    _offsets,
    _padded,
    _reduce_scatter,
    _round_up,
    _select,
    _tree_sum,
    _unpack,
    _vec_address,
)

PACKET = 4
"""Values that one st.async sends."""


class Statistics:
    """Compiles to one image; the constructor's arguments are everything the code depends on."""

    def __init__(self, hidden, nb, cluster, threads, vectors, min_ctas_per_sm):
        """Fixes the code's constants.

        Args:
          hidden: row length H in elements, cluster * threads * vectors * 8.
          nb: saved blocks read, 1..8.
          cluster: CTAs per row, at most 8.
          threads: threads per CTA, a multiple of 32.
          vectors: 16-byte vectors per thread.
          min_ctas_per_sm: CTAs that must fit one SM together, which bounds the registers per thread.
        """
        self.nb = nb
        self.cluster, self.threads, self.vectors = cluster, threads, vectors
        self.min_ctas_per_sm = min_ctas_per_sm
        self.warps = threads // WARP
        self.count = max(PACKET, 2 * _padded(nb))
        self.part_stride = _round_up(self.warps, 4)
        self.inv_hidden = 1.0 / hidden
        self.row_vecs = hidden // VEC

    @cute.jit
    def __call__(
        self,
        blocks: cute.Pointer,
        norm: cute.Pointer,
        query: cute.Pointer,
        mixture: cute.Pointer,
        scal: cute.Pointer,
        blocks_row_stride: Int32,
        blocks_block_stride: Int32,
        rows: Int32,
        eps: Float32,
        stream,
    ):
        """Launches one cluster per row; parameters are `attnres_aot.abi.STATISTICS_PARAMS`, strides in vectors."""
        self.kernel(blocks, norm, query, mixture, scal, blocks_row_stride, blocks_block_stride, rows, eps).launch(
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
        blocks: cute.Pointer,
        norm: cute.Pointer,
        query: cute.Pointer,
        mixture: cute.Pointer,
        scal: cute.Pointer,
        blocks_row_stride: Int32,
        blocks_block_stride: Int32,
        rows: Int32,
        eps: Float32,
    ):
        """Device body: one row per cluster."""
        cute.arch.griddepcontrol_launch_dependents()
        tid, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.cluster_idx()
        rank = cute.arch.block_idx_in_cluster()
        parts, received, barrier = self._open_exchange(tid)

        cols = [(rank * self.vectors + i) * self.threads + tid for i in range(self.vectors)]
        blocks_from = [_vec_address(blocks, row, blocks_row_stride, col) for col in cols]
        block_bytes = Int64(blocks_block_stride) * 16
        vb = [[ptx.ld_vec_const(at + block_bytes * s) for at in blocks_from] for s in range(self.nb)]
        vw = [(ptx.ld_vec_const(_col_address(norm, c)), ptx.ld_vec_const(_col_address(query, c))) for c in cols]
        w = [a * b for n, q in vw for a, b in zip(_unpack(n), _unpack(q), strict=True)]

        total = self._exchange(self._sums(vb, w), parts, received, barrier, rank)
        m, l, e = self._softmax(total, eps)
        mixture_rows = [Float32(0.0)] * len(w)
        for s, vecs in enumerate(vb):
            weight = cute.arch.shuffle_sync(e, s)
            v = [element for vec in vecs for element in _unpack([ptx.launder(word) for word in vec])]
            mixture_rows = [total + weight * element for total, element in zip(mixture_rows, v, strict=True)]

        cute.arch.griddepcontrol_wait()
        for i in range_constexpr(self.vectors):
            at = mixture.toint() + (Int64(row) * self.row_vecs + Int64(cols[i])) * 32
            ptx.st_f32(at, mixture_rows[i * VEC : i * VEC + 4])
            ptx.st_f32(at + 16, mixture_rows[i * VEC + 4 : (i + 1) * VEC])
        self._store_scalars((rank == 0) & (tid == 0), scal.toint() + Int64(row) * 8, m, l)

    @cute.jit
    def _open_exchange(self, tid: Int32):
        """Declares shared memory, arms the mbarrier and arrives at the cluster barrier that shows it to peers."""
        bar = cute.arch.alloc_smem(cutlass.Int64, 1, alignment=8)
        floats = cute.arch.alloc_smem(Float32, self.count * (self.part_stride + self.cluster), alignment=16)
        barrier, parts = Int32(bar.toint()), Int32(floats.toint())
        if tid == 0:
            ptx.mbarrier_expect(barrier, 4 * self.cluster * self.count)
            cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()
        return parts, parts + 4 * self.count * self.part_stride, barrier

    def _sums(self, vb, w):
        """This thread's share of v . v and v . w of every saved block."""
        half = self.count // 2
        sums = [Float32(0.0)] * self.count
        for s, vecs in enumerate(vb):
            v = [element for vec in vecs for element in _unpack(vec)]
            sums[s], sums[half + s] = _dot(v, v), _dot(v, w)
        return sums

    def _exchange(self, sums, parts, received, barrier, rank):
        """Adds values over the row; lane i returns the sum of values[i % count]."""
        count, lane, warp = self.count, cute.arch.lane_idx(), cute.arch.warp_idx()
        mine = _reduce_scatter(sums, lane)
        ptx.st_shared(parts + ((lane // (WARP // count)) * self.part_stride + warp) * 4, mine)
        cute.arch.cluster_wait()
        cute.arch.sync_threads()
        for begin in range(0, count, self.warps * PACKET):
            first = begin + warp * PACKET
            owned = _select(first < count, first, Int32(0))
            packet = [self._sum_warps(parts + (owned + i) * self.part_stride * 4) for i in range(PACKET)]
            sends = Int32((first < count) & (lane < self.cluster))
            ptx.st_async(received + (rank * count + owned) * 4, barrier, lane, packet, sends)
        ptx.mbarrier_wait(barrier)
        column = received + (lane % count) * 4
        return _tree_sum([ptx.ld_shared(column + sender * count * 4) for sender in range(self.cluster)])

    def _sum_warps(self, address):
        """Adds one value's partial sums over the warps of this CTA."""
        sums = []
        for warp in range(0, self.warps, 4):
            sums += ptx.ld_shared_vec(address + warp * 4)[: self.warps - warp]
        return _tree_sum(sums)

    def _softmax(self, total, eps):
        """Returns (m, l, e): the largest logit, the sum of exponentials, and e_s in lane s."""
        half, lane = self.count // 2, cute.arch.lane_idx()
        other = cute.arch.shuffle_sync_bfly(total, half)
        is_square = (lane & half) == 0
        square, dot = _select(is_square, total, other), _select(is_square, other, total)
        logit = dot * ptx.rsqrt(square * self.inv_hidden + eps)
        logit = _select((lane & (half - 1)) < self.nb, logit, Float32(-float("inf")))
        m = logit
        for offset in _offsets(half // 2):
            m = ptx.fmax(m, cute.arch.shuffle_sync_bfly(m, offset))
        e = ptx.exp2((logit - m) * LOG2_E)
        l = e
        for offset in _offsets(half // 2):
            l = l + cute.arch.shuffle_sync_bfly(l, offset)
        return m, l, e

    @cute.jit
    def _store_scalars(self, is_first: Boolean, address: Int64, m: Float32, l: Float32):
        """One thread of the row writes (m, l)."""
        if is_first:
            ptx.st_f32(address, [m, l])

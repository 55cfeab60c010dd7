"""Statistics of the saved blocks: what a consumer with precomputed statistics takes instead of reading them.

Per row, with w = norm * query, over saved blocks v_0 .. v_{nb-1}:

    logit_s = (v_s . w) * rsqrt(v_s . v_s / H + eps)
    m       = max_s logit_s
    e_s     = exp(logit_s - m)
    l       = sum_s e_s
    mixture = sum_s e_s v_s          (un-normalised, as the consumer takes it)

| operand     | shape        | type | strides            | align | read | written |
|-------------|--------------|------|--------------------|-------|------|---------|
| blocks      | [rows, B, H] | bf16 | row, block dynamic | 16 B  | 0..nb-1: before the wait | |
| norm, query | [H]          | bf16 | 1                  | 16 B  | before the wait | |
| mixture     | [cap, H]     | fp32 | H, 1               | 16 B  | | after the wait |
| scal        | [cap, 2]     | fp32 | 2, 1               | 8 B   | | after the wait, last: (m, l) |

"The wait" is the dependency wait (griddepcontrol.wait). Parameters are `attnres_aot.spec.params.STATISTICS_PARAMS`.

Threads to elements: CTA `rank` of the cluster's K and thread `tid` of T own the vectors (8 elements)
(rank * V + i) * T + tid of the row, i < V, as far as the row has them (K * T * V * 8 is H or more). A vector of blocks is
16 bytes, one of mixture 32.

Shared memory and synchronisation are those of `row_sums`: one exchange, of v_s . v_s and v_s . w for every block, padded to N
values. With nb 8 and T = 128, N is 16: the exchange is at offset 0, rooms at 1280, the mbarrier at 1792, 1800 bytes in all.

Order of launches: dependents are released at entry, so a consumer may start early; it waits for this grid before it
reads statistics. This grid waits before it writes them, because the grid before it may be a consumer that still reads
the last ones, and because later grids that wait for this one rely on everything before it being complete too.

Rounding points: none but fp32's own; w is a product of two bf16 and exact.
"""

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int64, range_constexpr

from attnres_aot.kernels import ptx
from attnres_aot.kernels.row_sums import PACKET, RowSums, padded
from attnres_aot.kernels.vectors import VEC, combine, load_sources, row_and_rank, share_of_row, softmax, unpack_all


class Statistics:
    """Compiles to one image; the constructor's arguments are everything the code depends on."""

    def __init__(self, hidden, nb, cluster, threads, vectors, min_ctas_per_sm):
        """Fixes the code's constants.

        Args:
          hidden: row length H in elements, at most cluster * threads * vectors * 8.
          nb: saved blocks read, 1..16.
          cluster: CTAs per row, at most 8.
          threads: threads per CTA, a multiple of 32.
          vectors: 16-byte vectors per thread.
          min_ctas_per_sm: CTAs that must fit one SM together, which bounds the registers per thread.
        """
        self.nb = nb
        self.cluster, self.threads, self.vectors = cluster, threads, vectors
        self.min_ctas_per_sm = min_ctas_per_sm
        self.sums = RowSums(cluster, threads, (max(PACKET, padded(2 * nb)),))
        self.inv_hidden = 1.0 / hidden
        self.row_vecs = hidden // VEC

    @cute.jit
    def __call__(self, p, stream):
        """Launches one cluster per row."""
        self.kernel(p).launch(
            grid=(self.cluster * p.rows, 1, 1),
            block=(self.threads, 1, 1),
            cluster=(self.cluster, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=self.min_ctas_per_sm,
            preferred_smem_carveout=0,  # unused by our launches; unset, the DSL would ask a driver for it
        )

    @cute.kernel
    def kernel(self, p):
        """Device body: one row per cluster."""
        cute.arch.griddepcontrol_launch_dependents()
        tid, row, rank = row_and_rank(self.cluster)
        (exchange,) = self.sums.open(tid, rank)
        share = share_of_row(self, tid, row, rank)
        w, vb, _ = load_sources(p, self.nb, share, ptx.ld_vec_const)  # [V * 8] fp32, [nb][V] vectors

        self.sums.leave_products(exchange, [unpack_all(vecs) for vecs in vb], w)
        cute.arch.cluster_wait()
        self.sums.dispatch(exchange)
        logits = self.sums.receive_logits(exchange, self.nb, self.inv_hidden, p.eps)  # [nb]
        m, e, l = softmax(logits)  # e: [nb]
        mixed = combine(e, [unpack_all(vecs, launder=True) for vecs in vb])  # [V * 8]

        cute.arch.griddepcontrol_wait()
        for i in range_constexpr(self.vectors):
            at = p.mixture.toint() + (Int64(row) * self.row_vecs + Int64(share.cols[i])) * 32
            ptx.st_f32(at, mixed[i * VEC : i * VEC + 4], share.on[i])
            ptx.st_f32(at + 16, mixed[i * VEC + 4 : (i + 1) * VEC], share.on[i])
        self._store_scalars((rank == 0) & (tid == 0), p.scal.toint() + Int64(row) * 8, m, l)

    @cute.jit
    def _store_scalars(self, is_first: Boolean, address: Int64, m: Float32, l: Float32):
        """One thread of the row writes (m, l)."""
        if is_first:
            ptx.st_f32(address, [m, l])

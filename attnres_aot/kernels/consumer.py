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
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int64, range_constexpr

from attnres_aot.kernels import ptx
from attnres_aot.kernels.mailbox import Mailbox
from attnres_aot.kernels.row_sums import PACKET, RowSums, padded
from attnres_aot.kernels.vectors import (
    LOG2_E,
    VEC,
    add_bf16,
    combine,
    dot,
    load_row,
    load_sources,
    load_weight,
    logit,
    overflow,
    pack,
    quick_exp,
    round_bf16,
    row_and_rank,
    select,
    share_of_row,
    softmax,
    tree_sum,
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


class Mixture(NamedTuple):
    """The mixture of all sources, not yet normalised."""

    mix: list
    """[V * 8] fp32, s times the mixture."""
    s: Float32
    """Sum of all shares."""
    square: Float32
    """Mean square of `mix` plus out_eps s^2."""
    cancelled: Boolean
    """That has cancelled and is not to be used."""


class Consumer:
    """Compiles to one image; the constructor's arguments are everything the code depends on."""

    def __init__(self, hidden, nb, has_delta, final, slots, cluster, threads, vectors, min_ctas_per_sm, early_loads):
        """Fixes the code's constants.

        Args:
          hidden: row length H in elements, at most cluster * threads * vectors * 8.
          nb: saved blocks read, 0..16, or None to take precomputed statistics; 0 with an ordinary source only.
          has_delta: add the source to the prefix.
          final: round the mixture to bf16 before the output norm.
          slots: mailbox slots, or 0 for an ordinary source.
          cluster: CTAs per row, at most 8.
          threads: threads per CTA, a multiple of 32.
          vectors: 16-byte vectors per thread.
          min_ctas_per_sm: CTAs that must fit one SM together, which bounds the registers per thread.
          early_loads: load what is needed besides the blocks while the sums of the blocks travel, not after that.
        """
        self.nb, self.has_delta, self.final, self.early_loads = nb or 0, has_delta, final, early_loads
        self.cluster, self.threads, self.vectors = cluster, threads, vectors
        self.min_ctas_per_sm = min_ctas_per_sm
        self.inv_hidden = 1.0 / hidden
        self.row_vecs = hidden // VEC
        self.load = ptx.ld_vec if slots else ptx.ld_vec_const  # ptxas puts read-only loads off, until after the wait
        self.mailbox = Mailbox(slots, vectors) if slots else None
        self.schedule, counts = self._choose(nb, slots)
        self.sums = RowSums(cluster, threads, counts)

    def _choose(self, nb, slots):
        """Returns the schedule, and how many values its exchanges sum: of the blocks alone, of everything, of mix itself."""
        if nb is None:
            return (self._mailbox_statistics if slots else self._statistics), (0, 4, 1)
        if nb == 0:
            assert not slots, "no mailbox without saved blocks"
            return self._norm_only, (0, 1, 0)
        if slots and nb <= GRAM_BLOCKS:
            return self._mailbox_gram, (0, padded((nb + 1) * (nb + 4) // 2), 1)
        return (self._mailbox_split if slots else self._ordinary), (max(PACKET, padded(2 * nb)), 4, 1)

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
        """Device body: one row per cluster, by the schedule of this image."""
        self.schedule(p)

    def _ordinary(self, p):
        """An ordinary source: the blocks are mixed before the wait."""
        cute.arch.griddepcontrol_launch_dependents()
        tid, row, rank = row_and_rank(self.cluster)
        of_blocks, of_all, of_mix = self.sums.open(tid, rank)
        share = share_of_row(self, tid, row, rank)
        w, vb, step = load_sources(p, self.nb, share, self.load)  # [V * 8] fp32, [nb][V] vectors
        self.sums.leave_products(of_blocks, [unpack_all(vecs) for vecs in vb], w)
        cute.arch.cluster_wait()
        self.sums.dispatch(of_blocks)
        rest = self._load_rest(p, share) if self.early_loads else None
        m, l, mixed = self._mix_blocks(of_blocks, vb, p.eps)  # fp32, fp32, [V * 8] fp32
        self.sums.leave_early(of_all, dot(mixed, mixed))
        vp, vo = rest or self._load_rest(p, share)  # [V] vectors each
        self._prefetch_source(p, share)
        cute.arch.griddepcontrol_wait()
        vx = self._update(vp, load_row(p.source, p.source_row_stride, share, ptx.ld_vec))  # [V] vectors
        copies = self._copies(p, step)
        x = unpack_all(vx)  # [V * 8] fp32
        self.sums.send(of_all, [dot(x, w), dot(x, x), dot(mixed, x), None], last_is_left=True)
        out_at = self._store_prefix(p, share, vx, copies)
        weight = unpack_all(vo)  # [V * 8] fp32
        sums = self.sums.receive(of_all, 4)
        mixture = self._fold(p, x, m, l, mixed, sums)
        self._finish(p, share, of_mix, mixture, weight, out_at)

    def _mailbox_split(self, p):
        """A mailbox and many blocks: these are mixed in the shadow of the first look, or before it where registers are few."""
        cute.arch.griddepcontrol_launch_dependents()
        tid, row, rank = row_and_rank(self.cluster)
        share = share_of_row(self, tid, row, rank)
        w, vb, step = load_sources(p, self.nb, share, self.load)  # [V * 8] fp32, [nb][V] vectors
        of_blocks, of_all, of_mix = self._open_and_wait(tid, rank)
        self.sums.leave_products(of_blocks, [unpack_all(vecs) for vecs in vb], w)
        self.sums.dispatch(of_blocks)
        seen = self._wait_and_look(p, share) if self.early_loads else None
        m, l, mixed = self._mix_blocks(of_blocks, vb, p.eps)  # fp32, fp32, [V * 8] fp32
        vp, vo, looked = seen or self._wait_and_look(p, share)
        vx = self._update(vp, self.mailbox.take(p, share, looked))  # [V] vectors
        vo = vo or load_weight(p.out_norm, share, self.load)  # [V] vectors
        copies = self._copies(p, step)
        x = unpack_all(vx)  # [V * 8] fp32
        own = dot(mixed, mixed)
        self.sums.send(of_all, [dot(x, w), dot(x, x), dot(mixed, x), own])
        out_at = self._store_prefix(p, share, vx, copies)
        weight = unpack_all(vo)  # [V * 8] fp32
        sums = self.sums.receive(of_all, 4)
        mixture = self._fold(p, x, m, l, mixed, sums)
        self._finish(p, share, of_mix, mixture, weight, out_at)
        cute.arch.griddepcontrol_wait()  # later launches wait for this grid alone: it must not end before the one it follows

    def _mailbox_gram(self, p):
        """A mailbox and few blocks: one exchange of the products of all sources."""
        cute.arch.griddepcontrol_launch_dependents()
        tid, row, rank = row_and_rank(self.cluster)
        share = share_of_row(self, tid, row, rank)
        w, vb, step = load_sources(p, self.nb, share, self.load)  # [V * 8] fp32, [nb][V] vectors
        vp, vo, looked = self._wait_and_look(p, share)
        _, of_all, of_mix = self._open_and_wait(tid, rank)
        vx = self._update(vp, self.mailbox.take(p, share, looked))  # [V] vectors
        vo = vo or load_weight(p.out_norm, share, self.load)  # [V] vectors
        copies = self._copies(p, step)
        x = unpack_all(vx)  # [V * 8] fp32
        v = [*(unpack_all(vecs) for vecs in vb), x]  # [nb + 1][V * 8] fp32
        products = [dot(a, a) for a in v] + [dot(a, w) for a in v] + [dot(v[i], v[j]) for i, j in self._pairs()]
        self.sums.send(of_all, products + [None] * (of_all.count - len(products)))
        out_at = self._store_prefix(p, share, vx, copies)
        weight = unpack_all(vo)  # [V * 8] fp32
        sums = self.sums.receive(of_all, len(products))
        mixture = self._mix_all(p, vb, x, sums)
        self._finish(p, share, of_mix, mixture, weight, out_at)
        cute.arch.griddepcontrol_wait()  # as above

    def _statistics(self, p):
        """Statistics in the place of blocks, and an ordinary source: nothing but weights and the prefix before the wait."""
        tid, row, rank = row_and_rank(self.cluster)
        _, of_all, of_mix = self.sums.open(tid, rank)
        share = share_of_row(self, tid, row, rank)
        w, _, step = load_sources(p, 0, share, self.load)  # [V * 8] fp32
        vp, vo = self._load_rest(p, share)  # [V] vectors each
        self._prefetch_source(p, share)
        cute.arch.cluster_wait()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        m, l, mixed = self._load_statistics(p, share)  # fp32, fp32, [V * 8] fp32
        vx = self._update(vp, load_row(p.source, p.source_row_stride, share, ptx.ld_vec))  # [V] vectors
        copies = self._copies(p, step)
        x = unpack_all(vx)  # [V * 8] fp32
        own = dot(mixed, mixed)
        self.sums.send(of_all, [dot(x, w), dot(x, x), dot(mixed, x), own])
        out_at = self._store_prefix(p, share, vx, copies)
        weight = unpack_all(vo)  # [V * 8] fp32
        sums = self.sums.receive(of_all, 4)
        mixture = self._fold(p, x, m, l, mixed, sums, overflow(sums[3]))
        self._finish(p, share, of_mix, mixture, weight, out_at)

    def _mailbox_statistics(self, p):
        """Statistics in the place of blocks, and a mailbox: its first look is before the wait for the statistics."""
        tid, row, rank = row_and_rank(self.cluster)
        share = share_of_row(self, tid, row, rank)
        w, _, step = load_sources(p, 0, share, self.load)  # [V * 8] fp32
        vp, vo, looked = self._wait_and_look(p, share)
        _, of_all, of_mix = self._open_and_wait(tid, rank)
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        m, l, mixed = self._load_statistics(p, share)  # fp32, fp32, [V * 8] fp32
        vx = self._update(vp, self.mailbox.take(p, share, looked))  # [V] vectors
        vo = vo or load_weight(p.out_norm, share, self.load)  # [V] vectors
        copies = self._copies(p, step)
        x = unpack_all(vx)  # [V * 8] fp32
        own = dot(mixed, mixed)
        self.sums.send(of_all, [dot(x, w), dot(x, x), dot(mixed, x), own])
        out_at = self._store_prefix(p, share, vx, copies)
        weight = unpack_all(vo)  # [V * 8] fp32
        sums = self.sums.receive(of_all, 4)
        mixture = self._fold(p, x, m, l, mixed, sums, overflow(sums[3]))
        self._finish(p, share, of_mix, mixture, weight, out_at)

    def _norm_only(self, p):
        """No block: the updated prefix is the mixture."""
        tid, row, rank = row_and_rank(self.cluster)
        _, of_all, _ = self.sums.open(tid, rank)
        share = share_of_row(self, tid, row, rank)
        _, _, step = load_sources(p, 0, share, self.load)
        vp, vo = self._load_rest(p, share)  # [V] vectors each
        self._prefetch_source(p, share)
        cute.arch.cluster_wait()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        vx = self._update(vp, load_row(p.source, p.source_row_stride, share, ptx.ld_vec))  # [V] vectors
        copies = self._copies(p, step)
        x = unpack_all(vx)  # [V * 8] fp32
        self.sums.send(of_all, [dot(x, x)])
        out_at = self._store_prefix(p, share, vx, copies)
        weight = unpack_all(vo)  # [V * 8] fp32
        (square,) = self.sums.receive(of_all, 1)
        _store(out_at, share, x, self._inv_rms(square, p.out_eps) + overflow(square), weight)

    def _open_and_wait(self, tid, rank):
        """Opens the exchanges when loads are under way, in whose shadow the CTAs of a row wait for one another."""
        exchanges = self.sums.open(tid, rank)
        cute.arch.cluster_wait()
        return exchanges

    def _load_prefix(self, p, share):
        return load_row(p.prefix, p.prefix_row_stride, share, ptx.ld_vec) if self.has_delta else None

    def _load_rest(self, p, share):
        """Loads the prefix, where it is wanted, and the output norm's weight: [V] vectors each."""
        return self._load_prefix(p, share), load_weight(p.out_norm, share, self.load)

    def _wait_and_look(self, p, share):
        """Loads the prefix, and the output norm's weight if the registers allow it; waits, unless `early`; looks at the mailbox."""
        vp = self._load_prefix(p, share)
        vo = load_weight(p.out_norm, share, self.load) if self.early_loads else None
        ptx.griddepcontrol_wait_unless(p.early)
        return vp, vo, self.mailbox.look(p, share)

    def _prefetch_source(self, p, share):
        """Has the delta's address translated."""
        for col in share.cols:
            ptx.prefetch(vec_address(p.source, share.row, p.source_row_stride, col))

    def _update(self, vp, vd):
        """The updated prefix, from the prefix and the delta."""
        return add_bf16(vp, vd) if self.has_delta else vd

    def _load_statistics(self, p, share):
        """Returns (m, l, M), as `_mix_blocks` does, from the caller's statistics."""
        m, l = ptx.ld_scalar_pair(p.scal.toint() + Int64(share.row) * 8)
        words = []
        for col, on in zip(share.cols, share.on, strict=True):
            address = p.mixture.toint() + (Int64(share.row) * self.row_vecs + Int64(col)) * 32
            words += ptx.ld_vec(address, on) + ptx.ld_vec(address + 16, on)
        return m, l * 2.0**-SPARE, [ptx.bits_to_f32(word) * 2.0**-SPARE for word in words]

    def _mix_blocks(self, exchange, vb, eps):
        """Returns (m, l, M) over the saved blocks, l and M by 2**SPARE too small: softmax in every thread, M per element."""
        logits = self.sums.receive_logits(exchange, self.nb, self.inv_hidden, eps)  # [nb]
        m, e, l = softmax(logits, partial(quick_exp, halvings=SPARE))  # e: [nb]
        return m, l, combine(e, [unpack_all(vecs, launder=True) for vecs in vb])

    def _copies(self, p, step):
        """Which copies of the updated prefix are wanted: (offset of the written block in bytes, is there one, is there aux)."""
        return step * p.write, p.write >= 0, p.aux.toint() != 0

    def _store_prefix(self, p, share, vx, copies):
        """Copies the updated prefix, bit for bit, to everywhere it is wanted; returns the output's addresses, [V].

        All addresses are worked out here, while the last exchange's sums travel.
        """
        block, has_block, has_aux = copies
        row, cols = share.row, share.cols
        prefix_at = [vec_address(p.prefix, row, p.prefix_row_stride, col) for col in cols]
        block_at = [vec_address(p.blocks, row, p.blocks_row_stride, col) + block for col in cols]
        aux_at = [vec_address(p.aux, row, p.aux_row_stride, col) for col in cols]
        out_at = [vec_address(p.out, row, p.out_row_stride, col) for col in cols]
        self._store_copies(vx, prefix_at, block_at, aux_at, share.on, has_block, has_aux)
        return out_at

    @cute.jit
    def _store_copies(self, vx, prefix_at, block_at, aux_at, on, has_block: Boolean, has_aux: Boolean):
        for i in range_constexpr(self.vectors):
            ptx.st_vec(prefix_at[i], vx[i], on[i])
        if has_block:
            for i in range_constexpr(self.vectors):
                ptx.st_vec(block_at[i], vx[i], on[i])
        if has_aux:
            for i in range_constexpr(self.vectors):
                ptx.st_vec(aux_at[i], vx[i], on[i])

    def _pairs(self):
        """Pairs of the gram's sources, by number, of which the last is the updated prefix."""
        return [(i, j) for i in range(self.nb + 1) for j in range(i)]

    def _mix_all(self, p, vb, x, sums):
        """Mixes the saved blocks and the updated prefix `x`, by the sums of all their products; returns a Mixture."""
        n = self.nb + 1
        squares, dots, crosses = sums[:n], sums[n : 2 * n], sums[2 * n :]
        logits = [logit(vv, vw, self.inv_hidden, p.eps) for vv, vw in zip(squares, dots, strict=True)]  # [nb + 1]
        _, shares, s = softmax(logits, partial(quick_exp, halvings=SPARE))  # shares: [nb + 1]
        mix = combine(shares, [*(unpack_all(vecs, launder=True) for vecs in vb), x])  # [V * 8]
        terms = tree_sum([a * sq * a for a, sq in zip(shares, squares, strict=True)])
        pairs = zip(self._pairs(), crosses, strict=True)
        twice = tree_sum([shares[i] * cross * shares[j] for (i, j), cross in pairs])
        square = (terms + 2.0 * twice) * self.inv_hidden + p.out_eps * (s * s)
        return Mixture(mix, s, square, square < terms * (CANCEL * self.inv_hidden))

    def _fold(self, p, x, m, l, mixed, sums, flaw=None):
        """Folds the updated prefix `x` into the mixture of the saved blocks; returns a Mixture.

        With the larger of exp(m) and exp(logit) as the unit, the shares are a of M, or `mixed`, and b of `x`, of which one is
        constant and the other has the factor e <= 1, the square of an exponential of half the difference. The mean square of
        a M + b x, and out_eps s^2, are a polynomial in e whose coefficients are there before e is. It has cancelled by
        1 / CANCEL only where its first and last terms are alike, so the first tells.
        `flaw` is NaN where statistics are of no use; blocks have their logits to say so.
        """
        h, unit, most_b, out_eps = self.inv_hidden, 0.5 * LOG2_E, 2.0**-SPARE, p.out_eps
        xw, xx, mx, mm = sums
        over = logit(xx, xw * unit, h, p.eps) - m * unit
        if flaw is not None:
            over = over + flaw
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
        return Mixture(combine([a, b], [mixed, x]), a * l + b, square, cancelled)

    def _finish(self, p, share, of_mix, mixture, weight, out_at):
        """Stores the output.

        What is multiplied in which order matters: a share and rsqrt may be so small that their product is none.
        """
        mix, s, square, cancelled = mixture
        if self.final:
            scale = ptx.reciprocal(s)
            mix = round_bf16([scale * value for value in mix])
            (square,) = self.sums.exchange(of_mix, [dot(mix, mix)])
            _store(out_at, share, mix, self._inv_rms(square, p.out_eps), weight)
        else:
            _store(out_at, share, mix, ptx.rsqrt(square), weight)
            self._store_again(share, of_mix, mix, cancelled, p.out_eps * (s * s), weight, out_at)

    @cute.jit
    def _store_again(self, share, of_mix, mix, cancelled: Boolean, floor: Float32, weight, out_at):
        """Where `cancelled`, stores the output once more, from the exchanged sum of its squares."""
        if cancelled:
            (square,) = self.sums.exchange(of_mix, [dot(mix, mix)])
            _store(out_at, share, mix, self._inv_rms(square, floor), weight)

    def _inv_rms(self, square, floor):
        return ptx.rsqrt(square * self.inv_hidden + floor)


def _store(at, share, values, inv, weight):
    """Stores (value * inv) * weight: in this order neither a large nor a small value leaves fp32's range before its time."""
    y = [value * inv * factor for value, factor in zip(values, weight, strict=True)]  # [V * 8]
    for i, (address, on) in enumerate(zip(at, share.on, strict=True)):
        ptx.st_vec(address, pack(y[i * VEC : (i + 1) * VEC]), on)

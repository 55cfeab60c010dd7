"""The AttnRes consumer: one fused pass over a token row of H bf16 elements, one cluster of CTAs per row.

Written in PTX vectors (`ptx`, `vectors`) and not in CuTe layouts and copies. A thread has one or two 16-byte vectors of a row, so
there is no tiling that a layout could describe; and what this kernel stands on is what a copy leaves to the compiler: a mailbox
fragment is one 16-byte access at system scope, vectors beyond the row are zeros and never stored, and loads, the dependency
wait and stores stay in the order in which they are written here.

Per row, with w = norm * query, over sources v_0 .. v_{nb-1} (saved blocks) and P (updated prefix):

    P       = bf16(prefix + d)            or d without delta;  d = delta row, or bf16(sum over mailbox slots)
    logit_s = (v_s . w) * rsqrt(v_s . v_s / H + eps)
    m       = max_s logit_s,  l = sum_s exp(logit_s - m),  M = sum_s exp(logit_s - m) v_s          over the saved blocks
    A, B    = exp(m - t), exp(logit_P - t),  t = max(m, logit_P)
    mix     = (A M + B P) / (A l + B)
    out     = bf16(mix * rsqrt(mix . mix / H + out_eps) * out_norm)

Only `final` divides by s = A l + B: the output of s * mix with out_eps * s^2 in the place of out_eps is the same. l, M and B
are kept 2**SPARE smaller than above, so that s is from 1/16 to 1 and no intermediate exceeds the largest source. Two ways to
the same sums, and the schedules (methods of `Consumer`) that take them:

split   What depends on the saved blocks alone (m, l, M) is computed before the delta is needed, with an exchange of 2 nb sums.
        One exchange of four sums remains after it, because s^2 mix . mix = A^2 (M . M) + 2 A B (M . P) + B^2 (P . P).
        `_ordinary`, `_mailbox_split`; with statistics only that one is left: `_statistics`, `_mailbox_statistics`.
gram    All products of all sources in one exchange, shares p_s of all of them, and
        s^2 mix . mix = sum_st p_s p_t (v_s . v_t). `_mailbox_gram`; `_norm_only` is its case of no blocks.

Where the sum for mix . mix cancels (below CANCEL of its positive terms) its rounding error would show, and the cluster
agrees, from identical bits, to sum the squares of mix itself and to store the output once more: the store before it is
what everybody else waits for. `final` always sums them, since it rounds mix to bf16 first.

| operand  | shape                | type | strides             | align | read | written |
|----------|----------------------|------|---------------------|-------|------|---------|
| source   | [rows, H]            | bf16 | row dynamic, last 1 | 16 B  | after the wait | |
| (ring)   | [slots, capacity, H] | bf16 | slot, row dynamic   | 16 B  | after the wait (early: before) | each vector armed once it is complete: 1st |
| prefix   | [rows, H]            | bf16 | row dynamic         | 16 B  | with delta: before the wait | 2nd, while the last sums travel |
| blocks   | [rows, B, H]         | bf16 | row, block dynamic  | 16 B  | 0..nb-1: before the wait | `write`: 2nd, after prefix |
| norm, query, out_norm | [H]     | bf16 | 1                   | 16 B  | before the wait (out_norm with more than 8 slots: after) | |
| mixture  | [cap, H]             | fp32 | H, 1                | 16 B  | after the wait (statistics) | |
| scal     | [cap, 2]             | fp32 | 2, 1                | 8 B   | after the wait (statistics) | |
| aux      | [rows, H]            | bf16 | row dynamic         | 16 B  | | 2nd, after blocks |
| out      | [rows, H]            | bf16 | row dynamic         | 16 B  | | 3rd, after the last sums; again where they cancelled |
| fault    | [4]                  | u32  | 1                   | 16 B  | | in place of the rest, when `spin_budget` is spent |

"The wait" is the dependency wait (griddepcontrol.wait), for the grid before this one to end and its memory to be visible.
Everything is written after it, with one exception: with parameter `early`, which the caller may set who knows that nobody minds
(`attnres_aot.runtime.launch.pdl` has the promise), mailbox kernels put it at their end, after all that they write. Those with statistics
then look at the mailbox before it, and write after it all the same. Parameters are `attnres_aot.spec.params.CONSUMER_PARAMS`.

Threads to elements: CTA `rank` of the cluster's K and thread `tid` of T own the vectors (8 elements)
(rank * V + i) * T + tid of the row, i < V, as far as the row has them: K * T * V * 8 is H, or the next multiple of 1024,
and threads beyond the row hold zeros and store nothing. Lists of vectors are [V], lists of elements [V * 8].

Shared memory is that of `row_sums`, which has the map, with three exchanges, of which the third (mix . mix itself) is
entered by the whole cluster or not at all. Offsets and, at the end, size in bytes for T = 128:

| schedule      | values   | of_blocks | of_all | of_mix | rooms | mbarriers | size |
|---------------|----------|-----------|--------|--------|-------|-----------|------|
| split, nb 8   | 16, 4, 1 | 0         | 1280   | 1984   | 2688  | 3200      | 3224 |
| gram, nb 5    | 0, 32, 1 |           | 0      | 2048   | 2752  | 3264      | 3288 |
| statistics    | 0, 4, 1  |           | 0      | 704    | 1408  | 1920      | 1944 |
| norm only     | 0, 1, 0  |           | 0      |        | 704   | 1216      | 1240 |

Dependents are released at entry, so that their work before the delta overlaps. A kernel that has little (no blocks, or
statistics) releases them when that is done, which keeps the grids that follow from crowding it.

In a chain of dependent launches what follows the wait is the critical path. So before it the delta's address is translated (a
prefetch), the cluster barrier is passed, and M . M is added up and left in shared memory, which also keeps the compiler from
putting M off; and the addresses of what is stored are worked out while sums travel. With a mailbox the cluster barrier is passed
while loads are under way.

Shares are right down to fp32's smallest normal number, 2**-126 of the largest, and nothing from 2**-145 on.
A source whose squares fp32 cannot add up makes its row NaN: its logit would be 0, and the output wrong.

Rounding points: d (several slots), P, mix (final), out. Everything else is fp32; w is a product of two bf16 and exact.
"""

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int64, range_constexpr

from attnres_aot.kernels import ptx
from attnres_aot.kernels.mailbox import Mailbox
from attnres_aot.kernels.mixing import SPARE, fold, gram_mixture, gram_products, gram_size, mix_blocks
from attnres_aot.kernels.row_sums import PACKET, RowSums, padded
from attnres_aot.kernels.vectors import (
    VEC,
    add_bf16,
    dot,
    load_row,
    load_sources,
    load_weight,
    overflow,
    pack,
    round_bf16,
    row_and_rank,
    share_of_row,
    unpack_all,
    vec_address,
)

GRAM_BLOCKS = 5
"""Most saved blocks whose dot products go in one exchange: those of 6 sources are 27, and a warp has 32 lanes."""


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
            return self._mailbox_gram, (0, padded(gram_size(nb + 1)), 1)
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
        logits = self.sums.receive_logits(of_blocks, self.nb, self.inv_hidden, p.eps)  # [nb] fp32
        m, l, mixed = mix_blocks(logits, vb)  # fp32, fp32, [V * 8] fp32
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
        mixture = fold(p, self.inv_hidden, x, m, l, mixed, sums)
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
        logits = self.sums.receive_logits(of_blocks, self.nb, self.inv_hidden, p.eps)  # [nb] fp32
        m, l, mixed = mix_blocks(logits, vb)  # fp32, fp32, [V * 8] fp32
        vp, vo, looked = seen or self._wait_and_look(p, share)
        vx = self._update(vp, self.mailbox.take(p, share, looked))  # [V] vectors
        vo = vo or load_weight(p.out_norm, share, self.load)  # [V] vectors
        copies = self._copies(p, step)
        x = unpack_all(vx)  # [V * 8] fp32
        own = dot(mixed, mixed)  # first, as it needs no delta
        self.sums.send(of_all, [dot(x, w), dot(x, x), dot(mixed, x), own])
        out_at = self._store_prefix(p, share, vx, copies)
        weight = unpack_all(vo)  # [V * 8] fp32
        sums = self.sums.receive(of_all, 4)
        mixture = fold(p, self.inv_hidden, x, m, l, mixed, sums)
        self._finish(p, share, of_mix, mixture, weight, out_at)
        cute.arch.griddepcontrol_wait()  # later launches wait for this grid alone, so it must not end before the one it follows

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
        products = gram_products(v, w)
        self.sums.send(of_all, products + [None] * (of_all.count - len(products)))
        out_at = self._store_prefix(p, share, vx, copies)
        weight = unpack_all(vo)  # [V * 8] fp32
        sums = self.sums.receive(of_all, len(products))
        mixture = gram_mixture(p, self.inv_hidden, vb, x, sums)
        self._finish(p, share, of_mix, mixture, weight, out_at)
        cute.arch.griddepcontrol_wait()  # as in `_mailbox_split`

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
        own = dot(mixed, mixed)  # first, as it needs no delta
        self.sums.send(of_all, [dot(x, w), dot(x, x), dot(mixed, x), own])
        out_at = self._store_prefix(p, share, vx, copies)
        weight = unpack_all(vo)  # [V * 8] fp32
        sums = self.sums.receive(of_all, 4)
        mixture = fold(p, self.inv_hidden, x, m, l, mixed, sums, overflow(sums[3]))
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
        own = dot(mixed, mixed)  # first, as it needs no delta
        self.sums.send(of_all, [dot(x, w), dot(x, x), dot(mixed, x), own])
        out_at = self._store_prefix(p, share, vx, copies)
        weight = unpack_all(vo)  # [V * 8] fp32
        sums = self.sums.receive(of_all, 4)
        mixture = fold(p, self.inv_hidden, x, m, l, mixed, sums, overflow(sums[3]))
        self._finish(p, share, of_mix, mixture, weight, out_at)

    def _norm_only(self, p):
        """No saved block: the updated prefix is the mixture."""
        tid, row, rank = row_and_rank(self.cluster)
        _, of_all, _ = self.sums.open(tid, rank)
        share = share_of_row(self, tid, row, rank)
        _, _, step = load_sources(p, 0, share, self.load)  # norm and query are loaded here as everywhere, and not used
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
        """Returns (m, l, M), as `mix_blocks` does, from the caller's statistics."""
        m, l = ptx.ld_scalar_pair(p.scal.toint() + Int64(share.row) * 8)
        words = []
        for col, on in zip(share.cols, share.on, strict=True):
            address = p.mixture.toint() + (Int64(share.row) * self.row_vecs + Int64(col)) * 32
            words += ptx.ld_vec(address, on) + ptx.ld_vec(address + 16, on)
        return m, l * 2.0**-SPARE, [ptx.bits_to_f32(word) * 2.0**-SPARE for word in words]

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

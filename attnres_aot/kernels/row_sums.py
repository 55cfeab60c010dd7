"""Sums over a row: adding a few values over all threads of the cluster that shares the row.

Shared memory, for each exchange of N values: an 8-byte mbarrier, fp32 sums of the warps [N][T/32, to a multiple of 4] and
fp32 sums of the CTAs [K, to a multiple of 4][N]; and fp32 [T/32][32] to show a warp what its lanes hold. K is the number
of CTAs in the cluster and T that of threads in a CTA.

Synchronisation: thread 0 initialises the mbarriers, each with one arrival (its own) and the expected bytes, then the
cluster barrier shows them to every CTA before anybody sends. In an exchange each warp adds its values with shuffles and
leaves the sums in shared memory; after a CTA barrier, one warp per four values adds those and st.asyncs them to every
CTA of the cluster. Each CTA waits on its own mbarrier and every warp adds up the same numbers in the same order, so all
threads of the cluster hold the same bits. `send` and `receive` are the halves of an exchange: what a kernel does between
them is done while the sums travel. A mbarrier and a buffer are used once. A CTA waits for everything that is sent to it, so
none exits while a peer still writes to its memory: an exchange is entered by all CTAs of a row or by none, and one that
was declared need not be used.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from attnres_aot.kernels import ptx
from attnres_aot.kernels.vectors import dot, select, tree_sum

WARP = 32
"""Threads of a warp."""
PACKET = 4
"""Most values that one st.async sends."""


class RowSums:
    """The exchanges of one kernel, by their numbers of values: 0 (unused), 1 or a power of two from PACKET to WARP.

    `open` returns a handle for each: (values, warp sums, CTA sums, mbarrier, rank, room of this warp, way to a peer).
    The sums, the mbarrier and the room are addresses in shared memory; the way is what lane i adds to them to reach CTA i.
    """

    def __init__(self, cluster, threads, counts):
        """Fixes the constants.

        Args:
          cluster: CTAs per row.
          threads: threads per CTA, a multiple of WARP.
          counts: values of each exchange.
        """
        self.cluster, self.threads, self.counts = cluster, threads, counts
        self.warps = threads // WARP
        self.part_stride = _round_up(self.warps, 4)

    @cute.jit
    def open(self, tid: Int32, rank: Int32):
        """Declares shared memory, arms the mbarriers and arrives at the cluster barrier that shows them to peers."""
        counts = self.counts
        bars = cute.arch.alloc_smem(cutlass.Int64, len(counts), alignment=8)
        sizes = [count * (self.part_stride + _round_up(self.cluster, 4)) for count in counts]
        floats = cute.arch.alloc_smem(Float32, sum(sizes) + self.threads, alignment=16)
        bar, base = Int32(bars.toint()), Int32(floats.toint())
        room = base + 4 * (sum(sizes) + cute.arch.warp_idx() * WARP)
        lane = cute.arch.lane_idx()
        away = ptx.peer_offset(base, select(lane < self.cluster, lane, Int32(0)))
        exchanges = []
        for i, count in enumerate(counts):
            parts = base + 4 * sum(sizes[:i])
            exchanges.append((count, parts, parts + 4 * count * self.part_stride, bar + 8 * i, rank, room, away))
        if tid == 0:
            for i, count in enumerate(counts):
                if const_expr(count > 0):
                    ptx.mbarrier_expect(bar + 8 * i, 4 * self.cluster * count)
            cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()
        return exchanges

    def exchange(self, exchange, values):
        """Adds `values` over the row; returns the sums, alike in all threads.

        The number of values is a power of two; None at the end stands for values that are not wanted.
        """
        self.send(exchange, values)
        return self.receive(exchange, sum(value is not None for value in values))

    def send(self, exchange, values):
        """Adds `values`, as `exchange` takes them, over this CTA and sends the sums to the cluster."""
        self._leave(exchange, values)
        self._dispatch(exchange)

    def receive(self, exchange, wanted):
        """Waits for what the row's CTAs have sent; returns the row's sums of the first `wanted` values."""
        count, received, room = exchange[0], exchange[2], exchange[5]
        ptx.mbarrier_wait(exchange[3])
        if count > PACKET:
            return bounce(room, cute.arch.lane_idx() % count, self._sum_column(exchange), wanted)
        if count == 1:
            parts = []
            for sender in range(0, self.cluster, 4):
                parts += ptx.ld_shared_vec(received + sender * 4)[: self.cluster - sender]
            return [tree_sum(parts)]
        vecs = [ptx.ld_shared_vec(received + sender * 16) for sender in range(self.cluster)]
        return [tree_sum(list(column)) for column in zip(*vecs, strict=True)][:wanted]

    def _leave(self, exchange, values, once_summed=None):
        """Adds `values` over each warp, calls `once_summed` if there is one, and leaves the sums for the CTA."""
        count, parts = exchange[0], exchange[1]
        mine = _reduce_scatter(values, cute.arch.lane_idx())
        if once_summed is not None:
            once_summed()
        value = cute.arch.lane_idx() // (WARP // count)
        ptx.st_shared(parts + (value * self.part_stride + cute.arch.warp_idx()) * 4, mine)

    def logits(self, exchange, sources, w, inv_hidden, eps, once_summed=None):
        """Returns (v . w) * rsqrt(v . v * inv_hidden + eps) of each source v, alike in all threads, by one exchange.

        The exchange has twice the number of sources, each half padded to a power of two. `once_summed` is called when
        the products are there and added over the warp.
        """
        half, room = exchange[0] // 2, exchange[5]
        pads = [None] * (half - len(sources))
        values = [dot(v, v) for v in sources] + pads + [dot(v, w) for v in sources] + pads
        self._leave(exchange, values, once_summed)
        cute.arch.cluster_wait()
        self._dispatch(exchange)
        ptx.mbarrier_wait(exchange[3])
        mine = self._sum_column(exchange)
        lane = cute.arch.lane_idx()
        other = cute.arch.shuffle_sync_bfly(mine, half)
        is_square = (lane & half) == 0
        vv, vw = select(is_square, mine, other), select(is_square, other, mine)
        return bounce(room, lane % half, vw * ptx.rsqrt(vv * inv_hidden + eps), len(sources))

    def _sum_column(self, exchange):
        """Returns, in lane i, the row's sum of values[i % count], once all have arrived."""
        count, received = exchange[0], exchange[2]
        column = received + (cute.arch.lane_idx() % count) * 4
        return tree_sum([ptx.ld_shared(column + sender * count * 4) for sender in range(self.cluster)])

    def _dispatch(self, exchange):
        """Adds what the warps of this CTA have left and sends it to the cluster."""
        count, parts, received, barrier, rank, _, away = exchange
        cute.arch.sync_threads()
        packet = min(count, PACKET)
        for begin in range(0, count, self.warps * packet):
            first = begin + cute.arch.warp_idx() * packet
            to = received + (rank * count + first) * 4
            self._send(first < count, parts + first * self.part_stride * 4, to + away, barrier + away, packet)

    @cute.jit
    def _send(self, mine: Boolean, parts: Int32, there: Int32, barrier: Int32, packet: cutlass.Constexpr):
        """In the warps that `mine` names, adds a packet of values over this CTA; each lane sends it to its peer."""
        if mine:
            sums = [self._sum_warps(parts + i * self.part_stride * 4) for i in range(packet)]
            ptx.st_async(there, barrier, sums, Int32(cute.arch.lane_idx() < self.cluster))

    def _sum_warps(self, address):
        """Adds one value's partial sums over the warps of this CTA."""
        parts = []
        for warp in range(0, self.warps, 4):
            parts += ptx.ld_shared_vec(address + warp * 4)[: self.warps - warp]
        return tree_sum(parts)


def _reduce_scatter(values, lane):
    """Adds each of `values` over the warp's lanes; lane i returns the sum of values[i // (32 / count)].

    The count is a power of two; a lane whose value is None returns anything.
    """
    offset = WARP // 2
    while len(values) > 1:
        half = len(values) // 2
        upper = (lane & offset) != 0
        values = [_halve(a, b, upper, offset) for a, b in zip(values[:half], values[half:], strict=True)]
        offset //= 2
    total = values[0]
    for step in _offsets(offset):
        total = total + cute.arch.shuffle_sync_bfly(total, step)
    return total


def _halve(a, b, upper, offset):
    """Adds `a` over lane pairs `offset` apart in their lower lanes, `b` in the upper ones."""
    if a is None:
        return None
    if b is None:
        return a + cute.arch.shuffle_sync_bfly(a, offset)
    return select(upper, b, a) + cute.arch.shuffle_sync_bfly(select(upper, a, b), offset)


def bounce(address, index, value, count):
    """Shows every lane the first `count` of the values that the warp's lanes hold at `index`."""
    ptx.st_shared(address + index * 4, value)
    cute.arch.sync_warp()
    values = []
    for first in range(0, count, 4):
        values += ptx.ld_shared_vec(address + first * 4)
    return values[:count]


def _offsets(first, last=1):
    """Powers of two from `first` down to `last`; empty when first < last."""
    offsets = []
    while first >= last:
        offsets.append(first)
        first //= 2
    return offsets


def padded(count):
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def _round_up(count, multiple):
    return -(-count // multiple) * multiple

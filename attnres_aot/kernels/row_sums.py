"""Sums over a row: adding a few values over all threads of the cluster that shares the row.

Shared memory, for exchanges of N_0, N_1 .. values and T threads in a CTA, with L = max(N, 4) lines of S = T / L floats, rounded
up to a multiple of 4, and 4 more (lines 4 apart share no bank); an exchange of no values has no lines:

| offset, bytes              | what                                      | type, shape      | bytes      |
|----------------------------|-------------------------------------------|------------------|------------|
| O_0 = 0                    | lines of partial sums, one for each value | fp32 [L][S]      | 4 L S      |
| O_0 + 4 L S                | sums that the CTAs send                   | fp32 [8][L]      | 32 L       |
| O_1 = O_0 + 4 L (S + 8)    | the same of the next exchange, and so on  |                  |            |
| R, after the last of these | rooms: shows a warp what its lanes hold   | fp32 [T/32][32]  | 4 T        |
| R + 4 T                    | an mbarrier for each exchange             | 8 bytes each     | 8 each     |

Synchronisation: thread 0 initialises the mbarriers, each with one arrival (its own) and the expected bytes (32 L), then the
cluster barrier shows them to every CTA before anybody sends. An exchange has three steps:

leave     Each warp adds N values with shuffles until a lane holds one, so that 32 / N lanes have parts of the same value, and
          each thread leaves its part in shared memory: further shuffles would take longer than reading the parts. (A single
          value is not shuffled; its line is cut in four.)
dispatch  After a CTA barrier, one warp per four lines adds those, eight lanes each the same line, of which each st.asyncs
          the sum to another CTA of the cluster, or to a spare row of its own where the cluster is smaller: a branch around
          it would cost more. The first dispatch must follow the cluster barrier.
receive   Each CTA waits on its own mbarrier, and every warp adds up the same numbers in the same order, so all threads of
          the cluster hold the same bits.

`send` is the first two; what a kernel does between `send` and `receive` is done while the sums travel. A mbarrier
and a buffer are used once. A CTA waits for everything that is sent to it, so none exits while a peer still writes to its
memory: an exchange is entered by all CTAs of a row or by none, and one that was declared need not be used.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, const_expr

from attnres_aot.kernels import ptx
from attnres_aot.kernels.vectors import dot, logit, select, tree_sum

WARP = 32
"""Threads of a warp."""
PACKET = 4
"""Lines of partial sums that a warp adds up and sends at a time."""
PEERS = WARP // PACKET
"""Lanes that add up the same line, each for a CTA of its own: most CTAs of a cluster."""


class Exchange(NamedTuple):
    """What a thread knows of one exchange; places are addresses in this CTA's shared memory."""

    count: int
    """Values."""
    lines: Int32
    """The first line of partial sums."""
    mine: Int32
    """Where this thread leaves its part."""
    received: Int32
    """The sums that the CTAs send here."""
    barrier: Int32
    """The mbarrier."""
    row: Int32
    """The row of `received` that this lane sends to: this CTA's number, or a spare one where it has no peer."""
    room: Int32
    """Room of this warp's own."""
    away: Int32
    """What this lane, i, adds to a place to reach the same in CTA i % PEERS, or its own where there is none."""


class RowSums:
    """The exchanges of one kernel, by their numbers of values: 0 (unused), 1 or a power of two from PACKET to WARP."""

    def __init__(self, cluster, threads, counts):
        """Fixes the constants.

        Args:
          cluster: CTAs per row.
          threads: threads per CTA, a multiple of WARP.
          counts: values of each exchange.
        """
        self.cluster, self.threads, self.counts = cluster, threads, counts
        self.warps = threads // WARP

    @cute.jit
    def open(self, tid: Int32, rank: Int32):
        """Declares shared memory, arms the mbarriers and arrives at the cluster barrier that shows them to peers."""
        counts = self.counts
        sizes = [self._lines(count) * (self._stride(count) + PEERS) for count in counts]
        bars = 4 * (sum(sizes) + self.threads)
        base = Int32(cute.arch.alloc_smem(cutlass.Uint8, bars + 8 * len(counts), alignment=16).toint())
        if tid == 0:
            for i, count in enumerate(counts):
                if const_expr(count > 0):
                    ptx.mbarrier_expect(base + bars + 8 * i, 4 * PEERS * self._lines(count))
            if const_expr(sum(count > 0 for count in counts) == 1):
                ptx.fence_async_shared()  # a branch as short as this ptxas makes predicates of, without its own fence
            cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()
        base = ptx.keep(base)
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        room = base + 4 * (sum(sizes) + warp * WARP)
        peer = lane % PEERS
        away = ptx.peer_offset(base, select(peer < self.cluster, peer, rank))
        row = select(peer < self.cluster, rank, peer)
        exchanges = []
        for i, count in enumerate(counts):
            parts = base + 4 * sum(sizes[:i])
            received = parts + 4 * self._lines(count) * self._stride(count)
            mine = parts + 4 * self._place(count, tid) if const_expr(count > 0) else parts
            exchanges.append(Exchange(count, parts, mine, received, base + bars + 8 * i, row, room, away))
        return exchanges

    def _place(self, count, tid):
        """Where, in floats from the first line, a thread leaves its part of a value."""
        tid = Uint32(tid)
        if count == 1:
            length = self.threads // PACKET
            return Int32(tid // length * self._stride(count) + tid % length)
        share = WARP // count
        return Int32(tid % WARP // share * self._stride(count) + tid // WARP * share + tid % share)

    def _lines(self, count):
        """Sums that a CTA sends in an exchange of `count` values: a single value is added up in PACKET parts."""
        return max(count, PACKET) if count else 0

    def _stride(self, count):
        """Floats from a line of partial sums to the next: a multiple of 4, and lines PACKET apart share no bank."""
        return _round_up(self.threads // self._lines(count), 4) + 4 if count else 0

    def exchange(self, exchange, values):
        """Adds `values` over the row; returns the sums, alike in all threads.

        The number of values is a power of two; None at the end stands for values that are not wanted.
        """
        self.send(exchange, values)
        return self.receive(exchange, sum(value is not None for value in values))

    def send(self, exchange, values, last_is_left=False):
        """Adds `values`, as `exchange` takes them, over this CTA and sends the sums to the cluster."""
        self._leave(exchange, values, last_is_left)
        self.dispatch(exchange)

    def receive(self, exchange, wanted):
        """Waits for what the row's CTAs have sent; returns the row's sums of the first `wanted` values."""
        count = exchange.count
        ptx.mbarrier_wait(exchange.barrier)
        if count > PACKET:
            at = cute.arch.lane_idx() % count
            return bounce(exchange.room, at, self._sum_column(exchange, at), wanted)
        vecs = [ptx.ld_shared_vec(exchange.received + sender * 16) for sender in range(self.cluster)]
        if count == 1:
            return [tree_sum([part for vec in vecs for part in vec])]
        return [tree_sum(list(column)) for column in zip(*vecs, strict=True)][:wanted]

    def leave_early(self, exchange, value):
        """Leaves `value`, the last that the exchange sums, before the others are known; `send` gets None in its place."""
        share = WARP // exchange.count
        offset = WARP // 2
        while offset >= share:
            value = value + cute.arch.shuffle_sync_bfly(value, offset)
            offset //= 2
        ptx.st_shared(exchange.mine, value, Int32(cute.arch.lane_idx() >= WARP - share))

    def _leave(self, exchange, values, last_is_left=False):
        """Adds `values` over lanes until each holds one, and leaves the parts for the CTA."""
        mine = _reduce_scatter(values, cute.arch.lane_idx())
        if last_is_left:
            ptx.st_shared(exchange.mine, mine, Int32(cute.arch.lane_idx() < WARP - WARP // exchange.count))
        else:
            ptx.st_shared(exchange.mine, mine)

    def leave_products(self, exchange, sources, w):
        """Leaves v . v and v . w of each source v; the exchange has twice the number of sources, padded to a power of two."""
        pads = [None] * (exchange.count // 2 - len(sources))
        self._leave(exchange, [dot(v, v) for v in sources] + pads + [dot(v, w) for v in sources] + pads)

    def receive_logits(self, exchange, sources, inv_hidden, eps):
        """Returns the `logit` of each source, alike in all threads, from `leave_products`."""
        half = exchange.count // 2
        ptx.mbarrier_wait(exchange.barrier)
        at = cute.arch.lane_idx() % half
        vv, vw = self._sum_column(exchange, at), self._sum_column(exchange, half + at)
        return bounce(exchange.room, at, logit(vv, vw, inv_hidden, eps), sources)

    def _sum_column(self, exchange, at):
        """Returns the row's sum of values[at], once all have arrived."""
        count = exchange.count
        column = exchange.received + at * 4
        return tree_sum([ptx.ld_shared(column + sender * count * 4) for sender in range(self.cluster)])

    def dispatch(self, exchange):
        """Adds what the threads of this CTA have left and sends it to the cluster."""
        lines, stride = self._lines(exchange.count), self._stride(exchange.count)
        cute.arch.sync_threads()
        for begin in range(0, lines, self.warps * PACKET):
            first = begin + cute.arch.warp_idx() * PACKET
            line = first + cute.arch.lane_idx() // PEERS
            mine, place = first < lines, exchange.received + (exchange.row * lines + line) * 4
            parts, to = exchange.lines + line * stride * 4, place + exchange.away
            self._send(mine, parts, to, exchange.barrier + exchange.away, self.threads // lines)
        cute.arch.sync_warp()  # what follows is not to be scheduled before the send, which others wait for

    @cute.jit
    def _send(self, mine: Boolean, parts: Int32, there: Int32, barrier: Int32, length: cutlass.Constexpr):
        """In the warps that `mine` names, each lane adds its line of partial sums and sends it to its peer."""
        if mine:
            total = _sum_line(parts, length)
            ptx.st_async(there, barrier, total)


def _sum_line(address, length):
    """Adds `length` fp32 in shared memory, from a 16-byte aligned address."""
    values = []
    for first in range(0, length, 4):
        values += ptx.ld_shared_vec(address + first * 4)[: length - first]
    return tree_sum(values)


def _reduce_scatter(values, lane):
    """Adds values over lanes until each holds one: lane i returns a part of the sum of values[i // (32 / count)].

    The 32 / count lanes of a value hold different parts. The count is a power of two; a lane whose value is None returns
    anything.
    """
    offset = WARP // 2
    while len(values) > 1:
        half = len(values) // 2
        upper = (lane & offset) != 0
        values = [_halve(a, b, upper, offset) for a, b in zip(values[:half], values[half:], strict=True)]
        offset //= 2
    return values[0]


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


def padded(count):
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def _round_up(count, multiple):
    return -(-count // multiple) * multiple

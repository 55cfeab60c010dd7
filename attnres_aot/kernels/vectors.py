"""Rows in registers: vectors of 8 bf16 and their fp32 elements, and the arithmetic on lists of them.

A thread's share of a row is a list of vectors, each four 32-bit words, or a flat list of fp32, 8 for each vector.
"""

import operator
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from attnres_aot.kernels import ptx

VEC = 8
"""bf16 elements in a 16-byte vector."""
LOG2_E = 1.4426950408889634
"""log2(e)."""


class Share(NamedTuple):
    """A thread's share of the row that its cluster works on."""

    row: Int32
    """Row of the launch."""
    cols: list
    """[V] the thread's vectors, by number in the row."""
    on: list
    """[V] whether the row has the vector, or None where it has all."""


def row_and_rank(cluster):
    """(tid, row, rank): the thread in its CTA, the row of the launch, the CTA in the row's cluster."""
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    return tid, Int32(Uint32(cta) // cluster), Int32(Uint32(cta) % cluster)


def share_of_row(kernel, tid, row, rank):
    """The share of thread `tid` of CTA `rank`: every `threads`-th vector of those that the CTA has."""
    cols = [(rank * kernel.vectors + i) * kernel.threads + tid for i in range(kernel.vectors)]
    return Share(row, cols, inside(cols, kernel.row_vecs, kernel.cluster * kernel.threads * kernel.vectors))


def inside(cols, row_vecs, threads):
    """Tells for each vector of the thread whether the row of `row_vecs` vectors has it; None: it has all of `threads`.

    Args:
      cols: the thread's vectors, by number.
      row_vecs: vectors of a row.
      threads: vectors that the threads of a row have together.
    """
    return [Int32(col < row_vecs) for col in cols] if threads != row_vecs else [None] * len(cols)


def col_address(pointer, col):
    return pointer.toint() + Int64(Uint32(col) * 16)


def vec_address(pointer, row, row_stride, col):
    return pointer.toint() + Int64(Uint32(row)) * Int64(Uint32(row_stride)) * 16 + Int64(Uint32(col) * 16)


def load_row(pointer, row_stride, share, load):
    """The thread's vectors of its row, by one of the loads of `ptx`; zeros where the row has none."""
    at = [vec_address(pointer, share.row, row_stride, col) for col in share.cols]
    return [load(address, on) for address, on in zip(at, share.on, strict=True)]


def load_weight(pointer, share, load):
    """The thread's vectors of a weight of H elements."""
    return [load(col_address(pointer, col), on) for col, on in zip(share.cols, share.on, strict=True)]


def load_sources(p, nb, share, load):
    """Loads what logits are made of.

    Returns:
      (w, vb, step): norm * query, [V * 8] fp32; the saved blocks, [nb][V] vectors; bytes from one block to the next.
    """
    vw = zip(load_weight(p.norm, share, load), load_weight(p.query, share, load), strict=True)
    at = [vec_address(p.blocks, share.row, p.blocks_row_stride, col) for col in share.cols]
    step = Int64(Uint32(p.blocks_block_stride)) * 16
    vb = [[load(address + step * s, on) for address, on in zip(at, share.on, strict=True)] for s in range(nb)]
    return [a * b for n, q in vw for a, b in zip(unpack(n), unpack(q), strict=True)], vb, step


def unpack(words):
    """The 8 bf16 of a vector as fp32."""
    return [ptx.bits_to_f32(bits) for word in words for bits in (word << 16, word & -0x10000)]


def unpack_all(vecs, launder=False):
    """The bf16 of vectors as fp32; laundered, they are unpacked again rather than kept since the last time."""
    return [e for vec in vecs for e in unpack([ptx.launder(word) for word in vec] if launder else vec)]


def pack(elements):
    """Rounds 8 fp32 to a vector of bf16."""
    return tuple(ptx.pack_bf16(elements[i], elements[i + 1]) for i in range(0, VEC, 2))


def round_bf16(elements):
    """Rounds fp32 values to bf16 and back."""
    return [r for i in range(0, len(elements), VEC) for r in unpack(pack(elements[i : i + VEC]))]


def add_bf16(va, vb):
    """Adds vectors, rounding once, as torch adds bf16."""
    return [tuple(ptx.add_bf16(x, y) for x, y in zip(a, b, strict=True)) for a, b in zip(va, vb, strict=True)]


def dot(a, b):
    """Dot product of two lists of fp32, in two chains."""
    chains = [a[0] * b[0], a[1] * b[1]]
    for i in range(2, len(a)):
        chains[i % 2] = chains[i % 2] + a[i] * b[i]
    return chains[0] + chains[1]


def combine(weights, vectors):
    """Sum of weights[s] * vectors[s], element by element."""
    total = [weights[0] * element for element in vectors[0]]
    for weight, vector in zip(weights[1:], vectors[1:], strict=True):
        total = [t + weight * element for t, element in zip(total, vector, strict=True)]
    return total


def logit(vv, vw, inv_hidden, eps):
    """Returns (v . w) / rms(v) of a source from vv = v . v and vw = v . w; NaN where either has overflowed.

    Without that an infinite vv would give a logit of 0, and the row a finite output that is wrong.
    """
    return vw * ptx.rsqrt(vv * inv_hidden + eps) + (overflow(vv) + overflow(vw))


def overflow(x):
    """Returns 0, or NaN for an infinite or NaN x."""
    return x * 0.0


def exp(x):
    """exp(x), relative error of exp2's approximation and the rounding of x * log2(e); subnormal results kept."""
    return ptx.exp2(x * LOG2_E)


def quick_exp(x, halvings=0.0):
    """exp(x) / 2**halvings for x <= 0, with twice the error of `exp` and two instructions and a predicate less.

    The square of the exponential of half of x, which is a normal number, so that subnormal results are kept here too: a
    small share of a large source counts.
    """
    half = ptx.exp2_normal(x * (0.5 * LOG2_E) - 0.5 * halvings)
    return half * half


def softmax(logits, exponential=exp):
    """Returns (m, e, l): the largest logit m, e = exponential(logit - m) of each, and their sum l."""
    m = tree(ptx.fmax, logits)
    e = [exponential(logit - m) for logit in logits]
    return m, e, tree_sum(e)


def tree_sum(parts):
    """Adds fp32 values pairwise."""
    return tree(operator.add, parts)


def tree(operation, parts):
    """Combines values pairwise by an operation of two until one is left."""
    while len(parts) > 1:
        parts = [operation(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)] + parts[len(parts) // 2 * 2 :]
    return parts[0]


def select(condition, yes, no):
    return cutlass.select_(condition, yes, no)

"""The arithmetic of mixing sources, once their sums over the row are known; the symbols are those of `consumer`.

Every thread works out the shares from the same sums, and mixes its own elements by them.
"""

from functools import partial
from typing import NamedTuple

from cutlass import Boolean, Float32

from attnres_aot.kernels import ptx
from attnres_aot.kernels.vectors import LOG2_E, combine, dot, logit, quick_exp, select, softmax, tree_sum, unpack_all

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


def mix_blocks(logits, vb):
    """Returns (m, l, M) over the saved blocks, l and M by 2**SPARE too small: softmax in every thread, M per element."""
    m, e, l = softmax(logits, partial(quick_exp, halvings=SPARE))  # e: [nb]
    return m, l, combine(e, [unpack_all(vecs, launder=True) for vecs in vb])


def gram_size(n):
    """How many `gram_products` n sources have."""
    return 2 * n + n * (n - 1) // 2


def gram_products(v, w):
    """The thread's parts of v_s . v_s and v_s . w of each source, and of v_s . v_t of each pair."""
    return [dot(a, a) for a in v] + [dot(a, w) for a in v] + [dot(v[i], v[j]) for i, j in _pairs(len(v))]


def _pairs(n):
    return [(i, j) for i in range(n) for j in range(i)]


def gram_mixture(p, inv_hidden, vb, x, sums):
    """Mixes the saved blocks and the updated prefix `x`, by the row's sums of `gram_products`; returns a Mixture."""
    n = len(vb) + 1
    squares, dots, crosses = sums[:n], sums[n : 2 * n], sums[2 * n :]
    logits = [logit(vv, vw, inv_hidden, p.eps) for vv, vw in zip(squares, dots, strict=True)]  # [nb + 1]
    _, shares, s = softmax(logits, partial(quick_exp, halvings=SPARE))  # shares: [nb + 1]
    mix = combine(shares, [*(unpack_all(vecs, launder=True) for vecs in vb), x])  # [V * 8]
    terms = tree_sum([a * sq * a for a, sq in zip(shares, squares, strict=True)])
    pairs = zip(_pairs(n), crosses, strict=True)
    twice = tree_sum([shares[i] * cross * shares[j] for (i, j), cross in pairs])
    square = (terms + 2.0 * twice) * inv_hidden + p.out_eps * (s * s)
    return Mixture(mix, s, square, square < terms * (CANCEL * inv_hidden))


def fold(p, inv_hidden, x, m, l, mixed, sums, flaw=None):
    """Folds the updated prefix `x` into the mixture of the saved blocks; returns a Mixture.

    With the larger of exp(m) and exp(logit) as the unit, the shares are a of M, or `mixed`, and b of `x`, of which one is
    constant and the other has the factor e <= 1, the square of an exponential of half the difference. The mean square of
    a M + b x, and out_eps s^2, are a polynomial in e whose coefficients are there before e is. It has cancelled by
    1 / CANCEL only where its first and last terms are alike, so the first tells.
    `flaw` is NaN where statistics are of no use; blocks have their logits to say so.
    """
    h, unit, most_b, out_eps = inv_hidden, 0.5 * LOG2_E, 2.0**-SPARE, p.out_eps
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

"""Publishing rows into a mailbox slot, for consumers that read a mailbox: a copy in which every -0.0 becomes +0.0.

An empty mailbox word is 0x80000000, the bf16 pair (+0.0, -0.0). With no -0.0 in it, no published word equals that, and
a reader sees each 16-byte fragment either empty or complete. Everything else keeps its bits: NaN and its payload, Inf,
subnormals. Per word x of two bf16, in integers, so that nothing is flushed or quieted:

    t = (x & 0x7fff7fff) + 0x7fff7fff     a half's top bit is set where that half is not zero; no carry between halves
    y = x & (t | 0x7fff7fff)              keeps all bits but the sign of a zero

| operand | shape         | type | strides             | align | read | written |
|---------|---------------|------|---------------------|-------|------|---------|
| source  | [rows, H]     | bf16 | row dynamic, last 1 | 16 B  | after the wait | |
| mailbox | [capacity, H] | bf16 | H, 1                | 16 B  | | rows 0..rows-1: after the wait; one slot, here or on another GPU |

"The wait" is the dependency wait (griddepcontrol.wait). Parameters are `attnres_aot.spec.params.PUBLISH_PARAMS`.

Threads to elements: one CTA per row; thread `tid` of T owns the vectors (8 elements) i * T + tid of the row, i < V, where
T * V * 8 is H or the next multiple of 1024, and threads beyond the row store nothing. CTAs share nothing; there is no shared
memory and no synchronisation.

No clusters: a cluster starts only where all of its CTAs fit at once, and these rows may be what a consumer beside them
waits for. H200, driver 580, 2026-11-30: clusters of 7 were in the end not started while another stream's consumer of 64
rows waited for them, within 10,000 rounds; single CTAs always were.

Order of launches: dependents are released after the wait, once every CTA of this grid is on an SM, so a consumer that
polls this mailbox may spin beside them but cannot keep them out. Stores are relaxed at system scope, each fragment
whole, so a reader on any GPU needs no other signal. That the slot's last rows have been consumed is for the caller to
know: on one GPU, a consumer earlier on the same stream has consumed them, because this grid waits for it.
"""

import cutlass.cute as cute
from cutlass import Int32

from attnres_aot.kernels import ptx
from attnres_aot.kernels.vectors import VEC, Share, inside, load_row, vec_address

MAGNITUDE = 0x7FFF7FFF
"""All bits of two bf16 but their signs."""


class Publish:
    """Compiles to one image; the constructor's arguments are everything the code depends on."""

    def __init__(self, hidden, threads, vectors, min_ctas_per_sm):
        """Fixes the code's constants.

        Args:
          hidden: row length H in elements, at most threads * vectors * 8.
          threads: threads per CTA, of which a row has one.
          vectors: 16-byte vectors per thread.
          min_ctas_per_sm: CTAs that must fit one SM together, which bounds the registers per thread.
        """
        self.threads, self.vectors = threads, vectors
        self.min_ctas_per_sm = min_ctas_per_sm
        self.row_vecs = hidden // VEC

    @cute.jit
    def __call__(self, p, stream):
        """Launches one CTA per row."""
        self.kernel(p).launch(
            grid=(p.rows, 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=self.min_ctas_per_sm,
            preferred_smem_carveout=0,  # unused by our launches; unset, the DSL would ask a driver for it
        )

    @cute.kernel
    def kernel(self, p):
        """Device body: one row per CTA."""
        tid, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        cols = [i * self.threads + tid for i in range(self.vectors)]  # [V]
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        share = Share(row, cols, inside(cols, self.row_vecs, self.threads * self.vectors))
        vs = load_row(p.source, p.source_row_stride, share, ptx.ld_vec)  # [V] vectors
        for vec, col, on in zip(vs, cols, share.on, strict=True):
            to = vec_address(p.mailbox, row, Int32(self.row_vecs), col)
            ptx.st_vec_mailbox(to, _without_negative_zero(vec), on)


def _without_negative_zero(words):
    """Clears the sign of every zero in pairs of bf16."""
    return tuple(word & (((word & MAGNITUDE) + MAGNITUDE) | MAGNITUDE) for word in words)

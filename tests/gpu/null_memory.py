"""Launches with memory that is gone, of one kind, and fails if that is not refused or the CUDA context is lost.

A program of its own for test_operands.py, because a launch that gets through ends the context of its process.

    null_memory.py weights|mailbox|statistics|publish|operand before|after
"""

import sys

import torch

import attnres_aot
from attnres_aot import OperandError, PreparedAttnRes, PreparedPublish, Variant
from attnres_aot.selftest.suite import bundle_variants

ROWS = 4


def lose(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)
    torch.cuda.empty_cache()


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bfloat16, device="cuda")


def main(what: str, when: str) -> str | None:
    """Returns what went wrong."""
    bundle = attnres_aot.load()
    wanted = {"mailbox": lambda v: v.slots > 1 and not v.stats, "statistics": lambda v: v.stats and not v.slots}
    condition = wanted.get(what, lambda v: not v.slots and not v.stats)
    manifest = bundle.bundle.manifest
    variant: Variant = next(
        v for v in bundle_variants(manifest) if condition(v) and v.key.nb and not v.aux and v.key.write is None
    )
    hidden = bundle.hidden
    weights = [ones(hidden) for _ in range(3)]
    delta, prefix, out = (ones(ROWS, hidden) for _ in range(3))
    blocks = ones(ROWS, 8, hidden)
    mailbox = attnres_aot.new_mailbox(variant.slots or manifest.mailbox.slots[0], 8, hidden)
    mixture, scal = torch.ones(8, hidden, device="cuda"), torch.ones(8, 2, device="cuda")
    gone = {"weights": weights[1], "mailbox": mailbox, "publish": mailbox, "operand": delta, "statistics": scal}[what]
    torch.cuda.synchronize()
    try:
        if when == "before":
            lose(gone)
        if what == "publish":
            made = PreparedPublish(mailbox, 0, bundle)
            launch = lambda: made.run(delta)  # noqa: E731 - one of four
        else:
            prepared = PreparedAttnRes(weights, variant.key, 1e-5, bundle)
            if what == "mailbox":
                prepared.bind_ring(mailbox, spin_budget=10_000)
                launch = lambda: prepared.run_ring(prefix, blocks, out)  # noqa: E731
            else:
                if what == "statistics":
                    prepared.bind_statistics(mixture, scal, [ROWS])
                launch = lambda: prepared.run(delta, prefix, blocks, out)  # noqa: E731
        if when == "after":
            if what != "mailbox":  # nothing is published there, so a launch before would wait in vain
                launch()
            lose(gone)
        launch()
        problem: str | None = "it was launched"
    except OperandError as error:
        problem = None if "no memory" in str(error) else f"it was refused for another reason: {error}"
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        problem = f"{problem}; the context is lost: {str(error).splitlines()[0]}"
    return problem


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Makes and arms Lamport mailboxes, and says what a bound one must be.

A mailbox is a contiguous bf16 tensor [slots, capacity, H]. It is armed (empty) when every 32-bit word of it is
0x80000000, the bf16 pair (+0.0, -0.0). A publisher writes 16-byte fragments that never hold that word: it turns -0.0
into +0.0. A ring consumer waits for every fragment of the rows that it reads and re-arms each.
"""

from __future__ import annotations

import torch

from attnres_aot.errors import OperandError
from attnres_aot.runtime.operands.geometry import MAX_STRIDE, VECTOR_ELEMS, vector_problems
from attnres_aot.runtime.operands.integers import whole

ARMED_WORD = -0x80000000
"""The empty word, 0x80000000, as a signed 32-bit integer."""


def new_mailbox(slots: int, capacity: int, hidden: int, device: torch.device | str | int | None = None) -> torch.Tensor:
    """Returns an armed mailbox.

    Args:
      slots: partial sums per row, at least 1.
      capacity: rows per slot.
      hidden: row length H in elements.
      device: where; None is torch's current CUDA device.

    Returns:
      A contiguous bf16 tensor [slots, capacity, hidden].

    Raises:
      OperandError: a size is no whole number that a mailbox can have, or a slot is too large for a kernel's strides.
      RuntimeError: torch has no such device, or no memory for it (`torch.cuda.OutOfMemoryError`).
    """
    sizes = {"slots": whole(slots), "capacity": whole(capacity), "hidden": whole(hidden)}
    shape = tuple([size for size in sizes.values() if size is not None and size > 0])
    if len(shape) < len(sizes) or shape[-1] % VECTOR_ELEMS:
        wrong = [name for name, size in sizes.items() if size is None or size < 1] or ["hidden"]
        asked = f"slots {slots!r}, capacity {capacity!r}, hidden {hidden!r}"
        raise OperandError(
            f"{asked}: whole numbers from 1 are wanted, hidden a multiple of {VECTOR_ELEMS}; not so: {', '.join(wrong)}"
        )
    where = torch.device("cuda") if device is None else torch.device(device)
    mailbox = torch.empty(shape, dtype=torch.bfloat16, device=where)
    arm(mailbox)
    return mailbox


def arm(mailbox: torch.Tensor) -> None:
    """Empties a mailbox, on the current stream: fills every 32-bit word with 0x80000000.

    Raises:
      OperandError: not a contiguous bf16 tensor [slots, capacity, H] of an even H.
    """
    problems = mailbox_problems(mailbox, hidden=-1)
    if problems:
        raise OperandError("\n".join(problems))
    mailbox.view(torch.int32).fill_(ARMED_WORD)


def mailbox_problems(mailbox: torch.Tensor, *, hidden: int) -> list[str]:
    """Lists what is wrong with a mailbox; `hidden` -1 allows any row length."""
    problems = vector_problems("mailbox", mailbox, (-1, -1, hidden), torch.bfloat16)
    if not problems and (mailbox.numel() == 0 or mailbox.shape[-1] % 8):
        problems.append(
            f"mailbox is {list(mailbox.shape)}; at least one slot and row, and H a multiple of 8, are wanted"
        )
    elif not problems and mailbox.shape[1] * mailbox.shape[2] // VECTOR_ELEMS > MAX_STRIDE:
        problems.append(
            f"mailbox is {list(mailbox.shape)}, {mailbox.shape[1] * mailbox.shape[2]} elements between slots; at most "
            f"{MAX_STRIDE * VECTOR_ELEMS} are allowed: bind one of fewer rows per slot"
        )
    return problems

"""Makes and arms Lamport mailboxes, and says what a bound one must be.

A mailbox is a contiguous bf16 tensor [slots, capacity, H]. It is armed (empty) when every 32-bit word of it is
0x80000000, the bf16 pair (+0.0, -0.0). A publisher writes 16-byte fragments that never hold that word: it turns -0.0
into +0.0. A ring consumer waits for every fragment of the rows that it reads and arms each again.
"""

from __future__ import annotations

import torch

from attnres_aot.errors import OperandError
from attnres_aot.runtime.operands import vector_problems

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
    """
    where = torch.device("cuda") if device is None else torch.device(device)
    mailbox = torch.empty((slots, capacity, hidden), dtype=torch.bfloat16, device=where)
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
    return problems

"""A publisher beside a launch: fills a mailbox word by word, in any order, while the consumer polls it."""

from __future__ import annotations

import torch
from torch import Tensor

from attnres_aot.selftest import reference


class LatePublisher:
    """Takes the rows out of a mailbox and publishes them again as the machine goes on."""

    def __init__(
        self, mailbox: Tensor, *, start: int, steps: int, seed: int, keep_back: int = 0, empty: bool = True
    ) -> None:
        """Empties the mailbox.

        Args:
          mailbox: [slots, rows, H] bf16, published.
          start: step of the machine at which the first words come.
          steps: steps until all are there.
          seed: of the order.
          keep_back: words that never come.
          empty: without it the rows stay, and are published a second time.
        """
        values = mailbox.clone()
        if empty:
            reference.arm(mailbox)
        self._mailbox = mailbox.view(torch.int32)
        self._start, self._steps = start, steps
        order = torch.randperm(values.numel() // 2, generator=torch.Generator().manual_seed(seed))
        self._places = [torch.stack(torch.unravel_index(part, self._mailbox.shape)) for part in order.chunk(steps)]
        last = self._places[-1].shape[1] - keep_back
        self._places[-1], self.missing = self._places[-1][:, :last], self._places[-1][:, last:]
        self._values = values.view(torch.int32)

    def __call__(self, step: int) -> None:
        """Publishes what is due at a step."""
        due = step - self._start
        if 0 <= due < len(self._places):
            places = tuple(self._places[due])
            self._mailbox[places] = self._values[places]

"""Row counts as they are given to the commands that launch kernels: `1,2,16`."""

from __future__ import annotations

import re

from attnres_aot.errors import UsageError


def parse_rows(text: str, most: int) -> tuple[int, ...]:
    """Parses row counts in the order given, without repeats.

    Raises:
      UsageError: not numbers, none at all, or one outside 1..most.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,9}", word) and 1 <= int(word) <= most for word in words):
        example = ",".join(str(rows) for rows in (1, 16, 64) if rows <= most)
        raise UsageError(
            f"--rows {text!r:.80}: row counts from 1 to {most} are wanted, with commas between, e.g. {example}"
        )
    return tuple(dict.fromkeys(map(int, words)))

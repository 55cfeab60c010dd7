"""The list of mistakes found in one configuration file, and how one is worded."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

MOST_REPORTED = 50
"""Mistakes listed in full; a file with more gets a count of the rest."""
MOST_CHARACTERS = 32_000
"""Characters in which mistakes are listed; whatever the file and its path, a message stays readable."""
LONGEST_TEXT = 600
"""Characters of one mistake; a longer text is cut."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Problem:
    """One mistake."""

    line: int
    """Line of the file, from 1."""
    order: int
    """How many were found before it; breaks ties between mistakes of one line."""
    path: str
    """Path of the field, e.g. `deployments[0].tp`; empty for the file as a whole."""
    text: str
    """What was found, what is allowed, what to do."""


class Problems:
    """Collects the mistakes of one file."""

    def __init__(self, where: str) -> None:
        self.where = where
        self._found: list[Problem] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, line: int, path: str, text: str) -> None:
        """Adds one mistake of the field `path` on `line`."""
        if len(text) > LONGEST_TEXT:
            half = LONGEST_TEXT // 2
            text = f"{text[:half]} ... {text[-half:]}"
        self._found.append(Problem(line=line, order=len(self._found), path=path, text=text))

    def lines(self) -> list[str]:
        """Returns one text per mistake, in file order: `FILE:LINE: field.path: what`."""
        texts = [
            f"{self.where}:{problem.line}: " + (f"{problem.path}: " if problem.path else "") + problem.text
            for problem in sorted(self._found)
        ]
        lengths = itertools.accumulate(map(len, texts))
        shown = max(1, min(MOST_REPORTED, sum(length <= MOST_CHARACTERS for length in lengths)))
        if len(texts) > shown:
            texts[shown:] = [f"{self.where}: {len(texts) - shown} more mistakes; mend these first"]
        return texts

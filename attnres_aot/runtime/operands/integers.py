"""Takes whole numbers as Python does: anything with `__index__`, such as numpy's integers, but no bool and no float."""

from __future__ import annotations

import operator
from typing import Any


def whole(value: Any) -> int | None:
    """Returns a whole number as an int; None for anything else."""
    if type(value) is int:
        return value
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None

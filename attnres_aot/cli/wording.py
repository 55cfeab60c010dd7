"""How the commands word counts, numbers and deployments."""

from __future__ import annotations

from collections.abc import Iterable


def error_text(message: str) -> str:
    """Writes an error message as the commands show it."""
    lines = message.splitlines()
    return "\n  ".join(["error:", *lines]) if len(lines) > 1 else f"error: {message}"


def count(number: int, noun: str) -> str:
    """Writes a number of things, e.g. `1 image`, `2 images`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def megabytes(number: int) -> str:
    """Writes a number of bytes in kB, MB or GB."""
    if number < 1e6:
        return f"{number / 1e3:.1f} kB"
    return f"{number / 1e6:.1f} MB" if number < 1e9 else f"{number / 1e9:.2f} GB"


def pairs(deployments: Iterable[tuple[int, int]]) -> str:
    """Writes (tp, dcp) pairs, e.g. `(8,1) (8,8)`."""
    return " ".join(f"({tp},{dcp})" for tp, dcp in deployments)


def ranges(numbers: Iterable[int]) -> str:
    """Writes numbers as ascending ranges, e.g. `0, 2-8`."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def span(numbers: Iterable[int]) -> str:
    """Writes the smallest and the largest number, e.g. `63-96`."""
    known = set(numbers)
    return str(min(known)) if len(known) == 1 else f"{min(known)}-{max(known)}"


def source_name(slots: int) -> str:
    """Writes where a consumer's source row comes from."""
    return f"mailbox of {count(slots, 'slot')}" if slots else "ordinary source"

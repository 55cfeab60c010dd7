"""Every exception this package raises on purpose.

One base class, a handful of children. A message says what was asked, what was found, what is allowed and what
to do next. Only `attnres_aot.cli` maps classes to exit statuses.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

_LONGEST_WORD = 200  # nothing that is offered comes near, and comparing takes quadratic time


class AttnResError(Exception):
    """Base class of every error that this package raises on purpose."""


class UsageError(AttnResError):
    """A request that can never work: an unknown arch, a contradictory option, an impossible argument."""


class ConfigError(AttnResError):
    """A configuration file with one or more mistakes; `problems` holds one line per mistake, in file order."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems: tuple[str, ...] = tuple(problems)
        super().__init__("\n".join(self.problems))


class CompileError(AttnResError):
    """An image that could not be compiled, or whose binary is not what was asked for."""


class BundleError(AttnResError):
    """A bundle that is missing, unreadable, damaged, or not for this device."""


class VariantMissError(BundleError):
    """A variant that the bundle does not hold."""


class OperandError(AttnResError, ValueError):
    """An operand (tensor or scalar) that a launch cannot take; names the operand, what it is and what is allowed."""


class MissingTorchError(AttnResError, ModuleNotFoundError):
    """Something of this package that needs torch was asked for where torch is not installed."""


class DriverError(AttnResError, RuntimeError):
    """The CUDA driver is missing, too old, or refused a call; carries the driver's own error name."""


def clip(text: str, limit: int) -> str:
    """Cuts the middle out of a text of more than `limit` characters, so that no input makes a message long."""
    if len(text) <= limit:
        return text
    head = limit * 2 // 3
    return f"{text[:head]}...{text[head - limit :]}"


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Returns `" (did you mean 'x'?)"` for the closest of `choices`, or an empty string when none is close."""
    if len(word) > _LONGEST_WORD:
        return ""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""

"""How a launch may overlap the kernel before it: programmatic dependent launch (PDL), asked for by name.

With `pdl=True` a launch may start while the kernel before it on the stream still runs. The consumer then waits for that
kernel before it reads the delta or statistics, looks at a mailbox, or writes anything:

    read before that wait   prefix, saved blocks, weights: complete before the kernel before starts
    read after it           delta, statistics, mailbox rows: the kernel before may still write them
    written after it        prefix, written block, aux, out, mailbox: the kernel before may still read or write them,
                            but no prefix, as far as this launch reads it

With `pdl="early"` a consumer with a mailbox does not wait before it looks and writes. Beside the above the caller then
promises, of everything that may still run when the kernel before starts, and of that kernel itself:

    prefix, written block, aux, out   none reads or writes them
    the mailbox                       none consumes it or arms it
"""

from __future__ import annotations

from typing import Literal

from attnres_aot.errors import UsageError

EARLY: Literal["early"] = "early"
"""The launch mode in which the caller promises more, so that a consumer with a mailbox need not wait."""
Pdl = bool | Literal["early"]
"""Launch modes: False (after everything before it), True, EARLY."""


def pdl_name(pdl: Pdl) -> str:
    """Returns what people call a launch mode: off, on or early."""
    return EARLY if pdl == EARLY else "on" if pdl else "off"


def check_pdl(pdl: object) -> Pdl:
    """Returns the launch mode of a consumer.

    Raises:
      UsageError: not a launch mode.
    """
    if pdl is True or pdl is False:
        return pdl
    if pdl == EARLY:
        return EARLY
    raise UsageError(f"pdl is {pdl!r}; allowed are False, True and {EARLY!r}: see the tables of 'Launch order and PDL'")


def check_producer_pdl(pdl: object) -> bool:
    """Returns the launch mode of a producer, which has no early one: it always waits before it writes.

    Raises:
      UsageError: not a launch mode of producers.
    """
    if pdl is True or pdl is False:
        return pdl
    raise UsageError(f"pdl is {pdl!r}; a producer allows False and True: it always waits for the kernel before it")

"""What a caller can ask for (variants, producers) and what is compiled for it (image specs), with the names of all.

A variant is a consumer key, a source and options. Several variants share one compiled image: the block that is
written, the aux copy and the mailbox capacity are run-time arguments of the kernel, and a kernel that takes
precomputed statistics reads no saved block, so its code does not depend on how many there are.

A producer makes what some variants take: the statistics of nb saved blocks, or the rows of a mailbox.

Names have one writer (`str`) and one parser (`parse_variant`, `parse_producer`):

    nb7-delta-write7-final-ring8-aux-stats
    statistics-nb8
    publish
"""

from __future__ import annotations

import re
from dataclasses import replace
from operator import index
from typing import ClassVar

from attnres_aot.errors import UsageError
from attnres_aot.records import record

ELEMS_PER_CTA = 1024
"""Row elements that one CTA of a cluster handles; the last of a row may have fewer."""
HIDDEN_STEP = 256
"""Hidden sizes are multiples of this: what a warp handles with one vector a thread."""
MAX_CLUSTER = 8
"""Largest cluster that every supported GPU launches (the portable cluster size)."""
MAX_BLOCKS = 16
"""Most saved blocks that one consumer reads: the sums of their products fill a warp."""
FEW_BLOCKS = 8
"""Most saved blocks for which there is a wide shape; two vectors of more fill the registers."""
MAX_SLOTS = 16
"""Most mailbox slots that one consumer sums."""
MAX_DEPLOYMENTS = 32
"""Most deployments, (tp, dcp) pairs, that one bundle serves."""
NARROW_ROWS = 16
"""Most rows for which an ordinary consumer has the narrow shape; H200, 2026-11-30: faster or equal up to here."""
MANY_BLOCKS, NARROW_ROWS_OF_MANY = 4, 8
"""Saved blocks from which on it is that many rows instead; measured likewise."""

ROWS_PER_CLUSTER = 1
"""Rows that one cluster of any kernel handles."""
SYMBOL_END = "_cutlass_0"
"""How the compiler ends a kernel's symbol. Its assembler makes other, unmeasured code where this word is missing."""

STATISTICS, PUBLISH = "statistics", "publish"
"""Kernels of producers."""

_PRODUCER_NAME = r"statistics-nb([1-9][0-9]{0,3})|publish"
_NAME = r"nb([0-9]{1,4})(-delta)?(?:-write([0-9]{1,4}))?(-final)?(?:-ring([0-9]{1,4}))?(-aux)?(-stats)?"
_CONSUMER_IMAGE = r"h([0-9]{1,6})-(?:stats|nb([0-9]{1,4}))(-delta)?(-final)?(?:-ring([0-9]{1,4}))?(-wide)?"
_PRODUCER_IMAGE = r"h([0-9]{1,6})-(?:publish|statistics-nb([0-9]{1,4}))"


@record(frozen=True, slots=True, kw_only=True, order=True)
class ConsumerKey:
    """Which consumer of the model: the four facts that a decoder layer fixes."""

    nb: int
    """Number of saved blocks that the consumer mixes, 0..MAX_BLOCKS."""
    has_delta: bool
    """The source is added to the prefix; otherwise the source replaces it."""
    write: int | None = None
    """Block index that receives the updated prefix, or None."""
    final: bool = False
    """The consumer at the end of the model, which rounds the mixture before the output norm."""


KeyLike = ConsumerKey | tuple[int, bool, int | None, bool]
"""A consumer key, or its facts in order: (nb, has_delta, write, final), with None or a negative number for no write."""


def consumer_key(key: KeyLike) -> ConsumerKey:
    """Returns the key that a caller means; a negative block to write is no block.

    Raises:
      UsageError: neither a ConsumerKey nor its four facts.
    """
    if isinstance(key, ConsumerKey):
        return key if key.write is None or key.write >= 0 else replace(key, write=None)
    try:
        nb, has_delta, write, final = key
        block = None if write is None else index(write)
        return ConsumerKey(
            nb=index(nb),
            has_delta=bool(has_delta),
            write=None if block is None or block < 0 else block,
            final=bool(final),
        )
    except (TypeError, ValueError):
        raise UsageError(
            f"{key!r:.200} is not a consumer key; a ConsumerKey is wanted, or (nb, has_delta, write, final) with the "
            "number of saved blocks, and -1 or None for a consumer that writes none"
        ) from None


@record(frozen=True, slots=True, kw_only=True)
class Variant:
    """One consumer that a caller can ask for."""

    key: ConsumerKey
    """Which consumer."""
    slots: int = 0
    """0: ordinary source; n >= 1: a Lamport mailbox of n slots."""
    aux: bool = False
    """Also writes a second copy of the updated prefix."""
    stats: bool = False
    """Takes precomputed statistics of the saved blocks instead of reading them."""

    def __str__(self) -> str:
        key = self.key
        return variant_name(key.nb, key.has_delta, key.write, key.final, self.slots, self.aux, self.stats)

    @property
    def sort_key(self) -> tuple[int, bool, bool, int, bool, bool, int]:
        """Order of variants in plans, manifests and tables."""
        key = self.key
        write = -1 if key.write is None else key.write
        return (self.slots, self.stats, key.final, key.nb, not key.has_delta, self.aux, write)


def variant_name(nb: int, has_delta: bool, write: int | None, final: bool, slots: int, aux: bool, stats: bool) -> str:
    """Writes the name of the variant with these fields."""
    delta, last = "-delta" if has_delta else "", "-final" if final else ""
    written, ring = "" if write is None else f"-write{write}", f"-ring{slots}" if slots else ""
    return f"nb{nb}{delta}{written}{last}{ring}{'-aux' if aux else ''}{'-stats' if stats else ''}"


@record(frozen=True, slots=True, kw_only=True)
class Producer:
    """One producer that a caller can ask for."""

    kernel: str
    """STATISTICS or PUBLISH."""
    nb: int | None = None
    """Saved blocks that statistics are made of; None for PUBLISH."""

    def __str__(self) -> str:
        return self.kernel if self.nb is None else f"{self.kernel}-nb{self.nb}"

    @property
    def sort_key(self) -> tuple[bool, int]:
        """Order of producers in plans, manifests and tables."""
        return (self.kernel == PUBLISH, self.nb or 0)


@record(frozen=True, slots=True, kw_only=True)
class ConsumerSpec:
    """Everything that the compiled code of a consumer depends on, other than arch and toolchain."""

    kernel: ClassVar[str] = "consumer"
    """Which kernel this is a spec of."""

    hidden: int
    """Row length H in elements: a multiple of HIDDEN_STEP, at most MAX_CLUSTER * ELEMS_PER_CTA."""
    nb: int | None
    """Saved blocks that the code reads, or None for code that takes precomputed statistics."""
    has_delta: bool
    """The source is added to the prefix."""
    final: bool
    """The mixture is rounded to bf16 before the output norm."""
    slots: int
    """0: ordinary source; n: mailbox of n slots."""
    wide: bool = False
    """Fewer threads with more elements each, for launches that fill the GPU anyway."""

    def __str__(self) -> str:
        parts = [f"h{self.hidden}", "stats" if self.nb is None else f"nb{self.nb}"]
        if self.has_delta:
            parts.append("delta")
        if self.final:
            parts.append("final")
        if self.slots:
            parts.append(f"ring{self.slots}")
        if self.wide:
            parts.append("wide")
        return "-".join(parts)

    @property
    def cluster(self) -> int:
        """CTAs that share one row."""
        return -(-self.hidden // ELEMS_PER_CTA)

    @property
    def sort_key(self) -> tuple[int, int, int, bool, bool, bool]:
        """Order of images in plans and manifests."""
        nb = MAX_BLOCKS + 1 if self.nb is None else self.nb
        return (self.hidden, self.slots, nb, self.final, not self.has_delta, self.wide)


@record(frozen=True, slots=True, kw_only=True)
class StatisticsSpec:
    """Everything that the compiled code of a statistics producer depends on, other than arch and toolchain."""

    kernel: ClassVar[str] = STATISTICS
    """Which kernel this is a spec of."""

    hidden: int
    """Row length H in elements, as for a consumer."""
    nb: int
    """Saved blocks that the code reads, 1..MAX_BLOCKS."""

    def __str__(self) -> str:
        return f"h{self.hidden}-{STATISTICS}-nb{self.nb}"

    @property
    def cluster(self) -> int:
        """CTAs that share one row."""
        return -(-self.hidden // ELEMS_PER_CTA)


@record(frozen=True, slots=True, kw_only=True)
class PublishSpec:
    """Everything that the compiled code of a publisher depends on, other than arch and toolchain."""

    kernel: ClassVar[str] = PUBLISH
    """Which kernel this is a spec of."""

    hidden: int
    """Row length H in elements, as for a consumer."""

    def __str__(self) -> str:
        return f"h{self.hidden}-{PUBLISH}"

    @property
    def cluster(self) -> int:
        """CTAs per row: one, because a cluster might not start beside the consumer that waits for its row."""
        return 1


ImageSpec = ConsumerSpec | StatisticsSpec | PublishSpec
"""What an image is compiled from."""


def kernel_symbol(image: str) -> str:
    """Returns the symbol of the one kernel in the binary of the image called `image`.

    It is the image's alone, so that code which got under another image's name is never found there.
    """
    return f"attnres_{image.replace('-', '_')}{SYMBOL_END}"


def producer_spec_for(producer: Producer, hidden: int) -> StatisticsSpec | PublishSpec:
    """Returns the spec of the image that serves `producer` for rows of `hidden` elements."""
    if producer.nb is None:
        return PublishSpec(hidden=hidden)
    return StatisticsSpec(hidden=hidden, nb=producer.nb)


def producers_for(variant: Variant) -> tuple[Producer, ...]:
    """Returns the producers whose results `variant` takes."""
    statistics = (Producer(kernel=STATISTICS, nb=variant.key.nb),) if variant.stats else ()
    return (*statistics, *((Producer(kernel=PUBLISH),) if variant.slots else ()))


@record(frozen=True, slots=True, kw_only=True)
class SpecChoice:
    """One of the images that serve a variant, by row count."""

    spec: ConsumerSpec
    """What the image is compiled from."""
    max_rows: int | None
    """Largest row count it serves, or None for no limit."""


def choices_for(variant: Variant, hidden: int) -> tuple[SpecChoice, ...]:
    """Returns the images that serve `variant` for rows of `hidden` elements, ascending by row count, the last for any.

    Measured on an H200, 2026-11-30 (docs/benchmarks.md): the wide shape is faster above NARROW_ROWS, with many blocks
    above NARROW_ROWS_OF_MANY; with a mailbox or statistics the narrow one is. More than FEW_BLOCKS have only that.
    """
    narrow = ConsumerSpec(
        hidden=hidden,
        nb=None if variant.stats else variant.key.nb,
        has_delta=variant.key.has_delta,
        final=variant.key.final,
        slots=variant.slots,
    )
    if variant.slots or variant.stats or variant.key.nb > FEW_BLOCKS:
        return (SpecChoice(spec=narrow, max_rows=None),)
    wide = SpecChoice(spec=replace(narrow, wide=True), max_rows=None)
    few = NARROW_ROWS_OF_MANY if variant.key.nb >= MANY_BLOCKS else NARROW_ROWS
    return (SpecChoice(spec=narrow, max_rows=few), wide)


def parse_image(name: str) -> ImageSpec:
    """Parses an image name as written by `str(spec)`.

    Raises:
      UsageError: `name` is not an image's name.
    """
    spec: ImageSpec | None = None
    if match := re.fullmatch(_CONSUMER_IMAGE, name):
        hidden, nb, delta, final, slots, wide = match.groups()
        spec = ConsumerSpec(
            hidden=int(hidden),
            nb=None if nb is None else int(nb),
            has_delta=bool(delta),
            final=bool(final),
            slots=int(slots or 0),
            wide=bool(wide),
        )
    elif match := re.fullmatch(_PRODUCER_IMAGE, name):
        hidden, nb = match.groups()
        spec = PublishSpec(hidden=int(hidden)) if nb is None else StatisticsSpec(hidden=int(hidden), nb=int(nb))
    if spec is None or str(spec) != name:
        raise UsageError(f"{name!r:.200} is not an image name, such as 'h7168-nb8-delta-ring8' or 'h7168-publish'")
    return spec


def parse_variant(name: str) -> Variant:
    """Parses a variant name as written by `str(variant)`.

    Raises:
      UsageError: `name` is not a variant name.
    """
    match = re.fullmatch(_NAME, name)
    if match is None:
        raise UsageError(
            f"{name!r:.200} is not a variant name; the form is nbN[-delta][-writeN][-final][-ringN][-aux][-stats], "
            "e.g. 'nb8-delta-ring8-aux'"
        )
    nb, delta, write, final, slots, aux, stats = match.groups()
    variant = Variant(
        key=ConsumerKey(
            nb=int(nb), has_delta=bool(delta), write=None if write is None else int(write), final=bool(final)
        ),
        slots=int(slots or 0),
        aux=bool(aux),
        stats=bool(stats),
    )
    if str(variant) != name:
        raise UsageError(f"{name!r} is not a variant name: write {str(variant)!r}")
    return variant


def parse_producer(name: str) -> Producer:
    """Parses a producer name as written by `str(producer)`.

    Raises:
      UsageError: `name` is not a producer name.
    """
    match = re.fullmatch(_PRODUCER_NAME, name)
    if match is None:
        raise UsageError(f"{name!r:.200} is not a producer name; the forms are statistics-nbN and publish")
    return Producer(kernel=PUBLISH) if match[1] is None else Producer(kernel=STATISTICS, nb=int(match[1]))

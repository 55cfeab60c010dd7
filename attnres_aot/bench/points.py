"""What is measured: points (work, variant, rows, PDL, state of the L2), and which of them a run means. Pure."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, replace

from attnres_aot.bundle.manifest import Manifest
from attnres_aot.errors import UsageError, did_you_mean
from attnres_aot.runtime.launch.pdl import EARLY, Pdl
from attnres_aot.spec.variants import PUBLISH, STATISTICS, ConsumerKey, Producer, Variant, parse_variant

CONSUMER, RING, CHAIN, PUBLISHED = "consumer", "ring", "statistics+consumer", "publish+consumer"
"""Kinds of work: launches of one consumer; a copy into the mailbox and a ring consumer, less the copy alone; the
statistics kernel, or the publisher, and the consumer that takes what it makes."""
ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Row counts of the kinds without a mailbox, unless others are asked for."""
RING_ROWS = (1, 4, 16, 64)
"""Row counts of ring consumers, unless others are asked for."""
QUICK_ROWS = (1, 8, 64)
"""Row counts of a quick run."""
MAX_ROWS = 4096
"""Most rows of a point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a table: a kind of work on one variant."""

    work: str
    """CONSUMER, RING, CHAIN or PUBLISHED."""
    variant: Variant
    """Which consumer."""

    def __str__(self) -> str:
        return label(self.work, str(self.variant))


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What a run measures."""

    globs: tuple[str, ...]
    """Patterns of variant names; none: the default variants."""
    rows: tuple[int, ...]
    """Row counts; none: the default ones of each kind of work."""
    pdl: tuple[Pdl, ...]
    """Launch modes."""
    cold: tuple[bool, ...]
    """L2 states."""


def label(work: str, variant: str) -> str:
    """Names a line: the variant, behind the kernel that is launched before it."""
    producer, _, consumer = work.rpartition("+")
    return f"{producer} + {variant}" if consumer and producer else variant


def holds(manifest: Manifest, producer: Producer) -> bool:
    """Tells whether a bundle has a producer."""
    return any(record.name == str(producer) for record in manifest.producers)


def default_variants(manifest: Manifest) -> list[Variant]:
    """Returns the variants that stand for a model, as far as the bundle holds them.

    First, last and middle keys with an ordinary source; mailboxes of the two smallest slot counts; statistics.
    """
    model = manifest.model
    last = -(-model.layers // model.block_size)
    middle = max(1, last // 2)

    def key(nb: int, *, write: int | None = None, final: bool = False) -> ConsumerKey:
        return ConsumerKey(nb=nb, has_delta=nb > 0, write=write, final=final)

    wanted = [Variant(key=key(0, write=0))]
    wanted += [Variant(key=key(nb)) for nb in (1, middle, last)]
    wanted += [Variant(key=key(last - 1, write=last - 1)), Variant(key=key(last, final=True))]
    wanted += [Variant(key=key(nb), stats=True) for nb in (1, middle, last)]
    for slots in manifest.mailbox.slots[:2]:
        wanted += [Variant(key=key(nb), slots=slots) for nb in (1, last)]
        wanted += [Variant(key=key(last, final=True), slots=slots)] if slots == 1 else []
    present = {record.name for record in manifest.variants}
    return [variant for variant in dict.fromkeys(wanted) if str(variant) in present]


def match_variants(manifest: Manifest, globs: Sequence[str]) -> list[Variant]:
    """Returns the variants of a bundle whose names match any pattern, in the manifest's order.

    Raises:
      UsageError: a pattern matches none.
    """
    names = [record.name for record in manifest.variants]
    example = f", e.g. '{names[0][:3]}*'" if names else ""
    wanted: set[str] = set()
    for glob in globs:
        found = fnmatch.filter(names, glob)
        if not found:
            raise UsageError(
                f"--variants {glob!r} matches none of the bundle's {len(names)} variants{did_you_mean(glob, names)}; "
                f"it must match a whole name{example}; `attnres-aot inspect BUNDLE --json` lists them"
            )
        wanted.update(found)
    return [parse_variant(name) for name in names if name in wanted]


def select(manifest: Manifest, selection: Selection) -> list[Series]:
    """Returns the lines of the tables that a selection means: mailboxes last, statistics beside their plain twins.

    Raises:
      UsageError: a pattern matches no variant, or there is nothing to measure.
    """
    variants = match_variants(manifest, selection.globs) if selection.globs else default_variants(manifest)
    if not variants:
        raise UsageError(
            f"bundle {manifest.name} holds none of the variants that are measured by default; "
            "choose some with --variants, e.g. --variants '*'"
        )
    ordinary = [variant for variant in variants if not variant.slots]
    plain = [variant for variant in ordinary if not variant.stats]
    twins = {replace(variant, stats=False): variant for variant in ordinary if variant.stats}
    lines = []
    for variant in plain:
        lines.append(Series(work=CONSUMER, variant=variant))
        if variant in twins:
            lines += _with_statistics(manifest, twins.pop(variant))
    for variant in twins.values():
        lines += _with_statistics(manifest, variant)
    ring = [variant for variant in variants if variant.slots]
    if holds(manifest, Producer(kernel=PUBLISH)):
        lines += [Series(work=PUBLISHED, variant=variant) for variant in ring if variant.slots == 1]
    return [*lines, *(Series(work=RING, variant=variant) for variant in ring)]


def modes_for(series: Series, selection: Selection) -> tuple[Pdl, ...]:
    """Returns the launch modes of one line: "early" is a mode of its own for mailboxes only."""
    return tuple(pdl for pdl in selection.pdl if series.variant.slots or pdl != EARLY)


def _with_statistics(manifest: Manifest, variant: Variant) -> list[Series]:
    """Returns the lines of a variant with statistics: by itself, and behind the kernel that makes them."""
    made = holds(manifest, Producer(kernel=STATISTICS, nb=variant.key.nb))
    return [Series(work=work, variant=variant) for work in ((CONSUMER, CHAIN) if made else (CONSUMER,))]


def rows_for(series: Series, selection: Selection, capacity: int) -> tuple[int, ...]:
    """Returns the row counts of one line; a mailbox limits them to its capacity."""
    if not series.variant.slots:
        return selection.rows or ROWS
    return tuple(rows for rows in selection.rows or RING_ROWS if rows <= capacity)

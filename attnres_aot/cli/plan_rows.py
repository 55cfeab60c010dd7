"""A plan as rows that a person can read: variants of one kind together, with their saved blocks as ranges."""

from __future__ import annotations

from dataclasses import dataclass

from attnres_aot.cli.wording import ranges
from attnres_aot.plan.plan import Plan, PlannedVariant, Position

_SHORT: dict[tuple[Position, ...], str] = {
    (Position.BEFORE_ATTENTION, Position.BEFORE_MLP): "before attn, MLP",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Variants of one source that differ only in saved blocks, aux and statistics."""

    where: str
    """Positions in the model."""
    blocks: str
    """Saved blocks, e.g. `1-8`."""
    consumer: str
    """The rest of the key: delta, written block, final."""
    plain: int
    """Variants without options."""
    aux: int
    """Variants with aux alone."""
    stats: int
    """Variants with statistics alone."""
    aux_stats: int
    """Variants with both."""
    images: int
    """Images that serve them; rows of one source may share some."""
    deployments: tuple[tuple[int, int], ...]
    """(tp, dcp) pairs that need them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The variants of one source."""

    slots: int
    """0 for an ordinary source, else mailbox slots."""
    variants: int
    """Variants in all."""
    images: int
    """Distinct images; no other source uses them."""
    deployments: tuple[tuple[int, int], ...]
    """(tp, dcp) pairs that need some of them, ascending."""
    rows: tuple[Row, ...]
    """The variants by kind, in the order of the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """What the variants of one row have in common."""

    where: str
    consumer: str
    deployments: tuple[tuple[int, int], ...]


def sources(plan: Plan) -> list[Source]:
    """Groups a plan's variants by source."""
    by_slots: dict[int, list[PlannedVariant]] = {}
    for planned in plan.variants:
        by_slots.setdefault(planned.variant.slots, []).append(planned)
    return [
        Source(
            slots=slots,
            variants=len(members),
            images=len({choice.spec for member in members for choice in member.choices}),
            deployments=tuple(sorted({pair for member in members for pair in member.deployments})),
            rows=tuple(_rows(members)),
        )
        for slots, members in sorted(by_slots.items())
    ]


def _rows(members: list[PlannedVariant]) -> list[Row]:
    """One row per kind and set of options, so that a row's ranges hold for each of its counts."""
    by_kind: dict[_Kind, dict[int, list[PlannedVariant]]] = {}
    for member in members:
        by_kind.setdefault(_kind(member), {}).setdefault(member.variant.key.nb, []).append(member)
    rows = []
    for kind, by_nb in by_kind.items():
        by_options: dict[frozenset[tuple[bool, bool]], list[int]] = {}
        for nb, alike in by_nb.items():
            by_options.setdefault(frozenset(map(_options, alike)), []).append(nb)
        rows += [_row(kind, nbs, [member for nb in nbs for member in by_nb[nb]]) for nbs in by_options.values()]
    return rows


def _kind(planned: PlannedVariant) -> _Kind:
    key = planned.variant.key
    words = [
        "delta" if key.has_delta else "no delta",
        "" if key.write is None else "write nb" if key.write == key.nb else f"write {key.write}",
        "final" if key.final else "",
    ]
    named = ", ".join(position.value for position in planned.positions)
    return _Kind(
        where=_SHORT.get(planned.positions, named),
        consumer=", ".join(filter(None, words)),
        deployments=planned.deployments,
    )


def _row(kind: _Kind, nbs: list[int], members: list[PlannedVariant]) -> Row:
    options = [_options(member) for member in members]
    return Row(
        where=kind.where,
        blocks=ranges(nbs),
        consumer=kind.consumer,
        plain=options.count((False, False)),
        aux=options.count((True, False)),
        stats=options.count((False, True)),
        aux_stats=options.count((True, True)),
        images=len({choice.spec for member in members for choice in member.choices}),
        deployments=kind.deployments,
    )


def _options(planned: PlannedVariant) -> tuple[bool, bool]:
    return (planned.variant.aux, planned.variant.stats)

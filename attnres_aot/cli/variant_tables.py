"""The variants and producers of a plan or of a bundle as tables: those of one kind in one row, in 80 characters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from attnres_aot.bundle.manifest import Manifest, ProducerRecord, VariantRecord
from attnres_aot.cli.printing import faint, show, show_table, strong
from attnres_aot.cli.wording import count, pairs, ranges, source_name, span

Pairs = tuple[tuple[int, int], ...]
Part = VariantRecord | ProducerRecord
"""What a caller can ask a bundle for."""
_OPTIONS = {"plain": (False, False), "aux": (True, False), "stats": (False, True), "both": (True, True)}


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the variants of one row have in common, besides that each option exists for the same saved blocks."""

    slots: int
    """0 for an ordinary source, else mailbox slots."""
    deployments: Pairs
    """(tp, dcp) pairs that need them."""
    where: str
    """Positions in the model, if known."""
    consumer: str
    """The rest of the key: delta, written block, final."""


@dataclass(slots=True)
class Row:
    """Variants of one kind that exist for the same saved blocks."""

    kind: _Kind
    """What they have in common."""
    members: list[VariantRecord] = field(default_factory=list)
    """The variants."""

    def cells(self) -> tuple[str, ...]:
        """Returns saved blocks, consumer, the number of variants by option, and of images; rows may share images."""
        options = [(member.aux, member.stats) for member in self.members]
        counts = (str(options.count(option) or "-") for option in _OPTIONS.values())
        blocks = ranges({member.nb for member in self.members}).replace(", ", ",")
        return (blocks, self.kind.consumer, *counts, str(len(images_of(self.members))))


def parts_of(manifest: Manifest) -> tuple[Part, ...]:
    """Returns the variants, then the producers, of a bundle."""
    return (*manifest.variants, *manifest.producers)


def images_of(parts: Iterable[Part]) -> set[str]:
    """Returns the names of the images that serve some variants or producers."""
    return {choice.image for part in parts for choice in part.choices}


def rows_of(variants: Iterable[VariantRecord], positions: Mapping[str, str]) -> list[Row]:
    """Groups variants by kind, and those of a kind so that a row's saved blocks hold for each of its options."""
    by_kind: dict[_Kind, dict[int, list[VariantRecord]]] = {}
    for variant in variants:
        by_kind.setdefault(_kind(variant, positions), {}).setdefault(variant.nb, []).append(variant)
    rows: dict[tuple[_Kind, frozenset[tuple[bool, bool]]], Row] = {}
    for kind, by_nb in by_kind.items():
        for members in by_nb.values():
            options = frozenset((member.aux, member.stats) for member in members)
            rows.setdefault((kind, options), Row(kind)).members.extend(members)
    return list(rows.values())


def _kind(variant: VariantRecord, positions: Mapping[str, str]) -> _Kind:
    words = [
        "delta" if variant.has_delta else "no delta",
        "" if variant.write is None else "write nb" if variant.write == variant.nb else f"write {variant.write}",
        "final" if variant.final else "",
    ]
    where = positions.get(variant.name, "")
    return _Kind(variant.slots, variant.deployments, where, ", ".join(filter(None, words)))


def show_variants(
    variants: Sequence[VariantRecord],
    everyone: Pairs,
    *,
    positions: Mapping[str, str] | None = None,
    registers: Mapping[str, int] | None = None,
) -> None:
    """Prints a table of variants by source.

    Args:
      variants: what is shown.
      everyone: every (tp, dcp) that there is.
      positions: variant -> where in the model it runs; None leaves the column out.
      registers: image -> its registers; None leaves the column out.
    """
    first, last = (() if positions is None else ("in the model",)), (() if registers is None else ("registers",))
    shown: list[Sequence[str]] = [(*first, "nb", "consumer", *_OPTIONS, "images", *last)]
    for slots in sorted({variant.slots for variant in variants}):
        members = [variant for variant in variants if variant.slots == slots]
        users = tuple(sorted({pair for member in members for pair in member.deployments}))
        counts = f"{count(len(members), 'variant')}, {count(len(images_of(members)), 'image')}"
        shown.append(f"{strong(source_name(slots))}: {counts}, for {_users(users, everyone)}")
        rows = rows_of(members, positions or {})
        for row in sorted(rows, key=lambda row: (row.kind.deployments != users, row.kind.deployments)):
            if row.kind.deployments != users:
                users = row.kind.deployments
                shown.append(f"  {faint(f'for {pairs(users)} alone:')}")
            where = () if positions is None else (row.kind.where,)
            used = () if registers is None else (span(registers[name] for name in images_of(row.members)),)
            shown.append((*where, *row.cells(), *used))
    show_table(shown, words=2 + len(first))


def show_producers(
    producers: Sequence[ProducerRecord], everyone: Pairs, registers: Mapping[str, int] | None = None
) -> None:
    """Prints a table of producers, with those of one kernel and of the same deployments in one row."""
    if not producers:
        return
    kinds: dict[tuple[str, Pairs], list[ProducerRecord]] = {}
    for producer in producers:
        kinds.setdefault((producer.kernel, producer.deployments), []).append(producer)
    rows = [("kernel", "nb", "for (tp,dcp)", "images", *(() if registers is None else ("registers",)))]
    for (kernel, deployments), members in kinds.items():
        blocks = ranges(member.nb for member in members if member.nb is not None) or "any"
        used = images_of(members)
        numbers = () if registers is None else (span(registers[name] for name in used),)
        rows.append((kernel, blocks, _users(deployments, everyone), str(len(used)), *numbers))
    show(strong(count(len(producers), "producer")))
    show_table(rows, words=3)


def _users(deployments: Pairs, everyone: Pairs) -> str:
    return "every (tp, dcp)" if deployments == everyone else pairs(deployments)

"""The plan: variants, producers and images that a configuration needs on an arch. Pure: no GPU, disk, clock, compiler.

Keys are derived layer by layer from the model's geometry. With `k` saved blocks before layer `i`:

- before attention: `(k, delta)`, and block `k` is written where a new block starts; layer 0 has nothing before it,
  so its source replaces the prefix;
- before the MLP: a layer that has just written its prefix away as block `k` starts a new prefix from the attention
  output, `(k + 1, no delta)`; every other layer adds to it, `(k, delta)`;
- at the end of the model: `(all blocks, delta, final)`.

A consumer's source may be a mailbox where what precedes it can publish into one: attention and the MoE tail can, the
embedding (before layer 0) and a dense MLP (before the layer that follows it) cannot.

Producers come with the variants that take what they make: statistics of nb blocks with statistics variants of nb
blocks, the publisher with mailbox variants.
"""

from __future__ import annotations

import enum
import fnmatch
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from attnres_aot.errors import UsageError
from attnres_aot.plan.settings import Config, Deployment, Model
from attnres_aot.spec.arch import Arch
from attnres_aot.spec.variants import (
    ConsumerKey,
    ImageSpec,
    Producer,
    PublishSpec,
    SpecChoice,
    StatisticsSpec,
    Variant,
    choices_for,
    producer_spec_for,
    producers_for,
)


class Position(enum.Enum):
    """Where in the model a consumer runs."""

    BEFORE_ATTENTION = "before attention"
    BEFORE_MLP = "before MLP"
    END = "end of model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A part of a plan; each empty field leaves that aspect whole."""

    tp: tuple[int, ...] = ()
    """Tensor-parallel sizes to keep."""
    dcp: tuple[int, ...] = ()
    """Decode-context-parallel sizes to keep."""
    only: tuple[str, ...] = ()
    """Names of variants and producers to keep: a whole name, a pattern with `*`, `?` or `[` for a whole name, or a
    part of names. Producers of what the kept variants take are kept, too."""


EVERYTHING = Selection()
"""The selection that keeps the whole plan."""
MOST_PATTERNS = 100
"""Most patterns of a selection."""
_PATTERN = re.compile(r"[!#-\[\]-~]{1,100}")
_MOST_MISSED = 5  # patterns without a match that are told, each with the names near it


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedVariant:
    """One variant that a caller can ask for, and why it is there."""

    variant: Variant
    """The variant."""
    choices: tuple[SpecChoice, ...]
    """The images that serve it, by row count."""
    positions: tuple[Position, ...]
    """Where in the model it is used, in the order of `Position`."""
    deployments: tuple[tuple[int, int], ...]
    """(tp, dcp) pairs that need it, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedProducer:
    """One producer that a caller can ask for, and who needs it."""

    producer: Producer
    """The producer."""
    spec: StatisticsSpec | PublishSpec
    """The image that serves it."""
    deployments: tuple[tuple[int, int], ...]
    """(tp, dcp) pairs that need it, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that a bundle will hold."""

    config: Config
    """What was asked for."""
    arch: Arch
    """The arch to compile for."""
    deployments: tuple[Deployment, ...]
    """The deployments that the selection kept, ascending by (tp, dcp)."""
    variants: tuple[PlannedVariant, ...]
    """Variants, ascending by `Variant.sort_key`."""
    producers: tuple[PlannedProducer, ...]
    """Producers, ascending by `Producer.sort_key`."""
    images: tuple[ImageSpec, ...]
    """Distinct images: those of the variants ascending by `ConsumerSpec.sort_key`, then those of the producers."""
    selection: Selection
    """What of the configuration was selected."""

    @property
    def bundle_name(self) -> str:
        """Name of the bundle's folder, e.g. `kimi_k3-sm_100`."""
        return f"{self.config.name}-{self.arch}"

    @property
    def slots(self) -> tuple[int, ...]:
        """Mailbox slot counts among the variants, ascending."""
        return tuple(sorted({planned.variant.slots for planned in self.variants} - {0}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """One consumer of the model."""

    key: ConsumerKey
    """Its key."""
    position: Position
    """Where it runs."""
    ring: bool
    """What precedes it can publish into a mailbox."""


def consumers(model: Model) -> Iterator[Consumer]:
    """Yields every consumer of a model in execution order: two per layer and the one at the end."""
    for layer in range(model.layers):
        nb, write = model.blocks_before(layer), model.written_block(layer)
        yield Consumer(
            key=ConsumerKey(nb=nb, has_delta=layer > 0, write=write),
            position=Position.BEFORE_ATTENTION,
            ring=layer > model.leading_dense_layers,
        )
        yield Consumer(
            key=ConsumerKey(nb=nb, has_delta=True) if write is None else ConsumerKey(nb=nb + 1, has_delta=False),
            position=Position.BEFORE_MLP,
            ring=True,
        )
    yield Consumer(
        key=ConsumerKey(nb=model.blocks, has_delta=True, final=True),
        position=Position.END,
        ring=model.layers > model.leading_dense_layers,
    )


def plan(config: Config, arch: Arch, *, selection: Selection = EVERYTHING) -> Plan:
    """Derives the variants, producers and images that `config` needs on `arch`, narrowed to `selection`.

    Raises:
      UsageError: the selection names a deployment that the configuration lacks, or a pattern that no name matches.
    """
    deployments = _select_deployments(config.deployments, selection)
    positions: dict[Variant, set[Position]] = {}
    users: dict[Variant, set[tuple[int, int]]] = {}
    for consumer in dict.fromkeys(consumers(config.model)):
        if consumer.position is Position.BEFORE_MLP and not config.options.before_mlp:
            continue
        for variant, pairs in _variants(config, consumer, deployments):
            positions.setdefault(variant, set()).add(consumer.position)
            users.setdefault(variant, set()).update(pairs)
    everything = sorted(users, key=lambda variant: variant.sort_key)
    needed = _producers(users, config.model.hidden_size)
    names = _select_names([*map(str, everything), *(str(each.producer) for each in needed)], selection.only, arch)
    variants = tuple(
        PlannedVariant(
            variant=variant,
            choices=choices_for(variant, config.model.hidden_size),
            positions=tuple(position for position in Position if position in positions[variant]),
            deployments=tuple(sorted(users[variant])),
        )
        for variant in everything
        if str(variant) in names
    )
    names |= {str(producer) for planned in variants for producer in producers_for(planned.variant)}
    producers = tuple(planned for planned in needed if str(planned.producer) in names)
    specs = {choice.spec for planned in variants for choice in planned.choices}
    images = sorted(specs, key=lambda spec: spec.sort_key)
    return Plan(
        config=config,
        arch=arch,
        deployments=deployments,
        variants=variants,
        producers=producers,
        images=(*images, *(planned.spec for planned in producers)),
        selection=selection,
    )


def _producers(users: Mapping[Variant, set[tuple[int, int]]], hidden: int) -> list[PlannedProducer]:
    """Returns the producers whose results variants take, in order."""
    needed: dict[Producer, set[tuple[int, int]]] = {}
    for variant, pairs in users.items():
        for producer in producers_for(variant):
            needed.setdefault(producer, set()).update(pairs)
    return [
        PlannedProducer(
            producer=producer,
            spec=producer_spec_for(producer, hidden),
            deployments=tuple(sorted(needed[producer])),
        )
        for producer in sorted(needed, key=lambda producer: producer.sort_key)
    ]


def _variants(
    config: Config, consumer: Consumer, deployments: tuple[Deployment, ...]
) -> Iterator[tuple[Variant, list[tuple[int, int]]]]:
    """Yields the variants of one consumer, each with the deployments that ask for it."""
    options = config.options
    needed: dict[tuple[int, bool], list[tuple[int, int]]] = {}
    for deployment in deployments:
        sources = [0]
        if options.ring and consumer.ring:
            sources += config.mailbox.slots_for(deployment.tp)
        stats = options.stats and deployment.uses_stats(consumer.key.nb)
        for slots in sources:
            for with_stats in (False, True) if stats else (False,):
                needed.setdefault((slots, with_stats), []).append(deployment.pair)
    for (slots, with_stats), pairs in needed.items():
        for aux in (False, True) if options.aux else (False,):
            yield Variant(key=consumer.key, slots=slots, aux=aux, stats=with_stats), pairs


def _select_deployments(deployments: tuple[Deployment, ...], selection: Selection) -> tuple[Deployment, ...]:
    problems = [
        f"no deployment has {field}={value}"
        for field, wanted in (("tp", selection.tp), ("dcp", selection.dcp))
        for value in wanted
        if value not in {getattr(deployment, field) for deployment in deployments}
    ]
    kept = tuple(
        deployment
        for deployment in deployments
        if (not selection.tp or deployment.tp in selection.tp)
        and (not selection.dcp or deployment.dcp in selection.dcp)
    )
    if not kept and not problems:
        problems.append(f"no deployment has tp in {list(selection.tp)} together with dcp in {list(selection.dcp)}")
    if problems:
        have = ", ".join(str(deployment.pair) for deployment in deployments)
        raise UsageError(
            "; ".join(problems) + f". The configuration has (tp, dcp) {have}; choose among these, or add a deployment"
        )
    return kept


def _select_names(names: list[str], patterns: tuple[str, ...], arch: Arch) -> set[str]:
    """Returns the names that match any pattern, or all when there is none."""
    if not patterns:
        return set(names)
    if len(patterns) > MOST_PATTERNS:
        raise UsageError(f"found {len(patterns)} patterns for names; allowed: {MOST_PATTERNS}; use fewer with `*`")
    for pattern in patterns:
        if not _PATTERN.fullmatch(pattern):
            raise UsageError(
                f"{pattern!r:.140} is no pattern for names; allowed: 1 to 100 characters of printable ASCII but "
                "blanks, quotes and backslashes"
            )
    matches = {pattern: _matching(pattern, names) for pattern in patterns}
    missed = [pattern for pattern, found in matches.items() if not found]
    if missed:
        raise UsageError("\n".join(_no_match(pattern, names, arch) for pattern in missed[:_MOST_MISSED]))
    return set().union(*matches.values())


def _matching(pattern: str, names: list[str]) -> set[str]:
    if pattern in names:
        return {pattern}
    if any(char in pattern for char in "*?["):
        return set(fnmatch.filter(names, pattern))
    return {name for name in names if pattern in name}


def _no_match(pattern: str, names: list[str], arch: Arch) -> str:
    near = get_close_matches(pattern, names, n=5, cutoff=0.4) or names[:5]
    return (
        f"{pattern!r:.140} matches none of the {len(names)} variants and producers selected so far; near it: "
        f"{', '.join(near)}. "
        "A pattern with *, ? or [ must match a whole name, other text may be a part of it; "
        f"`attnres-aot plan --arch {arch} --json`, with the same --config, lists every name"
    )

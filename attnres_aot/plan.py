"""The plan: which variants and images a configuration needs for one arch. Pure: no GPU, disk, clock or compiler.

Keys are derived layer by layer from the model's geometry. With `k` saved blocks before layer `i`:

- before attention: `(k, delta)`, and block `k` is written where a new block starts; layer 0 has nothing before it,
  so its source replaces the prefix;
- before the MLP: a layer that has just written its prefix away as block `k` starts a new prefix from the attention
  output, `(k + 1, no delta)`; every other layer adds to it, `(k, delta)`;
- at the end of the model: `(all blocks, delta, final)`.

A consumer's source may be a mailbox where what precedes it can publish into one: attention and the MoE tail can, the
embedding (before layer 0) and a dense MLP (before the layer that follows it) cannot.
"""

from __future__ import annotations

import enum
import fnmatch
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches

from attnres_aot.arch import Arch
from attnres_aot.errors import UsageError
from attnres_aot.settings import Config, Deployment, Model
from attnres_aot.variants import ConsumerKey, ConsumerSpec, Variant, spec_for


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
    """Variant names to keep: a whole name, a pattern with `*`, `?` or `[` for a whole name, or a part of names."""


EVERYTHING = Selection()
"""The selection that keeps the whole plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedVariant:
    """One variant that a caller can ask for, and why it is there."""

    variant: Variant
    """The variant."""
    spec: ConsumerSpec
    """The image that serves it."""
    positions: tuple[Position, ...]
    """Where in the model it is used, in the order of `Position`."""
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
    images: tuple[ConsumerSpec, ...]
    """Distinct images that serve the variants, ascending by `ConsumerSpec.sort_key`."""

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
    """Derives the variants and images that `config` needs on `arch`, narrowed to `selection`.

    Raises:
      UsageError: the selection names a deployment that the configuration lacks, or a pattern that no variant matches.
    """
    deployments = _select_deployments(config.deployments, selection)
    positions: dict[Variant, set[Position]] = {}
    users: dict[Variant, set[tuple[int, int]]] = {}
    for consumer in dict.fromkeys(consumers(config.model)):
        if consumer.position is Position.BEFORE_MLP and not config.options.before_mlp:
            continue
        for deployment in deployments:
            for variant in _variants(config, consumer, deployment):
                positions.setdefault(variant, set()).add(consumer.position)
                users.setdefault(variant, set()).add(deployment.pair)
    kept = _select_names(sorted(positions, key=lambda variant: variant.sort_key), selection.only)
    variants = tuple(
        PlannedVariant(
            variant=variant,
            spec=spec_for(variant, config.model.hidden_size),
            positions=tuple(position for position in Position if position in positions[variant]),
            deployments=tuple(sorted(users[variant])),
        )
        for variant in kept
    )
    images = sorted({planned.spec for planned in variants}, key=lambda spec: spec.sort_key)
    return Plan(config=config, arch=arch, deployments=deployments, variants=variants, images=tuple(images))


def _variants(config: Config, consumer: Consumer, deployment: Deployment) -> Iterator[Variant]:
    """Yields the variants of one consumer that one deployment asks for."""
    options = config.options
    sources = [0]
    if options.ring and consumer.ring:
        sources += config.mailbox.slots_for(deployment.tp)
    stats = options.stats and deployment.uses_stats(consumer.key.nb)
    for slots in sources:
        for aux in (False, True) if options.aux else (False,):
            for with_stats in (False, True) if stats else (False,):
                yield Variant(key=consumer.key, slots=slots, aux=aux, stats=with_stats)


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


def _select_names(variants: Iterable[Variant], patterns: tuple[str, ...]) -> list[Variant]:
    """Keeps the variants whose names match any pattern, or all when there is none."""
    by_name = {str(variant): variant for variant in variants}
    if not patterns:
        return list(by_name.values())
    matches = {pattern: _matching(pattern, list(by_name)) for pattern in patterns}
    missed = [pattern for pattern, found in matches.items() if not found]
    if missed:
        raise UsageError("\n".join(_no_match(pattern, list(by_name)) for pattern in missed))
    wanted = set().union(*matches.values())
    return [variant for name, variant in by_name.items() if name in wanted]


def _matching(pattern: str, names: list[str]) -> set[str]:
    if pattern in names:
        return {pattern}
    if any(char in pattern for char in "*?["):
        return set(fnmatch.filter(names, pattern))
    return {name for name in names if pattern in name}


def _no_match(pattern: str, names: list[str]) -> str:
    near = get_close_matches(pattern, names, n=5, cutoff=0.4) or names[:5]
    return (
        f"{pattern!r} matches none of the {len(names)} variants selected so far; near it: {', '.join(near)}. "
        "A pattern with *, ? or [ must match a whole name, other text may be a part of it; "
        "`attnres-aot plan --json` lists every name"
    )

"""Comparing two results: ratios, geometric means, and what has become slower. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from attnres_aot.bench.results import Key
from attnres_aot.runtime.launch.pdl import EARLY, pdl_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """One number of both results."""

    key: Key
    """What was measured."""
    old_us: float
    """Before, in microseconds."""
    new_us: float
    """Now, in microseconds."""

    @property
    def ratio(self) -> float:
        """Now over before: below 1 is faster."""
        return self.new_us / self.old_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Numbers of one kind of work, PDL and L2 state."""

    name: str
    """What they have in common, in words."""
    ratios: tuple[Ratio, ...]
    """At least one."""

    @property
    def mean(self) -> float:
        """Geometric mean of the ratios."""
        return geometric_mean(ratio.ratio for ratio in self.ratios)

    @property
    def not_slower(self) -> int:
        """How many ratios are at most 1."""
        return sum(ratio.ratio <= 1 for ratio in self.ratios)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two results side by side."""

    groups: tuple[Group, ...]
    """Groups in the order of the new result."""
    slower: tuple[Ratio, ...]
    """Ratios above 1 + threshold, worst first."""
    only_new: int
    """Numbers that the old result lacks."""
    only_old: int
    """Numbers that the new result lacks."""


def compare(new: Mapping[Key, float], old: Mapping[Key, float], threshold: float) -> Comparison:
    """Compares the numbers that two results have in common.

    Args:
      new: what was measured now, in microseconds.
      old: what was measured before; entries that are not above 0 are left out.
      threshold: by how much a ratio may exceed 1, e.g. 0.05.
    """
    groups: dict[str, list[Ratio]] = {}
    used: set[Key] = set()
    for key, now in new.items():
        # Published kernels, and ours before there was such a mode, did with PDL on what is called early here.
        then = key if key in old or key.pdl != EARLY else key._replace(pdl=True)
        before = old.get(then)
        if before is not None and before > 0 and now > 0:
            groups.setdefault(group_name(key), []).append(Ratio(key=key, old_us=before, new_us=now))
            used.add(then)
    every = [ratio for ratios in groups.values() for ratio in ratios]
    slower = sorted((ratio for ratio in every if ratio.ratio > 1 + threshold), key=lambda ratio: -ratio.ratio)
    return Comparison(
        groups=tuple(Group(name=name, ratios=tuple(ratios)) for name, ratios in groups.items()),
        slower=tuple(slower),
        only_new=len(new) - len(every),
        only_old=len(old) - len(used),
    )


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Returns a comparison as plain JSON data."""
    return {
        "groups": [
            {"name": group.name, "points": len(group.ratios), "mean": group.mean, "not_slower": group.not_slower}
            for group in comparison.groups
        ],
        "slower": [{**ratio.key._asdict(), "ratio": ratio.ratio} for ratio in comparison.slower],
        "only_new": comparison.only_new,
        "only_old": comparison.only_old,
    }


def group_name(key: Key) -> str:
    """Says in words what a group of numbers has in common."""
    if key.work == "host":
        return "host cost"
    return f"{key.work}, PDL {pdl_name(key.pdl)}, {key.l2} L2"


def geometric_mean(values: Iterable[float]) -> float:
    """Returns the geometric mean of positive numbers; 1 for none."""
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs)) if logs else 1.0

"""A part of what `make fuzz` does: bundles that were changed at random, and manifests as bad as they can be."""

from __future__ import annotations

import dataclasses
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "fuzz"))

import bundles

MOST_CPU_SECONDS = 20  # a wide margin for a busy machine; `make fuzz` holds it to 2


@pytest.fixture(scope="module")
def judge(tmp_path_factory) -> bundles.Judge:
    return bundles.Judge(bundles.small_bundle(tmp_path_factory.mktemp("fuzz")))


@pytest.fixture(autouse=True)
def _made_whole(judge):
    """Puts the manifest back, and forgets what was counted."""
    good = judge.bundle.manifest_path.read_bytes()
    judge.asked.clear()
    judge.taken.clear()
    yield
    judge.bundle.manifest_path.write_bytes(good)


def test_the_bundle_that_is_changed_is_one(judge):
    judge.read("a byte")
    judge.verify("a byte")
    assert (judge.damage_taken, judge.failures) == (2, [])


def test_no_change_of_one_byte_is_taken(judge):
    bundles.one_byte_changes(judge, 800, 100, random.Random(1))
    assert sum(judge.asked.values()) == 1800
    assert (judge.damage_taken, judge.failures) == (0, [])


def test_no_change_of_any_kind_ends_in_anything_but_an_answer(judge):
    bundles.mutations(judge, 2000, random.Random(2))
    assert judge.asked["a mutation: load"] == 2000
    assert judge.failures == []


def test_no_manifest_takes_long_or_is_answered_at_length(judge):
    good = judge.bundle.manifest_path.read_bytes()
    count = 0
    for name, data in bundles.bombs(good):
        judge.bundle.manifest_path.write_bytes(data)
        judge.verify(name)
        judge.search(name)
        count += 1
    assert count == len(judge.asked) > 20
    assert judge.failures == []
    assert sum(judge.taken.values()) == 0
    assert judge.slowest < MOST_CPU_SECONDS


def test_a_bad_bundle_does_not_hide_the_good_one_beside_it(judge, tmp_path):
    good = bundles.make_bundle(tmp_path / "several", config=dataclasses.replace(bundles.CONFIG, name="good"))
    bad = tmp_path / "several" / "bad"
    bad.mkdir()
    for name, data in bundles.bombs(judge.bundle.manifest_path.read_bytes()):
        (bad / "manifest.json").write_bytes(data)
        place = bundles.place_at("here", str(bad.parent))
        chosen = bundles.resolve(bundles.Request(capability=(10, 0), name="good"), [place]).chosen
        assert chosen is not None, name
        assert chosen.path == str(good.path)

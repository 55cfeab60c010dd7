"""Variants that the bundle lacks, taking variants out of it by their facts, and its tables."""

from __future__ import annotations

import pytest
import torch

import attnres_aot
from attnres_aot.errors import OperandError, UsageError, VariantMissError
from attnres_aot.runtime import api
from attnres_aot.runtime.find.miss import nearest
from attnres_aot.spec.variants import ConsumerKey, parse_variant

HIDDEN = 1024


def test_miss_says_asked_found_and_next_step(stub, bundles, weights):
    loaded = api.load(bundles.write(["nb2-delta", "nb2", "nb2-delta-ring8"]))
    with pytest.raises(VariantMissError) as caught:
        attnres_aot.PreparedAttnRes(weights, ConsumerKey(nb=3, has_delta=True), 1e-5, loaded)
    text = str(caught.value)
    assert text.splitlines()[0] == "the bundle holds no variant 'nb3-delta'"
    assert "nearest present: nb2-delta, nb2-delta-ring8, nb2" in text
    assert f"bundle: {loaded.bundle.path} (tiny for sm_90)" in text
    assert "tp 8, dcp 1: attn_stats '1-2:1,4:1', attn_stats_blocks '1-8:1'" in text
    assert "attnres-aot build --arch sm_90 --config FILE\nwhere FILE is the configuration 'tiny'" in text


@pytest.mark.parametrize(
    ("bind", "text"),
    [
        (
            lambda p: p.bind_ring(attnres_aot.new_mailbox(8, 64, HIDDEN, "cpu")),
            "variants.ring is true, mailbox.slots has 8, and build",
        ),
        (lambda p: p.bind_aux(), "variants.aux is true"),
        (
            lambda p: p.bind_statistics(torch.zeros(4, HIDDEN), torch.zeros(4, 2), [1]),
            'variants.stats is true, in a deployment attn_stats_blocks has "2:1"',
        ),
    ],
    ids=["ring", "aux", "statistics"],
)
def test_binding_what_the_bundle_lacks_is_refused(stub, bundles, weights, key, bind, text):
    prepared = attnres_aot.PreparedAttnRes(weights, key, 1e-5, api.load(bundles.write(["nb2-delta"])))
    with pytest.raises(VariantMissError) as caught:
        bind(prepared)
    assert text in str(caught.value)


def test_statistics_of_no_blocks_are_explained(bundle, weights):
    prepared = attnres_aot.PreparedAttnRes(weights, ConsumerKey(nb=0, has_delta=False, write=0), 1e-5, bundle)
    with pytest.raises(VariantMissError, match=r"a consumer of no saved blocks has no statistics"):
        prepared.bind_statistics(torch.zeros(4, HIDDEN), torch.zeros(4, 2), [1])


def test_combination_that_the_bundle_lacks_is_refused_at_launch(stub, bundles, weights, key, operands):
    loaded = api.load(bundles.write(["nb2-delta", "nb2-delta-aux", "nb2-delta-ring8"]))
    prepared = attnres_aot.PreparedAttnRes(weights, key, 1e-5, loaded).bind_aux()
    prepared.bind_ring(attnres_aot.new_mailbox(8, 64, HIDDEN, "cpu"))
    given = operands()
    with pytest.raises(VariantMissError, match=r"no variant 'nb2-delta-ring8-aux'"):
        prepared.run_ring(*given.ring, given.aux)
    assert stub.launch_count() == 0


def test_fallback_is_called_for_a_miss_and_only_then(stub, bundles, weights, key, operands):
    seen = []
    loaded = api.load(bundles.write(["nb2-delta"]))
    prepared = attnres_aot.PreparedAttnRes(weights, key, (1e-5, 1e-6), loaded, fallback=seen.append)
    mailbox = attnres_aot.new_mailbox(8, 64, HIDDEN, "cpu")
    prepared.bind_ring(mailbox).bind_aux()
    given = operands()
    assert prepared.run(*given.ordinary) is given.out
    assert (stub.launch_count(), seen) == (1, [])
    assert prepared.run(*given.ordinary, given.aux) is given.out
    assert prepared.run_ring(*given.ring) is given.out
    assert stub.launch_count() == 1
    assert [str(missed.variant) for missed in seen] == ["nb2-delta-aux", "nb2-delta-ring8"]
    assert (seen[0].source, seen[0].aux) == (given.delta, given.aux)
    assert (seen[1].source, seen[1].aux, seen[1].eps) == (mailbox, None, (1e-5, 1e-6))


def test_fallback_gets_checked_operands_only(stub, bundles, weights, operands):
    seen = []
    loaded = api.load(bundles.write(["nb2-delta"]))
    key = ConsumerKey(nb=1, has_delta=True)
    prepared = attnres_aot.PreparedAttnRes(weights, key, 1e-5, loaded, fallback=seen.append)
    with pytest.raises(OperandError, match=r"delta has 2 rows"):
        prepared.run(*operands(rows=3).replace(delta=torch.zeros(2, HIDDEN, dtype=torch.bfloat16)).ordinary)
    prepared.run(*operands(rows=0).ordinary)
    assert seen == []


def test_nearest_prefers_the_same_consumer():
    present = [parse_variant(name) for name in ("nb8-delta-final", "nb4", "nb4-delta-ring8", "nb5-delta-aux-stats")]
    assert str(nearest(parse_variant("nb4-delta-ring1"), present)[0]) == "nb4-delta-ring8"


def test_tables_are_read_by_deployment(bundle):
    assert attnres_aot.statistics_rows(8, 1, bundle) == frozenset({1, 2, 4})
    assert attnres_aot.statistics_blocks(8, 1, bundle) == frozenset(range(1, 9))
    assert attnres_aot.statistics_rows(16, 16, bundle) == frozenset()
    with pytest.raises(UsageError, match=r"serves no deployment with tp 8, dcp 2; [^$]*attnres-aot build --arch sm_90"):
        attnres_aot.statistics_rows(8, 2, bundle)
    assert attnres_aot.statistics_rows(8, 2, bundle, missing="empty") == frozenset()
    assert attnres_aot.statistics_blocks(8, 2, bundle, missing="empty") == frozenset()
    assert attnres_aot.statistics_blocks(8, 1, bundle, missing="empty") == frozenset(range(1, 9))
    with pytest.raises(UsageError, match=r"missing is 'none'; 'error' or 'empty' is wanted"):
        attnres_aot.statistics_blocks(8, 1, bundle, missing="none")

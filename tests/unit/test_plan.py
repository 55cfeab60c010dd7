"""The plan: keys derived from the geometry, which variants and images follow, and the selection."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from attnres_aot.config.reader import load_config
from attnres_aot.errors import UsageError
from attnres_aot.plan.plan import Position, Selection, consumers, plan
from attnres_aot.plan.settings import Config, Deployment, Mailbox, Model, Options
from attnres_aot.spec.arch import parse_arch
from attnres_aot.spec.tables import parse_table
from attnres_aot.spec.variants import ConsumerKey, parse_producer, parse_variant

SM_100 = parse_arch("sm_100")
ALL = Path(__file__).parents[2] / "configs" / "kimi_k3_all.yaml"
K3 = dataclasses.replace(load_config(ALL), name="kimi_k3")
SMALL = Config(
    name="small",
    model=Model(hidden_size=2048, layers=6, block_size=3, leading_dense_layers=0),
    mailbox=Mailbox(capacity=16, fixed_slots=(), slot_per_rank=True),
    options=Options(aux=False, stats=False),
    deployments=(Deployment(tp=4, dcp=1),),
)


def small(**changes):
    return dataclasses.replace(SMALL, **changes)


def names(config, **selection):
    return [str(each.variant) for each in plan(config, SM_100, selection=Selection(**selection)).variants]


def test_kimi_k3_needs_25_keys_and_108_images():
    made = plan(K3, SM_100)
    assert len({each.variant.key for each in made.variants}) == 25
    assert Counter(spec.kernel for spec in made.images) == {"consumer": 99, "statistics": 8, "publish": 1}
    assert Counter((spec.slots, spec.nb is None) for spec in made.images if spec.kernel == "consumer") == {
        (0, False): 18 + 18,
        (1, False): 17,
        (8, False): 17,
        (16, False): 17,
        (0, True): 3,
        (1, True): 3,
        (8, True): 3,
        (16, True): 3,
    }
    assert made.slots == (1, 8, 16)
    assert made.bundle_name == "kimi_k3-sm_100"


def test_a_second_shape_serves_many_rows_of_ordinary_consumers():
    choices = {
        str(each.variant): [(str(c.spec), c.max_rows) for c in each.choices] for each in plan(K3, SM_100).variants
    }
    assert choices["nb0-write0"] == [("h7168-nb0", 16), ("h7168-nb0-wide", None)]
    assert choices["nb3-delta"] == [("h7168-nb3-delta", 16), ("h7168-nb3-delta-wide", None)]
    assert choices["nb4-delta"] == [("h7168-nb4-delta", 8), ("h7168-nb4-delta-wide", None)]
    assert choices["nb8-delta-final"] == [("h7168-nb8-delta-final", 8), ("h7168-nb8-delta-final-wide", None)]
    assert choices["nb8-delta-ring8"] == [("h7168-nb8-delta-ring8", None)]
    assert choices["nb8-delta-stats"] == [("h7168-stats-delta", None)]


def test_kimi_k3_keys_are_those_of_the_contract():
    keys = {position: set() for position in Position}
    for consumer in consumers(K3.model):
        keys[consumer.position].add(consumer.key)
    adding = {ConsumerKey(nb=k, has_delta=True) for k in range(1, 9)}
    writing = {ConsumerKey(nb=k, has_delta=True, write=k) for k in range(1, 8)}
    assert keys[Position.BEFORE_ATTENTION] == {ConsumerKey(nb=0, has_delta=False, write=0)} | adding | writing
    assert keys[Position.BEFORE_MLP] == adding | {ConsumerKey(nb=k, has_delta=False) for k in range(1, 9)}
    assert keys[Position.END] == {ConsumerKey(nb=8, has_delta=True, final=True)}


@pytest.mark.parametrize("arch", ["sm_90", "sm_103a"])
def test_arch_changes_nothing_but_the_name(arch):
    made = plan(K3, parse_arch(arch))
    assert made.variants == plan(K3, SM_100).variants
    assert made.bundle_name == f"kimi_k3-{arch}"


def test_consumers_follow_the_layers():
    assert [str(consumer.key.nb) + "d" * consumer.key.has_delta for consumer in consumers(SMALL.model)] == (
        ["0", "1"] + ["1d"] * 4 + ["1d", "2"] + ["2d"] * 4 + ["2d"]
    )


@dataclass(frozen=True)
class Geometry:
    name: str
    model: tuple[int, int, int]  # layers, block size, leading dense layers
    ring: list[str]


GEOMETRIES = [
    # Layer 0 has no mailbox before attention whatever its MLP; with no dense layer, layer 1 has one.
    Geometry("one_layer", (1, 4, 0), ["nb1-ring4", "nb1-delta-final-ring4"]),
    Geometry("all_dense", (2, 4, 2), ["nb1-delta-ring4", "nb1-ring4"]),
    # Blocks of one layer: layer 1 writes block 1, so its key is its own and comes after the dense MLP.
    Geometry(
        "blocks_of_one_layer_after_dense",
        (2, 1, 1),
        ["nb1-ring4", "nb2-ring4", "nb2-delta-final-ring4"],
    ),
    Geometry(
        "blocks_of_one_layer",
        (2, 1, 0),
        ["nb1-delta-write1-ring4", "nb1-ring4", "nb2-ring4", "nb2-delta-final-ring4"],
    ),
]


@pytest.mark.parametrize("case", GEOMETRIES, ids=lambda case: case.name)
def test_ring_follows_what_precedes(case):
    layers, block_size, dense = case.model
    model = Model(hidden_size=1024, layers=layers, block_size=block_size, leading_dense_layers=dense)
    assert names(small(model=model), only=("ring",)) == case.ring


def test_ordinary_sources_serve_every_consumer_and_deployment():
    made = plan(K3, SM_100)
    ordinary = [each for each in made.variants if not each.variant.slots and not each.variant.stats]
    assert {each.variant.key for each in ordinary} == {consumer.key for consumer in consumers(K3.model)}
    assert all(each.deployments == ((8, 1), (8, 8), (16, 1), (16, 16)) for each in ordinary)


def test_mailbox_of_one_slot_per_rank_is_for_its_own_deployments():
    made = plan(K3, SM_100)
    users = {each.variant.slots: each.deployments for each in made.variants}
    assert users[8] == ((8, 1), (8, 8))
    assert users[16] == ((16, 1), (16, 16))
    assert users[1] == users[0]


def test_statistics_are_built_where_rows_and_blocks_are_on():
    tables = Deployment(tp=4, dcp=1, attn_stats=parse_table("1-8:1"), attn_stats_blocks=parse_table("1:0,2:1"))
    other = Deployment(tp=2, dcp=1, attn_stats=parse_table("1-8:0"), attn_stats_blocks=parse_table("1-2:1"))
    made = plan(small(options=Options(aux=False, ring=False), deployments=(other, tables)), SM_100)
    stats = [each for each in made.variants if each.variant.stats]
    assert {each.variant.key.nb for each in stats} == {2}
    assert {each.deployments for each in stats} == {((4, 1),)}
    assert {choice.spec.nb for each in stats for choice in each.choices} == {None}


def test_layer_zero_never_takes_statistics():
    tables = Deployment(tp=4, dcp=1, attn_stats=parse_table("1-8:1"), attn_stats_blocks=parse_table("0-9:1"))
    made = plan(small(options=Options(), deployments=(tables,)), SM_100)
    assert min(each.variant.key.nb for each in made.variants if each.variant.stats) == 1


@dataclass(frozen=True)
class Switch:
    name: str
    options: Options
    gone: str


SWITCHES = [
    Switch("ring", Options(ring=False), "ring"),
    Switch("aux", Options(aux=False), "aux"),
    Switch("stats", Options(stats=False), "stats"),
]


@pytest.mark.parametrize("case", SWITCHES, ids=lambda case: case.name)
def test_option_switched_off_removes_its_variants_alone(case):
    everything, narrowed = names(K3), names(dataclasses.replace(K3, options=case.options))
    assert narrowed == [name for name in everything if case.gone not in name]
    assert len(narrowed) < len(everything)


def test_before_mlp_switched_off_removes_its_own_keys():
    made = plan(dataclasses.replace(K3, options=Options(before_mlp=False)), SM_100)
    assert len({each.variant.key for each in made.variants}) == 17
    assert Position.BEFORE_MLP not in {position for each in made.variants for position in each.positions}


def test_variants_are_ordered_and_images_serve_them():
    made = plan(K3, SM_100)
    assert sorted(made.variants, key=lambda each: each.variant.sort_key) == list(made.variants)
    assert len({each.variant for each in made.variants}) == len(made.variants) == 386
    served = {choice.spec for each in made.variants for choice in each.choices}
    assert served | {each.spec for each in made.producers} == set(made.images)
    assert all(each.choices[-1].max_rows is None for each in made.variants)
    assert all(parse_variant(str(each.variant)) == each.variant for each in made.variants)


PRODUCERS = [f"statistics-nb{nb}" for nb in range(1, 9)] + ["publish"]


def producers(config, **selection):
    return [str(each.producer) for each in plan(config, SM_100, selection=Selection(**selection)).producers]


def test_producers_are_those_of_what_the_variants_take():
    assert producers(K3) == PRODUCERS
    assert producers(dataclasses.replace(K3, options=Options(stats=False))) == ["publish"]
    assert producers(dataclasses.replace(K3, options=Options(ring=False))) == PRODUCERS[:-1]
    assert producers(dataclasses.replace(K3, options=Options(ring=False, stats=False))) == []


def test_statistics_are_made_for_the_deployments_whose_tables_want_them():
    wanted = dataclasses.replace(K3.deployments[0], attn_stats_blocks=parse_table("3:1,5:1"))
    other = dataclasses.replace(K3.deployments[2], attn_stats_blocks=parse_table("5:1"))
    made = plan(dataclasses.replace(K3, deployments=(wanted, other)), SM_100)
    assert {str(each.producer): each.deployments for each in made.producers} == {
        "statistics-nb3": ((8, 1),),
        "statistics-nb5": ((8, 1), (16, 1)),
        "publish": ((8, 1), (16, 1)),
    }


def test_producers_have_names_that_parse():
    assert [str(parse_producer(name)) for name in PRODUCERS] == PRODUCERS
    for name in ("statistics", "statistics-nb0", "publish-nb1", "nb1"):
        with pytest.raises(UsageError, match=f"'{name}' is not a producer name"):
            parse_producer(name)


@dataclass(frozen=True)
class Kept:
    name: str
    only: str
    producers: list[str]


KEPT = [
    Kept("with_statistics_variants", "nb3-delta-stats", ["statistics-nb3"]),
    Kept("with_ring_variants", "nb3-delta-ring8", ["publish"]),
    Kept("with_both", "nb3-delta-ring8-stats", ["statistics-nb3", "publish"]),
    Kept("with_neither", "nb3-delta-aux", []),
    Kept("by_name", "statistics-nb[12]", ["statistics-nb1", "statistics-nb2"]),
]


@pytest.mark.parametrize("case", KEPT, ids=lambda case: case.name)
def test_a_selection_keeps_producers_with_what_takes_their_results(case):
    assert producers(K3, only=(case.only,)) == case.producers


def test_order_of_deployments_does_not_matter():
    turned = dataclasses.replace(K3, deployments=K3.deployments[::-1])
    assert plan(turned, SM_100).variants == plan(K3, SM_100).variants


@dataclass(frozen=True)
class Narrowed:
    name: str
    selection: Selection
    variants: int
    slots: tuple[int, ...]


NARROWED = [
    Narrowed("tp", Selection(tp=(8,)), 290, (1, 8)),
    Narrowed("both_tp", Selection(tp=(8, 16)), 386, (1, 8, 16)),
    Narrowed("dcp", Selection(dcp=(16,)), 290, (1, 16)),
    Narrowed("whole_name", Selection(only=("nb8-delta",)), 1, ()),
    Narrowed("pattern", Selection(only=("nb8-delta-ring?",)), 2, (1, 8)),
    Narrowed("part_of_names", Selection(only=("final-ring",)), 12, (1, 8, 16)),
    Narrowed("several", Selection(only=("nb8-delta", "nb0*")), 3, ()),
    Narrowed("together", Selection(tp=(16,), dcp=(1,), only=("final-ring16",)), 4, (16,)),
]


@pytest.mark.parametrize("case", NARROWED, ids=lambda case: case.name)
def test_selection_narrows(case):
    made = plan(K3, SM_100, selection=case.selection)
    assert (len(made.variants), made.slots) == (case.variants, case.slots)


def test_selection_keeps_its_deployments_only():
    made = plan(K3, SM_100, selection=Selection(tp=(8,)))
    assert [each.pair for each in made.deployments] == [(8, 1), (8, 8)]
    assert {pair for each in made.variants for pair in each.deployments} == {(8, 1), (8, 8)}


@dataclass(frozen=True)
class Impossible:
    name: str
    selection: Selection
    says: str


IMPOSSIBLE = [
    Impossible("tp", Selection(tp=(4,)), "no deployment has tp=4. The configuration has (tp, dcp) (8, 1), (8, 8)"),
    Impossible("one_of_two", Selection(tp=(8, 4), dcp=(3,)), "no deployment has tp=4; no deployment has dcp=3"),
    Impossible("pair", Selection(tp=(8,), dcp=(16,)), "no deployment has tp in [8] together with dcp in [16]"),
    Impossible("name", Selection(only=("nb9-delta",)), "'nb9-delta' matches none of the 395 variants and producers"),
    Impossible("near", Selection(only=("nb8-dleta",)), "near it: nb8-delta"),
    Impossible("ring_of_another_tp", Selection(tp=(8,), only=("*ring16*",)), "'*ring16*' matches none of the 299"),
    Impossible("half_a_pattern", Selection(only=("delta*",)), "must match a whole name"),
]


@pytest.mark.parametrize("case", IMPOSSIBLE, ids=lambda case: case.name)
def test_impossible_selection_says_what_there_is(case):
    with pytest.raises(UsageError) as caught:
        plan(K3, SM_100, selection=case.selection)
    assert case.says in str(caught.value)

"""What the error for a missing variant asks of the configuration makes a build hold that variant."""

from __future__ import annotations

import re

import pytest
import yaml

from attnres_aot.config import advice, shipped
from attnres_aot.config.reader import load_config, parse_config
from attnres_aot.plan.plan import plan
from attnres_aot.runtime.find.miss import _beyond, _remedy, _statistics
from attnres_aot.spec.arch import Arch
from attnres_aot.spec.variants import MAX_BLOCKS, MAX_SLOTS, ConsumerKey, Variant

SM90 = Arch(9, 0)
ALL = plan(load_config(shipped.path_of("kimi_k3_all")), SM90)
BARE = yaml.safe_load(shipped.path_of("kimi_k3").read_text())
BARE["mailbox"]["slots"] = [2]
BARE["variants"] = dict.fromkeys(BARE["variants"], False) | {"before_mlp": True}
BARE["deployments"] = [{"tp": 8, "dcp": 1}]


def follow(words: str) -> set[str]:
    """Changes a configuration without options as `words` say; returns the names of what is then built."""
    changed = yaml.safe_load(yaml.safe_dump(BARE))
    for option in re.findall(r"variants\.(\w+) is true", words):
        changed["variants"][option] = True
    for slots in re.findall(r"mailbox\.slots has (\d+)", words):
        changed["mailbox"]["slots"].append(int(slots))
    tables = re.search(r'attn_stats_blocks has "(\d+:1)" and attn_stats has the row counts, such as "([^"]+)"', words)
    if tables:
        changed["deployments"][0] |= {"attn_stats_blocks": tables[1], "attn_stats": tables[2]}
    made = plan(parse_config(yaml.safe_dump(changed).encode(), "changed"), SM90)
    return {str(each.variant) for each in made.variants} | {str(each.producer) for each in made.producers}


@pytest.mark.parametrize("options", [(slots, aux, stats) for slots in (0, 1, 16) for aux in (0, 1) for stats in (0, 1)])
def test_following_the_advice_adds_the_variant(options):
    slots, aux, stats = options
    wanted = [
        each.variant
        for each in ALL.variants
        if (each.variant.slots, each.variant.aux, each.variant.stats) == (slots, bool(aux), bool(stats))
    ]
    assert len(wanted) > 10
    for variant in wanted[:: len(wanted) // 8]:
        assert str(variant) in follow(_remedy(variant)), variant


def test_following_the_advice_adds_a_producer():
    assert "statistics-nb3" in follow(", ".join(_statistics(3)))
    assert "publish" in follow("variants.ring is true")


@pytest.mark.parametrize(
    ("variant", "says"),
    [
        (
            Variant(key=ConsumerKey(nb=0, has_delta=False), stats=True),
            "a consumer of no saved blocks has no statistics",
        ),
        (Variant(key=ConsumerKey(nb=MAX_BLOCKS + 1, has_delta=True)), f"at most {MAX_BLOCKS} saved blocks"),
        (Variant(key=ConsumerKey(nb=1, has_delta=True), slots=MAX_SLOTS + 1), f"at most {MAX_SLOTS} slots"),
    ],
    ids=["statistics_of_nothing", "blocks", "slots"],
)
def test_what_no_build_can_hold_is_said(variant, says):
    assert _remedy(variant).startswith("No bundle can hold it: ")
    assert says in _remedy(variant)


def test_what_is_possible_is_not_beyond():
    assert _beyond(MAX_BLOCKS, MAX_SLOTS) == ""


def test_an_arch_that_cannot_be_built_for_is_not_advised():
    assert "attnres-aot" not in advice.build_command("sm_75")
    assert "sm_75 cannot be built for; choose from sm_90, " in advice.build_command("sm_75")


def test_the_file_of_another_configuration_is_not_made_up():
    assert advice.build_command("sm_90") == "`attnres-aot build --arch sm_90`"
    assert "`attnres-aot config kimi_k3_all` prints" in advice.build_command("sm_90", "kimi_k3_all")
    assert advice.build_command("sm_90", "mine", force=True) == (
        "`attnres-aot build --arch sm_90 --config FILE --force` (FILE: the configuration 'mine')"
    )
    assert advice.build_changed("sm_90", "mine")[0] == "  attnres-aot build --arch sm_90 --config FILE"
    assert "which the bundle does not hold" in advice.build_changed("sm_90", "mine")[1]

"""Configuration files: the shipped one, every kind of mistake with its place, and the digest."""

from __future__ import annotations

import dataclasses
import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from attnres_aot.config.problems import MOST_REPORTED
from attnres_aot.config.reader import DEFAULT_CONFIG, load_config, parse_config
from attnres_aot.errors import ConfigError
from attnres_aot.plan.settings import Config, Mailbox, Options
from attnres_aot.spec.variants import MAX_BLOCKS, MAX_DEPLOYMENTS

CONFIGS = Path(__file__).parents[2] / "configs"
GOOD = """\
name: small
model:
  hidden_size: 2048
  layers: 9
  block_size: 4
  leading_dense_layers: 1
mailbox:
  capacity: 16
  slots: [1, tp]
variants:
  aux: false
deployments:
  - tp: 4
    dcp: 1
    attn_stats: "1-8:1,9:0"
    attn_stats_blocks: "1-3:1"
  - tp: 2
    dcp: 2
"""


def parse(text: str | bytes) -> Config:
    return parse_config(text.encode() if isinstance(text, str) else text, "f.yaml")


def problems_of(text: str | bytes) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    return caught.value.problems


def test_values_arrive_and_deployments_are_sorted():
    config = parse(GOOD)
    assert config.name == "small"
    assert config.model.blocks == 3
    assert config.mailbox == Mailbox(capacity=16, fixed_slots=(1,), slot_per_rank=True)
    assert config.mailbox.slots_for(4) == (1, 4)
    assert config.options == Options(aux=False)
    assert [each.pair for each in config.deployments] == [(2, 2), (4, 1)]
    assert str(config.deployments[1].attn_stats) == "1-8:1,9:0"
    assert not config.deployments[0].uses_stats(1)
    assert config.deployments[1].uses_stats(3)


def test_shipped_configuration_is_kimi_k3():
    config = load_config(DEFAULT_CONFIG)
    assert (config.name, config.model.hidden_size, config.model.layers, config.model.blocks) == ("kimi_k3", 7168, 93, 8)
    assert [each.pair for each in config.deployments] == [(8, 1), (8, 8), (16, 1), (16, 16)]


def test_the_shipped_tables_are_measured_and_name_only_what_was_on():
    config = load_config(DEFAULT_CONFIG)
    assert "# Measured by 'attnres-aot tune' on one NVIDIA H200" in DEFAULT_CONFIG.read_text()
    assert {str(each.attn_stats) for each in config.deployments} == {"64:1"}
    assert {each.attn_stats_blocks.switched_on() for each in config.deployments} == {((5, 8),)}


def test_the_configuration_of_everything_differs_in_name_and_tables_only():
    shipped, everything = load_config(DEFAULT_CONFIG), load_config(CONFIGS / "kimi_k3_all.yaml")
    assert everything.name == "kimi_k3_all"
    for deployment in everything.deployments:
        assert all(deployment.uses_stats(nb) for nb in range(1, 9))
    assert dataclasses.replace(everything, name="kimi_k3", deployments=shipped.deployments) == shipped
    assert [each.pair for each in everything.deployments] == [each.pair for each in shipped.deployments]


def test_top_level_configuration_is_the_shipped_one():
    top = CONFIGS / "kimi_k3.yaml"
    assert str(top.readlink()) == "../attnres_aot/config/kimi_k3.yaml"
    assert top.resolve() == DEFAULT_CONFIG.resolve()


@dataclass(frozen=True)
class Edit:
    """A mistake made in GOOD, and the one problem that it gives."""

    name: str
    old: str
    new: str
    says: str


EDITS = [
    Edit(
        "misspelt_field", "block_size", "blok_size", "5: model.'blok_size': unknown field (did you mean 'block_size'?)"
    ),
    Edit("unknown_top_field", "name:", "zzz: 1\nname:", "1: 'zzz': unknown field; allowed: name, model, mailbox"),
    Edit("missing_field", "  layers: 9\n", "", "3: model.layers: missing; add it: an integer, 1..1024"),
    Edit(
        "missing_section", "mailbox:\n  capacity: 16\n  slots: [1, tp]\n", "", "1: mailbox: missing; add it: a mapping"
    ),
    Edit(
        "duplicate_key", "  layers: 9\n", "  layers: 9\n  layers: 8\n", "5: model.layers: occurs twice, first on line 4"
    ),
    Edit("text_for_integer", "layers: 9", "layers: nine", "4: model.layers: found 'nine'; allowed: an integer"),
    Edit(
        "quoted_integer", "layers: 9", "layers: '9'", "4: model.layers: found the quoted text '9'; allowed: an integer"
    ),
    Edit("octal", "layers: 9", "layers: 011", "4: model.layers: found '011'; allowed: an integer in plain digits"),
    Edit(
        "underscores", "layers: 9", "layers: 1_0", "4: model.layers: found '1_0'; allowed: an integer in plain digits"
    ),
    Edit("float", "layers: 9", "layers: 9.0", "4: model.layers: found '9.0'; allowed: an integer in plain digits"),
    Edit("endless_integer", "layers: 9", "layers: " + "9" * 5000, "4: model.layers: found '999"),
    Edit("nothing", "layers: 9", "layers:", "4: model.layers: found nothing; allowed: an integer"),
    Edit("zero_layers", "layers: 9", "layers: 0", "4: model.layers: found 0; allowed: 1..1024"),
    Edit("negative", "capacity: 16", "capacity: -1", "8: mailbox.capacity: found -1; allowed: 1..65536"),
    Edit(
        "odd_hidden",
        "2048",
        "2000",
        "3: model.hidden_size: found 2000; allowed: a multiple of 256, 256..8192; nearest: 1792 or 2048",
    ),
    Edit(
        "narrow_hidden",
        "2048",
        "1000",
        "3: model.hidden_size: found 1000; allowed: a multiple of 256, 256..8192; nea",
    ),
    Edit(
        "wide_hidden",
        "2048",
        "9216",
        "3: model.hidden_size: found 9216; allowed: a multiple of 256, 256..8192; nearest: 8192",
    ),
    Edit(
        "too_many_blocks",
        "layers: 9",
        f"layers: {4 * MAX_BLOCKS + 1}",
        f"makes {MAX_BLOCKS + 1} saved blocks of {4 * MAX_BLOCKS + 1} layers; allowed: at most {MAX_BLOCKS}",
    ),
    Edit(
        "more_dense_than_layers", "dense_layers: 1", "dense_layers: 10", "leading_dense_layers: found 10; allowed: 0..9"
    ),
    Edit(
        "list_for_mapping",
        "variants:\n  aux: false",
        "variants: [aux]",
        "variants: found a list of 1; allowed: a mapping",
    ),
    Edit("yes_for_true", "aux: false", "aux: no", "11: variants.aux: found 'no'; allowed: true or false"),
    Edit("no_slots", "[1, tp]", "[]", "9: mailbox.slots: found an empty list; allowed: a list of integers 1..16"),
    Edit("slot_of_zero", "[1, tp]", "[0, tp]", "9: mailbox.slots[0]: found 0; allowed: 1..16"),
    Edit("many_slots", "[1, tp]", "[1, 17]", "9: mailbox.slots[1]: found 17; allowed: 1..16"),
    Edit(
        "slot_word",
        "[1, tp]",
        "[1, dcp]",
        "9: mailbox.slots[1]: found 'dcp'; allowed: an integer 1..16, or the word tp",
    ),
    Edit("slot_twice", "[1, tp]", "[1, tp, 1]", "9: mailbox.slots[2]: 1 occurs twice, first as slots[0]"),
    Edit("slots_not_a_list", "[1, tp]", "tp", "9: mailbox.slots: found 'tp'; allowed: a list of integers"),
    Edit(
        "more_ranks_than_slots", "tp: 4", "tp: 32", "deployments[0].tp: found 32; allowed: 1..16, for mailbox.slots has"
    ),
    Edit("dcp_no_divisor", "dcp: 1", "dcp: 3", "deployments[0].dcp: found 3; allowed: a divisor of tp=4"),
    Edit(
        "same_deployment",
        "tp: 2\n    dcp: 2",
        "tp: 4\n    dcp: 1",
        "deployments[1]: tp=4, dcp=1 occurs twice, first on line 13",
    ),
    Edit(
        "deployment_not_a_mapping",
        "  - tp: 2\n    dcp: 2",
        "  - 8",
        "deployments[1]: found '8'; allowed: a mapping with tp, dcp",
    ),
    Edit(
        "rows_of_zero",
        "1-8:1,9:0",
        "0-8:1",
        "15: deployments[0].attn_stats: '0-8:1': rows (up to mailbox.capacity) must be",
    ),
    Edit("rows_beyond_capacity", "1-8:1,9:0", "1-17:1", "'1-17:1': rows (up to mailbox.capacity) must be within 1..16"),
    Edit("rows_overlap", "1-8:1,9:0", "1-8:1,8:0", "attn_stats: '1-8:1' and '8:0' overlap"),
    Edit("rows_reversed", "1-8:1,9:0", "8-1:1", "attn_stats: span 8-1 is reversed; write 1-8"),
    Edit(
        "rows_huge_span",
        "1-8:1,9:0",
        "1-999999999999:1",
        "'1-999999999999:1': rows (up to mailbox.capacity) must be within",
    ),
    Edit("rows_value", "1-8:1,9:0", "1-8:96", "attn_stats: '1-8:96': the value must be 1 (on) or 0 (off)"),
    Edit("rows_word", "1-8:1,9:0", "1-8:on", "attn_stats: '1-8:on': the value must be 1 (on) or 0 (off)"),
    Edit("rows_nonsense", "1-8:1,9:0", "all", "attn_stats: entry 'all' is not understood; the form is lo[-hi]:value"),
    Edit("rows_not_text", '"1-8:1,9:0"', "[1]", "attn_stats: found a list of 1; allowed: a quoted batch table"),
    Edit("blocks_beyond_model", "1-3:1", "1-4:1", "'1-4:1': saved blocks (of this model) must be within 1..3"),
    Edit(
        "blocks_of_zero", "1-3:1", "0:1", "attn_stats_blocks: '0:1': saved blocks (of this model) must be within 1..3"
    ),
    Edit("name_with_slash", "name: small", "name: ../small", "1: name: found '../small'; allowed: letters, digits"),
    Edit("name_with_dot_first", "name: small", "name: .small", "1: name: found '.small'; allowed: letters, digits"),
    Edit("name_missing_value", "name: small", "name: ~", "1: name: found nothing; allowed: letters"),
    Edit("anchor", "capacity: 16", "capacity: &c 16", "8: anchor &c: anchors are not allowed"),
    Edit("alias", "capacity: 16", "capacity: *c", "8: alias *c: aliases are not allowed; write the value out"),
    Edit("tag", "capacity: 16", "capacity: !!int 16", "8: tag 'tag:yaml.org,2002:int': tags are not allowed"),
    Edit(
        "list_as_key",
        "name: small",
        "name: small\n? [a]\n: 1",
        "2: found a list of 1 as a field name; allowed: name, model",
    ),
    Edit("merge_key", "model:", "model:\n  <<: {layers: 3}", "3: model.'<<': unknown field; allowed: hidden_size"),
    Edit(
        "second_document_later",
        "    dcp: 2\n",
        "    dcp: 2\n---\nname: other\n",
        "19: a second document starts; one file holds",
    ),
]


@pytest.mark.parametrize("case", EDITS, ids=lambda case: case.name)
def test_mistake_is_reported_once_with_its_place(case):
    assert case.old in GOOD
    problems = problems_of(GOOD.replace(case.old, case.new, 1))
    assert len(problems) == 1, problems
    assert re.match(r"f\.yaml:\d+: ", problems[0])
    assert case.says in problems[0].removeprefix("f.yaml:"), problems[0]


def test_a_document_marker_at_the_top_is_fine():
    assert parse("---\n" + GOOD) == parse(GOOD)


@dataclass(frozen=True)
class Whole:
    """A file that cannot be read as a configuration at all."""

    name: str
    data: bytes
    says: str


WHOLE = [
    Whole("empty", b"", "f.yaml:1: the file is empty"),
    Whole("comments_only", b"# nothing\n", "f.yaml:1: the file is empty"),
    Whole("null", b"~\n", "f.yaml:1: the file is empty"),
    Whole("list", b"- a\n- b\n", "f.yaml:1: found a list of 2; allowed: a mapping with name, model"),
    Whole("word", b"hello\n", "f.yaml:1: found 'hello'; allowed: a mapping"),
    Whole(
        "tab_in_indentation", b"model:\n\tlayers: 3\n", "f.yaml:2: a tab in the indentation; YAML allows only spaces"
    ),
    Whole("syntax", b"a: 1\nb: c: d\n", "f.yaml:2: not YAML: mapping values are not allowed here"),
    Whole("unclosed", b"a: [1,\n", "f.yaml:2: not YAML: while parsing a flow"),
    Whole("not_utf8", b"name: small\nx: \xff\n", "f.yaml:2: not UTF-8: byte 0xff at offset 15"),
    Whole("escape_beyond_all", b'name: small\nx: "\\UFFFFFFFF"\n', "f.yaml:2: not YAML: a character escape or version"),
    Whole("escape_beyond_unicode", b'x: "\\U00110000"\n', "f.yaml:1: not YAML: a character escape or version"),
    Whole("endless_version", b"%YAML " + b"9" * 5000 + b".1\n---\nx: 1\n", "f.yaml:1: not YAML: a character escape or"),
    Whole("nul", b"name: small\nx: \0\n", "f.yaml:2: not YAML: special characters are not allowed"),
    Whole("utf16", "name: small".encode("utf-16"), "f.yaml:1: not UTF-8: byte 0xff at offset 0"),
    Whole("many_values", b"x: [" + b"1," * 100_000 + b"]", "f.yaml:1: more than 5000 values; a configuration has some"),
    Whole("many_keys", b"".join(b"k%d: 1\n" % n for n in range(20_000)), "f.yaml:2500: more than 5000 values"),
    Whole("control_character", b"name: small\nx: \x07\n", "f.yaml:2: not YAML: special characters are not allowed"),
    Whole("too_large", b"#" * (256 * 1024 + 1), "f.yaml:1: the file is larger than 262144 bytes"),
    Whole("deep_flow", b"a: " + b"[" * 100_000, "f.yaml:1: nested more than 16 deep"),
    Whole("deep_blocks", b"".join(b" " * n + b"a:\n" for n in range(500)), "f.yaml:17: nested more than 16 deep"),
    Whole("binary", bytes(range(256)), "f.yaml:"),
]


@pytest.mark.parametrize("case", WHOLE, ids=lambda case: case.name)
def test_unreadable_file_is_one_problem(case):
    problems = problems_of(case.data)
    assert len(problems) == 1
    assert problems[0].startswith(case.says)


def test_alias_bomb_is_refused_at_once():
    levels = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60)]
    started = time.process_time()
    problems = problems_of("\n".join(levels))
    assert time.process_time() - started < 2
    assert any("aliases are not allowed" in problem for problem in problems)


def test_all_mistakes_of_a_file_come_together_in_file_order():
    text = (
        GOOD.replace("2048", "5")
        .replace("capacity", "capasity")
        .replace('"1-3:1"', f'"{MAX_BLOCKS + 1}:1"')
        .replace("tp: 2", "tp: x")
    )
    problems = problems_of(text)
    assert [int(problem.split(":")[1]) for problem in problems] == [3, 8, 16, 17]


def test_a_long_list_of_mistakes_is_cut_with_a_count():
    problems = problems_of(GOOD + "".join(f"x{n}: 1\n" for n in range(200)))
    assert len(problems) == MOST_REPORTED + 1
    assert problems[-1] == f"f.yaml: {200 - MOST_REPORTED} more mistakes; mend these first"


def test_many_deployments_are_refused_as_planning_them_takes_long():
    items = "".join(f"  - {{tp: {tp}, dcp: 1}}\n" for tp in range(1, 34))
    text = GOOD.split("deployments:", maxsplit=1)[0].replace("[1, tp]", "[1]") + "deployments:\n" + items
    assert problems_of(text) == ("f.yaml:13: deployments: found 33; allowed: 1..32; spread them over several files",)


LONG = [
    Whole("anchor", b"x: &" + b"a" * 200_000 + b" 1", "f.yaml:1: anchor &aaa"),
    Whole("tag", b"x: !" + b"a" * 200_000 + b" 1", "f.yaml:1: tag '!aaa"),
    Whole("key", b"? " + b"a" * 200_000 + b"\n: 1", "f.yaml:1: 'aaa"),
    Whole("surrogate", b'"\\uD800": 1', "f.yaml:1: '\\ud800': unknown field"),
    Whole(
        "table", b"deployments: [{tp: 1, dcp: 1, attn_stats: '" + b"x," * 100_000 + b"'}]", "f.yaml:1: name: missing"
    ),
]


@pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
def test_a_message_stays_short_whatever_the_file_and_its_path(case):
    for where in ("f.yaml", "x" * 4000):
        with pytest.raises(ConfigError) as caught:
            parse_config(case.data, where)
        assert any(line.startswith(case.says.replace("f.yaml", where)) for line in caught.value.problems)
        assert len(str(caught.value).encode("utf-8", "surrogatepass")) < 40_000


@pytest.mark.parametrize("high", [1, 2, 16, 64])
def test_an_example_of_a_table_is_itself_accepted(high):
    """What a message gives as an example can be put into the file that it is about."""
    for wrong in ("'all'", "[1]"):
        text = GOOD.replace("capacity: 16", f"capacity: {high}").replace('"1-8:1,9:0"', wrong)
        (problem,) = problems_of(text)
        example = re.search(r"(?:e\.g\.|such as) '([^']+)'", problem)[1]
        assert str(parse(text.replace(wrong, f"'{example}'")).deployments[1].attn_stats) == example


@pytest.mark.parametrize("found", [-5, 0, 1, 1000, 1024, 1536, 1600, 2000, 8191, 8192, 8193, 10**17])
def test_the_nearest_row_lengths_are_accepted(found):
    text = GOOD.replace("2048", str(found))
    if found in (1024, 1536, 8192):
        assert parse(text).model.hidden_size == found
        return
    (problem,) = problems_of(text)
    for near in problem.split("nearest: ")[1].split(" or "):
        assert parse(GOOD.replace("2048", near)).model.hidden_size == int(near)


def test_missing_file_says_what_to_pass(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file.*`attnres-aot config >"):
        load_config(tmp_path / "none.yaml")


def test_folder_is_not_a_file(tmp_path):
    with pytest.raises(ConfigError, match="it is a folder, not a file"):
        load_config(tmp_path)


def test_digest_ignores_comments_layout_and_order():
    shuffled = GOOD.replace('"1-8:1,9:0"', '" 9:0, 1-4:1,5-8:1" # why').replace("[1, tp]", "\n  - tp\n  - 1")
    assert parse(shuffled).digest == parse(GOOD).digest


DIGEST_EDITS = [
    ("name", "small", "other"),
    ("hidden_size", "2048", "3072"),
    ("layers", "layers: 9", "layers: 10"),
    ("block_size", "block_size: 4", "block_size: 3"),
    ("dense", "dense_layers: 1", "dense_layers: 0"),
    ("capacity", "capacity: 16", "capacity: 32"),
    ("slots", "[1, tp]", "[1]"),
    ("more_slots", "[1, tp]", "[1, 2, tp]"),
    ("option", "aux: false", "aux: true"),
    ("tp", "tp: 2", "tp: 6"),
    ("dcp", "dcp: 1", "dcp: 4"),
    ("rows", "9:0", "9:1"),
    ("blocks", "1-3:1", "1-2:1"),
]


@pytest.mark.parametrize(("old", "new"), [edit[1:] for edit in DIGEST_EDITS], ids=[edit[0] for edit in DIGEST_EDITS])
def test_every_value_changes_the_digest(old, new):
    assert parse(GOOD.replace(old, new, 1)).digest != parse(GOOD).digest


def test_a_bundle_serves_so_many_deployments_and_no_more():
    start = GOOD.index("deployments:")
    for count in (MAX_DEPLOYMENTS, MAX_DEPLOYMENTS + 1):
        pairs = "".join(f"  - {{tp: {tp}, dcp: 1}}\n" for tp in range(1, count + 1))
        text = GOOD[:start].replace(", tp]", "]") + "deployments:\n" + pairs
        if count == MAX_DEPLOYMENTS:
            assert len(parse(text).deployments) == count
        else:
            with pytest.raises(ConfigError, match=r"deployments: found 33; allowed: 1\.\.32; spread them over several"):
                parse(text)

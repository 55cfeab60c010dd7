"""Launches for a memory checker: exact allocations, right results found right, wrong ones wrong."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from simulated_consumer import SimulatedConsumer

from attnres_aot.bundle.manifest import Choice
from attnres_aot.selftest import reference
from attnres_aot.spec.variants import parse_variant
from tests.support.bare import BARE_EPS, bare_cases, check_bare, check_publish, check_statistics, draw_bare

HIDDEN = 1024
NAMES = [
    "nb0-write0-aux",
    "nb2-delta",
    "nb7-delta-write7-aux",
    "nb8-delta-final",
    "nb3-delta-ring1",
    "nb4-delta-write4-ring8-aux",
    "nb2-delta-ring16-stats",
    "nb5-stats",
]


def draw(name: str, rows: int = 3):
    return draw_bare(parse_variant(name), rows, HIDDEN, torch.Generator().manual_seed(5), torch.device("cpu"))


def tensors(views) -> dict[str, torch.Tensor]:
    fields = {field.name: getattr(views, field.name) for field in dataclasses.fields(views)}
    return {name: tensor for name, tensor in fields.items() if tensor is not None}


@pytest.mark.parametrize("name", NAMES)
def test_a_right_launch_has_no_problems(name):
    assert check_bare(draw(name), SimulatedConsumer()) == []


@pytest.mark.parametrize("name", NAMES)
def test_every_operand_is_an_allocation_of_its_own_and_of_its_size(name):
    found = tensors(draw(name).views)
    assert all(t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in found.values())
    assert len({t.untyped_storage().data_ptr() for t in found.values()}) == len(found)


DEFECTS = {
    "out": (lambda case, views: views.out[2, 5].add_(1.0), "1 elements of out are wrong"),
    "prefix": (lambda case, views: views.prefix[0, :1].add_(1.0), "prefix is not the updated prefix"),
    "aux": (lambda case, views: views.aux.zero_(), "aux is not the updated prefix"),
    "block": (lambda case, views: views.blocks[1, 4].zero_(), "the written block is not the updated prefix"),
    "mailbox": (lambda case, views: views.source[7, 2, -2:].zero_(), "the mailbox is not armed again"),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_wrong_launch_is_found(name):
    defect, text = DEFECTS[name]
    (problem,) = check_bare(draw("nb4-delta-write4-ring8-aux"), SimulatedConsumer(after=defect))
    assert text in problem


def manifest_of(names: list[str], choices: tuple[Choice, ...]) -> SimpleNamespace:
    variants = [SimpleNamespace(name=name, choices=choices or (Choice(image=name, max_rows=None),)) for name in names]
    return SimpleNamespace(variants=variants)


def test_every_row_count_is_launched_on_every_image():
    cases = [(str(variant), rows) for variant, rows in bare_cases(manifest_of(["nb1", "nb2"], ()), (1, 3))]
    assert cases == [("nb1", 1), ("nb1", 3), ("nb2", 1), ("nb2", 3)]


def test_images_that_the_row_counts_miss_are_launched_too():
    choices = tuple(Choice(image=f"i{rows}", max_rows=rows) for rows in (2, 4, 8, None))
    cases = [rows for _, rows in bare_cases(manifest_of(["nb1"], choices), (1, 3))]
    assert cases == [1, 3, 8, 9]


def make_statistics(norm, query, blocks, mixture, scal, *, spoil=lambda mixture, scal: None) -> None:
    rows, nb = blocks.shape[0], blocks.shape[1] - 1
    for to, values in zip((mixture, scal), reference.statistics(blocks, nb, norm, query, BARE_EPS), strict=True):
        to[:rows].copy_(values)
    spoil(mixture, scal)


SPOILED = {"mixture": lambda mixture, scal: mixture[2, 7].add_(0.01), "scal": lambda mixture, scal: scal[1, 1].add_(1)}


def check_made(launch) -> list[str]:
    return check_statistics(4, 3, HIDDEN, torch.Generator().manual_seed(5), torch.device("cpu"), launch)


def test_right_statistics_have_no_problems():
    assert check_made(make_statistics) == []


@pytest.mark.parametrize("name", SPOILED)
def test_wrong_statistics_are_found(name):
    (problem,) = check_made(lambda *operands: make_statistics(*operands, spoil=SPOILED[name]))
    assert f"{name} is wrong" in problem


def check_published(launch) -> list[str]:
    return check_publish(3, HIDDEN, torch.Generator().manual_seed(5), torch.device("cpu"), launch)


def test_right_publishing_has_no_problems():
    assert check_published(lambda rows, mailbox, slot: reference.publish(mailbox, slot, rows)) == []


MISPUBLISHED = {
    "nothing": lambda rows, mailbox, slot: mailbox.zero_(),
    "negative-zero-kept": lambda rows, mailbox, slot: mailbox[slot, : rows.shape[0]].copy_(rows),
}


@pytest.mark.parametrize("name", MISPUBLISHED)
def test_wrong_publishing_is_found(name):
    assert check_published(MISPUBLISHED[name]) == ["publishing 3 rows: wrong bits"]

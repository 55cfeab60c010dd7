"""Launches for a memory checker: exact allocations, right results found right, wrong ones wrong."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from simulated_consumer import SimulatedConsumer

from attnres_aot.checking.bare import bare_cases, check_bare, draw_bare
from attnres_aot.manifest import Choice
from attnres_aot.variants import parse_variant

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

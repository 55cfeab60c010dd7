"""Operands that a launch refuses, and those that it must take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import attnres_aot
from attnres_aot.errors import OperandError
from attnres_aot.spec.variants import ConsumerKey

HIDDEN = 1024
BF16 = torch.bfloat16


@pytest.fixture
def prepared(bundle, weights, key):
    return attnres_aot.PreparedAttnRes(weights, key, 1e-5, bundle).bind_aux()


@dataclass(frozen=True, kw_only=True)
class Bad:
    """One operand that is wrong, and what the error says of it."""

    name: str
    operand: str
    make: Callable[[], Any]
    text: str

    def __str__(self) -> str:
        return f"{self.operand}-{self.name}"


def rows_of(rows: int, width: int = HIDDEN, dtype: torch.dtype = BF16, device: str = "cpu") -> torch.Tensor:
    return torch.zeros((rows, width), dtype=dtype, device=device)


def shifted(elements: int) -> torch.Tensor:
    return torch.zeros(3 * HIDDEN + 64, dtype=BF16)[elements : elements + 3 * HIDDEN].view(3, HIDDEN)


CASES = [
    Bad(name="dtype", operand="delta", make=lambda: rows_of(3, dtype=torch.float16), text="torch.bfloat16 is wanted"),
    Bad(name="hidden", operand="prefix", make=lambda: rows_of(3, 512), text=r"a tensor \[rows, 1024\] is wanted"),
    Bad(name="rank", operand="out", make=lambda: rows_of(3)[None], text=r"a tensor \[rows, 1024\] is wanted"),
    Bad(name="rank", operand="blocks", make=lambda: rows_of(3), text=r"a tensor \[rows, B, 1024\] is wanted"),
    Bad(name="device", operand="aux", make=lambda: rows_of(3, device="meta"), text="a tensor on cpu is wanted"),
    Bad(name="none", operand="delta", make=lambda: None, text="delta is NoneType None; a dense torch.bfloat16 tensor"),
    Bad(name="list", operand="out", make=lambda: [1.0], text="out is list"),
    Bad(name="sparse", operand="delta", make=lambda: rows_of(3).to_sparse(), text="a dense torch.bfloat16 tensor"),
    Bad(name="rows", operand="delta", make=lambda: rows_of(4), text="delta has 4 rows, but out has 3"),
    Bad(name="rows", operand="blocks", make=lambda: torch.zeros(2, 4, HIDDEN, dtype=BF16), text="blocks has 2 rows"),
    Bad(
        name="last-stride", operand="prefix", make=lambda: rows_of(3, 2 * HIDDEN)[:, ::2], text="last stride must be 1"
    ),
    Bad(
        name="row-stride",
        operand="delta",
        make=lambda: rows_of(3, HIDDEN + 4)[:, :HIDDEN],
        text=r"delta has 1028 elements between rows; a multiple of 8 \(16 bytes\) is wanted",
    ),
    Bad(
        name="block-stride",
        operand="blocks",
        make=lambda: torch.zeros(3, 4, HIDDEN + 1, dtype=BF16)[:, :, :HIDDEN],
        text="blocks has 1025 elements between blocks",
    ),
    Bad(name="alignment", operand="prefix", make=lambda: shifted(1), text="must be aligned to 16 bytes"),
    Bad(
        name="too-few",
        operand="blocks",
        make=lambda: torch.zeros(3, 1, HIDDEN, dtype=BF16),
        text="blocks holds 1 blocks per row; at least 2 are wanted",
    ),
    Bad(
        name="rows-overlap",
        operand="out",
        make=lambda: rows_of(1).expand(3, HIDDEN),
        text="out is written, but rows or blocks of it overlap",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bad_operand_is_named(stub, prepared, operands, case):
    given = operands(rows=3).replace(**{case.operand: case.make()})
    with pytest.raises(OperandError, match=case.text) as caught:
        prepared.run(*given.ordinary, given.aux)
    assert case.operand in str(caught.value)
    assert stub.launch_count() == 0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bad_operand_is_named_after_good_launches(stub, prepared, operands, case):
    good = operands(rows=3)
    for _ in range(3):
        prepared.run(*good.ordinary, good.aux)
    given = good.replace(**{case.operand: case.make()})
    with pytest.raises(OperandError, match=case.text):
        prepared.run(*given.ordinary, given.aux)
    assert stub.launch_count() == 3


def test_every_problem_of_one_call_is_reported(prepared, operands):
    given = operands(rows=3).replace(delta=rows_of(3, dtype=torch.float32), out=rows_of(3, 8))
    with pytest.raises(OperandError) as caught:
        prepared.run(*given.ordinary)
    assert [line.split()[0] for line in str(caught.value).splitlines()] == ["delta", "out"]


def test_written_block_must_exist(bundle, weights, operands):
    prepared = attnres_aot.PreparedAttnRes(weights, ConsumerKey(nb=2, has_delta=True, write=2), 1e-5, bundle)
    with pytest.raises(OperandError, match=r"blocks holds 2 blocks per row; at least 3 are wanted"):
        prepared.run(*operands(blocks=2).ordinary)


def test_strides_that_are_never_followed_may_be_anything(stub, prepared):
    odd = torch.zeros(HIDDEN + 3, dtype=BF16).as_strided((1, HIDDEN), (HIDDEN + 3, 1))
    blocks = torch.zeros(4 * HIDDEN, dtype=BF16).as_strided((1, 2, HIDDEN), (7, HIDDEN, 1))
    prepared.run(odd, rows_of(1), blocks, rows_of(1))
    arguments = stub.launch().arguments()
    assert (arguments["source_row_stride"], arguments["blocks_row_stride"]) == (0, 0)


def test_rows_beyond_the_mailbox_are_refused(prepared, operands):
    prepared.bind_ring(attnres_aot.new_mailbox(1, 4, HIDDEN, "cpu"))
    with pytest.raises(OperandError, match=r"out has 5 rows, but the bound mailbox holds 4 per slot"):
        prepared.run_ring(*operands(rows=5).ring)


def test_unbound_ring_and_aux_name_the_missing_call(bundle, weights, key, operands):
    prepared, given = attnres_aot.PreparedAttnRes(weights, key, 1e-5, bundle), operands()
    with pytest.raises(OperandError, match=r"call bind_ring\(mailbox\) before run_ring"):
        prepared.run_ring(*given.ring)
    with pytest.raises(OperandError, match=r"call bind_aux\(\) before"):
        prepared.run(*given.ordinary, given.aux)


SHARED = {
    "out-prefix": ("out", "prefix", 0, "out overlaps|prefix overlaps"),
    "out-aux": ("out", "aux", 0, "overlaps"),
    "aux-prefix": ("aux", "prefix", 0, "overlaps"),
    "delta-prefix-shifted": ("delta", "prefix", HIDDEN, "delta overlaps prefix, which starts 2048 bytes before it"),
    "delta-out-shifted": ("delta", "out", HIDDEN, "delta may be one view with aux, out, prefix"),
}


@pytest.mark.parametrize("name", SHARED)
def test_shared_memory_that_would_corrupt_is_refused(stub, prepared, operands, name):
    one, other, shift, text = SHARED[name]
    memory = torch.zeros(8 * HIDDEN, dtype=BF16)
    views = {other: memory[: 3 * HIDDEN].view(3, HIDDEN), one: memory[shift : shift + 3 * HIDDEN].view(3, HIDDEN)}
    given = operands(rows=3).replace(**views)
    for _ in range(2):
        with pytest.raises(OperandError, match=text):
            prepared.run(*given.ordinary, given.aux)
    assert stub.launch_count() == 0


@pytest.mark.parametrize("block", [0, 1])
def test_writing_into_a_block_that_is_read_is_refused(prepared, operands, block):
    given = operands(rows=3)
    with pytest.raises(OperandError, match=r"blocks overlaps out"):
        prepared.run(*given.replace(out=given.blocks[:, block]).ordinary)


def test_reading_the_block_that_is_written_is_refused(bundle, weights, operands):
    prepared = attnres_aot.PreparedAttnRes(weights, ConsumerKey(nb=2, has_delta=True, write=2), 1e-5, bundle)
    given = operands(rows=3)
    with pytest.raises(OperandError, match=r"delta overlaps blocks"):
        prepared.run(*given.replace(delta=given.blocks[:, 2]).ordinary)
    prepared.run(*given.replace(delta=given.blocks[:, 3]).ordinary)


@pytest.mark.parametrize("name", ["prefix", "out", "aux"])
def test_source_may_be_the_very_view_that_is_written(stub, prepared, operands, name):
    given = operands(rows=3)
    given = given.replace(delta=getattr(given, name))
    prepared.run(*given.ordinary, given.aux)
    assert stub.launch().arguments()["source"] == given.delta.data_ptr()


def test_views_that_interleave_without_touching_are_taken(stub, prepared):
    slab = torch.zeros(3, 8, HIDDEN, dtype=BF16)
    for _ in range(3):
        prepared.run(slab[:, 0], slab[:, 1], slab[:, 4:], slab[:, 2], slab[:, 3])
    assert stub.launch_count() == 3


def test_source_may_be_a_block_that_is_only_read(stub, prepared, operands):
    given = operands(rows=3)
    prepared.run(*given.replace(delta=given.blocks[:, 1]).ordinary)
    assert stub.launch_count() == 1


def test_bound_memory_must_not_be_written(prepared, operands):
    mailbox = attnres_aot.new_mailbox(8, 64, HIDDEN, "cpu")
    prepared.bind_ring(mailbox)
    with pytest.raises(OperandError, match=r"out overlaps the mailbox"):
        prepared.run_ring(*operands(rows=3).replace(out=mailbox[0, :3]).ring)


def test_checks_can_be_turned_off_and_on(stub, prepared, operands):
    given = operands(rows=3)
    bad = given.replace(out=given.prefix)
    prepared.checks = False
    prepared.run(*bad.ordinary)
    assert stub.launch_count() == 1
    prepared.checks = True
    with pytest.raises(OperandError, match=r"overlaps"):
        prepared.run(*bad.ordinary)


def test_geometry_is_checked_even_with_checks_off(prepared, operands):
    prepared.checks = False
    with pytest.raises(OperandError, match=r"delta has 4 rows"):
        prepared.run(*operands(rows=3).replace(delta=rows_of(4)).ordinary)


def wide_view(rows: int) -> torch.Tensor:
    return torch.zeros((rows, 2 * HIDDEN), dtype=torch.bfloat16)[:, :HIDDEN]


def test_with_checks_off_geometry_is_compared_wherever_an_address_or_out_changes(stub, prepared, operands):
    prepared.checks = False
    given = operands(rows=3)
    for _ in range(2):
        prepared.run(*given.ordinary)
    moved = given.replace(delta=wide_view(3))
    prepared.run(*moved.ordinary)
    assert stub.launch().arguments()["source_row_stride"] == 2 * HIDDEN // 8
    with pytest.raises(OperandError, match=r"delta has 4 rows"):
        prepared.run(*given.replace(delta=rows_of(4)).ordinary)
    shorter = [tensor[:2] for tensor in moved.ordinary]  # at the same addresses
    prepared.run(*shorter)
    assert stub.launch().arguments()["rows"] == 2
    with pytest.raises(OperandError, match=r"delta has 3 rows, but out has 2"):
        prepared.run(given.delta, *shorter[1:])
    prepared.run(*given.ordinary)
    assert stub.launch().arguments()["source_row_stride"] == HIDDEN // 8
    assert stub.launch_count() == 5
    assert len(prepared._ordinary.plan.idle) == 1


def test_a_ring_launch_with_checks_off_compares_geometry_wherever_an_address_changes(stub, prepared, operands):
    prepared.bind_ring(attnres_aot.new_mailbox(8, 64, HIDDEN, "cpu"))
    prepared.checks = False
    given = operands(rows=3)
    for _ in range(2):
        prepared.run_ring(*given.ring)
    moved = given.replace(prefix=wide_view(3))  # kept, so that its address is not that of the next
    prepared.run_ring(*moved.ring)
    assert stub.launch().arguments()["prefix_row_stride"] == 2 * HIDDEN // 8
    with pytest.raises(OperandError, match=r"prefix has 4 rows"):
        prepared.run_ring(*given.replace(prefix=rows_of(4)).ring)
    assert stub.launch_count() == 3


def test_tensor_that_is_resized_in_place_is_checked_again(prepared, operands):
    given = operands(rows=3)
    prepared.run(*given.ordinary)
    given.delta.resize_(2, HIDDEN)
    with pytest.raises(OperandError, match=r"delta has 2 rows, but out has 3"):
        prepared.run(*given.ordinary)


def test_memory_that_was_freed_is_refused(prepared, operands):
    given = operands(rows=3)
    prepared.run(*given.ordinary)
    given.delta.untyped_storage().resize_(0)
    with pytest.raises(OperandError, match=r"delta has no memory"):
        prepared.run(*given.ordinary)

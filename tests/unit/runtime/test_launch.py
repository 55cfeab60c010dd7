"""What reaches the driver for a launch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import attnres_aot
from attnres_aot.bundle.manifest import Choice
from attnres_aot.errors import OperandError, UsageError
from attnres_aot.runtime import api
from attnres_aot.spec.variants import ConsumerKey, choices_for

HIDDEN = 1024
VECTORS = HIDDEN // 8


@pytest.fixture
def prepared(bundle, weights, key):
    return attnres_aot.PreparedAttnRes(weights, key, (1e-5, 1e-6), bundle)


@pytest.fixture
def statistics():
    return torch.zeros(64, HIDDEN), torch.zeros(64, 2)


@pytest.fixture
def mailbox():
    return attnres_aot.new_mailbox(8, 64, HIDDEN, "cpu")


def symbol(bundle, variant):
    """The symbol of the image that serves a variant."""
    name = str(choices_for(attnres_aot.parse_variant(variant), HIDDEN)[0].spec)
    return next(image.symbol for image in bundle.bundle.manifest.images if image.name == name).encode()


def test_ordinary_launch_passes_every_argument(stub, prepared, operands, weights):
    given = operands(rows=3)
    stub.streams[0] = 0x5000
    assert prepared.run(*given.ordinary) is given.out
    launch = stub.launch()
    assert (list(launch.grid), list(launch.block), list(launch.cluster)) == ([3, 1, 1], [128, 1, 1], [1, 1, 1])
    assert (launch.stream, launch.pdl, launch.smem) == (0x5000, 0, 0)
    arguments = launch.arguments()
    assert arguments.pop("eps") == pytest.approx(1e-5)
    assert arguments.pop("out_eps") == pytest.approx(1e-6)
    assert arguments == {
        "source": given.delta.data_ptr(),
        "prefix": given.prefix.data_ptr(),
        "blocks": given.blocks.data_ptr(),
        "norm": weights[0].data_ptr(),
        "query": weights[1].data_ptr(),
        "out_norm": weights[2].data_ptr(),
        "out": given.out.data_ptr(),
        "aux": 0,
        "mixture": 0,
        "scal": 0,
        "fault": 0,
        "source_row_stride": VECTORS,
        "source_slot_stride": 0,
        "prefix_row_stride": VECTORS,
        "blocks_row_stride": 4 * VECTORS,
        "blocks_block_stride": VECTORS,
        "out_row_stride": VECTORS,
        "aux_row_stride": 0,
        "write": -1,
        "rows": 3,
        "spin_budget": 0,
        "fault_tag": 0,
        "early": 0,
    }


def test_ring_launch_passes_the_mailbox(stub, prepared, operands, mailbox):
    given = operands(rows=3)
    assert prepared.bind_ring(mailbox, spin_budget=77).run_ring(*given.ring) is given.out
    arguments = stub.launch().arguments()
    assert arguments["source"] == mailbox.data_ptr()
    assert (arguments["source_row_stride"], arguments["source_slot_stride"]) == (VECTORS, 64 * VECTORS)
    assert (arguments["spin_budget"], arguments["rows"]) == (77, 3)


def test_strides_are_those_of_the_tensors(stub, prepared, operands):
    wide = torch.zeros(3, 4 * HIDDEN, dtype=torch.bfloat16)
    swapped = torch.zeros(5, 3, HIDDEN, dtype=torch.bfloat16).transpose(0, 1)
    given = operands(rows=3).replace(
        delta=torch.zeros(1, HIDDEN, dtype=torch.bfloat16).expand(3, HIDDEN),
        prefix=wide[:, :HIDDEN],
        out=wide[:, 2 * HIDDEN : 3 * HIDDEN],
        aux=torch.zeros(3, HIDDEN + 8, dtype=torch.bfloat16)[:, :HIDDEN],
        blocks=swapped,
    )
    prepared.bind_aux().run(*given.ordinary, given.aux)
    arguments = stub.launch().arguments()
    found = {name: arguments[f"{name}_row_stride"] for name in ("source", "prefix", "out", "aux", "blocks")}
    assert found == {
        "source": 0,
        "prefix": 4 * VECTORS,
        "out": 4 * VECTORS,
        "aux": VECTORS + 1,
        "blocks": VECTORS,
    }
    assert arguments["blocks_block_stride"] == 3 * VECTORS


def test_write_and_pdl_reach_the_launch(stub, bundle, weights, operands):
    key = ConsumerKey(nb=2, has_delta=True, write=2)
    attnres_aot.PreparedAttnRes(weights, key, 1e-5, bundle, pdl=True).run(*operands().ordinary)
    assert (stub.launch().arguments()["write"], stub.launch().pdl) == (2, 1)


@pytest.mark.parametrize(("pdl", "seen"), [(False, (0, 0)), (True, (1, 0)), ("early", (1, 1))])
def test_only_early_ring_launches_go_before_the_dependency_wait(
    stub, bundle, weights, key, operands, mailbox, pdl, seen
):
    prepared = attnres_aot.PreparedAttnRes(weights, key, 1e-5, bundle, pdl=pdl).bind_ring(mailbox)
    prepared.run_ring(*operands().ring)
    assert (stub.launch().pdl, stub.launch().arguments()["early"]) == seen
    prepared.run(*operands().ordinary)
    assert (stub.launch().pdl, stub.launch().arguments()["early"]) == (seen[0], 0)


@pytest.mark.parametrize("pdl", [1, 0, None, "on", "Early", b"early"])
def test_other_launch_modes_are_refused(bundle, weights, key, pdl):
    with pytest.raises(UsageError, match=r"pdl is .*; allowed are False, True and 'early'"):
        attnres_aot.PreparedAttnRes(weights, key, 1e-5, bundle, pdl=pdl)


def test_pdl_is_refused_where_the_code_does_not_support_it(bundles, weights, key, operands, stub):
    def without(manifest):
        return dataclasses.replace(
            manifest, images=tuple(dataclasses.replace(image, pdl=False) for image in manifest.images)
        )

    loaded = api.load(bundles.write(["nb2-delta"], change=without))
    prepared = attnres_aot.PreparedAttnRes(weights, key, 1e-5, loaded, pdl=True)
    with pytest.raises(OperandError, match=r"pdl was asked for, but the code of nb2-delta does not support it"):
        prepared.run(*operands().ordinary)
    assert stub.launch_count() == 0


@pytest.mark.parametrize("order", ["rsa", "sar", "ars"])
def test_statistics_are_taken_at_exact_row_counts_whatever_the_order_of_binding(
    stub, bundle, prepared, operands, statistics, mailbox, order
):
    for letter in order:
        if letter == "r":
            prepared.bind_ring(mailbox)
        elif letter == "s":
            prepared.bind_statistics(*statistics, rows=[2, 4])
        else:
            prepared.bind_aux()
    for rows in (1, 2, 3, 4):
        given = operands(rows=rows)
        prepared.run(*given.ordinary)
        prepared.run(*given.ordinary, aux=given.aux)
        prepared.run_ring(*given.ring)
        prepared.run_ring(*given.ring, aux=given.aux)
        launches = [stub.launch(stub.launch_count() - 4 + i) for i in range(4)]
        suffix = "-stats" if rows in (2, 4) else ""
        sources = ("", "", "-ring8", "-ring8")
        assert [launch.symbol for launch in launches] == [symbol(bundle, f"nb2-delta{s}{suffix}") for s in sources]
        expected = tuple(tensor.data_ptr() for tensor in statistics) if suffix else (0, 0)
        assert {(a["mixture"], a["scal"]) for a in (launch.arguments() for launch in launches)} == {expected}
        assert [launch.arguments()["aux"] for launch in launches] == [0, given.aux.data_ptr()] * 2


def test_binding_again_replaces(stub, bundle, prepared, operands, statistics, mailbox):
    given, other = operands(rows=3), attnres_aot.new_mailbox(16, 32, HIDDEN, "cpu")
    prepared.bind_ring(mailbox).run_ring(*given.ring)
    prepared.bind_ring(other).run_ring(*given.ring)
    assert stub.launch().symbol == symbol(bundle, "nb2-delta-ring16")
    assert stub.launch().arguments()["source"] == other.data_ptr()
    prepared.bind_statistics(*statistics, rows=[3]).run(*given.ordinary)
    prepared.bind_statistics(*statistics, rows=[2]).run(*given.ordinary)
    assert stub.launch().symbol == symbol(bundle, "nb2-delta")


def test_no_rows_launch_nothing_and_return_out(stub, prepared, operands, mailbox):
    given = operands(rows=0)
    assert prepared.run(*given.ordinary) is given.out
    assert prepared.bind_ring(mailbox).run_ring(*given.ring) is given.out
    assert prepared.bind_aux().run(*given.ordinary, given.aux) is given.out
    assert stub.launch_count() == 0


def test_every_launch_takes_the_pointers_and_the_stream_of_its_time(stub, prepared, operands):
    sets = [operands(rows=rows) for rows in (3, 3, 5, 3, 5)]
    for number, given in enumerate([*sets, *sets]):
        stub.streams[0] = number % 3
        prepared.run(*given.ordinary)
        launch = stub.launch()
        arguments = launch.arguments()
        assert [arguments[name] for name in ("source", "prefix", "blocks", "out")] == [
            tensor.data_ptr() for tensor in given.ordinary
        ]
        assert (arguments["rows"], launch.grid[0], launch.stream) == (len(given.out), len(given.out), number % 3)


def test_the_image_is_chosen_by_rows(stub, bundles, weights, operands):
    def by_rows(manifest):
        first, second = manifest.variants
        choices = (Choice(image=second.choices[0].image, max_rows=4), first.choices[0])
        return dataclasses.replace(manifest, variants=(dataclasses.replace(first, choices=choices), second))

    loaded = bundles.load_changed(["nb2-delta", "nb2"], by_rows)
    prepared = attnres_aot.PreparedAttnRes(weights, ConsumerKey(nb=2, has_delta=True), 1e-5, loaded)
    for rows in (4, 5):
        prepared.run(*operands(rows=rows).ordinary)
    assert [stub.launch(i).symbol for i in range(2)] == [symbol(loaded, "nb2"), symbol(loaded, "nb2-delta")]


def test_grid_covers_rows_that_do_not_fill_a_cluster(stub, bundles, weights, key, operands):
    def four_rows(manifest):
        image = dataclasses.replace(manifest.images[0], rows_per_cluster=4, cluster=2, smem_dynamic_bytes=50000)
        return dataclasses.replace(manifest, images=(image,))

    loaded = bundles.load_changed(["nb2-delta"], four_rows)
    attnres_aot.PreparedAttnRes(weights, key, 1e-5, loaded).run(*operands(rows=9).ordinary)
    launch = stub.launch()
    assert (launch.grid[0], launch.cluster[0], launch.smem) == (6, 2, 50000)
    assert stub.calls("cuKernelSetAttribute") == 1


def test_many_geometries_are_remembered_within_bounds(stub, prepared, operands, monkeypatch):
    monkeypatch.setattr("attnres_aot.runtime.launch.route._MAX_PLANS", 4)
    for rows in (*range(1, 11), *range(1, 11)):
        prepared.run(*operands(rows=rows).ordinary)
    assert [stub.launch(i).arguments()["rows"] for i in range(20)] == [*range(1, 11)] * 2
    assert len(prepared._ordinary._plans) <= 4
    assert stub.calls("cuLibraryLoadData") == 1


def test_tensors_of_several_modes_keep_their_plans(stub, prepared, operands, monkeypatch):
    made = []
    make = attnres_aot.runtime.launch.route.make_guard
    monkeypatch.setattr(attnres_aot.runtime.launch.route, "make_guard", lambda tensors: made.append(1) or make(tensors))
    plain = operands()
    with torch.inference_mode():
        inference = operands()
    for _ in range(3):
        for given in (plain, inference):
            prepared.run(*given.ordinary)
        with torch.autocast("cpu"):
            prepared.run(*plain.ordinary)
        with torch.inference_mode():
            prepared.run(*inference.ordinary)
    assert stub.launch_count() == 12
    assert 0 < len(made) <= 4

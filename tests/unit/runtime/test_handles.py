"""Handles: no number names another object, in this process or in one that loads a graph saved here."""

from __future__ import annotations

import gc
import io

import pytest
import torch

import attnres_aot
from attnres_aot.errors import UsageError
from attnres_aot.runtime import api
from attnres_aot.spec.variants import ConsumerKey

from .conftest import HIDDEN

KEY = ConsumerKey(nb=2, has_delta=True)


class Layer(torch.nn.Module):
    def __init__(self, prepared) -> None:
        super().__init__()
        self.prepared = prepared

    def forward(self, delta, prefix, blocks, out):
        return self.prepared.run(delta, prefix, blocks, out) * 2


@pytest.fixture
def make(bundle):
    def make(name=None):
        weights = tuple(torch.ones(HIDDEN, dtype=torch.bfloat16) for _ in range(3))
        return attnres_aot.PreparedAttnRes(weights, KEY, 1e-5, bundle, name=name)

    return make


def norm_of(prepared) -> int:
    return prepared._weights.norm.data_ptr()


def saved(program) -> bytes:
    file = io.BytesIO()
    torch.export.save(program, file)
    return file.getvalue()


def loaded(data: bytes):
    return torch.export.load(io.BytesIO(data)).module()


def test_handles_are_large_and_never_alike(make):
    handles = [make().handle for _ in range(100)]
    assert len(set(handles)) == 100
    assert all(2**61 <= handle < 2**62 and handle % 2 == 0 for handle in handles)


def test_a_name_gives_the_same_handle_in_every_process(make):
    """The number is part of saved graphs, so it must never change."""
    assert make("model.layers.3").handle == 4414063154122608667
    assert make("model.layers.4").handle % 2 == 1


def test_a_saved_graph_finds_the_object_of_the_same_name(stub, make, operands):
    names = [f"layers.{index}" for index in range(4)]
    programs = {}
    for name in names:
        prepared = make(name)
        programs[name] = saved(torch.export.export(Layer(prepared), operands().ordinary, strict=False))
        del prepared
    gc.collect()
    objects = {name: make(name) for name in reversed(names)}  # as another process might make them
    for name in names:
        loaded(programs[name])(*operands().ordinary)
        assert stub.launch().arguments()["norm"] == norm_of(objects[name])


@pytest.mark.parametrize("name", [None, "layers.0"])
def test_a_saved_graph_whose_object_is_not_here_is_refused(stub, make, operands, name):
    prepared = make(name)
    handle = prepared.handle
    program = saved(torch.export.export(Layer(prepared), operands().ordinary, strict=False))
    del prepared
    gc.collect()
    others = [make() for _ in range(20)] + [make("layers.1")]
    remedy = (
        "comes from a name= that no PreparedAttnRes has here" if name else "give them a name= where graphs are saved"
    )
    with pytest.raises(UsageError, match=f"handle {handle} names no PreparedAttnRes of this process; .*{remedy}"):
        loaded(program)(*operands().ordinary)
    assert stub.launch_count() == 0
    assert len(others) == 21


@pytest.mark.skipif(not hasattr(torch.compiler, "load_compiled_function"), reason="this torch saves no compiled graphs")
@pytest.mark.parametrize("with_statistics", [False, True])
def test_a_saved_compiled_layer_launches_for_what_it_is_called_with(stub, make, operands, tmp_path, with_statistics):
    layers, path = [Layer(make()) for _ in range(4)], tmp_path / "compiled"
    for layer in layers if with_statistics else ():
        layer.prepared.bind_statistics(torch.zeros(64, HIDDEN), torch.zeros(64, 2), [3])
    first, *others = layers
    first.prepared.run(*operands().ordinary)  # a plan must not be in the way
    compiled = torch.compile(first, fullgraph=True).forward.aot_compile((operands().ordinary, {}))
    compiled.save_compiled_function(str(path))
    with path.open("rb") as file:
        function = torch.compiler.load_compiled_function(file)
    for layer in reversed(others):
        function(layer, *operands().ordinary)
        assert stub.launch().arguments()["norm"] == norm_of(layer.prepared)


def test_a_name_is_of_one_living_object(make):
    first = make("layers.0")
    with pytest.raises(UsageError, match=r"name 'layers.0' is taken by <PreparedAttnRes nb2-delta, .*drop the other"):
        make("layers.0")
    del first
    gc.collect()
    assert make("layers.0").name == "layers.0"


@pytest.mark.parametrize("name", ["", 3, b"layers.0"])
def test_a_name_is_a_text(make, name):
    with pytest.raises(UsageError, match=r"name is .*; a text that is not empty is wanted"):
        make(name)


def test_objects_of_different_kinds_may_have_one_name(stub, bundles, weights):
    bundle = api.load(bundles.write(["nb2-delta"], producers=("statistics-nb2", "publish")))
    mixture, scal = torch.zeros(8, HIDDEN), torch.zeros(8, 2)
    consumer = attnres_aot.PreparedAttnRes(weights, KEY, 1e-5, bundle, name="layers.0")
    statistics = attnres_aot.PreparedStatistics(*weights[:2], 1e-5, mixture, scal, nb=2, bundle=bundle, name="layers.0")
    mailbox = attnres_aot.new_mailbox(2, 8, HIDDEN, "cpu")
    publisher = attnres_aot.PreparedPublish(mailbox, 1, bundle, name="layers.0")
    assert len({consumer.handle, statistics.handle, publisher.handle}) == 3
    with pytest.raises(UsageError, match=r"'layers.0' is taken by <PreparedPublish into slot 1"):
        attnres_aot.PreparedPublish(mailbox, 0, bundle, name="layers.0")
    rows = torch.zeros(3, HIDDEN, dtype=torch.bfloat16)
    for handle in (publisher.handle, statistics.handle):
        with pytest.raises(UsageError, match=f"handle {handle} names no PreparedAttnRes"):
            torch.ops.attnres_aot.run(handle, rows, rows, rows[:, None], rows, None, None, None)


def test_a_read_layer_takes_a_name(stub, bundle):
    from .test_binding import layer

    assert attnres_aot.PreparedAttnRes.for_target(layer(), bundle=bundle, name="a").name == "a"

"""Memory that is not there, not the value, moved, or shared: of operands, and of what is bound."""

from __future__ import annotations

import enum
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import attnres_aot
from attnres_aot.errors import OperandError, UsageError
from attnres_aot.runtime import api
from attnres_aot.runtime.consumer import Consumer
from attnres_aot.spec.variants import ConsumerKey

from .conftest import HIDDEN

BF16 = torch.bfloat16
CAPACITY = 8
KEY = ConsumerKey(nb=2, has_delta=True)


@pytest.fixture
def bundle(stub, bundles):
    variants = ("nb2-delta", "nb2-delta-stats", "nb2-delta-ring2", "nb2-delta-ring2-stats", "nb2-delta-aux")
    return api.load(bundles.write((*variants, "nb2-delta-write2"), producers=("statistics-nb2", "publish")))


@dataclass(kw_only=True)
class Rig:
    """Everything that can be bound, and what launches it."""

    bundle: Any
    norm: torch.Tensor
    query: torch.Tensor
    out_norm: torch.Tensor
    mailbox: torch.Tensor
    mixture: torch.Tensor
    scal: torch.Tensor

    def consumer(self, **options: Any) -> attnres_aot.PreparedAttnRes:
        return attnres_aot.PreparedAttnRes((self.norm, self.query, self.out_norm), KEY, 1e-5, self.bundle, **options)

    def taking_statistics(self, **options: Any) -> attnres_aot.PreparedAttnRes:
        return self.consumer(**options).bind_statistics(self.mixture, self.scal, [3])

    def ring(self, **options: Any) -> attnres_aot.PreparedAttnRes:
        return self.consumer(**options).bind_ring(self.mailbox)

    def publisher(self, **options: Any) -> attnres_aot.PreparedPublish:
        return attnres_aot.PreparedPublish(self.mailbox, 1, self.bundle, **options)

    def statistics(self, **options: Any) -> attnres_aot.PreparedStatistics:
        return attnres_aot.PreparedStatistics(
            self.norm, self.query, 1e-5, self.mixture, self.scal, nb=2, bundle=self.bundle, **options
        )


@pytest.fixture
def rig(bundle) -> Rig:
    norm, query, out_norm = (torch.ones(HIDDEN, dtype=BF16) for _ in range(3))
    return Rig(
        bundle=bundle,
        norm=norm,
        query=query,
        out_norm=out_norm,
        mailbox=attnres_aot.new_mailbox(2, CAPACITY, HIDDEN, "cpu"),
        mixture=torch.zeros(CAPACITY, HIDDEN),
        scal=torch.zeros(CAPACITY, 2),
    )


def launch(made: Any, way: str, given: Any) -> None:
    """Launches a prepared object of a Rig for operands of three rows."""
    if way in ("consumer", "taking_statistics"):
        made.run(*given.ordinary)
    elif way == "ring":
        made.run_ring(*given.ring)
    else:
        made.run(given.delta if way == "publisher" else given.blocks)


BOUND = [
    ("consumer", "norm", "weights.norm"),
    ("consumer", "query", "weights.query"),
    ("consumer", "out_norm", "weights.out_norm"),
    ("taking_statistics", "mixture", "mixture"),
    ("taking_statistics", "scal", "scal"),
    ("ring", "out_norm", "weights.out_norm"),
    ("ring", "mailbox", "mailbox"),
    ("publisher", "mailbox", "mailbox"),
    ("statistics", "norm", "norm"),
    ("statistics", "query", "query"),
    ("statistics", "mixture", "mixture"),
    ("statistics", "scal", "scal"),
]


def lose(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


@pytest.mark.parametrize(("way", "what", "name"), BOUND)
def test_memory_that_is_gone_is_not_bound(stub, rig, way, what, name):
    lose(getattr(rig, what))
    with pytest.raises(OperandError, match=f"^{name} has no memory: its storage was freed"):
        getattr(rig, way)()


@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize(("way", "what", "name"), BOUND)
def test_memory_that_goes_after_binding_is_noticed(stub, rig, operands, way, what, name, launched):
    made, given = getattr(rig, way)(), operands(rows=3)
    for _ in range(3 * launched):
        launch(made, way, given)
    lose(getattr(rig, what))
    for _ in range(2):
        with pytest.raises(OperandError, match=rf"{name} has no memory: .* it is bound: bring its memory back"):
            launch(made, way, given)
    assert stub.launch_count() == 3 * launched


@pytest.mark.parametrize(("way", "what", "name"), BOUND)
def test_memory_that_went_is_refused_even_with_checks_off_when_a_plan_is_made(stub, rig, operands, way, what, name):
    made = getattr(rig, way)(checks=False)
    lose(getattr(rig, what))
    with pytest.raises(OperandError, match=f"{name} has no memory"):
        launch(made, way, operands(rows=3))
    assert stub.launch_count() == 0


def move(tensor: torch.Tensor) -> None:
    """Frees a tensor's storage and allocates it elsewhere, as sharding and offloading do."""
    storage, before = tensor.untyped_storage(), tensor.data_ptr()
    size = storage.nbytes()
    storage.resize_(0)
    fillers = []
    while True:
        fillers.append(torch.empty(size, dtype=torch.uint8))
        storage.resize_(size)
        if tensor.data_ptr() != before:
            return
        storage.resize_(0)


@pytest.mark.parametrize("aux", [False, True])
@pytest.mark.parametrize(("way", "what", "name"), [case for case in BOUND if case[1] != "mailbox"])
def test_weights_and_statistics_that_moved_are_followed(stub, rig, operands, way, what, name, aux):
    made, given = getattr(rig, way)(), operands(rows=3)
    if aux and way == "consumer":
        made.bind_aux()
    extra = (given.aux,) if aux and way == "consumer" else ()
    run = (lambda: made.run(*given.ordinary, *extra)) if extra else (lambda: launch(made, way, given))
    run()
    before = getattr(rig, what).data_ptr()
    move(getattr(rig, what))
    run()
    params = (
        attnres_aot.spec.params.STATISTICS_PARAMS if way == "statistics" else attnres_aot.spec.params.CONSUMER_PARAMS
    )
    found = [stub.launch(index).arguments(params)[what] for index in range(2)]
    assert found == [before, getattr(rig, what).data_ptr()]


@pytest.mark.parametrize("way", ["ring", "publisher"])
def test_a_mailbox_that_moved_is_refused(stub, rig, operands, way):
    made, given = getattr(rig, way)(), operands(rows=3)
    launch(made, way, given)
    move(rig.mailbox)
    with pytest.raises(OperandError, match=r"the mailbox was at 0x\w+ when it was bound, and is at .* bind it again"):
        launch(made, way, given)
    assert stub.launch_count() == 1
    again = made.bind_ring(rig.mailbox) if way == "ring" else rig.publisher()
    launch(again, way, given)
    assert stub.launch_count() == 2


def test_a_storage_that_was_made_smaller_is_refused(rig, operands):
    rig.norm.untyped_storage().resize_(HIDDEN)
    with pytest.raises(OperandError, match=r"weights.norm needs 2048 bytes of its storage, which holds 1024"):
        rig.consumer()
    rig.norm = rig.out_norm
    given = operands(rows=3)
    given.blocks.untyped_storage().resize_(64)
    with pytest.raises(OperandError, match=r"blocks needs \d+ bytes of its storage, which holds 64"):
        rig.consumer().run(*given.ordinary)


class Disguise(enum.Enum):
    """Ways in which a tensor's memory is not its value, and what the error says."""

    NEGATED = "is negated or conjugated lazily, .*resolve_neg"
    WRAPPER = "is a TwoTensor, a tensor that computes in Python"
    FAKE = "is a FakeTensor, a tensor that computes in Python"
    ZERO = "has no memory"
    FUNCTIONAL = "is wrapped by a function transform"

    def put_on(self, plain: torch.Tensor) -> torch.Tensor:
        makers: dict[Disguise, Callable[[], torch.Tensor]] = {
            Disguise.NEGATED: lambda: torch._neg_view(plain),
            Disguise.WRAPPER: lambda: TwoTensor(plain, plain.clone()),
            Disguise.FAKE: lambda: FakeTensorMode().from_tensor(plain),
            Disguise.ZERO: lambda: torch._efficientzerotensor(tuple(plain.shape), dtype=plain.dtype),
            Disguise.FUNCTIONAL: lambda: torch._to_functional_tensor(plain),
        }
        return makers[self]()


@pytest.mark.parametrize("disguise", list(Disguise))
@pytest.mark.parametrize(("way", "what", "name"), BOUND)
def test_memory_that_is_not_the_value_is_not_bound(rig, way, what, name, disguise):
    setattr(rig, what, disguise.put_on(getattr(rig, what)))
    with pytest.raises(OperandError, match=f"^{name} {disguise.value}"):
        getattr(rig, way)()


OPERANDS = [(name, way) for way in ("consumer", "ring") for name in ("prefix", "blocks", "out")]


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize("disguise", [each for each in Disguise if each is not Disguise.FAKE])
@pytest.mark.parametrize(
    ("name", "way"), [*OPERANDS, ("delta", "consumer"), ("delta", "publisher"), ("blocks", "statistics")]
)
def test_operands_whose_memory_is_not_the_value_are_refused(stub, rig, operands, name, way, disguise, launched, checks):
    made, given = getattr(rig, way)(checks=checks), operands(rows=3)
    for _ in range(2 * launched):
        launch(made, way, given)
    worn = given.replace(**{name: disguise.put_on(getattr(given, name))})
    called = "rows" if way == "publisher" else name
    if disguise is Disguise.NEGATED and launched and not checks and name != "out" and way in ("consumer", "ring"):
        launch(made, way, worn)  # checks=False promises that operands at the same addresses are those of before
        return
    for _ in range(2):
        with pytest.raises(OperandError, match=f"{called} {disguise.value}"):
            launch(made, way, worn)
    assert stub.launch_count() == 2 * launched


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize(
    ("name", "way"), [*OPERANDS, ("delta", "consumer"), ("delta", "publisher"), ("blocks", "statistics")]
)
def test_operands_that_lose_their_memory_are_refused(stub, rig, operands, name, way, checks):
    made, given = getattr(rig, way)(checks=checks), operands(rows=3)
    launch(made, way, given)
    lose(getattr(given, name))
    with pytest.raises(OperandError, match=f"{'rows' if way == 'publisher' else name} has no memory"):
        launch(made, way, given)
    assert stub.launch_count() == 1


def test_without_checks_alignment_is_still_checked_where_an_address_is_new(stub, rig, operands):
    prepared, given = rig.consumer(checks=False), operands(rows=3)
    prepared.run(*given.ordinary)
    odd = torch.zeros(3 * HIDDEN + 8, dtype=BF16)[1 : 3 * HIDDEN + 1].view(3, HIDDEN)
    with pytest.raises(OperandError, match=r"delta starts at .* aligned to 16 bytes"):
        prepared.run(odd, *given.ordinary[1:])
    assert stub.launch_count() == 1


def test_parameters_are_plain_tensors(stub, rig, operands):
    rig.norm = torch.nn.Parameter(rig.norm, requires_grad=False)
    rig.consumer().run(*operands().ordinary)
    assert stub.launch_count() == 1


def inside(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype = BF16) -> torch.Tensor:
    """Returns a tensor at the start of another's memory, which must be large enough."""
    return torch.empty(0, dtype=dtype).set_(tensor.untyped_storage(), 0, shape)


def test_a_launchable_checks_what_it_is_given_each_time(stub, rig, operands):
    launchable, given = Consumer(rig.bundle, attnres_aot.parse_variant("nb2-delta-stats"), 0), operands(rows=3)

    def call() -> None:
        weights = (rig.norm, rig.query, rig.out_norm)
        launchable(*given.ordinary[:3], *weights, given.out, 1e-5, 1e-5, rig.mixture, rig.scal)

    call()
    move(rig.norm)
    call()
    assert stub.launch().arguments()["norm"] == rig.norm.data_ptr()
    lose(rig.norm)
    with pytest.raises(OperandError, match=r"weights.norm has no memory"):
        call()
    rig.norm = inside(rig.mixture, (HIDDEN,))
    with pytest.raises(OperandError, match=r"mixture overlaps|overlaps mixture"):
        call()
    assert stub.launch_count() == 2


class Memory(bytearray):
    """Bytes that can be watched."""


def test_a_launchable_keeps_no_tensor_alive(rig, operands):
    launchable, given = Consumer(rig.bundle, attnres_aot.parse_variant("nb2-delta"), 0), operands(rows=3)
    memory = Memory(2 * HIDDEN + 64)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % 64
    norm, alive = torch.frombuffer(memory, dtype=BF16, offset=start, count=HIDDEN), weakref.ref(memory)
    launchable(*given.ordinary[:3], norm, rig.query, rig.out_norm, given.out, 1e-5, 1e-5)
    del norm, memory
    gc.collect()
    assert alive() is None


WEIGHTS, STATISTICS = ("norm", "query", "out_norm"), ("mixture", "scal")
WRITTEN_OVER = [(written, what) for written in ("out", "prefix", "aux", "blocks") for what in WEIGHTS]
WRITTEN_OVER += [(written, what) for written in ("out", "prefix") for what in STATISTICS]


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(("written", "what"), WRITTEN_OVER)
def test_bound_memory_is_not_written(stub, rig, operands, written, what, warm):
    given, room = operands(rows=3, blocks=3), torch.zeros(64 * HIDDEN, dtype=BF16)
    at = 2 * HIDDEN if written == "blocks" else 0  # where block 2 of row 0 is written
    bound = getattr(rig, what)
    setattr(rig, what, torch.empty(0, dtype=bound.dtype).set_(room.untyped_storage(), at, tuple(bound.shape)))
    stats = what in STATISTICS
    key = ConsumerKey(nb=2, has_delta=True, write=2 if written == "blocks" else None)
    prepared = attnres_aot.PreparedAttnRes((rig.norm, rig.query, rig.out_norm), key, 1e-5, rig.bundle)
    if stats:
        prepared.bind_statistics(rig.mixture, rig.scal, [3])
    if written == "aux":
        prepared.bind_aux()

    def run(given):
        prepared.run(*given.ordinary, *((given.aux,) if written == "aux" else ()))

    for _ in range(warm):
        run(given)
    bad = given.replace(**{written: inside(room, tuple(getattr(given, written).shape))})
    for _ in range(2):
        with pytest.raises(OperandError, match=f"{written} overlaps {'' if stats else 'weights.'}{what}"):
            run(bad)
    assert stub.launch_count() == warm


@pytest.mark.parametrize("name", ["out", "prefix"])
@pytest.mark.parametrize("way", ["mailbox", "mixture", "scal"])
def test_bound_memory_that_other_launches_take_is_not_written_either(stub, rig, operands, name, way):
    """An ordinary launch must not write the mailbox, nor one of other row counts the statistics."""
    room = torch.zeros(64 * HIDDEN, dtype=BF16)
    old = getattr(rig, way)
    setattr(rig, way, inside(room, tuple(old.shape), old.dtype))
    prepared = rig.consumer().bind_ring(rig.mailbox).bind_statistics(rig.mixture, rig.scal, [5])
    given = operands(rows=3)
    with pytest.raises(OperandError, match=rf"{name} overlaps (the mailbox|mixture|scal)"):
        prepared.run(*given.replace(**{name: inside(room, (3, HIDDEN))}).ordinary)
    assert stub.launch_count() == 0


def test_memory_that_launches_only_read_may_be_shared(stub, rig, operands):
    """A source that lies in a weight's memory is odd, and harmless."""
    room = torch.zeros(8 * HIDDEN, dtype=BF16)
    rig.norm, given = inside(room, (HIDDEN,)), operands(rows=3)
    rig.query = rig.norm
    rig.consumer().run(*given.replace(delta=inside(room, (3, HIDDEN))).ordinary)
    assert stub.launch_count() == 1


def test_bound_memory_between_rows_of_an_operand_is_no_overlap(stub, rig, operands):
    room = torch.zeros(8, HIDDEN, dtype=BF16)
    rig.norm = room[1]
    prepared = rig.consumer()
    for _ in range(2):
        prepared.run(*operands(rows=3).replace(out=room[0:6:2]).ordinary)
    assert stub.launch_count() == 2
    with pytest.raises(OperandError, match=r"out overlaps weights.norm"):
        prepared.run(*operands(rows=3).replace(out=room[1:7:2]).ordinary)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Two things that are bound to one memory, and what refuses it."""

    one: str
    other: str
    ways: tuple[str, ...]


SHARED_BINDINGS = [
    Bound(one="mixture", other="scal", ways=("taking_statistics", "statistics")),
    Bound(one="mixture", other="norm", ways=("taking_statistics", "statistics")),
    Bound(one="mixture", other="query", ways=("taking_statistics", "statistics")),
    Bound(one="mixture", other="out_norm", ways=("taking_statistics",)),
    Bound(one="scal", other="norm", ways=("taking_statistics", "statistics")),
    Bound(one="mailbox", other="norm", ways=("ring",)),
    Bound(one="mailbox", other="out_norm", ways=("ring",)),
]


@pytest.mark.parametrize("case", SHARED_BINDINGS, ids=lambda case: f"{case.one}-{case.other}")
def test_memory_that_is_written_is_not_bound_twice(rig, case):
    room = torch.zeros(64 * HIDDEN, dtype=BF16)
    for name in (case.one, case.other):
        setattr(rig, name, inside(room, tuple(getattr(rig, name).shape), getattr(rig, name).dtype))
    for way in case.ways:
        with pytest.raises(
            OperandError, match=r"overlaps \S+, which starts at the same address; memory that is written"
        ):
            getattr(rig, way)()


@pytest.mark.parametrize("order", ["ring-first", "statistics-first"])
def test_a_mailbox_and_statistics_in_one_memory_are_refused_in_any_order(stub, rig, operands, order):
    rig.mailbox = inside(torch.zeros(64 * HIDDEN, dtype=BF16), tuple(rig.mailbox.shape))
    rig.mixture = inside(rig.mailbox, tuple(rig.mixture.shape), torch.float32)
    steps = [
        lambda made: made.bind_ring(rig.mailbox),
        lambda made: made.bind_statistics(rig.mixture, rig.scal, [3]),
    ]
    first, second = steps if order == "ring-first" else reversed(steps)
    prepared = first(rig.consumer())
    with pytest.raises(OperandError, match=r"(mailbox overlaps mixture|mixture overlaps mailbox)"):
        second(prepared)
    launch(prepared, "ring" if order == "ring-first" else "taking_statistics", operands(rows=3))
    assert stub.launch_count() == 1


class Index:
    """A whole number that is no int, as numpy's are."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


NOT_WHOLE = [1.0, 1.5, True, None, "1", [1]]


@pytest.mark.parametrize("value", NOT_WHOLE, ids=repr)
def test_what_is_no_whole_number_is_refused(rig, value):
    with pytest.raises(OperandError, match=r"spin_budget is .*; a whole number, 0 to 2147483647"):
        rig.consumer().bind_ring(rig.mailbox, spin_budget=value)
    with pytest.raises(OperandError, match=r"slot is .*; a whole number is wanted"):
        attnres_aot.PreparedPublish(rig.mailbox, value, rig.bundle)
    with pytest.raises(OperandError, match=r"nb is .*; a whole number of saved blocks"):
        attnres_aot.PreparedStatistics(rig.norm, rig.query, 1e-5, rig.mixture, rig.scal, nb=value, bundle=rig.bundle)
    with pytest.raises(OperandError, match=r"rows hold \[.*\]; 1 to 8"):
        rig.consumer().bind_statistics(rig.mixture, rig.scal, [1, value])
    for shape in ((value, 1, 8), (1, value, 8), (1, 1, value)):
        with pytest.raises(OperandError, match=r"whole numbers from 1 are wanted"):
            attnres_aot.new_mailbox(*shape, "cpu")


def test_whole_numbers_of_other_types_are_taken(stub, rig, operands):
    assert attnres_aot.new_mailbox(Index(1), Index(2), Index(8), "cpu").shape == (1, 2, 8)
    prepared = rig.consumer().bind_ring(rig.mailbox, spin_budget=Index(7))
    prepared.bind_statistics(rig.mixture, rig.scal, [Index(3)])
    prepared.run_ring(*operands(rows=3).ring)
    arguments = stub.launch().arguments()
    assert (arguments["spin_budget"], arguments["mixture"]) == (7, rig.mixture.data_ptr())
    attnres_aot.PreparedPublish(rig.mailbox, Index(1), rig.bundle).run(operands(rows=3).delta)


@pytest.mark.parametrize("rows", [3, None, 1.5])
def test_rows_are_some_counts(rig, rows):
    with pytest.raises(OperandError, match=r"rows is .*; some row counts are wanted, as in \[1, 2\]"):
        rig.consumer().bind_statistics(rig.mixture, rig.scal, rows)


@pytest.mark.parametrize("weights", [(), [], None, 7, {}])
@pytest.mark.parametrize("given", [True, False])
def test_weights_that_are_none_are_refused(monkeypatch, rig, weights, given):
    monkeypatch.setattr(api, "load", lambda **_: rig.bundle)
    with pytest.raises(OperandError, match=r"weights (hold 0 tensors|are \w+); \(norm, query, out_norm\) are wanted"):
        attnres_aot.PreparedAttnRes(weights, KEY, 1e-5, rig.bundle if given else None)


def test_functions_that_bind_at_once_say_what_is_no_tensor(monkeypatch, rig):
    monkeypatch.setattr(api, "load", lambda **_: rig.bundle)
    with pytest.raises(OperandError, match=r"rows is NoneType"):
        attnres_aot.publish(None, rig.mailbox, 0)
    with pytest.raises(OperandError, match=r"norm is NoneType"):
        attnres_aot.statistics(None, None, None, 1e-5, rig.mixture, rig.scal, nb=2)


@pytest.mark.parametrize("way", ["ring", "publisher"])
def test_a_mailbox_whose_slots_are_too_far_apart_is_refused(rig, way):
    capacity = 8 * 2**31 // HIDDEN
    rig.mailbox = torch.empty(2 * HIDDEN, dtype=BF16, device="meta").new_empty((2, capacity, HIDDEN))
    with pytest.raises(OperandError, match=r"elements between slots; at most 17179869176 are allowed"):
        getattr(rig, way)()


def test_sizes_of_a_mailbox_are_checked(rig):
    for shape in ((0, 1, 8), (1, -1, 8), (1, 1, 12)):
        with pytest.raises(OperandError, match=r"not so: (slots|capacity|hidden)$"):
            attnres_aot.new_mailbox(*shape, "cpu")
    assert issubclass(OperandError, ValueError)
    assert not issubclass(UsageError, ValueError)

"""The package's own `dataclass` decorator, held against the standard one."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import ClassVar

import pytest

from attnres_aot import records


@records.record(frozen=True, slots=True, kw_only=True, order=True)
class Quick:
    """A record."""

    kind: ClassVar[str] = "thing"
    first: int
    second: str = "two"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Standard:
    """A record."""

    kind: ClassVar[str] = "thing"
    first: int
    second: str = "two"


@records.record(frozen=True, slots=True)
class Point:
    """A record of positions."""

    x: int
    y: int = 0

    def __str__(self) -> str:
        return f"at {self.x}"


@records.record(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Handle:
    """A record that is nothing but itself."""

    name: str


def test_a_record_reads_as_a_standard_one_does():
    assert repr(Quick(first=1)) == repr(Standard(first=1)).replace("Standard", "Quick")
    assert [(f.name, f.default, f.kw_only) for f in dataclasses.fields(Quick)] == [
        (f.name, f.default, f.kw_only) for f in dataclasses.fields(Standard)
    ]
    assert dataclasses.replace(Quick(first=1), second="2") == Quick(first=1, second="2")
    assert dataclasses.asdict(Quick(first=1)) == dataclasses.asdict(Standard(first=1))
    assert Quick.__slots__ == Standard.__slots__
    assert (Quick.kind, str(Point(3)), repr(Point(3))) == ("thing", "at 3", "Point(x=3, y=0)")


def test_records_compare_by_their_fields_with_their_own_kind_only():
    assert Quick(first=1) == Quick(first=1, second="two") != Quick(first=1, second="x")
    assert hash(Quick(first=1)) == hash(Quick(first=1))
    assert Quick(first=1) != Standard(first=1)
    assert Quick(first=1) < Quick(first=1, second="x") <= Quick(first=2) > Quick(first=1) >= Quick(first=1)
    with pytest.raises(TypeError, match="not supported"):
        assert Quick(first=1) < Standard(first=1)
    with pytest.raises(TypeError, match="not supported"):
        assert Point(1) < Point(2)
    assert Handle(name="a") != Handle(name="a")


def test_a_record_does_not_change():
    point = Point(1, 2)
    with pytest.raises(dataclasses.FrozenInstanceError, match="'x'"):
        point.x = 5
    with pytest.raises(dataclasses.FrozenInstanceError, match="'y'"):
        del point.y
    with pytest.raises(dataclasses.FrozenInstanceError):
        point.z = 5
    assert point == Point(x=1, y=2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Quick, "first"),
        (lambda: Quick(first=1, third=3), "third"),
        (lambda: Quick(1), "by position"),
        (lambda: Point(1, 2, 3), "got 3 by position"),
        (lambda: Point(1, x=1), "once"),
    ],
    ids=["missing", "unknown", "keyword only", "too many", "twice"],
)
def test_wrong_arguments_are_type_errors(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_copies_and_pickles_are_equal():
    point = Point(1, 2)
    assert copy.deepcopy(point) == copy.copy(point) == pickle.loads(pickle.dumps(point)) == point

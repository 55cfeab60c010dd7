"""The `record` decorator, a dataclass decorator for frozen, slotted records that is cheap at import.

The standard decorator writes and compiles five methods of a frozen, slotted class, which takes about half a
millisecond; what a deployment imports has thirty such classes. Here those methods are closures instead. Everything else
is the standard decorator's work: `dataclasses.fields`, `replace` and `is_dataclass` take such classes as any other, and
to a type checker this is `dataclasses.dataclass` itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, ge, gt, le, lt
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as record

__all__ = ["maker", "record"]

_ORDERINGS: dict[str, Callable[[Any, Any], bool]] = {"lt": lt, "le": le, "gt": gt, "ge": ge}


def _record(
    *,
    frozen: bool,
    slots: bool,
    kw_only: bool = False,
    eq: bool = True,
    repr: bool = True,  # noqa: A002 - the standard decorator's name
    order: bool = False,
) -> Callable[[type], type]:
    """Returns a class decorator with the meaning of `dataclasses.dataclass`; `frozen` and `slots` must be True.

    Fields take no `field(...)` options, and a class is no base of another.
    """
    assert frozen
    assert slots

    def define(plain: type) -> type:
        made: Any = dataclasses.dataclass(init=False, repr=False, eq=False, slots=True, kw_only=kw_only)(plain)
        fields = dataclasses.fields(made)
        names = tuple([field.name for field in fields])
        defaults = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
        methods: dict[str, Callable[..., Any]] = {"__init__": _init(made, names, defaults, () if kw_only else names)}
        methods |= {"__setattr__": _refuse_to_set, "__delattr__": _refuse_to_delete, "__reduce__": _reduce}
        if eq:
            methods |= _comparisons(made, names, order=order)
        if repr:
            methods["__repr__"] = _repr
        for name, method in methods.items():
            if name not in plain.__dict__:
                setattr(made, name, method)
        return made  # type: ignore[no-any-return]

    return define


if not TYPE_CHECKING:
    record = _record


def maker(made: type, names: Sequence[str]) -> Callable[[Iterable[Any]], Any]:
    """Returns a function that makes a record of the values of `names`, which must be all of its fields, unchecked."""
    new: Callable[[type], Any] = object.__new__
    setters = [made.__dict__[name].__set__ for name in names]

    def make(values: Iterable[Any]) -> Any:
        made_one = new(made)
        for put, value in zip(setters, values):  # noqa: B905 - equal by contract; strict costs time
            put(made_one, value)
        return made_one

    return make


def _init(
    made: type, names: tuple[str, ...], defaults: dict[str, Any], positional: tuple[str, ...]
) -> Callable[..., None]:
    known = frozenset(names)
    setters = [(name, made.__dict__[name].__set__) for name in names]

    def __init__(self: Any, *args: Any, **given: Any) -> None:  # noqa: N807 - what it becomes
        if args:
            named = dict(zip(positional, args, strict=False))
            if len(args) > len(positional) or not named.keys().isdisjoint(given):
                raise TypeError(f"{made.__qualname__}() takes each of its fields once, got {len(args)} by position")
            given.update(named)
        if len(given) != len(known):
            given = {**defaults, **given}
        try:
            for name, put in setters:
                put(self, given[name])
        except KeyError:
            pass
        else:
            if len(given) == len(known):
                return
        lacks, extra = sorted(known - given.keys()), sorted(given.keys() - known)
        raise TypeError(f"{made.__qualname__}() misses arguments {lacks}, does not know {extra}")

    return __init__


def _comparisons(made: type, names: tuple[str, ...], *, order: bool) -> dict[str, Callable[..., Any]]:
    """Returns methods that compare as the tuple of all fields does."""
    values: Callable[[Any], Any] = attrgetter(*names)  # of one field, the value alone

    def __eq__(self: Any, other: object) -> Any:  # noqa: N807 - what it becomes
        return values(self) == values(other) if other.__class__ is made else NotImplemented

    def __hash__(self: Any) -> int:  # noqa: N807 - what it becomes
        return hash(values(self))

    methods: dict[str, Callable[..., Any]] = {"__eq__": __eq__, "__hash__": __hash__}
    if order:
        methods |= {f"__{name}__": _ordering(made, values, compare) for name, compare in _ORDERINGS.items()}
    return methods


def _ordering(
    made: type, values: Callable[[Any], Any], compare: Callable[[Any, Any], bool]
) -> Callable[[Any, object], Any]:
    return lambda self, other: compare(values(self), values(other)) if other.__class__ is made else NotImplemented


def _repr(self: Any) -> str:
    shown = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self))
    return f"{self.__class__.__qualname__}({shown})"


def _refuse_to_set(_: Any, name: str, __: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(_: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _reduce(self: Any) -> tuple[Any, ...]:
    """Lets records be copied and pickled."""
    return _rebuild, (self.__class__, {field.name: getattr(self, field.name) for field in dataclasses.fields(self)})


def _rebuild(made: type, values: dict[str, Any]) -> Any:
    return made(**values)

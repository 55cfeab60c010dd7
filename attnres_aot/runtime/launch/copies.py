"""What copying, deep-copying and pickling mean for objects that are bound to addresses of this process."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch

from attnres_aot.errors import UsageError
from attnres_aot.runtime.graphs.handles import handle_tensor, handles

if TYPE_CHECKING:
    from typing_extensions import Self

_GUARDED = ("_statistics", "handle", "handle_tensor", "name", "token", "writes_block")
"""Attributes that Dynamo reads where it traces a launch, so that its guards look at them."""


class BoundToMemory:
    """Base of what holds addresses: a copy shares the memory; there is no deep copy and no pickle.

    A compiled graph that is saved (`torch.compile(...).aot_compile`) is saved with its guards, for which torch pickles
    the objects that they look at. What it is given then has the attributes that guards read, and nothing to launch.
    """

    __slots__ = ("handle", "handle_tensor", "name")
    _kind: ClassVar[str]
    handle: int
    handle_tensor: torch.Tensor
    name: str | None

    def _take_handle(self, name: str | None) -> None:
        """Gives the object, which is complete, its handle."""
        self.name = name
        self.handle = handles[self._kind].register(self, name)
        self.handle_tensor = handle_tensor(self.handle)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        kind = type(self).__name__
        raise UsageError(
            f"a {kind} cannot be deep-copied: it is bound to tensors by address, and the copies of them that a model's "
            f"copy gets are others; make a new {kind} from those, or use copy.copy, which shares the memory"
        )

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        caller = sys._getframe(1).f_globals.get("__name__")  # noqa: SLF001 - a pickler does not say who it is
        if caller == "torch._dynamo.guards":
            return _for_guards, (type(self), {name: getattr(self, name) for name in _GUARDED if hasattr(self, name)})
        kind = type(self).__name__
        raise UsageError(
            f"a {kind} cannot be pickled: it holds addresses and code of this process; send what it is made of (key, "
            f"epsilons, the path of the bundle) and make a {kind} where it is to be used"
        )

    def _same_slots(self) -> Self:
        """Returns an object with the same attributes, which are shared."""
        twin = object.__new__(type(self))
        names = {name for kind in type(self).__mro__ for name in getattr(kind, "__slots__", ())} - {"__weakref__"}
        for name in names | set(getattr(self, "__dict__", ())):
            if hasattr(self, name):
                setattr(twin, name, getattr(self, name))
        return twin


def _for_guards(kind: type, attributes: dict[str, Any]) -> Any:
    """Returns what guards look at."""
    made: Any = object.__new__(kind)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made

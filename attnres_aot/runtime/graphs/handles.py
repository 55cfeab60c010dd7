"""Numbers by which graphs know prepared objects: never the same for two objects, in whatever process they were made.

A graph holds numbers, and may outlive the process that traced it. An object without a name has a random handle, so no
other process ever gives it to something else. A handle made from a name is the same in every process, so a saved graph
finds the object that has the name there. Handles are between 2**61 and 2**62, odd where they come from a name.

In a graph, a handle must not be a constant, or every layer would be compiled anew. Dynamo takes numbers that are
attributes of modules for constants, sizes of tensors not: so each object has a tensor of as many rows as its handle,
with no elements, and the graph takes its size.
"""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from typing import Any, Generic, TypeVar

import torch

from attnres_aot.errors import UsageError

_RANDOM_BITS = 60
_FIRST = 1 << (_RANDOM_BITS + 1)

Kind = TypeVar("Kind")


class Handles(Generic[Kind]):
    """The handles of one kind of object. Objects are not kept alive."""

    def __init__(self, kind: str) -> None:
        """Starts with no objects.

        Args:
          kind: name of the objects' class, which is part of what their names mean.
        """
        self._kind = kind
        self._alive: weakref.WeakValueDictionary[int, Kind] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def register(self, made: Kind, name: str | None) -> int:
        """Returns the handle of a new object, valid as long as it lives.

        Raises:
          UsageError: the name is no text, or another living object has it.
        """
        handle = _random_handle() if name is None else self._named(name)
        with self._lock:
            taken = self._alive.get(handle)
            if taken is not None:
                raise UsageError(
                    f"name {name!r} is taken by {taken!r}; give each {self._kind} a name of its own, such as that of "
                    "its module in the model, or drop the other before"
                )
            self._alive[handle] = made
        return handle

    def find(self, handle: int) -> Kind:
        """Returns the object that a handle names.

        Raises:
          UsageError: there is none.
        """
        found = self._alive.get(handle)
        if found is None:
            remedy = (
                f"it comes from a name= that no {self._kind} has here: make the object with that name first, and keep "
                "it alive as long as graphs that call it"
                if handle % 2
                else "it was given to an object without a name, in another process, or one that is gone: keep objects "
                "alive as long as graphs that call them, and give them a name= where graphs are saved and loaded"
            )
            raise UsageError(f"handle {handle} names no {self._kind} of this process; {remedy}")
        return found

    def alive(self) -> list[Kind]:
        """Returns every object that is alive."""
        return list(self._alive.values())

    def _named(self, name: Any) -> int:
        if not isinstance(name, str) or not name:
            raise UsageError(f"name is {name!r}; a text that is not empty is wanted, the same in every process")
        digest = hashlib.sha256(f"{self._kind}:{name}".encode()).digest()
        return _handle(int.from_bytes(digest[:8], "little"), named=True)


CONSUMERS, STATISTICS, PUBLISHERS = "PreparedAttnRes", "PreparedStatistics", "PreparedPublish"
"""What handles stand for: the classes of prepared objects."""
handles: dict[str, Handles[Any]] = {kind: Handles(kind) for kind in (CONSUMERS, STATISTICS, PUBLISHERS)}
"""Every prepared object that is alive, by kind."""


def _forget_all_plans() -> None:
    """Makes every launch in a forked child look for its plan again, which is refused there."""
    for kind in handles.values():
        for prepared in kind.alive():
            prepared.forget_plans()


os.register_at_fork(after_in_child=_forget_all_plans)


def handle_tensor(handle: int) -> torch.Tensor:
    """Returns a tensor [handle, 0] whose first size a compiled graph takes as an input.

    It is marked as `torch._dynamo.maybe_mark_dynamic(tensor, 0)` marks it, without importing the compiler, which takes
    a second. A torch that marks otherwise compiles once more before it takes the size for variable. What torch 2.13
    marks besides, to make guards faster, is left out: graphs that are loaded with their guards refuse it.
    """
    tensor: Any = torch.empty((handle, 0), dtype=torch.int8, device="cpu")  # zeros would start torch's CPU threads
    tensor._dynamo_weak_dynamic_indices = {0}  # noqa: SLF001 - see above; a test compares
    marked: torch.Tensor = tensor
    return marked


def _random_handle() -> int:
    return _handle(int.from_bytes(os.urandom(8), "little"), named=False)


def _handle(bits: int, *, named: bool) -> int:
    return _FIRST | bits % (1 << _RANDOM_BITS) << 1 | named

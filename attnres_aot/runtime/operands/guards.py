"""Tells quickly whether tensors still have the metadata of tensors that passed every check before.

Torch's compiler guards do this in one native call (about 0.3 us for four tensors, against 1.3 us in Python). They
are not public, so they are tried out once before use; where they are missing or judge differently, plain Python
compares the same facts. The native ones compare dispatch keys too, and so refuse what is lazily negated or wrapped by a
function transform; they also tell apart tensors that require gradients or were made in inference mode, which is more
than is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from attnres_aot.runtime.operands.memory import is_wrapped

Guard = Callable[..., bool]
"""Takes as many tensors as it was made of; True if each has type, dtype, device, shape and strides of its model."""


def make_guard(tensors: Sequence[torch.Tensor]) -> Guard:
    """Returns a guard for tensors like `tensors`; it keeps no reference to them.

    Where one object is given twice (the source that is `out` itself), the guard wants one object there, too: native
    guards refuse to see an object twice, so they are asked about it once.
    """
    make = native_guard if native_guards_work() else python_guard
    firsts = [next(at for at, other in enumerate(tensors) if other is tensor) for tensor in tensors]
    once = [at for at, first in enumerate(firsts) if at == first]
    if len(once) == len(tensors):
        return make(tensors)
    return _guard_with_repeats(make([tensors[at] for at in once]), firsts, once)


def _guard_with_repeats(guard: Guard, firsts: Sequence[int], once: Sequence[int]) -> Guard:
    """Returns a guard for tensors of which some are one object: each is to be that at `firsts`."""
    repeats = [(at, first) for at, first in enumerate(firsts) if at != first]

    def accepts(*found: torch.Tensor) -> bool:
        for at, first in repeats:
            if found[at] is not found[first]:
                return False
        return guard(*[found[at] for at in once])

    return accepts


def python_guard(tensors: Sequence[torch.Tensor]) -> Guard:
    """Returns a guard that compares in Python."""
    models = [
        (tensor.__class__, tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_neg())
        for tensor in tensors
    ]

    def accepts(*found: torch.Tensor) -> bool:
        for tensor, (kind, shape, stride, dtype, device, negated) in zip(found, models, strict=True):
            if (
                tensor.__class__ is not kind
                or tensor.shape != shape
                or tensor.stride() != stride
                or tensor.dtype is not dtype
                or tensor.device != device
                or tensor.is_neg() != negated
                or is_wrapped(tensor)
            ):
                return False
        return True

    return accepts


def native_guard(tensors: Sequence[torch.Tensor]) -> Guard:
    """Returns a guard that compares in native code."""
    shapes, strides = [list(tensor.shape) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
    guards: Any = torch._C._dynamo.guards  # noqa: SLF001 - tried out by native_guards_work
    check: Guard = guards.TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check
    return check


@functools.cache
def native_guards_work() -> bool:
    """Tells whether this torch's native guards exist and judge as `python_guard` does."""
    model = [torch.empty((2, 8), dtype=torch.bfloat16), torch.empty((2, 3, 8), dtype=torch.bfloat16)]
    same = [torch.empty_like(tensor) for tensor in model]
    others = [
        torch.empty((3, 8), dtype=torch.bfloat16),
        torch.empty((2, 16), dtype=torch.bfloat16),
        torch.empty((2, 16), dtype=torch.bfloat16)[:, :8],
        torch.empty((2, 8), dtype=torch.float16),
        torch.empty((2, 8), dtype=torch.bfloat16, device="meta"),
        torch.empty((2, 1, 8), dtype=torch.bfloat16),
        torch.empty((16,), dtype=torch.bfloat16),
        torch._neg_view(same[0]),  # noqa: SLF001 - torch has no public name for what its own functions return
        None,
    ]
    try:
        guard = native_guard(model)
        return guard(*same) is True and not any(guard(other, same[1]) for other in others)
    except (AttributeError, TypeError, RuntimeError, ValueError):
        return False

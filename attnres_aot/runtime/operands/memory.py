"""Says whether what a kernel finds in a tensor's memory is the tensor's value, and notices when bound memory moves.

A kernel is given an address. Torch has tensors whose address is not where their value is: lazily negated views,
subclasses that compute in Python, stand-ins of tracers, tensors whose storage was freed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from attnres_aot.errors import OperandError

_PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__
_is_functorch_wrapped: Callable[[torch.Tensor], bool] = getattr(
    getattr(torch._C, "_functorch", None),  # noqa: SLF001 - where it is missing, such tensors fail at their address
    "is_functorch_wrapped_tensor",
    lambda _: False,
)


def memory_problems(name: str, tensor: torch.Tensor) -> list[str]:
    """Lists why a kernel cannot be given the address of a strided tensor; empty when it can.

    Args:
      name: what messages call it.
      tensor: the tensor; one without elements needs no memory.
    """
    problem = _value_problem(tensor) or _storage_problem(tensor)
    return [f"{name} {problem}"] if problem else []


def check_bound_memory(bound: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Checks that bound tensors still have memory.

    Args:
      bound: what messages call each, and the tensor.

    Raises:
      OperandError: the memory of some is gone; one line for each.
    """
    problems = [
        f"{problem}; it is bound: bring its memory back before launching, or bind other memory"
        for name, tensor in bound
        for problem in memory_problems(name, tensor)
    ]
    if problems:
        raise OperandError("\n".join(problems))


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor is what a function transform of torch.func shows to the function that it transforms."""
    return _is_functorch_wrapped(tensor) or torch._is_functional_tensor(tensor)  # noqa: SLF001 - no public name


def never_moves() -> bool:
    """Stands in for a watch where nothing is watched."""
    return False


def watch(tensors: Sequence[torch.Tensor]) -> Callable[[], bool]:
    """Returns a function that tells whether any of these tensors has another address than now.

    A storage that is freed and allocated again (offloading, sharded weights) moves its tensors. Each launch asks, so
    the numbers of tensors that consumers have most are written out.
    """
    calls = tuple([tensor.data_ptr for tensor in tensors])
    before = tuple([call() for call in calls])
    if len(calls) == 3:  # the weights
        one, two, three = calls
        return lambda: (one(), two(), three()) != before
    if len(calls) == 4:  # and a mailbox
        one, two, three, four = calls
        return lambda: (one(), two(), three(), four()) != before
    return lambda: tuple([call() for call in calls]) != before


def _value_problem(tensor: torch.Tensor) -> str | None:
    kind = type(tensor)
    if kind is not torch.Tensor and kind.__torch_dispatch__ is not _PLAIN_DISPATCH:
        return (
            f"is a {kind.__name__}, a tensor that computes in Python, so memory at its address need not be its value; "
            "pass the plain tensor that it stands for or holds"
        )
    if is_wrapped(tensor):
        return "is wrapped by a function transform (vmap, grad, functionalize); call the launch outside of it"
    if tensor.is_neg() or tensor.is_conj():
        return "is negated or conjugated lazily, so its memory holds other values; pass tensor.resolve_neg()"
    return None


def _storage_problem(tensor: torch.Tensor) -> str | None:
    if tensor.numel() == 0:
        return None
    try:
        address = tensor.data_ptr()
        storage_bytes = tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError) as error:
        return f"has no memory: {str(error).splitlines()[0]}"
    if not address:
        return "has no memory: its storage was freed or never allocated"
    elements = tensor.numel()
    if not tensor.is_contiguous():
        elements = 1 + sum([(n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)])
    needed = (tensor.storage_offset() + elements) * tensor.element_size()
    if needed > storage_bytes:
        return f"needs {needed} bytes of its storage, which holds {storage_bytes}: it was made smaller"
    return None


def overlap_problems(bound: Sequence[tuple[str, torch.Tensor, bool]]) -> list[str]:
    """Lists bound tensors that share bytes which a launch writes.

    Args:
      bound: what messages call each, a contiguous tensor with memory, and whether launches write it.
    """
    starts = [tensor.data_ptr() for _, tensor, _ in bound]
    ends = [start + each[1].nbytes for start, each in zip(starts, bound, strict=True)]
    order = sorted(range(len(bound)), key=starts.__getitem__)
    if all(ends[one] <= starts[other] for one, other in pairwise(order)):
        return []
    problems = []
    for at, index in enumerate(order):
        for other in order[at + 1 :]:
            if starts[other] >= ends[index]:
                break
            if bound[index][2] or bound[other][2]:
                distance = starts[other] - starts[index]
                where = f"{distance} bytes after it" if distance else "at the same address"
                problems.append(
                    f"{bound[index][0]} overlaps {bound[other][0]}, which starts {where}; memory that is written must "
                    "be apart"
                )
    return problems

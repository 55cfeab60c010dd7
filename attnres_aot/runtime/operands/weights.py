"""The weights of one consumer and its epsilons, as given and as read off a model's layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from attnres_aot.errors import OperandError, UsageError
from attnres_aot.records import record
from attnres_aot.runtime.operands.geometry import vector_problems
from attnres_aot.spec.params import MIN_EPS
from attnres_aot.spec.variants import ConsumerKey

_BACKBONE = ("output_attn_res_norm", "output_attn_res_proj", "norm", "num_attn_res_blocks")
_LAYER = (
    "self_attention_res_norm",
    "self_attention_res_proj",
    "input_layernorm",
    "prev_valid_blocks",
    "block_write_idx",
    "is_block_write_layer",
)


class AttnResWeights(NamedTuple):
    """Weights of a consumer: three contiguous bf16 tensors of H elements."""

    norm: torch.Tensor
    """[H]: weight of the norm under the logits."""
    query: torch.Tensor
    """[H] or [1, H]: the projection that gives the logits."""
    out_norm: torch.Tensor
    """[H]: weight of the output norm."""


WEIGHT_NAMES = ("weights.norm", "weights.query", "weights.out_norm")
"""What messages call them."""


@record(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Target:
    """What a layer or backbone says about its consumer."""

    weights: AttnResWeights
    """Weights."""
    key: ConsumerKey
    """Which consumer."""
    eps: tuple[float, float]
    """Epsilons under the logits and of the output norm."""


def check_weights(weights: Sequence[Any], hidden: int) -> AttnResWeights:
    """Returns the weights as [H] tensors that keep their memory alive even if a parameter's data is replaced.

    Raises:
      OperandError: one line for every problem.
    """
    given = _tuple(weights)
    if given is None or len(given) != len(AttnResWeights._fields):
        found = f"are {type(weights).__name__}" if given is None else f"hold {len(given)} tensors"
        raise OperandError(f"weights {found}; (norm, query, out_norm) are wanted")
    problems = []
    kept: list[Any] = []
    for name, tensor in zip(WEIGHT_NAMES, given, strict=True):
        vector = as_vector(tensor, hidden if len(kept) == 1 else None)
        problems += vector_problems(name, vector, (hidden,), torch.bfloat16)
        kept.append(vector)
    if not problems and len({tensor.device for tensor in kept}) > 1:
        problems.append(f"the weights are on {', '.join(str(tensor.device) for tensor in kept)}; one device is wanted")
    if problems:
        raise OperandError("\n".join(problems))
    return AttnResWeights(*kept)


def as_vector(tensor: Any, hidden: int | None = None) -> Any:
    """Returns a weight on memory that stays alive even if a parameter's data is replaced; [1, hidden] as [hidden]."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    return tensor.detach()[0] if tensor.shape == (1, hidden) else tensor.detach()


def first_device(tensors: Any) -> torch.device | None:
    """Returns the device of the first tensor among given weights, for which a bundle is found; None if there is none.

    What is wrong with the weights is for `check_weights` to say.
    """
    return next((tensor.device for tensor in _tuple(tensors) or () if isinstance(tensor, torch.Tensor)), None)


def check_eps(eps: float | tuple[float, float]) -> tuple[float, float]:
    """Returns (eps, out_eps) from one number for both or a pair.

    Raises:
      OperandError: not one or two finite numbers of at least MIN_EPS.
    """
    pair: tuple[Any, ...] = eps if isinstance(eps, tuple) else (eps, eps)
    if len(pair) != 2 or not all(map(_is_epsilon, pair)):
        raise OperandError(
            f"eps is {eps!r}; a finite number of at least {MIN_EPS:g}, or a pair (eps, out_eps) of them, is wanted: "
            "the kernels take the square root of no less"
        )
    return float(pair[0]), float(pair[1])


def read_target(layer: Any, *, final: bool, has_delta: bool | None) -> Target:
    """Reads weights, key and epsilons off a decoder layer, or off the backbone for the consumer at its end.

    Args:
      layer: a decoder layer, or with `final` the backbone.
      final: read the backbone's output consumer.
      has_delta: whether the source is added to the prefix; None: wherever there is something before it (nb > 0).

    Raises:
      UsageError: attributes are missing; names all of them.
    """
    places = _BACKBONE if final else _LAYER
    parts: dict[str, Any] = {name: getattr(layer, name, None) for name in places}  # once: a module looks up in Python
    res_norm, proj, out_norm, nb_name, *_ = places
    values: dict[str, Any] = {
        f"{name}.weight": getattr(parts[name], "weight", None) for name in (res_norm, proj, out_norm)
    }
    weights = AttnResWeights(*values.values())
    numbers: dict[str, Any] = {
        f"{name}.variance_epsilon": getattr(parts[name], "variance_epsilon", None) for name in (res_norm, out_norm)
    }
    if None in numbers.values() or any(value is None for value in (*weights, *parts.values())):
        values |= {**numbers, **{name: parts[name] for name in places[3:]}}
        raise UsageError(
            f"{type(layer).__name__} cannot be read as a {'backbone' if final else 'decoder layer'}: it has no "
            f"{', '.join(path for path, value in values.items() if value is None)}; give "
            f"{'the module that ends the model' if final else 'a decoder layer'}, or build "
            "PreparedAttnRes(weights, key, eps) from its parts"
        )
    nb = int(parts[nb_name])
    write = int(parts["block_write_idx"]) if not final and parts["is_block_write_layer"] else None
    key = ConsumerKey(nb=nb, has_delta=nb > 0 if has_delta is None else has_delta, write=write, final=final)
    eps, out_eps = map(float, numbers.values())
    return Target(weights=weights, key=key, eps=(eps, out_eps))


def _is_epsilon(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and MIN_EPS <= value < math.inf


def _tuple(values: Any) -> tuple[Any, ...] | None:
    """Returns what was given as a tuple; None where it holds nothing."""
    try:
        return tuple(values)
    except TypeError:
        return None

"""The configuration schema: which fields there are, what each may be, and how they must fit together."""

from __future__ import annotations

import re
from typing import Any

from attnres_aot.config.fields import Fields, describe, read_integer, wrong
from attnres_aot.config.problems import Problems
from attnres_aot.config.source import START_FROM
from attnres_aot.config.tree import Mapping, Node, Scalar, plain_tree
from attnres_aot.errors import ConfigError
from attnres_aot.plan.settings import Config, Deployment, Mailbox, Model, Options
from attnres_aot.spec.variants import ELEMS_PER_CTA, HIDDEN_STEP, MAX_BLOCKS, MAX_CLUSTER, MAX_DEPLOYMENTS, MAX_SLOTS

MAX_LAYERS = 1024
"""Most layers of a model."""
MAX_CAPACITY = 65536
"""Most rows of a mailbox slot: slots stay within reach of the kernels' 32-bit strides."""
MAX_RANKS = 1024
"""Largest tensor-parallel size without one mailbox slot per rank."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_TOP = ("name", "model", "mailbox", "variants", "deployments")
_MODEL = ("hidden_size", "layers", "block_size", "leading_dense_layers")
_MAILBOX = ("capacity", "slots")
_VARIANTS = ("before_mlp", "ring", "aux", "stats")
_DEPLOYMENT = ("tp", "dcp", "attn_stats", "attn_stats_blocks")


def config_from(source: dict[str, Any], where: str) -> Config:
    """Returns the configuration of which `source` is the plain data, as `Config.source` gives it.

    Raises:
      ConfigError: there are mistakes; lists all of them, with `where`.
    """
    return read_config(plain_tree(source), Problems(where))


def read_config(root: Node | None, problems: Problems) -> Config:
    """Reads the tree of a configuration; None is one that could not be made, with the reason in `problems`.

    Raises:
      ConfigError: there are mistakes; lists all of them.
    """
    config = None
    if isinstance(root, Mapping):
        config = _read_config(Fields(root, "", _TOP, problems), problems)
    elif root is not None:
        if isinstance(root, Scalar) and describe(root) == "nothing":
            problems.add(root.line, "", f"the file is empty; {START_FROM}")
        else:
            wrong(root, "", f"a mapping with {', '.join(_TOP)}", problems)
    if problems or config is None:
        raise ConfigError(problems.lines())
    return config


def _read_config(fields: Fields, problems: Problems) -> Config | None:
    name = fields.text("name", "letters, digits, '_', '-' and '.', at most 64; it names the bundle's folder")
    if name is not None and not _NAME.fullmatch(name):
        fields.report(
            "name",
            f"found {name!r:.80}; allowed: letters, digits, '_', '-' and '.', at most 64, starting with a "
            "letter or digit; it names the bundle's folder",
        )
    model = _read_model(fields)
    mailbox = _read_mailbox(fields, problems)
    options = _read_options(fields)
    deployments = _read_deployments(fields, model, mailbox, problems)
    if name is None or model is None or mailbox is None:
        return None
    return Config(name=name, model=model, mailbox=mailbox, options=options, deployments=deployments)


def _read_model(top: Fields) -> Model | None:
    fields = top.mapping("model", _MODEL)
    if fields is None:
        return None
    hidden = fields.multiple("hidden_size", HIDDEN_STEP, MAX_CLUSTER * ELEMS_PER_CTA)
    layers = fields.integer("layers", 1, MAX_LAYERS)
    block_size = fields.integer("block_size", 1, MAX_LAYERS)
    dense = fields.integer("leading_dense_layers", 0, layers or MAX_LAYERS, ", at most model.layers")
    if hidden is None or layers is None or block_size is None or dense is None:
        return None
    model = Model(hidden_size=hidden, layers=layers, block_size=block_size, leading_dense_layers=dense)
    if model.blocks > MAX_BLOCKS:
        least = -(-layers // MAX_BLOCKS)
        fields.report(
            "block_size",
            f"found {block_size}, which makes {model.blocks} saved blocks of {layers} layers; "
            f"allowed: at most {MAX_BLOCKS} blocks, so a block size of {least} or more",
        )
    return model


def _read_mailbox(top: Fields, problems: Problems) -> Mailbox | None:
    fields = top.mapping("mailbox", _MAILBOX)
    if fields is None:
        return None
    capacity = fields.integer("capacity", 1, MAX_CAPACITY)
    items = fields.items("slots", f"a list of integers 1..{MAX_SLOTS} and the word tp (one slot per rank)") or ()
    seen: dict[int | str, int] = {}
    for index, item in enumerate(items):
        path = f"{fields.at('slots')}[{index}]"
        value: int | str | None
        if isinstance(item, Scalar) and item.text == "tp":
            value = "tp"
        elif isinstance(item, Scalar) and item.plain and item.text.lstrip("-").isdecimal():
            value = read_integer(item, path, 1, MAX_SLOTS, problems)
        else:
            wrong(item, path, f"an integer 1..{MAX_SLOTS}, or the word tp (one slot per rank)", problems)
            continue
        if value in seen:
            problems.add(item.line, path, f"{value!r} occurs twice, first as slots[{seen[value]}]; remove one")
        elif value is not None:
            seen[value] = index
    if capacity is None:
        return None
    fixed = tuple(sorted(value for value in seen if isinstance(value, int)))
    return Mailbox(capacity=capacity, fixed_slots=fixed, slot_per_rank="tp" in seen)


def _read_options(top: Fields) -> Options:
    fields = top.mapping("variants", _VARIANTS, required=False)
    if fields is None:
        return Options()
    return Options(**{name: fields.switch(name, default=True) for name in _VARIANTS})


def _read_deployments(
    top: Fields, model: Model | None, mailbox: Mailbox | None, problems: Problems
) -> tuple[Deployment, ...]:
    items = top.items("deployments", f"a list of at least one mapping with {', '.join(_DEPLOYMENT)}") or ()
    if len(items) > MAX_DEPLOYMENTS:
        top.report("deployments", f"found {len(items)}; allowed: 1..{MAX_DEPLOYMENTS}; spread them over several files")
        return ()
    lines: dict[tuple[int, int], int] = {}
    deployments = []
    for index, item in enumerate(items):
        path = f"deployments[{index}]"
        deployment = _read_deployment(item, path, model, mailbox, problems)
        if deployment is None:
            continue
        if deployment.pair in lines:
            text = f"tp={deployment.tp}, dcp={deployment.dcp} occurs twice, first on line {lines[deployment.pair]}"
            problems.add(item.line, path, f"{text}; remove one")
        else:
            lines[deployment.pair] = item.line
            deployments.append(deployment)
    return tuple(sorted(deployments, key=lambda deployment: deployment.pair))


def _read_deployment(
    item: Node, path: str, model: Model | None, mailbox: Mailbox | None, problems: Problems
) -> Deployment | None:
    if not isinstance(item, Mapping):
        wrong(item, path, f"a mapping with {', '.join(_DEPLOYMENT)}", problems)
        return None
    fields = Fields(item, path, _DEPLOYMENT, problems)
    per_rank = mailbox is not None and mailbox.slot_per_rank
    tp = fields.integer(
        "tp", 1, MAX_SLOTS if per_rank else MAX_RANKS, ", for mailbox.slots has one per rank" if per_rank else ""
    )
    dcp = fields.integer("dcp", 1, MAX_RANKS)
    if tp is not None and dcp is not None and tp % dcp:
        fields.report("dcp", f"found {dcp}; allowed: a divisor of tp={tp}, for ranks share the context in equal groups")
    capacity = MAX_CAPACITY if mailbox is None else mailbox.capacity
    blocks = MAX_BLOCKS if model is None else min(model.blocks, MAX_BLOCKS)
    rows = fields.switch_table("attn_stats", capacity, "rows (up to mailbox.capacity)")
    saved = fields.switch_table("attn_stats_blocks", blocks, "saved blocks (of this model)")
    if tp is None or dcp is None:
        return None
    return Deployment(tp=tp, dcp=dcp, attn_stats=rows, attn_stats_blocks=saved)

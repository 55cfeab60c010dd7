"""The program whose cold start is timed; run as a file in a fresh interpreter, with nothing of the package loaded.

Usage: cold_child.py BUNDLE DEVICE. Sets up what an engine has before it starts (torch, a CUDA context, a model's
weights, a mailbox), then times what this package adds, and writes one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

_ROWS = 1
_ARMED_WORD = -0x80000000
_EPS = 1e-5


def main(path: str, device: str) -> None:
    """Times the cold start and writes the result to stdout."""
    manifest = json.loads((Path(path) / "manifest.json").read_bytes())
    torch.cuda.set_device(device)
    memory = _Memory(manifest, device)
    torch.cuda.synchronize()
    before = set(sys.modules)

    clock = [time.perf_counter()]
    import attnres_aot

    load, prepared_class = attnres_aot.load, attnres_aot.PreparedAttnRes
    clock.append(time.perf_counter())
    bundle = load(path)
    clock.append(time.perf_counter())
    consumers = _bind_all(prepared_class, bundle, memory)
    clock.append(time.perf_counter())
    consumers[len(consumers) // 2].run(*memory.operands)
    torch.cuda.synchronize()
    clock.append(time.perf_counter())
    bundle.preload()
    torch.cuda.synchronize()
    clock.append(time.perf_counter())

    names = ("import", "load", "bind", "first launch", "preload")
    known = {*sys.stdlib_module_names, "attnres_aot", "torch"}
    loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
    result = {
        "phases_ms": {name: (end - start) * 1e3 for name, start, end in zip(names, clock, clock[1:], strict=False)},
        "consumers": len(consumers),
        "foreign": sorted(loaded - known),
    }
    sys.stdout.write(json.dumps(result) + "\n")


class _Memory:
    """What an engine has before it starts: layers with weights, operands, a mailbox, statistics."""

    def __init__(self, manifest: dict[str, Any], device: str) -> None:
        model, mailbox = manifest["model"], manifest["mailbox"]
        hidden, count, size = model["hidden"], model["layers"], model["block_size"]
        blocks = -(-count // size)

        def ones(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.ones(shape, dtype=dtype, device=device)

        def norm() -> SimpleNamespace:
            return SimpleNamespace(weight=ones(hidden), variance_epsilon=_EPS)

        self.layers = [
            SimpleNamespace(
                self_attention_res_norm=norm(),
                self_attention_res_proj=SimpleNamespace(weight=ones(1, hidden)),
                input_layernorm=norm(),
                prev_valid_blocks=-(-layer // size),
                block_write_idx=layer // size,
                is_block_write_layer=layer % size == 0,
            )
            for layer in range(count)
        ]
        self.backbone = SimpleNamespace(
            output_attn_res_norm=norm(),
            output_attn_res_proj=SimpleNamespace(weight=ones(1, hidden)),
            norm=norm(),
            num_attn_res_blocks=blocks,
        )
        self.operands = (ones(_ROWS, hidden), ones(_ROWS, hidden), ones(_ROWS, blocks, hidden), ones(_ROWS, hidden))
        self.first_ring_layer = model["leading_dense_layers"] + 1
        self.mailbox = None
        if mailbox["slots"]:
            self.mailbox = ones(mailbox["slots"][-1], mailbox["capacity"], hidden)
            self.mailbox.view(torch.int32).fill_(_ARMED_WORD)
        self.aux = any(variant["aux"] for variant in manifest["variants"])
        capacity = max(1, mailbox["capacity"])
        self.statistics = ones(capacity, hidden, dtype=torch.float32), ones(capacity, 2, dtype=torch.float32)
        tables = sorted(manifest["tables"], key=lambda table: not table["attn_stats"])
        self.deployment = (tables[0]["tp"], tables[0]["dcp"]) if tables else None


def _bind_all(prepared_class: Any, bundle: Any, memory: _Memory) -> list[Any]:
    """Binds every consumer before attention and the one at the end, each with all that the bundle has for it."""
    rows: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    if memory.deployment is not None:
        rows = bundle.statistics_rows(*memory.deployment)
        blocks = bundle.statistics_blocks(*memory.deployment)
    consumers = []
    for index, layer in enumerate([*memory.layers, memory.backbone]):
        prepared = prepared_class.for_target(layer, final=layer is memory.backbone, bundle=bundle)
        if memory.aux:
            prepared.bind_aux()
        if memory.mailbox is not None and index >= memory.first_ring_layer:
            prepared.bind_ring(memory.mailbox)
        if rows and prepared.key.nb in blocks:
            prepared.bind_statistics(*memory.statistics, rows)
        consumers.append(prepared)
    return consumers


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

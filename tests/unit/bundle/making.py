"""Bundles made without a compiler, the way that the builder makes them, from test cubins."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from renaming import rename_kernel

from attnres_aot.builder.assemble import assemble, prove_record
from attnres_aot.builder.keys import BuildFacts, wanted_images
from attnres_aot.builder.sources import MANIFEST, sources_digests
from attnres_aot.bundle.manifest import MANIFEST_NAME, seal
from attnres_aot.bundle.writer import hold_target, write_bundle
from attnres_aot.plan.plan import EVERYTHING, Selection, plan
from attnres_aot.plan.settings import Config, Deployment, Mailbox, Model, Options
from attnres_aot.spec.arch import parse_arch
from attnres_aot.spec.params import KERNEL_PARAMS
from attnres_aot.spec.tables import parse_table
from attnres_aot.spec.variants import kernel_symbol

CUBINS = Path(__file__).parents[2] / "data" / "cubins"

CONFIG = Config(
    name="tiny",
    model=Model(hidden_size=2048, layers=3, block_size=2, leading_dense_layers=1),
    mailbox=Mailbox(capacity=64, fixed_slots=(1,), slot_per_rank=True),
    options=Options(before_mlp=False),
    deployments=(
        Deployment(tp=2, dcp=1),
        Deployment(tp=2, dcp=2, attn_stats=parse_table("1-8:1"), attn_stats_blocks=parse_table("2:1")),
    ),
)
"""A model of two saved blocks and two CTAs per row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeBundle:
    """A bundle on disk that a test may break."""

    path: Path

    @property
    def manifest_path(self) -> Path:
        return self.path / MANIFEST_NAME

    def read(self) -> dict[str, Any]:
        return json.loads(self.manifest_path.read_bytes())

    def edit(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Rewrites the manifest after `change` to its JSON, as a build would write it: its own digest is right."""
        raw = self.read()
        change(raw)
        self.manifest_path.write_bytes(seal(raw))

    def image_path(self, index: int = 0) -> Path:
        return self.path / self.read()["images"][index]["file"]


def read_cubin_file(kernel: str, arch: str = "sm_100", toolkit: str = "cu12") -> bytes:
    """Reads a test cubin by kernel, arch and the toolkit that made it."""
    return (CUBINS / f"{kernel}.{arch}.{toolkit}.cubin").read_bytes()


def make_bundle(
    folder: Path,
    arch: str = "sm_100",
    *,
    sources: str | None = None,
    config: Config = CONFIG,
    selection: Selection = EVERYTHING,
) -> MadeBundle:
    """Makes a whole bundle in `folder`, or replaces the one that is there."""
    shown = plan(config, parse_arch(arch), selection=selection)
    facts = BuildFacts(
        toolchain={"assembler": "12.9"},
        package_version="0",
        sources=dict.fromkeys([*KERNEL_PARAMS, MANIFEST], sources) if sources else sources_digests(),
    )
    records, files = [], {}
    for wanted in wanted_images(shown, facts):
        threads = wanted.launch["threads"]
        kernel = wanted.kernel if threads == 128 else f"{wanted.kernel}{threads}"
        code = rename_kernel(read_cubin_file(kernel, arch), kernel, kernel_symbol(wanted.name))
        record = prove_record(wanted, code, shown.arch, facts.flavour)
        records.append(record)
        files[record.file] = code
    path = folder / shown.bundle_name
    with hold_target(path) as target:
        write_bundle(target, assemble(shown, facts, records), files)
    return MadeBundle(path=path)

"""Real cubins, and bundles made of them without a compiler, for tests to break."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from attnres_aot.abi import KERNEL_PARAMS
from attnres_aot.arch import parse_arch
from attnres_aot.build.assemble import assemble, prove_record
from attnres_aot.build.image import FinishedImage
from attnres_aot.build.keys import BuildFacts, wanted_images
from attnres_aot.build.sources import sources_digests
from attnres_aot.bundle.writer import hold_target, write_bundle
from attnres_aot.manifest import MANIFEST_NAME, seal
from attnres_aot.plan import plan
from attnres_aot.settings import Config, Deployment, Mailbox, Model, Options
from attnres_aot.tables import parse_table
from attnres_aot.variants import kernel_symbol

sys.path.insert(0, str(Path(__file__).parent))

from renaming import rename_kernel

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


@pytest.fixture(scope="session")
def cubin() -> Callable[..., bytes]:
    """Reads a test cubin by kernel, arch and the toolkit that made it."""

    def read(kernel: str, arch: str = "sm_100", toolkit: str = "cu12") -> bytes:
        return (CUBINS / f"{kernel}.{arch}.{toolkit}.cubin").read_bytes()

    return read


@pytest.fixture
def make_bundle(tmp_path, cubin) -> Callable[..., MadeBundle]:
    """Makes a whole bundle the way that the builder does, from test cubins."""

    def make(arch: str = "sm_100", *, sources: str | None = None, config: Config = CONFIG) -> MadeBundle:
        shown = plan(config, parse_arch(arch))
        facts = BuildFacts(
            toolchain={"assembler": "12.9"},
            package_version="0",
            sources=dict.fromkeys(KERNEL_PARAMS, sources) if sources else sources_digests(),
        )
        records, files = [], {}
        for wanted in wanted_images(shown, facts):
            threads = wanted.launch["threads"]
            kernel = wanted.kernel if threads == 128 else f"{wanted.kernel}{threads}"
            image = FinishedImage(
                key=wanted.key,
                cubin=rename_kernel(cubin(kernel, arch), kernel, kernel_symbol(wanted.name)),
                block_threads=threads,
                smem_dynamic_bytes=0,
                rows_per_cluster=1,
                pdl=True,
            )
            record = prove_record(wanted, image, shown)
            records.append(record)
            files[record.file] = image.cubin
        path = tmp_path / "bundles" / shown.bundle_name
        with hold_target(path) as target:
            write_bundle(target, assemble(shown, facts, records), files)
        return MadeBundle(path=path)

    return make


@pytest.fixture
def bundle(make_bundle) -> MadeBundle:
    return make_bundle()

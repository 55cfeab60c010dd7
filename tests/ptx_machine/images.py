"""Compiled images as a consumer and a producer for `attnres_aot.selftest`: its cases, judged as on a GPU."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from attnres_aot.selftest import reference
from attnres_aot.selftest.arena import Arena
from attnres_aot.selftest.cases import Case
from attnres_aot.selftest.producers import ProducerCase
from attnres_aot.selftest.reference import Operands
from attnres_aot.spec.params import KERNEL_PARAMS
from attnres_aot.spec.variants import ConsumerSpec, ImageSpec, Variant, producer_spec_for
from ptx_machine.machine import Launch
from ptx_machine.memory import GlobalMemory, Segment
from ptx_machine.program import Program, PtxError
from ptx_machine.publisher import LatePublisher
from ptx_machine.schedule import World, run

ROOT = Path(__file__).parents[2]
_COMPILE = """
import json, sys
from attnres_aot.kernels import compile as compiler
from attnres_aot.spec import variants
from attnres_aot.spec.arch import parse_arch
arch, specs = json.load(sys.stdin)
arch = parse_arch(arch)
compiler.prepare_environment(arch)
kinds = {kind.kernel: kind for kind in (variants.ConsumerSpec, variants.StatisticsSpec, variants.PublishSpec)}
json.dump([compiler.compile_image(kinds[kernel](**fields), arch).ptx for kernel, fields in specs], sys.stdout)
"""
VEC_BYTES = 16


def compile_ptx(specs: Sequence[ImageSpec], arch: str) -> list[str]:
    """Compiles images in a process of its own and returns their PTX."""
    fields = [(spec.kernel, asdict(spec)) for spec in specs]
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE],
        input=json.dumps([arch, fields]),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise PtxError(f"compiling failed:\n{done.stderr}")
    return list(json.loads(done.stdout))


def pack(kernel: str, values: Mapping[str, float | Tensor | None]) -> list[int]:
    """Bits of a kernel's parameters, in order; a parameter without a value is 0, as a loader passes it."""
    bits = []
    for param in KERNEL_PARAMS[kernel]:
        value = values.get(param.name)
        if isinstance(value, Tensor):
            bits.append(value.data_ptr())
        elif param.kind == "f32":
            bits.append(struct.unpack("<i", struct.pack("<f", value or 0.0))[0])
        else:
            bits.append(int(value or 0))
    assert set(values) <= {param.name for param in KERNEL_PARAMS[kernel]}
    return bits


def vectors(view: Tensor, axis: int) -> int:
    """A stride in 16-byte vectors."""
    stride = view.stride(axis) * view.element_size()
    assert stride % VEC_BYTES == 0
    return stride // VEC_BYTES


def consumer_segment(variant: Variant, words: Tensor, views: Operands, rows: int, *, early: bool) -> Segment:
    """The memory of a consumer's launch, with the rights that its contract gives."""
    memory = Segment.over(words)
    blocks, slots = views.blocks, variant.slots
    late = () if early and slots else ("written_after_wait",)
    for weight in (views.norm, views.query, views.out_norm):
        memory.allow(weight, "readable")
    memory.allow(views.prefix, "writable", *late, *(["readable"] if variant.key.has_delta else []))
    memory.allow(views.out, "writable", "rewritable", *late)
    if slots:
        memory.allow(views.source[:, :rows], "readable", "writable", *(("after_wait",) if late else ()))
    else:
        memory.allow(views.source, "readable", "after_wait")
    if views.mixture is not None and views.scal is not None:
        memory.allow(views.mixture[:rows], "readable", "after_wait")
        memory.allow(views.scal[:rows], "readable", "after_wait")
    else:
        memory.allow(blocks[:, : variant.key.nb], "readable")
    if variant.key.write is not None:
        memory.allow(blocks[:, variant.key.write], "writable", *late)
    if views.aux is not None:
        memory.allow(views.aux, "writable", *late)
    return memory


@dataclass(kw_only=True)
class CompiledImages:
    """Launches cases on the machine, from programs by spec."""

    programs: Mapping[ImageSpec, Program]
    """What can be launched."""
    spec: ConsumerSpec | None = None
    """The one image to use for consumers."""
    seed: int | None = None
    """Of random schedules."""
    error_seed: int | None = None
    """Of the errors of approximate functions; None: they make none."""
    late: int | None = None
    """Publish rows of a mailbox only while the consumer polls: the seed of when and in which order."""
    keep_back: int = 0
    """Words that such a publisher never publishes."""
    spin_budget: int = 0
    """Polls before a trap; 0: never."""
    early: bool = False
    """Launch in the mode in which a mailbox may be polled, and everything written, before the dependency wait."""
    fault: Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.int32))
    """The record of a spin that ran out."""
    again: bool = False
    """Such a publisher finds the rows there, publishes them again, and what the consumer leaves is armed afterwards."""
    missing: list[list[int]] = field(default_factory=list)
    """Slot, row and word of those, in the last launch."""
    steps: int = 200_000
    """Most steps of a launch."""

    def launch(self, case: Case, views: Operands) -> None:
        """Launches a consumer."""
        variant, rows, source = case.variant, case.rows, views.source
        assert self.spec is not None
        words = _storage(views.out)
        values = {
            **{name: getattr(views, name) for name in ("source", "prefix", "blocks", "norm", "query", "out_norm")},
            **{name: getattr(views, name) for name in ("out", "aux", "mixture", "scal")},
            "fault": self.fault,
            "source_row_stride": vectors(source, 1 if variant.slots else 0),
            "source_slot_stride": vectors(source, 0) if variant.slots else 0,
            "prefix_row_stride": vectors(views.prefix, 0),
            "blocks_row_stride": vectors(views.blocks, 0),
            "blocks_block_stride": vectors(views.blocks, 1),
            "out_row_stride": vectors(views.out, 0),
            "aux_row_stride": 0 if views.aux is None else vectors(views.aux, 0),
            "write": -1 if variant.key.write is None else variant.key.write,
            "rows": rows,
            "spin_budget": self.spin_budget,
            "fault_tag": 77,
            "early": int(self.early),
            "eps": case.eps,
            "out_eps": case.out_eps,
        }
        fault = Segment.over(self.fault)
        fault.allow(self.fault, "writable")
        memory = GlobalMemory(consumer_segment(variant, words, views, rows, early=self.early), fault)
        world: World | None = None
        if self.late is not None and variant.slots:
            world = LatePublisher(
                source[:, :rows],
                start=10 * (self.late % 5),
                steps=1 + 7 * (self.late % 3),
                seed=self.late,
                keep_back=self.keep_back,
                empty=not self.again,
            )
            self.missing = world.missing.T.tolist()
        self._run(self.spec, pack("consumer", values), rows, memory, world)
        if self.again:
            reference.arm(source[:, :rows])

    def produce(self, case: ProducerCase, memory: Arena) -> None:
        """Launches a producer."""
        tensor, rows = memory.tensor, case.rows
        segment = Segment.over(memory.words)
        if case.producer.nb is None:
            source, slot = tensor("source"), tensor("mailbox")[case.slot]
            segment.allow(source, "readable", "after_wait")
            segment.allow(slot[:rows], "writable", "after_wait")
            values = {"source": source, "mailbox": slot, "source_row_stride": vectors(source, 0), "rows": rows}
        else:
            names = ("blocks", "norm", "query", "mixture", "scal")
            values = {name: tensor(name) for name in names}
            blocks = values["blocks"]
            for view in (blocks[:, : case.producer.nb], values["norm"], values["query"]):
                segment.allow(view, "readable")
            for name in ("mixture", "scal"):
                segment.allow(values[name][:rows], "writable", "after_wait")
            values |= {"blocks_row_stride": vectors(blocks, 0), "blocks_block_stride": vectors(blocks, 1)}
            values |= {"rows": rows, "eps": case.eps}
        hidden = tensor("source" if case.producer.nb is None else "blocks").shape[-1]
        spec = producer_spec_for(case.producer, hidden)
        self._run(spec, pack(spec.kernel, values), rows, GlobalMemory(segment))

    def _run(
        self, spec: ImageSpec, params: list[int], rows: int, memory: GlobalMemory, world: World | None = None
    ) -> None:
        launch = Launch(
            program=self.programs[spec],
            params=params,
            ctas=spec.cluster * rows,
            cluster=spec.cluster,
            error_seed=self.error_seed,
        )
        run(launch, memory, world=world, seed=self.seed, max_steps=self.steps)


def _storage(view: Tensor) -> Tensor:
    """The whole allocation that a view lies in, as int32."""
    whole = view.untyped_storage()
    return torch.empty(0, dtype=torch.int32).set_(whole, 0, (whole.nbytes() // 4,))

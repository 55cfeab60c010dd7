"""Fixtures for the loader: a stand-in libcuda, tensors on the CPU in the place of a device, and small bundles."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import struct
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from attnres_aot.bundle.manifest import (
    SCHEMA,
    ArchRecord,
    BudgetRecord,
    Choice,
    ImageRecord,
    MailboxRecord,
    Manifest,
    ModelRecord,
    ProducerRecord,
    SelectionRecord,
    TableRecord,
    VariantRecord,
    dump_manifest,
)
from attnres_aot.runtime import api
from attnres_aot.runtime.cuda import device as torch_device
from attnres_aot.runtime.cuda import driver, fault
from attnres_aot.runtime.cuda import modules as library
from attnres_aot.runtime.cuda.device import TorchDevice
from attnres_aot.runtime.find.loaded import LoadedBundle
from attnres_aot.spec.params import CONSUMER_PARAMS, KERNEL_PARAMS, Param
from attnres_aot.spec.variants import (
    ConsumerKey,
    Producer,
    Variant,
    choices_for,
    kernel_symbol,
    parse_producer,
    parse_variant,
    producer_spec_for,
)

HIDDEN = 1024
STUB_SOURCE = Path(__file__).parents[2] / "stub_cuda" / "stub_cuda.cpp"
CAPTURE_MODES = ("global", "thread_local", "relaxed")
CAPTURED = 0x77
"""Handle of a stream that is captured."""
LOADING = ("cuLibraryLoadData", "cuKernelGetFunction", "cuFuncLoad", "cuMemHostAlloc", "cuKernelSetAttribute")
"""Driver functions that load or allocate."""
FORMATS = {"pointer": "<Q", "i32": "<i", "i64": "<q", "f32": "<f"}


class LaunchRecord(ctypes.Structure):
    _fields_ = (
        ("thread", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        ("smem", ctypes.c_uint32),
        ("pdl", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("parameter_bytes", ctypes.c_uint32),
        ("symbol", ctypes.c_char * 64),
        ("parameters", ctypes.c_ubyte * 256),
    )

    def arguments(self, params: tuple[Param, ...] = CONSUMER_PARAMS) -> dict[str, int | float]:
        data = bytes(self.parameters)[: self.parameter_bytes]
        return {param.name: struct.unpack_from(FORMATS[param.kind], data, param.offset)[0] for param in params}


class StubCuda:
    """The stand-in driver, and what the tests tell it and ask of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lib = ctypes.CDLL(str(path))
        self.lib.stub_launches.restype = ctypes.c_uint64
        self.lib.stub_begin_capture.argtypes = (ctypes.c_int, ctypes.c_uint64)
        self.streams = {0: 0, 1: 0}
        self.current_device = 0

    def reset(self) -> None:
        self.lib.stub_reset()

    def fail(self, function: str, status: int, after: int = 0) -> None:
        self.lib.stub_fail(function.encode(), status, after)

    def fail_once(self, function: str, status: int) -> None:
        """Makes the next call fail, and those after it succeed."""
        self.lib.stub_fail_once(function.encode(), status)

    def mend(self, function: str) -> None:
        self.lib.stub_mend(function.encode())

    def machine(self, *, cuda: int = 13000, devices: int = 1, capability: tuple[int, int] = (9, 0)) -> None:
        self.lib.stub_machine(cuda, devices, *capability)

    def calls(self, function: str) -> int:
        return self.lib.stub_calls(function.encode())

    def launch_count(self) -> int:
        return self.lib.stub_launches()

    def launch(self, index: int = -1) -> LaunchRecord:
        record = LaunchRecord()
        assert self.lib.stub_launch(ctypes.c_size_t(index % max(1, self.launch_count())), ctypes.byref(record)) == 0
        return record

    @contextlib.contextmanager
    def capture(self, mode: str = "global", stream: int = CAPTURED) -> Iterator[None]:
        """Captures a stream, which becomes the current one, and fails if something has ended the capture."""
        before, self.streams[0] = self.streams[0], stream
        self.lib.stub_begin_capture(CAPTURE_MODES.index(mode), stream)
        try:
            yield
        finally:
            self.streams[0] = before
            survived = self.lib.stub_end_capture()
        assert survived, "the capture was ended"

    def device(self, ordinal: int = 0, *, several: bool = False) -> TorchDevice:
        """A device of this driver whose tensors are on the CPU."""
        return TorchDevice(
            device=torch.device("cpu"),
            ordinal=ordinal,
            tensor_index=-1,
            stream=self.streams.__getitem__,
            current=(lambda: self.current_device) if several else None,
        )


@pytest.fixture(scope="session")
def stub_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stub_cuda") / "libstub_cuda.so"
    command = ["g++", "-std=c++17", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(path), str(STUB_SOURCE)]
    subprocess.run(command, check=True)
    return path


@pytest.fixture
def stub(stub_library: Path, monkeypatch: pytest.MonkeyPatch) -> StubCuda:
    cuda = StubCuda(stub_library)
    cuda.reset()
    cuda.lib.stub_make_current(0)
    monkeypatch.setattr(driver, "LIBRARY_NAME", str(stub_library))
    monkeypatch.setattr(driver, "_process", driver._Process())
    monkeypatch.setattr(library, "_kernels", {})
    monkeypatch.setattr(library, "_functions", {})
    monkeypatch.setattr(api, "_found", {})
    monkeypatch.setattr(fault, "_records", {})
    monkeypatch.setattr(fault, "_kinds", {})
    monkeypatch.setattr(torch_device, "_opened", set())
    monkeypatch.setattr(
        api, "pick_device", lambda device: cuda.device(0 if device is None else torch.device(device).index or 0)
    )
    return cuda


@dataclass(frozen=True, kw_only=True)
class BundleMaker:
    """Writes bundles whose code only the stand-in driver can load."""

    folder: Path

    def write(
        self,
        variants: Iterable[str],
        *,
        producers: Iterable[str] = (),
        name: str = "tiny",
        arch: str = "sm_90",
        params: tuple[Param, ...] = CONSUMER_PARAMS,
        binary_params: tuple[Param, ...] | None = None,
        binary_threads: int = 128,
        change: Callable[[Manifest], Manifest] = lambda manifest: manifest,
    ) -> Path:
        path = self.folder / f"{name}-{arch}"
        path.mkdir()
        parsed, made = [parse_variant(text) for text in variants], [parse_producer(text) for text in producers]
        specs = {str(choices_for(variant, HIDDEN)[0].spec): "consumer" for variant in parsed}
        specs |= {str(producer_spec_for(producer, HIDDEN)): producer.kernel for producer in made}
        images = []
        for spec_name, kernel in specs.items():
            taken = (binary_params or params) if kernel == "consumer" else KERNEL_PARAMS[kernel]
            layout = " ".join(f"{p.offset}:{p.size}" for p in taken)
            data = f"STUB {binary_threads} {kernel_symbol(spec_name)} {layout}".encode()
            (path / f"{spec_name}.cubin").write_bytes(data)
            images.append(
                ImageRecord(
                    name=spec_name,
                    kernel=kernel,
                    file=f"{spec_name}.cubin",
                    sha256=hashlib.sha256(data).hexdigest(),
                    size=len(data),
                    symbol=kernel_symbol(spec_name),
                    abi=kernel,
                    cluster=HIDDEN // 1024,
                    rows_per_cluster=1,
                    block_threads=128,
                    smem_static_bytes=0,
                    smem_dynamic_bytes=0,
                    pdl=True,
                    registers=64,
                    stack_bytes=0,
                    spill_bytes=0,
                    critical_instructions=100,
                    budget=BudgetRecord(registers=255, smem_bytes=4096),
                    build_key=hashlib.sha256(spec_name.encode()).hexdigest(),
                )
            )
        manifest = Manifest(
            schema=SCHEMA,
            name=name,
            arch=ArchRecord(requested=arch, proven=arch),
            config={},
            selection=SelectionRecord(tp=(), dcp=(), only=()),
            sources_sha256="0" * 64,
            toolchain={"stub": "1"},
            flavour="cu12",
            oldest_driver="12.0",
            model=ModelRecord(hidden=HIDDEN, layers=4, block_size=2, leading_dense_layers=1),
            mailbox=MailboxRecord(capacity=64, slots=tuple(sorted({v.slots for v in parsed} - {0}))),
            tables=(
                TableRecord(tp=8, dcp=1, attn_stats="1-2:1,4:1", attn_stats_blocks="1-8:1"),
                TableRecord(tp=16, dcp=16, attn_stats="", attn_stats_blocks=""),
            ),
            abis={"consumer": params, **{producer.kernel: KERNEL_PARAMS[producer.kernel] for producer in made}},
            images=tuple(images),
            variants=tuple(record_of(variant) for variant in parsed),
            producers=tuple(record_of_producer(producer) for producer in made),
        )
        (path / "manifest.json").write_bytes(dump_manifest(change(manifest)))
        return path

    def load_changed(self, variants: Iterable[str], change: Callable[[Manifest], Manifest]) -> LoadedBundle:
        """Loads a sound bundle and changes its manifest in memory, as another release might have written it."""
        loaded = api.load(self.write(variants))
        changed = dataclasses.replace(loaded.bundle, manifest=change(loaded.bundle.manifest))
        return LoadedBundle(changed, loaded.device)


def record_of(variant: Variant) -> VariantRecord:
    key = variant.key
    return VariantRecord(
        name=str(variant),
        nb=key.nb,
        has_delta=key.has_delta,
        write=key.write,
        final=key.final,
        slots=variant.slots,
        aux=variant.aux,
        stats=variant.stats,
        choices=(Choice(image=str(choices_for(variant, HIDDEN)[0].spec), max_rows=None),),
        deployments=((8, 1),) if variant.slots != 16 else ((16, 16),),
    )


def record_of_producer(producer: Producer) -> ProducerRecord:
    return ProducerRecord(
        name=str(producer),
        kernel=producer.kernel,
        nb=producer.nb,
        choices=(Choice(image=str(producer_spec_for(producer, HIDDEN)), max_rows=None),),
        deployments=((8, 1),),
    )


@pytest.fixture
def bundles(tmp_path: Path) -> BundleMaker:
    return BundleMaker(folder=tmp_path)


OPTIONS = ("", "-aux", "-stats", "-aux-stats")
KEYS = ("nb2-delta", "nb2-delta-write2", "nb2", "nb2-delta-final")
ALL_VARIANTS = (
    "nb0-write0",
    "nb0-write0-aux",
    *(f"{key}{ring}{option}" for key in KEYS for ring in ("", "-ring1", "-ring8", "-ring16") for option in OPTIONS),
)


@pytest.fixture
def bundle(stub: StubCuda, bundles: BundleMaker) -> LoadedBundle:
    return api.load(bundles.write(ALL_VARIANTS))


@dataclass(frozen=True, kw_only=True)
class Operands:
    """Operands of one launch."""

    delta: torch.Tensor
    prefix: torch.Tensor
    blocks: torch.Tensor
    out: torch.Tensor
    aux: torch.Tensor

    def replace(self, **changes: torch.Tensor) -> Operands:
        return dataclasses.replace(self, **changes)

    @property
    def ordinary(self) -> tuple[torch.Tensor, ...]:
        return self.delta, self.prefix, self.blocks, self.out

    @property
    def ring(self) -> tuple[torch.Tensor, ...]:
        return self.prefix, self.blocks, self.out


@pytest.fixture
def operands() -> Callable[..., Operands]:
    def make(rows: int = 3, blocks: int = 4) -> Operands:
        delta, prefix, out, aux = (torch.zeros((rows, HIDDEN), dtype=torch.bfloat16) for _ in range(4))
        return Operands(
            delta=delta,
            prefix=prefix,
            blocks=torch.zeros((rows, blocks, HIDDEN), dtype=torch.bfloat16),
            out=out,
            aux=aux,
        )

    return make


@pytest.fixture
def weights() -> tuple[torch.Tensor, ...]:
    return tuple(torch.ones(HIDDEN, dtype=torch.bfloat16) for _ in range(3))


@pytest.fixture
def key() -> ConsumerKey:
    return ConsumerKey(nb=2, has_delta=True)

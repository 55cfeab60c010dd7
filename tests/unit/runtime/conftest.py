"""Fixtures for the loader: a stand-in libcuda, tensors on the CPU in the place of a device, and small bundles."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import struct
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from attnres_aot.bundle.manifest import Manifest, TableRecord, dump_manifest
from attnres_aot.runtime import api
from attnres_aot.runtime.cuda import device as torch_device
from attnres_aot.runtime.cuda import driver, fault
from attnres_aot.runtime.cuda import modules as library
from attnres_aot.runtime.cuda.device import TorchDevice
from attnres_aot.runtime.find.loaded import LoadedBundle
from attnres_aot.spec.params import CONSUMER_PARAMS, KERNEL_PARAMS, Param
from attnres_aot.spec.variants import ConsumerKey
from tests.support.manifests import make_image, make_manifest

HIDDEN = 1024
TABLES = (
    TableRecord(tp=8, dcp=1, attn_stats="1-2:1,4:1", attn_stats_blocks="1-8:1"),
    TableRecord(tp=16, dcp=16, attn_stats="", attn_stats_blocks=""),
)
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
        manifest = make_manifest(
            variants,
            producers,
            name=name,
            arch=arch,
            tables=TABLES,
            deployments=lambda variant: ((8, 1),) if variant.slots != 16 else ((16, 16),),
            producer_deployments=((8, 1),),
            params=params,
        )
        images = []
        for image in manifest.images:
            taken = (binary_params or params) if image.kernel == "consumer" else KERNEL_PARAMS[image.kernel]
            layout = " ".join(f"{p.offset}:{p.size}" for p in taken)
            data = f"STUB {binary_threads} {image.symbol} {layout}".encode()
            (path / image.file).write_bytes(data)
            images.append(make_image(image.name, data))
        manifest = dataclasses.replace(manifest, images=tuple(images))
        (path / "manifest.json").write_bytes(dump_manifest(change(manifest)))
        return path

    def load_changed(self, variants: Iterable[str], change: Callable[[Manifest], Manifest]) -> LoadedBundle:
        """Loads a sound bundle and changes its manifest in memory, as another release might have written it."""
        loaded = api.load(self.write(variants))
        changed = dataclasses.replace(loaded.bundle, manifest=change(loaded.bundle.manifest))
        return LoadedBundle(changed, loaded.device)


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

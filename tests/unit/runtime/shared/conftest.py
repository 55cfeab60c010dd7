"""Fixtures for shared objects: libraries of stub bundles, and tensors that pass for a device's."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

tvm_ffi = pytest.importorskip("tvm_ffi")

from attnres_aot import errors  # noqa: E402 - nothing here runs without TVM-FFI
from attnres_aot.bundle.manifest import Manifest  # noqa: E402
from attnres_aot.bundle.reader import read_bundle  # noqa: E402
from attnres_aot.launcher.compile import LauncherObjects  # noqa: E402
from attnres_aot.launcher.compilers import HOSTS, find_compiler, this_host  # noqa: E402
from attnres_aot.launcher.libraries import payload_for  # noqa: E402
from attnres_aot.runtime.shared import library as shared_library  # noqa: E402

DRIVER, STAND_IN = b"libcuda.so.1\0", b"libstub.so.1\0"
"""What a library opens, and what those of these tests open: of equal length, so that it can be put in its place."""
SOURCE = Path(__file__).parents[3] / "stub_cuda" / "stub_cuda.cpp"


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Managed(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


CODES = {torch.bfloat16: (4, 16), torch.float32: (2, 32), torch.float16: (2, 16), torch.int32: (0, 32)}
_linked: dict[tuple[str, bytes], Path] = {}
_kept: list[object] = []  # what tensors point to; nothing here is ever freed
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class _Exported:
    def __init__(self, tensor: torch.Tensor, device: tuple[int, int]) -> None:
        rank = tensor.dim()
        shape, strides = (ctypes.c_int64 * rank)(*tensor.shape), (ctypes.c_int64 * rank)(*tensor.stride())
        one = DLTensor(tensor.data_ptr() or None, *device, rank, *CODES[tensor.dtype], 1, shape, strides, 0)
        self.managed = Managed(one, None, None)
        self.device = device
        _kept.extend((tensor, shape, strides, self.managed))

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **_: object) -> object:
        return _capsule(ctypes.addressof(self.managed), b"dltensor", None)


def gpu(tensor, device: int = 0):
    """Returns a tensor on the CPU as one that is on a CUDA device; anything else as it is."""
    return tvm_ffi.from_dlpack(_Exported(tensor, (2, device))) if isinstance(tensor, torch.Tensor) else tensor


@pytest.fixture(scope="session")
def stub_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in driver under the name that libraries of these tests look for."""
    path = tmp_path_factory.mktemp("stub_driver") / "libstub.so.1"
    command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", "-Wl,-soname,libstub.so.1", "-o", str(path), str(SOURCE)]
    subprocess.run(command, check=True)
    return path


@pytest.fixture(scope="session")
def objects() -> Iterator[LauncherObjects]:
    with LauncherObjects(find_compiler(HOSTS[this_host()])) as made:
        yield made


@pytest.fixture
def link(objects, tmp_path_factory):
    """Makes a library of bundles, each a folder or a manifest with its files; it opens the stand-in driver."""

    def make(*bundles: Path | tuple[Manifest, Mapping[str, bytes]], name: str = "attnres_tiny.so") -> Path:
        payload = payload_for([each if isinstance(each, tuple) else _contents(each) for each in bundles])
        if (name, payload) not in _linked:
            data = objects.link(name, payload)
            assert data.count(DRIVER) == 1
            path = tmp_path_factory.mktemp("library") / name
            path.write_bytes(data.replace(DRIVER, STAND_IN))
            _linked[name, payload] = path
        return _linked[name, payload]

    return make


def _contents(path: Path) -> tuple[Manifest, Mapping[str, bytes]]:
    bundle = read_bundle(path)
    return bundle.manifest, bundle.files


@pytest.fixture
def module(stub, link, bundle):
    """A library of the bundle that `bundle` has loaded, opened, with this package's errors."""
    return shared_library.open_library(link(bundle.bundle.path))


@pytest.fixture
def shared(monkeypatch):
    """Lets the loader give tensors on the CPU to libraries as those of the device."""
    monkeypatch.setattr(shared_library, "as_argument", gpu)


@pytest.fixture
def make(module):
    """Prepares a consumer by a library, as `PreparedAttnRes` would be made."""

    def prepare(weights, key, eps=(1e-5, 1e-6), *, pdl=False, checks=True, call=None):
        given = (key.nb, key.has_delta, key.write, key.final) if hasattr(key, "nb") else key
        pair = eps if isinstance(eps, tuple) else (eps, eps)
        return (call or module.prepare_consumer)(*map(gpu, weights), *given, *pair, pdl, checks)

    return prepare


@pytest.fixture
def helpers():
    return SimpleNamespace(gpu=gpu, errors=errors)

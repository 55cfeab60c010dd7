"""Opens libraries through TVM-FFI; its errors become this package's own."""

from __future__ import annotations

import functools
import os
import threading
from typing import Any

import torch

from attnres_aot import errors
from attnres_aot.errors import UsageError

_KINDS = ("OperandError", "UsageError", "DriverError", "BundleError", "VariantMissError")
"""Names of the errors that a library raises; those of classes of `attnres_aot.errors`."""
_lock = threading.Lock()
_opened: dict[str, Any] = {}


def open_library(path: str | os.PathLike[str]) -> Any:
    """Returns the TVM-FFI module of a library, the same one for the same path; it stays loaded.

    Raises:
      UsageError: apache-tvm-ffi is not installed, or the library cannot be loaded.
    """
    place = os.path.realpath(path)
    with _lock:
        if place not in _opened:
            module = _tvm_ffi()
            try:
                _opened[place] = module.load_module(place)
            except (OSError, RuntimeError) as error:
                raise UsageError(
                    f"{place} cannot be loaded: {error}; is it for this machine's kind ({os.uname().machine})?"
                ) from error
        return _opened[place]


def as_argument(tensor: torch.Tensor) -> Any:
    """Returns what a library is given for a tensor: an object that shares its memory, and keeps it."""
    return _tvm_ffi().from_dlpack(tensor.detach())


@functools.cache
def _tvm_ffi() -> Any:
    try:
        import tvm_ffi
    except ImportError as error:
        raise UsageError(
            "a shared object is called through TVM-FFI, which is not installed: `pip install 'attnres-aot[tvm-ffi]'`; "
            "or load the bundle of cubin files, which needs nothing besides torch"
        ) from error
    for kind in _KINDS:
        tvm_ffi.register_error(kind, getattr(errors, kind))
    return tvm_ffi

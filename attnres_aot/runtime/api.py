"""The functions of the package's surface that find bundles and take things from them."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from attnres_aot.bundle.reader import Bundle, read_bundle
from attnres_aot.bundle.shared_object import is_library
from attnres_aot.config.advice import build_command
from attnres_aot.errors import BundleError, UsageError
from attnres_aot.runtime.cuda.device import TorchDevice, pick_device
from attnres_aot.runtime.cuda.driver import open_driver, refuse_after_fork
from attnres_aot.runtime.cuda.fault import RingFault, read_fault
from attnres_aot.runtime.find.loaded import LoadedBundle
from attnres_aot.spec.arch import Arch, parse_arch
from attnres_aot.spec.toolkits import Cuda, parse_cuda
from attnres_aot.spec.variants import Variant, consumer_key

if TYPE_CHECKING:
    from attnres_aot.runtime.consumer import Consumer

_lock = threading.Lock()
_found: dict[tuple[str | None, int], LoadedBundle] = {}


def load(
    path: str | os.PathLike[str] | None = None,
    device: torch.device | str | int | None = None,
    *,
    name: str | None = None,
) -> LoadedBundle:
    """Finds the bundle for a device, reads and checks all of it. Code reaches the device as objects are made and bound.

    What becomes of the bundle's folder later does not matter.

    Args:
      path: a bundle, its shared object, or a folder of either. None searches the environment variable
        ATTNRES_AOT_BUNDLE, installed bundle packages and `./artifacts`, and remembers what it found.
      device: CUDA device; None is torch's current one.
      name: configuration name, where bundles of several lie in one place.

    Returns:
      The bundle, for use on that device.

    Raises:
      BundleError: none fits the device, or it is damaged; carries the trace of the search.
      DriverError: no CUDA in torch, no driver, a driver that is too old, no GPU, or a forked process.
      UsageError: no such device.
    """
    refuse_after_fork()
    where = pick_device(device)
    if path is not None or name is not None:
        return _load(path, where, name)
    from attnres_aot.runtime.find.places import ENVIRONMENT_VARIABLE

    key = (os.environ.get(ENVIRONMENT_VARIABLE), where.ordinal)
    with _lock:
        if key not in _found:
            _found[key] = _load(None, where, None)
        return _found[key]


def preload(
    bundle: LoadedBundle | None = None,
    *,
    tp: int | None = None,
    dcp: int | None = None,
    device: torch.device | str | int | None = None,
) -> int:
    """Puts on the device every image that a deployment needs, and what a mailbox's spin budget needs.

    Making and binding consumers and producers does the same for what each of them needs; this pays for all at once.

    Args:
      bundle: whose images; None is `load(device=device)`.
      tp: tensor-parallel size; None loads for every one in the bundle.
      dcp: decode-context-parallel size; None loads for every one in the bundle.
      device: where, if `bundle` is None.

    Returns:
      How many images are loaded for it.

    Raises:
      UsageError: the bundle does not serve that deployment.
      BundleError: no bundle fits, or an image is damaged.
      DriverError: the driver refused.
    """
    return (bundle or load(device=device)).preload(tp=tp, dcp=dcp)


def statistics_rows(tp: int, dcp: int, bundle: LoadedBundle | None = None, *, missing: str = "error") -> frozenset[int]:
    """Returns the row counts at which a deployment uses precomputed statistics.

    Args:
      tp: tensor-parallel size.
      dcp: decode-context-parallel size.
      bundle: whose tables; None is `load()`.
      missing: what a deployment that the bundle does not serve is: `"error"`, or `"empty"` for no row counts.

    Raises:
      UsageError: the bundle does not serve that deployment, or `missing` is something else.
    """
    return (bundle or load()).statistics_rows(tp, dcp, missing=missing)


def statistics_blocks(
    tp: int, dcp: int, bundle: LoadedBundle | None = None, *, missing: str = "error"
) -> frozenset[int]:
    """Returns the numbers of saved blocks at which a deployment uses precomputed statistics.

    Args:
      tp: tensor-parallel size.
      dcp: decode-context-parallel size.
      bundle: whose tables; None is `load()`.
      missing: what a deployment that the bundle does not serve is: `"error"`, or `"empty"` for no numbers.

    Raises:
      UsageError: the bundle does not serve that deployment, or `missing` is something else.
    """
    return (bundle or load()).statistics_blocks(tp, dcp, missing=missing)


def ring_fault(device: torch.device | str | int | None = None) -> RingFault | None:
    """Returns what a ring consumer was waiting for when its spin budget ran out; None if none has given up.

    Makes no CUDA call, so it works after the kernel's trap has ended the CUDA context: call it when CUDA reports
    cudaErrorLaunchFailure. Only launches with a spin budget (`PreparedAttnRes.bind_ring`) give up.

    Args:
      device: the device to ask about; None is any.
    """
    if device is None or isinstance(device, int):
        return read_fault(device)
    return read_fault(torch.device(device).index)


def compile_consumer(  # noqa: PLR0913, PLR0917 - the signature that callers know
    nb: int,
    has_delta: bool,
    write: int | None,
    final: bool,
    slots: int,
    cap: int,
    arch: Arch | str | None,
    aux: bool = False,
    stats: int = 0,
    *,
    bundle: LoadedBundle | None = None,
) -> Consumer:
    """Returns a launchable from a bundle. Compiles nothing: the name is that of the call which it replaces.

    Its code is on the device when this returns. Equal arguments give the same object.

    Args:
      nb: saved blocks that are mixed.
      has_delta: the source is added to the prefix.
      write: block that receives the updated prefix; None or a negative number for none.
      final: the consumer at the end of the model.
      slots: mailbox slots; 0 for an ordinary source.
      cap: rows per mailbox slot; ignored for an ordinary source.
      arch: arch whose code is wanted: that of the bundle, or any form of the device's, e.g. `sm_90a` where a bundle for
        `sm_90` has been loaded on such a device; None takes the bundle's.
      aux: with an aux copy.
      stats: nonzero takes precomputed statistics.
      bundle: where the code comes from; None is `load()`.

    Raises:
      UsageError: `arch` is neither the bundle's nor the device's, or `cap` is not positive.
      VariantMissError: the bundle does not hold the variant.
      DriverError: the driver refused to load it.
    """
    where = bundle or load()
    _check_arch(arch, where)
    if slots and cap < 1:
        raise UsageError(f"a mailbox of {cap} rows per slot was asked for; at least 1 is needed")
    key = consumer_key((nb, has_delta, write, final))
    variant = Variant(key=key, slots=slots, aux=bool(aux), stats=bool(stats))
    from attnres_aot.runtime.consumer import take_consumer

    return take_consumer(where, variant, cap if slots else 0)


def _check_arch(arch: Arch | str | None, loaded: LoadedBundle) -> None:
    """Refuses an arch that is neither the bundle's, nor that of the device on which its code runs, in whatever form."""
    have = loaded.bundle.manifest.arch
    if arch is None or str(arch) in (have.requested, have.proven):
        return
    asked = parse_arch(str(arch))
    device = loaded.device
    capability = open_driver().capability(device.ordinal)
    if asked.capability != capability:
        raise UsageError(
            f"asked for {str(arch)!r}, but the bundle at {loaded.bundle.path} is for {have.requested!r}, and "
            f"{device.device} is of compute capability {capability[0]}.{capability[1]}; load the bundle for that arch "
            f"on such a device, or build it with {build_command(str(asked), loaded.bundle.manifest.name)}"
        )


def _load(path: str | os.PathLike[str] | None, device: TorchDevice, name: str | None) -> LoadedBundle:
    driver = open_driver()
    capability = driver.capability(device.ordinal)
    if path is not None:
        path = _absolute(path)
    with _no_collection():
        bundle = None if path is None else _read_fitting(path, capability, name, driver.cuda)
        if bundle is None:
            from attnres_aot.runtime.find.resolve import find_bundle

            bundle = find_bundle(path, capability, name=name, driver=driver.cuda)
        if is_library(bundle.path):
            from attnres_aot.runtime.shared.bundle import LibraryBundle

            return LibraryBundle(bundle, device)
        return LoadedBundle(bundle, device)


def _absolute(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Returns a path that names the same folder after the process has changed its working directory.

    Image files are read when they are loaded, which may be long after. What cannot be made absolute (an empty path, a
    working directory that is gone) is left as it is, for the search to explain.
    """
    text = os.fsdecode(path)
    try:
        return Path(text).absolute() if text else path
    except OSError:
        return path


def _read_fitting(
    path: str | os.PathLike[str], capability: tuple[int, int], name: str | None, driver: Cuda
) -> Bundle | None:
    """Reads the bundle at exactly `path` if it fits; None leaves it to the search, which finds or explains."""
    try:
        bundle = read_bundle(path)
    except BundleError:
        return None
    manifest = bundle.manifest
    fits = name in (None, manifest.name) and parse_arch(manifest.arch.proven).runs_on(capability) and not bundle.damage
    return bundle if fits and (parse_cuda(manifest.oldest_driver) or driver) <= driver else None


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keeps the garbage collector from walking all of torch because of a manifest's many small objects.

    Measured on a 2-core build machine with torch 2.13: 20 ms to find a bundle of 81 images, against 100 ms.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

"""Compiling one image with the CuTe DSL, in a process that was prepared for one arch.

`prepare_environment` must run before the DSL is imported: it is configured by environment variables that are read
at import. Only this module and `attnres_aot.kernels` import the DSL, and only inside functions here.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections import namedtuple
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnres_aot.spec.params import KERNEL_PARAMS, Param
from attnres_aot.spec.arch import Arch
from attnres_aot.kernels.driverless import stand_in_for_driver
from attnres_aot.errors import CompileError
from attnres_aot.spec.toolkits import DEFAULT_FLAVOUR
from attnres_aot.spec.variants import (
    ELEMS_PER_CTA,
    FEW_BLOCKS,
    ROWS_PER_CLUSTER,
    SYMBOL_END,
    ConsumerSpec,
    ImageSpec,
    PublishSpec,
    StatisticsSpec,
    kernel_symbol,
)

NARROW = (128, 1)
"""Threads per CTA, and 16-byte vectors per thread, where a row should be done soon."""
WIDE = (64, 2)
"""The same where the GPU is full and fewer instructions per row count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledImage:
    """One compiled image and the launch facts that its binary does not hold."""

    cubin: bytes
    """The ELF file."""
    ptx: str
    """The PTX that it was assembled from."""
    block_threads: int
    """Threads per CTA."""
    smem_dynamic_bytes: int
    """Shared memory that a launch must add, bytes per CTA."""
    rows_per_cluster: int
    """Rows that one cluster handles."""
    pdl: bool
    """The kernel may be launched with programmatic stream serialization."""
    seconds: float
    """Wall time of the compilation."""


_PROBE_BYTES = 1 << 20


def prepare_environment(
    arch: Arch, flavour: str = DEFAULT_FLAVOUR, environ: MutableMapping[str, str] = os.environ
) -> None:
    """Readies this process for compiling for `arch`: no DSL settings but the arch, no visible GPU, no driver.

    Args:
      arch: what will be compiled for.
      flavour: which of the installed compiler libraries compiles, a key of `toolkits.FLAVOURS`.
      environ: environment variables that are changed.
    """
    stand_in_for_driver(flavour)
    for name in [name for name in environ if name.startswith("CUTE_DSL_")]:
        del environ[name]
    environ["CUTE_DSL_ARCH"] = str(arch)
    environ["CUDA_VISIBLE_DEVICES"] = ""


def launch_constants(spec: ImageSpec) -> dict[str, int]:
    """The launch shape that an image of `spec` is compiled with; part of its build key."""
    threads, vectors = WIDE if isinstance(spec, ConsumerSpec) and spec.wide else NARROW
    if isinstance(spec, PublishSpec):
        vectors *= -(-spec.hidden // ELEMS_PER_CTA)
    return {
        "cluster": spec.cluster,
        "threads": threads,
        "vectors": vectors,
        "min_ctas_per_sm": _min_ctas_per_sm(spec),
        "rows_per_cluster": ROWS_PER_CLUSTER,
        "smem_dynamic_bytes": 0,
        "pdl": True,
        **_early_loads(spec),
    }


def _early_loads(spec: ImageSpec) -> dict[str, int]:
    """Whether a consumer has the registers to load early; more than 8 slots or two vectors per thread leave none."""
    return {"early_loads": int(not spec.wide and spec.slots <= 8)} if isinstance(spec, ConsumerSpec) else {}


def _min_ctas_per_sm(spec: ImageSpec) -> int:
    """How many CTAs must fit one SM together, so that those of the next grid can start beside them.

    The numbers were tuned for H 7168 with 1, 8 and 16 slots and up to 8 blocks. Other geometries near the limit of
    registers get room instead: ptxas needs a register more for one hidden size or slot count than for the next, with no
    rule to it.
    """
    if isinstance(spec, PublishSpec):
        return 8
    ragged, many = spec.hidden % ELEMS_PER_CTA != 0, (spec.nb or 0) > FEW_BLOCKS
    if isinstance(spec, StatisticsSpec):
        return 3 if ragged or many else 5
    if spec.wide:
        return 6 if ragged else 8
    crowded = spec.slots > 8 and (spec.hidden, spec.slots) != (7168, 16)
    if ragged or many or crowded:
        return 3 if spec.slots <= 8 else 2
    return 4 if spec.slots else 5


def compile_image(spec: ImageSpec, arch: Arch) -> CompiledImage:
    """Compiles the kernel for `spec`.

    Raises:
      CompileError: the process was prepared for another arch, or the DSL gave no cubin.
    """
    if os.environ.get("CUTE_DSL_ARCH") != str(arch):
        raise CompileError(
            f"this process compiles for {os.environ.get('CUTE_DSL_ARCH')!r}, asked for {str(arch)!r}: "
            "call prepare_environment first, one arch per process"
        )
    from cutlass import cute

    shape = launch_constants(spec)
    kernel = _kernel(spec, shape)
    symbol = kernel_symbol(str(spec)).removesuffix(SYMBOL_END)
    kernel.kernel.set_name_prefix(symbol, keep_mangled_name=False)
    start = time.perf_counter()
    with _dump_folder() as folder:
        options = f"--gpu-arch={arch} --keep-cubin --keep-ptx --dump-dir={folder}"
        try:
            compiled = cute.compile(kernel, *_arguments(KERNEL_PARAMS[spec.kernel]), options=options)
        except Exception as error:
            raise _full_disk(folder) or error from error
        cubin, ptx = compiled.artifacts.CUBIN, compiled.artifacts.PTX
        if not isinstance(cubin, bytes) or not _is_whole(cubin):
            raise _full_disk(folder) or CompileError(f"{spec}: the compiler wrote no whole cubin for {arch}")
    return CompiledImage(
        cubin=cubin,
        ptx=ptx,
        block_threads=shape["threads"],
        smem_dynamic_bytes=shape["smem_dynamic_bytes"],
        rows_per_cluster=shape["rows_per_cluster"],
        pdl=bool(shape["pdl"]),
        seconds=time.perf_counter() - start,
    )


@contextlib.contextmanager
def _dump_folder() -> Iterator[str]:
    """Makes a new folder in the working directory, which the compiler's files pass through; removes it at the end.

    Its name is all that the compiler gets: options are words separated by blanks, and a path may hold anything.
    """
    name = f"attnres-aot-{os.getpid()}-{secrets.token_hex(4)}"
    Path(name).mkdir()
    try:
        yield name
    finally:
        shutil.rmtree(name, ignore_errors=True)


def _is_whole(cubin: bytes) -> bool:
    """Tells whether a file is an ELF file up to its last table; on a full disk the compiler cuts it without a word."""
    if len(cubin) < 64 or not cubin.startswith(b"\x7fELF"):
        return False
    start, size, count = (int.from_bytes(cubin[at:end], "little") for at, end in ((40, 48), (58, 60), (60, 62)))
    first, entry, many = (int.from_bytes(cubin[at:end], "little") for at, end in ((32, 40), (54, 56), (56, 58)))
    return len(cubin) >= max(start + size * count, first + entry * many)


def _full_disk(folder: str) -> CompileError | None:
    """Returns an error if nothing can be written into `folder`, which is then why the compiler failed."""
    try:
        with Path(folder, "probe").open("xb") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        where = str(Path.cwd())
        return CompileError(
            f"the compiler's files cannot be written to {where!r}: {error.strerror or error}; "
            "make room there, or choose another disk with --out"
        )
    return None


def _kernel(spec: ImageSpec, shape: dict[str, int]) -> Any:
    """Makes the kernel object of `spec`; importing a kernel's module imports the DSL."""
    common = {name: shape[name] for name in ("threads", "vectors", "min_ctas_per_sm")}
    if isinstance(spec, PublishSpec):
        from attnres_aot.kernels.publish import Publish

        return Publish(hidden=spec.hidden, **common)
    common["cluster"] = shape["cluster"]
    if isinstance(spec, StatisticsSpec):
        from attnres_aot.kernels.statistics import Statistics

        return Statistics(hidden=spec.hidden, nb=spec.nb, **common)
    from attnres_aot.kernels.consumer import Consumer

    return Consumer(
        hidden=spec.hidden,
        nb=spec.nb,
        has_delta=spec.has_delta,
        final=spec.final,
        slots=spec.slots,
        early_loads=bool(shape["early_loads"]),
        **common,
    )


def _arguments(params: Sequence[Param]) -> list[Any]:
    """Placeholders: one tuple of arguments by the names of `params`, as each kernel takes them, and a stream."""
    import cutlass
    from cutlass.cute.runtime import make_fake_stream, make_ptr

    space = cutlass.cute.AddressSpace.gmem
    make = {
        "pointer": lambda: make_ptr(cutlass.BFloat16, 16, space, assumed_align=16),
        "i32": lambda: cutlass.Int32(1),
        "f32": lambda: cutlass.Float32(1.0),
    }
    parameters = namedtuple("Parameters", [param.name for param in params])  # type: ignore[misc] # noqa: PYI024
    return [parameters(*(make[param.kind]() for param in params)), make_fake_stream()]

"""Compiles a library: the launcher, the payload and nothing else, with the same bytes wherever it is done."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from attnres_aot.launcher.compilers import Compiler, find_headers, run_compiler

if TYPE_CHECKING:
    from typing_extensions import Self

SOURCE = Path(__file__).with_name("launcher.cpp")
"""The launcher."""
EMBED = Path(__file__).with_name("embed.S")
"""What includes the payload."""
TVM_FFI_FUNCTIONS = (
    "TVMFFIEnvGetStream",
    "TVMFFIErrorSetRaisedFromCStr",
    "TVMFFIFunctionCall",
    "TVMFFIFunctionCreate",
    "TVMFFIFunctionGetGlobal",
    "TVMFFIGetTypeInfo",
    "TVMFFIObjectDecRef",
    "TVMFFIObjectIncRef",
    "TVMFFIStringFromByteArray",
    "TVMFFITypeGetOrAllocIndex",
    "TVMFFITypeRegisterMethod",
)
"""Everything that a library takes from libtvm_ffi."""

_COMPILE = (
    "-std=c++17", "-O2", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti",
    "-fno-asynchronous-unwind-tables", "-fno-unwind-tables", "-fno-stack-protector", "-ffunction-sections",
    "-fdata-sections", "-g0",
)  # fmt: skip
_LINK = (
    "-shared", "-nodefaultlibs", "-s", "-Wl,--gc-sections", "-Wl,-z,defs", "-Wl,-z,now",
    "-Wl,-z,nodelete", "-Wl,-z,noexecstack", "-Wl,--build-id=none", "-Wl,--no-as-needed",
)  # fmt: skip
# nodelete: what a captured graph launches must stay, whoever lets go of the library


class LauncherObjects:
    """The launcher compiled for one host, once for all libraries that are linked from it; a context manager."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._folder = tempfile.TemporaryDirectory(prefix="attnres-launcher-")

    def __enter__(self) -> Self:
        """Compiles the launcher.

        Raises:
          CompileError: a header is missing, or the compiler failed.
        """
        headers, folder = find_headers(), Path(self._folder.name)
        for source in (SOURCE, EMBED):
            (folder / source.name).write_bytes(source.read_bytes())
        flags = [*_COMPILE, *self._host_flags()]
        run_compiler(self._compiler, [*flags, "-isystem", str(headers), "-c", SOURCE.name, "-o", "launcher.o"], folder)
        # A stand-in by which the linker knows what libtvm_ffi holds, for whichever host; the real one is never linked.
        stand_in = "".join(f"void {name}(void) {{}}\n" for name in TVM_FFI_FUNCTIONS)
        (folder / "tvm_ffi.c").write_text(stand_in, encoding="ascii")
        arguments = ["-shared", "-fPIC", "-nostdlib", "-x", "c", *self._host_flags(), "-Wl,-soname,libtvm_ffi.so"]
        run_compiler(self._compiler, [*arguments, "tvm_ffi.c", "-o", "libtvm_ffi.so"], folder)
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def link(self, name: str, payload: bytes) -> bytes:
        """Returns the bytes of a library of this file name that embeds a payload.

        Raises:
          CompileError: the compiler failed.
        """
        folder = Path(self._folder.name)
        (folder / "payload.bin").write_bytes(payload)
        host = list(self._host_flags())
        run_compiler(self._compiler, [*host, "-c", EMBED.name, "-o", "embed.o"], folder)
        # By file name where libc holds them by now: an older one does not, and needs them.
        system = ["-ldl", "-lpthread"] if self._compiler.is_zig else ["-l:libdl.so.2", "-l:libpthread.so.0", "-lgcc"]
        libraries = ["-L.", "-ltvm_ffi", *system, "-lc"]
        arguments = [
            *_LINK,
            *self._compiler.host.link_flags,
            f"-Wl,-soname,{name}",
            "launcher.o",
            "embed.o",
            *libraries,
            "-o",
            "library.so",
        ]
        run_compiler(self._compiler, [*host, *arguments], folder)
        return (folder / "library.so").read_bytes()

    def _host_flags(self) -> tuple[str, ...]:
        host = self._compiler.host
        if self._compiler.is_zig:
            return (f"-mcpu={'x86_64' if host.name == 'x86_64' else 'generic'}",)
        return (*host.flags, *host.gnu_flags)


def library_name(bundle: str, host: str) -> str:
    """Returns the file name of a library.

    Args:
      bundle: configuration and archs, e.g. `kimi_k3_sm_100`.
      host: name of a host.
    """
    return f"attnres_{bundle}.{host}.so"

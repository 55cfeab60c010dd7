"""Finds what compiles a launcher for a host: a C++ compiler for it, and the headers of TVM-FFI."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from attnres_aot.errors import CompileError, UsageError, did_you_mean

OLDEST_GLIBC = "2.17"
"""What zig compiles for; g++ takes what this machine has."""
_SECONDS = 300.0  # zig compiles what it links at first use


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A kind of machine that a library is for."""

    name: str
    """As `uname -m` calls it, and as it stands in the library's file name."""
    machine: str
    """ELF machine, as pyelftools names it."""
    flags: tuple[str, ...]
    """Compiler flags for a CPU of the oldest kind."""
    gnu_flags: tuple[str, ...]
    """Beside them for GCC."""
    link_flags: tuple[str, ...]
    """For linking."""


HOSTS = {
    "x86_64": Host(
        name="x86_64",
        machine="EM_X86_64",
        flags=("-march=x86-64",),
        gnu_flags=("-fcf-protection=none",),
        link_flags=("-Wl,-z,relro",),
    ),
    "aarch64": Host(
        name="aarch64",
        machine="EM_AARCH64",
        flags=("-march=armv8-a",),
        gnu_flags=("-mno-outline-atomics",),
        link_flags=("-Wl,-z,norelro",),  # pages may have 64 KB, which a file with relro would be filled up to
    ),
}
"""Hosts that libraries can be built for: GB200, GB300 and GH200 have aarch64 ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """A C++ compiler that makes libraries for one host."""

    host: Host
    """For which host."""
    command: tuple[str, ...]
    """How it is called, without arguments of a compilation."""
    version: str
    """First line of what it says of itself."""
    is_zig: bool
    """It is zig's, which brings its own C library."""


def parse_host(name: str) -> Host:
    """Returns the host that a name means.

    Raises:
      UsageError: it is none; lists them.
    """
    if name not in HOSTS:
        raise UsageError(f"{name!r:.80} is no host{did_you_mean(name, HOSTS)}; choose from {', '.join(HOSTS)}")
    return HOSTS[name]


def this_host() -> str:
    """Returns the name of this machine's kind, whether a library can be built for it or not."""
    return platform.machine()


def find_compiler(host: Host) -> Compiler:
    """Returns a compiler for a host: this machine's g++, a cross g++, or zig.

    Raises:
      CompileError: there is none; says what to install.
    """
    names = [f"{host.name}-linux-gnu-g++", *(["g++"] if host.name == this_host() else [])]
    for name in reversed(names):
        if (path := shutil.which(name)) is not None:
            return Compiler(host=host, command=(path,), version=_version((path,)), is_zig=False)
    if importlib.util.find_spec("ziglang") is not None:
        command = (sys.executable, "-m", "ziglang")
        target = ("cc", "-target", f"{host.name}-linux-gnu.{OLDEST_GLIBC}")  # c++ would build a C++ library first
        version = _version((*command, "version"), "")
        return Compiler(host=host, command=(*command, *target), version=f"zig {version}", is_zig=True)
    package = "g++" if host.name == this_host() else f"g++-{host.name.replace('_', '-')}-linux-gnu"
    raise CompileError(
        f"no C++ compiler for {host.name} hosts: {' and '.join(names)} are not on PATH; install Debian's {package}, or "
        "`pip install ziglang`, which compiles for every host"
    )


def find_headers() -> Path:
    """Returns the include folder of TVM-FFI.

    Raises:
      CompileError: apache-tvm-ffi is not installed.
    """
    spec = importlib.util.find_spec("tvm_ffi")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        folder = Path(place) / "include"
        if (folder / "tvm" / "ffi" / "extra" / "c_env_api.h").is_file():
            return folder
    raise CompileError(
        "building a shared object needs the headers of TVM-FFI: `pip install 'attnres-aot[tvm-ffi]'`, or "
        "`pip install apache-tvm-ffi`"
    )


def run_compiler(compiler: Compiler, arguments: list[str], folder: Path) -> None:
    """Runs a compiler in a folder.

    Raises:
      CompileError: it failed; carries what it said.
    """
    command = [*compiler.command, *arguments]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{' '.join(compiler.command)} cannot be run: {error}") from error
    if done.returncode:
        raise CompileError(f"{' '.join(command)} failed:\n{(done.stderr or done.stdout).strip()[:4000]}")


def _version(command: tuple[str, ...], argument: str = "--version") -> str:
    try:
        call = [*command, *([argument] if argument else [])]
        done = subprocess.run(call, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{' '.join(command)} cannot be run: {error}") from error
    return (done.stdout.splitlines() or [""])[0].strip()

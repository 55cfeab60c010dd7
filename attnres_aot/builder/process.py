"""One worker process as the builder sees it: starting, talking to, and ending it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from attnres_aot.builder.sources import PACKAGE
from attnres_aot.kernels.driverless import make_shadow
from attnres_aot.spec.arch import Arch

OUTPUT_CHARS = 4000
"""Most characters of a worker's own output that a failure shows."""

_EXIT_SECONDS = 5.0
_HIDDEN_GPUS = {"CUDA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": "void"}
_ZIPPED = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
_PROGRAM = """
import importlib.util, json, sys
package, paths = json.loads(sys.argv.pop(1))
sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
start = package + "/__init__.py"
spec = importlib.util.spec_from_file_location("attnres_aot", start, submodule_search_locations=[package])
sys.modules["attnres_aot"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from attnres_aot.builder.worker import main
sys.exit(main())
"""
"""What a worker runs: the program `build.worker` of this very package, with the search path that it is given."""


def worker_environment(scratch: Path) -> dict[str, str]:
    """Returns the environment of a worker: this process's, blind to GPUs and without settings of the compiler.

    `CUTE_DSL_*` variables change what is compiled without being part of any build key, so none of them passes.
    Temporary files go to `scratch`, where the next build cleans up should this one be killed.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CUTE_DSL_")}
    libraries = os.pathsep.join([make_shadow(scratch), *filter(None, [kept.get("LD_LIBRARY_PATH")])])
    return {**kept, **_HIDDEN_GPUS, "LD_LIBRARY_PATH": libraries, "TMPDIR": str(scratch.absolute())}


def worker_command() -> list[str]:
    """Returns the command that starts a worker; its arguments follow.

    The interpreter is isolated (`-I`): what PYTHON* variables and the working directory would change has no effect. It
    keeps no output back (`-u`), so that the log of a worker that dies is whole.
    """
    flags = ["-I", "-u", *(["-B"] if sys.dont_write_bytecode else [])]
    return [sys.executable, *flags, "-c", _PROGRAM, json.dumps([str(PACKAGE), _search_path()])]


def _search_path() -> list[str]:
    """Returns this process's search path with the standard library first.

    A package that is installed beside the compiler, such as an old back-port of `enum`, must not come before the
    module of the standard library that has its name.
    """
    folders = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    folders |= {folder / "lib-dynload" for folder in folders}
    paths = [Path(path).absolute() for path in sys.path if path]
    standard = [path for path in paths if path in folders or path.name == _ZIPPED]
    return list(map(str, [*standard, *(path for path in paths if path not in standard)]))


class WorkerProcess:
    """A worker that compiles for one arch."""

    def __init__(self, compiler: str, arch: Arch, flavour: str, scratch: Path) -> None:
        """Starts the process; `scratch` becomes its working folder and `scratch.log` its output."""
        scratch.mkdir(parents=True)
        self._log = scratch.with_suffix(".log")
        self._mark = 0
        self._buffer = b""
        self._reply, theirs = os.pipe()
        os.set_blocking(self._reply, False)
        command = [*worker_command(), "--compiler", compiler, "--arch", str(arch), "--flavour", flavour]
        try:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [*command, "--reply", str(theirs), "--parent", str(os.getpid())],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    cwd=scratch,
                    env=worker_environment(scratch),
                    pass_fds=(theirs,),
                    start_new_session=True,
                )
        except OSError:
            os.close(self._reply)
            raise
        finally:
            os.close(theirs)

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable when the worker replies or ends."""
        return self._reply

    def send(self, job: dict[str, Any]) -> None:
        """Hands over a job; a worker that is gone shows in the next `receive`."""
        self._mark = self._log.stat().st_size
        pipe = self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            if pipe is not None:
                pipe.write(json.dumps(job).encode("ascii") + b"\n")
                pipe.flush()

    def receive(self) -> list[dict[str, Any]] | None:
        """Returns the complete replies that have arrived, or None when the worker has ended.

        Raises:
          ValueError: a reply is not a JSON object.
        """
        try:
            data = os.read(self._reply, 1 << 20)
        except BlockingIOError:
            return []
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        replies = [json.loads(line) for line in lines]
        if not all(isinstance(reply, dict) and "event" in reply for reply in replies):
            raise ValueError("a reply is not an object with an event")
        return replies

    def retire(self) -> None:
        """Lets the worker end by itself once it has nothing left to do."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def how_it_ended(self) -> str:
        """Says in words how a worker that ended by itself did so."""
        try:
            code = self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its reply pipe and went on"
        if code >= 0:
            return f"exited with status {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = "unknown"
        return f"was killed by signal {-code} ({name})"

    def output(self) -> str:
        """Returns the end of what the worker has printed since it got its last job."""
        with contextlib.suppress(OSError), self._log.open("rb") as log:
            log.seek(self._mark)
            return log.read().decode("utf-8", "replace").strip()[-OUTPUT_CHARS:]
        return ""

    def stop(self) -> None:
        """Ends the worker and whatever it started, at once; harmless when it is gone."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self.retire()
        if self._reply >= 0:
            os.close(self._reply)
            self._reply = -1

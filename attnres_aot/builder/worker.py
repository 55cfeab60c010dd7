"""The program of a worker process: compiles the images it is told to, one after another, and replies on a pipe.

Started by `build.process`, with the builder's own package and search path. Jobs come in as JSON lines on standard
input and replies go out as JSON lines on the descriptor `--reply`; what the compiler prints to standard output or
error lands in the worker's log.

    job     {"kernel": "consumer", "key": KEY, "spec": {...}}
    replies {"event": "ready"} once, then for each job one of
            {"event": "done", "image": BASE64, "seconds": S, "peak_bytes": N}
            {"event": "failed", "reason": TEXT, "peak_bytes": N}

The compiler module is named by `--compiler`. It offers `prepare_environment(arch, flavour)`, called once before
anything else, and `compile_image(spec, arch)`.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from attnres_aot.builder.image import FinishedImage, encode_image
from attnres_aot.errors import AttnResError
from attnres_aot.spec.arch import Arch, parse_buildable_arch
from attnres_aot.spec.toolkits import parse_flavour
from attnres_aot.spec.variants import ConsumerSpec, ImageSpec, PublishSpec, StatisticsSpec

SPECS: dict[str, Callable[..., ImageSpec]] = {spec.kernel: spec for spec in (ConsumerSpec, StatisticsSpec, PublishSpec)}
"""Kernel -> class of its image specs."""

_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves jobs until standard input ends."""
    parser = argparse.ArgumentParser(prog="attnres_aot.builder.worker")
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--arch", required=True, type=parse_buildable_arch)
    parser.add_argument("--flavour", required=True, type=parse_flavour)
    parser.add_argument("--reply", required=True, type=int)
    parser.add_argument("--parent", required=True, type=int)
    options = parser.parse_args(arguments)
    if not _die_with(options.parent):
        return 1
    with os.fdopen(options.reply, "w", encoding="ascii") as reply:
        compiler = importlib.import_module(options.compiler)
        compiler.prepare_environment(options.arch, options.flavour)
        _send(reply, {"event": "ready"})
        for line in sys.stdin:
            _send(reply, _serve(compiler, json.loads(line), options.arch))
    return 0


def _die_with(parent: int) -> bool:
    """Asks the kernel to kill this process when its parent dies; False when that has happened already.

    Without this a compiler that hangs would outlive a builder that was killed.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def _serve(compiler: Any, job: dict[str, Any], arch: Arch) -> dict[str, Any]:
    try:
        image, seconds = _compile(compiler, job, arch)
    except Exception as error:  # noqa: BLE001  # Whatever the compiler raises fails this job and must not end the others.
        first_line = (str(error).strip().splitlines() or ["no message"])[0]
        ours = isinstance(error, AttnResError)
        if not ours:
            with contextlib.suppress(OSError):  # the log's disk may be what is full
                traceback.print_exc()
                sys.stderr.flush()
        reason = first_line if ours else f"{type(error).__name__}: {first_line}"
        return {"event": "failed", "reason": reason, "peak_bytes": _peak_bytes()}
    encoded = base64.b64encode(encode_image(image)).decode("ascii")
    return {"event": "done", "image": encoded, "seconds": seconds, "peak_bytes": _peak_bytes()}


def _compile(compiler: Any, job: dict[str, Any], arch: Arch) -> tuple[FinishedImage, float]:
    spec = SPECS[job["kernel"]](**job["spec"])
    compiled = compiler.compile_image(spec, arch)
    return FinishedImage(key=job["key"], cubin=compiled.cubin), float(compiled.seconds)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _send(reply: TextIO, message: dict[str, Any]) -> None:
    reply.write(json.dumps(message) + "\n")
    reply.flush()


if __name__ == "__main__":
    sys.exit(main())

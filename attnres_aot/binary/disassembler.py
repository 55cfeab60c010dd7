"""Finding NVIDIA's disassembler and running it on one image."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from attnres_aot.errors import AttnResError

PACKAGE = "nvidia-cuda-nvdisasm"
"""The PyPI package that holds the preferred disassembler."""
TIMEOUT_S = 120
"""Time limit of one run; an image takes well under a second."""

_TOOLS = {"nvdisasm": ("--print-code",), "cuobjdump": ("-sass",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Disassembler:
    """A disassembler that is installed here."""

    path: Path
    """The program."""
    options: tuple[str, ...]
    """Options that make it print the code of a cubin."""


def find_disassembler(folders: Iterable[Path] | None = None) -> Disassembler:
    """Finds `nvdisasm` or else `cuobjdump` on PATH or among the installed PyPI packages.

    Args:
      folders: Where to look instead.

    Raises:
      AttnResError: neither is there; says how to install one.
    """
    places = list(_folders() if folders is None else folders)
    for name, options in _TOOLS.items():
        found = shutil.which(name, path=os.pathsep.join(map(str, places)))
        if found is not None:
            return Disassembler(path=Path(found), options=options)
    raise AttnResError(
        f"no disassembler: neither {' nor '.join(_TOOLS)} is on PATH or in this environment; "
        f"install one: `pip install {PACKAGE}`"
    )


def disassemble(cubin: bytes, tool: Disassembler) -> str:
    """Returns the SASS of a cubin as text.

    Raises:
      AttnResError: the tool cannot be run, fails, or takes too long.
    """
    with tempfile.TemporaryDirectory(prefix="attnres-aot-") as folder:
        file = Path(folder) / "image.cubin"
        file.write_bytes(cubin)
        try:
            result = subprocess.run(
                [tool.path, *tool.options, file], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise AttnResError(f"{tool.path}: {error}; install another: `pip install {PACKAGE}`") from error
    if result.returncode:
        reason = result.stderr.replace(str(file), file.name).strip()
        raise AttnResError(
            f"{tool.path}: exit status {result.returncode}: {reason:.1000}; it may be older than the image's arch: "
            f"`pip install --upgrade {PACKAGE}`"
        )
    return result.stdout


def _folders() -> Iterator[Path]:
    yield from (Path(folder) for folder in os.get_exec_path() if folder)
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(Path(place).glob("*/bin"))

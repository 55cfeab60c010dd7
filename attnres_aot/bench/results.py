"""The records of a benchmark, and writing and reading them as JSON. Pure but for the file."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from attnres_aot.bundle.manifest import to_json
from attnres_aot.errors import UsageError
from attnres_aot.input_file import read_input
from attnres_aot.runtime.launch.pdl import Pdl

SCHEMA = 1
"""Number of the result format."""
MAX_REPORT_BYTES = 16 << 20
"""Largest saved result that is read."""
WARM, COLD = "warm", "cold"
"""States of the L2."""


class Key(NamedTuple):
    """Which measurement a number is; equal keys of two results are compared."""

    work: str
    """Kind of work, or `host`."""
    variant: str
    """Variant name, or the way of launching."""
    rows: int
    """Rows of a launch."""
    pdl: Pdl
    """Launch mode."""
    l2: str
    """WARM or COLD."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """GPU time of one point."""

    work: str
    """Kind of work: see `points`."""
    variant: str
    """Variant name."""
    rows: int
    """Rows of a launch."""
    pdl: Pdl
    """Launch mode."""
    l2: str
    """WARM or COLD."""
    us: float
    """Microseconds per call."""
    with_copy_us: float | None = None
    """Of a ring consumer: time with the copy before it, of which `us` is what remains."""
    copy_us: float | None = None
    """Of a ring consumer: time of the copy alone."""
    bytes_moved: int = 0
    """Bytes that the contract makes it read and write."""
    floor_us: float = 0.0
    """Time of moving those bytes at the bandwidth measured in the same run."""

    @property
    def key(self) -> Key:
        """What the number is."""
        return Key(work=self.work, variant=self.variant, rows=self.rows, pdl=self.pdl, l2=self.l2)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmptyTime:
    """GPU time of a kernel that does nothing, in the launch shape of a consumer."""

    rows: int
    """Rows, each one cluster."""
    pdl: Pdl
    """Launch mode."""
    us: float
    """Microseconds per launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What the same machine did in the same run with work that is no kernel of ours."""

    memory_bytes_per_us: float
    """Bytes read plus bytes written by a large device-to-device copy, per microsecond."""
    l2_bytes_per_us: float
    """The same for a copy that stays in the L2."""
    empty: tuple[EmptyTime, ...] = ()
    """Times of the empty kernel."""
    notes: tuple[str, ...] = ()
    """What could not be measured, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCost:
    """Host time of one way of launching."""

    name: str
    """How."""
    us: float
    """Microseconds per launch."""
    ratio: float
    """As a multiple of the bare driver call in the same run."""
    limit: float | None = None
    """What the ratio should not exceed."""

    @property
    def over(self) -> bool:
        """The ratio exceeds its limit."""
        return self.limit is not None and self.ratio > self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdStart:
    """What a process pays until its first launch: medians over processes, milliseconds."""

    phases_ms: dict[str, float]
    """Phase -> time, in order: import, load, bind, first launch."""
    total_ms: float
    """All phases."""
    limit_ms: float
    """What they should not exceed together."""
    consumers: int
    """Consumers bound."""
    preload_ms: float
    """Loading every image of the bundle afterwards, which is not in the total."""
    import_ms: float
    """`import attnres_aot` in a bare interpreter."""
    import_limit_ms: float
    """What that should not exceed."""
    foreign: tuple[str, ...]
    """Modules loaded that are neither the standard library's, torch's nor ours; should be none."""
    processes: int
    """Processes timed."""
    bytecode: bool
    """The package's modules were compiled to bytecode before, as installing does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    """Many launches from many threads."""

    launches: int
    """Launches made."""
    threads: int
    """Threads launching."""
    streams: int
    """Streams launched on."""
    seconds: float
    """How long it took."""
    host_growth_bytes: int
    """Growth of this process's resident memory since the warm-up."""
    device_growth_bytes: int
    """Growth of the device memory in use since the warm-up."""
    problems: tuple[str, ...]
    """What went wrong; empty when nothing did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where and how a result was obtained."""

    bundle: str
    """Name and arch of the bundle."""
    manifest_sha256: str
    """Digest of its manifest."""
    gpu: str
    """Product name."""
    driver: str
    """Driver version."""
    torch: str
    """Torch version."""
    date: str
    """Day of the run, YYYY-MM-DD."""
    launches: int
    """Launches per graph."""
    replays: int
    """Timed replays, of which the median counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that a run measured; parts that were not asked for are empty."""

    setting: Setting
    """Where and how."""
    context: Context | None = None
    """Floors."""
    timings: tuple[Timing, ...] = ()
    """GPU times."""
    host: tuple[HostCost, ...] = ()
    """Host costs."""
    cold_start: ColdStart | None = None
    """Cold start."""
    soak: Soak | None = None
    """Soak."""


def report_json(report: Report) -> dict[str, Any]:
    """Returns a report as plain JSON data."""
    return {"schema": SCHEMA, **to_json(report)}


def numbers(report: Mapping[str, Any], where: str) -> dict[Key, float]:
    """Returns every comparable number of a report's JSON data, in microseconds.

    Raises:
      UsageError: it is not the data of a report, or of another schema.
    """
    if report.get("schema") != SCHEMA:
        raise UsageError(
            f"{where}: result schema {report.get('schema')!r:.80}, but this attnres-aot reads {SCHEMA}; measure again"
        )
    try:
        found = {
            Key(timing["work"], timing["variant"], timing["rows"], timing["pdl"], timing["l2"]): _us(timing["us"])
            for timing in report.get("timings", ())
        }
        for cost in report.get("host", ()):
            found[Key("host", cost["name"], 1, False, WARM)] = _us(cost["us"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{where}: not a result of 'attnres-aot bench --save': {error!r:.200}") from error
    strange = [key for key in map(tuple, found) if not _is_key(key)]
    if strange or not isinstance(report.get("soak") or {}, dict):
        shown = strange[0] if strange else report["soak"]
        raise UsageError(f"{where}: not a result of 'attnres-aot bench --save': found {shown!r:.200}")
    return found


def _is_key(values: tuple[Any, ...]) -> bool:
    """Tells whether what JSON gave has the types of a `Key`."""
    return all(map(isinstance, values, (str, str, int, bool | str, str)))


def _us(value: Any) -> float:
    """Reads a time in microseconds.

    Raises:
      ValueError, TypeError, OverflowError: it is none.
    """
    us = float(value)
    if not (math.isfinite(us) and (us <= 0 or 1e-9 < us < 1e12)):
        raise ValueError(f"a time of {us} us")
    return us


def read_report(path: Path) -> dict[str, Any]:
    """Reads a saved report as JSON data.

    Raises:
      UsageError: the file cannot be read or is not JSON.
    """
    try:
        raw = read_input(path, MAX_REPORT_BYTES)
        if len(raw) > MAX_REPORT_BYTES:
            raise ValueError(f"larger than {MAX_REPORT_BYTES} bytes")
        data = json.loads(raw)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise UsageError(f"{path}: not a result of 'attnres-aot bench --save': nested too deeply") from error
    except ValueError as error:
        raise UsageError(f"{path}: not a result of 'attnres-aot bench --save': {error}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{path}: not a result of 'attnres-aot bench --save': found {type(data).__name__}")
    return data


def write_atomically(path: Path, text: str) -> None:
    """Writes a file so that it is either the old or the new one, whatever happens.

    Raises:
      UsageError: it cannot be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from error

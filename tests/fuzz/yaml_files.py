"""Mutated configuration files, by the hundred thousand: none may end in a traceback, a long answer or a long wait.

    python tests/fuzz/yaml_files.py --count 200000 --jobs 2 --seed 1

Each file is made of good ones by a few changes, from flipped bytes to spliced halves and hostile values. It is read as
`--config` is. What is accepted is planned, and one file in ten goes through `attnres-aot plan` as a whole. The limits
are 2 s of processor time and 512 MB for each file, and 64 KB of answer. A run says by its seed and number which file
breaks one, and writes it out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from attnres_aot.cli.entry import main as run_command
from attnres_aot.config.reader import parse_config
from attnres_aot.errors import ConfigError
from attnres_aot.plan.plan import plan
from attnres_aot.spec.arch import Arch

sys.path.insert(0, str(Path(__file__).parents[1]))
from fuzz.yaml_mutations import corpus, make

MAX_SECONDS = 2.0
"""Processor time of one file."""
MAX_BYTES = 512 << 20
"""Address space that one file may add to what the process has at its start."""
MAX_ANSWER = 64 << 10
"""Bytes of one answer."""
SM90 = Arch(9, 0)


@dataclass(frozen=True)
class Outcome:
    """What became of one file."""

    kind: str
    """`accepted`, `refused`, or what limit it broke."""
    detail: str = ""
    """For a broken limit: how."""


def judge(data: bytes, *, whole: bool, folder: Path) -> Outcome:
    """Reads one file and says what became of it.

    Args:
      data: the file.
      whole: through the command line, as `attnres-aot plan --config`.
      folder: where the file is then written.
    """
    start = time.process_time()
    try:
        outcome = _command(data, folder) if whole else _read(data)
    except MemoryError:
        outcome = Outcome("memory", f"more than {MAX_BYTES} bytes")
    except BaseException:  # noqa: BLE001 - whatever it is, it is no answer
        outcome = Outcome("traceback", traceback.format_exc())
    seconds = time.process_time() - start
    return outcome if seconds <= MAX_SECONDS else Outcome("time", f"{seconds:.2f} s")


def _read(data: bytes) -> Outcome:
    try:
        config = parse_config(data, "mutated.yaml")
    except ConfigError as error:
        if not all(line.startswith("mutated.yaml:") for line in error.problems):
            return Outcome("answer", f"a line without the file: {error.problems}")
        return _weigh("refused", str(error).encode())
    plan(config, SM90)
    return Outcome("accepted")


def _command(data: bytes, folder: Path) -> Outcome:
    path = folder / "mutated.yaml"
    path.write_bytes(data)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = run_command(["plan", "--arch", "sm_90", "--config", str(path)])
    answer = (out.getvalue() + err.getvalue()).encode()
    if status not in (0, 2) or (status == 2) != err.getvalue().startswith("error:"):
        return Outcome("answer", f"status {status}: {answer[:2000]!r}")
    return _weigh("refused" if status else "accepted", answer)


def _weigh(kind: str, answer: bytes) -> Outcome:
    return Outcome(kind) if len(answer) <= MAX_ANSWER else Outcome("answer", f"{len(answer)} bytes")


def run(seed: int, numbers: range, out: Path) -> Counter[str]:
    """Judges the files of these numbers; writes those that break a limit, with what they broke, into `out`."""
    before = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (before + MAX_BYTES, hard))
    good, seen = corpus(), Counter()
    with tempfile.TemporaryDirectory(prefix="attnres-aot-fuzz-") as folder:
        for number in numbers:
            data = make(random.Random(f"{seed}/{number}"), good)
            outcome = judge(data, whole=number % 10 == 0, folder=Path(folder))
            seen[outcome.kind] += 1
            if outcome.kind not in ("accepted", "refused"):
                out.mkdir(parents=True, exist_ok=True)
                (out / f"{seed}-{number}.yaml").write_bytes(data)
                (out / f"{seed}-{number}.txt").write_text(
                    f"{outcome.kind}: {outcome.detail}\n", errors="backslashreplace"
                )
    return seen


def shares(count: int, jobs: int) -> Iterator[range]:
    """Deals the numbers below `count` out to `jobs`."""
    return (range(first, count, jobs) for first in range(jobs))


def main() -> int:
    """Runs the command line; the exit status says whether a limit was broken."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=200_000, help="files")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--seed", type=int, default=1, help="other files for another number")
    parser.add_argument("--out", type=Path, default=Path("fuzz"), help="folder for files that break a limit")
    args = parser.parse_args()
    if args.jobs == 1:
        seen = run(args.seed, range(args.count), args.out)
    else:
        with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
            tasks = [(args.seed, share, args.out) for share in shares(args.count, args.jobs)]
            seen = sum(pool.starmap(run, tasks), Counter())
    broken = sum(seen.values()) - seen["accepted"] - seen["refused"]
    print(", ".join(f"{kind} {number}" for kind, number in sorted(seen.items())))
    print(f"{broken} of {args.count} files broke a limit" + (f"; see {args.out}" if broken else ""))
    return 1 if broken or sum(seen.values()) != args.count else 0


if __name__ == "__main__":
    sys.exit(main())

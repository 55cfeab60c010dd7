"""Changes bundles in every way that can be drawn; counts what is taken for a bundle or ends in anything but a refusal.

Run as `python tests/fuzz/bundles.py`; what is drawn depends on `--seed` alone.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "unit" / "bundle"), str(Path(__file__).parents[2])]

from making import CONFIG, MadeBundle, make_bundle  # noqa: E402 - the path is set above

from attnres_aot.bundle.manifest import MAX_MANIFEST_BYTES, seal  # noqa: E402
from attnres_aot.bundle.reader import read_bundle  # noqa: E402
from attnres_aot.errors import AttnResError  # noqa: E402
from attnres_aot.plan.plan import Selection  # noqa: E402
from attnres_aot.runtime.find.places import look_at_bundle, place_at  # noqa: E402
from attnres_aot.runtime.find.resolve import Request, resolve  # noqa: E402
from attnres_aot.verify.bundle_check import verify_bundle  # noqa: E402

MAX_ANSWER = 64 << 10
"""Most characters of one answer."""
SMALL = Selection(only=("nb1-delta", "nb2-delta-final-stats", "nb1-delta-write1-ring1"))
"""Variants of a bundle of few images that has one of every kernel."""
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 1 << 31, (1 << 63) - 1, -(1 << 63), 10**17, 10**40, 0.5, 1e308),
    *("", "x", "a" * 5000, "sm_" + "9" * 5000, "\ud800", "\x00", "../x", "h1-nb1", "nb" + "9" * 5000, "publish"),
    *("1-99999999:1", "9" * 5000, "1:1," * 2000, "0" * 64, "consumer", "statistics", "sm_90", "sm_100a"),
    *([], {}, [[]], [None] * 50, {"": {}}, [1, 2], [["a"]]),
)
"""What takes a value's place in a manifest."""
__all__ = ["CONFIG", "Judge", "Request", "bombs", "make_bundle", "mutations", "one_byte_changes", "place_at", "resolve"]


def small_bundle(folder: Path) -> MadeBundle:
    """Makes the bundle that is changed."""
    return make_bundle(folder, selection=SMALL)


def change_a_byte(data: bytes, draw: random.Random) -> bytes:
    """Puts another byte in the place of one."""
    at = draw.randrange(len(data))
    return data[:at] + bytes([data[at] ^ draw.randrange(1, 256)]) + data[at + 1 :]


def change_bytes(data: bytes, draw: random.Random) -> bytes:
    """Cuts, doubles, removes or overwrites a part of a file."""
    first, last = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    if draw.random() < 0.5:
        last = min(last, first + 40)
    part = data[first:last]
    other = draw.choice((b"", part * 2, bytes(draw.randrange(256) for _ in range(draw.randrange(8))), data[last:]))
    return data[:first] + other + (data[last:] if draw.random() < 0.9 else b"")


def change_values(data: bytes, draw: random.Random) -> bytes:
    """Changes one to three values of a manifest, mostly with its digest made anew."""
    raw = json.loads(data)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        _change_value(raw, draw)
    text = seal(raw) if draw.random() < 0.9 else json.dumps(raw, indent=1, sort_keys=True).encode() + b"\n"
    return text.replace(b'"schema"', b'"schema": 0,\n "schema"', 1) if draw.random() < 0.01 else text


def _change_value(raw: Any, draw: random.Random) -> None:
    place, key = draw.choice(list(_places(raw)))
    kind = draw.randrange(6)
    if kind == 0:
        place.pop(key)
    elif kind == 1 and isinstance(place, dict):
        place[draw.choice(("extra", "", "name", "\u00e9", "a" * 3000))] = draw.choice(VALUES)
    elif kind == 2 and isinstance(place, list):
        place.insert(draw.randrange(len(place) + 1), copy.deepcopy(place[key]))
    elif kind == 3:
        other, there = draw.choice(list(_places(raw)))
        place[key], other[there] = copy.deepcopy(other[there]), copy.deepcopy(place[key])
    elif kind == 4 and type(place[key]) is int:
        place[key] += draw.choice((-1, 1, 2, 64))
    else:
        place[key] = copy.deepcopy(draw.choice(VALUES))


def _places(raw: Any) -> Iterator[tuple[Any, Any]]:
    """Yields (container, key) of every value in JSON data."""
    for key, value in list(raw.items()) if isinstance(raw, dict) else list(enumerate(raw)):
        yield raw, key
        if isinstance(value, dict | list):
            yield from _places(value)


def bombs(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yields manifests that are as large and as hard to read or to judge as they may be."""
    raw, most = json.loads(data), MAX_MANIFEST_BYTES

    def with_(change: Callable[[dict[str, Any]], object]) -> bytes:
        made = copy.deepcopy(raw)
        change(made)
        return seal(made)

    def many(field: str, count: int, **fields: Any) -> Callable[[dict[str, Any]], object]:
        def change(made: dict[str, Any]) -> None:
            made[field] = [{**made[field][0], "name": f"x{index}", **fields} for index in range(count)]

        return change

    yield "too large", b" " * (most + 1)
    yield "brackets", b"[" * most
    yield "empty lists", b"[" + b"[]," * 160_000 + b"[]]"
    yield "nested objects", b'{"a":' * 100_000
    yield "one number", b'{"schema": ' + b"9" * (most - 20) + b"}"
    yield "numbers", b"[" + b"1," * (most // 2 - 2) + b"1]"
    yield "fractions", b"[" + b"1.5," * (most // 4 - 2) + b"1]"
    yield "texts", b"[" + b'"ab",' * (most // 5 - 2) + b"1]"
    yield "one text", seal({**raw, "name": "x" * (most - len(data) - 10)})
    yield "keys", b"{" + b",".join(b'"k%d":1' % index for index in range(490_000)) + b"}"
    yield "key twice", b"{" + b",".join(b'"k%d":1' % index for index in [*range(480_000), 0]) + b"}"
    yield "surrogate", with_(lambda made: made.update(name="\ud800"))
    yield "arch", with_(lambda made: made["arch"].update(proven="sm_" + "9" * 5000))
    yield "span", with_(lambda made: made["tables"][1].update(attn_stats="1-99999999:1"))
    yield "spans", with_(lambda made: made["tables"][1].update(attn_stats="1:1," * (1 << 20)))
    yield "spans within bounds", with_(lambda made: made["tables"][1].update(attn_stats="1:1," * (1 << 17) + "1:1"))
    yield "images", with_(many("images", 4000))
    yield "variants", with_(many("variants", 12_000))
    yield "variants of a name", with_(many("variants", 12_000, name="nb1-delta"))
    yield (
        "parameters",
        with_(lambda made: made["abis"].update({f"abi{n}": made["abis"]["consumer"] for n in range(900)})),
    )
    yield "components", with_(lambda made: made.update(toolchain={f"part{n}": "1" for n in range(200_000)}))
    pairs = [[tp, 1] for tp in range(1, 3000)]
    yield "deployments", with_(lambda made: [record.update(deployments=pairs) for record in made["variants"]])


class Judge:
    """Counts outcomes; an answer that is no refusal, or too long, is a failure that is shown."""

    def __init__(self, bundle: MadeBundle) -> None:
        self.bundle = bundle
        self.asked: Counter[str] = Counter()
        self.taken: Counter[str] = Counter()
        self.failures: list[str] = []
        self.slowest = 0.0

    def read(self, what: str) -> None:
        """Reads the bundle as `load` does."""
        self.asked[f"{what}: load"] += 1
        try:
            start = time.process_time()
            bundle = read_bundle(self.bundle.path)
        except AttnResError as error:
            self._answer(what, str(error), start)
        except Exception as error:  # noqa: BLE001  # anything else is what is looked for
            self.failures.append(f"{what}: read: {type(error).__name__}: {error!s:.300}")
        else:
            self._answer(what, "".join(bundle.damage.values()), start)
            self.taken[f"{what}: load"] += not bundle.damage

    def verify(self, what: str) -> None:
        """Verifies the bundle."""
        self.asked[f"{what}: verify"] += 1
        try:
            start = time.process_time()
            report = verify_bundle(self.bundle.path)
        except Exception as error:  # noqa: BLE001  # likewise
            self.failures.append(f"{what}: verify: {type(error).__name__}: {error!s:.300}")
        else:
            self._answer(what, "\n".join([*report.problems, *report.notes]), start)
            self.taken[f"{what}: verify"] += report.ok

    def search(self, what: str) -> None:
        """Looks at the bundle as a search does, which goes on beside it."""
        try:
            start = time.process_time()
            place = place_at("here", str(self.bundle.path))
            look_at_bundle(self.bundle.path)
            answer = "\n".join(resolve(Request(capability=(10, 0)), [place]).lines())
            answer.encode("utf-8")
        except Exception as error:  # noqa: BLE001  # likewise
            self.failures.append(f"{what}: search: {type(error).__name__}: {error!s:.300}")
        else:
            self._answer(what, answer, start)

    @property
    def damage_taken(self) -> int:
        """How many changes of one byte were taken for a bundle."""
        return sum(count for what, count in self.taken.items() if what.startswith("a byte"))

    def _answer(self, what: str, answer: str, start: float) -> None:
        seconds = time.process_time() - start
        self.slowest = max(self.slowest, seconds)
        if len(answer.encode("utf-8", "backslashreplace")) > MAX_ANSWER:
            self.failures.append(f"{what}: an answer of {len(answer)} characters")


def one_byte_changes(judge: Judge, manifests: int, images: int, draw: random.Random) -> None:
    """Changes one byte of the manifest, then of image files; none may be taken for a bundle."""
    path = judge.bundle.manifest_path
    good = path.read_bytes()
    for _ in range(manifests):
        path.write_bytes(change_a_byte(good, draw))
        judge.read("a byte of the manifest")
        judge.verify("a byte of the manifest")
    path.write_bytes(good)
    files = sorted(judge.bundle.path.glob("*.cubin"))
    for _ in range(images):
        file = draw.choice(files)
        code = file.read_bytes()
        file.write_bytes(change_a_byte(code, draw))
        judge.read("a byte of an image")
        judge.verify("a byte of an image")
        file.write_bytes(code)


def mutations(judge: Judge, count: int, draw: random.Random) -> None:
    """Changes manifests at will; every answer must be a refusal of ours, or a bundle that is one."""
    path = judge.bundle.manifest_path
    good = path.read_bytes()
    for index in range(count):
        change = change_values if draw.random() < 0.7 else change_bytes
        path.write_bytes(change(good, draw))
        judge.read("a mutation")
        if index % 4 == 0:
            judge.verify("a mutation")
            judge.search("a mutation")
    path.write_bytes(good)


def main() -> int:
    """Makes all changes and prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--count", type=int, default=200_000, help="mutated manifests; a tenth as many with one byte changed"
    )
    parser.add_argument("--seed", type=int, default=1, help="other changes for another number")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    memory = Path("/dev/shm")  # many small files are written
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        judge = Judge(small_bundle(Path(folder)))
        one_byte_changes(judge, options.count // 10, options.count // 40, draw)
        mutations(judge, options.count, draw)
        good = judge.bundle.manifest_path.read_bytes()
        for name, data in bombs(good):
            judge.bundle.manifest_path.write_bytes(data)
            before = judge.slowest
            judge.slowest = 0.0
            judge.read(name)
            judge.verify(name)
            judge.search(name)
            print(f"{name:<24}{len(data):>10,} bytes  {judge.slowest:6.2f} s of CPU")
            judge.slowest = max(before, judge.slowest)
    for what, count in sorted(judge.asked.items()):
        if what.startswith("a "):
            print(f"{what:<32}{judge.taken[what]:>8,} of {count:,} taken")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"slowest answer {judge.slowest:.2f} s of CPU, peak memory {peak} MiB, {len(judge.failures)} failures")
    print("\n".join(judge.failures[:50]))
    return 1 if judge.failures or judge.damage_taken or judge.slowest > 2 or peak > 512 else 0


if __name__ == "__main__":
    sys.exit(main())

"""Configuration files with a few changes: flipped bytes, hostile values, splices, repetitions, other encodings."""

from __future__ import annotations

import random
from collections.abc import Callable

from attnres_aot.config.shipped import names, path_of

SMALL = b"""\
name: small
model: {hidden_size: 2048, layers: 24, block_size: 6, leading_dense_layers: 1}
mailbox: {capacity: 64, slots: [1, tp]}
variants:
  before_mlp: true
  ring: true
  aux: false
deployments:
  - {tp: 4, dcp: 1, attn_stats: "1-16:1", attn_stats_blocks: "2-4:1"}
  - tp: 2
    dcp: 2
"""

TOKENS = [
    *(
        b"[",
        b"]",
        b"{",
        b"}",
        b": ",
        b"- ",
        b"? ",
        b", ",
        b"\n",
        b"\n\n  ",
        b"\t",
        b"\r",
        b"# ",
        b"'",
        b'"',
        b"|\n",
        b">\n",
    ),
    *(
        b"&a ",
        b"*a",
        b"!!int ",
        b"!x ",
        b"!<tag> ",
        b"%YAML 1.1\n---\n",
        b"%TAG ! tag:x,2000:\n---\n",
        b"---\n",
        b"...\n",
    ),
    *(b"<<: ", b"\x00", b"\x07", b"\x7f", b"\xff", b"\xc2\x85", b"\xe2\x80\xa8", b"\xef\xbb\xbf", b"\xed\xa0\x80"),
    *(b"\xf0\x9f\x98\x80", b"`", b"@", b"%", b"\\", b"\xc2\xb2", b"\xd9\xa3"),
]
"""Text that means something to YAML or to nobody."""

VALUES = [
    *(
        b"0",
        b"-1",
        b"1",
        b"16",
        b"17",
        b"1024",
        b"8192",
        b"8193",
        b"65536",
        b"999999999999999999",
        b"9" * 400,
        b"9" * 5000,
    ),
    *(b"1e3", b"0x10", b"1_000", b"011", b".inf", b".nan", b"1.5", b"~", b"null", b"true", b"yes", b"[]", b"{}", b"''"),
    *(b"tp", b"'tp'", b"[1, 2]", b"{a: 1}", b"2001-01-01", b"=", b"../x", b".x", b"a" * 70, b"a" * 3000, b"\xc3\xa9"),
    *(b'"\\UFFFFFFFF"', b'"\\U00110000"', b'"\\uD800"', b'"\\x00"', b'"\\N\\L\\P"', b'"\\q"', b'"\\x"', b'"\\u12"'),
    *(b'"1-8:1"', b'"8-1:1"', b'"1-99999999:1"', b'"1:1,1:1"', b'"1-8:2"', b'"1:1.2.3"', b'":"', b'","', b'"1-8"'),
    *(
        b'"' + b"1:1," * 3000 + b'"',
        b'"' + b"1-64:1," * 2000 + b'"',
        b'"' + b"x," * 5000 + b'"',
        b"%YAML " + b"9" * 5000,
    ),
    *(
        b"&a [*a]",
        b"&a [x, x]",
        b"[*a, *a]",
        b"!!python/object/apply:os.system [x]",
        b"!!binary x",
        b"|\n   x\n",
        b">-\n x\n",
    ),
]
"""Values that a field may be given."""

REPEATS = [
    b"[",
    b"{",
    b"- ",
    b"? ",
    b": ",
    b"a: ",
    b"\n",
    b" ",
    b"a: 1\n",
    b"- a\n",
    b"'",
    b"#\n",
    b"&a ",
    b"!a ",
    b"---\n",
    b"1,",
]
"""Text that is repeated."""


def corpus() -> list[bytes]:
    """Returns good files to start from: the shipped ones, whole and without comments, and small ones."""
    whole = [path_of(name).read_bytes() for name in names()]
    bare = [b"\n".join(line for line in text.split(b"\n") if not line.lstrip().startswith(b"#")) for text in whole]
    return [*whole, *bare, *bare, SMALL, SMALL, SMALL, SMALL]


def make(random_: random.Random, good: list[bytes]) -> bytes:
    """Makes one file of good ones by one to eight changes."""
    data = random_.choice(good)
    for _ in range(random_.choice((1, 1, 1, 2, 3, 4, 8))):
        data = random_.choice(CHANGES)(random_, data, good)
    return data


def _flip(random_: random.Random, data: bytes, good: list[bytes]) -> bytes:
    if not data:
        return b"a"
    changed = bytearray(data)
    changed[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
    return bytes(changed)


def _place(random_: random.Random, data: bytes) -> tuple[int, int]:
    start = random_.randrange(len(data) + 1)
    return start, min(len(data), start + random_.choice((0, 1, 2, 5, 20, 100)))


def _cut(random_: random.Random, data: bytes, good: list[bytes]) -> bytes:
    start, end = _place(random_, data)
    return data[:start] + data[end:]


def _copy(random_: random.Random, data: bytes, good: list[bytes]) -> bytes:
    start, end = _place(random_, data)
    to = random_.randrange(len(data) + 1)
    return data[:to] + data[start:end] + data[to:]


def _insert(random_: random.Random, data: bytes, good: list[bytes]) -> bytes:
    start, _ = _place(random_, data)
    return data[:start] + random_.choice(TOKENS) + data[start:]


def _value(random_: random.Random, data: bytes, good: list[bytes]) -> bytes:
    """Gives a field, or an item of a list, another value."""
    starts = [index + 1 for index in range(len(data)) if data[index : index + 1] in (b":", b"[", b",", b"-")]
    if not starts:
        return data + random_.choice(VALUES)
    start = random_.choice(starts)
    end = min(
        [found for found in (data.find(mark, start) for mark in (b",", b"]", b"}", b"\n")) if found >= 0] or [start]
    )
    return data[:start] + b" " + random_.choice(VALUES) + data[max(start, end) :]


def _lines(random_: random.Random, data: bytes, good: list[bytes]) -> bytes:
    """Takes out, repeats, exchanges or indents lines."""
    lines = data.split(b"\n")
    one, other = random_.randrange(len(lines)), random_.randrange(len(lines))
    what = random_.randrange(4)
    if what == 0:
        del lines[one]
    elif what == 1:
        lines.insert(other, lines[one])
    elif what == 2:
        lines[one], lines[other] = lines[other], lines[one]
    else:
        lines[one] = random_.choice((b" ", b"  ", b"\t", b"      ")) + lines[one]
    return b"\n".join(lines)


def _splice(random_: random.Random, data: bytes, good: list[bytes]) -> bytes:
    other = random_.choice(good)
    return data[: random_.randrange(len(data) + 1)] + other[random_.randrange(len(other) + 1) :]


def _repeat(random_: random.Random, data: bytes, good: list[bytes]) -> bytes:
    start, _ = _place(random_, data)
    what = random_.choice([*REPEATS, data[start : start + 40]])
    times = random_.choice((2, 3, 17, 60, 300)) if random_.random() < 0.97 else (300 << 10) // max(1, len(what))
    return data[:start] + what * times + data[start:]


def _encode(random_: random.Random, data: bytes, good: list[bytes]) -> bytes:
    if random_.random() < 0.7:
        return data.replace(b"\n", random_.choice((b"\r\n", b"\r", b"\n\n")))
    text = data.decode("utf-8", "replace")
    return text.encode(random_.choice(("utf-16", "utf-32", "utf-8-sig", "cp037", "utf-7")), "replace")


Change = Callable[[random.Random, bytes, list[bytes]], bytes]
CHANGES: list[Change] = [
    *([_flip] * 3), *([_value] * 6), *([_insert] * 4), *([_lines] * 3), _cut, _cut, _copy, _splice, _repeat, _encode
]  # fmt: skip

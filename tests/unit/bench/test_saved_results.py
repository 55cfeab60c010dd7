"""Saved results that are damaged, endless or no results: each is refused in one line."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the command bench imports it")

from attnres_aot.bench.compare import compare
from attnres_aot.bench.results import MAX_REPORT_BYTES, numbers, read_report
from attnres_aot.cli.entry import main
from attnres_aot.errors import UsageError

PEER = Path(__file__).parents[3] / "docs" / "peers" / "triton_h200.json"
POINT = {"work": "consumer", "variant": "nb1", "rows": 1, "pdl": True, "l2": "warm", "us": 1.0}


@dataclass(frozen=True)
class Bad:
    name: str
    data: bytes
    says: str = "not a result of 'attnres-aot bench --save'"


def report(**changes) -> bytes:
    return json.dumps({"schema": 1, "timings": [POINT], **changes}).encode()


BAD = [
    Bad("empty", b""),
    Bad("list", b"[]"),
    Bad("deep", b"[" * 200_000),
    Bad("endless_number", b'{"schema": ' + b"9" * 5000 + b"}"),
    Bad("large", b" " * (MAX_REPORT_BYTES + 1)),
    Bad("not_utf8", b"\xff\xfe\x00"),
    Bad("schema", report(schema="x" * 100_000), "result schema 'xxx"),
    Bad("no_points", report(timings=3)),
    Bad("point_without_work", report(timings=[{}])),
    Bad("rows_in_words", report(timings=[{**POINT, "rows": "1"}])),
    Bad("list_for_work", report(timings=[{**POINT, "work": []}])),
    Bad("beyond_all_time", report(timings=[{**POINT, "us": 10**400}])),
    Bad("not_a_number", report(timings=[{**POINT, "us": float("nan")}])),
    Bad("tiny_time", report(timings=[{**POINT, "us": 1e-320}])),
    Bad("soak", report(soak=[1])),
    Bad("host", report(host=[{"name": 3, "us": 1}])),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_it_is_refused_in_few_words(bad, tmp_path, capsys):
    path = tmp_path / "saved.json"
    path.write_bytes(bad.data)
    assert main(["bench", "--load", str(path), "--compare", str(PEER)]) == 2
    out, err = capsys.readouterr()
    assert bad.says in err
    assert out == ""
    assert len(err) < 600


@pytest.mark.parametrize("path", ["/dev/zero", ".", "x" * 300])
def test_what_is_no_file_is_refused(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "--load", path, "--compare", str(PEER)]) == 2
    assert "cannot be read: " in capsys.readouterr().err


def test_a_mutated_result_is_compared_or_refused(tmp_path):
    good = PEER.read_bytes()
    path = tmp_path / "saved.json"
    words = [b"null", b"[]", b"{}", b'"x"', b"-1", b"1e400", b"true", b"9" * 30]
    compared = 0
    for number in range(1500):
        draw = random.Random(number)
        start = draw.randrange(len(good))
        end = start + draw.choice((0, 1, 4, 12))
        path.write_bytes(good[:start] + draw.choice(words) + good[end:])
        try:
            found = numbers(read_report(path), "saved")
        except UsageError:
            continue
        compare(found, found, 0.05)
        compared += 1
    assert 20 < compared < 1480

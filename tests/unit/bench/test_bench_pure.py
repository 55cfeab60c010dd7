"""The parts of measuring that need no GPU: selection, bytes, comparison, files, tables, sentences."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from bench_bundle import manifest_of

import attnres_aot
from attnres_aot.bench import show
from attnres_aot.bench.cold_start import IMPORT_ALONE, run_program, summarise
from attnres_aot.bench.compare import compare, geometric_mean
from attnres_aot.bench.host import BARE, FILL, RING, RUN, costs
from attnres_aot.bench.measure import PointTimer
from attnres_aot.bench.points import CHAIN, CONSUMER, Selection, Series, default_variants, rows_for, select
from attnres_aot.bench.points import RING as RING_WORK
from attnres_aot.bench.results import (
    ColdStart,
    HostCost,
    Key,
    Report,
    Setting,
    Soak,
    Timing,
    numbers,
    read_report,
    report_json,
    write_atomically,
)
from attnres_aot.bench.rig import Job, Rig
from attnres_aot.bench.traffic import consumer_traffic, copy_traffic, statistics_traffic
from attnres_aot.errors import DriverError, UsageError
from attnres_aot.spec.row_counts import parse_rows
from attnres_aot.spec.variants import parse_variant

K3 = (
    "nb0-write0", "nb1-delta", "nb4-delta", "nb8-delta", "nb7-delta-write7", "nb8-delta-final", "nb1-delta-stats",
    "nb4-delta-stats", "nb8-delta-stats", "nb1-delta-ring1", "nb8-delta-ring1", "nb8-delta-final-ring1",
    "nb1-delta-ring8", "nb8-delta-ring8",
)  # fmt: skip
ALL = Selection(globs=(), rows=(), pdl=(True,), cold=(False,))


def test_default_selection_is_the_published_tables() -> None:
    manifest = manifest_of([*K3, "nb5-delta", "nb8-delta-aux", "nb8-delta-ring16"], producers=["statistics-nb4"])
    assert [str(variant) for variant in default_variants(manifest)] == list(K3)
    lines = select(manifest, ALL)
    assert [line.work for line in lines].count(CHAIN) == 1  # the one statistics kernel that is there
    assert [line.work for line in lines].count(RING_WORK) == 5
    assert [str(line) for line in lines[1:7]] == [
        "nb1-delta", "nb1-delta-stats", "nb4-delta", "nb4-delta-stats", "statistics + nb4-delta-stats", "nb8-delta",
    ]  # fmt: skip


def test_an_odd_time_of_a_copy_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    times, jobs = iter([9.0, 5.5, 1.25, 1.5, 7.0]), []

    def time_us(_: Rig, job: Job) -> float:
        jobs.append(job)
        return next(times)

    monkeypatch.setattr(Rig, "time_us", time_us)
    rig = Rig.__new__(Rig)
    rig.hidden = 7168
    timer = PointTimer(rig, None)
    line = Series(work=RING_WORK, variant=parse_variant("nb1-delta-ring1"))
    found = timer.time(line, rows=4, pdl=True, cold=False)
    assert (found.us, found.with_copy_us, found.copy_us) == (7.5, 9.0, 1.5)
    assert [(job.consumer, job.pdl, job.rows) for job in jobs] == [(True, True, 4), *[(False, False, 4)] * 3]
    again = timer.time(line, rows=4, pdl=False, cold=False)
    assert (again.us, again.copy_us) == (5.5, 1.5)  # and a copy of that size is not timed again


def test_publishers_fill_mailboxes_of_one_slot() -> None:
    lines = select(manifest_of(K3, producers=["publish"]), replace(ALL, globs=("nb1-delta-ring?",)))
    assert list(map(str, lines)) == ["publish + nb1-delta-ring1", "nb1-delta-ring1", "nb1-delta-ring8"]
    assert rows_for(lines[0], ALL, 16) == (1, 4, 16)


def test_statistics_without_their_twin_come_last() -> None:
    lines = select(manifest_of(K3), replace(ALL, globs=("nb1-delta-stats", "nb8-delta", "nb1-delta-ring1")))
    assert [str(line) for line in lines] == ["nb8-delta", "nb1-delta-stats", "nb1-delta-ring1"]


def test_globs_choose_by_whole_names() -> None:
    manifest = manifest_of(K3)
    chosen = select(manifest, replace(ALL, globs=("nb8-*-ring?", "nb1-delta")))
    assert [str(line) for line in chosen] == [
        "nb1-delta",
        "nb8-delta-ring1",
        "nb8-delta-final-ring1",
        "nb8-delta-ring8",
    ]


def test_a_glob_without_a_match_says_what_is_near() -> None:
    with pytest.raises(
        UsageError, match=r"--variants 'nb8-dleta' matches none of the bundle's 14 variants \(did you mean"
    ):
        select(manifest_of(K3), replace(ALL, globs=("nb8-dleta",)))


def test_a_bundle_without_default_variants_says_how_to_choose() -> None:
    with pytest.raises(UsageError, match="choose some with --variants"):
        select(manifest_of(["nb5-delta-aux"]), ALL)


def test_rows_of_mailboxes_end_at_their_capacity() -> None:
    ring = Series(work=RING_WORK, variant=parse_variant("nb1-delta-ring1"))
    plain = Series(work=CONSUMER, variant=parse_variant("nb1-delta"))
    assert rows_for(ring, ALL, 16) == (1, 4, 16)
    assert rows_for(plain, ALL, 16)[-1] == 64
    assert rows_for(ring, replace(ALL, rows=(2, 99)), 64) == (2,)


@pytest.mark.parametrize("text", ["", "0", "1,,2", "x", "-1", "1.5", "4097"])
def test_wrong_rows(text: str) -> None:
    with pytest.raises(UsageError, match=r"--rows .*: row counts from 1 to 4096"):
        parse_rows(text, 4096)


def test_rows_keep_their_order_once() -> None:
    assert parse_rows("16, 1,16", 4096) == (16, 1)


@dataclass(frozen=True, kw_only=True)
class Moved:
    name: str
    variant: str
    read: int
    written: int
    touched: int


ROW = 1024 * 2  # bytes of one row of 1024 bf16
MOVED = [
    # source, out_norm | prefix, out, block
    Moved(name="first", variant="nb0-write0", read=2, written=3, touched=5),
    # source, prefix, 2 blocks, 3 weights | prefix, out; the prefix counts once
    Moved(name="plain", variant="nb2-delta", read=7, written=2, touched=8),
    Moved(name="aux-and-write", variant="nb2-delta-write2-aux", read=7, written=4, touched=10),
    # 8 slots, prefix, 2 blocks, 3 weights | prefix, out, 8 slots armed again
    Moved(name="ring", variant="nb2-delta-ring8", read=14, written=10, touched=15),
]


@pytest.mark.parametrize("case", MOVED, ids=lambda case: case.name)
def test_bytes_of_a_consumer(case: Moved) -> None:
    found = consumer_traffic(parse_variant(case.variant), 1, 1024)
    assert (found.read, found.written, found.touched) == (case.read * ROW, case.written * ROW, case.touched * ROW)
    assert found.moved == found.read + found.written


def test_bytes_of_statistics_and_copies() -> None:
    assert consumer_traffic(parse_variant("nb8-delta-stats"), 3, 1024).read == (3 + 3 + 3) * ROW + 3 * 1026 * 4
    kernel = statistics_traffic(8, 3, 1024)
    assert (kernel.read, kernel.written) == ((24 + 2) * ROW, 3 * 1026 * 4)
    assert copy_traffic(8, 2, 1024).moved == 2 * 16 * ROW


def key(variant: str = "nb1-delta", rows: int = 1, **changes: object) -> Key:
    return Key(**{"work": CONSUMER, "variant": variant, "rows": rows, "pdl": True, "l2": "warm", **changes})


def test_comparison_groups_means_and_marks() -> None:
    old = {key(): 2.0, key(rows=2): 2.0, key(pdl=False): 1.0, key("gone"): 1.0, key("host-less", work="host"): 1.0}
    new = {key(): 1.0, key(rows=2): 4.0, key(pdl=False): 1.05, key("fresh"): 1.0}
    found = compare(new, old, 0.05)
    assert [(group.name, len(group.ratios), group.not_slower) for group in found.groups] == [
        ("consumer, PDL on, warm L2", 2, 1),
        ("consumer, PDL off, warm L2", 1, 0),
    ]
    assert found.groups[0].mean == pytest.approx(1.0)
    assert [(ratio.key, ratio.ratio) for ratio in found.slower] == [(key(rows=2), 2.0)]
    assert (found.only_new, found.only_old) == (1, 2)


def test_early_times_are_compared_with_pdl_where_there_was_no_such_mode() -> None:
    old = {key(): 2.0, key(rows=2): 2.0, key(rows=2, pdl="early"): 1.0}
    found = compare({key(): 2.2, key(pdl="early"): 2.0, key(rows=2, pdl="early"): 3.0}, old, 0.05)
    assert [(group.name, [ratio.ratio for ratio in group.ratios]) for group in found.groups] == [
        ("consumer, PDL on, warm L2", [1.1]),
        ("consumer, PDL early, warm L2", [1.0, 3.0]),
    ]
    assert (found.only_new, found.only_old) == (0, 1)


def test_comparison_shows_ratios_and_what_is_slower() -> None:
    text = "\n".join(
        show.comparison_lines(
            compare({key(): 2.2, key(rows=4): 1.0}, {key(): 2.0, key(rows=4): 2.0}, 0.05), "old.json", 0.05
        )
    )
    assert "Compared with old.json: time now / time then" in text
    assert "1.100!   0.500" in text
    assert "1 slower by more than 5%" in text
    assert "SLOWER consumer nb1-delta, 1 rows, PDL on: 2.00 -> 2.20 us (1.10x)" in text


def test_comparison_of_strangers_says_so() -> None:
    assert show.comparison_lines(compare({key(): 1.0}, {}, 0.05), "x", 0.05)[-1].startswith("nothing in common")


def test_geometric_mean() -> None:
    assert geometric_mean([0.5, 2.0, 8.0]) == pytest.approx(2.0)
    assert geometric_mean([]) == 1.0


SETTING = Setting(
    bundle="kimi_k3-sm_90", manifest_sha256="ab" * 32, gpu="GPU", driver="580", torch="2.11", date="2026-01-02",
    launches=20, replays=50,
)  # fmt: skip
TIMING = Timing(
    work=CONSUMER, variant="nb1-delta", rows=1, pdl=True, l2="warm", us=1.5, bytes_moved=2048, floor_us=0.25
)
HOST = HostCost(name=RUN, us=3.3, ratio=1.1, limit=2.0)


def test_a_report_survives_its_file(tmp_path) -> None:
    path = tmp_path / "sub" / "result.json"
    write_atomically(path, json.dumps(report_json(Report(setting=SETTING, timings=(TIMING,), host=(HOST,)))))
    assert numbers(read_report(path), str(path)) == {key(): 1.5, Key("host", RUN, 1, False, "warm"): 3.3}
    assert [entry.name for entry in path.parent.iterdir()] == ["result.json"]


@dataclass(frozen=True, kw_only=True)
class Refused:
    name: str
    text: str | None
    message: str


REFUSED = [
    Refused(name="missing", text=None, message="cannot be read: No such file"),
    Refused(name="not-json", text="{", message="not a result of 'attnres-aot bench --save'"),
    Refused(name="not-an-object", text="[]", message="found list"),
    Refused(
        name="other-schema",
        text='{"schema": 7}',
        message="result schema 7, but this attnres-aot reads 1; measure again",
    ),
    Refused(name="other-fields", text='{"schema": 1, "timings": [{}]}', message="KeyError"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_a_file_that_is_no_result_is_refused(case: Refused, tmp_path) -> None:
    path = tmp_path / "old.json"
    if case.text is not None:
        path.write_text(case.text)
    with pytest.raises(UsageError) as caught:
        numbers(read_report(path), str(path))
    assert case.message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_failed_write_leaves_the_old_file(tmp_path) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]
    with pytest.raises(UsageError, match="cannot be written"):
        write_atomically(path / "below", "x")


def test_filling_a_mailbox_is_taken_off_the_ring() -> None:
    found = {cost.name: cost for cost in costs({BARE: 3.0, RUN: 4.5, FILL: 2.0, RING: 8.6})}
    assert FILL not in found
    assert found[RUN].ratio == pytest.approx(1.5)
    assert (found[RING].us, found[RING].over) == (pytest.approx(6.6), True)
    assert not found[RUN].over
    assert found[BARE].limit is None
    assert show.host_lines(list(found.values()))[-1].split() == [
        "run_ring,",
        "checks",
        "on",
        "6.60",
        "2.20",
        "2.0",
        "OVER",
    ]


def start(total: float, foreign: list[str] | None = None) -> dict[str, object]:
    return {
        "phases_ms": {"import": 1.0, "bind": total - 1.0, "preload": 50.0},
        "consumers": 94,
        "foreign": foreign or [],
    }


def test_cold_start_takes_medians_and_leaves_preloading_out() -> None:
    found = summarise(
        [{"ms": 3.0, "foreign": []}, {"ms": 30.0, "foreign": []}, {"ms": 4.0, "foreign": []}],
        [start(20.0), start(70.0), start(30.0, ["yaml"])],
        bytecode=False,
    )
    assert (found.total_ms, found.import_ms, found.preload_ms) == (30.0, 4.0, 50.0)
    assert found.phases_ms == {"import": 1.0, "bind": 29.0}
    text = "\n".join(show.cold_lines(found))
    assert "94 consumers bound and one launched: 30.0 ms (limit 60): import 1.0, bind 29.0" in text
    assert "other modules loaded: yaml" in text
    assert "no bytecode" in text


def test_cold_start_over_its_limit_is_marked() -> None:
    slow = ColdStart(
        phases_ms={}, total_ms=61.0, limit_ms=60.0, consumers=94, preload_ms=0.0, import_ms=5.0, import_limit_ms=20.0,
        foreign=(), processes=3, bytecode=True,
    )  # fmt: skip
    text = "\n".join(show.cold_lines(slow))
    assert "61.0 ms (limit 60, OVER)" in text
    assert "5.0 ms (limit 20)" in text


def test_soak_shows_growth_and_failures() -> None:
    found = Soak(
        launches=1000, threads=8, streams=2, seconds=0.01, host_growth_bytes=-4096, device_growth_bytes=9,
        problems=("thread 3: DriverError: lost",),
    )  # fmt: skip
    text = "\n".join(show.soak_lines(found))
    assert "10.0 us of wall time each; growth after the warm-up: host -4096 bytes, device +9 bytes" in text
    assert "FAILED: thread 3: DriverError: lost" in text


def test_floors_are_shown_per_line() -> None:
    text = "\n".join(show.floor_lines([TIMING, replace(TIMING, rows=64, floor_us=2.0, bytes_moved=4096)], [1, 64], 12))
    assert "nb1-delta          2       4" in text
    assert "nb1-delta       0.25    2.00" in text
    assert show.floor_lines([], [], 12) == []


def test_importing_the_package_alone_is_timed_in_a_fresh_interpreter() -> None:
    found = run_program(["-c", IMPORT_ALONE])
    assert 0 < found["ms"] < 10_000
    assert found["foreign"] == []


def test_a_fresh_process_that_fails_shows_its_end() -> None:
    with pytest.raises(DriverError, match=r"a fresh process failed with status 1:\n(?s:.*)ZeroDivisionError"):
        run_program(["-c", "1 / 0"])


def test_fresh_processes_write_bytecode_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    program = "import json, sys; print(json.dumps({'off': sys.dont_write_bytecode, 'path': sys.path}))"
    found = run_program(["-c", program])
    assert found["off"] is False
    assert str(Path(attnres_aot.__file__).parents[1]) in found["path"]


PEERS = sorted((Path(__file__).parents[3] / "docs" / "peers").glob("*.json"))


@pytest.mark.parametrize("path", PEERS, ids=lambda path: path.stem)
def test_published_numbers_are_of_default_points(path: Path) -> None:
    """Every number of a peer is one that a run measures, so that comparing with it leaves none out."""
    found = numbers(read_report(path), str(path))
    lines = select(manifest_of(K3), ALL)
    measured = {(line.work, str(line.variant), rows) for line in lines for rows in rows_for(line, ALL, 64)}
    assert {(key.work, key.variant, key.rows) for key in found} <= measured
    assert all(key.pdl and key.l2 == "warm" and us > 0 for key, us in found.items())

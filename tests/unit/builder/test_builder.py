"""Building whole bundles with a compiler that tests can break."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from attnres_aot.builder.builder import build, preview
from attnres_aot.builder.inventory import Source
from attnres_aot.builder.pool import PoolSettings
from attnres_aot.builder.progress import PlainProgress
from attnres_aot.bundle.manifest import seal
from attnres_aot.bundle.reader import read_bundle
from attnres_aot.bundle.writer import hold_target, work_folder
from attnres_aot.errors import BundleError
from attnres_aot.plan.plan import Selection
from attnres_aot.plan.settings import Options
from attnres_aot.spec.params import KERNEL_PARAMS
from attnres_aot.spec.tables import parse_table
from tests.support.children import PATIENCE, child, wait_until

OTHER_SOURCES = dict.fromkeys(KERNEL_PARAMS, "1" * 64)
NAMES = ["h1024-nb0", "h1024-nb1-delta", "h1024-nb1", "h1024-nb2", "h1024-nb2-delta-final"]


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "out" / "tiny-sm_90"


def test_a_first_build_compiles_everything(tiny, path, compiler):
    report = tiny()
    assert report.status == "built"
    assert report.compiled == tuple(NAMES)
    assert report.reused == report.failures == ()
    assert sorted(compiler.compiled) == sorted(NAMES)
    assert report.size_bytes == sum(file.stat().st_size for file in path.iterdir())
    assert report.compile_seconds == pytest.approx(0.25 * 5)
    assert [entry.name for entry in path.parent.iterdir()] == ["tiny-sm_90"]


def test_the_manifest_says_what_was_planned_and_proven(tiny, path, facts):
    tiny()
    manifest = read_bundle(path).manifest
    assert manifest.name == "tiny"
    assert (manifest.arch.requested, manifest.arch.proven) == ("sm_90", "sm_90")
    assert manifest.toolchain == {"attnres-aot": "1.2.3", "nvidia-cutlass-dsl": "4.8.1"}
    assert manifest.sources_sha256 == facts.sources_sha256
    assert [(table.tp, table.dcp, table.attn_stats) for table in manifest.tables] == [
        (2, 1, ""),
        (4, 1, ""),
    ]  # it has no variants that take statistics
    assert [variant.name for variant in manifest.variants] == [
        "nb0-write0",
        "nb1-delta-write1",
        "nb1",
        "nb2",
        "nb2-delta-final",
    ]
    assert manifest.variants[1].choices[0].image == "h1024-nb1-delta"
    assert manifest.variants[1].deployments == ((2, 1), (4, 1))
    image = manifest.images[1]
    assert (image.name, image.file) == ("h1024-nb1-delta", "h1024-nb1-delta.cubin")
    assert (image.symbol, image.registers, image.smem_static_bytes) == ("attnres_h1024_nb1_delta_cutlass_0", 40, 96)
    assert image.critical_instructions == 7
    assert (image.cluster, image.block_threads, image.rows_per_cluster, image.pdl) == (1, 128, 1, True)


def test_an_unchanged_build_starts_nothing_and_touches_nothing(tiny, path, compiler, monkeypatch):
    tiny()
    compiler.forget()
    before = {file.name: identity(file) for file in [path, *path.iterdir()]}
    path.parent.chmod(0o555)
    report = tiny()
    assert report.status == "unchanged"
    assert report.reused == tuple(NAMES)
    assert compiler.calls == []
    assert {file.name: identity(file) for file in [path, *path.iterdir()]} == before


def identity(file: Path) -> tuple[int, ...]:
    """What changes when a file is written or replaced; not when it is read, as its access time does."""
    found = file.stat()
    return found.st_dev, found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def test_jobs_and_folder_do_not_change_a_byte(tiny, tmp_path, files_of):
    tiny(out=tmp_path / "one", pool=PoolSettings(workers=1))
    tiny(out=tmp_path / "another" / "place", pool=PoolSettings(workers=4))
    assert files_of(tmp_path / "one/tiny-sm_90") == files_of(tmp_path / "another/place/tiny-sm_90")


def _flip(path: Path) -> None:
    data = bytearray((path / "h1024-nb1.cubin").read_bytes())
    data[-1] ^= 1
    (path / "h1024-nb1.cubin").write_bytes(data)


def _edit(path: Path, old: str, new: str) -> None:
    text = (path / "manifest.json").read_text()
    assert old in text
    (path / "manifest.json").write_text(text.replace(old, new, 1))


def _link(path: Path) -> None:
    (path / "h1024-nb1.cubin").rename(path.parent / "h1024-nb1.cubin")
    (path / "h1024-nb1.cubin").symlink_to(path.parent / "h1024-nb1.cubin")


@dataclass(frozen=True)
class Damage:
    name: str
    inflict: Callable[[Path], object]
    compiled: int


DAMAGES = [
    Damage("flipped-image", _flip, 1),
    Damage("missing-image", lambda path: (path / "h1024-nb1.cubin").unlink(), 1),
    Damage("truncated-image", lambda path: os.truncate(path / "h1024-nb1.cubin", 3), 1),
    Damage("linked-image", _link, 1),
    Damage("truncated-manifest", lambda path: os.truncate(path / "manifest.json", 500), 5),
    Damage("edited-threads", lambda path: _edit(path, '"block_threads": 128', '"block_threads": 64'), 5),
    Damage("edited-registers", lambda path: _edit(path, '"registers": 40', '"registers": 41'), 5),
    Damage("edited-table", lambda path: _edit(path, '"capacity": 4', '"capacity": 5'), 5),
    Damage("reformatted-manifest", lambda path: _edit(path, '"schema": ', '"schema":  '), 5),
    Damage("extra-image", lambda path: (path / "extra.cubin").write_bytes(b"x"), 0),
    Damage("newer-schema", lambda path: _edit(path, '"schema": ', '"schema": 9'), 5),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name)
def test_a_damaged_bundle_is_made_whole_again(damage, tiny, path, compiler, files_of):
    tiny()
    good = files_of(path)
    compiler.forget()
    damage.inflict(path)
    report = tiny()
    assert report.status == "built"
    assert len(compiler.compiled) == len(report.compiled) == damage.compiled
    assert files_of(path) == good
    assert tiny().status == "unchanged"


@dataclass(frozen=True)
class Update:
    name: str
    fact: str
    value: object
    compiled: int
    reason: str


UPDATES = [
    Update("sources", "sources", OTHER_SOURCES, 5, "the kernel or compiler sources changed"),
    Update("compiler", "toolchain", {"nvidia-cutlass-dsl": "4.9.0"}, 5, "nvidia-cutlass-dsl 4.8.1 -> 4.9.0"),
    Update("package-version", "package_version", "1.2.4", 0, "unchanged"),
]


@pytest.mark.parametrize("update", UPDATES, ids=lambda update: update.name)
def test_a_change_rebuilds_what_it_affects_and_says_so(update, tiny, facts, make_request, tmp_path, compiler):
    tiny()
    compiler.forget()
    changed = dataclasses.replace(facts, **{update.fact: update.value})
    seen = preview(make_request(tmp_path / "out"), changed)
    assert {step.reason for step in seen.steps} == {update.reason}
    assert not seen.unchanged
    report = tiny(facts=changed)
    assert report.status == "built"
    assert len(compiler.compiled) == update.compiled
    assert tiny(facts=changed).status == "unchanged"


def test_a_change_of_one_kernel_leaves_the_images_of_others(tiny, tiny_config, facts, compiler):
    config = tiny_config(options=Options(ring=True, aux=False, stats=False))
    tiny(config=config)
    compiler.forget()
    changed = dataclasses.replace(facts, sources={**facts.sources, "publish": "1" * 64})
    assert tiny(config=config, facts=changed).status == "built"
    assert compiler.compiled == ["h1024-publish"]


def test_a_wider_configuration_compiles_only_what_is_new(tiny, tiny_config, path, compiler):
    tiny()
    compiler.forget()
    report = tiny(config=tiny_config(options=Options(ring=True, aux=False, stats=False)))
    assert all(name.endswith(("-ring1", "-publish")) for name in compiler.compiled)
    assert report.reused == tuple(NAMES)
    assert set(report.compiled) == set(compiler.compiled) != set()
    assert len(read_bundle(path).manifest.images) == report.images


def test_a_changed_table_rewrites_the_manifest_alone(tiny, tiny_config, path, compiler):
    config = tiny_config(options=Options(ring=False, aux=False))
    tiny(config=config)
    compiler.forget()
    changed = tuple(dataclasses.replace(each, attn_stats=parse_table("1-3:1")) for each in config.deployments)
    report = tiny(config=dataclasses.replace(config, deployments=changed))
    assert report.status == "built"
    assert compiler.calls == []
    assert [table.attn_stats for table in read_bundle(path).manifest.tables] == ["1-3:1", "1-3:1"]


def test_another_configuration_does_not_take_the_place_of_one_that_holds_more(tiny, tiny_config, path, files_of):
    tiny()
    good = files_of(path)
    config = tiny_config()
    fewer_layers = dataclasses.replace(config.model, layers=1)
    with pytest.raises(BundleError, match=r"lose 3 variants \(nb1-delta-write1, nb2, nb2-delta-final\) that it holds"):
        tiny(config=dataclasses.replace(config, model=fewer_layers))
    with pytest.raises(BundleError, match=r"lose \(tp, dcp\) \(4, 1\) that it holds"):
        tiny(config=dataclasses.replace(config, deployments=config.deployments[:1]))
    longer_rows = dataclasses.replace(config, model=dataclasses.replace(config.model, hidden_size=2048))
    with pytest.raises(BundleError, match="lose all code for rows of 1024 elements that it holds"):
        tiny(config=longer_rows)
    assert files_of(path) == good
    tiny(config=longer_rows, force=True)
    assert read_bundle(path).manifest.model.hidden == 2048


@pytest.mark.parametrize("manifest", [None, b"", b'{"name": "a web page", "icons": []}'])
def test_a_folder_of_anybodys_cubins_is_no_bundle(manifest, tiny, path, files_of, make_request, facts, tmp_path):
    path.mkdir(parents=True)
    (path / "mine.cubin").write_bytes(b"precious")
    if manifest is not None:
        (path / "manifest.json").write_bytes(manifest)
    before = files_of(path)
    refusal = (
        "is not empty, and holds no manifest that a build wrote; move it away, change --out, or replace it with --for"
    )
    with pytest.raises(BundleError, match=refusal):
        tiny()
    with pytest.raises(BundleError, match=refusal):
        preview(make_request(tmp_path / "out"), facts)
    assert files_of(path) == before
    assert tiny(force=True).status == "built"
    assert "mine.cubin" not in files_of(path)


def test_tables_promise_what_the_bundle_holds(tiny, tiny_config, path, tmp_path):
    """Tables that the configuration turns on are cut to the variants that are there."""
    config = tiny_config(options=Options(ring=False, aux=False))
    tiny(config=config)
    assert [(t.attn_stats, t.attn_stats_blocks) for t in read_bundle(path).manifest.tables] == [("1-4:1", "1-2:1")] * 2
    for only, promised in (
        (("nb1", "nb1-delta-write1", "nb2"), ("", "")),
        (("nb1*", "nb2"), ("1-4:1", "1:1")),
        (("nb2*", "nb1-delta-write1-stats", "nb1"), ("1-4:1", "2:1")),
        (("nb2-stats", "nb1-delta-write1-stats"), ("1-4:1", "1-2:1")),
    ):
        out = tmp_path / "-".join(only).replace("*", "x")
        tiny(config=config, selection=Selection(only=only), out=out)
        tables = read_bundle(out / "tiny-sm_90").manifest.tables
        assert [(table.attn_stats, table.attn_stats_blocks) for table in tables] == [promised] * 2


def test_force_compiles_everything_again_to_the_same_bytes(tiny, path, compiler, files_of):
    tiny()
    good = files_of(path)
    compiler.forget()
    assert tiny(force=True).status == "built"
    assert sorted(compiler.compiled) == sorted(NAMES)
    assert files_of(path) == good


def test_a_failed_build_leaves_the_bundle_and_the_next_one_goes_on(tiny, path, compiler, files_of, facts):
    tiny()
    good = files_of(path)
    compiler.forget()
    changed = dataclasses.replace(facts, sources=OTHER_SOURCES)
    compiler.behave_at({"h1024-nb0": "raise"})
    report = tiny(facts=changed, keep_going=True)
    assert report.status == "failed"
    assert [failure.name for failure in report.failures] == ["h1024-nb0"]
    assert report.size_bytes == 0
    assert files_of(path) == good
    assert sorted(entry.name for entry in work_folder(path).iterdir()) == ["store"]

    compiler.behave()
    compiler.forget()
    report = tiny(facts=changed)
    assert compiler.compiled == ["h1024-nb0"]
    assert report.status == "built"
    assert len(report.reused) == 4
    assert [entry.name for entry in path.parent.iterdir()] == ["tiny-sm_90"]


def test_a_damaged_image_of_an_interrupted_build_is_compiled_again(tiny, path, compiler):
    compiler.behave_at({"h1024-nb0": "raise"})
    tiny(keep_going=True)
    stored = sorted((work_folder(path) / "store").iterdir())
    assert len(stored) == 4
    data = bytearray(stored[0].read_bytes())
    data[-1] ^= 1
    stored[0].write_bytes(data)
    compiler.behave()
    compiler.forget()
    assert tiny().status == "built"
    assert len(compiler.compiled) == 2


def test_all_failures_are_reported_in_the_bundles_order(tiny, compiler, path):
    compiler.behave_at({"h1024-nb2": "raise", "h1024-nb0": "bad image", "h1024-nb1": "segv"})
    report = tiny(keep_going=True)
    assert [failure.name for failure in report.failures] == ["h1024-nb0", "h1024-nb1", "h1024-nb2"]
    assert report.failures[0].reason == "arch: asked sm_90, the binary names none"
    assert not path.exists()


def test_without_keep_going_the_first_failure_ends_the_build(tiny, compiler):
    compiler.behave_at(dict.fromkeys(NAMES, "raise"))
    report = tiny(pool=PoolSettings(workers=1))
    assert len(report.failures) == len(compiler.compiled) == 1


def test_the_real_proof_rejects_what_is_no_cubin(compiler, facts, recorder, make_request, tmp_path):
    report = build(make_request(tmp_path / "out"), facts, recorder)
    assert report.status == "failed"
    assert "the compiled image cannot be read" in report.failures[0].reason
    assert recorder.ended


def test_a_reused_image_is_proven_again(tiny, path, compiler, monkeypatch):
    tiny()
    bad = b"BAD, with a manifest to match"
    manifest = json.loads((path / "manifest.json").read_text())
    image = next(each for each in manifest["images"] if each["name"] == "h1024-nb1")
    image.update(size=len(bad), sha256=hashlib.sha256(bad).hexdigest())
    (path / "manifest.json").write_bytes(seal(manifest))
    (path / "h1024-nb1.cubin").write_bytes(bad)
    stream = io.StringIO()
    report = tiny(progress=PlainProgress(stream))
    assert [failure.name for failure in report.failures] == ["h1024-nb1"]
    first, second = stream.getvalue().splitlines()
    assert first == "tiny-sm_90: 0 images to compile, 5 reused"
    assert second.startswith("FAILED h1024-nb1: ")


def test_a_part_of_the_plan_does_not_replace_the_whole(tiny, path, tmp_path, files_of, make_request, facts):
    tiny()
    good = files_of(path)
    refusal = (
        r"lose 4 variants \(nb1, nb1-delta-write1, nb2, ...\) that it holds; write elsewhere with --out, "
        "or replace it with --force"
    )
    with pytest.raises(BundleError, match=refusal):
        tiny(selection=Selection(only=("nb0*",)))
    with pytest.raises(BundleError, match=r"lose \(tp, dcp\) \(4, 1\) that it holds"):
        tiny(selection=Selection(tp=(2,)))
    assert files_of(path) == good
    tiny(selection=Selection(only=("nb0*",)), out=tmp_path / "part")
    assert len(read_bundle(tmp_path / "part" / "tiny-sm_90").manifest.variants) == 1
    with pytest.raises(BundleError, match="lose 4 variants"):
        preview(make_request(tmp_path / "out", selection=Selection(only=("nb0*",))), facts)
    tiny(selection=Selection(only=("nb0*",)), force=True)
    assert len(read_bundle(path).manifest.variants) == 1
    assert len(tiny().compiled) == 4


def test_a_preview_changes_nothing(make_request, facts, compiler, trusting, tmp_path):
    seen = preview(make_request(tmp_path / "out"), facts)
    assert {step.source for step in seen.steps} == {Source.COMPILER}
    assert {step.reason for step in seen.steps} == {"there is no bundle yet"}
    assert compiler.calls == []
    assert not (tmp_path / "out").exists()


def test_a_second_builder_is_refused_while_the_first_is_at_work(tiny, path, compiler):
    with hold_target(path), pytest.raises(BundleError, match=r"another build of .* is running"):
        tiny()
    assert compiler.calls == []
    assert tiny().status == "built"


def test_what_an_abandoned_build_left_goes_away_when_nothing_is_to_be_done(tiny, path, compiler, facts):
    tiny()
    compiler.behave_at({"h1024-nb0": "raise"})
    tiny(facts=dataclasses.replace(facts, sources=OTHER_SOURCES), keep_going=True)
    assert work_folder(path).exists()
    assert tiny().status == "unchanged"
    assert [entry.name for entry in path.parent.iterdir()] == ["tiny-sm_90"]


def test_a_full_disk_is_one_clear_error(tiny, path, monkeypatch):
    def full(self, image):
        raise OSError(28, "No space left on device", "/x/store")

    monkeypatch.setattr("attnres_aot.builder.store.ImageStore.put", full)
    with pytest.raises(BundleError, match=r"cannot build '.*tiny-sm_90': /x/store: No space left on device"):
        tiny()


BUILDER = """
import dataclasses, json, sys
sys.path.insert(0, sys.argv[1])
import conftest
from attnres_aot.builder import assemble
from attnres_aot.builder.builder import build
from attnres_aot.builder.keys import BuildFacts
from pathlib import Path
assemble.prove_image = conftest.fake_proof
conftest.attnres_aot.plan.plan.choices_for = conftest.one_choice
facts = BuildFacts(toolchain={"nvidia-cutlass-dsl": "4.8.1"}, package_version="1.2.3",
                   sources=dict.fromkeys(conftest.KERNEL_PARAMS, sys.argv[3]), compiler="fake_compiler")
build(conftest._request(Path(sys.argv[2])), facts, conftest.Recorder())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_an_interrupted_build_loses_neither_the_old_bundle_nor_its_images(
    number, tiny, facts, path, compiler, files_of
):
    tiny()
    good = files_of(path)
    compiler.forget()
    compiler.behave_at({"h1024-nb0": "hang"})
    command = [sys.executable, "-c", BUILDER, str(Path(__file__).parent), str(path.parent), "1" * 64]
    with child(command, stderr=subprocess.DEVNULL) as builder:
        store = work_folder(path) / "store"
        wait_until(lambda: len(list(store.glob("*.image"))) == 4, "the fourth image")
        builder.send_signal(number)
        builder.wait(PATIENCE)
        wait_until(lambda: not any(Path(f"/proc/{start['start']}").exists() for start in compiler.starts), "the end")
    assert files_of(path) == good

    compiler.behave()
    compiler.forget()
    report = tiny(facts=dataclasses.replace(facts, sources=OTHER_SOURCES))
    assert compiler.compiled == ["h1024-nb0"]
    assert len(report.reused) == 4
    assert [entry.name for entry in path.parent.iterdir()] == ["tiny-sm_90"]

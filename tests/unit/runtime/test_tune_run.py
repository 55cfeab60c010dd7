"""Whole runs of `attnres-aot tune` with a stand-in driver and times that a test makes up."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from attnres_aot.bench.cold_child import _bind_all, _Memory
from attnres_aot.bench.gpu import GpuFacts
from attnres_aot.bench.rig import Job, Rig
from attnres_aot.bundle.manifest import Choice
from attnres_aot.cli import entry
from attnres_aot.config.reader import parse_config
from attnres_aot.runtime import api
from attnres_aot.runtime.prepared import PreparedAttnRes
from attnres_aot.spec.variants import parse_variant
from attnres_aot.tune import command
from attnres_aot.tune.measure import variant_for
from attnres_aot.tune.shapes import time_shapes, variants_with_choice

NAMES = [
    f"nb{nb}-delta{ring}{stats}"
    for nb in (1, 2)
    for ring in ("", "-ring1", "-ring8", "-ring16")
    for stats in ("", "-stats")
]
PRODUCERS = ["statistics-nb1", "statistics-nb2"]
CONFIG = """name: tiny
model: {hidden_size: 1024, layers: 4, block_size: 2, leading_dense_layers: 1}
mailbox: {capacity: 64, slots: [1, tp]}
deployments: # not measured
  - {tp: 8, dcp: 1}
  - {tp: 16, dcp: 16}
"""


@pytest.fixture
def bundle(stub, bundles):
    return api.load(bundles.write(NAMES, producers=PRODUCERS))


def made_up(job: Job) -> float:
    """Statistics win for two blocks at up to 8 rows; everything else loses. A copy takes 10 us."""
    us = 10.0 if job.variant.slots else 0.0
    if not job.consumer:
        return us
    if job.statistics_before:
        us += 0.5
    fast = job.variant.key.nb == 2 and job.rows <= 8
    return us + (2.0 if not job.variant.stats else 1.0 if fast else 3.0)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = GpuFacts(name="stand-in", l2_bytes=1 << 20, driver="1", torch="2")
    monkeypatch.setattr(command, "gpu_facts", lambda device: facts)
    monkeypatch.setattr(Rig, "time_us", lambda self, job: made_up(job))


def tune(bundle, *arguments: str) -> int:
    return entry.main(["tune", str(bundle.bundle.path), "--rows", "1,8,64", *arguments])


def test_writes_the_tables_that_win(bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, out = tmp_path / "tiny.yaml", tmp_path / "measured.yaml"
    config.write_text(CONFIG)
    assert tune(bundle, "--config", str(config), "--out", str(out)) == 0
    written = parse_config(out.read_bytes(), "measured")
    assert [(d.pair, str(d.attn_stats), str(d.attn_stats_blocks)) for d in written.deployments] == [
        ((8, 1), "1-8:1", "2:1"),
        ((16, 16), "1-8:1", "2:1"),
    ]
    text = out.read_text()
    assert text.startswith(CONFIG[: CONFIG.index("deployments")])
    assert "on one stand-in, driver 1" in text
    assert "# mailbox of 8 slots, less the copy into it, us" in text
    shown = capsys.readouterr().out
    assert (
        "nb 2, ordinary source, by rows  1: 2.00|1.00|2.50|1.50  8: 2.00|1.00|2.50|1.50  64: 2.00|3.00|2.50|3.50"
        in shown
    )
    assert f"wrote {out}" in shown
    assert "one image per variant" in shown


def test_the_rule_decides(bundle, capsys: pytest.CaptureFixture[str]) -> None:
    """With the kernel's 0.5 us counted the margin of 30 % is missed, without it it is met."""
    assert tune(bundle, "--json", "--margin", "30") == 0
    exposed = json.loads(capsys.readouterr().out)
    assert {table["attn_stats"] for table in exposed["tables"]["exposed"]} == {""}
    assert tune(bundle, "--json", "--margin", "30", "--rule", "ready") == 0
    ready = json.loads(capsys.readouterr().out)
    assert {(table["tp"], table["attn_stats"], table["attn_stats_blocks"]) for table in ready["tables"]["ready"]} == {
        (8, "1-8:1", "2:1"),
        (16, "1-8:1", "2:1"),
    }
    assert len(ready["cells"]) == 4 * 2 * 3


def test_a_bundle_without_statistics_is_refused(stub, bundles, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = api.load(bundles.write([name for name in NAMES if "stats" not in name]))
    assert tune(bundle) == 1
    error = capsys.readouterr().err
    assert "cannot be tuned: it has no statistics kernel for nb 1, statistics kernel for nb 2, nb1-delta-stats" in error
    assert 'set attn_stats: "1-64:1" and attn_stats_blocks: "1-2:1" in each deployment' in error
    assert "attnres-aot build --arch sm_90 --config FILE" in error


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--margin", "100"), "Invalid value for '--margin': 100.0 is not in the range 0<=x<100"),
        (("--rows", "1,65"), "the bundle's mailboxes hold 64 rows"),
        (("--rule", "fast"), "Invalid value for '--rule': 'fast' is not one of"),
        (("--out", "x.yaml"), "tiny.yaml: there is no such configuration; name the one"),
        (("--config", "gone.yaml", "--out", "x.yaml"), "gone.yaml: there is no such configuration"),
    ],
    ids=["margin", "rows", "rule", "no-shipped-config", "no-config"],
)
def test_misuse(bundle, arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune(bundle, *arguments) == 2
    assert text in capsys.readouterr().err


def test_nothing_is_written_when_the_configuration_is_another(bundle, tmp_path: Path) -> None:
    config, out = tmp_path / "tiny.yaml", tmp_path / "measured.yaml"
    config.write_text(CONFIG.replace("tp: 16, dcp: 16", "tp: 16, dcp: 1"))
    assert tune(bundle, "--config", str(config), "--out", str(out)) == 2
    assert not out.exists()


def test_the_statistics_kernel_is_launched_right_before_the_consumer(bundle, stub) -> None:
    rig = Rig(bundle, lambda calls: calls[0]() or 1.0, 1 << 20)
    job = Job(variant=variant_for(2, 8, stats=True), rows=3, pdl=True, statistics_before=True)
    sets = rig.make_sets(job)
    before = stub.launch_count()
    rig.call(job, sets, 0)()
    assert stub.launch_count() - before == 2
    consumer = stub.launch().arguments()
    assert consumer["mixture"] == sets.mixture.data_ptr()
    assert consumer["source"] == sets.mailbox.data_ptr()
    assert stub.launch(before).pdl == stub.launch().pdl == 1
    assert stub.launch(before).symbol != stub.launch().symbol


def test_every_image_of_a_variant_is_timed_by_itself(stub, bundles, monkeypatch) -> None:
    def two_images(manifest):
        choices = (
            Choice(image=manifest.images[1].name, max_rows=8),
            Choice(image=manifest.images[0].name, max_rows=None),
        )
        first = dataclasses.replace(manifest.variants[0], choices=choices)
        return dataclasses.replace(manifest, variants=(first, *manifest.variants[1:]))

    loaded = bundles.load_changed(NAMES, two_images)
    used = []

    def image_us(rig: Rig, job: Job) -> float:
        image = rig.loaded.kernel(job.variant, job.rows).image.name
        used.append((image, job.rows))
        return 1.0

    monkeypatch.setattr(Rig, "time_us", image_us)
    rig = Rig(loaded, lambda calls: 1.0, 1 << 20)
    assert [str(variant) for variant in variants_with_choice(loaded)] == [NAMES[0]]
    time_shapes(rig, parse_variant(NAMES[0]), (1, 64), pdl=True)
    names = [choice.image for choice in loaded.record(parse_variant(NAMES[0])).choices]
    assert used == [(name, rows) for name in names for rows in (1, 64)]


def test_variants_that_share_their_images_are_timed_once(stub, bundles) -> None:
    def two_images(manifest):
        choices = tuple(
            Choice(image=image.name, max_rows=8 * (i == 0) or None) for i, image in enumerate(manifest.images[:2])
        )
        return dataclasses.replace(
            manifest,
            variants=tuple(
                dataclasses.replace(record, choices=choices) if record.nb == 2 else record
                for record in manifest.variants
            ),
        )

    names = ["nb2-delta-write2-aux", "nb2-delta-aux", "nb2-delta", "nb1-delta"]
    loaded = bundles.load_changed(names, two_images)
    assert [str(variant) for variant in variants_with_choice(loaded)] == ["nb2-delta"]


def test_a_cold_start_binds_every_consumer(stub, bundles) -> None:
    names = ["nb0-write0", "nb0-write0-aux", "nb1-delta-write1", "nb1-delta-write1-aux", "nb2-delta-final-aux"]
    names += [f"{key}{option}" for key in ("nb1-delta", "nb2-delta") for option in ("-aux", "-ring8", "-stats")]
    names += ["nb1-delta-write1-ring8", "nb1-delta-write1-stats", "nb2-delta-final-ring8", "nb2-delta-final-stats"]
    bundle = api.load(bundles.write(names))
    manifest = json.loads((bundle.bundle.path / "manifest.json").read_text())
    bound = _bind_all(PreparedAttnRes, bundle, _Memory(manifest, "cpu"))
    assert [str(prepared.key.nb) for prepared in bound] == ["0", "1", "1", "2", "2"]
    assert [prepared.mailbox is not None for prepared in bound] == [False, False, True, True, True]
    assert [prepared.statistics[0] is not None for prepared in bound] == [False, True, True, True, True]
    assert [prepared.key.final for prepared in bound] == [False] * 4 + [True]

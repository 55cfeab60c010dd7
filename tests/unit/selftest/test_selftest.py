"""The self-test command and the suite behind it, with a simulated consumer in place of a GPU."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from simulated_consumer import SimulatedConsumer
from simulated_producer import SimulatedProducer

from attnres_aot.bundle.manifest import Manifest, ModelRecord, dump_manifest
from attnres_aot.bundle.reader import Bundle
from attnres_aot.cli import entry
from attnres_aot.errors import DriverError, OperandError
from attnres_aot.selftest.loaded import LoadedConsumer
from attnres_aot.selftest.report import kind_of, totals
from attnres_aot.selftest.suite import bundle_variants, check_all, image_variants, wait
from attnres_aot.spec.variants import choices_for, parse_variant
from tests.support.manifests import make_manifest

HIDDEN = 1024
NAMES = ["nb0-write0", "nb1-delta", "nb1-delta-aux", "nb1-delta-write1-aux", "nb1-delta-ring8", "nb1-delta-stats"]


PRODUCERS = ["statistics-nb1", "publish"]


def manifest_of(names: list[str]) -> Manifest:
    model = ModelRecord(hidden=HIDDEN, layers=2, block_size=1, leading_dense_layers=1)
    return make_manifest(names, PRODUCERS, model=model)


@dataclass(kw_only=True)
class FakeLoaded:
    """What the command needs of `LoadedConsumer`."""

    bundle: Bundle
    consumer: object = field(default_factory=SimulatedConsumer)
    producer: object = field(default_factory=SimulatedProducer)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    device_name: str = "simulation"

    def launch(self, case, views):
        self.consumer.launch(case, views)

    def produce(self, case, memory):
        self.producer.produce(case, memory)


@pytest.fixture
def bundle(tmp_path):
    manifest = manifest_of(NAMES)
    (tmp_path / "manifest.json").write_bytes(dump_manifest(manifest))
    return Bundle(path=Path(tmp_path), manifest=manifest, manifest_sha256="0" * 64, files={}, damage={})


@pytest.fixture
def install(monkeypatch, bundle):
    def install(consumer=None, producer=None):
        fake = FakeLoaded(
            bundle=bundle, consumer=consumer or SimulatedConsumer(), producer=producer or SimulatedProducer()
        )
        monkeypatch.setattr(LoadedConsumer, "open", lambda path, device: fake)

    return install


class Raising:
    def __init__(self, error: Exception, at: str):
        self.error, self.at = error, at

    def launch(self, case, views):
        if str(case.variant) == self.at:
            raise self.error
        SimulatedConsumer().launch(case, views)


def test_a_right_bundle_passes(install, capsys):
    install()
    assert entry.main(["selftest", "x", "--rows", "1,3", "--seed", "5"]) == 0
    out = capsys.readouterr().out
    assert "seed 5" in out
    assert "all right" in out
    assert out.count(" ok\n") == 6  # one variant for each of four images, and both producers
    for name in ("nb0-write0", "nb1-delta-write1-aux", "nb1-delta-ring8", "nb1-delta-stats", *PRODUCERS):
        assert f"\n{name} " in out


def test_a_wrong_kernel_fails_and_is_named(install, capsys):
    install(SimulatedConsumer(eps_factor=2.0))
    assert entry.main(["selftest", "x", "--rows", "16", "--all-variants"]) == 1
    out = capsys.readouterr().out
    assert "5 of 6 variants FAILED" in out  # without saved blocks there is no logit
    assert "nb1-delta rows 16" in out


def test_a_wrong_producer_fails_and_is_named(install, capsys):
    install(producer=SimulatedProducer(clean=torch.clone))
    assert entry.main(["selftest", "x", "--rows", "16"]) == 1
    out = capsys.readouterr().out
    assert "1 of 2 producers FAILED" in out
    assert "publish rows 16 dense" in out
    assert entry.main(["selftest", "x", "--rows", "16", "--variant", "statistics-nb1"]) == 0
    assert "1 producers, 3 launches" in capsys.readouterr().out


def test_json_is_all_that_is_printed(install, capsys):
    install()
    assert entry.main(["selftest", "--json", "--variant", "nb1-delta", "--rows", "2", "--seed", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["setting"]["rows"] == [2]
    assert found["setting"]["variants_in_bundle"] == 6
    assert [variant["name"] for variant in found["variants"]] == ["nb1-delta"]
    assert found["variants"][0]["launches"] == 3
    assert found["totals"][-1]["failed"] == 0
    assert found["producers"] == []
    assert entry.main(["selftest", "--json", "--variant", "publish", "--rows", "2", "--seed", "1"]) == 0
    (publish,) = json.loads(capsys.readouterr().out)["producers"]
    assert (publish["name"], publish["ok"], publish["launches"]) == ("publish", True, 3)


@dataclass(frozen=True, kw_only=True)
class Misuse:
    name: str
    arguments: list[str]
    text: str


MISUSES = [
    Misuse(name="unknown-variant", arguments=["--variant", "nb2-delta"], text="has no variant 'nb2-delta' (did you"),
    Misuse(
        name="unknown-producer", arguments=["--variant", "statistics-nb2"], text="no producer 'statistics-nb2' (did"
    ),
    Misuse(name="bad-producer", arguments=["--variant", "publish-nb2"], text="'publish-nb2' is not a producer name"),
    Misuse(name="bad-variant", arguments=["--variant", "x"], text="'x' is not a variant name"),
    Misuse(name="rows-zero", arguments=["--rows", "0"], text="row counts from 1 to 64 are wanted"),
    Misuse(name="rows-many", arguments=["--rows", "1,65"], text="row counts from 1 to 64 are wanted"),
    Misuse(name="rows-word", arguments=["--rows", "one"], text="--rows 'one'"),
    Misuse(name="both", arguments=["--all-variants", "--variant", "nb1-delta"], text="contradict each other"),
]


@pytest.mark.parametrize("case", MISUSES, ids=lambda case: case.name)
def test_misuse_says_what_is_allowed(case, install, capsys):
    install()
    assert entry.main(["selftest", *case.arguments]) == 2
    assert case.text in capsys.readouterr().err


def test_a_refused_launch_fails_its_variant_only(install, capsys):
    install(Raising(OperandError("prefix is odd"), at="nb1-delta-ring8"))
    assert entry.main(["selftest", "--rows", "1", "--all-variants"]) == 1
    out = capsys.readouterr().out
    assert "OperandError: prefix is odd" in out
    assert "1 of 6 variants FAILED" in out


def test_a_lost_device_ends_the_run(banks):
    broken = Raising(RuntimeError("CUDA error: an illegal memory access was encountered"), at="nb1-delta-aux")
    results = list(check_all([parse_variant(name) for name in NAMES], broken, banks, (1,)))
    assert [str(result.subject) for result in results] == NAMES[:3]
    assert "illegal memory access" in results[-1].problems[0]
    assert "nothing after it can be checked" in results[-1].problems[0]


def test_a_run_that_was_cut_short_fails(install, capsys):
    install(Raising(RuntimeError("CUDA error"), at="nb1-delta-ring8"))
    assert entry.main(["selftest", "--rows", "1"]) == 1
    assert "the device failed: CUDA error" in capsys.readouterr().out


def test_every_image_is_reached_by_the_fullest_variants():
    manifest = manifest_of(NAMES)
    chosen = image_variants(manifest)
    images = {image.name for image in manifest.images if image.kernel == "consumer"}
    assert {str(choices_for(v, HIDDEN)[0].spec) for v in chosen} == images
    assert "nb1-delta-write1-aux" in map(str, chosen)
    assert len(bundle_variants(manifest)) == len(NAMES)


def test_totals_are_kept_apart_by_source(banks):
    variants = [parse_variant(name) for name in NAMES]
    rows = totals(list(check_all(variants, SimulatedConsumer(), banks, (2,))))
    assert [(row.kind, row.variants, row.launches) for row in rows] == [
        ("ordinary", 4, 12), ("ring of 8", 1, 3), ("ordinary, statistics", 1, 3), ("all", 6, 18),
    ]  # fmt: skip
    assert kind_of(parse_variant("nb8-delta-final-ring1-stats")) == "ring of 1, statistics, final"


def test_waiting_for_a_hung_launch_ends(monkeypatch):
    class Event:
        def record(self, stream):
            pass

        def query(self):
            return False

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    with pytest.raises(DriverError, match=r"nb1-delta rows 3: the launch did not finish within 0\.01 s"):
        wait(torch.device("cuda", 0), "nb1-delta rows 3", seconds=0.01)

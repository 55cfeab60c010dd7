"""scripts/sanitize_launches.py with a simulated consumer in place of a GPU: the program that memory checkers watch."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from simulated_consumer import SimulatedConsumer

from attnres_aot.bundle.manifest import Choice
from attnres_aot.errors import UsageError
from attnres_aot.selftest import reference
from tests.support.bare import BARE_EPS

PROGRAM = Path(__file__).parents[3] / "scripts" / "sanitize_launches.py"
NAMES = ["nb1-delta", "nb2-delta-write2-ring8-aux", "nb2-delta-stats"]


class Statistics:
    def __init__(self, norm, query, eps, mixture, scal, *, nb, bundle):
        self.given = (nb, norm, query, eps)
        self.written = (mixture, scal)
        assert eps == BARE_EPS

    def run(self, blocks):
        for to, values in zip(self.written, reference.statistics(blocks, *self.given), strict=True):
            to[: blocks.shape[0]].copy_(values)


class Publish:
    def __init__(self, mailbox, slot, bundle):
        self.place = (mailbox, slot)

    def run(self, source):
        reference.publish(*self.place, source)


def opened(consumer):
    choices = (Choice(image="narrow", max_rows=8), Choice(image="wide", max_rows=None))
    manifest = SimpleNamespace(
        model=SimpleNamespace(hidden=1024),
        images=[None] * 4,
        variants=[SimpleNamespace(name=name, choices=(Choice(image=name, max_rows=None),)) for name in NAMES],
        producers=[SimpleNamespace(nb=2, choices=choices), SimpleNamespace(nb=None, choices=choices[1:])],
    )
    return SimpleNamespace(
        bundle=SimpleNamespace(manifest=manifest),
        loaded=SimpleNamespace(hidden=1024),
        device=torch.device("cpu"),
        launch=consumer.launch,
        bind=lambda case, views: lambda: consumer.launch(case, views),
    )


@pytest.fixture
def program(monkeypatch):
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "0")  # the program sets it; this puts it back afterwards
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    spec = importlib.util.spec_from_file_location("sanitize_launches", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "PreparedStatistics", Statistics)
    monkeypatch.setattr(module, "PreparedPublish", Publish)
    monkeypatch.setattr(module.torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(module, "captured", lambda launch: launch)

    def run(consumer, *arguments):
        monkeypatch.setattr(module.LoadedConsumer, "open", lambda bundle: opened(consumer))
        return module.main(["some-bundle", *arguments])

    return run


def test_everything_is_launched_at_every_row_count_and_on_every_image(program, capsys):
    assert program(SimulatedConsumer(), "--rows", "1,3") == 0
    # 3 variants at 2 row counts, statistics at 2 and 9 for the wide image, the publisher at 2
    assert "11 launches of 4 images, 0 problems" in capsys.readouterr().out


def test_wrong_results_fail(program, capsys):
    assert program(SimulatedConsumer(after=lambda case, views: views.out.zero_())) == 1
    assert "elements of out are wrong" in capsys.readouterr().out


@pytest.mark.parametrize("defect", ["freed", "unwritten"])
def test_a_planted_defect_is_launched_after_a_right_launch(defect, program, capsys):
    saw = []
    consumer = SimulatedConsumer()

    def launch(case, views):
        saw.append((views.norm.untyped_storage().nbytes(), views.source.data_ptr()))
        if len(saw) == 1:
            SimulatedConsumer.launch(consumer, case, views)

    assert program(SimpleNamespace(launch=launch), "--plant", defect) == 0
    assert f"planted: {defect}" in capsys.readouterr().out
    (_, right), (size, source) = saw
    assert (size == 0) == (defect == "freed")
    assert (source != right) == (defect == "unwritten")


def test_row_counts_that_no_case_has_are_misuse(program):
    with pytest.raises(UsageError, match="row counts from 1 to 64"):
        program(SimulatedConsumer(), "--rows", "65")

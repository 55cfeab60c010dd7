"""Waiting for a launch: a hang, a device that failed, and a ring consumer that gave up are told apart."""

import pytest
import torch

from attnres_aot.errors import DriverError
from attnres_aot.selftest import suite

CUDA = torch.device("cuda")


class FakeEvent:
    """An event whose state a test decides."""

    answers: tuple = ()

    def record(self, stream):
        self.left = list(self.answers)

    def query(self):
        answer = self.left.pop(0) if self.left else False
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def answer(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)

    def answer(*answers):
        monkeypatch.setattr(FakeEvent, "answers", answers)

    return answer


def test_it_returns_once_the_stream_is_done(answer):
    answer(False, False, True)
    suite.wait(CUDA, "x", seconds=60)


def test_a_hang_is_named(answer):
    answer()
    with pytest.raises(suite.DeviceLostError, match=r"nb1: the launch did not finish within 0\.01 s"):
        suite.wait(CUDA, "nb1", seconds=0.01)


def test_a_device_that_failed_is_named_with_its_error(answer):
    answer(False, RuntimeError("CUDA error: unspecified launch failure"))
    with pytest.raises(suite.DeviceLostError, match="nb1: the device failed: CUDA error: unspecified launch failure"):
        suite.wait(CUDA, "nb1", seconds=60)


def test_a_ring_consumer_that_gave_up_is_named(answer, monkeypatch):
    answer(RuntimeError("CUDA error"))
    monkeypatch.setattr(suite, "read_fault", lambda: "ring consumer nb1-ring1 gave up")
    with pytest.raises(suite.DeviceLostError, match="nb1: ring consumer nb1-ring1 gave up"):
        suite.wait(CUDA, "nb1", seconds=60)


def test_errors_of_this_package_are_left_as_they_are():
    refusal = DriverError("refused")
    with pytest.raises(DriverError) as raised, suite.naming_device_failures("nb1"):
        raise refusal
    assert raised.value is refusal

"""The check of producers: correct ones pass, planted defects are found."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from simulated_producer import SimulatedProducer

from attnres_aot.errors import OperandError
from attnres_aot.selftest import reference
from attnres_aot.selftest.cases import ROW_COUNTS
from attnres_aot.selftest.producers import producer_cases
from attnres_aot.selftest.suite import check_all, check_subject
from attnres_aot.spec.variants import parse_producer

NAMES = ["statistics-nb1", "statistics-nb3", "statistics-nb8", "publish"]


@pytest.mark.parametrize("name", NAMES)
def test_a_correct_producer_passes(name, banks):
    result = check_subject(parse_producer(name), SimulatedProducer(), banks, ROW_COUNTS, salt=3)
    assert result.problems == ()
    assert result.launches == 3 * len(ROW_COUNTS)
    assert result.relative_error < 1e-6


def wipe(name: str, place: Callable) -> Callable:
    """Returns what spoils memory that the launch must leave alone."""
    return lambda case, memory: place(case, memory.tensor(name)).fill_(0)


def to_positive_zero(bits: torch.Tensor) -> torch.Tensor:
    """Flushes subnormals, as a comparison of floats would."""
    return torch.where((bits & 0x7F80) == 0, 0, bits)


def beyond(case, tensor):
    """The words after the tensor's rows: its spare rows."""
    return tensor.as_strided((1, tensor.shape[-1]), (1, 1), tensor.storage_offset() + case.rows * tensor.stride(0))


@dataclass(frozen=True, kw_only=True)
class Defect:
    name: str
    kernel: str
    producer: SimulatedProducer
    says: str


DEFECTS = [
    Defect(name="keeps-negative-zero", kernel="publish", producer=SimulatedProducer(clean=torch.clone), says="0x8000"),
    Defect(
        name="flushes-subnormals",
        kernel="publish",
        producer=SimulatedProducer(clean=to_positive_zero),
        says="expected 0x",
    ),
    Defect(
        name="quiets-nan",
        kernel="publish",
        producer=SimulatedProducer(
            clean=lambda bits: torch.where((bits & 0x7FFF) > 0x7F80, bits | 0x40, torch.where(bits == -0x8000, 0, bits))
        ),
        says="wrong half-words, first at mailbox",
    ),
    Defect(name="other-slot", kernel="publish", producer=SimulatedProducer(slot_shift=1), says="first at mailbox"),
    Defect(
        name="row-beyond",
        kernel="publish",
        producer=SimulatedProducer(after=wipe("mailbox", lambda case, box: box[(case.slot + 1) % 3, :1])),
        says="first at mailbox",
    ),
    Defect(
        name="writes-source",
        kernel="publish",
        producer=SimulatedProducer(after=wipe("source", lambda _, rows: rows[:1])),
        says="first at source[0, 0]",
    ),
    Defect(
        name="silent-overflow",
        kernel="statistics-nb3",
        producer=SimulatedProducer(report_overflow=False),
        says="further off",
    ),
    Defect(name="eps", kernel="statistics-nb3", producer=SimulatedProducer(eps_factor=2.0), says="further off"),
    Defect(
        name="normalised",
        kernel="statistics-nb3",
        producer=SimulatedProducer(normalise=True),
        says="of mixture further off than fp32 may be",
    ),
    Defect(
        name="unshifted",
        kernel="statistics-nb3",
        producer=SimulatedProducer(shift_softmax=False),
        says="of m further off than fp32 may be",
    ),
    Defect(
        name="swapped", kernel="statistics-nb3", producer=SimulatedProducer(swap_scalars=True), says="of l further off"
    ),
    Defect(
        name="skips-a-block",
        kernel="statistics-nb8",
        producer=SimulatedProducer(skip_block=7),
        says="of mixture further off",
    ),
    Defect(
        name="rounded-weight",
        kernel="statistics-nb8",
        producer=SimulatedProducer(half_precision_weight=True),
        says="of m further off",
    ),
    Defect(
        name="mixture-row-beyond",
        kernel="statistics-nb1",
        producer=SimulatedProducer(after=wipe("mixture", beyond)),
        says="wrong half-words, first at mixture",
    ),
    Defect(
        name="writes-blocks",
        kernel="statistics-nb1",
        producer=SimulatedProducer(after=wipe("blocks", lambda _, blocks: blocks[:1, 0])),
        says="first at blocks[0, 0, 0]",
    ),
]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_defect_is_found(defect, banks):
    result = check_subject(parse_producer(defect.kernel), defect.producer, banks, (1, 16))
    assert defect.says in "\n".join(result.problems)


def test_every_value_of_bf16_is_published_next_to_others(banks):
    seen, pairs = set(), set()

    class Recorder(SimulatedProducer):
        def produce(self, case, memory):
            words = memory.tensor("source").contiguous().view(torch.int32).flatten().tolist()
            seen.update(half & 0xFFFF for word in words for half in (word, word >> 16))
            pairs.update(word & 0xFFFFFFFF for word in words)
            super().produce(case, memory)

    assert check_subject(parse_producer("publish"), Recorder(), banks, ROW_COUNTS).problems == ()
    assert len(seen) == 1 << 16
    assert {0x80000000, 0x80008000, 0x00008000} <= pairs


def test_statistics_agree_with_what_a_consumer_takes(banks):
    mild = banks.mild
    mixture, scal = reference.statistics(mild.blocks, 3, mild.norm, mild.query, 1e-5)
    exact = reference.exact_statistics(mild.blocks, 3, mild.norm, mild.query, 1e-5)
    assert torch.equal(mixture[0].double(), exact.mixture[0].float().double())
    assert torch.equal(scal[0], torch.stack([exact.maximum[0], exact.total[0]]).float())


def test_a_refused_launch_is_a_problem_and_a_lost_device_the_end(banks):
    producers = [parse_producer(name) for name in NAMES]

    class Refusing(SimulatedProducer):
        def produce(self, case, memory):
            if str(case.producer) == NAMES[0]:
                raise OperandError("blocks is odd")
            raise RuntimeError("CUDA error")

    results = list(check_all(producers, Refusing(), banks, (1,)))
    assert [str(result.subject) for result in results] == NAMES[:2]
    assert "OperandError: blocks is odd" in results[0].problems[0]
    assert "the device failed: CUDA error; nothing after it" in results[1].problems[0]


def test_cases_differ():
    cases = list(producer_cases(parse_producer("publish"), (1, 3, 64)))
    assert len({str(case) for case in cases}) == len(cases) == 9
    assert {case.slot for case in cases} == {0, 1, 2}
    assert {case.layout.name for case in cases} == {"dense", "padded", "block-major"}

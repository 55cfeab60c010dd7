"""The tests in tests/gpu, run on a simulated GPU: a mistake in one of them need not wait for a GPU to be seen."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def run(*arguments: str) -> subprocess.CompletedProcess:
    here = Path(__file__).parent
    path = os.pathsep.join(map(str, (here, here.parent / "bench", ROOT)))
    command = [sys.executable, "-m", "pytest", "-p", "simulated_gpu", "-p", "no:cacheprovider", "-q", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
        timeout=600,
    )  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Which tests, and how many they are; what needs a process or a device of its own, or takes long, is left out."""

    name: str
    arguments: tuple[str, ...]
    passed: int
    reported: str = ""


LEFT_OUT = "forked or every_device or statistics-nb2 or statistics-nb3 or statistics-nb4 or statistics-nb5"
LEFT_OUT += " or statistics-nb6 or statistics-nb7 or block-major"
NAMES = ("nb0-write0", "nb2-delta-ring8-aux")
VARIANTS = tuple(f"tests/gpu/test_all_variants.py::test_variant[{name}]" for name in NAMES)
PARTS = [
    Part("producers", ("tests/gpu/test_producers.py", "-k", f"not ({LEFT_OUT})"), 16, "| publish | 21 |"),
    Part("launching", ("tests/gpu/test_launching.py", "-k", f"not ({LEFT_OUT})"), 43),
    Part("stress", ("tests/gpu/test_stress.py", "-k", "without_a_budget or equal_inputs", "--repeats", "4"), 5),
    Part("variants", VARIANTS, 2, "| all | 2 | 0 | 42 |"),
]  # fmt: skip


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_gpu_tests_pass_on_a_simulated_gpu(part, tmp_path):
    report = tmp_path / "results"
    done = run(*part.arguments, "--gpu-report", str(report))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) == part.passed, done.stdout[-2000:]
    if part.reported:
        assert part.reported in Path(f"{report}.md").read_text()


HANG = """
import pytest
import simulated_gpu
import torch
from attnres_aot.selftest.suite import DeviceLostError
from attnres_aot.spec.variants import ConsumerKey

def test_rows_that_never_come(tmp_path):
    loaded = simulated_gpu.opened().loaded
    weights = tuple(torch.ones(1024).bfloat16() for _ in range(3))
    rows = torch.zeros(2, 1024).bfloat16()
    consumer = simulated_gpu.Consumer(weights, ConsumerKey(nb=1, has_delta=True), 1e-5, loaded)
    mailbox = simulated_gpu.new_mailbox(1, 4, 1024)
    consumer.bind_ring(mailbox).run_ring(rows, rows[:, None].clone(), rows.clone())
    with pytest.raises(DeviceLostError, match="waits for rows that do not come"):
        torch.cuda.synchronize()
    simulated_gpu.Publish(mailbox, 0).run(rows)  # in the same stream: behind the consumer
    with pytest.raises(DeviceLostError):
        torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        simulated_gpu.Publish(mailbox, 0).run(rows)
    with pytest.raises(DeviceLostError):  # the publisher behind the consumer has filled the mailbox again
        consumer.run_ring(rows, rows[:, None].clone(), rows.clone())
        consumer.run_ring(rows, rows[:, None].clone(), rows.clone())
        torch.cuda.synchronize()
"""


def test_the_simulated_gpu_hangs_where_a_real_one_would(tmp_path):
    program = tmp_path / "test_hang.py"
    program.write_text(HANG)
    done = run(str(program), "--rootdir", str(tmp_path))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr

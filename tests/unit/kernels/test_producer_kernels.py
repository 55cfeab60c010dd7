"""Producers as compiled: what a publisher writes for every word, and what lies before and after the dependency wait."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from attnres_aot.kernels.compile import launch_constants
from attnres_aot.spec.variants import PublishSpec

ROOT = Path(__file__).parents[3]

PROGRAM = """
import json, sys
from attnres_aot.kernels import compile as compiler
from attnres_aot.spec.arch import parse_arch
from attnres_aot.spec.variants import PublishSpec, StatisticsSpec
arch = parse_arch("sm_90")
compiler.prepare_environment(arch)
specs = {"statistics": StatisticsSpec(hidden=2048, nb=3), "publish": PublishSpec(hidden=2048)}
ptx = {name: compiler.compile_image(spec, arch).ptx for name, spec in specs.items()}
from attnres_aot.kernels.publish import _without_negative_zero
words = json.load(sys.stdin)
json.dump({"ptx": ptx, "words": [_without_negative_zero((word,))[0] for word in words]}, sys.stdout)
"""
WORDS = [
    *(half << 16 | half for half in range(1 << 16)),
    *(high << 16 | low for high in (0, 0x8000, 1, 0x8001, 0x7F80, 0xFFC1) for low in (0, 0x8000, 1, 0x7FFF, 0xFFFF)),
    *random.Random(5).sample(range(1 << 32), 2000),
]


@pytest.fixture(scope="module")
def compiled() -> dict:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, input=json.dumps(WORDS), cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_a_publisher_clears_the_sign_of_zeros_and_nothing_else(compiled):
    def clean(half: int) -> int:
        return 0 if half == 0x8000 else half

    assert compiled["words"] == [clean(word >> 16) << 16 | clean(word & 0xFFFF) for word in WORDS]
    assert 0x80000000 not in compiled["words"]


def places(ptx: str, instruction: str) -> list[int]:
    found = [match.start() for match in re.finditer(instruction, ptx)]
    assert found, instruction
    return found


def test_statistics_read_before_the_wait_and_write_after_it(compiled):
    ptx = compiled["ptx"]["statistics"]
    (release,) = places(ptx, r"griddepcontrol\.launch_dependents")
    (wait,) = places(ptx, r"griddepcontrol\.wait")
    loads, stores = places(ptx, r"ld\.global"), places(ptx, r"st\.global")
    assert release < min(loads) < max(loads) < wait < min(stores)
    assert len(loads) == 3 + 2  # one vector of three blocks, norm and query
    assert len(stores) == 2 + 1  # 32 bytes of mixture; m and l


def test_a_publisher_waits_before_it_reads_and_stores_whole_fragments_for_the_system(compiled):
    ptx = compiled["ptx"]["publish"]
    (release,) = places(ptx, r"griddepcontrol\.launch_dependents")
    (wait,) = places(ptx, r"griddepcontrol\.wait")
    loads, stores = places(ptx, r"ld\.global\.v4\.b32"), places(ptx, r"st\.relaxed\.sys\.global\.v4\.b32")
    assert wait < release < min(loads) < max(loads) < min(stores)
    assert len(loads) == len(stores) == 2048 // (128 * 8)
    assert loads + stores == places(ptx, r"\b(ld|st)\.\S*global")


def test_a_publisher_needs_no_cluster(compiled):
    """A consumer may fill the GPU while it waits for the rows: single CTAs start beside it, clusters may never do."""
    assert "cluster" not in compiled["ptx"]["publish"]
    assert "cluster" in compiled["ptx"]["statistics"]
    for hidden in range(1024, 8192 + 1, 1024):
        launch = launch_constants(PublishSpec(hidden=hidden))
        assert launch["cluster"] == launch["rows_per_cluster"] == 1
        assert launch["threads"] * launch["vectors"] * 8 == hidden

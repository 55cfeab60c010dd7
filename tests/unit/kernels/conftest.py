"""Lets the tests here import the machine that runs PTX, and draws the input banks that they share."""

import sys
from pathlib import Path

import pytest
import torch

from attnres_aot.selftest.cases import draw_banks

sys.path.insert(0, str(Path(__file__).parents[2]))


@pytest.fixture(scope="session")
def banks():
    from ptx_machine.prove import SEED

    torch.set_num_threads(1)
    return draw_banks(7168, 64, SEED, torch.device("cpu"))

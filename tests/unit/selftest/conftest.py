"""Lets the tests here import the simulated consumer, and draws the input banks that they share."""

import sys
from pathlib import Path

import pytest
import torch

from attnres_aot.selftest.cases import draw_banks

sys.path.insert(0, str(Path(__file__).parent))

HIDDEN = 1024


@pytest.fixture(scope="session")
def banks():
    return draw_banks(HIDDEN, 64, 7, torch.device("cpu"))

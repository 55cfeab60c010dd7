"""Real cubins, and bundles made of them without a compiler, for tests to break."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import making


@pytest.fixture(scope="session")
def cubin() -> Callable[..., bytes]:
    """Reads a test cubin by kernel, arch and the toolkit that made it."""
    return making.read_cubin_file


@pytest.fixture
def make_bundle(tmp_path) -> Callable[..., making.MadeBundle]:
    """Makes a whole bundle the way that the builder does, from test cubins."""
    return functools.partial(making.make_bundle, tmp_path / "bundles")


@pytest.fixture
def bundle(make_bundle) -> making.MadeBundle:
    return make_bundle()

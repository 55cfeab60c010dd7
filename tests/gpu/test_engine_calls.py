"""Calls as engines write them for the JIT version of this surface, inside a capture, nothing loaded before.

Each is a process of its own; loading_programs.py holds them.
"""

import pytest

from .test_binding_loads import run_program


@pytest.mark.parametrize("way", ["prepared", "code"])
def test_calls_of_the_jit_surface(way, consumer):
    run_program(consumer, "engine_calls", way)


def test_the_stream_that_is_named(consumer):
    run_program(consumer, "engine_streams", "")

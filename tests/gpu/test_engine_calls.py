"""Calls as engines write them for the JIT version of this surface, inside a capture, nothing loaded before.

Each is a process of its own; loading_programs.py holds them.
"""

import pytest


@pytest.mark.parametrize("way", ["prepared", "code"])
def test_calls_of_the_jit_surface(way, run_program):
    run_program("engine_calls", way)


def test_the_stream_that_is_named(run_program):
    run_program("engine_streams", "")

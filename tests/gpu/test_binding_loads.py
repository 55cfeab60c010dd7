"""Code is on the device once an object is bound: captures without preload, spinning consumers, threads, contexts.

Each check is a process of its own, one at a time, because code that is loaded stays; loading_programs.py holds them.
"""

import pytest


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@pytest.mark.parametrize("where", ["before", "inside", "thread"])
def test_captures_need_no_preload(mode, where, run_program):
    """Spin budgets, producers and `load` included; with `thread` another thread binds during the capture."""
    run_program("capture", mode, where)


@pytest.mark.parametrize("loading", ["LAZY", "EAGER"])
@pytest.mark.parametrize("made", ["before", "beside"])
def test_first_publishers_beside_a_spinning_consumer(made, loading, run_program):
    run_program("beside", made, CUDA_MODULE_LOADING=loading, CUDA_DEVICE_MAX_CONNECTIONS="32")


def test_threads_without_a_context(run_program):
    run_program("threads")


def test_another_context_is_current(run_program):
    run_program("context")


def test_a_child_forked_after_torch_initialised_cuda(run_program):
    run_program("fork")

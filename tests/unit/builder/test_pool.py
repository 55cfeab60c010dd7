"""The worker pool, with a compiler that does all the bad things that compilers do."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import attnres_aot
from attnres_aot.builder.pool import Job, JobFailure, Pool, PoolSettings, Target
from attnres_aot.errors import CompileError
from attnres_aot.spec.arch import Arch
from attnres_aot.spec.variants import ConsumerSpec
from tests.support.children import PATIENCE, child, wait_until


def job(nb: int, slots: int = 0) -> Job:
    spec = ConsumerSpec(hidden=1024, nb=nb, has_delta=False, final=False, slots=slots)
    return Job(name=str(spec), kernel="consumer", key=f"{nb:064x}", spec=spec)


JOBS = [job(nb) for nb in range(5)]
NAMES = [each.name for each in JOBS]


@pytest.fixture
def run(tmp_path, compiler, recorder):
    def run(jobs=JOBS, *, keep_going=True, **settings) -> Pool:
        pool = Pool(
            Target(compiler="fake_compiler", arch=Arch(9, 0), flavour="cu12"),
            tmp_path / "scratch",
            PoolSettings(**{"workers": 2, **settings}),
            recorder,
            keep_going=keep_going,
        )
        pool.compile_all(jobs)
        return pool

    return run


def test_every_job_is_compiled_once_and_the_longest_first(run, compiler, recorder):
    pool = run()
    assert sorted(compiler.compiled) == NAMES
    assert recorder.images == {name: f"CUBIN of {name} for sm_90".encode() for name in NAMES}
    assert [name for event, name in recorder.events if event == "started"] == NAMES[::-1]
    assert pool.compile_seconds == pytest.approx(0.25 * len(JOBS))
    assert pool.peak_bytes > 2 * 5_000_000
    assert not pool.failures


def test_no_more_workers_start_than_there_are_jobs(run):
    assert run(JOBS[:2], workers=8)._started == 2


def test_workers_are_replaced_after_some_jobs(run, compiler):
    run(workers=1, jobs_per_worker=2)
    by_worker = [
        [call["pid"] for call in compiler.calls if "pid" in call].count(start["start"]) for start in compiler.starts
    ]
    assert by_worker == [2, 2, 1]


def test_workers_see_no_gpu_and_no_compiler_settings(run, compiler, monkeypatch, tmp_path):
    monkeypatch.setenv("CUTE_DSL_PRINT_IR", "1")
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_80")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("KEPT", "yes")
    run(JOBS[:1])
    (start,) = compiler.starts
    environment = start["environment"]
    assert [name for name in environment if name.startswith("CUTE_DSL_")] == []
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert environment["KEPT"] == "yes"
    assert start["cwd"] == environment["TMPDIR"]
    assert start["flavour"] == "cu12"
    assert start["cwd"].startswith(str(tmp_path / "scratch"))


@pytest.mark.parametrize("module", ["enum", "pathlib", "typing", "json"])
def test_an_installed_package_does_not_stand_in_for_a_module_of_the_standard_library(
    module, run, compiler, tmp_path, monkeypatch
):
    """Old back-ports are installed so, and the folder of installed packages is on the builder's own path."""
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / f"{module}.py").write_text("raise ImportError('the back-port was taken')\n")
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.setenv("PYTHONPATH", str(packages))
    pool = run(JOBS[:1])
    assert pool.failures == []
    (start,) = compiler.starts
    assert not start["enum"].startswith(str(packages))


def test_workers_run_this_very_package(run, compiler, tmp_path, monkeypatch):
    other = tmp_path / "other" / "attnres_aot"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise ImportError('another copy was taken')\n")
    monkeypatch.syspath_prepend(str(other.parent))
    monkeypatch.setenv("PYTHONPATH", str(other.parent))
    assert run(JOBS[:1]).failures == []
    (start,) = compiler.starts
    assert start["package"] == attnres_aot.__file__


def test_a_working_folder_full_of_modules_changes_nothing(run, compiler, tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise ImportError('the working folder was searched')\n")
    (tmp_path / "attnres_aot.py").write_text("raise ImportError('the working folder was searched')\n")
    monkeypatch.chdir(tmp_path)
    assert run(JOBS[:1]).failures == []


def test_a_relative_scratch_folder_still_holds_all_temporary_files(compiler, recorder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target = Target(compiler="fake_compiler", arch=Arch(9, 0), flavour="cu12")
    Pool(target, Path("scratch"), PoolSettings(workers=1), recorder, keep_going=False).compile_all(JOBS[:1])
    (start,) = compiler.starts
    assert start["environment"]["TMPDIR"] == start["cwd"] == str(tmp_path / "scratch" / "worker1")


def test_a_worker_cannot_load_a_driver_by_its_name(run, compiler, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere")
    run(JOBS[:1])
    (start,) = compiler.starts
    assert start["environment"]["LD_LIBRARY_PATH"] == "no-driver:/somewhere"
    assert start["driver"].endswith("file too short")


def test_no_time_limit_is_a_time_limit(run):
    assert run(job_seconds=float("inf")).failures == []


@dataclass(frozen=True)
class Bad:
    name: str
    behaviour: str
    attempts: int
    reason: str
    output: str = ""


BAD = [
    Bad("killed", "segv", 2, "the worker was killed by signal 11 (SIGSEGV), 2 times in a row", "compiling h1024-nb3"),
    Bad("exits", "exit", 2, "the worker exited with status 3, 2 times in a row"),
    Bad("hangs", "hang", 1, "took more than the time limit of 1.5 s; the worker was killed"),
    Bad("raises", "raise", 1, "ValueError: register allocation failed", "chatter of the compiler on stderr"),
    Bad("babbles", "bad reply", 2, "the worker sent a reply that cannot be read"),
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.name)
def test_a_bad_image_fails_alone(case, run, compiler, recorder):
    compiler.behave_at({"h1024-nb3": case.behaviour})
    pool = run(job_seconds=1.5)
    (failure,) = pool.failures
    assert failure.name == "h1024-nb3"
    assert case.reason in failure.reason
    assert case.output in failure.output
    assert compiler.compiled.count("h1024-nb3") == case.attempts
    assert sorted(recorder.images) == [name for name in NAMES if name != "h1024-nb3"]
    assert recorder.failures == [failure]


def test_output_of_one_job_is_not_blamed_on_another(run, compiler, recorder):
    compiler.behave_at({"h1024-nb2": "raise"})
    run(workers=1)
    assert recorder.failures[0].output.startswith("compiling h1024-nb2")
    assert str(recorder.failures[0]).splitlines()[:2] == [
        "h1024-nb2: ValueError: register allocation failed",
        "    | compiling h1024-nb2",
    ]


def test_a_job_whose_worker_dies_once_is_tried_again(run, compiler, recorder):
    compiler.behave_at({"h1024-nb3": "segv once"})
    assert run().failures == []
    assert sorted(recorder.images) == NAMES
    assert compiler.compiled.count("h1024-nb3") == 2


def test_two_workers_may_die_at_jobs_of_the_same_weight(run, compiler, recorder):
    jobs = [job(1, slots=1), job(2, slots=0)]
    assert jobs[0].weight == jobs[1].weight
    compiler.behave_at({each.name: "segv once" for each in jobs})
    assert run(jobs).failures == []
    assert len(recorder.images) == 2


def test_the_first_failure_stops_the_rest_unless_asked_to_keep_going(run, compiler, recorder):
    compiler.behave_at({"h1024-nb4": "raise"})
    pool = run(keep_going=False, workers=1)
    assert [failure.name for failure in pool.failures] == ["h1024-nb4"]
    assert compiler.compiled == ["h1024-nb4"]


def test_a_refused_image_fails_its_job(run, recorder, monkeypatch):
    def refuse(name, image, seconds):
        if name == "h1024-nb1":
            raise CompileError("65 registers, the budget is 64")

    monkeypatch.setattr(recorder, "finished", refuse)
    assert run().failures == [JobFailure(name="h1024-nb1", reason="65 registers, the budget is 64")]


def test_a_mistake_of_the_watcher_is_not_blamed_on_the_worker(run, recorder, monkeypatch):
    def mistaken(name, image, seconds):
        raise KeyError(name)

    monkeypatch.setattr(recorder, "finished", mistaken)
    with pytest.raises(KeyError):
        run()


@pytest.mark.parametrize("how", ["raise", "exit", "segv", "hang"])
def test_a_compiler_that_cannot_start_fails_the_build_and_says_why(how, run, compiler):
    compiler.behave(START=how)
    with pytest.raises(CompileError, match="cannot start a compiler process for sm_90: the worker ") as caught:
        run(start_seconds=1.5 if how == "hang" else 60.0)
    expected = {"raise": "register allocation failed", "exit": "status 3", "segv": "SIGSEGV", "hang": "1.5 s to start"}
    assert expected[how] in str(caught.value)
    assert compiler.compiled == []


def test_a_worker_that_dies_at_its_start_is_replaced_once(run, compiler, recorder):
    compiler.behave(START="segv once")
    assert run(workers=1).failures == []
    assert sorted(recorder.images) == NAMES
    assert len(compiler.starts) == 2


def test_no_process_is_left_when_the_watcher_raises(run, compiler, recorder, monkeypatch):
    compiler.behave_at({"h1024-nb4": "hang"})

    def disk_full(name, image, seconds):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorder, "finished", disk_full)
    with pytest.raises(OSError, match="No space left"):
        run()
    assert [start["start"] for start in compiler.starts if is_alive(start["start"])] == []


PARENT = """
import sys
from pathlib import Path
from attnres_aot.spec.arch import Arch
from attnres_aot.builder.pool import Job, Pool, PoolSettings, Target
from attnres_aot.spec.variants import ConsumerSpec

class Deaf:
    started = finished = failed = lambda *args: None

spec = ConsumerSpec(hidden=1024, nb=4, has_delta=False, final=False, slots=0)
job = Job(name=str(spec), kernel="consumer", key="0" * 64, spec=spec)
target = Target(compiler="fake_compiler", arch=Arch(9, 0), flavour="cu12")
pool = Pool(target, Path(sys.argv[1]), PoolSettings(workers=1), Deaf(), keep_going=False)
pool.compile_all([job])
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=lambda number: number.name)
def test_a_hanging_worker_does_not_outlive_the_builder(number, compiler, tmp_path):
    compiler.behave_at({"h1024-nb4": "hang"})

    def has_started() -> bool:
        with contextlib.suppress(json.JSONDecodeError):  # read while it is being written
            return bool(compiler.compiled)
        return False

    command = [sys.executable, "-c", PARENT, str(tmp_path / "scratch")]
    with child(command, stderr=subprocess.DEVNULL) as parent:
        wait_until(has_started)
        parent.send_signal(number)
        parent.wait(PATIENCE)
        (start,) = compiler.starts
        wait_until(lambda: not is_alive(start["start"]), "the worker's end")


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False

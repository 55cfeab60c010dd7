"""Opens the bundle under test, keeps the results, and fails a session that checked nothing.

The bundle is the one that `attnres_aot.load()` finds: ATTNRES_AOT_BUNDLE (a bundle, or a folder of bundles), else
./artifacts. A report is written next to `--gpu-report` (or ATTNRES_AOT_GPU_REPORT): PATH.md and PATH.json, and what
the stress tests measured as PATH.stress.md. `--stress` (or ATTNRES_AOT_STRESS=1) runs those with full counts; they also
take the bundle built from tests/gpu/stress.yaml: ATTNRES_AOT_STRESS_BUNDLE, or one beside the bundle under test.
"""

import functools
import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from attnres_aot.errors import AttnResError, BundleError
from attnres_aot.selftest import command as selftest
from attnres_aot.selftest import report
from attnres_aot.selftest.cases import ROW_COUNTS, draw_banks
from attnres_aot.selftest.loaded import LoadedConsumer
from attnres_aot.selftest.suite import DeviceLostError, bundle_producers, bundle_variants
from attnres_aot.spec.variants import Variant
from tests.support.gpu_report import markdown

# Streams that wait for each other must not share a hardware queue; CUDA reads this when it starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
SEED_VARIABLE = "ATTNRES_AOT_SEED"
PROGRAM_SECONDS = 180.0
NOTES = pytest.StashKey[list[str]]()


def pytest_addoption(parser):
    parser.addoption(
        "--gpu-report",
        default=os.environ.get("ATTNRES_AOT_GPU_REPORT") or None,
        help="write the results to PATH.md and PATH.json",
    )

    parser.addoption(
        "--stress",
        action="store_true",
        default=os.environ.get("ATTNRES_AOT_STRESS", "") not in ("", "0"),
        help="run the stress tests with full counts",
    )
    parser.addoption("--repeats", type=int, default=100, help="launches of each image whose bits are compared")


@functools.cache
def opened() -> LoadedConsumer | str:
    """The bundle under test on the current device, or why there is none."""
    if not torch.cuda.is_available():
        return f"no GPU: torch {torch.__version__} finds no CUDA device; these tests check kernels on a real one"
    try:
        return LoadedConsumer.open(None)
    except AttnResError as error:
        return f"no bundle to check: {error}"


@functools.cache
def opened_for_stress() -> LoadedConsumer | str:
    """The bundle for mailboxes of other slot counts than the bundle under test has, or why there is none."""
    found = opened()
    if isinstance(found, str):
        return found
    manifest = found.bundle.manifest
    beside = found.bundle.path.parent / f"stress-{manifest.arch.requested}"
    try:
        return LoadedConsumer.open(os.environ.get("ATTNRES_AOT_STRESS_BUNDLE") or str(beside))
    except BundleError as error:
        build = f"attnres-aot build --arch {manifest.arch.requested} --config tests/gpu/stress.yaml"
        return f"no bundle for the stress tests; build it: {build}\n{error}"


def pytest_generate_tests(metafunc):
    if "slots" in metafunc.fixturenames:
        bundles = [found for found in (opened(), opened_for_stress()) if not isinstance(found, str)]
        have = {slots for found in bundles for slots in found.bundle.manifest.mailbox.slots}
        wanted = {1, 2, 8, 16} if metafunc.config.getoption("--stress") or not have else have
        metafunc.parametrize("slots", sorted(wanted | have))
    if "producer" in metafunc.fixturenames:
        found = opened()
        producers = [None] if isinstance(found, str) else bundle_producers(found.bundle.manifest)
        metafunc.parametrize("producer", producers, ids=lambda each: "no-bundle" if each is None else str(each))
    if "variant" in metafunc.fixturenames:
        found = opened()
        variants = [None] if isinstance(found, str) else bundle_variants(found.bundle.manifest)
        metafunc.parametrize("variant", variants, ids=lambda variant: "no-bundle" if variant is None else str(variant))


@pytest.fixture(scope="session")
def consumer():
    found = opened()
    if isinstance(found, str):
        pytest.fail(found, pytrace=False)
    return found


@pytest.fixture(scope="session")
def run_program(consumer):
    """Runs a program of loading_programs.py on the bundle under test; one that takes too long is killed."""

    def run(name: str, *arguments: str, **environment: str) -> None:
        here = Path(__file__).parent
        path = os.pathsep.join(filter(None, [str(here.parents[1]), os.environ.get("PYTHONPATH", "")]))
        done = subprocess.run(
            [sys.executable, str(here / "loading_programs.py"), name, str(consumer.bundle.path), *arguments],
            env={**os.environ, "PYTHONPATH": path, **environment}, capture_output=True, text=True,
            timeout=PROGRAM_SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert "right: " in done.stdout, done.stdout

    return run


@pytest.fixture(scope="session")
def stress_consumer():
    found = opened_for_stress()
    if isinstance(found, str):
        pytest.fail(found, pytrace=False)
    return found


@pytest.fixture(scope="session")
def full(request):
    return request.config.getoption("--stress")


@pytest.fixture(scope="session")
def notes(request):
    """Takes lines about what was measured, which the summary prints and the report holds."""
    lines = request.config.stash.setdefault(NOTES, [])
    yield lines
    path = request.config.getoption("--gpu-report")
    if path and lines:
        Path(f"{path}.stress.md").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="session")
def seed():
    return int(os.environ.get(SEED_VARIABLE) or secrets.randbelow(1 << 31))


@pytest.fixture(scope="session")
def banks(consumer, seed):
    manifest = consumer.bundle.manifest
    return draw_banks(manifest.model.hidden, manifest.mailbox.capacity, seed, consumer.device)


@pytest.fixture(scope="session")
def choose(consumer):
    """Returns the richest variant of the bundle (most blocks, then aux) for which a condition holds."""

    def choose(condition) -> Variant:
        found = [variant for variant in bundle_variants(consumer.bundle.manifest) if condition(variant)]
        if not found:
            pytest.fail(f"{consumer.bundle.path} has no variant for this test", pytrace=False)
        return max(found, key=lambda variant: (variant.key.nb, variant.aux))

    return choose


class Ledger:
    """Results of all variants, and whether the device still works."""

    def __init__(self, path, seed):
        self.results, self.path, self.seed = [], path, seed
        self.started = time.monotonic()
        self.lost = None


@pytest.fixture(scope="session")
def ledger(request, consumer, seed):
    ledger = Ledger(request.config.getoption("--gpu-report"), seed)
    yield ledger
    if not ledger.results:
        return
    setting = selftest.describe(consumer, ROW_COUNTS, seed, time.monotonic() - ledger.started)
    print(f"\n{report.summary_line(ledger.results)}; {setting.seconds:.0f} s, seed {seed}")
    if ledger.path:
        Path(f"{ledger.path}.md").write_text(markdown(ledger.results, setting))
        data = report.report_json(ledger.results, setting)
        Path(f"{ledger.path}.json").write_text(json.dumps(data, indent=1) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Stops the session once a launch has hung or broken the device: everything later would fail for that reason."""
    if call.excinfo is not None and call.excinfo.errisinstance(DeviceLostError):
        item.session.shouldstop = "the device was lost; nothing more can be checked in this process"
    return (yield)


def pytest_terminal_summary(terminalreporter, config):
    for line in config.stash.get(NOTES, []):
        terminalreporter.write_line(line)


def pytest_sessionfinish(session):
    """A run that checked nothing, or skipped anything, has failed."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    stats = reporter.stats if reporter else {}
    if (
        session.exitstatus == 0
        and not session.config.option.collectonly
        and ("passed" not in stats or "skipped" in stats)
    ):
        session.exitstatus = 1

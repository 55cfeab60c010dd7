"""A compiler that tests can break, small plans, and bundles made with them."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import attnres_aot.plan.plan
from attnres_aot.builder import assemble
from attnres_aot.builder.builder import BuildRequest, build
from attnres_aot.builder.keys import BuildFacts
from attnres_aot.builder.pool import JobFailure, PoolSettings
from attnres_aot.builder.report import BuildReport
from attnres_aot.errors import CompileError
from attnres_aot.plan.plan import Selection, plan
from attnres_aot.plan.settings import Config, Deployment, Mailbox, Model, Options
from attnres_aot.spec.arch import Arch
from attnres_aot.spec.params import KERNEL_PARAMS
from attnres_aot.spec.tables import parse_table
from attnres_aot.spec.variants import SpecChoice, Variant, choices_for

SM90 = Arch(9, 0)


def one_choice(variant: Variant, hidden: int) -> tuple[SpecChoice, ...]:
    """Stands for `choices_for`: one image per variant, so that building is tested whatever launch shapes there are."""
    return (SpecChoice(spec=dataclasses.replace(choices_for(variant, hidden)[0].spec, wide=False), max_rows=None),)


@pytest.fixture(autouse=True)
def _one_shape(monkeypatch) -> None:
    monkeypatch.setattr(attnres_aot.plan.plan, "choices_for", one_choice)


FAKE_COMPILER = """
import ctypes, json, os, signal, sys, time
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent

@dataclass
class Compiled:
    cubin: bytes
    seconds: float = 0.25

def behaviour(name):
    path = FOLDER / "behaviour.json"
    return json.loads(path.read_text()).get(name, "") if path.exists() else ""

def note(what):
    with open(FOLDER / "calls", "a") as file:
        file.write(json.dumps(what) + "\\n")

def once(name):
    try:
        (FOLDER / f"once-{name}").touch(exist_ok=False)
        return True
    except FileExistsError:
        return False

def prepare_environment(arch, flavour):
    import attnres_aot, enum
    note({"start": os.getpid(), "environment": dict(os.environ), "cwd": os.getcwd(), "flavour": flavour,
          "package": attnres_aot.__file__, "enum": enum.__file__, "driver": driver()})
    do("START")

def driver():
    try:
        return str(ctypes.CDLL("libcuda.so.1"))
    except OSError as error:
        return str(error)

def launch_constants(spec):
    return {"cluster": spec.cluster, "threads": 128, "vectors": 1, "rows_per_cluster": 1, "smem_dynamic_bytes": 0,
            "pdl": True}

def do(name):
    what = behaviour(name)
    if what == "segv" or (what == "segv once" and once(name)):
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "exit":
        os._exit(3)
    if what == "hang":
        time.sleep(3600)
    if what == "raise":
        print("chatter of the compiler on stdout")
        print("chatter of the compiler on stderr", file=sys.stderr)
        raise ValueError("register allocation failed\\nsecond line")
    if what == "bad reply":
        os.write(int(sys.argv[sys.argv.index("--reply") + 1]), b"this is no reply\\n")
        time.sleep(3600)
    return what

def compile_image(spec, arch):
    note({"name": str(spec), "pid": os.getpid()})
    print("compiling", spec)
    what = do(str(spec))
    return Compiled(cubin=b"BAD" if what == "bad image" else f"CUBIN of {spec} for {arch}".encode())
"""


@dataclasses.dataclass(frozen=True)
class FakeCompiler:
    """A compiler module in a folder of its own."""

    folder: Path

    def behave(self, **names: str) -> None:
        """Sets what happens at each image; `START` is the start of a worker. Dashes are written as underscores."""
        self.behave_at({name.replace("_", "-"): what for name, what in names.items()})

    def behave_at(self, names: dict[str, str]) -> None:
        (self.folder / "behaviour.json").write_text(json.dumps(names))

    @property
    def calls(self) -> list[dict]:
        path = self.folder / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def compiled(self) -> list[str]:
        """Image names in the order in which compiling them began, every attempt."""
        return [call["name"] for call in self.calls if "name" in call]

    @property
    def starts(self) -> list[dict]:
        return [call for call in self.calls if "start" in call]

    def forget(self) -> None:
        (self.folder / "calls").unlink(missing_ok=True)


@pytest.fixture
def compiler(tmp_path, monkeypatch) -> FakeCompiler:
    return _install_compiler(tmp_path, monkeypatch)


def _install_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    folder = folder / "compiler"
    folder.mkdir()
    (folder / "fake_compiler.py").write_text(FAKE_COMPILER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "fake_compiler", raising=False)
    return FakeCompiler(folder)


FACTS = BuildFacts(
    toolchain={"nvidia-cutlass-dsl": "4.8.1"},
    package_version="1.2.3",
    sources=dict.fromkeys(KERNEL_PARAMS, "0" * 64),
    compiler="fake_compiler",
)


@pytest.fixture
def facts() -> BuildFacts:
    return FACTS


@dataclasses.dataclass(frozen=True)
class FakeFacts:
    """What a manifest takes from the facts of a kernel."""

    registers: int = 40
    stack_bytes: int = 0
    spill_bytes: int = 0
    smem_static_bytes: int = 96
    critical_instructions: int = 7


def fake_proof(cubin, *, params, launch, **_) -> FakeFacts:
    assert launch["threads"] == 128
    name = cubin.decode().split()[2] if cubin.startswith(b"CUBIN") else ""
    kernel = next((kernel for kernel in ("statistics", "publish") if f"-{kernel}" in name), "consumer")
    assert params == KERNEL_PARAMS[kernel]
    if not name:
        raise CompileError("arch: asked sm_90, the binary names none")
    return FakeFacts()


@pytest.fixture
def trusting(monkeypatch) -> None:
    """Proves the fake compiler's images."""
    monkeypatch.setattr(assemble, "prove_image", fake_proof)


def _tiny_config(**changes) -> Config:
    """A model of 2 layers and 2 blocks: 5 images h1024-nb{0,1-delta,1,2,2-delta-final}."""
    config = Config(
        name="tiny",
        model=Model(hidden_size=1024, layers=2, block_size=1, leading_dense_layers=0),
        mailbox=Mailbox(capacity=4, fixed_slots=(1,), slot_per_rank=False),
        options=Options(ring=False, aux=False, stats=False),
        deployments=(
            Deployment(tp=2, dcp=1, attn_stats=parse_table("1-4:1"), attn_stats_blocks=parse_table("1-2:1")),
            Deployment(tp=4, dcp=1, attn_stats=parse_table("1-4:1"), attn_stats_blocks=parse_table("1-2:1")),
        ),
    )
    return dataclasses.replace(config, **changes)


@pytest.fixture
def tiny_config():
    """Makes the tiny configuration with changed fields."""
    return _tiny_config


def _request(out: Path, *, config: Config | None = None, selection: Selection | None = None, **changes):
    chosen = selection or Selection()
    options = {"pool": PoolSettings(workers=2), **changes}
    return BuildRequest(plan=plan(config or _tiny_config(), SM90, selection=chosen), out=out, **options)


@pytest.fixture
def make_request():
    """Makes a request to build the tiny bundle into a folder."""
    return _request


class Recorder:
    """Progress and pool watcher that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.failures: list[JobFailure] = []
        self.images: dict[str, bytes] = {}
        self.begun: tuple[str, int, int] | None = None
        self.ended = False

    def begin(self, bundle, to_compile, reused) -> None:
        self.begun = (bundle, to_compile, reused)

    def started(self, name) -> None:
        self.events.append(("started", name))

    def finished(self, name, *rest) -> None:
        self.events.append(("finished", name))
        if len(rest) == 2:
            self.images[name] = rest[0].cubin

    def failed(self, failure) -> None:
        self.events.append(("failed", failure.name))
        self.failures.append(failure)

    def refused(self, failure) -> None:
        self.events.append(("refused", failure.name))

    def end(self) -> None:
        self.ended = True


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def tiny(tmp_path, compiler, trusting, facts) -> Callable[..., BuildReport]:
    """Builds the tiny bundle into `tmp_path / "out"` with whatever is changed."""

    def run(**changes) -> BuildReport:
        used = changes.pop("facts", facts)
        progress = changes.pop("progress", None) or Recorder()
        return build(_request(changes.pop("out", tmp_path / "out"), **changes), used, progress)

    return run


@pytest.fixture(scope="session")
def built_once(tmp_path_factory) -> Path:
    """The tiny bundle, built once for all tests that only need one; to be copied, not changed."""
    folder = tmp_path_factory.mktemp("once")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attnres_aot.plan.plan, "choices_for", one_choice)
        patch.setattr(assemble, "prove_image", fake_proof)
        _install_compiler(folder, patch)
        assert build(_request(folder / "out"), FACTS, Recorder()).done
    return folder / "out" / "tiny-sm_90"


@pytest.fixture
def files_of() -> Callable[[Path], dict[str, bytes]]:
    """Reads all files of a folder."""
    return _files_of


def _files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}

"""`doctor`: what it makes of stub facts, how it reads a driver and an installed torch, and what it prints."""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from attnres_aot.bundle.manifest import SCHEMA
from attnres_aot.cli import doctor_command
from attnres_aot.cli.doctor_command import show_report
from attnres_aot.doctor import doctor
from attnres_aot.doctor.doctor import Facts, diagnose
from attnres_aot.doctor.machine import Driver, Gpu, Machine, Torch, gather_driver, gather_machine, gather_torch
from attnres_aot.runtime.cuda.driver import FUNCTIONS
from attnres_aot.runtime.find.places import Candidate, Place
from attnres_aot.runtime.find.resolve import Request, resolve

H200 = Gpu(index=0, name="NVIDIA H200", capability=(9, 0))
HEALTHY = Machine(
    package="0.1.0",
    python="3.12.3",
    system="Linux x86_64",
    torch=Torch(version="2.11.0+cu130", cuda="13.0"),
    driver=Driver(cuda=(13, 0), kernel_module="580.65.06", gpus=(H200,)),
    build_packages={"nvidia-cutlass-dsl": "4.8.1", "click": "8.1"},
    environment={},
)
NO_LIBRARY = "libcuda.so.1: cannot open shared object file"


def bundle(arch: str, oldest_driver: str) -> Candidate:
    return Candidate(
        path="/b/k3",
        real_path="/b/k3",
        schema=SCHEMA,
        name="kimi_k3",
        arch=arch,
        oldest_driver=oldest_driver,
        manifest_sha256="0",
    )


def facts(found: Machine = HEALTHY, arch: str | None = "sm_90", oldest_driver: str = "12.0") -> Facts:
    """Returns facts with one bundle of `arch` (or none) in one place, resolved for every GPU."""
    place = Place(label="./artifacts", candidates=() if arch is None else (bundle(arch, oldest_driver),))
    capabilities = dict.fromkeys(gpu.capability for gpu in found.driver.gpus)
    driver = found.driver.cuda
    resolutions = tuple(resolve(Request(capability=each, driver=driver), (place,)) for each in capabilities)
    return Facts(machine=found, places=(place,), resolutions=resolutions)


def with_driver(**changes: object) -> Machine:
    return replace(HEALTHY, driver=replace(HEALTHY.driver, **changes))


@dataclass(frozen=True, kw_only=True)
class Sick:
    name: str
    facts: Facts
    what: str
    fix: str


SICK = [
    Sick(
        name="no-driver",
        facts=facts(replace(HEALTHY, driver=Driver(load_error=NO_LIBRARY))),
        what=f"no NVIDIA driver ({NO_LIBRARY}): fine for building bundles, not for running them",
        fix="to run them, use a machine with an NVIDIA driver of release 550.54.14 or later",
    ),
    Sick(
        name="container-without-gpu-access",
        facts=facts(replace(HEALTHY, driver=Driver(load_error=NO_LIBRARY, kernel_module="580.65.06"))),
        what=f"the host has driver 580.65.06, but its library is not visible here ({NO_LIBRARY})",
        fix="start the container with GPU access (NVIDIA Container Toolkit, e.g. docker run --gpus all)",
    ),
    Sick(
        name="old-driver",
        facts=facts(
            replace(
                with_driver(cuda=(12, 3), missing=("cuKernelGetParamInfo",)), torch=Torch(version="2.4", cuda="12.1")
            )
        ),
        what="the driver serves CUDA 12.3; launching needs 12.4",
        fix="install a driver of release 550.54.14 or later",
    ),
    Sick(
        name="driver-lacks-functions",
        facts=facts(with_driver(missing=("cuLibraryLoadData", "cuLaunchKernelEx"))),
        what="the driver library lacks cuLibraryLoadData, cuLaunchKernelEx",
        fix="install a driver of release 550.54.14 or later",
    ),
    Sick(
        name="stub",
        facts=facts(with_driver(cuda=None, failure="CUDA_ERROR_STUB_LIBRARY", gpus=())),
        what="the libcuda.so.1 that was found is the CUDA toolkit's link-time stub",
        fix="take the folder of the toolkit's stubs out of LD_LIBRARY_PATH and of the linker's configuration",
    ),
    Sick(
        name="driver-too-old-for-the-bundle",
        facts=facts(replace(with_driver(cuda=(12, 4)), torch=Torch(version="2.4", cuda="12.4")), oldest_driver="13.0"),
        what="No bundle runs on this device, compute capability 9.0",
        fix="install a driver for CUDA 13.0 (driver release 580.65.06) or later, or build for older ones: "
        "`attnres-aot build --arch sm_90 --flavour cu12`.",
    ),
    Sick(
        name="driver-too-old-for-the-arch",
        facts=facts(
            replace(
                with_driver(cuda=(12, 8), gpus=(Gpu(index=0, name="NVIDIA B300", capability=(10, 3)),)),
                torch=Torch(version="2.7", cuda="12.8"),
            ),
            arch="sm_103",
            oldest_driver="12.9",
        ),
        what="No bundle runs on this device, compute capability 10.3",
        fix="install a driver for CUDA 12.9 (driver release 575.51.03) or later.",
    ),
    Sick(
        name="driver-mismatch",
        facts=facts(with_driver(failure="CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", gpus=())),
        what="the driver refused to start: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        fix="library and kernel module are of different releases: reboot after the driver update, or remove the driver "
        "library that the container brings",
    ),
    Sick(
        name="driver-failure-without-a-known-cause",
        facts=facts(with_driver(failure="CUDA_ERROR_UNKNOWN", gpus=())),
        what="the driver refused to start: CUDA_ERROR_UNKNOWN",
        fix="run nvidia-smi, which says more; a reboot or a driver reinstall may help",
    ),
    Sick(
        name="no-gpu",
        facts=facts(with_driver(failure="CUDA_ERROR_NO_DEVICE", gpus=())),
        what="the driver shows no GPU: fine for building bundles, not for running them",
        fix="to run them, use a machine, or give the container access to a device, with a GPU",
    ),
    Sick(
        name="hidden-gpus",
        facts=facts(
            replace(with_driver(failure="CUDA_ERROR_NO_DEVICE", gpus=()), environment={"CUDA_VISIBLE_DEVICES": "-1"})
        ),
        what="CUDA_VISIBLE_DEVICES='-1' leaves no GPU: fine for building bundles, not for running them",
        fix="unset CUDA_VISIBLE_DEVICES, or name GPUs that exist",
    ),
    Sick(
        name="no-torch",
        facts=facts(replace(HEALTHY, torch=None)),
        what="torch is not installed; the loader launches on torch tensors",
        fix="`pip install 'attnres-aot[runtime]'`",
    ),
    Sick(
        name="torch-without-cuda",
        facts=facts(replace(HEALTHY, torch=Torch(version="2.13.0+cpu", cuda=None))),
        what="torch 2.13.0+cpu is built without CUDA",
        fix="install a CUDA build of torch",
    ),
    Sick(
        name="torch-newer-than-driver",
        facts=facts(with_driver(cuda=(12, 8))),
        what="torch is built for CUDA 13.0, but the driver serves CUDA 12.8",
        fix="install a torch built for CUDA 12, or a newer driver",
    ),
    Sick(
        name="no-bundle",
        facts=facts(arch=None),
        what="No bundle runs on this device, compute capability 9.0",
        fix="`attnres-aot build --arch sm_90` builds one (sm_90a or sm_90 would do); then give its folder as the "
        "path, or in ATTNRES_AOT_BUNDLE.",
    ),
    Sick(
        name="one-of-two-gpus-without-a-bundle",
        facts=facts(with_driver(gpus=(H200, Gpu(index=1, name="NVIDIA B200", capability=(10, 0))))),
        what="No bundle runs on this device, compute capability 10.0",
        fix="`attnres-aot build --arch sm_100` builds one (sm_100a or sm_100f or sm_100 would do); then give its "
        "folder as the path, or in ATTNRES_AOT_BUNDLE.",
    ),
    Sick(
        name="gpu-that-no-arch-serves",
        facts=facts(with_driver(gpus=(Gpu(index=0, name="NVIDIA A100", capability=(8, 0)),))),
        what="No bundle runs on this device, compute capability 8.0",
        fix="use another GPU: bundles can be built for compute capability 9.0 and later 9.x; compute capability 10.0 "
        "and later 10.x; compute capability 12.0 and later 12.x.",
    ),
]


@pytest.mark.parametrize("case", SICK, ids=lambda case: case.name)
def test_each_problem_has_its_fix(case: Sick, capsys: pytest.CaptureFixture[str]) -> None:
    findings = diagnose(case.facts)
    assert [(finding.severity, finding.what, finding.fix) for finding in findings] == [("problem", case.what, case.fix)]
    show_report(case.facts, findings)
    text = capsys.readouterr().out
    assert f"problem: {case.what}\n  fix: {case.fix}\n1 problem: this machine cannot launch" in text


def test_a_healthy_machine_gives_no_finding(capsys: pytest.CaptureFixture[str]) -> None:
    findings = diagnose(facts())
    assert findings == []
    show_report(facts(), findings)
    assert capsys.readouterr().out.splitlines() == [
        "This machine",
        "  attnres-aot    0.1.0, Python 3.12.3, Linux x86_64",
        "  torch          2.11.0+cu130 (CUDA 13.0)",
        "  driver         serves CUDA 13.0 (at least 12.4 is needed), kernel module 580.65.06",
        "  build tools    nvidia-cutlass-dsl 4.8.1, click 8.1",
        "  environment    ATTNRES_AOT_BUNDLE is not set",
        "  GPU 0          NVIDIA H200, compute capability 9.0; runs code for sm_90a, sm_90",
        "",
        "Bundle for compute capability 9.0",
        "  ./artifacts: 1 candidate",
        "    accepted /b/k3: kimi_k3 for sm_90, exactly the device's 9.0",
        "",
        "This machine can launch.",
    ]


def test_a_compatible_bundle_is_noted_and_no_problem() -> None:
    (note,) = diagnose(facts(with_driver(gpus=(Gpu(index=0, name="B300", capability=(10, 3)),)), "sm_100"))
    assert note.severity == "note"
    assert note.what == "/b/k3 for sm_100 serves compute capability 10.3 by CUDA's rule"
    assert note.fix == "nothing needed; an exact bundle would be preferred: `attnres-aot build --arch sm_103`"


def test_the_note_offers_no_command_where_nothing_exact_can_be_built() -> None:
    (note,) = diagnose(facts(with_driver(gpus=(Gpu(index=0, name="GB10", capability=(12, 1)),)), "sm_120"))
    assert note.what == "/b/k3 for sm_120 serves compute capability 12.1 by CUDA's rule"
    assert note.fix == "nothing needed"


def test_a_missing_compiler_is_a_note_after_the_problems() -> None:
    sick = replace(HEALTHY, torch=None, build_packages={"nvidia-cutlass-dsl": None, "click": "8.1", "rich": None})
    problem, note = diagnose(facts(sick))
    assert (problem.severity, note.severity) == ("problem", "note")
    assert (
        note.what == "bundles cannot be built here (nvidia-cutlass-dsl, rich not installed); running does not need it"
    )


def test_without_a_gpu_the_report_lists_what_bundles_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(replace(HEALTHY, driver=Driver(load_error=NO_LIBRARY)))
    show_report(found, diagnose(found))
    lines = capsys.readouterr().out.splitlines()
    assert "Bundles found (no GPU to choose for)" in lines
    assert "    /b/k3: kimi_k3 for sm_90, needs a driver for CUDA 12.0" in lines


@dataclass
class StubDriver:
    """Stands in for the loaded libcuda: Python functions that fill ctypes references as the driver would."""

    version: int = 13000
    status: int = 0
    gpus: tuple[tuple[bytes, int, int], ...] = ((b"NVIDIA H200", 9, 0),)
    lacks: tuple[str, ...] = ()
    calls: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name in self.lacks or name not in FUNCTIONS:
            raise AttributeError(name)
        return lambda *_: 0

    def cuDriverGetVersion(self, number) -> int:
        number._obj.value = self.version
        return 0

    def cuInit(self, flags: int) -> int:
        self.calls.append("cuInit")
        return self.status

    def cuDeviceGetCount(self, count) -> int:
        self.calls.append("cuDeviceGetCount")
        count._obj.value = len(self.gpus)
        return 0

    def cuDeviceGet(self, device, ordinal: int) -> int:
        device._obj.value = ordinal
        return 0

    def cuDeviceGetName(self, name, size: int, device: ctypes.c_int) -> int:
        name.value = self.gpus[device.value][0][: size - 1]
        return 0

    def cuDeviceGetAttribute(self, value, attribute: int, device: ctypes.c_int) -> int:
        value._obj.value = self.gpus[device.value][attribute - 74]
        return 0

    def cuGetErrorName(self, status: int, name) -> int:
        if status != 100:
            return 1
        name._obj.value = b"CUDA_ERROR_NO_DEVICE"
        return 0


@dataclass
class LinkTimeStub:
    """The toolkit's library for linking: every function is there and fails, whatever it is asked."""

    version_status: int

    def __getattr__(self, name: str) -> object:
        return lambda *_: self.version_status if name == "cuDriverGetVersion" else 34


@pytest.mark.parametrize("status", [34, 0])
def test_a_link_time_stub_is_told_as_what_it_is(status: int, tmp_path: Path) -> None:
    found = gather(LinkTimeStub(version_status=status), tmp_path)
    assert (found.cuda, found.failure, found.gpus) == (None, "CUDA_ERROR_STUB_LIBRARY", ())
    (finding,) = diagnose(facts(replace(HEALTHY, driver=found)))
    assert finding.what == "the libcuda.so.1 that was found is the CUDA toolkit's link-time stub"
    assert "LD_LIBRARY_PATH" in finding.fix


def test_a_library_that_is_no_driver_at_all_is_told_by_what_it_lacks(tmp_path: Path) -> None:
    found = gather(object(), tmp_path)
    assert "cuInit" in found.missing
    (finding,) = diagnose(facts(replace(HEALTHY, driver=found)))[:1]
    assert finding.what.startswith("the driver library lacks cuCtxGetCurrent")


def gather(stub: object, tmp_path: Path) -> Driver:
    return gather_driver(lambda name: stub, tmp_path / "no kernel module")


def test_a_driver_is_read_with_all_its_gpus(tmp_path: Path) -> None:
    stub = StubDriver(version=12080, gpus=((b"NVIDIA H200", 9, 0), (b"NVIDIA B300", 10, 3)))
    module = tmp_path / "version"
    module.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n")
    assert gather_driver(lambda name: stub, module) == Driver(
        cuda=(12, 8), kernel_module="580.65.06", gpus=(H200, Gpu(index=1, name="NVIDIA B300", capability=(10, 3)))
    )


def test_an_old_driver_is_read_although_functions_are_missing(tmp_path: Path) -> None:
    found = gather(StubDriver(version=11080, lacks=("cuLibraryLoadData", "cuKernelGetParamInfo")), tmp_path)
    assert (found.cuda, found.missing, found.gpus) == ((11, 8), ("cuKernelGetParamInfo", "cuLibraryLoadData"), (H200,))


def test_a_driver_that_refuses_to_start_is_asked_nothing_more(tmp_path: Path) -> None:
    stub = StubDriver(status=100)
    assert gather(stub, tmp_path) == Driver(cuda=(13, 0), failure="CUDA_ERROR_NO_DEVICE")
    assert stub.calls == ["cuInit"]


def test_an_error_without_a_name_keeps_its_number(tmp_path: Path) -> None:
    assert gather(StubDriver(status=4711), tmp_path).failure == "CUDA error 4711"


def test_a_missing_driver_library_is_a_fact_and_no_crash(tmp_path: Path) -> None:
    def load(name: str) -> object:
        raise OSError(f"{name}: cannot open shared object file")

    assert gather_driver(load, tmp_path / "none") == Driver(load_error=NO_LIBRARY)


@dataclass(frozen=True, kw_only=True)
class TorchFile:
    name: str
    source: str | None
    found: Torch | None


TORCH_FILES = [
    TorchFile(
        name="cuda-build",
        source="from typing import Optional\n__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\n",
        found=Torch(version="2.11.0+cu130", cuda="13.0"),
    ),
    TorchFile(
        name="cpu-build",
        source="__version__ = '2.13.0+cpu'\ncuda: 'str | None' = None\n",
        found=Torch(version="2.13.0+cpu", cuda=None),
    ),
    TorchFile(name="no-version-file", source=None, found=None),
]


@pytest.mark.parametrize("case", TORCH_FILES, ids=lambda case: case.name)
def test_torch_is_read_and_not_imported(case: TorchFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    if case.source is not None:
        (package / "version.py").write_text(case.source)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert gather_torch() == case.found


def run(monkeypatch: pytest.MonkeyPatch, found: Machine, bundle: str | None, *, as_json: bool) -> tuple[int, str]:
    monkeypatch.setattr(doctor, "gather_machine", lambda: found)
    arguments = [*([bundle] if bundle else []), *(["--json"] if as_json else [])]
    done = CliRunner().invoke(doctor_command.command, arguments, standalone_mode=False)
    assert done.exception is None
    return done.return_value, done.output.removesuffix("\n")


def test_the_command_fails_with_the_trace_of_the_search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, text = run(monkeypatch, HEALTHY, str(tmp_path / "nowhere"), as_json=False)
    assert status == 1
    assert f"  path '{tmp_path}/nowhere': {tmp_path}/nowhere does not exist" in text


def test_json_is_one_object_with_every_fact(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{")
    status, text = run(monkeypatch, HEALTHY, str(tmp_path), as_json=True)
    report = json.loads(text)
    assert (status, report["can_launch"]) == (1, False)
    assert report["machine"]["driver"]["gpus"] == [{"index": 0, "name": "NVIDIA H200", "capability": [9, 0]}]
    (verdict,) = report["resolutions"][0]["trace"][0]["verdicts"]
    assert verdict["status"] == "refused"
    assert "not a manifest" in verdict["reason"]
    assert report["findings"][0]["severity"] == "problem"


def test_the_command_succeeds_where_every_gpu_has_its_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_command, "gather_facts", lambda bundle, name: facts())
    status, text = run(monkeypatch, HEALTHY, None, as_json=True)
    assert (status, json.loads(text)["can_launch"]) == (0, True)


@pytest.mark.parametrize("metadata", [b"", b"\xff\xfe\x00", b"Name: click"], ids=["empty", "not-text", "no-version"])
def test_a_build_tool_with_broken_metadata_is_of_unknown_version(
    metadata: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "click-8.2.dist-info").mkdir()
    (tmp_path / "click-8.2.dist-info" / "METADATA").write_bytes(metadata)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert gather_machine().build_packages["click"] == "of unknown version"


def test_a_torch_whose_version_file_is_no_text_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    (tmp_path / "torch" / "version.py").write_bytes(b"\xff\xfe")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert gather_torch() is None

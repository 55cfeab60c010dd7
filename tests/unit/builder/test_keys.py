"""Build keys: each thing that decides an image's bytes changes them, and nothing else does."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from attnres_aot.builder import keys
from attnres_aot.builder.keys import BuildFacts, build_key, gather_facts, wanted_images
from attnres_aot.builder.sources import (
    COMPILING,
    MANIFEST,
    PACKAGE,
    RULES,
    combined_digest,
    source_files,
    sources_digests,
)
from attnres_aot.builder.toolchain import toolchain_versions
from attnres_aot.errors import CompileError
from attnres_aot.plan.plan import plan
from attnres_aot.spec.arch import Arch
from attnres_aot.spec.params import CONSUMER_PARAMS, KERNEL_PARAMS
from attnres_aot.spec.variants import ConsumerSpec, PublishSpec, StatisticsSpec

SPEC = ConsumerSpec(hidden=7168, nb=3, has_delta=True, final=False, slots=8)
FACTS = BuildFacts(
    toolchain={"dsl": "1"},
    package_version="1",
    sources={"consumer": "a" * 64, "statistics": "c" * 64, "publish": "d" * 64},
)
BASE: dict[str, Any] = {
    "spec": SPEC,
    "launch": {"threads": 128},
    "arch": Arch(10, 0),
    "facts": FACTS,
}


@dataclass(frozen=True)
class Change:
    name: str
    argument: str
    value: Any


CHANGES = [
    Change("kernel", "spec", StatisticsSpec(hidden=7168, nb=3)),
    Change("hidden", "spec", dataclasses.replace(SPEC, hidden=1024)),
    Change("nb", "spec", dataclasses.replace(SPEC, nb=4)),
    Change("stats", "spec", dataclasses.replace(SPEC, nb=None)),
    Change("delta", "spec", dataclasses.replace(SPEC, has_delta=False)),
    Change("final", "spec", dataclasses.replace(SPEC, final=True)),
    Change("slots", "spec", dataclasses.replace(SPEC, slots=1)),
    Change("wide", "spec", dataclasses.replace(SPEC, wide=True)),
    Change("threads", "launch", {"threads": 256}),
    Change("arch-suffix", "arch", Arch(10, 0, "a")),
    Change("arch-minor", "arch", Arch(10, 3)),
    Change("version", "facts", dataclasses.replace(FACTS, toolchain={"dsl": "2"})),
    Change("component", "facts", dataclasses.replace(FACTS, toolchain={"dsl": "1", "more": "1"})),
    Change("flavour", "facts", dataclasses.replace(FACTS, flavour="cu13")),
    Change("sources", "facts", dataclasses.replace(FACTS, sources={"consumer": "b" * 64})),
    Change("compiler", "facts", dataclasses.replace(FACTS, compiler="other")),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.name)
def test_what_decides_the_bytes_changes_the_key(change):
    assert build_key(**BASE) != build_key(**{**BASE, change.argument: change.value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("kernel_symbol", lambda image: f"other_{image}"), ("KERNEL_PARAMS", {"consumer": CONSUMER_PARAMS[:-1]})],
)
def test_the_symbol_and_the_parameters_change_the_key(name, value, monkeypatch):
    before = build_key(**BASE)
    monkeypatch.setattr(keys, name, value)
    assert build_key(**BASE) != before


def test_every_field_of_a_spec_has_a_case_above():
    assert {field.name.removeprefix("has_") for field in dataclasses.fields(SPEC)} <= {each.name for each in CHANGES}


def test_kernels_of_equal_fields_have_different_keys():
    statistics, publish = StatisticsSpec(hidden=7168, nb=3), PublishSpec(hidden=7168)
    others = [ConsumerSpec(hidden=7168, nb=3, has_delta=False, final=False, slots=0), statistics, publish]
    assert len({build_key(**{**BASE, "spec": spec}) for spec in others}) == len(others)


def test_the_order_of_components_and_the_package_version_do_not_change_the_key():
    one = dataclasses.replace(FACTS, toolchain={"a": "1", "b": "2"})
    two = dataclasses.replace(FACTS, toolchain={"b": "2", "a": "1"}, package_version="2")
    assert build_key(**{**BASE, "facts": one}) == build_key(**{**BASE, "facts": two})


def test_images_of_a_plan_have_names_and_distinct_keys(tiny_config):
    wanted = wanted_images(plan(tiny_config(), Arch(9, 0)), FACTS)
    assert [image.name for image in wanted][:2] == ["h1024-nb0", "h1024-nb1-delta"]
    assert len({image.key for image in wanted}) == len(wanted) == 5


@pytest.fixture
def package(tmp_path):
    copy = tmp_path / "elsewhere" / "attnres_aot"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.mark.parametrize("kernel", KERNEL_PARAMS)
def test_the_sources_of_a_kernel_are_its_device_code(kernel):
    names = {path.relative_to(PACKAGE).as_posix() for path in source_files(kernel)}
    assert {f"kernels/{kernel}.py", "kernels/ptx.py"} <= names
    assert all(name.startswith("kernels/") for name in names)
    others = {f"kernels/{other}.py" for other in KERNEL_PARAMS if other != kernel}
    assert names.isdisjoint({*others, COMPILING})


def test_all_device_code_belongs_to_some_kernel():
    used = {path.name for kernel in KERNEL_PARAMS for path in source_files(kernel)}
    host = {"__init__.py", "compile.py", "driverless.py"}
    assert {path.name for path in (PACKAGE / "kernels").glob("*.py")} == used | host


def test_the_digests_do_not_depend_on_where_the_sources_lie(package):
    assert sources_digests(package) == sources_digests()


def added(text: str):
    return lambda source: source + text


def changed(old: str, new: str):
    def change(source: str) -> str:
        assert source.count(old) >= 1
        return source.replace(old, new)

    return change


@dataclass(frozen=True)
class Edit:
    name: str
    file: str
    change: Callable[[str], str]
    digests: set[str]


ALL = {*KERNEL_PARAMS, MANIFEST}
CONSTANT = added("\n\nMORE = 1\n")
EDITS = [
    Edit("comment", "kernels/ptx.py", added("\n# words\n"), set()),
    Edit("docstring", "kernels/consumer.py", added('\n\n"""Words."""\n'), set()),
    Edit("docstrings", "kernels/compile.py", changed("Compiles the kernel for", "Makes"), set()),
    Edit("layout", "kernels/consumer.py", changed("\n\n", "\n\n\n"), set()),
    Edit("message", "kernels/compile.py", changed("the compiler wrote no whole cubin", "no cubin"), set()),
    Edit("other message", "kernels/compile.py", changed("call prepare_environment first", "prepare"), set()),
    Edit("messages of rules", "spec/variants.py", changed("is not a variant name", "names none"), set()),
    Edit("one kernel", "kernels/consumer.py", CONSTANT, {"consumer"}),
    Edit("another kernel", "kernels/publish.py", CONSTANT, {"publish"}),
    Edit("device code of all", "kernels/ptx.py", CONSTANT, set(KERNEL_PARAMS)),
    Edit("device text", "kernels/ptx.py", changed("relaxed", "other"), set(KERNEL_PARAMS)),
    Edit("how it is compiled", COMPILING, changed("--keep-ptx ", ""), ALL),
    Edit("how an operand is made", COMPILING, changed("assumed_align=16", "assumed_align=8"), ALL),
    Edit("what the process is", COMPILING, changed('environ["CUDA_VISIBLE_DEVICES"] = ""', "pass"), ALL),
    Edit("a launch constant, in the key by value", COMPILING, changed("WIDE = (64, 2)", "WIDE = (32, 2)"), {MANIFEST}),
    *(Edit(file, file, CONSTANT, {MANIFEST}) for file in RULES),
    Edit("nothing of it", "runtime/api.py", CONSTANT, set()),
]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.name)
def test_an_edit_changes_the_digests_that_it_affects_and_no_others(edit, package):
    before = sources_digests(package)
    path = package / edit.file
    path.write_text(edit.change(path.read_text()))
    after = sources_digests(package)
    assert {name for name in before if before[name] != after[name]} == edit.digests
    assert (combined_digest(before) != combined_digest(after)) == bool(edit.digests)


def test_what_a_worker_calls_is_there(package):
    path = package / COMPILING
    path.write_text(path.read_text().replace("def compile_image", "def make_image"))
    with pytest.raises(KeyError, match="compile_image"):
        sources_digests(package)


@pytest.mark.parametrize(
    "line",
    [
        "from attnres_aot.kernels import more",
        "from attnres_aot.kernels.more import x",
        "import attnres_aot.kernels.more",
    ],
)
def test_device_code_that_a_kernel_imports_counts(line, package):
    with (package / "kernels" / "ptx.py").open("a") as file:
        file.write(f"\n\ndef late():\n    {line}\n")
    before = sources_digests(package)
    (package / "kernels" / "more.py").write_text("x = 1\n")
    after = sources_digests(package)
    assert all(before[kernel] != after[kernel] for kernel in KERNEL_PARAMS)


def _install(folder, name: str, version: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_the_chosen_flavours_library_counts_and_others_do_not(tmp_path, monkeypatch):
    _install(tmp_path, "nvidia-cutlass-dsl", "9.9.0")
    _install(tmp_path, "NVIDIA_cutlass.dsl-libs-base", "9.9.1")
    _install(tmp_path, "nvidia-cutlass-dsl-libs-cu12", "9.9.2")
    _install(tmp_path, "unrelated", "1.0")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    alone = toolchain_versions("cu12")
    assert alone == {
        "nvidia-cutlass-dsl": "9.9.0",
        "nvidia-cutlass-dsl-libs-base": "9.9.1",
        "nvidia-cutlass-dsl-libs-cu12": "9.9.2",
    }
    _install(tmp_path, "nvidia-cutlass-dsl-libs-cu13", "9.9.3")
    _install(tmp_path, "nvidia-cutlass-dsl-libs-qnx-cu12", "9.9.4")
    assert toolchain_versions("cu12") == alone
    assert toolchain_versions("cu13") == {
        "nvidia-cutlass-dsl": "9.9.0",
        "nvidia-cutlass-dsl-libs-base": "9.9.1",
        "nvidia-cutlass-dsl-libs-cu13": "9.9.3",
    }


def test_a_flavour_that_is_not_installed_is_refused_with_the_command_that_installs_it(tmp_path, monkeypatch):
    _install(tmp_path, "nvidia-cutlass-dsl", "9.9.0")
    _install(tmp_path, "nvidia-cutlass-dsl-libs-cu12", "9.9.0")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(CompileError) as caught:
        toolchain_versions("cu13")
    assert str(caught.value) == (
        "the compiler's library of flavour cu13 is not installed here (installed: cu12); "
        "install it: `pip install 'nvidia-cutlass-dsl-libs-cu13==9.9.0'`"
    )


def test_a_machine_without_the_compiler_is_told_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(CompileError, match=r"nvidia-cutlass-dsl is not installed here; .*pip install 'attnres-aot"):
        toolchain_versions("cu12")


@pytest.mark.parametrize("metadata", [None, b"", b"Name: x", b"\xff\xfe\x00", "a folder"], ids=str)
def test_a_strangers_broken_package_changes_nothing(metadata, tmp_path, monkeypatch):
    _install(tmp_path, "nvidia-cutlass-dsl", "9.9.0")
    _install(tmp_path, "nvidia-cutlass-dsl-libs-cu12", "9.9.2")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    whole = toolchain_versions("cu12")
    broken = tmp_path / "aaa-1.0.dist-info"
    broken.mkdir()
    if metadata == "a folder":
        (broken / "METADATA").mkdir()
    elif metadata is not None:
        (broken / "METADATA").write_bytes(metadata)
    assert toolchain_versions("cu12") == whole


def test_the_facts_of_this_machine_are_recorded_with_the_package_version():
    facts = gather_facts()
    assert facts.sources == sources_digests()
    assert facts.sources_sha256 == combined_digest(sources_digests())
    assert facts.recorded.keys() == {"attnres-aot", *facts.toolchain}
    assert "nvidia-cutlass-dsl" in facts.toolchain

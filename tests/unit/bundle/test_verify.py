"""`verify` finds every broken promise: each field of a record, each way that a file can be wrong."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from renaming import rename_kernel

from attnres_aot.bundle import swap
from attnres_aot.bundle.manifest import MANIFEST_NAME, SCHEMA
from attnres_aot.cli.entry import main
from attnres_aot.spec.params import CONSUMER_PARAMS
from attnres_aot.verify import derive
from attnres_aot.verify.bundle_check import verify_bundle


@pytest.mark.parametrize("arch", ["sm_90", "sm_90a", "sm_100", "sm_100a", "sm_100f", "sm_103", "sm_120a"])
def test_a_fresh_bundle_keeps_every_promise(make_bundle, arch):
    report = verify_bundle(make_bundle(arch).path)
    assert (report.ok, report.problems, report.notes) == (True, (), ())


OTHER_RELEASE = "0" * 64
OPEN = (
    "built from other sources than this release's, so not derived again: build keys, budgets, launch shapes "
    "beyond what image names say, and up to how many rows each image of a variant is used"
)


def test_what_cannot_be_derived_again_is_a_note(make_bundle):
    report = verify_bundle(make_bundle(sources=OTHER_RELEASE).path)
    assert (report.ok, report.notes) == (True, (OPEN,))


def test_what_was_not_checked_is_said_and_fails_if_all_must_be(make_bundle, capsys):
    path = str(make_bundle(sources=OTHER_RELEASE).path)
    assert main(["verify", path]) == 0
    assert f"{path}: not checked: {OPEN}" in capsys.readouterr().out
    assert main(["verify", "--strict", path]) == 1
    assert "NOT OK: not all of it could be checked, as --strict asks" in capsys.readouterr().out
    assert main(["verify", "--strict", "--json", path]) == 1
    (report,) = json.loads(capsys.readouterr().out)["bundles"]
    assert (report["ok"], report["problems"], report["not_checked"]) == (False, [], [OPEN])


def test_verifying_needs_neither_the_compiler_nor_what_reads_yaml(bundle):
    program = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('cutlass', 'torch', 'yaml', 'rich', 'click', 'numpy')))\n"
        "from attnres_aot.verify.bundle_check import verify_bundle\n"
        "report = verify_bundle(sys.argv[1])\n"
        "print(report.ok, report.problems, report.notes)\n"
    )
    run = [sys.executable, "-c", program, str(bundle.path)]
    root = Path(__file__).parents[3]
    assert subprocess.run(run, capture_output=True, text=True, cwd=root, check=True).stdout == "True () ()\n"


@pytest.mark.parametrize("arguments", [["verify", "--strict"], ["inspect"], ["inspect", "--variant", "publish"]])
def test_an_install_with_the_extra_inspect_alone_looks_at_a_bundle(bundle, arguments):
    program = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('cutlass', 'torch', 'yaml', 'rich', 'numpy')))\n"
        "from attnres_aot.cli.entry import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    run = [sys.executable, "-c", program, *arguments, str(bundle.path)]
    result = subprocess.run(run, capture_output=True, text=True, cwd=Path(__file__).parents[3], check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert "not checked" not in result.stdout


def test_without_the_packages_sources_all_else_is_checked(bundle, monkeypatch):
    monkeypatch.setattr(derive, "own_sources", lambda: None)
    report = verify_bundle(bundle.path)
    assert (report.ok, report.notes) == (True, (OPEN,))
    bundle.edit(lambda raw: raw["mailbox"].update(slots=[1]))
    assert not verify_bundle(bundle.path).ok


def test_a_bundle_of_this_release_is_checked_whole(bundle):
    assert main(["verify", "--strict", str(bundle.path)]) == 0


def image(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda raw: raw["images"][2].update(changes)


def budget(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda raw: raw["images"][2]["budget"].update(changes)


def variant(index: int, **changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda raw: raw["variants"][index].update(changes)


def other_image(raw: dict[str, Any]) -> None:
    raw["variants"][0]["choices"][0]["image"] = raw["images"][2]["name"]


def swap_files(raw: dict[str, Any]) -> None:
    first, second = [image for image in raw["images"] if image["block_threads"] == 128][:2]
    first["file"], second["file"] = second["file"], first["file"]


def move_parameter(raw: dict[str, Any]) -> None:
    params = raw["abis"]["consumer"]
    params[-1]["offset"] += 4


def swap_parameters(raw: dict[str, Any]) -> None:
    params = raw["abis"]["consumer"]
    params[3]["name"], params[4]["name"] = params[4]["name"], params[3]["name"]


@dataclass(frozen=True, kw_only=True)
class Lie:
    """A change of the manifest, and a part of the problem that it must cause."""

    name: str
    change: Callable[[dict[str, Any]], object]
    message: str


def unknown_kernel(raw: dict[str, Any]) -> None:
    raw["images"].append({**raw["images"][0], "name": "other", "file": "other.cubin", "kernel": "other"})


def producer(index: int, **fields: Any) -> Callable[[dict[str, Any]], object]:
    """Changes fields of a producer: the statistics of 2 blocks, or the publisher."""
    return lambda raw: raw["producers"][index].update(fields)


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth else []


LIES = [
    Lie(name="image name", change=image(name="other"), message="image 'h2048-nb1-delta' is not in the bundle"),
    Lie(name="image kernel", change=image(kernel="publish"), message="its name is one of kernel 'consumer'"),
    Lie(name="image of no variant", change=unknown_kernel, message="'other' does not name an image"),
    Lie(name="image file", change=image(file="other.cubin"), message="the file is missing"),
    Lie(name="image file outside", change=image(file="../x.cubin"), message="'../x.cubin' is not a safe file name"),
    Lie(name="image file too long", change=image(file="x" * 300), message="is 300 characters long"),
    Lie(name="image sha256", change=image(sha256="0" * 64), message="but the manifest says 00000"),
    Lie(name="image size", change=image(size=6695), message="bytes, but the manifest says 6695"),
    Lie(
        name="image symbol",
        change=image(symbol="other"),
        message="symbol is 'other', not 'attnres_h2048_nb1_delta_cutlass_0'",
    ),
    Lie(name="image abi", change=image(abi="other"), message="abi 'other' is not one of consumer"),
    Lie(name="image cluster", change=image(cluster=1), message="cluster is 1; its rows take clusters of 2"),
    Lie(name="image cluster uneven", change=image(cluster=3), message="cluster is 3; its rows take clusters of 2"),
    Lie(name="image rows", change=image(rows_per_cluster=2), message="rows_per_cluster is 2; every kernel handles 1"),
    Lie(
        name="image threads",
        change=image(block_threads=64),
        message="block_threads: the manifest says 64; built again it would say 128",
    ),
    Lie(
        name="image static",
        change=image(smem_static_bytes=0),
        message="smem_static_bytes: the manifest says 0; built again it would say 40",
    ),
    Lie(
        name="image dynamic",
        change=image(smem_dynamic_bytes=16),
        message="smem_dynamic_bytes: the manifest says 16; built again it would say 0",
    ),
    Lie(
        name="image pdl", change=image(pdl=False), message="pdl: the manifest says False; built again it would say True"
    ),
    Lie(
        name="image registers",
        change=image(registers=9),
        message="registers: the manifest says 9; built again it would say 8",
    ),
    Lie(
        name="image stack",
        change=image(stack_bytes=8),
        message="stack_bytes: the manifest says 8; built again it would say 0",
    ),
    Lie(
        name="image spills",
        change=image(spill_bytes=8),
        message="spill_bytes: the manifest says 8; built again it would say 0",
    ),
    Lie(
        name="image path",
        change=image(critical_instructions=1),
        message="critical_instructions: the manifest says 1; built again it would say",
    ),
    Lie(
        name="over budget",
        change=budget(smem_bytes=1),
        message="budget.smem_bytes: the manifest says 1; built again it would say 19456",
    ),
    Lie(
        name="budget",
        change=budget(registers=200),
        message="budget.registers: the manifest says 200; built again it would say 96",
    ),
    Lie(name="image key", change=image(build_key="0" * 64), message="build_key: the manifest says '00000"),
    Lie(name="image twice", change=lambda raw: raw["images"].append(raw["images"][0]), message="occurs more than once"),
    Lie(
        name="image unused",
        change=lambda raw: raw["variants"].__delitem__(slice(2)),
        message="variants.nb0-write0: not in the manifest; built again it would be",
    ),
    Lie(name="images swapped", change=other_image, message="'h2048-nb1-delta' is code for something else"),
    Lie(
        name="schema",
        change=lambda raw: raw.update(schema=1),
        message=f"manifest schema 1, but this attnres-aot reads schema {SCHEMA}",
    ),
    Lie(name="unknown field", change=lambda raw: raw.update(extra=1), message="unknown: ['extra']"),
    Lie(name="bundle name", change=lambda raw: raw.update(name="a/b"), message="'a/b' is not a safe file name"),
    Lie(name="arch requested", change=lambda raw: raw["arch"].update(requested="sm_100a"), message="was requested"),
    Lie(
        name="arch proven",
        change=lambda raw: raw["arch"].update(proven="sm_103"),
        message="'sm_100' was requested, but 'sm_103' is proven",
    ),
    Lie(name="arch name", change=lambda raw: raw["arch"].update(proven="gpu"), message="'gpu' is not a GPU"),
    Lie(
        name="configuration",
        change=lambda raw: raw["config"]["mailbox"].update(capacity=32),
        message="mailbox.capacity: the manifest says 64; built again it would say 32",
    ),
    Lie(
        name="configuration that is none",
        change=lambda raw: raw["config"]["deployments"][0].update(tp=99),
        message="manifest.json: config:1: deployments[0].tp: found 99; allowed: 1..16",
    ),
    Lie(name="configuration empty", change=lambda raw: raw.update(config={}), message="config:1: name: missing"),
    Lie(
        name="configuration deep",
        change=lambda raw: raw["config"].update(model=nested(200)),
        message="config:1: model: found a list of 1; allowed: a mapping",
    ),
    Lie(
        name="selection",
        change=lambda raw: raw["selection"].update(only=["nb0"]),
        message="variants.nb1-delta: the manifest has it; built again it would not",
    ),
    Lie(
        name="selection of nothing",
        change=lambda raw: raw["selection"].update(tp=[3]),
        message="the bundle cannot have been built from what it names: no deployment has tp=3",
    ),
    Lie(
        name="sources",
        change=lambda raw: raw.update(sources_sha256="x"),
        message="sources_sha256 'x' is not a lower-case sha256 digest",
    ),
    Lie(
        name="toolchain",
        change=lambda raw: raw["toolchain"].update(assembler="13"),
        message="build_key: the manifest says",
    ),
    Lie(name="no toolchain", change=lambda raw: raw.update(toolchain={}), message="toolchain: empty"),
    Lie(
        name="hidden",
        change=lambda raw: raw["model"].update(hidden=1024),
        message="is for rows of 2048 elements, the model has 1024",
    ),
    Lie(
        name="layers",
        change=lambda raw: raw["model"].update(layers=2),
        message="model.layers: the manifest says 2; built again it would say 3",
    ),
    Lie(name="no block size", change=lambda raw: raw["model"].update(block_size=0), message="model.block_size is 0"),
    Lie(
        name="capacity",
        change=lambda raw: raw["mailbox"].update(capacity=4),
        message="mailbox.capacity: the manifest says 4; built again it would say 64",
    ),
    Lie(
        name="slots",
        change=lambda raw: raw["mailbox"].update(slots=[1]),
        message="mailbox.slots: the manifest says [1]; built again it would say [1, 2]",
    ),
    Lie(
        name="table",
        change=lambda raw: raw["tables"][1].update(attn_stats="8-1:1"),
        message="attn_stats: the manifest says '8-1:1'; built again it would say '1-8:1'",
    ),
    Lie(
        name="table value",
        change=lambda raw: raw["tables"][1].update(attn_stats="1:7"),
        message="attn_stats: the manifest says '1:7'; built again it would say '1-8:1'",
    ),
    Lie(
        name="table off",
        change=lambda raw: raw["tables"][1].update(attn_stats=""),
        message="tp 2 dcp 2.attn_stats: the manifest says ''; built again it would say '1-8:1'",
    ),
    Lie(name="table twice", change=lambda raw: raw["tables"].append(raw["tables"][0]), message="occurs more than once"),
    Lie(
        name="tables swapped",
        change=lambda raw: raw["tables"].reverse(),
        message="tables: not in the order in which they are built",
    ),
    Lie(
        name="table gone",
        change=lambda raw: raw["tables"].pop(0),
        message="tables.tp 2 dcp 1: not in the manifest; built again it would be",
    ),
    Lie(
        name="parameter moved",
        change=move_parameter,
        message=f"out_eps.offset: the manifest says {CONSUMER_PARAMS[-1].offset + 4}; built again",
    ),
    Lie(
        name="parameters swapped",
        change=swap_parameters,
        message="abis.consumer: not in the order in which they are built",
    ),
    Lie(
        name="abi unused",
        change=lambda raw: raw["abis"].update(other=[]),
        message="abis.other: the manifest has it; built again it would not",
    ),
    Lie(name="variant name", change=variant(0, name="nb0"), message="its fields describe 'nb0-write0'"),
    Lie(name="variant name malformed", change=variant(0, name="first"), message="variant 'first'"),
    Lie(name="variant field", change=variant(0, aux=True), message="its fields describe 'nb0-write0-aux'"),
    Lie(name="variant write", change=variant(3, write=2, name="nb1-delta-write2"), message="only ever written at nb"),
    Lie(name="variant twice", change=lambda raw: raw["variants"].append(raw["variants"][0]), message="more than once"),
    Lie(name="variant choices", change=variant(0, choices=[]), message="row limits [] are not ascending"),
    Lie(
        name="variant closed end",
        change=variant(0, choices=[{"image": "h2048-nb0-wide", "max_rows": 8}]),
        message="row limits [8] are not ascending with an open end",
    ),
    Lie(
        name="variant needed by none",
        change=variant(0, deployments=[]),
        message="deployments: the manifest says []; built again",
    ),
    Lie(
        name="variant pairs",
        change=variant(0, deployments=[[2, 2], [2, 1]]),
        message="deployments: the manifest says [[2, 2], [2, 1]]; built again",
    ),
    Lie(
        name="producer name", change=producer(0, name="statistics-nb1"), message="its fields describe 'statistics-nb2'"
    ),
    Lie(name="producer malformed", change=producer(1, name="publish-nb2", nb=2), message="is not a producer name"),
    Lie(name="producer kernel", change=producer(1, kernel="other", name="other"), message="'publish', not 'other'"),
    Lie(name="producer blocks", change=producer(0, nb=3, name="statistics-nb3"), message="is code for something else"),
    Lie(
        name="producer choices",
        change=producer(0, choices=[{"image": "h2048-publish", "max_rows": None}]),
        message="image 'h2048-publish' is of kernel 'publish', not 'statistics'",
    ),
    Lie(
        name="producer needed by none",
        change=producer(0, deployments=[]),
        message="deployments: the manifest says []; built again",
    ),
    Lie(
        name="producer pair unknown",
        change=producer(1, deployments=[[4, 1]]),
        message="deployments: the manifest says [[4, 1]]; built again",
    ),
    Lie(
        name="producer twice",
        change=lambda raw: raw["producers"].append(raw["producers"][0]),
        message="producer name 'statistics-nb2' occurs more than once",
    ),
    Lie(
        name="producer gone",
        change=lambda raw: raw["producers"].pop(),
        message="producers.publish: not in the manifest; built again",
    ),
    Lie(
        name="variant pair unknown",
        change=variant(0, deployments=[[4, 1]]),
        message="deployments: the manifest says [[4, 1]]; built again",
    ),
]


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.name)
def test_a_lie_in_the_manifest_is_found(bundle, lie):
    bundle.edit(lie.change)
    report = verify_bundle(bundle.path)
    assert not report.ok
    assert lie.message in "\n".join(report.problems)


def test_every_field_of_an_image_record_is_among_the_lies(bundle):
    changed: set[str] = set()
    for lie in LIES:
        before, after = bundle.read(), bundle.read()
        lie.change(after)
        if len(after["images"]) == len(before["images"]):
            changed |= {
                field
                for old, new in zip(before["images"], after["images"], strict=True)
                for field in old
                if old[field] != new[field]
            }
    assert changed == set(bundle.read()["images"][0])


def swap_names(raw: dict[str, Any]) -> None:
    first, second = raw["images"][2:4]
    first["name"], second["name"] = second["name"], first["name"]


def disagree(raw: dict[str, Any]) -> None:
    raw["variants"][0]["choices"][0]["max_rows"] = 3


DERIVED_FROM_THE_MANIFEST_ALONE = [
    *(
        lie
        for lie in LIES
        if lie.name in {"image rows", "image cluster", "image cluster uneven", "hidden", "image abi", "image symbol"}
        or lie.name in {"images swapped", "table off", "variant write", "producer choices", "slots", "image unused"}
        or lie.name in {"configuration", "selection", "table gone", "producer gone", "variant pairs"}
    ),
    Lie(name="rows thrice", change=image(rows_per_cluster=3), message="rows_per_cluster is 3; every kernel handles 1"),
    Lie(name="names swapped", change=swap_names, message="file is"),
    Lie(name="over budget", change=budget(smem_bytes=1), message="shared memory: 40 bytes per CTA, the budget is 1"),
    Lie(name="parameter", change=move_parameter, message="parameter 'out_eps': asked 4 bytes at offset"),
]


@pytest.mark.parametrize("lie", DERIVED_FROM_THE_MANIFEST_ALONE, ids=lambda lie: lie.name)
def test_a_lie_in_the_manifest_of_another_release_is_found(make_bundle, lie):
    bundle = make_bundle(sources=OTHER_RELEASE)
    bundle.edit(lie.change)
    assert lie.message in "\n".join(verify_bundle(bundle.path).problems)


def test_the_images_of_a_variant_follow_from_the_sources(make_bundle):
    own, other = make_bundle(), make_bundle("sm_90", sources=OTHER_RELEASE)
    for bundle in own, other:
        bundle.edit(disagree)
    assert "built again it would say [{'image': 'h2048-nb0', 'max_rows': 16}" in "\n".join(
        verify_bundle(own.path).problems
    )
    assert verify_bundle(other.path).ok


def test_swapped_files_are_found(bundle):
    bundle.edit(swap_files)
    assert "file is 'h2048-nb1-delta.cubin', not 'h2048-nb0.cubin'" in "\n".join(verify_bundle(bundle.path).problems)


@pytest.mark.parametrize("sources", [None, OTHER_RELEASE])
def test_code_that_was_exchanged_consistently_is_found(make_bundle, sources):
    """Two images of the same shape exchange their code, digests and sizes included; only the symbols tell."""
    bundle = make_bundle(sources=sources)

    def exchange(raw: dict[str, Any]) -> None:
        first, second = [image for image in raw["images"] if image["block_threads"] == 128][:2]
        one, other = bundle.path / first["file"], bundle.path / second["file"]
        data = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(data)
        for field in ("sha256", "size"):
            first[field], second[field] = second[field], first[field]

    bundle.edit(exchange)
    problems = verify_bundle(bundle.path).problems
    assert len(problems) == 2
    assert "asked 'attnres_h2048_nb0_cutlass_0', found 'attnres_h2048_nb1_delta_cutlass_0'" in problems[0]


def test_every_image_has_a_symbol_of_its_own(bundle):
    symbols = [image["symbol"] for image in bundle.read()["images"]]
    assert len(set(symbols)) == len(symbols) == 15


def test_a_binary_with_its_digest_updated_is_still_found(bundle, cubin):
    other = cubin("wide")
    bundle.image_path(2).write_bytes(other)
    bundle.edit(image(sha256=hashlib.sha256(other).hexdigest(), size=len(other)))
    text = "\n".join(verify_bundle(bundle.path).problems)
    for part in ("found 'wide'", "pdl: asked True, found False"):
        assert part in text


def test_dynamic_shared_memory_for_a_binary_without_any_is_found(make_bundle, cubin):
    """Found from the binary alone, whatever sources the bundle was built from."""
    bundle = make_bundle(sources=OTHER_RELEASE)
    other = rename_kernel(cubin("wide"), "wide", bundle.read()["images"][2]["symbol"])
    bundle.image_path(2).write_bytes(other)
    record = {
        "sha256": hashlib.sha256(other).hexdigest(),
        "size": len(other),
        "registers": 32,
        "smem_static_bytes": 0,
        "critical_instructions": 55,
        "pdl": False,
    }
    bundle.edit(image(**record))
    assert verify_bundle(bundle.path).ok
    bundle.edit(image(smem_dynamic_bytes=16))
    (problem,) = verify_bundle(bundle.path).problems
    assert "dynamic shared memory: asked 16 bytes, the kernel uses none" in problem


def flip(bundle) -> None:
    data = bytearray(bundle.image_path().read_bytes())
    data[len(data) // 2] ^= 1
    bundle.image_path().write_bytes(data)


def cut(bundle) -> None:
    path = bundle.image_path()
    path.write_bytes(path.read_bytes()[:-1])


def link(bundle) -> None:
    path = bundle.image_path()
    target = bundle.path.parent / "elsewhere"
    path.rename(target)
    path.symlink_to(target)


def pipe(bundle) -> None:
    path = bundle.image_path()
    path.unlink()
    os.mkfifo(path)


def folder(bundle) -> None:
    path = bundle.image_path()
    path.unlink()
    path.mkdir()


def link_manifest(bundle) -> None:
    target = bundle.path.parent / "elsewhere"
    bundle.manifest_path.rename(target)
    bundle.manifest_path.symlink_to(target)


def reformat(bundle) -> None:
    bundle.manifest_path.write_text(json.dumps(bundle.read()))


def edit_in_place(bundle) -> None:
    text = bundle.manifest_path.read_text()
    bundle.manifest_path.write_text(text.replace('"capacity": 64', '"capacity": 65'))


def flip_manifest(bundle) -> None:
    """Changes the digest itself."""
    data = bundle.manifest_path.read_bytes()
    at = data.index(b'\n "sha256": "') + 13
    bundle.manifest_path.write_bytes(data[:at] + (b"1" if data[at : at + 1] == b"0" else b"0") + data[at + 1 :])


def loosen(bundle) -> None:
    """Writes another form of the same manifest, with the digest of that form."""
    data = bundle.manifest_path.read_bytes().replace(b'"schema": ', b'"schema":  ')
    start = data.index(b'\n "sha256": "') + 13
    digest = hashlib.sha256(data[:start] + b"0" * 64 + data[start + 64 :]).hexdigest().encode()
    bundle.manifest_path.write_bytes(data[:start] + digest + data[start + 64 :])


DAMAGES = {
    "flipped": (flip, "sha256 is"),
    "truncated": (cut, "bytes, but the manifest says"),
    "emptied": (lambda bundle: bundle.image_path().write_bytes(b""), "0 bytes, but the manifest says"),
    "missing": (lambda bundle: bundle.image_path().unlink(), "the file is missing"),
    "symlinked": (link, "a symbolic link"),
    "pipe": (pipe, "not a plain file"),
    "folder": (folder, "not a plain file"),
    "extra": (lambda bundle: (bundle.path / "notes.txt").write_text("x"), "file 'notes.txt' is not in the manifest"),
    "hidden extra": (lambda bundle: (bundle.path / ".x").mkdir(), "file '.x' is not in the manifest"),
    "no manifest": (lambda bundle: bundle.manifest_path.unlink(), f"it holds no {MANIFEST_NAME}"),
    "manifest symlinked": (link_manifest, "a symbolic link"),
    "manifest truncated": (lambda bundle: bundle.manifest_path.write_text('{"schema"'), "not a manifest"),
    "manifest not an object": (lambda bundle: bundle.manifest_path.write_text("[1]"), "expected an object"),
    "manifest reformatted": (reformat, "it does not hold its own digest once"),
    "manifest flipped": (flip_manifest, "changed after the build: its digest is"),
    "manifest edited": (edit_in_place, "changed after the build: its digest is"),
    "manifest with spaces": (loosen, "not in canonical form"),
}


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_damage_to_the_folder_is_found(bundle, damage):
    change, message = DAMAGES[damage]
    change(bundle)
    report = verify_bundle(bundle.path)
    assert message in "\n".join(report.problems)
    assert len(report.problems) == 1


def test_all_problems_are_reported_together(bundle):
    flip(bundle)
    bundle.edit(image(registers=9))
    bundle.edit(lambda raw: raw["tables"][1].update(attn_stats="1:1,2"))
    (bundle.path / "extra").touch()
    text = "\n".join(verify_bundle(bundle.path).problems)
    for part in (
        "sha256 is",
        "registers: the manifest says 9",
        "attn_stats: the manifest says '1:1,2'",
        "file 'extra'",
    ):
        assert part in text


def test_the_command_says_ok_and_for_which_gpus(bundle, capsys):
    size = sum(image["size"] for image in bundle.read()["images"])
    assert main(["verify", str(bundle.path)]) == 0
    assert capsys.readouterr().out == (
        f"{bundle.path}: OK: 15 images of {size:,} bytes, 22 variants, 2 producers, "
        "sm_100 (for compute capability 10.0 and later 10.x)\n"
    )


def test_the_command_lists_problems_and_fails(make_bundle, capsys):
    good, bad = make_bundle(), make_bundle("sm_90")
    (bad.path / "extra").touch()
    assert main(["verify", str(good.path.parent)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{good.path}: OK")
    assert lines[1:] == [
        f"{bad.path}: file 'extra' is not in the manifest",
        f"{bad.path}: NOT OK: 1 problem",
    ]


def test_the_command_speaks_json(bundle, capsys):
    (bundle.path / "extra").touch()
    assert main(["verify", "--json", str(bundle.path)]) == 1
    (report,) = json.loads(capsys.readouterr().out)["bundles"]
    assert (report["ok"], report["images"], report["arch"]) == (False, 15, "sm_100")
    assert report["problems"] == ["file 'extra' is not in the manifest"]


def test_no_bundle_is_a_failure_that_names_the_next_step(tmp_path, capsys):
    assert main(["verify", str(tmp_path / "nowhere")]) == 1
    assert "there is no such folder; build one with `attnres-aot build" in capsys.readouterr().out


@pytest.mark.parametrize("exchange", [True, False])
def test_a_bundle_that_is_replaced_meanwhile_is_one_or_the_other(exchange, make_bundle, monkeypatch):
    """What verify sees is one bundle, however often it is replaced, in one step or in two."""
    if not exchange:
        monkeypatch.setattr(swap, "exchange", lambda first, second: False)
    path = make_bundle().path
    stop, reports = threading.Event(), []

    def verify() -> None:
        while not stop.is_set():
            reports.append(verify_bundle(path))

    thread = threading.Thread(target=verify)
    thread.start()
    try:
        for number in range(12):
            make_bundle(sources=None if number % 2 else OTHER_RELEASE)
    finally:
        stop.set()
        thread.join()
    assert [report.problems for report in reports if not report.ok] == []
    assert len({report.notes for report in reports}) == 2

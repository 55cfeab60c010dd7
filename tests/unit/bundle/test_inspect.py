"""`inspect` shows bundles, variants and images to people and to programs; `--sass` finds its tool or says which."""

from __future__ import annotations

import importlib.util
import json
import os
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from attnres_aot.binary.disassembler import disassemble, find_disassembler
from attnres_aot.cli.entry import main
from attnres_aot.errors import AttnResError
from attnres_aot.spec.params import CONSUMER_PARAMS


def sizes(bundle) -> dict[str, int]:
    """Bytes of each image by name."""
    return {image["name"]: image["size"] for image in bundle.read()["images"]}


def run(capsys, *arguments: str | Path) -> str:
    assert main(["inspect", *map(str, arguments)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refused(capsys, status: int, *arguments: str | Path) -> str:
    assert main(["inspect", *map(str, arguments)]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.fixture
def tool(tmp_path) -> Path:
    """A folder with a disassembler that prints its arguments and the size of the file."""
    path = tmp_path / "tools" / "nvdisasm"
    path.parent.mkdir()
    path.write_text('#!/bin/sh\necho "$1 $(wc -c < "$2") bytes"\n')
    path.chmod(0o755)
    return path.parent


@pytest.fixture
def no_packages(monkeypatch):
    """An environment without any of NVIDIA's PyPI packages."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def test_a_bundle_is_shown_with_its_gpus_images_and_variants(bundle, capsys):
    out = run(capsys, bundle.path)
    assert "compute capability 10.0 and later 10.x; sm_100 requested, sm_100 proven" in out
    assert f"22 variants and 2 producers in 15 images of {sum(sizes(bundle).values()):,} bytes" in out
    assert "15 images: all with spills 0, rows 1" in out
    assert "rows 1-8:1, saved blocks 2:1 for (tp,dcp) (2,2)" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["h2048-nb1-delta", "8", "40", "2", "128", f"{sizes(bundle)['h2048-nb1-delta']:,}", "4"] in lines
    assert ["statistics", "2", "(2,2)", "1", "8"] in lines
    assert ["publish", "any", "every", "(tp,", "dcp)", "1", "8"] in lines
    assert ["2", "delta,", "final", "1", "1", "-", "-", "1", "8"] in lines


def test_a_folder_with_a_bad_bundle_shows_the_others_and_says_what_is_bad(make_bundle, capsys):
    good, bad = make_bundle("sm_90"), make_bundle("sm_100")
    bad.manifest_path.write_text("{")
    folder = good.path.parent
    assert main(["inspect", str(folder)]) == 1
    out, err = capsys.readouterr()
    assert "tiny-sm_90" in out
    assert "tiny-sm_100" not in out
    assert err.startswith("tiny-sm_100: cannot be read: ")
    assert main(["inspect", str(folder), "--json"]) == 1
    out, err = capsys.readouterr()
    shown = json.loads(out)
    assert [each["path"] for each in shown["bundles"]] == [str(good.path)]
    assert [each["path"] for each in shown["unreadable"]] == [str(bad.path)]
    assert err == ""


def test_what_differs_among_images_gets_a_column(bundle, capsys):
    bundle.edit(lambda raw: raw["images"][2].update(spill_bytes=16))
    lines = [line.split() for line in run(capsys, bundle.path).splitlines()]
    assert ["image", "registers", "spills", "smem", "CTAs", "threads", "bytes", "serves"] in lines
    assert ["h2048-nb1-delta", "8", "16", "40", "2", "128", f"{sizes(bundle)['h2048-nb1-delta']:,}", "4"] in lines


def test_a_publisher_is_launched_without_clusters(bundle, capsys):
    """Its image is one CTA per row: a cluster may not start beside the consumer that waits for the row."""
    assert "one CTA of 128 threads per row" in run(capsys, bundle.path, "--image", "h2048-publish")


def test_statistics_have_a_row_of_their_own_where_fewer_deployments_need_them(bundle, capsys):
    lines = run(capsys, bundle.path).splitlines()
    start = lines.index("  for (2,2) alone:")
    assert lines[start + 1].split() == ["2", "delta,", "final", "-", "-", "1", "1", "1", "8"]


def test_no_line_of_a_table_is_wider_than_80_characters(bundle, capsys):
    lines = run(capsys, bundle.path).splitlines()
    assert max(map(len, lines[lines.index("") :])) <= 80


def test_a_folder_of_bundles_is_listed(make_bundle, capsys):
    one, other = make_bundle("sm_90"), make_bundle("sm_120a")
    (one.path.parent / ".tiny-sm_90.work").mkdir()
    out = run(capsys, one.path.parent)
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [["tiny-sm_120a", "sm_120a"], ["tiny-sm_90", "sm_90"]]
    assert "compute capability 12.0 only" in out
    found = json.loads(run(capsys, one.path.parent, "--json"))["bundles"]
    assert [each["path"] for each in found] == [str(other.path), str(one.path)]


def test_one_variant_in_full(bundle, capsys):
    out = run(capsys, bundle.path, "--variant", "nb1-delta-write1-ring2-aux")
    for part in (
        "a mailbox of 2 slots, added to the prefix",
        "h2048-nb1-delta-ring2, for any number of rows",
        "a cluster of 2 CTAs of 128 threads per row",
        "8 (budget 128); 0 bytes of stack, 0 of spills",
        "critical path",
        "16 instructions",
        "32 instructions, none of them on local memory",
        "release 12.9",
    ):
        assert part in out
    assert ["out_eps", "f32", str(CONSUMER_PARAMS[-1].offset), "4"] in [line.split() for line in out.splitlines()]


def test_one_image_in_full_for_programs(bundle, capsys):
    shown = json.loads(run(capsys, bundle.path, "--image", "h2048-nb0-wide", "--json"))
    (image,) = shown["images"]
    assert image["record"] == bundle.read()["images"][1]
    assert image["params"] == bundle.read()["abis"]["consumer"]
    assert image["serves"] == ["nb0-write0", "nb0-write0-aux"]
    assert (image["binary"]["arch"], image["binary"]["kernels"][0]["registers"]) == ("sm_100", 8)


def test_one_producer_in_full(bundle, capsys):
    out = run(capsys, bundle.path, "--variant", "statistics-nb2")
    for part in ("statistics of 2 saved blocks", "h2048-statistics-nb2, for any number of rows", "blocks_block_stride"):
        assert part in out
    assert "rows of a mailbox" in run(capsys, bundle.path, "--variant", "publish")
    shown = json.loads(run(capsys, bundle.path, "--variant", "publish", "--json"))
    assert shown["producer"] == bundle.read()["producers"][1]
    assert [image["serves"] for image in shown["images"]] == [["publish"]]


def test_an_image_of_a_producer_in_full(bundle, capsys):
    out = run(capsys, bundle.path, "--image", "h2048-publish")
    lines = [line.split() for line in out.splitlines()]
    assert ["serves", "publish"] in lines
    assert ["source_row_stride", "i32", "16", "4"] in lines


def test_json_holds_the_whole_manifest(bundle, capsys):
    shown = json.loads(run(capsys, bundle.path, "--json"))
    assert shown["manifest"] == bundle.read()
    assert shown["gpus"] == {"arch": "sm_100", "rule": "compute capability 10.0 and later 10.x"}
    assert shown["counts"] == {"images": 15, "variants": 22, "producers": 2, "bytes": sum(sizes(bundle).values())}


def test_an_unknown_variant_lists_the_nearest(bundle, capsys):
    message = refused(capsys, 1, bundle.path, "--variant", "nb1-delta-write2")
    assert "no variant or producer 'nb1-delta-write2' among the 24 of" in message
    assert "nearest: nb1-delta-write1," in message
    assert "no image 'x' among the 15" in refused(capsys, 1, bundle.path, "--image", "x")


def test_a_damaged_image_is_not_shown(bundle, capsys):
    bundle.image_path(1).write_bytes(b"x")
    assert f"1 bytes, but the manifest says {sizes(bundle)['h2048-nb0-wide']}" in refused(
        capsys, 1, bundle.path, "--image", "h2048-nb0-wide"
    )


def test_misuse(make_bundle, capsys):
    bundle = make_bundle()
    assert "--variant and --image exclude each other" in refused(
        capsys, 2, bundle.path, "--variant", "a", "--image", "b"
    )
    assert "add --image NAME or --variant NAME" in refused(capsys, 2, bundle.path, "--sass")
    make_bundle("sm_90")
    message = refused(capsys, 2, bundle.path.parent, "--image", "h2048-nb0-wide")
    assert "holds several bundles; choose one of tiny-sm_100, tiny-sm_90" in message
    assert "there is no such folder" in refused(capsys, 1, bundle.path / "nowhere")


def test_sass_is_what_the_disassembler_prints(bundle, capsys, tool, monkeypatch):
    monkeypatch.setenv("PATH", f"{tool}{os.pathsep}{os.environ['PATH']}")
    assert run(capsys, bundle.path, "--image", "h2048-nb0-wide", "--sass").endswith(
        f"--print-code {sizes(bundle)['h2048-nb0-wide']} bytes\n\n"
    )
    shown = json.loads(run(capsys, bundle.path, "--variant", "nb0-write0", "--sass", "--json"))
    assert shown["images"][0]["sass"] == f"--print-code {sizes(bundle)['h2048-nb0']} bytes\n"


def test_without_a_disassembler_the_package_to_install_is_named(bundle, capsys, monkeypatch, no_packages):
    monkeypatch.setenv("PATH", str(bundle.path))
    message = refused(capsys, 1, bundle.path, "--image", "h2048-nb0-wide", "--sass")
    assert "neither nvdisasm nor cuobjdump is on PATH" in message
    assert "pip install nvidia-cuda-nvdisasm" in message


def test_the_disassembler_of_a_pypi_package_is_found(tmp_path, tool, monkeypatch):
    package = tmp_path / "site" / "nvidia" / "cu13"
    package.mkdir(parents=True)
    tool.rename(package / "bin")
    spec = ModuleSpec("nvidia", None, is_package=True)
    spec.submodule_search_locations = [str(package.parent)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_disassembler().path == package / "bin" / "nvdisasm"


def test_a_disassembler_that_fails_is_quoted(tool, cubin):
    (tool / "nvdisasm").write_text('#!/bin/sh\necho "fatal: $2 is for SM100" >&2\nexit 3\n')
    with pytest.raises(AttnResError, match=r"exit status 3: fatal: image.cubin is for SM100; it may be older"):
        disassemble(cubin("consumer"), find_disassembler([tool]))


def test_a_disassembler_that_cannot_run_is_an_error_of_ours(tool, cubin):
    (tool / "nvdisasm").write_bytes(b"\x7fELF not really")
    with pytest.raises(AttnResError, match=r"nvdisasm: .*Exec format error"):
        disassemble(cubin("consumer"), find_disassembler([tool]))

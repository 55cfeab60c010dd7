"""`attnres-aot build` as it is called: exit statuses, what goes to which stream, and JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path

import pytest

from attnres_aot.bundle.reader import read_bundle
from attnres_aot.cli import build_command
from attnres_aot.cli.entry import main

CONFIG = """\
name: tiny
model: {hidden_size: 1024, layers: 2, block_size: 1, leading_dense_layers: 0}
mailbox: {capacity: 4, slots: [1]}
variants: {ring: false, aux: false, stats: false}
deployments:
  - {tp: 2, dcp: 1, attn_stats: "", attn_stats_blocks: ""}
  - {tp: 4, dcp: 1, attn_stats: "", attn_stats_blocks: ""}
"""


@pytest.fixture
def cli(tmp_path, compiler, trusting, facts, monkeypatch, capfd):
    """Runs `attnres-aot build` and returns (status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(build_command, "gather_facts", lambda flavour: dataclasses.replace(facts, flavour=flavour))
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    Path("tiny.yaml").write_text(CONFIG)

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(["build", "--config", "tiny.yaml", "--jobs", "2", *arguments])
        out, err = capfd.readouterr()
        return status, out, err

    return run


def test_building_says_what_was_done_and_building_again_that_nothing_was(cli):
    status, out, err = cli("--arch", "sm_90")
    assert status == 0
    assert "artifacts/tiny-sm_90: 5 variants, 0 producers, 5 images, " in out
    assert "  5 compiled, 0 reused, in " in out
    assert "with 2 jobs; peak memory" in out
    assert "the images' own compile times add up to 1.2 s" in out
    assert err.splitlines()[0] == "tiny-sm_90: 5 images to compile, 0 reused"
    assert "[ 5/5] " in err.splitlines()[-1]
    status, out, err = cli("--arch", "sm_90")
    assert (status, err) == (0, "")
    assert out.startswith("artifacts/tiny-sm_90: unchanged (5 images, ")


def test_several_archs_make_several_bundles(cli):
    status, out, _ = cli("--arch", "sm_90", "--arch", "sm_100a,sm_120", "--out", "deep/out")
    assert status == 0
    assert sorted(path.name for path in Path("deep/out").iterdir()) == ["tiny-sm_100a", "tiny-sm_120", "tiny-sm_90"]
    assert read_bundle("deep/out/tiny-sm_100a").manifest.arch.requested == "sm_100a"
    assert out.count("5 compiled") == 3


def test_json_is_all_that_stdout_gets(cli):
    status, out, err = cli("--arch", "sm_90", "--json")
    (bundle,) = json.loads(out)["bundles"]
    assert status == 0
    assert bundle["status"] == "built"
    assert bundle["path"] == "artifacts/tiny-sm_90"
    assert len(bundle["compiled"]) == bundle["images"] == 5
    assert bundle["compile_seconds"] == 1.25
    assert bundle["peak_memory_bytes"] > 1_000_000
    assert "[ 5/5]" in err


def test_failures_are_listed_at_the_end_with_the_compilers_words(cli, compiler):
    compiler.behave_at({"h1024-nb0": "segv", "h1024-nb1": "raise"})
    status, out, err = cli("--arch", "sm_90", "--keep-going")
    assert (status, out) == (1, "")
    listed = err[err.index("artifacts/tiny-sm_90: 2 images of 5 failed:") :].splitlines()
    assert listed[1] == "  h1024-nb0: the worker was killed by signal 11 (SIGSEGV), 2 times in a row"
    assert "  h1024-nb1: ValueError: register allocation failed" in listed
    assert "    | chatter of the compiler on stdout" in listed
    assert listed[-1] == "What did compile is kept for the next build; no bundle was written."
    assert not Path("artifacts/tiny-sm_90").exists()


def test_chatter_of_the_compiler_stays_hidden_when_all_is_well(cli):
    _, out, err = cli("--arch", "sm_90")
    assert "compiling" not in out + err


def test_failures_as_json(cli, compiler):
    compiler.behave_at({"h1024-nb1": "raise"})
    status, out, _ = cli("--arch", "sm_90", "--keep-going", "--json")
    (bundle,) = json.loads(out)["bundles"]
    assert (status, bundle["status"]) == (1, "failed")
    assert [failure["name"] for failure in bundle["failures"]] == ["h1024-nb1"]


@pytest.mark.parametrize(("flags", "archs"), [((), 1), (("--keep-going",), 2)], ids=["stop", "keep-going"])
def test_a_failed_arch_stops_the_next_unless_asked_to_keep_going(flags, archs, cli, compiler):
    compiler.behave_at({"h1024-nb1": "raise"})
    status, out, _ = cli("--arch", "sm_90,sm_100", "--json", *flags)
    assert status == 1
    assert len(json.loads(out)["bundles"]) == archs


OBSTACLE = "'artifacts/tiny-sm_90' holds 'thesis.tex', which no build wrote; move that away or change --out"


def put_obstacle() -> None:
    Path("artifacts/tiny-sm_90").mkdir(parents=True)
    Path("artifacts/tiny-sm_90/thesis.tex").write_text("years of work")


def test_a_refused_arch_does_not_lose_the_report_of_those_before(cli):
    put_obstacle()
    status, out, err = cli("--arch", "sm_100,sm_90,sm_120", "--json")
    assert status == 1
    built, refused = json.loads(out)["bundles"]
    assert (built["status"], built["reason"]) == ("built", "")
    assert (refused["arch"], refused["status"], refused["reason"]) == ("sm_90", "refused", OBSTACLE)
    assert err.splitlines()[-1] == f"error: {OBSTACLE}"
    assert not Path("artifacts/tiny-sm_120").exists()


def test_a_refused_arch_does_not_stop_the_next_when_asked_to_keep_going(cli):
    put_obstacle()
    status, out, err = cli("--arch", "sm_90,sm_100", "--keep-going")
    assert status == 1
    assert f"error: {OBSTACLE}\n" in err
    assert "artifacts/tiny-sm_100: 5 variants" in out
    status, out, _ = cli("--arch", "sm_90,sm_100", "--keep-going", "--json")
    assert status == 1
    assert [bundle["status"] for bundle in json.loads(out)["bundles"]] == ["refused", "unchanged"]


def test_a_dry_run_of_several_archs_goes_on_after_a_refusal_when_asked(cli):
    put_obstacle()
    status, out, err = cli("--arch", "sm_90,sm_100", "--keep-going", "--dry-run", "--json")
    assert (status, err) == (1, f"error: {OBSTACLE}\n")
    seen, refused = json.loads(out)["bundles"]
    assert (seen["arch"], len(seen["images"])) == ("sm_100", 5)
    assert refused == {"path": "artifacts/tiny-sm_90", "arch": "sm_90", "refused": OBSTACLE}


def test_an_interruption_does_not_lose_the_report_of_what_is_built(cli, monkeypatch):
    build = build_command.build

    def interrupted(request, facts, progress):
        if str(request.plan.arch) == "sm_100":
            raise KeyboardInterrupt
        return build(request, facts, progress)

    monkeypatch.setattr(build_command, "build", interrupted)
    status, out, err = cli("--arch", "sm_90,sm_100", "--json")
    assert status == 130
    assert [bundle["status"] for bundle in json.loads(out)["bundles"]] == ["built"]
    assert "interrupted" in err


def test_what_could_not_be_removed_is_a_warning(cli, monkeypatch):
    monkeypatch.setattr("attnres_aot.builder.builder.write_bundle", lambda *arguments: ("x cannot be removed",))
    status, _, err = cli("--arch", "sm_90")
    assert status == 0
    assert "warning: x cannot be removed" in err


@pytest.mark.parametrize("seconds", ["inf", "3000000", "1e300"])
def test_a_time_limit_may_be_as_long_as_one_likes(seconds, cli):
    status, out, _ = cli("--arch", "sm_90", "--time-limit", seconds)
    assert status == 0
    assert "5 compiled" in out


def test_the_flavour_is_what_is_asked_for_and_in_the_manifest(cli, compiler):
    assert cli("--arch", "sm_90")[0] == 0
    manifest = read_bundle("artifacts/tiny-sm_90").manifest
    assert (manifest.flavour, manifest.oldest_driver) == ("cu12", "12.0")
    assert {start["flavour"] for start in compiler.starts} == {"cu12"}
    compiler.forget()
    status, out, _ = cli("--arch", "sm_90", "--flavour", "cu13")
    assert status == 0
    assert "5 compiled, 0 reused" in out
    manifest = read_bundle("artifacts/tiny-sm_90").manifest
    assert (manifest.flavour, manifest.oldest_driver) == ("cu13", "13.0")
    assert {start["flavour"] for start in compiler.starts} == {"cu13"}


def test_a_dry_run_names_a_change_of_flavour(cli):
    cli("--arch", "sm_90")
    _, out, _ = cli("--arch", "sm_90", "--flavour", "cu13", "--dry-run")
    assert "compile 5 images: flavour cu12 -> cu13" in out


@pytest.mark.parametrize("name", ["my dir", "a\tb", 'a"b', "a'b", "a\\b", "a:b;c", "$HOME", "new\nline", "-x", "ünï"])
def test_out_may_have_any_name_and_temporary_files_stay_below_it(name, cli, compiler, tmp_path):
    status, _, err = cli("--arch", "sm_90", "--out", f"./{name}")
    assert status == 0, err
    assert read_bundle(Path(name) / "tiny-sm_90").manifest.name == "tiny"
    for start in compiler.starts:
        assert Path(start["environment"]["TMPDIR"]).is_relative_to(tmp_path / name)
        assert start["environment"]["TMPDIR"] == start["cwd"]


def test_a_hanging_image_is_given_up_after_the_time_limit(cli, compiler):
    compiler.behave_at({"h1024-nb1": "hang"})
    status, _, err = cli("--arch", "sm_90", "--time-limit", "1")
    assert status == 1
    assert "h1024-nb1: took more than the time limit of 1 s; the worker was killed" in err


def test_a_dry_run_says_what_would_be_done_and_why(cli, compiler):
    status, out, _ = cli("--arch", "sm_90", "--dry-run")
    assert status == 0
    assert out.splitlines()[:3] == [
        "artifacts/tiny-sm_90: 5 images to compile, 0 to reuse",
        "  compile 5 images: there is no bundle yet",
        "    h1024-nb0",
    ]
    assert compiler.calls == []
    assert not Path("artifacts").exists()
    cli("--arch", "sm_90")
    Path("artifacts/tiny-sm_90/h1024-nb1.cubin").unlink()
    _, out, _ = cli("--arch", "sm_90", "--dry-run")
    assert out.splitlines() == [
        "artifacts/tiny-sm_90: 1 image to compile, 4 to reuse",
        "  compile 1 image: artifacts/tiny-sm_90/h1024-nb1.cubin: the file is missing; rebuild the bundle",
        "    h1024-nb1",
        "  reuse 4 images of the existing bundle",
    ]
    cli("--arch", "sm_90")
    _, out, _ = cli("--arch", "sm_90", "--dry-run", "--json")
    (bundle,) = json.loads(out)["bundles"]
    assert bundle["unchanged"] is True
    assert {image["action"] for image in bundle["images"]} == {"reuse"}
    _, out, _ = cli("--arch", "sm_90", "--dry-run")
    assert out.splitlines()[0] == "artifacts/tiny-sm_90: nothing to do"


def test_a_part_is_refused_where_the_whole_is_and_built_elsewhere(cli):
    cli("--arch", "sm_90")
    status, _, err = cli("--arch", "sm_90", "--only", "nb1*")
    assert status == 1
    assert err.startswith("error: this plan would replace 'artifacts/tiny-sm_90' and lose 3 variants")
    assert cli("--arch", "sm_90", "--only", "nb1*", "--dry-run")[0] == 1
    assert cli("--arch", "sm_90", "--only", "nb1*", "--out", "part")[0] == 0
    assert [variant.name for variant in read_bundle("part/tiny-sm_90").manifest.variants] == ["nb1-delta-write1", "nb1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--arch is missing; choose one or more from sm_90"),
        (("--arch", "sm_91"), "no bundle can be built for 'sm_91'"),
        (("--arch", "sm_90", "--jobs", "0"), "0 is not in the range x>=1"),
        (("--arch", "sm_90", "--time-limit", "0"), "0.0 is not in the range x>0"),
        (("--arch", "sm_90", "--time-limit", "nan"), "nan is not in the range x>0"),
        (("--arch", "sm_90", "--flavour", "cu11"), "'cu11' is not one of 'cu12', 'cu13'"),
        (("--arch", "sm_90", "--tp", "3"), "no deployment has tp=3"),
        (("--arch", "sm_90", "--config", "none.yaml"), "none.yaml"),
        (("--arch", "sm_90", "--outt", "x"), "--outt"),
    ],
    ids=[
        "no-arch",
        "unknown-arch",
        "no-jobs",
        "no-time",
        "nan-time",
        "unknown-flavour",
        "unknown-tp",
        "no-config",
        "misspelt",
    ],
)
def test_misuse_has_status_2_and_starts_nothing(arguments, message, cli, compiler):
    status, out, err = cli(*arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert compiler.calls == []


def test_the_end_of_a_ci_job_is_an_interruption():
    with pytest.raises(KeyboardInterrupt):
        build_command._interrupt(signal.SIGTERM, None)


def test_cores_that_the_process_may_use_are_counted(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5}, raising=False)
    assert build_command.usable_cores() == 2

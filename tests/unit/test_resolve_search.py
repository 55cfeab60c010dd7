"""Finding bundles on a real disk, in the environment and among installed packages, whole and broken."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from attnres_aot.bundle.manifest import SCHEMA, ModelRecord, dump_manifest, seal
from attnres_aot.doctor import doctor
from attnres_aot.doctor.machine import Driver, Gpu
from attnres_aot.errors import BundleError
from attnres_aot.runtime.find import resolve
from attnres_aot.runtime.find.places import search_order
from attnres_aot.runtime.find.resolve import find_bundle
from tests.support.manifests import make_manifest

HOPPER = (9, 0)
CODE = b"\x7fELF stands for a cubin"
IMAGE = "h7168-nb0"


def write_bundle(folder: Path, arch: str = "sm_90", name: str = "kimi_k3") -> Path:
    model = ModelRecord(hidden=7168, layers=93, block_size=12, leading_dense_layers=1)
    manifest = make_manifest(name=name, arch=arch, model=model, code={IMAGE: CODE})
    folder.mkdir(parents=True)
    (folder / f"{IMAGE}.cubin").write_bytes(CODE)
    (folder / "manifest.json").write_bytes(dump_manifest(manifest))
    return folder


@pytest.fixture(autouse=True)
def _empty_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.delenv("ATTNRES_AOT_BUNDLE", raising=False)


def install_entry_point(site: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, source: str) -> None:
    """Installs a distribution whose one module registers an entry point."""
    module = value.partition(":")[0]
    info = site / f"{module}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[attnres_aot.bundles]\n{name} = {value}\n")
    (site / module).mkdir(exist_ok=True)
    (site / module / "__init__.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, module, raising=False)


def test_each_place_is_searched_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bundle(Path("artifacts/kimi_k3-sm_90"))
    assert find_bundle(None, HOPPER).path == Path.cwd() / "artifacts/kimi_k3-sm_90"

    write_bundle(tmp_path / "site/k3_wheel/bundle")
    install_entry_point(tmp_path / "site", monkeypatch, "k3", "k3_wheel", "")
    assert find_bundle(None, HOPPER).path == tmp_path / "site/k3_wheel/bundle"

    in_environment = write_bundle(tmp_path / "environment/any name")
    monkeypatch.setenv("ATTNRES_AOT_BUNDLE", str(in_environment))
    assert find_bundle(None, HOPPER).path == in_environment

    named = write_bundle(tmp_path / "named")
    assert find_bundle(named, HOPPER).path == named


def test_a_path_that_does_not_fit_is_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bundle(Path("artifacts/kimi_k3-sm_90"))
    named = write_bundle(tmp_path / "named", "sm_100")
    with pytest.raises(BundleError, match="built for sm_100, which runs on compute capability 10") as failure:
        find_bundle(named, HOPPER)
    assert "artifacts" not in str(failure.value)
    monkeypatch.setenv("ATTNRES_AOT_BUNDLE", str(tmp_path / "nowhere"))
    with pytest.raises(BundleError) as failure:
        find_bundle(None, HOPPER)
    assert f"ATTNRES_AOT_BUNDLE={tmp_path}/nowhere: {tmp_path}/nowhere does not exist" in str(failure.value)
    assert "artifacts" not in str(failure.value)


def test_an_empty_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    write_bundle(Path("artifacts/kimi_k3-sm_90"))
    monkeypatch.setenv("ATTNRES_AOT_BUNDLE", "")
    assert find_bundle(None, HOPPER).path.name == "kimi_k3-sm_90"


def test_a_folder_of_bundles_is_searched_one_level_deep_without_hidden_ones() -> None:
    write_bundle(Path("all/kimi_k3-sm_90"))
    write_bundle(Path("all/kimi_k3-sm_100"), "sm_100")
    write_bundle(Path("all/.kimi_k3-sm_90.new"))
    Path("all/__pycache__").mkdir()
    write_bundle(Path("all/deeper/kimi_k3-sm_90"))
    Path("all/notes.txt").write_text("not a folder")
    (place,) = search_order("all")
    assert [Path(found.path).name for found in place.candidates] == ["kimi_k3-sm_100", "kimi_k3-sm_90"]
    assert place.note == f"2 of 3 folders in {Path.cwd()}/all are bundles"
    assert find_bundle("all", (10, 3)).manifest.arch.proven == "sm_100"


def test_relative_paths_and_links_to_folders_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    write_bundle(Path("releases/v1"))
    Path("current").symlink_to("releases/v1")
    monkeypatch.setenv("ATTNRES_AOT_BUNDLE", "current")
    bundle = find_bundle(None, HOPPER)
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert (bundle.path / f"{IMAGE}.cubin").read_bytes() == CODE


def test_name_picks_one_of_two_configurations() -> None:
    write_bundle(Path("artifacts/kimi_k3-sm_90"))
    write_bundle(Path("artifacts/other-sm_90"), name="other")
    with pytest.raises(BundleError, match=r"pass name='kimi_k3' or name='other'"):
        find_bundle(None, HOPPER)
    assert find_bundle(None, HOPPER, name="other").path.name == "other-sm_90"


def replace_manifest(bundle: Path, **changes: object) -> None:
    manifest = json.loads((bundle / "manifest.json").read_bytes())
    (bundle / "manifest.json").write_bytes(seal(manifest | changes))


def make_named_pipe(bundle: Path) -> None:
    (bundle / "manifest.json").unlink()
    os.mkfifo(bundle / "manifest.json")


def link_manifest(bundle: Path, target: str) -> None:
    (bundle / "manifest.json").unlink()
    (bundle / "manifest.json").symlink_to(target)


def truncate(file: Path, count: int) -> None:
    file.write_bytes(file.read_bytes()[:-count])


@dataclass(frozen=True, kw_only=True)
class Damage:
    name: str
    inflict: Callable[[Path], object]
    message: str
    chosen: bool = False
    """The first look finds nothing wrong, so the bundle is chosen before the damage shows."""


DAMAGES = [
    Damage(
        name="empty",
        inflict=lambda bundle: (bundle / "manifest.json").write_bytes(b""),
        message="manifest.json: not a manifest: Expecting value",
    ),
    Damage(
        name="truncated",
        inflict=lambda bundle: truncate(bundle / "manifest.json", 40),
        message="manifest.json: not a manifest: ",
    ),
    Damage(
        name="binary",
        inflict=lambda bundle: (bundle / "manifest.json").write_bytes(b"\xff\xfe\x00"),
        message="manifest.json: not a manifest: byte 0xff at 0; it is plain ASCII without escapes",
    ),
    Damage(
        name="list",
        inflict=lambda bundle: (bundle / "manifest.json").write_text("[1]"),
        message="not a manifest: expected an object, found list",
    ),
    Damage(
        name="nested",
        inflict=lambda bundle: (bundle / "manifest.json").write_text("[" * 200_000),
        message="manifest.json: not a manifest: nested too deeply",
    ),
    Damage(
        name="newer",
        inflict=lambda bundle: replace_manifest(bundle, schema=SCHEMA + 1),
        message=f"manifest schema {SCHEMA + 1}, but this attnres-aot reads schema {SCHEMA}",
    ),
    Damage(
        name="nameless",
        inflict=lambda bundle: replace_manifest(bundle, name=7),
        message="the manifest names no configuration",
    ),
    Damage(
        name="archless",
        inflict=lambda bundle: replace_manifest(bundle, arch="sm_90"),
        message="the manifest names no arch",
    ),
    Damage(name="pipe", inflict=make_named_pipe, message="not a plain file"),
    Damage(
        name="link-out",
        inflict=lambda bundle: link_manifest(bundle, "/dev/zero"),
        message="a symbolic link; a bundle holds plain files only",
    ),
    Damage(
        name="link-loop",
        inflict=lambda bundle: link_manifest(bundle, "manifest.json"),
        message="a symbolic link; a bundle holds plain files only",
    ),
    Damage(
        name="unknown-field",
        inflict=lambda bundle: replace_manifest(bundle, extra=1),
        message="unknown: ['extra']",
        chosen=True,
    ),
    Damage(
        name="flipped",
        inflict=lambda bundle: (bundle / f"{IMAGE}.cubin").write_bytes(CODE[:-1] + b"!"),
        message="sha256 is ",
        chosen=True,
    ),
    Damage(
        name="short",
        inflict=lambda bundle: truncate(bundle / f"{IMAGE}.cubin", 1),
        message=f"{len(CODE) - 1} bytes, but the manifest says {len(CODE)}",
        chosen=True,
    ),
    Damage(
        name="missing",
        inflict=lambda bundle: (bundle / f"{IMAGE}.cubin").unlink(),
        message=f"{IMAGE}.cubin: the file is missing",
        chosen=True,
    ),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name)
def test_damage_is_refused_with_its_reason(damage: Damage) -> None:
    bundle = write_bundle(Path("artifacts/kimi_k3-sm_90"))
    damage.inflict(bundle)
    with pytest.raises(BundleError) as failure:
        find_bundle(None, HOPPER)
    text = str(failure.value)
    assert f"    refused  {bundle.absolute()}: " in text
    assert damage.message in text
    assert text.startswith("The bundle to use for compute capability 9.0 is damaged") == damage.chosen
    assert "`attnres-aot build --arch sm_90" in text


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name)
def test_nothing_takes_the_place_of_a_damaged_choice(damage: Damage) -> None:
    damage.inflict(write_bundle(Path("artifacts/best"), "sm_90a"))
    good = write_bundle(Path("artifacts/good"), "sm_90")
    if damage.chosen:
        with pytest.raises(BundleError, match="is damaged"):
            find_bundle(None, HOPPER)
    else:
        assert find_bundle(None, HOPPER).path == good.absolute()


@dataclass(frozen=True, kw_only=True)
class Nowhere:
    name: str
    path: str
    note: str


NOWHERES = [
    Nowhere(name="missing", path="nowhere", note="{cwd}/nowhere does not exist"),
    Nowhere(name="empty-string", path="", note="path '': an empty path names no folder"),
    Nowhere(name="dangling-link", path="dangling", note="{cwd}/dangling does not exist (a symbolic link to 'gone')"),
    Nowhere(name="link-loop", path="loop", note="'{cwd}/loop' cannot be listed: Too many levels of symbolic links"),
    Nowhere(name="file", path="file", note="{cwd}/file is a file; give the bundle's folder"),
    Nowhere(name="manifest-itself", path="file/manifest.json", note="is a file; give the bundle's folder"),
    Nowhere(name="empty-folder", path="empty", note="{cwd}/empty holds no bundle"),
    Nowhere(name="folders", path=".", note="{cwd} holds no bundle (none of its 1 folders has a manifest.json)"),
    Nowhere(name="null-byte", path="a\0b", note="cannot be listed: "),
    Nowhere(name="over-long", path="x" * 300, note="cannot be listed: File name too long"),
]


@pytest.mark.parametrize("case", NOWHERES, ids=lambda case: case.name)
def test_paths_that_hold_no_bundle(case: Nowhere) -> None:
    Path("empty").mkdir()
    Path("file").write_text("")
    Path("dangling").symlink_to("gone")
    Path("loop").symlink_to("loop")
    with pytest.raises(BundleError, match="No bundle runs on this device") as failure:
        find_bundle(case.path, HOPPER)
    assert case.note.format(cwd=Path.cwd()) in str(failure.value)


def test_a_deleted_working_folder_does_not_hide_an_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = write_bundle(tmp_path / "named")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    shutil.rmtree(gone)
    assert find_bundle(named, HOPPER).path == named
    with pytest.raises(BundleError, match=r"\./artifacts: the working directory is gone"):
        find_bundle(None, HOPPER)


@dataclass(frozen=True, kw_only=True)
class Registered:
    name: str
    value: str
    source: str
    note: str | None
    """None: the bundle is found."""


REGISTRATIONS = [
    Registered(name="package", value="w_package", source="", note=None),
    Registered(
        name="function",
        value="w_function:folder",
        source="""
        from pathlib import Path
        def folder():
            return Path(__file__).parent
        """,
        note=None,
    ),
    Registered(
        name="string",
        value="w_string:FOLDER",
        source="""
        import os
        FOLDER = os.path.join(os.path.dirname(__file__), "bundle")
        """,
        note=None,
    ),
    Registered(
        name="raising-function",
        value="w_raises:folder",
        source="""
        def folder():
            raise KeyError("no data here")
        """,
        note="entry point 'k3' (w_raises:folder) failed: KeyError: 'no data here'",
    ),
    Registered(
        name="raising-import",
        value="w_import",
        source="import a_module_that_nobody_has",
        note="entry point 'k3' (w_import) failed: ModuleNotFoundError: No module named 'a_module_that_nobody_has'",
    ),
    Registered(
        name="exiting-function",
        value="w_exits:folder",
        source="""
        import sys
        def folder():
            sys.exit("no data here")
        """,
        note="entry point 'k3' (w_exits:folder) failed: SystemExit: no data here",
    ),
    Registered(
        name="exiting-import",
        value="w_exit_import",
        source="raise SystemExit(3)",
        note="entry point 'k3' (w_exit_import) failed: SystemExit: 3",
    ),
    Registered(
        name="empty", value="w_empty:E", source="E = ''", note="ValueError: expected an absolute path, found ''"
    ),
    Registered(
        name="working-folder",
        value="w_here:E",
        source="E = 'artifacts'",
        note="ValueError: expected an absolute path, found 'artifacts'",
    ),
    Registered(name="no-such-name", value="w_lacks:folder", source="", note="(w_lacks:folder) failed: AttributeError"),
    Registered(name="no-folder", value="w_number:N", source="N = 7", note="failed: TypeError: expected str, bytes or"),
    Registered(name="bytes", value="w_bytes:B", source="B = b'/'", note="failed: TypeError: expected a folder as str"),
    Registered(name="module", value="w_module:json", source="import json.decoder as json", note="is not a package"),
    Registered(
        name="folder-that-is-gone",
        value="w_gone:G",
        source="G = '/nowhere/at/all'",
        note="/nowhere/at/all does not exist",
    ),
]


@pytest.mark.parametrize("case", REGISTRATIONS, ids=lambda case: case.name)
def test_entry_points(case: Registered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    install_entry_point(site, monkeypatch, "k3", case.value, case.source)
    folder = write_bundle(site / case.value.partition(":")[0] / "bundle")
    if case.note is None:
        assert find_bundle(None, HOPPER).path == folder
        return
    with pytest.raises(BundleError) as failure:
        find_bundle(None, HOPPER)
    assert case.note in str(failure.value)
    fallback = write_bundle(Path("artifacts/kimi_k3-sm_90"))
    assert find_bundle(None, HOPPER).path == fallback.absolute()


@dataclass(frozen=True, kw_only=True)
class Stranger:
    name: str
    file: str
    content: bytes | None
    """None: a folder has the file's name."""
    note: str = ""


STRANGERS = [
    Stranger(name="entry-points-without-group", file="entry_points.txt", content=b"x = y"),
    Stranger(name="entry-points-repeated", file="entry_points.txt", content=b"[a]\nx = 1\n[a]\nx = 1\n"),
    Stranger(name="entry-points-not-text", file="entry_points.txt", content=b"\xff\xfe\x00", note="cannot be read"),
    Stranger(
        name="entry-points-with-group",
        file="entry_points.txt",
        content=b"= [attnres_aot.bundles\n[attnres_aot.bundles]\nx",
        note="the entry_points.txt of ",
    ),
    Stranger(name="entry-points-folder", file="entry_points.txt", content=None),
    Stranger(name="metadata-empty", file="METADATA", content=b""),
    Stranger(name="metadata-not-text", file="METADATA", content=b"\xff\xfe\x00"),
    Stranger(name="metadata-folder", file="METADATA", content=None),
]


@pytest.mark.parametrize("stranger", STRANGERS, ids=lambda stranger: stranger.name)
def test_a_strangers_broken_package_ends_no_search(
    stranger: Stranger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "site" / "aaa-1.0.dist-info"
    broken.mkdir(parents=True)
    if stranger.content is None:
        (broken / stranger.file).mkdir()
    else:
        (broken / stranger.file).write_bytes(stranger.content)
    install_entry_point(tmp_path / "site", monkeypatch, "k3", "w_good", "")
    folder = write_bundle(tmp_path / "site" / "w_good" / "bundle")
    assert find_bundle(None, HOPPER).path == folder
    place = list(search_order())[2]
    assert stranger.note in place.note
    assert bool(stranger.note) == bool(place.note)
    assert doctor.gather_facts(None, None).places[2].candidates[0].path == str(folder)


def test_a_package_that_is_installed_twice_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for site in ("later", "first"):
        install_entry_point(tmp_path / site, monkeypatch, site, "w_twice", "")
        write_bundle(tmp_path / site / "w_twice" / "bundle")
    (candidate,) = list(search_order())[2].candidates
    assert candidate.origin == "entry point 'first'"


def test_a_finder_that_raises_ends_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        @staticmethod
        def find_spec(*arguments: object) -> None:
            return None

        @staticmethod
        def find_distributions(*arguments: object) -> None:
            raise RuntimeError("no packages today")

    bundle = write_bundle(Path("artifacts/kimi_k3-sm_90"))
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    assert find_bundle(None, HOPPER).path == bundle.absolute()
    assert "cannot be listed: RuntimeError: no packages today" in list(search_order())[2].note


def test_the_trace_names_the_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bundle(tmp_path / "site/w_other/bundle", "sm_100")
    install_entry_point(tmp_path / "site", monkeypatch, "k3-blackwell", "w_other", "")
    with pytest.raises(BundleError) as failure:
        find_bundle(None, HOPPER)
    assert f"{tmp_path}/site/w_other/bundle (entry point 'k3-blackwell'): built for sm_100" in str(failure.value)


def test_a_bundle_swapped_during_the_search_is_not_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = write_bundle(Path("artifacts/kimi_k3-sm_90"))
    real = resolve.read_bundle

    def swap_then_read(path: str) -> object:
        shutil.rmtree(bundle)
        write_bundle(bundle, "sm_100")
        return real(path)

    monkeypatch.setattr(resolve, "read_bundle", swap_then_read)
    with pytest.raises(
        BundleError, match="the manifest changed during the search: 'kimi_k3' sm_90 is now 'kimi_k3' sm_100"
    ):
        find_bundle(None, HOPPER)


def test_the_search_compares_the_drivers_version(monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = write_bundle(Path("artifacts/kimi_k3-sm_90"))
    assert find_bundle(None, HOPPER, driver=(12, 0)).path == bundle.absolute()
    with pytest.raises(BundleError, match=r"needs a driver for CUDA 12\.0 \(driver release 525\.60\.13\) or later"):
        find_bundle(None, HOPPER, driver=(11, 8))


def test_doctor_searches_with_the_drivers_version(monkeypatch: pytest.MonkeyPatch) -> None:
    write_bundle(Path("artifacts/kimi_k3-sm_90"))
    gpu = Gpu(index=0, name="NVIDIA H200", capability=HOPPER)
    found = dataclasses.replace(doctor.gather_machine(), driver=Driver(cuda=(11, 8), gpus=(gpu,)))
    monkeypatch.setattr(doctor, "gather_machine", lambda: found)
    (resolution,) = doctor.gather_facts(None, None).resolutions
    assert resolution.chosen is None
    assert resolution.next_step == "install a driver for CUDA 12.0 (driver release 525.60.13) or later."

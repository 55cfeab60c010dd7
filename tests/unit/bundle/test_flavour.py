"""The compiler's flavour and the oldest driver of a bundle: written down, shown, and proven from the binaries."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from attnres_aot.binary.cubin import read_cubin
from attnres_aot.bundle.manifest import load_manifest
from attnres_aot.bundle.manifest_check import manifest_problems
from attnres_aot.cli.entry import main
from attnres_aot.verify.bundle_check import verify_bundle


@pytest.mark.parametrize(
    ("arch", "toolkit"), [("sm_90", "cu12"), ("sm_90", "cu13"), ("sm_100f", "cu12"), ("sm_100f", "cu13")]
)
def test_a_binary_names_its_flavour(arch, toolkit, cubin):
    facts = read_cubin(cubin("consumer", arch, toolkit))
    assert facts.flavour == toolkit


def test_a_note_without_a_release_names_no_flavour(cubin):
    data = cubin("consumer", "sm_100")
    assert read_cubin(data.replace(b"release 12.9", b"RELEASE 12.9")).flavour is None


@dataclass(frozen=True, kw_only=True)
class Untrue:
    name: str
    field: str
    value: str
    message: str


UNTRUE = [
    Untrue(name="other-flavour", field="flavour", value="cu13", message="flavour: asked cu13, the binary is of cu12"),
    Untrue(name="no-flavour", field="flavour", value="", message="flavour '' is not `cu` and a CUDA major version"),
    Untrue(
        name="older-driver",
        field="oldest_driver",
        value="11.8",
        message="oldest_driver: the manifest says '11.8'; built",
    ),
    Untrue(name="newer-driver", field="oldest_driver", value="13.0", message="built again it would say '12.8'"),
    Untrue(name="no-driver", field="oldest_driver", value="any", message="'any' is not a CUDA version such as '12.8'"),
]


@pytest.mark.parametrize("untrue", UNTRUE, ids=lambda case: case.name)
def test_an_untrue_flavour_or_driver_is_a_problem(untrue, bundle):
    bundle.edit(lambda raw: raw.update({untrue.field: untrue.value}))
    assert untrue.message in "\n".join(verify_bundle(bundle.path).problems)


def test_a_flavour_of_a_later_release_is_well_formed(bundle):
    bundle.edit(lambda raw: raw.update(flavour="cu14", oldest_driver="14.0"))
    assert manifest_problems(load_manifest(bundle.manifest_path.read_bytes(), "x")) == []


def test_both_are_shown(bundle, capsys):
    assert main(["inspect", str(bundle.path)]) == 0
    out = capsys.readouterr().out
    assert "CUDA 12.8 (driver release 570.26) or later" in out
    assert "built with     flavour cu12" in out
    assert main(["inspect", str(bundle.path), "--image", "h2048-nb1-delta"]) == 0
    assert "(flavour cu12)" in capsys.readouterr().out


def test_an_old_layouts_binary_is_shown_with_its_flavour(make_bundle, capsys):
    assert main(["inspect", str(make_bundle("sm_90").path), "--image", "h2048-nb1-delta"]) == 0
    assert "the binary names no tool (flavour cu12)" in capsys.readouterr().out

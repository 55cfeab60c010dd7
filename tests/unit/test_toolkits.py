"""Flavours and drivers: what code of each flavour for each arch needs, and how versions are written."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from attnres_aot.errors import UsageError
from attnres_aot.runtime.cuda.driver import MIN_CUDA, MIN_DRIVER
from attnres_aot.spec.arch import BUILDABLE, parse_arch
from attnres_aot.spec.toolkits import (
    DRIVER_RELEASES,
    FLAVOURS,
    cuda_text,
    driver_text,
    is_flavour_name,
    oldest_driver,
    parse_cuda,
    parse_flavour,
)


@dataclass(frozen=True)
class Need:
    flavour: str
    arch: str
    cuda: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.flavour}-{self.arch}"


NEEDS = [
    Need("cu12", "sm_90", (12, 0)),
    Need("cu12", "sm_90a", (12, 0)),
    Need("cu12", "sm_100", (12, 8)),
    Need("cu12", "sm_100a", (12, 8)),
    Need("cu12", "sm_100f", (12, 9)),
    Need("cu12", "sm_103", (12, 9)),
    Need("cu12", "sm_103a", (12, 9)),
    Need("cu12", "sm_120", (12, 8)),
    Need("cu12", "sm_120a", (12, 8)),
    *(Need("cu13", str(arch), (13, 0)) for arch in BUILDABLE),
]


@pytest.mark.parametrize("need", NEEDS, ids=str)
def test_code_needs_a_driver_that_knows_its_flavour_and_its_arch(need):
    assert oldest_driver(need.flavour, parse_arch(need.arch)) == need.cuda


def test_every_flavour_and_every_buildable_arch_has_a_case_above():
    assert {str(need) for need in NEEDS} == {f"{flavour}-{arch}" for flavour in FLAVOURS for arch in BUILDABLE}


def test_every_version_that_can_be_needed_has_its_driver_release():
    needed = {oldest_driver(flavour, arch) for flavour in FLAVOURS for arch in BUILDABLE}
    assert needed | {MIN_CUDA} <= DRIVER_RELEASES.keys()
    assert DRIVER_RELEASES[MIN_CUDA] == MIN_DRIVER
    releases = [tuple(map(int, DRIVER_RELEASES[cuda].split("."))) for cuda in sorted(DRIVER_RELEASES)]
    assert releases == sorted(releases)


def test_versions_are_read_as_they_are_written():
    for version in DRIVER_RELEASES:
        assert parse_cuda(cuda_text(version)) == version
    assert driver_text((12, 8)) == "CUDA 12.8 (driver release 570.26)"
    assert driver_text((99, 1)) == "CUDA 99.1"


@pytest.mark.parametrize(
    "text", ["", "12", "12.", ".8", "012.8", "12.8.1", "12.888", "-1.0", "12.8\n", "\uff112.8", "9" * 5000]
)
def test_what_is_no_version_is_none(text):
    assert parse_cuda(text) is None


def test_flavours_are_known_by_name():
    assert [parse_flavour(name) for name in FLAVOURS] == list(FLAVOURS)
    with pytest.raises(
        UsageError, match=r"'cu14' is not a compiler flavour \(did you mean 'cu1\d'\?\); choose from cu12"
    ):
        parse_flavour("cu14")
    assert is_flavour_name("cu14")
    assert not any(map(is_flavour_name, ["", "cu", "cu0", "cu012", "cu12x", "CU12", "cu123"]))

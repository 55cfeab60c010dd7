"""The pure resolver: which candidate is taken, and what the trace and the errors say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from attnres_aot.bundle.manifest import SCHEMA
from attnres_aot.runtime.find.archs import arch_to_build, fitting_archs
from attnres_aot.runtime.find.places import Candidate, Place
from attnres_aot.runtime.find.resolve import Request, judge, resolve


def candidate(path: str, arch: str = "sm_90", **changes: object) -> Candidate:
    made = Candidate(
        path=path,
        real_path=path,
        schema=SCHEMA,
        name="kimi_k3",
        arch=arch,
        oldest_driver="12.0",
        manifest_sha256=f"digest of {path}",
    )
    return replace(made, **changes)


def place(label: str, *candidates: Candidate, binding: bool = False, note: str = "") -> Place:
    return Place(label=label, binding=binding, note=note, candidates=candidates)


@dataclass(frozen=True, kw_only=True)
class Choice:
    name: str
    places: tuple[Place, ...]
    capability: tuple[int, int] = (9, 0)
    asked: str | None = None
    chosen: str | None
    statuses: tuple[str, ...]
    reasons: tuple[str, ...]


CHOICES = [
    Choice(
        name="exact",
        places=(place("here", candidate("/a")),),
        chosen="/a",
        statuses=("accepted",),
        reasons=("kimi_k3 for sm_90, exactly the device's 9.0",),
    ),
    Choice(
        name="plain-arch-serves-a-later-minor",
        places=(place("here", candidate("/a", "sm_100")),),
        capability=(10, 3),
        chosen="/a",
        statuses=("accepted",),
        reasons=("kimi_k3 for sm_100, which runs on compute capability 10.0 and later 10.x; the device is 10.3",),
    ),
    Choice(
        name="closer-arch-wins-whatever-the-order",
        places=(place("here", candidate("/a", "sm_100"), candidate("/b", "sm_103"), candidate("/c", "sm_100f")),),
        capability=(10, 3),
        chosen="/b",
        statuses=("fits", "accepted", "fits"),
        reasons=("sm_103 is closer", "exactly the device's 10.3", "sm_103 is closer"),
    ),
    Choice(
        name="chip-only-arch-beats-plain-on-its-chip",
        places=(place("here", candidate("/a", "sm_90"), candidate("/b", "sm_90a")),),
        chosen="/b",
        statuses=("fits", "accepted"),
        reasons=("sm_90a is closer", "kimi_k3 for sm_90a, exactly the device's 9.0"),
    ),
    Choice(
        name="chip-only-arch-serves-no-other-chip",
        places=(place("here", candidate("/a", "sm_100a")),),
        capability=(10, 3),
        chosen=None,
        statuses=("refused",),
        reasons=("built for sm_100a, which runs on compute capability 10.0 only; the device is 10.3",),
    ),
    Choice(
        name="newer-minor-does-not-serve-an-older-device",
        places=(place("here", candidate("/a", "sm_103")),),
        capability=(10, 0),
        chosen=None,
        statuses=("refused",),
        reasons=("built for sm_103, which runs on compute capability 10.3 and later 10.x; the device is 10.0",),
    ),
    Choice(
        name="other-major-is-never-served",
        places=(place("here", candidate("/a", "sm_100f")),),
        capability=(12, 0),
        chosen=None,
        statuses=("refused",),
        reasons=("built for sm_100f, which runs on compute capability 10.0 and later 10.x (its family)",),
    ),
    Choice(
        name="earlier-place-wins-over-closer-arch",
        places=(place("first", candidate("/a", "sm_100")), place("second", candidate("/b", "sm_103"))),
        capability=(10, 3),
        chosen="/a",
        statuses=("accepted",),
        reasons=("kimi_k3 for sm_100",),
    ),
    Choice(
        name="refused-places-are-passed",
        places=(place("first", candidate("/a", "sm_100")), place("second", candidate("/b"))),
        chosen="/b",
        statuses=("refused", "accepted"),
        reasons=("built for sm_100", "exactly"),
    ),
    Choice(
        name="binding-place-is-the-last",
        places=(place("named", candidate("/a", "sm_100"), binding=True), place("second", candidate("/b"))),
        chosen=None,
        statuses=("refused",),
        reasons=("built for sm_100",),
    ),
    Choice(
        name="name-selects-the-configuration",
        places=(place("here", candidate("/a"), candidate("/b", name="other")),),
        asked="other",
        chosen="/b",
        statuses=("refused", "accepted"),
        reasons=("holds configuration 'kimi_k3', asked for 'other'", "other for sm_90"),
    ),
    Choice(
        name="name-nearly-right",
        places=(place("here", candidate("/a")),),
        asked="kimi-k3",
        chosen=None,
        statuses=("refused",),
        reasons=("holds configuration 'kimi_k3', asked for 'kimi-k3' (did you mean 'kimi_k3'?)",),
    ),
    Choice(
        name="other-configuration-for-another-arch-is-no-ambiguity",
        places=(place("here", candidate("/a"), candidate("/b", "sm_100", name="other")),),
        chosen="/a",
        statuses=("accepted", "refused"),
        reasons=("exactly", "built for sm_100"),
    ),
    Choice(
        name="schemas",
        places=(
            place(
                "here",
                candidate("/a", schema=SCHEMA + 1),
                candidate("/b", schema=True),
                candidate("/c", schema="1"),
                candidate("/d", schema=float(SCHEMA)),
            ),
        ),
        chosen=None,
        statuses=("refused",) * 4,
        reasons=(f"manifest schema {SCHEMA + 1}, but this", "schema True", "schema '1'", f"schema {SCHEMA}.0"),
    ),
    Choice(
        name="unusable-manifests",
        places=(
            place(
                "here",
                candidate("/a", trouble="manifest.json is not JSON: spilled"),
                candidate("/b", name=""),
                candidate("/c", arch=""),
                candidate("/d", arch="sm_9O"),
            ),
        ),
        chosen=None,
        statuses=("refused",) * 4,
        reasons=("is not JSON: spilled", "names no configuration", "names no arch", "'sm_9O' is not a GPU arch"),
    ),
    Choice(
        name="copies-are-one-bundle",
        places=(place("here", candidate("/a", manifest_sha256="x"), candidate("/b", manifest_sha256="x")),),
        chosen="/a",
        statuses=("accepted", "fits"),
        reasons=("exactly", "the same bundle as /a"),
    ),
    Choice(
        name="links-are-one-bundle",
        places=(place("here", candidate("/current", real_path="/v1"), candidate("/v1")),),
        chosen="/current",
        statuses=("accepted", "fits"),
        reasons=("exactly", "the same bundle as /current"),
    ),
]


@pytest.mark.parametrize("case", CHOICES, ids=lambda case: case.name)
def test_choice_and_trace(case: Choice) -> None:
    resolution = resolve(Request(capability=case.capability, name=case.asked), case.places)
    verdicts = [verdict for visit in resolution.trace for verdict in visit.verdicts]
    assert (resolution.chosen.path if resolution.chosen else None) == case.chosen
    assert tuple(verdict.status for verdict in verdicts) == case.statuses
    for verdict, reason in zip(verdicts, case.reasons, strict=True):
        assert reason in verdict.reason
    assert bool(resolution.problem) == bool(resolution.next_step) == (case.chosen is None)


def test_places_behind_the_deciding_one_are_not_even_gathered() -> None:
    def places() -> Iterator[Place]:
        yield place("first", candidate("/a"))
        pytest.fail("the second place was asked for")

    resolved = resolve(Request(capability=(9, 0)), places())
    assert resolved.chosen == candidate("/a")


def test_error_of_a_search_in_vain_is_the_trace_and_the_command() -> None:
    places = (
        place("path", note="not given"),
        place("installed packages", candidate("/pkg/k3", "sm_100", origin="entry point 'k3'")),
        place("./artifacts", candidate("/w/old", schema=0), note="1 of 2 folders in /w are bundles"),
    )
    assert str(resolve(Request(capability=(9, 0)), places).error()) == (
        "No bundle runs on this device, compute capability 9.0; searched in this order:\n"
        "  path: not given\n"
        "  installed packages: 1 candidate\n"
        "    refused  /pkg/k3 (entry point 'k3'): built for sm_100, which runs on compute capability 10.0 and later "
        "10.x; the device is 9.0\n"
        "  ./artifacts: 1 of 2 folders in /w are bundles\n"
        f"    refused  /w/old: manifest schema 0, but this attnres-aot reads schema {SCHEMA}\n"
        "Next step: `attnres-aot build --arch sm_90` builds one (sm_90a or sm_90 would do); then give its folder as "
        "the path, or in ATTNRES_AOT_BUNDLE."
    )


def test_error_at_a_named_place_says_that_nothing_else_was_searched() -> None:
    places = (place("path '/x'", binding=True, note="/x does not exist"),)
    assert "a place that was named is the only one searched" in str(resolve(Request(capability=(9, 0)), places).error())


def test_error_for_a_named_configuration_asks_for_its_file() -> None:
    text = str(resolve(Request(capability=(9, 0), name="other"), ()).error())
    assert "No bundle of configuration 'other' runs on this device" in text
    assert "`attnres-aot build --arch sm_90 --config FILE` (FILE: the configuration 'other') builds one" in text


def test_error_for_a_gpu_that_no_arch_serves() -> None:
    text = str(resolve(Request(capability=(8, 0)), ()).error())
    assert "Next step: use another GPU: bundles can be built for compute capability 9.0 and later 9.x; " in text
    assert "attnres-aot build" not in text


def test_two_configurations_are_ambiguous_even_when_one_arch_is_closer() -> None:
    both = place("here", candidate("/a", "sm_103"), candidate("/b", "sm_100", name="other"))
    resolution = resolve(Request(capability=(10, 3)), (both,))
    text = str(resolution.error())
    assert resolution.chosen is None
    assert text.startswith("Bundles of 2 configurations fit compute capability 10.3; searched in this order:")
    assert "fits     /a: kimi_k3 for sm_103" in text
    assert "fits     /b: other for sm_100" in text
    assert text.endswith("Next step: say which: pass name='kimi_k3' or name='other', or the path of one bundle.")


def test_two_different_bundles_of_one_name_and_arch_are_ambiguous() -> None:
    resolution = resolve(Request(capability=(9, 0)), (place("here", candidate("/a"), candidate("/b")),))
    text = str(resolution.error())
    assert "Different bundles of 'kimi_k3' for the same arch sm_90 fit" in text
    assert text.endswith("pass the path of one, '/a' or '/b', or remove the other.")


def test_judging_is_the_arch_rule_and_nothing_else() -> None:
    for capability in [(8, 0), (9, 0), (10, 0), (10, 1), (10, 3), (11, 0), (12, 0), (12, 1)]:
        fitting = fitting_archs(capability)
        for arch in ("sm_90", "sm_90a", "sm_100", "sm_100a", "sm_100f", "sm_103", "sm_103a", "sm_120", "sm_120a"):
            status = judge(Request(capability=capability), candidate("/a", arch)).status
            assert (status == "fits") == (arch in map(str, fitting)), (capability, arch)


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((9, 0), "sm_90"), ((10, 0), "sm_100"), ((10, 3), "sm_103"), ((12, 1), "sm_120"), ((8, 9), "None")],
)
def test_arch_to_build(capability: tuple[int, int], arch: str) -> None:
    assert str(arch_to_build(capability)) == arch

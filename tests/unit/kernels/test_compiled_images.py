"""Images as compiled, executed on the CPU: results against fp64, and what happens when their code is spoilt."""

import re
from dataclasses import dataclass, replace

import pytest
import torch
from ptx_machine.effects import TrapError
from ptx_machine.images import CompiledImages, compile_ptx
from ptx_machine.machine import DeadlockError
from ptx_machine.program import PtxError, body_of, parse
from ptx_machine.prove import ARCHES, Job, check, jobs, planned

from attnres_aot.selftest.arena import DENSE, PADDED
from attnres_aot.selftest.cases import Case, draw_banks
from attnres_aot.selftest.inputs import FAMILIES
from attnres_aot.selftest.suite import check_case
from attnres_aot.spec.variants import choices_for, parse_producer, parse_variant, producer_spec_for
from tests.support.far_shares import far_banks, far_case

NAMES = [
    "h7168-nb0",
    "h7168-nb0-wide",
    "h7168-nb1-delta",
    "h7168-nb1-delta-wide",
    "h7168-nb4-wide",
    "h7168-nb8-delta",
    "h7168-nb8-delta-wide",
    "h7168-nb8-delta-final",
    "h7168-nb1-delta-ring1",
    "h7168-nb5-delta-ring8",
    "h7168-nb6-delta-ring1",
    "h7168-nb8-delta-ring16",
    "h7168-nb8-delta-final-ring8",
    "h7168-stats-delta",
    "h7168-stats-delta-ring16",
    "h7168-statistics-nb8",
    "h7168-publish",
]
FIRST_ARCH = ARCHES[0]
FAMILY_ROWS = len(FAMILIES)


@pytest.fixture(scope="session")
def work():
    return {str(job.spec): job for job in jobs(planned(FIRST_ARCH))}


@pytest.fixture(scope="session")
def ptx(work):
    return dict(zip(NAMES, compile_ptx([work[name].spec for name in NAMES], FIRST_ARCH), strict=True))


def make(name: str, text: str, work) -> tuple[CompiledImages, Case]:
    """The image as a consumer, and a case for it."""
    job = work[name]
    images = CompiledImages(programs={job.spec: parse(text)}, spec=job.spec, steps=20_000)
    case = Case(variant=job.users[0], rows=1, layout=DENSE, eps=1e-5, out_eps=1e-5, steep=False, start=0)
    return images, case


@pytest.mark.parametrize("name", NAMES)
def test_an_image_gives_what_the_contract_says(name, work, ptx, banks):
    """All families, in three memory layouts; then one row with threads in random order."""
    job = work[name]
    finding = check(replace(job, users=job.users[:1]), ptx[name], banks, (FAMILY_ROWS,), len(name), schedules=1)
    assert finding.problems == ()
    assert finding.launches >= 4


@pytest.mark.parametrize("arch", ARCHES[1:])
def test_other_arches_get_the_same_ptx_but_for_their_name(arch, work, ptx):
    names = ["h7168-nb8-delta", "h7168-nb5-delta-ring8", "h7168-statistics-nb8", "h7168-publish"]
    for name, text in zip(names, compile_ptx([work[name].spec for name in names], arch), strict=True):
        assert parse(text).target == arch
        assert body_of(text) == body_of(ptx[name])


def test_a_subnormal_share_counts(work, ptx):
    """Beyond what the contract asks for, shares lose bits one by one: a subnormal one must not be flushed."""
    far = far_banks(7168, 64, torch.device("cpu"), gaps=(88, 90))
    images, case = make("h7168-nb1-delta", ptx["h7168-nb1-delta"], work)
    case = far_case(case.variant)
    assert check_case(case, images, far).problems == ()
    whole, count = re.subn(r"(mul.f32\s+%r\d+, %r\d+, )0f3F38AA3B", r"\g<1>0f3FB8AA3B", ptx["h7168-nb1-delta"])
    assert count == 2  # the exponential itself, not the square of its root
    root = re.findall(r"ex2.approx.ftz.f32 (%r\d+)", whole)[-1]
    flushing = whole.replace(f", {root}, {root};", f", {root}, 0f3F800000;")
    assert flushing != whole
    images, _ = make("h7168-nb1-delta", flushing, work)
    assert any("further off than 1 ulp" in problem for problem in check_case(case, images, far).problems)


@pytest.mark.parametrize("name", [name for name in NAMES if "ring" in name])
@pytest.mark.parametrize("seed", [None, 3])
def test_a_ring_waits_for_late_rows(seed, name, work, ptx, banks):
    images, case = make(name, ptx[name], work)
    images = replace(images, late=8, seed=seed)
    assert check_case(replace(case, layout=PADDED), images, banks).problems == ()


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_rows_published_again_while_they_are_taken_do_not_matter(seed, work, ptx, banks):
    images, case = make("h7168-nb1-delta-ring1", ptx["h7168-nb1-delta-ring1"], work)
    for late in range(3):
        assert (
            check_case(replace(case, rows=4), replace(images, late=late, again=True, seed=seed), banks).problems == ()
        )


def test_a_missing_word_ends_in_a_trap_that_names_its_place(work, ptx, banks):
    images, case = make("h7168-nb5-delta-ring8", ptx["h7168-nb5-delta-ring8"], work)
    images = replace(images, late=4, keep_back=1, spin_budget=30)
    with pytest.raises(TrapError):
        check_case(replace(case, rows=3), images, banks)
    ((slot, row, word),) = images.missing
    assert images.fault.tolist() == [77, row, slot, word // 4]


def test_without_a_budget_a_missing_word_is_waited_for_without_end(work, ptx, banks):
    images, case = make("h7168-nb1-delta-ring1", ptx["h7168-nb1-delta-ring1"], work)
    with pytest.raises(DeadlockError, match="no end after 2000 steps"):
        check_case(case, replace(images, late=4, keep_back=1, steps=2000), banks)


@dataclass(frozen=True, kw_only=True)
class Defect:
    name: str
    old: str
    new: str
    says: str
    image: str = "h7168-nb1-delta"
    error: type[Exception] = PtxError


DEFECTS = [
    Defect(name="no-cta-barrier", old="bar.sync 0;", new="", says="a race: shared memory is read"),
    Defect(name="no-warp-barrier", old="bar.warp.sync -1;", new="", says="a race: shared memory is read"),
    Defect(name="no-cluster-barrier", old="barrier.cluster.wait;", new="", says="before the cluster barrier"),
    Defect(name="expects-more", old="%r62, 128;", new="%r62, 132;", says="nobody can go on", error=DeadlockError),
    Defect(name="expects-less", old="%r62, 128;", new="%r62, 124;", says="more bytes came"),
    Defect(name="no-wait-for-the-source", old="griddepcontrol.wait;", new="", says="before the dependency wait"),
    Defect(name="no-release", old="griddepcontrol.launch_dependents;", new="", says="has not released"),
    Defect(name="stray-load", old=", 16;\n", new=", 32;\n", says="is not readable"),
    Defect(name="unknown", old="setp.gt.f32", new="setp.gtu.f32", says="does not know: setp.gtu"),
]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_spoilt_code_is_found_out(defect, work, ptx, banks):
    text = re.sub(r"[ \t]+", " ", ptx[defect.image])
    assert defect.old in text
    images, case = make(defect.image, text.replace(defect.old, defect.new), work)
    with pytest.raises(defect.error, match=defect.says):
        check_case(replace(case, rows=2), images, banks)


def test_a_wrong_constant_is_a_wrong_result(work, ptx, banks):
    images, case = make("h7168-nb1-delta", ptx["h7168-nb1-delta"].replace("0f3F38AA3B", "0f3F38A000"), work)
    assert check_case(replace(case, rows=FAMILY_ROWS), images, banks).problems


@pytest.mark.parametrize("name", [name for name in NAMES if not re.search("nb0|statistics-|publish", name)])
def test_a_small_share_of_a_large_source_counts(name, work, ptx):
    """Shares are multiplied with what they weigh before they meet again: none is squared by itself."""
    images, case = make(name, ptx[name], work)
    verdict = check_case(far_case(case.variant), images, far_banks(7168, 64, torch.device("cpu")))
    assert verdict.problems == ()
    assert verdict.relative_error < 2e-3


@dataclass(frozen=True, kw_only=True)
class Shape:
    """An image of another geometry than Kimi K3's, and what is launched with it."""

    hidden: int
    user: str

    def job(self) -> Job:
        if self.user.startswith(("statistics", "publish")):
            producer = parse_producer(self.user)
            return Job(spec=producer_spec_for(producer, self.hidden), users=(producer,))
        variant = parse_variant(self.user)
        return Job(spec=choices_for(variant, self.hidden)[-1].spec, users=(variant,))


SHAPES = [
    Shape(hidden=2304, user="nb3-delta-write3-aux"),
    Shape(hidden=2304, user="nb5-delta-ring2"),
    Shape(hidden=768, user="nb6-ring12-aux"),
    Shape(hidden=1280, user="nb5-delta-ring2-stats"),
    Shape(hidden=1280, user="statistics-nb12"),
    Shape(hidden=1280, user="publish"),
    Shape(hidden=256, user="nb9-delta-final"),
    Shape(hidden=256, user="nb1-delta-ring1"),
    Shape(hidden=256, user="nb0-write0"),
    Shape(hidden=1024, user="nb16-delta-ring8"),
    Shape(hidden=1280, user="nb16-delta-final-ring16"),
]


@pytest.fixture(scope="session")
def other_ptx():
    return dict(zip(SHAPES, compile_ptx([shape.job().spec for shape in SHAPES], FIRST_ARCH), strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"h{shape.hidden}-{shape.user}")
def test_other_hidden_sizes_and_more_blocks(shape, other_ptx):
    """Rows that end within a thread block, where the threads beyond must touch nothing, and up to 16 saved blocks."""
    banks = draw_banks(shape.hidden, 64, 8, torch.device("cpu"))
    finding = check(shape.job(), other_ptx[shape], banks, (FAMILY_ROWS,), shape.hidden % 13, schedules=1)
    assert finding.problems == ()

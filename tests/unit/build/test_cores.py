"""How many cores a build takes: those it may run on, and no more than its container's CPU quota pays for."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import pytest

from attnres_aot.build import cores
from attnres_aot.build.cores import cpu_quota, usable_cores


@dataclass(frozen=True)
class Container:
    name: str
    own: str
    """Text of /proc/self/cgroup."""
    files: dict[str, str] = field(default_factory=dict)
    """File below the mount of control groups -> text."""
    quota: float | None = None


CONTAINERS = [
    Container("nothing_mounted", "0::/\n"),
    Container("version_2", "0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
    Container("version_2_without_quota", "0::/\n", {"cpu.max": "max 100000\n"}),
    Container(
        "version_2_of_a_group_around", "0::/a/b\n", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, 2.0
    ),
    Container("the_smallest_counts", "0::/a/b\n", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "50000 100000"}, 0.5),
    Container("path_of_the_host", "0::/kubepods/pod1/c\n", {"cpu.max": "400000 100000"}, 4.0),
    Container("path_above_the_mount", "0::/../../other\n", {"cpu.max": "400000 100000"}, 4.0),
    Container(
        "version_1",
        "4:memory:/\n1:cpu,cpuacct:/docker/x\n",
        {"cpu,cpuacct/docker/x/cpu.cfs_quota_us": "300000", "cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000"},
        3.0,
    ),
    Container(
        "version_1_at_the_top_of_the_mount",
        "1:cpu:/docker/x\n",
        {"cpu/cpu.cfs_quota_us": "25000\n", "cpu/cpu.cfs_period_us": "50000\n"},
        0.5,
    ),
    Container(
        "version_1_without_quota", "1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}
    ),
    Container("quota_without_period", "1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "100000\n"}),
    Container("period_of_zero", "0::/\n", {"cpu.max": "100000 0"}),
    Container("nonsense", "what\n\n::\n1:cpu\n", {"cpu.max": "many \u00b2", "cpu/cpu.cfs_quota_us": "9" * 5000}),
]


@pytest.mark.parametrize("case", CONTAINERS, ids=lambda case: case.name)
def test_quota_is_the_smallest_around_the_process(case, tmp_path):
    for name, text in case.files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    own = tmp_path / "cgroup"
    own.write_text(case.own)
    assert cpu_quota(tmp_path / "groups", own) == case.quota


def test_no_list_of_groups_is_no_quota(tmp_path):
    assert cpu_quota(tmp_path, tmp_path / "none") is None


@pytest.mark.parametrize(
    ("schedulable", "quota", "usable"),
    [(8, None, 8), (8, 1.5, 2), (8, 0.1, 1), (2, 16.0, 2), (1, 1.0, 1), (8, 3.0, 3)],
)
def test_the_smaller_of_both_is_used(schedulable, quota, usable, monkeypatch):
    monkeypatch.setattr(cores, "_schedulable_cores", lambda: schedulable)
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    assert usable_cores() == usable


def test_affinity_counts(monkeypatch):
    monkeypatch.setattr(os, "process_cpu_count", lambda: 3, raising=False)
    assert cores._schedulable_cores() == 3
    monkeypatch.delattr(os, "process_cpu_count")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5}, raising=False)
    assert cores._schedulable_cores() == 2

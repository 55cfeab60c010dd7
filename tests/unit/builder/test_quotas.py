"""How many jobs a build takes: no more than its container has cores and memory for."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import pytest

from attnres_aot.builder import quotas
from attnres_aot.builder.quotas import cpu_quota, memory_limit, usable_cores, usable_memory
from attnres_aot.cli import build_command


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
    monkeypatch.setattr(quotas, "_schedulable_cores", lambda: schedulable)
    monkeypatch.setattr(quotas, "cpu_quota", lambda: quota)
    assert usable_cores() == usable


GIB = 1 << 30
MEMORY = [
    ("version_2", "0::/\n", {"memory.max": f"{GIB}\n"}, GIB),
    ("version_2_without_limit", "0::/\n", {"memory.max": "max\n"}, None),
    ("version_2_around", "0::/a/b\n", {"a/memory.max": f"{GIB}", "a/b/memory.max": f"{2 * GIB}"}, GIB),
    ("version_1", "4:memory:/docker/x\n", {"memory/docker/x/memory.limit_in_bytes": f"{GIB}\n"}, GIB),
    ("version_1_without_limit", "4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
    ("version_1_at_the_top", "4:memory:/docker/x\n", {"memory/memory.limit_in_bytes": f"{3 * GIB}\n"}, 3 * GIB),
]


@pytest.mark.parametrize("case", MEMORY, ids=lambda case: case[0])
def test_memory_limit_is_the_smallest_around_the_process(case, tmp_path):
    _, own_text, files, limit = case
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    own = tmp_path / "cgroup"
    own.write_text(own_text)
    assert memory_limit(tmp_path / "groups", own) == limit


def test_a_limit_above_the_installed_memory_is_none(monkeypatch):
    monkeypatch.setattr(quotas, "memory_limit", lambda: None)
    installed = usable_memory()
    assert installed > 0
    monkeypatch.setattr(quotas, "memory_limit", lambda: 1 << 60)
    assert usable_memory() == installed
    monkeypatch.setattr(quotas, "memory_limit", lambda: 12345)
    assert usable_memory() == 12345


@pytest.mark.parametrize(
    ("cores", "memory", "jobs"), [(4, 64 * GIB, 4), (64, 64 * GIB, 16), (16, 2 * GIB, 5), (16, 1 << 20, 1), (1, GIB, 1)]
)
def test_jobs_are_as_many_as_both_are_enough_for(cores, memory, jobs, monkeypatch):
    monkeypatch.setattr(build_command, "usable_cores", lambda: cores)
    monkeypatch.setattr(build_command, "usable_memory", lambda: memory)
    assert build_command.default_jobs() == jobs


def test_affinity_counts(monkeypatch):
    monkeypatch.setattr(os, "process_cpu_count", lambda: 3, raising=False)
    assert quotas._schedulable_cores() == 3
    monkeypatch.delattr(os, "process_cpu_count")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5}, raising=False)
    assert quotas._schedulable_cores() == 2

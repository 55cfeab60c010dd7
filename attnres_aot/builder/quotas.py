"""How many cores and how much memory a build may use: what the machine has, within the limits of its container.

A container's limits (`docker run --cpus --memory`, those of Kubernetes) hide neither cores nor memory: the processes of
a control group are held up, or killed, when they use more. Both versions of the kernel's interface are read, for the
group of this process and for those around it, as far as they can be seen from here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
"""Where control groups are mounted."""
OWN_GROUPS = Path("/proc/self/cgroup")
"""The groups of this process: lines `number:controllers:path`, without controllers for version 2."""


def usable_cores() -> int:
    """Returns the number of CPU cores that this process may keep busy, at least 1."""
    cores = _schedulable_cores()
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def usable_memory() -> int:
    """Returns the bytes of memory that this process and its children may have together."""
    limit = memory_limit()
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return installed if limit is None else min(installed, limit)


def memory_limit(groups: Path = GROUPS, own_groups: Path = OWN_GROUPS) -> int | None:
    """Returns the smallest memory limit of the groups around this process, in bytes; None if there is none.

    Args:
      groups: where control groups are mounted.
      own_groups: the file that lists the groups of this process.
    """
    files = [
        folder / name
        for folder in _folders("memory", groups, own_groups)
        for name in ("memory.max", "memory.limit_in_bytes")
    ]
    limits = [limit for file in files for limit in _words(file, 1) if limit is not None and limit > 0]
    return min(limits, default=None)


def cpu_quota(groups: Path = GROUPS, own_groups: Path = OWN_GROUPS) -> float | None:
    """Returns the smallest CPU quota of the groups around this process, in cores; None if there is none.

    Args:
      groups: where control groups are mounted.
      own_groups: the file that lists the groups of this process.
    """
    quotas = [quota for folder in _folders("cpu", groups, own_groups) if (quota := _quota_of(folder)) is not None]
    return min(quotas, default=None)


def _schedulable_cores() -> int:
    count = getattr(os, "process_cpu_count", None)  # Python 3.13; heeds -X cpu_count too
    if count is not None:
        return count() or 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _folders(controller: str, groups: Path, own_groups: Path) -> Iterator[Path]:
    """Yields the folders of the groups of this process and of all groups around them, for one controller.

    In a container the mount shows the container's group at its top, while the path may be the one that the host sees;
    so the top is always among them, and folders that are not there are passed over by the reader.
    """
    mounts = [(groups, "/"), (groups / controller, "/"), (groups / "cpu,cpuacct", "/"), (groups / "unified", "/")]
    try:
        lines = own_groups.read_text().splitlines()
    except (OSError, ValueError):
        lines = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            mounts += [(groups, path), (groups / "unified", path)]
        elif controller in controllers.split(","):
            mounts += [(groups / controller, path), (groups / controllers, path)]
    for mount, path in mounts:
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for depth in range(len(parts) + 1):
            yield mount.joinpath(*parts[:depth])


def _quota_of(folder: Path) -> float | None:
    """Returns the quota of one group in cores, by either version of the interface; None if it sets none."""
    quota, period = _words(folder / "cpu.max", 2)
    if quota is None:
        quota, period = *_words(folder / "cpu.cfs_quota_us", 1), *_words(folder / "cpu.cfs_period_us", 1)
    if quota is None or period is None or quota <= 0 or period <= 0:  # -1 is the word for none in version 1
        return None
    return quota / period


def _words(file: Path, count: int) -> list[int | None]:
    """Returns the numbers in a file of `count` words; None for what is no number, such as the word `max`."""
    try:
        words = file.read_text().split()[:count]
    except (OSError, ValueError):
        words = []
    numbers = [int(word) if word.lstrip("-").isdecimal() and len(word) < 19 else None for word in words]
    return [*numbers, *[None] * (count - len(numbers))]

"""How many CPUs there are for this process."""

from __future__ import annotations

import math
import os
from pathlib import Path, PurePosixPath

__all__ = ["available_cpus"]

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_VERSION_1 = ("cpu.cfs_quota_us", "cpu.cfs_period_us")


def available_cpus() -> int:
    """The number of CPUs that this process may use, at least 1.

    The smallest of its CPU affinity and, on Linux, the quotas of its control group and those above it,
    rounded up: a container is given CPU time, not CPUs, and ``os.cpu_count()`` shows it those of its
    host. More threads than that take turns, which makes parallel loops slower than one thread. Of the
    processes that ``torchrun`` starts on a machine, each gets an equal part.
    """
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    count = min([count, *map(math.ceil, _quotas())])
    return max(1, count // _local_processes())


def _local_processes() -> int:
    """How many processes of this job share the machine."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdigit() else 1


def _quotas() -> list[float]:
    """CPU time per time that the control groups may use, of those with a limit."""
    paths = [PurePosixPath("/")]
    try:
        # Version 2 has one line, "0::PATH".
        for line in _OWN_CGROUP.read_text().splitlines():
            if line.startswith("0::"):
                path = PurePosixPath(line[3:])
                paths += [path, *path.parents]
    except OSError:
        pass
    quotas = []
    for path in dict.fromkeys(paths):
        folder = _CGROUPS / path.relative_to("/")
        for texts in ((folder / "cpu.max",), tuple(folder / "cpu" / name for name in _VERSION_1)):
            try:
                quota, period = " ".join(text.read_text() for text in texts).split()
                quotas.append(float(quota) / float(period))
            except (OSError, ValueError, ZeroDivisionError):
                continue  # no such file, or "max"
    return [quota for quota in quotas if quota > 0]  # -1 is no limit

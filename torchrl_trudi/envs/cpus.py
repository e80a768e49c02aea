"""How many CPUs there are for this process."""

from __future__ import annotations

import math
import os
from pathlib import Path

__all__ = ["available_cpus"]

_CGROUPS = Path("/sys/fs/cgroup")


def available_cpus() -> int:
    """The number of CPUs that this process may use, at least 1.

    The smaller one of its CPU affinity and, on Linux, the quota of its control group, rounded up: a
    container is given CPU time, not CPUs, and ``os.cpu_count()`` shows it those of its host. More
    threads than that take turns, which makes parallel loops slower than one thread.
    """
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    quota = _cgroup_quota()
    return count if quota is None else max(1, min(count, math.ceil(quota)))


def _cgroup_quota() -> float | None:
    """CPU time per time that the control group may use, ``None`` where there is no limit."""
    try:
        if (version_2 := _CGROUPS / "cpu.max").exists():
            quota, period = version_2.read_text().split()
        else:
            quota, period = (
                (_CGROUPS / "cpu" / f"cpu.cfs_{name}_us").read_text()
                for name in ("quota", "period")
            )
        allowed = float(quota) / float(period)  # "max", or a negative quota, is no limit
    except (OSError, ValueError, ZeroDivisionError):
        return None
    return allowed if allowed > 0 else None

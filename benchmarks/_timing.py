"""Timing on one thread: what the scripts of this folder share."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch


def pin_one_thread() -> None:
    """One thread of PyTorch, and where the system can do it, of this process on one CPU."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def seconds(function: Callable[[], object]) -> float:
    """Wall time of one call, work on a GPU included."""
    start = time.perf_counter()
    function()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def medians_ms(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median wall time of each, taking turns, after one call of each to warm up."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + 1):
        for name, function in functions.items():
            elapsed = seconds(function)
            if repeat:
                times[name].append(1e3 * elapsed)
    return {name: statistics.median(values) for name, values in times.items()}


def percentiles_us(function: Callable[[], object], calls: int) -> tuple[float, float]:
    """Median and 99th percentile of the wall time of a call, after a tenth of them to warm up."""
    for _ in range(max(1, calls // 10)):
        function()
    times = torch.tensor([1e6 * seconds(function) for _ in range(calls)], dtype=torch.float64)
    p50, p99 = times.quantile(torch.tensor([0.5, 0.99], dtype=torch.float64)).tolist()
    return p50, p99

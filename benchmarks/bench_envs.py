"""Speed and memory of `MujocoBatchEnv`: against the physics alone, Gymnasium and EnvPool.

    python benchmarks/bench_envs.py [--tasks Humanoid-v5 ...] [--num-envs 64 ...] [--threads 2]
    python benchmarks/bench_envs.py --collector --tasks --memory-envs      # only the collectors
    python benchmarks/bench_envs.py --quick --collector                    # does it run?

Uniform random actions, drawn beforehand; Torch on one thread. The contenders of a task take turns,
one repetition each, again and again, so that noise of the machine hits all alike. Speeds are
medians over the repetitions, ratios are medians of the ratios within a repetition, with their range.

- physics: `mujoco.batch.Batch` alone, which is what the environment is made of: the controls are
  written, the simulations stepped and those that ended reset. Nothing is observed or rewarded.
- env: `MujocoBatchEnv.step_and_maybe_reset`, in the same simulations with the same resets.
- env_raw: its `_step` and `_reset`, without what TorchRL does around them.
- envpool: as many environments and threads (EnvPool is built with a MuJoCo of its own).
- gym_async, gym_sync: Gymnasium's vector environments, at most --rival-envs environments, because
  async makes a process of each (and so uses all CPUs, whatever --threads says).
- torchrl_gym: `make_env(..., backend="gymnasium", normalize_observation=False)`, over gym_sync.

Where an environment that ended is reset by the next call of `step`, that call is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import gc
import importlib.metadata
import os
import platform
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mujoco
import numpy as np
import torch
from _env_contenders import Contender, Settings, make_replays
from _env_rivals import HAS_ENVPOOL, envpool_tasks, make_collectors, make_envpool, make_rivals

from torchrl_trudi.envs import available_cpus
from torchrl_trudi.envs.mujoco import MujocoBatchEnv, registered_tasks

RATIOS = (
    ("env", "physics"),
    ("env_raw", "physics"),
    ("env", "envpool"),
    ("env", "gym_async"),
    ("env", "gym_sync"),
    ("env", "torchrl_gym"),
)
HUMANOID = "Humanoid-v5"  # of memory and collectors
QUICK = {
    "tasks": ["InvertedPendulum-v5"],
    "num_envs": [8],
    "rival_envs": 2,
    "seconds": 0.02,
    "repetitions": 2,
    "burn_in": 5,
    "memory_envs": [1, 8],
    "collector_envs": 8,
}


class Sample(NamedTuple):
    """One repetition of one contender; a line of the CSV."""

    task: str
    num_envs: int
    contender: str
    repetition: int
    frames_per_second: float


class Samples(list[Sample]):
    """All repetitions so far, also written to a file as they come.

    Args:
        path (str, optional): a file that does not exist. Defaults to ``None``, no file.
    """

    def __init__(self, path: str | None = None) -> None:
        super().__init__()
        self._path = path
        self._write("x", Sample._fields)

    def add(self, sample: Sample) -> None:
        self.append(sample)
        self._write("a", sample)

    def _write(self, mode: str, row: Sequence[Any]) -> None:
        if self._path is not None:
            with open(self._path, mode, newline="") as file:
                csv.writer(file).writerow(row)

    def speeds(self, task: str, num_envs: int, contender: str) -> list[float]:
        """Frames per second, by repetition; empty if there was no such contender."""
        found = [s for s in self if s[:3] == (task, num_envs, contender)]
        return [s.frames_per_second for s in sorted(found, key=lambda s: s.repetition)]


def take_turns(
    task: str, contenders: Sequence[Contender], repetitions: int, samples: Samples
) -> None:
    """Measures every contender once, then every one again, and so on."""
    for repetition in range(repetitions):
        gc.collect()  # takes long with Torch imported, so not before every contender
        for contender in contenders:
            contender.prepare()
            start = time.perf_counter()
            frames = contender.run()
            speed = frames / (time.perf_counter() - start)
            samples.add(Sample(task, contender.num_envs, contender.name, repetition, speed))


def bench_task(task: str, args: argparse.Namespace, samples: Samples) -> None:
    """Measures all contenders of a task, at all batch sizes."""
    print(f"{task} ...")
    settings = Settings(args.threads, args.seconds, args.burn_in)
    rng = np.random.default_rng(0)
    with contextlib.ExitStack() as stack:
        contenders: list[Contender] = []

        def add(new: Iterable[Contender]) -> None:
            for contender in new:
                stack.callback(contender.close)
                contenders.append(contender)

        if args.rival_envs:
            for num_envs in sorted({min(n, args.rival_envs) for n in args.num_envs}):
                add(make_rivals(task, num_envs, settings, rng))
        for num_envs in args.num_envs:
            env = MujocoBatchEnv(task, num_envs, num_threads=args.threads, seed=0)
            stack.callback(env.close)
            add(make_replays(env, settings, rng))
            if args.rival_envs:
                add(make_envpool(task, num_envs, settings, rng))
        take_turns(task, contenders, args.repetitions, samples)


def bench_collectors(args: argparse.Namespace, samples: Samples) -> list[list[str]]:
    """Measures the collectors over an environment, and that environment; rows of a table."""
    print(f"{HUMANOID}, collectors ...")
    settings = Settings(args.threads, args.seconds, args.burn_in)
    num_envs = args.collector_envs
    # A name of its own: the table of the tasks may have the same environment.
    task = f"{HUMANOID} (collectors)"
    with contextlib.ExitStack() as stack:
        env = MujocoBatchEnv(HUMANOID, num_envs, num_threads=args.threads, seed=0)
        stack.callback(env.close)
        contenders = make_replays(env, settings, np.random.default_rng(0))
        for contender in make_collectors(HUMANOID, num_envs, settings):
            stack.callback(contender.close)
            contenders.append(contender)
        take_turns(task, contenders, args.repetitions, samples)
    base = samples.speeds(task, num_envs, "env")
    rows = []
    for contender in contenders:
        speeds = samples.speeds(task, num_envs, contender.name)
        rows.append([contender.name, show_speed(speeds), show_ratio(speeds, base)])
    return rows


def bench_memory(args: argparse.Namespace) -> list[list[str]]:
    """Peak memory of a process with each number of environments; rows of a table."""
    script = Path(__file__).with_name("_env_memory.py")
    if args.memory_envs:
        print(f"{HUMANOID}, memory ...")
    rows, first = [], None
    for num_envs in args.memory_envs:
        command = [sys.executable, script, HUMANOID, num_envs, args.threads, 30]
        result = subprocess.run(
            list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True
        )
        peak = int(result.stdout)
        if first is None:
            first = (num_envs, peak)
            per_env = "-"
        else:
            per_env = f"{(peak - first[1]) / (num_envs - first[0]) / 2**10:.1f}"
        fits = "yes" if peak <= 2 * 2**30 else "no"
        rows.append([f"{num_envs}", f"{peak / 2**20:.0f}", per_env, fits])
    return rows


# Output


def show_speed(speeds: Sequence[float]) -> str:
    return f"{statistics.median(speeds):,.0f}" if speeds else "-"


def show_ratio(above: Sequence[float], below: Sequence[float]) -> str:
    """The median over the repetitions, and the range."""
    if not above or not below:
        return "-"
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    return f"{statistics.median(ratios):.3g} [{min(ratios):.3g}, {max(ratios):.3g}]"


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a Markdown table, in columns."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return f"| {' | '.join(padded)} |"

    rules = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    print(f"\n{title}\n", line(header), line(rules), *map(line, rows), sep="\n")


def print_tasks(args: argparse.Namespace, samples: Samples) -> None:
    """Prints the tables of the tasks."""
    limited = ("gym_async", "gym_sync", "torchrl_gym")
    names = ["physics", "env", "env_raw", "envpool", *limited]

    def speeds(task: str, num_envs: int, name: str) -> list[float]:
        if name in limited:
            num_envs = min(num_envs, args.rival_envs)
        return samples.speeds(task, num_envs, name)

    keys = [(task, num_envs) for task in args.tasks for num_envs in args.num_envs]
    # A rival that is measured with fewer environments says so.
    few = f" (<= {args.rival_envs} envs)" if max(args.num_envs) > args.rival_envs else ""
    header = [name + few if name in limited else name for name in names]
    print_table(
        f"Frames per second, {args.threads} threads; medians of {args.repetitions} repetitions",
        ["task", "envs", *header],
        ([t, f"{n}", *(show_speed(speeds(t, n, name)) for name in names)] for t, n in keys),
    )
    header = [f"{a} / {b}{few if b in limited else ''}" for a, b in RATIOS]
    print_table(
        "Ratios, median [range]",
        ["task", "envs", *header],
        (
            [t, f"{n}", *(show_ratio(speeds(t, n, a), speeds(t, n, b)) for a, b in RATIOS)]
            for t, n in keys
        ),
    )


def cpu_model() -> str:
    """The name of the processor."""
    with contextlib.suppress(OSError):
        match = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
        if match:
            return match[1]
    return platform.processor() or platform.machine()


def print_load(when: str) -> None:
    print(f"load average at the {when}: " + ", ".join(f"{x:.2f}" for x in os.getloadavg()))


def print_machine() -> None:
    """Prints what figures depend on."""
    versions = []
    for package in ("mujoco", "gymnasium", "torch", "torchrl", "envpool"):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{package} absent")
    print(f"{cpu_model()}, {available_cpus()} of {os.cpu_count()} CPUs available")
    print(f"Python {platform.python_version()}, {', '.join(versions)}; Torch on 1 thread")
    print_load("start")


def make_parser() -> argparse.ArgumentParser:
    tasks = ["Humanoid-v5", "Ant-v5", "HalfCheetah-v5", "Hopper-v5", "Walker2d-v5"]
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def add(name: str, default: Any, text: str, **kwargs: Any) -> None:
        shown = " ".join(map(str, default)) if isinstance(default, list) else default
        parser.add_argument(name, default=default, help=f"{text} ({shown})", **kwargs)

    add("--tasks", [*tasks, "InvertedPendulum-v5"], "tasks; none, no speeds", nargs="*")
    add("--num-envs", [64, 256, 1024], "batch sizes", nargs="+", type=int)
    add("--threads", available_cpus(), "threads of the physics", type=int)
    add("--rival-envs", 64, "environments of Gymnasium, at most; 0, no rivals", type=int)
    add("--repetitions", 5, "repetitions", type=int)
    add("--seconds", 1.0, "length of a repetition, about", type=float)
    add("--burn-in", 100, "steps before anything is measured", type=int)
    add(
        "--memory-envs",
        [1, 1024, 4096],
        "batch sizes whose memory is measured, against the first; none, no memory",
        nargs="*",
        type=int,
    )
    parser.add_argument("--collector", action="store_true", help="also measure the collector")
    add("--collector-envs", 256, "batch size of the collector", type=int)
    parser.add_argument("--csv", metavar="PATH", help="write the repetitions to a new file")
    parser.add_argument("--require-envpool", action="store_true", help="fail without EnvPool")
    parser.add_argument(
        "--quick", action="store_true", help=f"other defaults, to try the script: {QUICK}"
    )
    return parser


def parse_args() -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args()
    if args.quick:
        parser.set_defaults(**QUICK)
        args = parser.parse_args()
    for task in args.tasks:
        if task not in registered_tasks():
            parser.error(f"--tasks: {task!r} is not one of {registered_tasks()}")
    if args.rival_envs < 0:
        parser.error(f"--rival-envs must not be negative, got {args.rival_envs}")
    for name in ("num_envs", "threads", "repetitions", "seconds", "burn_in"):
        given = getattr(args, name)
        if min(given if isinstance(given, list) else [given]) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {given}")
    if len(set(args.num_envs)) < len(args.num_envs):
        parser.error(f"--num-envs: {args.num_envs} are not distinct")
    if args.memory_envs[1:] and args.memory_envs[0] in args.memory_envs[1:]:
        parser.error(f"--memory-envs: {args.memory_envs} are not distinct")
    if args.csv is not None and Path(args.csv).exists():
        parser.error(f"--csv: {args.csv} exists already")
    if args.require_envpool and not HAS_ENVPOOL:
        parser.error("--require-envpool: envpool is not installed (pip install envpool)")
    lacking = sorted(set(args.tasks).difference(envpool_tasks())) if args.require_envpool else []
    if lacking:
        parser.error(f"--require-envpool: EnvPool does not have {lacking}")
    return args


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    # Without a handler MuJoCo writes a file about simulations that diverge, of any contender.
    mujoco.set_mju_user_warning(lambda message: None)
    warnings.filterwarnings("ignore", message="Support of VecNormV2 for containers")
    samples = Samples(args.csv)
    print_machine()
    if not HAS_ENVPOOL:
        print("envpool is not installed, and left out (pip install envpool)")
    memory = bench_memory(args)
    for task in args.tasks:
        bench_task(task, args, samples)
    collectors = bench_collectors(args, samples) if args.collector else []
    print_load("end")

    if args.tasks:
        print_tasks(args, samples)
    if memory:
        print_table(
            f"Memory of a process with {HUMANOID}, Torch included",
            ["envs", "peak MiB", "KiB per env", "within 2 GiB"],
            memory,
        )
    if collectors:
        print_table(
            f"Collection from {args.collector_envs} {HUMANOID}, 16 steps of each a batch",
            ["contender", "frames/s", "/ env"],
            collectors,
        )


if __name__ == "__main__":
    main()

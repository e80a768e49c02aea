"""Frames per second of the example: one process with N threads against N processes with one.

    python benchmarks/bench_distributed.py [--processes 2] [--iterations 12] [--csv FILE] [OPTION=VALUE ...]

The same learning problem each time (Humanoid, unless an option says otherwise): environments, frames and
minibatches are shared out. Medians over the iterations, the first two left out.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from torchrl_trudi.record import read_scalars

SCRIPT = Path(__file__).parents[1] / "examples" / "trudi_humanoid.py"
FRAMES = 2048
WARMUP = 2


def run(processes: int, threads: int, iterations: int, words: list[str]) -> dict[str, float]:
    """Train for some iterations.

    Args:
        processes: ranks.
        threads: threads of each, for PyTorch and for the physics.
        iterations: iterations.
        words: options of the example.

    Returns:
        Frames per second, and the share of the time spent collecting.
    """
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += [f"--nproc-per-node={processes}"]
    with tempfile.TemporaryDirectory() as folder:
        options = [
            f"collector.total_frames={iterations * FRAMES}",
            f"collector.frames_per_batch={FRAMES}",
            f"num_threads={threads}",
            f"env.num_threads={threads}",
            f"logger.dir={folder}/run",
            "logger.eval_episodes=0",
            "logger.progress=false",
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        command = [*launcher, str(SCRIPT), *options, *words]
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        scalars = read_scalars(f"{folder}/run")
    return {
        name: float(np.median(scalars[f"time/{name}"][1][WARMUP:]))
        for name in ("frames_per_second", "collection_fraction")
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("options", nargs="*")
    args = parser.parse_args(argv)
    rows = []
    for processes, threads in ((1, 1), (1, args.processes), (args.processes, 1)):
        result = run(processes, threads, args.iterations, args.options)
        rows.append({"processes": processes, "threads": threads, **result})
        print(
            f"{processes} process(es) x {threads} thread(s): {result['frames_per_second']:6.0f} frames/s, "
            f"{result['collection_fraction']:.0%} of the time collecting",
            flush=True,
        )
    if args.csv is not None:
        args.csv.parent.mkdir(parents=True, exist_ok=True)
        with args.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()

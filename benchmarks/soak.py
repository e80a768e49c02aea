"""Trains for hours while faults are injected, and looks for what grows.

    python benchmarks/soak.py --minutes 120 --csv soak.csv
    python benchmarks/soak.py --minutes 1 --fault-seconds 5 task=inverted_pendulum     # does it run?

Runs examples/trudi_humanoid.py in this process, with the overrides given. Every --fault-seconds one of
these happens, in turn:

- a simulation is set to NaN: its row has to end, be counted and start again;
- a value target of a minibatch is NaN: the critic's step has to be skipped;
- an observation of a minibatch is infinite: both steps have to be skipped;
- a checkpoint cannot be written, as on a full disk: the run has to go on.

After each iteration the resident memory, the threads and the open files of the process are noted, in
--csv. At the end the script compares them with those after the warm-up (--warm-up, a fraction of the
time), and the counters in the log with the faults that were injected. Exit status 1 if anything grew
by more than 5 %, or a counter is not explained.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import math
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from tensordict import TensorDictBase

from torchrl_trudi.envs.mujoco import MujocoBatchEnv
from torchrl_trudi.record import ScalarWriter, read_scalars
from torchrl_trudi.trainers import register_configs, validate
from torchrl_trudi.trainers.checkpoints import RunCheckpoints
from torchrl_trudi.trainers.update import TruDiUpdate

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ("simulation", "target", "observation", "disk")
LIMIT = 1.05


class Injector:
    """Hands out the faults, one every ``seconds``, in turn."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.next_time = time.monotonic() + seconds
        self.turn = 0
        self.made = dict.fromkeys(FAULTS, 0)

    def due(self, kind: str) -> bool:
        """Whether a fault of this kind is to be made now; then it counts as made."""
        if FAULTS[self.turn % len(FAULTS)] != kind or time.monotonic() < self.next_time:
            return False
        self.made[kind] += 1
        self.turn += 1
        self.next_time = time.monotonic() + self.seconds
        return True


def usage() -> dict[str, float]:
    """Resident memory in MiB, threads and open files of this process."""
    status = Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return {
        "memory_mib": int(fields["VmRSS"].split()[0]) / 1024,
        "threads": int(fields["Threads"]),
        "files": len(os.listdir("/proc/self/fd")),
    }


def inject(injector: Injector, rows: list[dict[str, float]], end: float) -> None:
    """Put the faults, and the notes after each iteration, into the parts of the trainer."""
    step, update, save, write = (
        MujocoBatchEnv._step,
        TruDiUpdate.__call__,
        RunCheckpoints.save,
        ScalarWriter.write,
    )

    def faulty_step(self: MujocoBatchEnv, tensordict: TensorDictBase) -> TensorDictBase:
        if self.num_envs > 1 and getattr(self, "_trains", True) and injector.due("simulation"):
            state = self.get_state([0])
            state["physics"].fill_(math.nan)
            self.set_state(state, [0])
        return step(self, tensordict)

    def faulty_update(self: TruDiUpdate, batch: TensorDictBase) -> Any:
        for kind, key in (("target", "value_target"), ("observation", "observation")):
            if injector.due(kind):
                batch = batch.clone()
                batch[key][0] = math.nan if kind == "target" else math.inf
        return update(self, batch)

    def faulty_save(self: RunCheckpoints, *args: Any, **kwargs: Any) -> Path:
        if injector.due("disk"):
            raise OSError(28, "No space left on device")
        return save(self, *args, **kwargs)

    def noting_write(self: ScalarWriter, frames: int, scalars: Any) -> None:
        write(self, frames, scalars)
        if any(name.startswith("time/") for name in scalars):
            rows.append({"seconds": time.monotonic(), "frames": frames, **usage()})
            if time.monotonic() > end:
                os.kill(os.getpid(), signal.SIGTERM)

    MujocoBatchEnv._step = faulty_step  # type: ignore[method-assign]
    TruDiUpdate.__call__ = faulty_update  # type: ignore[method-assign]
    RunCheckpoints.save = faulty_save  # type: ignore[method-assign]
    ScalarWriter.write = noting_write  # type: ignore[method-assign]


def load_script() -> Any:
    """examples/trudi_humanoid.py as a module."""
    spec = importlib.util.spec_from_file_location(
        "trudi_humanoid", ROOT / "examples" / "trudi_humanoid.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def growth(rows: list[dict[str, float]], warm_up: float) -> dict[str, tuple[float, float]]:
    """Each quantity after the warm-up and at the end, medians of a tenth of the rows each."""
    rows = rows[int(warm_up * len(rows)) :]
    size = max(1, len(rows) // 10)

    def median(part: list[dict[str, float]], key: str) -> float:
        return float(torch.tensor([row[key] for row in part]).median())

    keys = ("memory_mib", "threads", "files")
    return {key: (median(rows[:size], key), median(rows[-size:], key)) for key in keys}


def unexplained(run: Path, made: dict[str, int]) -> list[str]:
    """Counters in the log that the faults do not explain."""
    scalars = read_scalars(run)

    def total(name: str) -> int:
        return int(scalars[name][1].sum()) if name in scalars else 0

    problems = []
    skipped, critic = total("train/skipped"), total("train/skipped_critic")
    if critic != made["target"] + made["observation"]:
        problems.append(f"skipped critic steps: {critic}, faults {made}")
    if skipped != made["observation"]:
        problems.append(f"skipped actor steps: {skipped}, faults {made}")
    if total("train/quarantined") < made["simulation"]:
        problems.append(f"quarantined steps: {total('train/quarantined')}, faults {made}")
    return problems


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--fault-seconds", type=float, default=120.0)
    parser.add_argument("--warm-up", type=float, default=0.2)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("overrides", nargs="*", help="options of the trainer")
    args = parser.parse_args(argv)

    register_configs()
    rows: list[dict[str, float]] = []
    injector = Injector(args.fault_seconds)
    start = time.monotonic()
    inject(injector, rows, start + 60 * args.minutes)
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            "collector.total_frames=1_000_000_000",
            "logger.progress=false",
            f"logger.dir={folder}/run",
            *args.overrides,
        ]
        with initialize_config_dir(str(ROOT / "examples" / "config"), version_base=None):
            config = validate(compose("trudi_humanoid", overrides))
        run = load_script().train(config)
        problems = unexplained(run, injector.made)

    for row in rows:
        row["seconds"] -= start
    if args.csv is not None:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    for name, (before, after) in growth(rows, args.warm_up).items():
        print(f"{name:>12}: {before:.1f} after the warm-up, {after:.1f} at the end")
        if after > LIMIT * before:
            problems.append(f"{name} grew from {before:.1f} to {after:.1f}")
    print(
        f"{'faults':>12}: {injector.made}, {len(rows)} iterations, {threading.active_count()} Python threads"
    )
    for problem in problems:
        print(f"{'problem':>12}: {problem}")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())

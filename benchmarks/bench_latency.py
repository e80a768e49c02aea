"""Latency of one action: median and 99th percentile of a call.

    python benchmarks/bench_latency.py [--quick] [--csv FILE]

One thread, Humanoid's sizes, no gradients. `actor_deterministic` and `actor_random` call the
DiffusionActor on a TensorDict under that exploration type, as a user does; `model` calls
DenoisingModel.sample_deterministic on a tensor.
"""

from __future__ import annotations

import argparse
import csv
import itertools
from collections.abc import Callable
from pathlib import Path

import torch
from _learner_parts import Sizes, make_actor
from _timing import percentiles_us, pin_one_thread
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type

BATCHES = (1, 4096)
NUM_STEPS = (1, 2, 4, 8)
WIDTHS = (256, 512)
CALLS = {1: 500, 4096: 50}
QUICK_CALLS = {1: 50, 4096: 3}
HEADER = ("call", "batch", "num_steps", "width", "p50_us", "p99_us", "calls")


def make_calls(
    sizes: Sizes, batch: int, device: torch.device | None = None
) -> dict[str, Callable[[], object]]:
    """The calls that are timed.

    Args:
        sizes: sizes of the network.
        batch: observations of a call; 1 is one observation with a batch dimension of size 1.
        device: where it runs.
    """
    torch.manual_seed(0)
    actor = make_actor(sizes, device=device)
    observation = torch.randn(batch, sizes.obs, device=device)

    def act() -> torch.Tensor:
        return actor(TensorDict({"observation": observation}, [batch]))["action"]

    return {
        "model": lambda: actor.module.sample_deterministic(observation),
        "actor_deterministic": set_exploration_type(ExplorationType.DETERMINISTIC)(act),
        "actor_random": set_exploration_type(ExplorationType.RANDOM)(act),
    }


@torch.no_grad()
def measure(
    sizes: Sizes, batch: int, calls: int, device: torch.device | None = None
) -> list[tuple]:
    """Rows of the table at one size.

    Args:
        sizes: sizes of the network.
        batch: observations of a call.
        calls: calls that are timed.
        device: where it runs.
    """
    rows = []
    for name, call in make_calls(sizes, batch, device).items():
        p50, p99 = percentiles_us(call, calls)
        point = (name, batch, sizes.num_steps, sizes.width)
        rows.append((*point, f"{p50:.1f}", f"{p99:.1f}", calls))
    return rows


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the calls")
    parser.add_argument("--device", type=torch.device, help="cpu or cuda")
    parser.add_argument("--csv", type=Path, help="write the rows into this file")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    pin_one_thread()
    counts = QUICK_CALLS if args.quick else CALLS
    rows = []
    print("".join(f"{name:>20}" for name in HEADER))
    for batch, width, num_steps in itertools.product(BATCHES, WIDTHS, NUM_STEPS):
        sizes = Sizes(width=width, num_steps=num_steps)
        for row in measure(sizes, batch, counts[batch], args.device):
            rows.append(row)
            print("".join(f"{cell:>20}" for cell in row), flush=True)
    if args.csv is not None:
        args.csv.parent.mkdir(parents=True, exist_ok=True)
        with args.csv.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([HEADER, *rows])


if __name__ == "__main__":
    main()

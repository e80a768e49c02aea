"""Latency of an exported policy: median and 99th percentile of a call on one observation.

    python benchmarks/bench_deploy.py [--quick] [--csv FILE]

One thread, batch 1, Humanoid's sizes, the noise-free chain with everything around it (normalisation,
squashing, action box). `torch` is the PolicyModule, `onnxruntime` its ONNX file; needs the extra `export`.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from _learner_parts import Sizes, make_actor
from _timing import percentiles_us, pin_one_thread

from torchrl_trudi import __version__
from torchrl_trudi.export import OnnxPolicy, PolicyMetadata, PolicyModule, TorchPolicy
from torchrl_trudi.export.exporter import write_onnx

NUM_STEPS = (1, 2, 4, 8)
HEADER = ("runtime", "num_steps", "width", "p50_us", "p99_us", "calls")


def make_calls(sizes: Sizes, folder: Path) -> dict[str, Callable[[], object]]:
    """The calls that are timed.

    Args:
        sizes: sizes of the network.
        folder: where the ONNX file goes.
    """
    torch.manual_seed(0)
    actor = make_actor(sizes).requires_grad_(False).eval()
    module = PolicyModule(actor.module, [("observation", sizes.obs)]).eval()
    metadata = PolicyMetadata(
        observation=(("observation", sizes.obs),),
        action_names=tuple(f"a{i}" for i in range(sizes.act)),
        low=(-1.0,) * sizes.act,
        high=(1.0,) * sizes.act,
        num_steps=sizes.num_steps,
        stochastic=False,
        dt=None,
        normalizer_count=0,
        frames=0,
        policy="diffusion",
        config_hash="",
        version=__version__,
    )
    path = folder / f"policy-{sizes.num_steps}-{sizes.width}.onnx"
    write_onnx(module, metadata, path)
    observation = np.random.default_rng(0).standard_normal(sizes.obs, dtype=np.float32)
    policies = {"torch": TorchPolicy(module, metadata), "onnxruntime": OnnxPolicy(path)}
    return {name: lambda p=policy: p(observation) for name, policy in policies.items()}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the calls")
    parser.add_argument("--width", type=int, default=256, help="of the network")
    parser.add_argument("--csv", type=Path, help="write the rows into this file")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    pin_one_thread()
    calls = 200 if args.quick else 2000
    rows = []
    print("".join(f"{name:>14}" for name in HEADER))
    with tempfile.TemporaryDirectory() as folder:
        for num_steps in NUM_STEPS:
            sizes = Sizes(width=args.width, num_steps=num_steps)
            for name, call in make_calls(sizes, Path(folder)).items():
                p50, p99 = percentiles_us(call, calls)
                rows.append((name, num_steps, args.width, f"{p50:.1f}", f"{p99:.1f}", calls))
                print("".join(f"{cell:>14}" for cell in rows[-1]), flush=True)
    if args.csv is not None:
        args.csv.parent.mkdir(parents=True, exist_ok=True)
        with args.csv.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([HEADER, *rows])


if __name__ == "__main__":
    main()

"""A policy in an ONNX file at a fixed rate, with numpy, onnxruntime and Gymnasium: no PyTorch.

    python examples/deploy_onnx.py policy.onnx InvertedPendulum-v5 --steps 200

On a robot, replace the environment by what reads its sensors and commands its actuators.
"""

from __future__ import annotations

import argparse
import time

import gymnasium

from torchrl_trudi.export.onnx_policy import OnnxPolicy


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", help="ONNX file of export_policy")
    parser.add_argument("task", help="Gymnasium id")
    parser.add_argument("--steps", type=int, default=200, help="actions")
    parser.add_argument(
        "--rate", type=float, help="actions per second; by default the policy's own"
    )
    args = parser.parse_args(argv)
    policy = OnnxPolicy(args.file)
    period = 1 / args.rate if args.rate else policy.metadata.dt
    if period is None:
        parser.error("the file does not know its rate: pass --rate")
    env = gymnasium.make(args.task)
    observation, _ = env.reset(seed=0)
    policy(observation)  # the first call allocates
    late, total, deadline = 0, 0.0, time.perf_counter()
    for _ in range(args.steps):
        observation, reward, terminated, truncated, _ = env.step(policy(observation))
        total += float(reward)
        if terminated or truncated:
            observation, _ = env.reset()
        deadline += period
        rest = deadline - time.perf_counter()
        if rest > 0:
            time.sleep(rest)
        else:  # missed: the next action is due one period from now
            late, deadline = late + 1, time.perf_counter()
    print(f"{args.steps} actions at {1 / period:g} Hz, {late} late; sum of rewards {total:.1f}")


if __name__ == "__main__":
    main()

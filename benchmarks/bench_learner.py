"""Cost of learning: ours against the published computation written out literally, in one run.

    python benchmarks/bench_learner.py [--quick] [--json] [--width 256] [--batch 1024]

One thread, medians; ours and naive take turns. Two sizes: `reference` (obs 67, act 21) and `humanoid`
(obs 348, act 17). Per state, in passes of the score network over the N steps of a chain (a backward pass
counts as two), g the fraction of states inside the trust region:

- naive actor update: 3 to sample with gradient, 1 for the old path, 3 for the KL: 7, each with the
  observation in the first layer N times
- ours: 1 for the KL of the recorded path without gradient, then 3 g to sample inside, 3 (1 - g) for
  the KL outside, and (1 - g) for the entropy there: 5 - g, with the observation once
- adjoint, K of N steps regressed: 1 + g (1 + 3 K / N) + 4 (1 - g)
- naive rollout: 2 chains a step; ours: 1
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable

import _naive_learner as naive
import torch
from _learner_parts import Sizes, actor_total, make_batch, make_parts, move_policy, step
from _timing import medians_ms
from tensordict import TensorDict

from torchrl_trudi.objectives import SoftTDLambdaEstimator, TruDiLoss

SIZES = {"reference": (67, 21), "humanoid": (348, 17)}


def bench_size(obs: int, act: int, args: argparse.Namespace) -> dict[str, float]:
    """Times in ms at one size."""
    torch.manual_seed(0)
    batch_size = args.batch
    actor, loss = make_parts(Sizes(obs, act, args.width))
    old_model = copy.deepcopy(actor.module)
    batch = make_batch(actor, batch_size)
    move_policy(loss, batch)
    parameters = list(loss.actor_parameters())
    # Steps of size zero: every repetition sees the same gate.
    optim = torch.optim.Adam([*parameters, *loss.dual_parameters()], lr=0.0)
    adjoint = TruDiLoss(
        actor,
        loss.critic_network,
        trajectory_kl=loss.trajectory_kl,
        actor_gradient="adjoint",
        num_adjoint_steps=args.adjoint_steps,
    )
    model = actor.module

    def ours(which: TruDiLoss) -> None:
        step(parameters, optim, actor_total(which, batch))

    def published() -> None:
        noise, old_noise = model.draw_noise((batch_size,)), model.draw_noise((batch_size,))
        step(parameters, optim, naive.actor_loss(loss, old_model, batch, noise, old_noise))

    observation = batch["observation"]
    num_steps, num_envs = args.rollout_steps, args.envs
    observations = torch.randn(num_steps + 1, num_envs, obs)
    estimator = SoftTDLambdaEstimator(
        gamma=0.99,
        lmbda=0.95,
        value_network=loss.critic_network,
        actor_network=actor,
        reuse_actions=True,
    )
    zeros = torch.zeros(num_envs, num_steps, 1)
    following = {
        "observation": observations[1:].transpose(0, 1),
        "reward": zeros,
        "done": zeros.bool(),
        "terminated": zeros.bool(),
    }

    @torch.no_grad()
    def rollout() -> None:
        steps = [actor(TensorDict({"observation": x}, [num_envs])) for x in observations[:-1]]
        data = torch.stack(steps, 1)
        data["next"] = TensorDict(following, [num_envs, num_steps])
        estimator(data)

    def no_grad(function: Callable[[], object]) -> Callable[[], object]:
        return torch.no_grad()(function)

    def draw() -> torch.Tensor:
        return model.draw_noise((batch_size,))

    return medians_ms(
        {
            "sample_naive": no_grad(lambda: naive.sample(model, observation, draw())),
            "sample": no_grad(lambda: model.sample(observation, draw())),
            "actor_update_naive": published,
            "actor_update": lambda: ours(loss),
            "adjoint_update": lambda: ours(adjoint),
            "rollout_naive": lambda: naive.rollout_values(actor, loss.critic_network, observations),
            "rollout": rollout,
        },
        args.repeats,
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value, text in (
        ("batch", 1024, "states of an update"),
        ("width", 256, "width of the networks"),
        ("envs", 64, "environments of the rollout"),
        ("rollout-steps", 16, "its length"),
        ("adjoint-steps", 2, "steps of the chain that the adjoint loss regresses"),
        ("repeats", 15, "repetitions"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} ({value})")
    parser.add_argument("--quick", action="store_true", help="5 repetitions")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    args = parser.parse_args()
    if args.quick:
        args.repeats = 5
    return args


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    out: dict[str, float] = {}
    for name, (obs, act) in SIZES.items():
        prefix = "" if name == "reference" else f"{name}_"
        times = bench_size(obs, act, args)
        print(f"{name} (obs {obs}, act {act})")
        for key, value in times.items():
            print(f"{key:>24}: {value:8.1f} ms")
            out[f"{prefix}{key}_ms"] = round(value, 2)
        ratios = {
            f"{part}_ratio": times[f"{part}_naive"] / times[part]
            for part in ("sample", "actor_update", "rollout")
        }
        ratios["adjoint_update_ratio"] = times["actor_update_naive"] / times["adjoint_update"]
        for key, value in ratios.items():
            print(f"{key:>24}: {value:8.2f}")
            out[f"{prefix}{key}"] = round(value, 3)
    if args.json:
        print(json.dumps(out))


if __name__ == "__main__":
    main()

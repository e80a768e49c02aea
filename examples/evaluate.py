"""Returns of a trained policy: deterministic and stochastic, with confidence intervals.

    python examples/evaluate.py runs/x --episodes 100
    python examples/evaluate.py runs/x --scales 0.8 1.0 1.2 --best-of 4 16 --json out.json --plot out.png

Every setting starts from the same initial states. The intervals are 95 % bootstrap intervals of the mean.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torchrl.envs import ExplorationType

from torchrl_trudi.export.restore import RestoredPolicy, restore_policy
from torchrl_trudi.modules import ChainActor, DenoisingModel
from torchrl_trudi.record import EvaluationResult, evaluate
from torchrl_trudi.trainers import ConfigError
from torchrl_trudi.trainers.builders import build_critic, build_env

RESAMPLES = 2000


def interval(values: torch.Tensor) -> list[float]:
    """95 % bootstrap interval of the mean of ``[E]`` values."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(values.numel(), (RESAMPLES, values.numel()), generator=generator)
    means = values.double()[rows].mean(1)
    return means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()


def summary(result: EvaluationResult) -> dict[str, Any]:
    """What is reported of one setting."""
    return {
        "return_mean": result.mean,
        "return_interval": interval(result.returns),
        "return_std": result.std,
        "length_mean": result.length_mean,
        "length_interval": interval(result.lengths),
        "terminated_fraction": result.terminated.double().mean().item(),
        "episodes": result.num_episodes,
    }


def scaled(actor: ChainActor, scale: float):
    """The noise-free chain with ``scale`` times its control."""
    model = actor.module
    if not isinstance(model, DenoisingModel):
        raise ConfigError("--scales: only the chain of a diffusion policy has a control to scale")

    def act(tensordict):
        latents = model.sample_deterministic(actor.observation(tensordict), score_scale=scale)
        return tensordict.set(actor.action_key, model.squash(latents[..., -1, :]))

    return act


def best_of(restored: RestoredPolicy, env, count: int):
    """The best of ``count`` samples by the critic."""
    if restored.config.objective.kind == "surrogate":
        raise ConfigError(
            "--best-of: the critic of the surrogate objective does not read the action"
        )
    critic = build_critic(restored.config, env)
    prefix = "critic_network_params.module."
    state = {
        name.removeprefix(prefix): value
        for name, value in restored.loss_state.items()
        if name.startswith(prefix)
    }
    names = critic.module.state_dict().keys()
    critic.module.load_state_dict({name: state[name] for name in names})
    critic.eval()

    def act(tensordict):
        many = tensordict.exclude("action").expand(count, *tensordict.shape).clone()
        value = critic(restored.actor(many))["state_action_value"]
        best = value.argmax(0, keepdim=True).expand(1, *many["action"].shape[1:])
        return tensordict.set("action", many["action"].gather(0, best)[0])

    return act


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All settings by name."""
    restored = restore_policy(args.policy)
    config, seed = restored.config, args.seed
    options: dict[str, Any] = {"num_envs": min(args.episodes, args.num_envs), "seed": seed}
    env = build_env(config, observation_norm=restored.run_norm, **options)
    actor = restored.actor
    settings: dict[str, tuple[Any, ExplorationType]] = {
        "deterministic": (actor, ExplorationType.DETERMINISTIC),
        "stochastic": (actor, ExplorationType.RANDOM),
    }
    for scale in args.scales:
        settings[f"scale_{scale:g}"] = (scaled(actor, scale), ExplorationType.DETERMINISTIC)
    for count in args.best_of:
        settings[f"best_of_{count}"] = (best_of(restored, env, count), ExplorationType.RANDOM)
    results = {}
    try:
        for name, (policy, kind) in settings.items():
            torch.manual_seed(seed)
            result = evaluate(
                env,
                policy,
                args.episodes,
                exploration_type=kind,
                seed=seed,
                max_steps=args.max_steps,
            )
            results[name] = summary(result)
    finally:
        env.close()
    return {
        "policy": str(args.policy),
        "task": config.env.name,
        "frames": restored.frames,
        "seed": seed,
        "results": results,
    }


def plot(report: dict[str, Any], path: Path) -> None:
    """Mean returns with their intervals."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    results = report["results"]
    means = [each["return_mean"] for each in results.values()]
    bounds = [each["return_interval"] for each in results.values()]
    errors = [
        [max(0.0, mean - low) for mean, (low, _) in zip(means, bounds, strict=True)],
        [max(0.0, high - mean) for mean, (_, high) in zip(means, bounds, strict=True)],
    ]
    figure, axes = plt.subplots(figsize=(1.5 + len(means), 3.5), layout="constrained")
    axes.errorbar(range(len(means)), means, yerr=errors, fmt="o", capsize=4)
    axes.set_xticks(range(len(means)), list(results), rotation=30, ha="right")
    axes.set_ylabel("return, mean and 95 % interval")
    axes.set_title(f"{report['task']}, {report['frames']:,} frames")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("policy", type=Path, help="checkpoint, or directory of a run")
    parser.add_argument("--episodes", type=positive, default=100, help="of each setting")
    parser.add_argument("--num-envs", type=positive, default=32, help="stepped as one batch")
    parser.add_argument("--max-steps", type=positive, help="ends every episode there")
    parser.add_argument("--seed", type=int, default=2_000_000)
    parser.add_argument(
        "--scales",
        type=float,
        nargs="+",
        default=[],
        help="factors on the noise-free chain's control",
    )
    parser.add_argument(
        "--best-of",
        type=positive,
        nargs="+",
        default=[],
        help="samples of which the critic picks one",
    )
    parser.add_argument("--json", type=Path, help="write the report there; stdout without")
    parser.add_argument("--plot", type=Path, help="write a picture there")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        report = run(args)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    text = json.dumps(report, indent=2) + "\n"
    if args.json is None:
        print(text, end="")
    else:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(text, encoding="utf-8")
    if args.plot is not None:
        plot(report, args.plot)


if __name__ == "__main__":
    main()

"""PPO of Stable-Baselines3 with the tuned settings of RL Baselines3 Zoo, for comparison.

    python examples/peers/sb3_ppo.py --task hopper --seed 0 --frames 1_000_000 --dir runs/sb3_hopper

Nothing here is ours but the measuring: evaluations like the trainer's, on environments of their own
with the statistics of the moment, in the units of the task, one whole episode for each environment.
The settings are those of ``hyperparameters/ppo.yml`` at commit
00128b5d46d497b772f3bd891ae9f520919e8971, tuned for the -v3 tasks. The zoo has tuned none for Ant:
its entry takes the library's defaults with normalised observations and rewards. A run cannot be
continued.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGE = "stable_baselines3"
TASKS = {
    "ant": "Ant-v5",
    "halfcheetah": "HalfCheetah-v5",
    "hopper": "Hopper-v5",
    "humanoid": "Humanoid-v5",
    "walker2d": "Walker2d-v5",
}
COMMON: dict[str, Any] = {"n_steps": 512, "policy_kwargs": "zoo"}
SETTINGS: dict[str, dict[str, Any]] = {
    # The library's defaults; gamma is repeated because the normaliser of the rewards needs it.
    "ant": {"gamma": 0.99},
    "halfcheetah": {
        **COMMON,
        "batch_size": 64,
        "gamma": 0.98,
        "learning_rate": 2.0633e-05,
        "ent_coef": 0.000401762,
        "clip_range": 0.1,
        "n_epochs": 20,
        "gae_lambda": 0.92,
        "max_grad_norm": 0.8,
        "vf_coef": 0.58096,
    },
    "hopper": {
        **COMMON,
        "batch_size": 32,
        "gamma": 0.999,
        "learning_rate": 9.80828e-05,
        "ent_coef": 0.00229519,
        "clip_range": 0.2,
        "n_epochs": 5,
        "gae_lambda": 0.99,
        "max_grad_norm": 0.7,
        "vf_coef": 0.835671,
    },
    "humanoid": {
        **COMMON,
        "batch_size": 256,
        "gamma": 0.95,
        "learning_rate": 3.56987e-05,
        "ent_coef": 0.00238306,
        "clip_range": 0.3,
        "n_epochs": 5,
        "gae_lambda": 0.9,
        "max_grad_norm": 2.0,
        "vf_coef": 0.431892,
    },
    "walker2d": {
        **COMMON,
        "batch_size": 32,
        "gamma": 0.99,
        "learning_rate": 5.05041e-05,
        "ent_coef": 0.000585045,
        "clip_range": 0.1,
        "n_epochs": 20,
        "gae_lambda": 0.95,
        "max_grad_norm": 1.0,
        "vf_coef": 0.871923,
    },
}
BLOCK = 2048
"""Frames of an iteration of the trainer: evaluations come at the same frames as there."""


def episode_returns(envs: list, model: Any, normalizer: Any, deterministic: bool) -> list[float]:
    """One whole episode in each environment; the sums of its rewards as the task gives them."""
    import numpy as np

    observations = [env.reset()[0] for env in envs]
    returns = [0.0] * len(envs)
    active = list(range(len(envs)))
    while active:
        batch = normalizer.normalize_obs(np.stack([observations[i] for i in active]))
        actions, _ = model.predict(batch, deterministic=deterministic)
        going = []
        for index, action in zip(active, actions, strict=True):
            observations[index], reward, terminated, truncated, _ = envs[index].step(action)
            returns[index] += float(reward)
            if not (terminated or truncated):
                going.append(index)
        active = going
    return returns


def train(args: argparse.Namespace) -> None:
    """Train, evaluate and save."""
    import gymnasium
    import numpy as np
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    from torchrl_trudi.record import ScalarWriter
    from torchrl_trudi.trainers.run_dir import library_versions

    torch.set_num_threads(args.threads)
    name, settings = TASKS[args.task], dict(SETTINGS[args.task])
    if settings.pop("policy_kwargs", None) == "zoo":
        settings["policy_kwargs"] = {
            "log_std_init": -2,
            "ortho_init": False,
            "activation_fn": torch.nn.ReLU,
            "net_arch": {"pi": [256, 256], "vf": [256, 256]},
        }
    env = VecNormalize(
        DummyVecEnv([lambda: Monitor(gymnasium.make(name))]), gamma=settings["gamma"]
    )
    model = PPO("MlpPolicy", env, seed=args.seed, device="cpu", **settings)
    eval_envs = [gymnasium.make(name) for _ in range(args.eval_episodes)]
    for index, each in enumerate(eval_envs):
        each.reset(seed=args.seed + 1_000_000 + index)

    args.dir.mkdir(parents=True, exist_ok=True)
    import stable_baselines3

    versions = {**library_versions(), "stable_baselines3": stable_baselines3.__version__}
    (args.dir / "versions.json").write_text(json.dumps(versions, indent=2) + "\n", "utf-8")
    asked = {key: value for key, value in vars(args).items() if key != "dir"}
    given = {"task": name, "arguments": asked, "PPO": settings}
    text = json.dumps(given, indent=2, default=str)
    (args.dir / "settings.json").write_text(text + "\n", "utf-8")

    class Evaluation(BaseCallback):
        """Measures after the updates of a block, as the trainer does."""

        def __init__(self, writer: ScalarWriter) -> None:
            super().__init__()
            self.writer = writer
            self.seconds, self.since, self.measured = 0.0, time.perf_counter(), 0

        def _on_step(self) -> bool:
            return True

        # Called before the first rollout and after each update but the last.
        def _on_rollout_start(self) -> None:
            self.measure(last=False)

        def measure(self, last: bool) -> None:
            frames = self.num_timesteps
            if frames % BLOCK or frames == self.measured:
                return
            self.measured = frames
            self.seconds += time.perf_counter() - self.since
            scalars = {"time/seconds": self.seconds}
            if last or frames // args.eval_interval > (frames - BLOCK) // args.eval_interval:
                # Its own random numbers: training does not depend on how often it is evaluated.
                with torch.random.fork_rng():
                    for kind in ("deterministic", "stochastic"):
                        returns = episode_returns(eval_envs, model, env, kind == "deterministic")
                        scalars[f"eval/return_{kind}"] = float(np.mean(returns))
                        scalars[f"eval/return_{kind}_std"] = float(np.std(returns))
            self.writer.write(frames, scalars)
            self.since = time.perf_counter()

    # Whole iterations, as the trainer makes them.
    total = -(-args.frames // BLOCK) * BLOCK
    with ScalarWriter(args.dir) as writer:
        evaluation = Evaluation(writer)
        model.learn(total, callback=evaluation)
        evaluation.measure(last=True)
    model.save(args.dir / "model.zip")
    env.save(str(args.dir / "vec_normalize.pkl"))


def number(text: str) -> int:
    """A positive integer; underscores may group its digits."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, accepted: at least 1")
    return value


def main(argv: Sequence[str] | None = None) -> None:
    """Command line of this script."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog=(__doc__ or "").partition("\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--task", required=True, choices=sorted(TASKS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--frames", type=number, default=500_000)
    parser.add_argument("--eval-interval", type=number, default=50_000)
    parser.add_argument("--eval-episodes", type=number, default=10)
    parser.add_argument("--dir", type=Path, required=True, help="a new directory for the run")
    parser.add_argument("--threads", type=number, default=1)
    args = parser.parse_args(argv)
    if args.dir.exists() and (not args.dir.is_dir() or any(args.dir.iterdir())):
        parser.error(
            f"--dir: {args.dir} exists and is not empty; a run cannot be continued, give a new one"
        )
    if importlib.util.find_spec(PACKAGE) is None:
        parser.error('needs stable-baselines3: pip install -e ".[benchmark]"')
    train(args)


if __name__ == "__main__":
    main(sys.argv[1:])

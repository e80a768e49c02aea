"""Learning, on a task that a minute is enough for."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torchrl.envs.utils import RandomPolicy

from torchrl_trudi.record import evaluate, read_scalars
from torchrl_trudi.trainers import validate
from torchrl_trudi.trainers.builders import build_env


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_inverted_pendulum(script, seed, tmp_path):
    """Balances many times longer than random actions do (1000 is the most)."""
    config = validate(
        {
            "seed": seed,
            "device": "cpu",
            "num_threads": 1,
            "env": {"name": "InvertedPendulum-v5", "num_envs": 8},
            "collector": {"total_frames": 20_480, "frames_per_batch": 512},
            "policy": {"hidden_size": 64},
            "critic": {"hidden_size": 64, "vmin": -5.0, "vmax": 15.0},
            "optim": {"num_minibatches": 4},
            "logger": {
                "dir": str(tmp_path / "run"),
                "eval_interval": 1_000_000,
                "checkpoint_interval": 1_000_000,
                "progress": False,
            },
        }
    )
    plain = dataclasses.replace(config.env, normalize_observation=False)
    env = build_env(dataclasses.replace(config, env=plain))
    torch.manual_seed(seed)
    random = evaluate(env, RandomPolicy(env.full_action_spec), 20)
    env.close()
    run = script.train(config)
    scalars = read_scalars(run)
    final = {
        name: scalars[f"eval/return_{name}"][1][-1] for name in ("deterministic", "stochastic")
    }
    assert random.mean < 30
    for value in final.values():
        assert value > 5 * random.mean, (random, final)

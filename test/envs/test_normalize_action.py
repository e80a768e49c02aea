"""The action space of make_env(normalize_action=True)."""

from __future__ import annotations

import torch
from torchrl.envs import check_env_specs

from torchrl_trudi.envs import make_env


def test_unit_box_reaches_the_task_in_its_own_units():
    options = {"num_envs": 2, "seed": 0, "normalize_observation": False, "backend": "gymnasium"}
    unit = make_env("Pendulum-v1", normalize_action=True, **options)
    plain = make_env("Pendulum-v1", **options)
    assert unit.action_spec.space.low.unique().tolist() == [-1.0]
    assert unit.action_spec.space.high.unique().tolist() == [1.0]
    assert plain.action_spec.space.high.unique().tolist() == [2.0]
    action = torch.tensor([[0.3], [-0.9]])
    first = unit.step(unit.reset().set("action", action))
    second = plain.step(plain.reset().set("action", 2 * action))
    for key in ("observation", "reward"):
        assert torch.equal(first["next", key], second["next", key])
    # What is stored is the action of the policy.
    assert torch.equal(first["action"], action)


def test_specs():
    check_env_specs(make_env("InvertedPendulum-v5", num_envs=2, normalize_action=True))

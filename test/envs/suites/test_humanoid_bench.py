"""HumanoidBench by contract: a package with the same spaces, names and habits.

Source of what the fake does: github.com/carlosferrazza/humanoid-bench, at the commits 217b38f
(``humanoid_bench/env.py``: the default ``render_mode``, the line it prints, the float32 action in
[-1, 1]; ``__init__.py``: names and registration; ``envs/basic_locomotion_envs.py``: the float64
observation and the NumPy bool in ``terminated``) and 44e2fc0 (``envs/push.py``: ``info["success"]``
in steps alone, goals from NumPy's global generator, the viewer opened by the constructor).
"""

from __future__ import annotations

import sys
import types

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torchrl.envs import check_env_specs

from torchrl_trudi.envs import get_observation_keys, make_env

LENGTH = 4
RAW = {"normalize_observation": False}


class FakeTask(gymnasium.Env):
    """Observes ``[goal, step]``; terminates after four steps, or is truncated before."""

    metadata = {"render_modes": ["human", "rgb_array", "depth_array"], "render_fps": 50}  # noqa: RUF012

    def __init__(self, robot=None, control=None, task=None, render_mode="rgb_array", **kwargs):
        assert robot and control and task
        print(False)  # noqa: T201
        if task == "push" and render_mode is None:
            raise AttributeError(
                "Unexpected mode: None, expected modes: human, rgb_array, or depth_array"
            )
        self.render_mode = render_mode
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
        self.action_space = spaces.Box(-1, 1, (61,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.goal = 0, np.random.uniform()
        return np.array([self.goal, self.count]), {}

    def step(self, action):
        self.count += 1
        success = np.bool_(self.count == LENGTH - 1)
        terminated = np.float64(self.count) == LENGTH
        observation = np.array([self.goal, self.count])
        info = {"per_timestep_reward": 1.0, "success": success}
        return observation, np.float64(1), terminated, False, info


@pytest.fixture(autouse=True)
def _humanoid_bench(monkeypatch):
    monkeypatch.setitem(sys.modules, "humanoid_bench", types.ModuleType("humanoid_bench"))
    names = {task: f"h1hand-{task}-v0" for task in ("walk", "push", "sit_simple", "sit_hard")}
    for task, name in names.items():
        kwargs = {"robot": "h1hand", "control": "pos", "task": task}
        gymnasium.register(name, entry_point=FakeTask, max_episode_steps=1000, kwargs=kwargs)
    yield
    for name in names.values():
        del gymnasium.registry[name]


def rollout(env, steps):
    torch.manual_seed(0)
    return env.rollout(steps, break_when_any_done=False)


def test_contract(capsys):
    env = make_env("humanoid_bench/h1hand-walk-v0", 3, seed=0, max_episode_steps=6)
    check_env_specs(env)
    assert env.batch_size == (3,) and env.action_spec.shape == (3, 61)
    assert get_observation_keys(env) == ["observation"]
    assert capsys.readouterr().out == ""  # not a line for each environment
    env.close()


def test_ends_of_episodes():
    env = make_env("humanoid_bench/h1hand-walk-v0", 2, seed=0, **RAW)
    data = rollout(env, 9)
    steps = torch.arange(9) % LENGTH
    assert (data["observation"][..., 1] == steps).all()
    assert (data["next", "observation"][..., 1] == steps + 1).all()  # the true final ones too
    assert (data["next", "terminated"].squeeze(-1) == (steps == LENGTH - 1)).all()
    assert not data["next", "truncated"].any()
    assert data["next", "success"].dtype == torch.bool
    assert (data["next", "success"].squeeze(-1) == (steps == LENGTH - 2)).all()
    env.close()


def test_truncation():
    env = make_env("humanoid_bench/h1hand-walk-v0", 2, seed=0, max_episode_steps=2, **RAW)
    data = rollout(env, 4)
    assert data["next", "truncated"][:, 1::2].all() and not data["next", "terminated"].any()
    env.close()


def test_seeds():
    """The goals come from NumPy's global generator, which others use as well."""

    def goals(seed):
        env = make_env("humanoid_bench/h1hand-walk-v0", 2, seed=seed, **RAW)
        np.random.seed(1)
        before = np.random.get_state()[1].copy()
        data = rollout(env, 9)
        assert np.array_equal(np.random.get_state()[1], before)
        env.close()
        return data["observation"][..., 0]

    assert torch.equal(goals(0), goals(0))
    assert not torch.equal(goals(0), goals(1))
    assert goals(0).unique().numel() == 2 * 3  # each row and episode has its own


def test_a_task_that_opens_a_viewer():
    with pytest.raises(ValueError, match="give render_mode='rgb_array'"):
        make_env("humanoid_bench/h1hand-push-v0", 1)
    env = make_env("humanoid_bench/h1hand-push-v0", 1, render_mode="rgb_array")
    env.close()


def test_errors():
    with pytest.raises(ValueError, match="Did you mean 'h1hand-walk-v0'"):
        make_env("humanoid_bench/h1hand-wak-v0")
    with pytest.raises(ValueError, match=r"sit_simple-v0' or 'humanoid_bench/h1hand-sit_hard-v0'"):
        make_env("humanoid_bench/h1hand-sit-v0")
    with pytest.raises(ValueError, match="vectorization='async'"):
        make_env("humanoid_bench/h1hand-walk-v0", num_threads=2)

"""EnvPool for real, and what it does only now and then by a fake."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torchrl.envs import check_env_specs

from torchrl_trudi.envs import get_observation_keys, make_env
from torchrl_trudi.envs._seeding import first_seed
from torchrl_trudi.envs.suites import list_tasks
from torchrl_trudi.record import read_scalars
from torchrl_trudi.trainers import validate
from torchrl_trudi.trainers.builders import build_actor, build_critic

LIMIT = 5
RAW = {"normalize_observation": False}


@pytest.fixture
def envpool():
    return pytest.importorskip("envpool")


def rollout(env, steps, seed=0):
    torch.manual_seed(seed)
    return env.rollout(steps, break_when_any_done=False)


@pytest.mark.usefixtures("envpool")
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("HalfCheetah-v5", ["observation"]),
        ("CartpoleBalance-v1", ["position", "velocity"]),
        ("Go1Handstand-v1", ["observation", "privileged_observation"]),
    ],
)
def test_contract(name, keys):
    env = make_env(f"envpool/{name}", 3, seed=0, max_episode_steps=LIMIT)
    assert env.batch_size == (3,)
    check_env_specs(env)
    assert get_observation_keys(env) == keys
    data = rollout(env, 2 * LIMIT + 1)
    for key in (*keys, "reward"):
        assert data["next", key].dtype == torch.float32
    expected = torch.arange(2 * LIMIT + 1) % LIMIT
    ends = data["next", "truncated"].squeeze(-1)
    early = data["next", "terminated"].any(1).squeeze(-1)
    assert (data["step_count"].squeeze(-1) == expected)[~early].all()
    assert (ends == (expected == LIMIT - 1))[~early].all()
    env.close()


def test_as_envpool_itself_without_its_fake_rows(envpool):
    """Observations, final ones and those after a reset too, rewards and flags of some episodes.

    The pool by itself steps on after an episode: the rows with ``elapsed_step == 0`` are its resets.
    """
    num_envs, steps, seed = 3, 40, 5
    env = make_env("envpool/Hopper-v5", num_envs, seed=seed, max_episode_steps=12, **RAW)
    data = rollout(env, steps)
    assert data["next", "terminated"].any() and data["next", "truncated"].any()
    pool = envpool.make_gymnasium(
        "Hopper-v5",
        num_envs=num_envs,
        seed=[first_seed(seed) + row for row in range(num_envs)],
        max_episode_steps=12,
    )
    last, _ = pool.reset()
    at = np.zeros(num_envs, dtype=int)
    while (at < steps).any():
        rows = np.arange(num_envs)
        step = data[rows, np.minimum(at, steps - 1)]
        observation, reward, terminated, truncated, info = pool.step(step["action"].numpy())
        real = (info["elapsed_step"] > 0) & (at < steps)
        for key, value in (("observation", last), (("next", "observation"), observation)):
            assert np.array_equal(step[key].numpy()[real], value.astype(np.float32)[real])
        flags = {"reward": reward, "terminated": terminated, "truncated": truncated}
        for key, value in flags.items():
            assert np.array_equal(step["next", key].squeeze(-1).numpy()[real], value[real])
        at += real
        last = observation
    env.close()


@pytest.mark.usefixtures("envpool")
def test_seeds():
    def first(seed):
        env = make_env("envpool/HalfCheetah-v5", 2, seed=seed, **RAW)
        data = rollout(env, 4)
        env.close()
        return data["next", "observation"]

    assert torch.equal(first(0), first(0))
    assert not torch.equal(first(0), first(1))
    assert not torch.equal(first(0)[0], first(0)[1])
    # EnvPool's own default seed is a constant.
    assert not torch.equal(first(None), first(None))


@pytest.mark.usefixtures("envpool")
def test_seeding_again():
    env = make_env("envpool/HalfCheetah-v5", 2, seed=0, **RAW)
    data = rollout(env, 4)
    rollout(env, 4)
    env.set_seed(0)
    assert torch.equal(rollout(env, 4)["next", "observation"], data["next", "observation"])
    env.close()


@pytest.mark.usefixtures("envpool")
def test_a_row_that_is_done_has_to_be_reset():
    env = make_env("envpool/HalfCheetah-v5", 2, seed=0, max_episode_steps=2).base_env
    data = env.reset()
    for _ in range(2):
        data = env.step(data.set("action", env.action_spec.zero()))["next"]
    with pytest.raises(RuntimeError, match=r"rows 0, 1 .* without a reset"):
        env.step(data.set("action", env.action_spec.zero()))
    env.close()


@pytest.mark.usefixtures("envpool")
def test_normalize_action():
    env = make_env("envpool/Humanoid-v5", 2, seed=0, normalize_action=True)
    assert env.action_spec.space.high.max() == 1
    assert env.base_env.action_spec.space.high.max() == pytest.approx(0.4)
    assert rollout(env, 3)["next", "reward"].isfinite().all()
    env.close()


def test_listed_sizes(envpool):
    for task in list_tasks("envpool"):
        spec = envpool.make_spec(task.task)
        space = spec.gymnasium_observation_space
        entries = space.spaces if isinstance(space, spaces.Dict) else {"observation": space}
        sizes = {name: int(np.prod(entry.shape)) for name, entry in entries.items()}
        assert sizes.pop("privileged_state", None) == task.privileged, task
        assert sum(sizes.values()) == task.observation, task
        assert spec.gymnasium_action_space.shape == (task.action,), task


@pytest.mark.usefixtures("envpool")
@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("HalfCheeta-v5", {}, ValueError, "Did you mean 'HalfCheetah-v5'"),
        ("CartPole-v1", {}, ValueError, "a Box action space"),
        ("HalfCheetah-v5", {"vectorization": "async"}, ValueError, "num_threads of them"),
        ("HalfCheetah-v5", {"backend": "mujoco"}, ValueError, "simulator of its suite"),
        ("HalfCheetah-v5", {"randomization": [1]}, ValueError, "belongs to backend='mujoco'"),
        ("HalfCheetah-v5", {"batch_size": 1}, TypeError, "decided there"),
        ("HalfCheetah-v5", {"frame_skp": 1}, TypeError, "Did you mean 'frame_skip'"),
    ],
)
def test_errors(name, options, error, message):
    with pytest.raises(error, match=message):
        make_env(f"envpool/{name}", 2, **options)


@pytest.mark.usefixtures("envpool")
def test_the_policy_does_not_see_what_is_privileged():
    env = make_env("envpool/Go1Handstand-v1", 2, seed=0)
    config = validate({"policy": {"hidden_size": 8}, "critic": {"hidden_size": 8}})
    assert build_actor(config, env).observation_keys == ["observation"]
    critic = build_critic(config, env)
    assert {"observation", "privileged_observation"} <= set(critic.in_keys)
    named = validate({"policy": {"in_keys": ["privileged_observation"]}})
    assert build_actor(named, env).observation_keys == ["privileged_observation"]
    env.close()


@pytest.mark.slow
@pytest.mark.usefixtures("envpool")
def test_training(tmp_path):
    """Three iterations of the runner."""
    script = Path(__file__).parents[3] / "examples" / "trudi_humanoid.py"
    options = [
        "env.name=envpool/G1JoystickFlatTerrain-v1",
        "env.num_envs=8",
        "env.max_episode_steps=60",
        "collector.frames_per_batch=512",
        "collector.total_frames=1536",
        "optim.num_minibatches=4",
        "policy.hidden_size=32",
        "critic.hidden_size=32",
        "logger.eval_episodes=1",
    ]
    command = [sys.executable, str(script), *options, f"logger.dir={tmp_path / 'run'}"]
    subprocess.run(command, check=True, timeout=300)
    scalars = read_scalars(tmp_path / "run")
    for name in ("train/loss_actor", "train/loss_critic", "train/kl", "train/return"):
        assert np.isfinite(scalars[name][1]).all(), name


class FakePool:
    """Answers in another order than that of the rows, and always in the same memory.

    Source: envpool/core/async_envpool.h and state_buffer_queue.h of EnvPool 1.2.5: rows are written
    in the order in which the threads finish, ``info["env_id"]`` says which they are, and blocks of
    memory return to a queue of finite length. The observation is ``[row, step]``.
    """

    def __init__(self, num_envs):
        self.step_count = np.zeros(num_envs, dtype=np.int32)
        self.memory = np.zeros((num_envs, 2))

    def _answer(self, rows):
        rows = rows[::-1]
        out = self.memory[: len(rows)]
        out[:, 0], out[:, 1] = rows, self.step_count[rows]
        return out, {"env_id": rows, "elapsed_step": self.step_count[rows]}

    def reset(self, rows):
        self.step_count[rows] = 0
        return self._answer(rows)

    def step(self, action):
        # NEXT_STEP: a row at its end is reset, whatever the action.
        self.step_count = np.where(self.step_count == 3, 0, self.step_count + 1)
        observation, info = self._answer(np.arange(len(self.step_count)))
        truncated = info["elapsed_step"] == 3
        info["success"] = info["env_id"] == 1
        return observation, info["env_id"] * 1.0, truncated & False, truncated, info

    def close(self):
        pass


@pytest.fixture
def fake_envpool(monkeypatch):
    spec = types.SimpleNamespace(
        gymnasium_observation_space=spaces.Box(-np.inf, np.inf, (2,), np.float64),
        gymnasium_action_space=spaces.Box(-1, 1, (1,), np.float64),
        state_array_spec={"info:success": None},
        _config_keys=["num_envs", "seed"],
    )
    module = types.SimpleNamespace(
        __version__="1.2.5",
        list_all_envs=lambda: ["Fake-v1"],
        make_spec=lambda task, **options: spec,
        make_gymnasium=lambda task, num_envs, **options: FakePool(num_envs),
    )
    monkeypatch.setitem(sys.modules, "envpool", module)


@pytest.mark.usefixtures("fake_envpool")
def test_rows_come_back_in_their_places():
    env = make_env("envpool/Fake-v1", 4, seed=0, **RAW)
    check_env_specs(env)
    data = rollout(env, 8)
    rows, steps = torch.arange(4.0)[:, None], torch.arange(8.0) % 3
    assert torch.equal(data["observation"], torch.stack(torch.broadcast_tensors(rows, steps), -1))
    assert torch.equal(
        data["next", "observation"], torch.stack(torch.broadcast_tensors(rows, steps + 1), -1)
    )
    assert torch.equal(data["next", "reward"].squeeze(-1), rows.expand(4, 8))
    assert torch.equal(data["next", "success"].squeeze(-1), (rows == 1).expand(4, 8))
    assert torch.equal(data["next", "truncated"].squeeze(-1), (steps == 2).expand(4, 8))
    assert get_observation_keys(env) == ["observation"]


@pytest.mark.usefixtures("fake_envpool")
def test_a_reset_of_one_row_leaves_the_others():
    env = make_env("envpool/Fake-v1", 3, seed=0, **RAW).base_env
    data = env.reset()
    data = env.step(data.set("action", env.action_spec.zero()))["next"]
    mask = torch.tensor([[False], [True], [False]])
    assert env.reset(data.set("_reset", mask))["observation"][:, 1].tolist() == [1, 0, 1]

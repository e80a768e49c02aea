from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torchrl.collectors import Collector
from torchrl.envs import check_env_specs
from torchrl.envs.utils import RandomPolicy

from torchrl_trudi.envs import get_observation_norm, make_env
from torchrl_trudi.envs._seeding import first_seed

BACKENDS = ["mujoco", "gymnasium"]


def make(name, num_envs=1, **kwargs):
    return make_env(name, num_envs, backend="gymnasium", **kwargs)


def rollout(env, steps):
    torch.manual_seed(0)
    return env.rollout(steps, break_when_any_done=False)


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize(
    ("name", "backend"),
    [*(("InvertedPendulum-v5", backend) for backend in BACKENDS), ("Pendulum-v1", "gymnasium")],
)
def test_specs(name, backend, num_envs):
    env = make_env(name, num_envs, seed=0, reward_scale=0.1, backend=backend)
    assert env.batch_size == (num_envs,)
    check_env_specs(env)
    assert env.observation_spec["observation"].dtype == torch.float32
    for key in ("reward", "episode_reward"):
        assert rollout(env, 3)["next", key].dtype == torch.float32
    env.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_same_as_plain_gymnasium_to_the_last_bit(backend):
    """Observations (final ones too), rewards and flags of every row, over several episodes."""
    seed, num_envs, steps = 7, 3, 60
    task = {"name": "InvertedPendulum-v5", "max_episode_steps": 9}
    options = {"num_envs": num_envs, "seed": seed, "backend": backend}
    env = make_env(**task, **options, normalize_observation=False)
    data = rollout(env, steps)
    ends = {"terminated": 0, "truncated": 0}
    for row in range(num_envs):
        plain = gymnasium.make(task["name"], max_episode_steps=task["max_episode_steps"])
        observation, _ = plain.reset(seed=first_seed(seed) + row)
        if backend == "gymnasium":
            observation, _ = plain.reset()  # the seeding resets; the rollout does again
        for t in range(steps):
            step = data[row, t]
            assert np.array_equal(step["observation"], observation.astype(np.float32))
            observation, reward, terminated, truncated, _ = plain.step(step["action"].numpy())
            following = step["next"]
            assert np.array_equal(following["observation"], observation.astype(np.float32))
            assert following["reward"] == np.float32(reward)
            assert following["terminated"] == terminated
            assert following["truncated"] == truncated
            assert following["done"] == (terminated or truncated)
            ends["terminated"] += terminated
            ends["truncated"] += truncated and not terminated
            if terminated or truncated:
                observation, _ = plain.reset()
        plain.close()
    assert min(ends.values()) > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_terminated_and_truncated_are_apart(backend):
    terminating = rollout(make_env("InvertedPendulum-v5", 2, seed=0, backend=backend), 60)["next"]
    assert terminating["terminated"].any()
    assert not terminating["truncated"].any()
    name = "Reacher-v5" if backend == "mujoco" else "Pendulum-v1"  # neither of which terminates
    options = {"seed": 0, "max_episode_steps": 4, "backend": backend}
    truncating = rollout(make_env(name, 2, **options), 12)["next"]
    assert not truncating["terminated"].any()
    expected = torch.arange(1, 13) % 4 == 0
    assert torch.equal(truncating["truncated"][..., 0], expected.expand(2, 12))


def test_partial_reset_leaves_other_rows_alone():
    env = make("TestCounter-v0", 3, seed=0, normalize_observation=False, length=50)
    tensordict = env.reset()
    for _ in range(2):
        tensordict = env.step_mdp(env.rand_step(tensordict))
    before = tensordict.clone()
    tensordict["_reset"] = torch.tensor([[False], [True], [False]])
    after = env.reset(tensordict)
    others = torch.tensor([0, 2])
    keys = ["observation", "episode_reward", "step_count", "done", "terminated", "truncated"]
    assert (after[others].select(*keys) == before[others].select(*keys)).all()
    assert after["observation"][1, 1] == after["step_count"][1] == after["episode_reward"][1] == 0
    # And in the simulation itself: the others go on where they were.
    following = env.rand_step(after)["next"]
    assert following["observation"][:, 1].tolist() == [3.0, 1.0, 3.0]
    assert torch.equal(following["observation"][others, 0], before["observation"][others, 0])


def test_reset_with_a_tensordict_without_mask_resets_everything():
    env = make("TestCounter-v0", 2, seed=0, normalize_observation=False, length=50)
    tensordict = env.rand_step(env.reset())
    assert (env.reset(tensordict.exclude("next"))["observation"][:, 1] == 0).all()


def test_rewards_and_counters():
    env = make("TestCounter-v0", 2, seed=0, reward_scale=0.5)
    following = rollout(env, 7)["next"]
    expected = {
        "reward": [0.5, 1.0, 1.5] * 2 + [0.5],
        "episode_reward": [1.0, 3.0, 6.0] * 2 + [1.0],
        "step_count": [1, 2, 3] * 2 + [1],
    }
    for key, values in expected.items():
        assert following[key][..., 0].tolist() == [values] * 2, key


@pytest.mark.parametrize("split", [False, True])
def test_collector(split):
    """Next observations at an episode end are final, carried ones are the reset ones."""
    env = make("TestCounter-v0", 3, seed=0, normalize_observation=False)
    collector = Collector(
        env,
        RandomPolicy(env.full_action_spec),
        frames_per_batch=12 if split else 24,
        total_frames=24,
    )
    data = torch.cat([batch.clone() for batch in collector], dim=1)
    assert data.shape == (3, 8)
    count, following = data["observation"][..., 1], data["next", "observation"][..., 1]
    assert count.tolist() == [[0.0, 1.0, 2.0] * 2 + [0.0, 1.0]] * 3
    assert following.tolist() == [[1.0, 2.0, 3.0] * 2 + [1.0, 2.0]] * 3
    assert torch.equal(data["next", "done"][..., 0], following == 3)
    offsets = data["observation"][..., 0]
    assert torch.equal(offsets, data["next", "observation"][..., 0])
    assert offsets.unique().numel() == 3 * 3  # each episode of each row draws its own


@pytest.mark.parametrize("backend", BACKENDS)
def test_seeds(backend):
    name = "Reacher-v5" if backend == "mujoco" else "Pendulum-v1"
    options = {"num_envs": 3, "max_episode_steps": 4, "backend": backend}

    def run(seed):
        return rollout(make_env(name, seed=seed, **options), 10)

    first, again, other = run(0), run(0), run(1)
    assert (first == again).all()
    # No sub-environment of one batch starts as one of another batch does, or of its own.
    raw = [make_env(name, seed=s, normalize_observation=False, **options) for s in (0, 1)]
    starts = torch.cat([env.reset()["observation"] for env in raw])
    assert len(starts.unique(dim=0)) == 6
    assert not torch.equal(first["observation"], other["observation"])


def test_without_a_seed_runs_differ():
    starts = [make("Pendulum-v1", normalize_observation=False).reset() for _ in range(2)]
    assert not torch.equal(starts[0]["observation"], starts[1]["observation"])


def test_sync_and_async_agree():
    rollouts = []
    for vectorization in ("sync", "async"):
        env = make("Pendulum-v1", 2, seed=0, vectorization=vectorization, max_episode_steps=3)
        rollouts.append(rollout(env, 7))
        env.close()
    assert (rollouts[0] == rollouts[1]).all()


def test_dict_observation(dict_space):
    kwargs = {"seed": 0, "observation_space": dict_space}
    env = make("TestAnySpaces-v0", 2, **kwargs)
    check_env_specs(env)
    norm = get_observation_norm(env)
    assert set(norm.in_keys) == {"proprio", ("goal", "xy")}
    data = rollout(env, 50)
    # Each key on its own: their ranges differ by 5.
    assert norm.get_statistics("proprio").var.min() > 4
    assert norm.get_statistics(("goal", "xy")).var.max() < 1
    assert data["proprio"].dtype == torch.float32
    assert data["pixel_row"].dtype == torch.uint8
    raw = rollout(make("TestAnySpaces-v0", 2, normalize_observation=False, **kwargs), 50)
    assert set(raw.keys(True)) == set(data.keys(True))


def test_observation_keys(dict_space):
    kwargs = {"seed": 0, "observation_space": dict_space}
    env = make("TestAnySpaces-v0", 2, observation_keys=[("goal", "xy")], **kwargs)
    raw = rollout(make("TestAnySpaces-v0", 2, normalize_observation=False, **kwargs), 9)
    data = rollout(env, 9)
    assert get_observation_norm(env).in_keys == [("goal", "xy")]
    assert torch.equal(data["proprio"], raw["proprio"])
    assert not torch.equal(data["goal", "xy"], raw["goal", "xy"])


def test_observation_norm_kwargs():
    env = make("TestCounter-v0", observation_norm_kwargs={"eps": 0.5, "clip": 0.1}, seed=0)
    assert get_observation_norm(env).get_statistics("observation").eps == 0.5
    assert rollout(env, 6)["observation"].abs().max() <= 0.1 + 1e-6


def test_non_finite_observation_names_key_and_rows():
    env = make("TestCounter-v0", 4, seed=0, nan_at=2, nan_below=0.5, on_nonfinite="raise")
    offsets = make("TestCounter-v0", 4, seed=0, normalize_observation=False).reset()
    rows = (offsets["observation"][:, 0] < 0.5).nonzero().squeeze(-1).tolist()
    assert 0 < len(rows) < 4
    tensordict = env.step_mdp(env.rand_step(env.reset()))
    message = f"'observation' in {len(rows)} of 4 rows: {', '.join(map(str, rows))}\\."
    with pytest.raises(FloatingPointError, match=message):
        env.rand_step(tensordict)
    # Raised before the statistics are spoilt.
    assert get_observation_norm(env).get_statistics("observation").mean.isfinite().all()
    with pytest.raises(FloatingPointError, match="'observation' in 1 of 1"):
        make("TestCounter-v0", nan_at=0, on_nonfinite="raise").reset()


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"name": "Humanoyd-v5"}, ValueError, "'Humanoyd-v5' is not a task.*'Humanoid-v5'"),
        ({"name": "Pendulum"}, ValueError, "include the version.*'Pendulum-v1'"),
        ({"name": "no_such_module:Task-v0"}, ValueError, "no_such_module.*cannot be imported"),
        ({"name": None}, TypeError, "name of a task, got None"),
        ({"num_envs": 0}, ValueError, "num_envs must be an integer of at least 1, got 0"),
        ({"num_envs": -2}, ValueError, "num_envs .* got -2"),
        ({"num_envs": 2.0}, TypeError, "num_envs .* got 2.0 of type float"),
        ({"num_envs": True}, TypeError, "num_envs .* got True, a bool"),
        ({"seed": -1}, ValueError, "seed must be an integer of at least 0, got -1"),
        ({"max_episode_steps": 0}, ValueError, "max_episode_steps .* at least 1, got 0"),
        ({"reward_scale": 0.0}, ValueError, "reward_scale must be a finite number above 0"),
        ({"reward_scale": -1}, ValueError, "reward_scale .* got -1"),
        ({"reward_scale": float("nan")}, ValueError, "reward_scale .* got nan"),
        ({"reward_scale": "big"}, TypeError, "reward_scale .* 'big' of type str"),
        ({"backend": "gymnasum"}, ValueError, r"'mujoco', 'gymnasium'\]. Did you mean 'gym"),
        ({"vectorization": "threads"}, ValueError, r"'threads' is not one of \['sync', 'async'\]"),
        ({"lenght": 3}, TypeError, "does not accept the argument 'lenght'.*mean 'length'"),
        ({"observation_norm": 3}, TypeError, "must be a RunningObservationNorm.* got int"),
        ({"observation_keys": ["observatoin"]}, ValueError, "'observatoin' cannot.*'observation'"),
        ({"observation_keys": []}, ValueError, "no observation to normalise"),
        (
            {"normalize_observation": False, "observation_norm_kwargs": {}},
            ValueError,
            r"normalize_observation=False, but \['observation_norm_kwargs'\] given",
        ),
    ],
)
def test_bad_arguments(kwargs, error, message):
    with pytest.raises(error, match=message):
        make_env(**{"name": "TestCounter-v0", "backend": "gymnasium", **kwargs})


def test_unknown_argument_of_a_task_that_hands_arguments_on():
    # The task's own signature ends with **kwargs; it is its parent that refuses.
    with pytest.raises(TypeError, match=r"'frame_skipp'.*Did you mean 'frame_skip'"):
        make("InvertedPendulum-v5", frame_skipp=2)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Discrete(3), r"action space of .* is Discrete\(3\); a Box"),
        (spaces.Box(-1, 1, (2,), np.int32), "int32.*floating point"),
        (spaces.Box(-np.inf, np.inf, (2,)), r"is unbounded, Box\(-inf, inf, \(2,\), float32\)"),
    ],
)
def test_bad_action_space(space, message):
    with pytest.raises(ValueError, match=message):
        make("TestAnySpaces-v0", action_space=space)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Discrete(3), r"the observation of .* is Discrete\(3\); a Box, or a Dict"),
        (spaces.Dict(a=spaces.Dict(b=spaces.MultiBinary(2))), "entry 'a/b' of the observation"),
        (spaces.Dict(reward=spaces.Box(0, 1, (1,))), r"has the entries \['reward'\]"),
        (spaces.Box(0, 255, (2,), np.uint8), "no observation to normalise.*False"),
    ],
)
def test_bad_observation_space(space, message):
    with pytest.raises(ValueError, match=message):
        make("TestAnySpaces-v0", observation_space=space)


def test_observation_norm_of_another_task():
    norm = get_observation_norm(make("TestCounter-v0"))
    with pytest.raises(ValueError, match=r"of shape \(2,\) on cpu .* of shape \(3,\) on cpu"):
        make("Pendulum-v1", observation_norm=norm)
    with pytest.raises(ValueError, match=r"its own keys and options; \['observation_keys'\]"):
        make("TestCounter-v0", observation_norm=norm, observation_keys=["observation"])


def test_get_observation_norm_without_one():
    with pytest.raises(ValueError, match="found 0"):
        get_observation_norm(make("TestCounter-v0", normalize_observation=False))


def test_action_is_passed_in_the_tasks_dtype():
    space = spaces.Box(-2.0, 2.0, (1,), np.float64)
    env = make("TestAnySpaces-v0", 2, action_space=space, seed=0)
    check_env_specs(env)
    assert env.full_action_spec["action"].dtype == torch.float32
    assert env.full_action_spec["action"].space.high.unique() == 2.0

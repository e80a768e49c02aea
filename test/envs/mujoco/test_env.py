"""MujocoBatchEnv: TorchRL's contract, episodes, seeds, threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from envs.mujoco._tasks import (
    TASKS,
    Slider,
    act,
    ant,
    assert_same,
    play,
    slider,
)
from tensordict import TensorDict
from torchrl.envs import check_env_specs

from torchrl_trudi.envs._seeding import first_seed
from torchrl_trudi.envs.mujoco import MujocoBatchEnv

# The contract


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("name", [*TASKS, "Hopper-v5", "InvertedDoublePendulum-v5"])
def test_specs(name, num_envs, dtype):
    env = MujocoBatchEnv(name, num_envs, seed=0, dtype=dtype, num_threads=2)
    assert env.batch_size == (num_envs,)
    check_env_specs(env)
    following = env.rollout(2, break_when_any_done=False)["next"]
    assert following["observation"].dtype == following["reward"].dtype == dtype
    assert env.action_spec.dtype == torch.float32
    assert torch.equal(
        env.action_spec.space.high[0],
        torch.tensor(env.model.actuator_ctrlrange[:, 1], dtype=torch.float32),
    )


def test_dtypes_are_roundings_of_the_same_numbers():
    double, _ = play(ant(dtype=torch.float64), 9)
    single, _ = play(ant(), 9)
    for key in ("observation", "reward"):
        assert torch.equal(double["next", key].float(), single["next", key])
        assert not torch.equal(double["next", key], single["next", key].double())


def test_specs_with_randomization():
    env = slider(num_envs=2)
    check_env_specs(env)
    assert env.observation_spec["randomization", "body_mass"].shape == (2, 1)


@pytest.mark.parametrize("make", [ant, slider])
def test_returned_tensors_are_the_callers_own(make):
    def run(spoil):
        env, data = make(), []
        tensordict = env.reset()
        for _ in range(10):
            data.append(tensordict.clone())
            action = torch.full(env.action_spec.shape, 0.7)
            stepped, tensordict = env.step_and_maybe_reset(tensordict.set("action", action))
            data.append(stepped["next"].clone())
            if spoil:
                for value in [*stepped.values(True, True), action]:
                    value.fill_(True)
                tensordict = TensorDict({}, env.batch_size)
                state = env.get_state()
                for value in state.values(True, True):
                    value.fill_(1)
                for value in env.get_extra_state().values():
                    value.fill_(1)
        return data

    for first, second in zip(run(False)[1::2], run(True)[1::2], strict=True):
        assert_same(first, second)


def test_earlier_data_is_not_written_to_again():
    env = slider()
    tensordict, kept = env.reset(), []
    for _ in range(9):
        stepped, tensordict = env.step_and_maybe_reset(
            tensordict.set("action", torch.ones(env.action_spec.shape))
        )
        kept.append((stepped, stepped.clone()))
    for stepped, copied in kept:
        assert_same(stepped, copied)


def test_what_a_task_sees_is_read_only():
    env = MujocoBatchEnv("Hopper-v5", 2, seed=0)
    for field in ("qpos", "qvel", "ctrl"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(env._sims, field)[:] = 0.0


# Episodes


@pytest.mark.parametrize("make", [ant, slider])
def test_final_observations_are_true_ones(make):
    """The last observation of an episode is that of a run which does not reset."""
    data, _ = play(make(), 12)
    done = data["next", "done"][..., 0]
    rows, times = (done[:, :-1]).nonzero(as_tuple=True)
    assert len(rows) >= 4
    final, start = data["next", "observation"][rows, times], data["observation"][rows, times + 1]
    assert (final != start).any(-1).all()
    # Within an episode the next observation is carried over.
    rows, times = (~done[:, :-1]).nonzero(as_tuple=True)
    assert torch.equal(
        data["next", "observation"][rows, times], data["observation"][rows, times + 1]
    )
    env = make()
    first = env.reset()
    for t in range(7):  # the first episodes again, but for the resets
        action = data["action"][:, t]
        following = env.step(first.clone().set("action", action))["next"]
        alive = ~(data["next", "done"][:, :t].any(1).flatten())
        assert torch.equal(following["observation"][alive], data["next", "observation"][alive, t])
        first = env.step_mdp(TensorDict({"action": action, "next": following}, env.batch_size))


def test_terminated_and_truncated_are_apart_and_may_come_together():
    env = MujocoBatchEnv(Slider(limit=1.0), 4, num_threads=1, max_episode_steps=2)
    # With a velocity of 100 the mass moves about 1 in each step.
    env.reset_to([[0.0], [0.9], [-0.5], [0.0]], [[0.0], [100.0], [-100.0], [-60.0]])
    first = act(env, TensorDict({}, [4]), 0.0)["next"]
    assert first["terminated"].flatten().tolist() == [False, True, True, False]
    assert first["truncated"].flatten().tolist() == [False] * 4
    # No reset in between: the second step reaches the limit everywhere, and the end twice or once.
    second = act(env, first, 0.0)["next"]
    assert second["terminated"].flatten().tolist() == [False, True, True, True]
    assert second["truncated"].flatten().tolist() == [True] * 4
    assert second["done"].flatten().tolist() == [True] * 4
    assert not second["unstable"].any()


@pytest.mark.parametrize("own", [None, 5])
@pytest.mark.parametrize("given", [None, 3])
def test_max_episode_steps(own, given):
    env = MujocoBatchEnv(Slider(max_episode_steps=own), 2, max_episode_steps=given, seed=0)
    truncated = play(env, 16)[0]["next", "truncated"][0, :, 0]
    limit = given or own
    expected = [limit is not None and t % limit == 0 for t in range(1, 17)]
    assert truncated.tolist() == expected


def test_partial_reset_leaves_other_rows_alone():
    env, alone = ant(), ant()
    others = torch.tensor([0, 2, 3])
    _, tensordict = play(env, 3)
    _, alone_tensordict = play(alone, 3)
    before = tensordict.clone()
    tensordict["_reset"] = torch.tensor([[False], [True], [False], [False]])
    after = env.reset(tensordict)
    for key in ("observation", "done", "terminated", "truncated", "unstable"):
        assert torch.equal(after[key][others], before[key][others]), key
    assert not torch.equal(after["observation"][1], before["observation"][1])
    # In the simulation itself, and in what follows.
    assert_same(env.get_state(others), alone.get_state(others))
    data, _ = play(env, 12, after.exclude("_reset"))
    expected, _ = play(alone, 12, alone_tensordict)
    assert_same(data[others], expected[others])
    assert not torch.equal(data["observation"][1], expected["observation"][1])


def test_reset_of_no_row_and_without_a_mask():
    env = slider()
    _, tensordict = play(env, 3)
    before = env.get_state()
    tensordict["_reset"] = torch.zeros(4, 1, dtype=torch.bool)
    env.reset(tensordict)
    assert_same(env.get_state(), before)
    env.reset(tensordict.exclude("_reset"))
    assert (env.get_state()["elapsed_steps"] == 0).all()
    with pytest.raises(TypeError, match=r"accepts no arguments of its own, got \['options'\]"):
        env.reset(options={})


def test_reset_to():
    env = slider()
    play(env, 3)
    before = env.get_state()
    tensordict = env.reset_to([[0.25], [-0.5]], torch.tensor([2.0]), rows=[3, 1])
    assert tensordict["observation"][[3, 1]].tolist() == [[0.25, 2.0], [-0.5, 2.0]]
    after = env.get_state()
    assert_same(after[[0, 2]], before[[0, 2]])
    assert after["elapsed_steps"][[1, 3]].tolist() == [0, 0]
    # Neither random stream nor model values: only the state of the physics.
    assert torch.equal(after["rng"], before["rng"])
    assert_same(after["randomization"], before["randomization"])
    # What follows is the physics of that state: x' = x + v' dt.
    following = act(env, tensordict, 0.0)["next"]
    position, velocity = following["observation"][3].double().tolist()
    assert 0.25 < position < 0.25 + 2.0 * 0.1
    assert velocity < 2.0
    assert following["reward"][3].item() == pytest.approx(position - 0.25, abs=1e-6)
    mask = np.array([False, False, True, False])
    assert env.reset_to(np.array([0.75]), [0.0], rows=mask)["observation"][2, 0] == 0.75


def test_reset_to_states_that_mujoco_refuses():
    """It would put the default state in their place."""
    env = slider()
    env.reset()
    before = env.get_state()
    with pytest.raises(FloatingPointError, match=r"qvel is not finite, or not below .* rows \[3\]"):
        env.reset_to([0.5], [[0.0], [1e11]], rows=[1, 3])
    assert_same(env.get_state(), before)


@pytest.mark.parametrize(
    ("qpos", "qvel", "rows", "message"),
    [
        ([0.0, 0.0], [0.0], None, r"qpos must have the shape \(1,\) or \(4, 1\), got \(2,\)"),
        ([[0.0]], [0.0], None, r"qpos must have the shape .* got \(1, 1\)"),
        ([0.0], [[0.0]] * 3, [0, 1], r"qvel must have the shape \(1,\) or \(2, 1\), got \(3, 1\)"),
        ([np.nan], [0.0], [0], "qpos is not finite"),
        ([0.0], [np.inf], [0], "qvel is not finite"),
        ([0.0], [0.0], [0, 0], r"rows must be distinct and in \[0, 4\), got \[0, 0\]"),
        ([0.0], [0.0], [4], r"rows must be distinct and in \[0, 4\)"),
        ([0.0], [0.0], [-1], r"rows must be distinct and in \[0, 4\)"),
        ([0.0], [0.0], [0.5], "sequence of integers or a mask"),
        ([0.0], [0.0], 1, "sequence of integers or a mask"),
        ([0.0], [0.0], [True, False], r"a mask of shape \(4,\)"),
    ],
)
def test_reset_to_of_what_does_not_fit(qpos, qvel, rows, message):
    env = slider()
    env.reset()
    before = env.get_state()
    with pytest.raises(ValueError, match=message):
        env.reset_to(qpos, qvel, rows)
    assert_same(env.get_state(), before)


@pytest.mark.parametrize("driver", ["batch", "threads"])
def test_rows_that_wait_go_on_as_if_nothing_had_been(driver):
    """Bit for bit, whatever happens to the others or would have happened to them."""
    env, alone = slider(driver=driver), slider(driver=driver)
    _, tensordict = play(env, 3)
    _, expected = play(alone, 3)
    for _ in range(4):
        tensordict["action"] = torch.ones(4, 1)
        tensordict["_step"] = torch.tensor([[True], [False], [True], [False]])
        env.step(tensordict.clone())
    env._driver.bind("qvel")[0] = np.nan  # a row that steps, and diverges
    following = env.step(tensordict.clone())["next"]
    assert following["unstable"].flatten().tolist() == [True, False, False, False]
    rows = [1, 3]
    assert_same(env.get_state(rows), alone.get_state(rows))
    tensordict = tensordict.exclude("_step", "action")
    data, _ = play(env, 12, tensordict, seed=1)
    wanted, _ = play(alone, 12, expected, seed=1)
    assert_same(data["next"][rows], wanted["next"][rows])


def test_rows_that_wait_are_not_stepped():
    """As in a rollout that goes on until every row is done."""
    env = MujocoBatchEnv("Hopper-v5", 3, seed=0)
    tensordict = env.rand_action(env.reset())
    before = env.get_state()
    tensordict["_step"] = torch.tensor([True, False, True])
    following = env.step(tensordict)["next"]
    after = env.get_state()
    for key, value in after.items(True, True):
        assert torch.equal(value[1], before[key][1]), key
    assert after["elapsed_steps"].tolist() == [1, 0, 1]
    assert torch.equal(following["observation"][1], tensordict["observation"][1])
    assert following["reward"][1] == 0
    assert not torch.equal(following["observation"][0], tensordict["observation"][0])


# Seeds


@pytest.mark.parametrize("make", [ant, slider])
def test_seeds(make):
    first, again, other = (play(make(seed=seed), 9)[0] for seed in (0, 0, 1))
    assert_same(first, again)
    assert not torch.equal(first["observation"], other["observation"])
    # No row of one batch starts as another row does, or as one of another batch.
    starts = torch.cat([first["observation"][:, 0], other["observation"][:, 0]])
    assert len(starts.unique(dim=0)) == 8
    # Nor does an episode start as the one before.
    episodes = first["observation"][0, [0, *(first["next", "done"][0, :-1, 0].nonzero()[:, 0] + 1)]]
    assert len(episodes.unique(dim=0)) == len(episodes) > 1


def test_set_seed_is_the_seed_of_the_constructor():
    env = slider(seed=3)
    expected = play(env, 9)[0]
    env.set_seed(4)
    assert not torch.equal(play(env, 9)[0]["observation"], expected["observation"])
    env.set_seed(3)
    assert env.seeds.tolist() == [first_seed(3) + row for row in range(4)]
    assert_same(play(env, 9)[0], expected)


def test_rows_do_not_depend_on_how_many_there_are():
    few, many = play(slider(2), 9)[0], play(slider(5), 1)[0]
    assert torch.equal(few["observation"][:, 0], many["observation"][:2, 0])


def test_without_a_seed_runs_differ():
    first, second = (slider(seed=None).reset()["observation"] for _ in range(2))
    assert not torch.equal(first, second)


# Threads and drivers


@pytest.mark.parametrize("make", [ant, slider])
@pytest.mark.parametrize("options", [{"num_threads": 2}, {"num_threads": 4}, {"driver": "threads"}])
def test_threads_and_drivers_change_nothing(make, options):
    reference, _ = play(make(num_envs=5, num_threads=1), 16)
    assert_same(play(make(num_envs=5, **options), 16)[0], reference)
    assert reference["next", "done"].any()


def test_more_threads_than_rows_and_default():
    reference, _ = play(slider(2, num_threads=1), 4)
    assert_same(play(slider(2, num_threads=5), 4)[0], reference)
    assert_same(play(slider(2, num_threads=None), 4)[0], reference)


@pytest.mark.parametrize("make", [ant, slider])
def test_environments_of_one_process_do_not_influence_each_other(make):
    expected = [play(make(seed=seed), 10)[0] for seed in (0, 1)]
    # Stepped in turns.
    envs = [make(seed=seed) for seed in (0, 1)]
    starts, parts = [env.reset() for env in envs], [[], []]
    for t in range(5):
        for i, env in enumerate(envs):
            data, starts[i] = play(env, 2, starts[i], seed=t)
            parts[i].append(data)
    for i, seed in enumerate((0, 1)):
        env = make(seed=seed)
        tensordict, alone = env.reset(), []
        for t in range(5):
            data, tensordict = play(env, 2, tensordict, seed=t)
            alone.append(data)
        assert_same(torch.cat(parts[i], 1), torch.cat(alone, 1))
    # Stepped by a Python thread each.
    results: dict[int, TensorDict] = {}
    envs = [make(seed=seed) for seed in (0, 1)]

    def run(i):
        results[i] = play(envs[i], 10)[0]

    threads = [threading.Thread(target=run, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for i in (0, 1):
        assert_same(results[i], expected[i])

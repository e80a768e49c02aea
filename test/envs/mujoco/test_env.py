"""MujocoBatchEnv: TorchRL's contract, seeds, resets, threads, checkpoints, life and death."""

from __future__ import annotations

import copy
import functools
import gc
import multiprocessing
import operator
import os
import pickle
import threading
import time

import numpy as np
import pytest
import torch
from envs.mujoco._tasks import Slider, act, assert_same, in_fork, play, slider_spec
from tensordict import TensorDict
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.envs import check_env_specs
from torchrl.envs.utils import RandomPolicy

from torchrl_trudi.envs._seeding import first_seed
from torchrl_trudi.envs.mujoco import ModelRandomization, MujocoBatchEnv

# Without cfrc_ext the physics keeps no MjData of its own for each row, with it (Ant) it does.
TASKS = ["InvertedPendulum-v5", "Ant-v5"]


def ant(num_envs=4, seed=0, **kwargs):
    """Episodes of 7 steps, so that there are ends of both kinds."""
    options = {"num_threads": 2, "max_episode_steps": 7, "healthy_z_range": (0.5, 1.0)}
    return MujocoBatchEnv("Ant-v5", num_envs, seed=seed, **{**options, **kwargs})


def slider(num_envs=4, seed=0, **kwargs):
    """The same, of a task that costs next to nothing, with a randomised mass."""
    options = {"num_threads": 2, "max_episode_steps": 7, "randomization": MASS}
    return MujocoBatchEnv(
        Slider(limit=1.05, frame_skip=10), num_envs, seed=seed, **options | kwargs
    )


MASS = (ModelRandomization("body_mass", 0.5, 2.0, names=["mass"]),)


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


# States and checkpoints


@pytest.mark.parametrize("make", [ant, slider])
@pytest.mark.parametrize("driver", ["batch", "threads"])
def test_set_state_repeats_what_followed(make, driver):
    env = make(driver=driver)
    _, tensordict = play(env, 4)
    state = env.get_state()
    assert state.batch_size == (4,)
    expected, _ = play(env, 20, tensordict, seed=1)
    env.set_state(state)
    assert_same(play(env, 20, tensordict, seed=1)[0], expected)


@pytest.mark.parametrize("make", [ant, slider])
@pytest.mark.parametrize(
    "rows",
    [[2], [3, 1], torch.tensor([1, 3, 0]), np.array([True, False, False, True]), range(2), []],
    ids=str,
)
def test_states_of_subsets(make, rows):
    env = make()
    _, tensordict = play(env, 4)
    whole, part = env.get_state(), env.get_state(rows)
    index = np.flatnonzero(rows) if isinstance(rows, np.ndarray) else np.asarray(rows, int)
    assert_same(part, whole[torch.from_numpy(index)])
    expected, _ = play(env, 12, tensordict, seed=1)
    _, tensordict = play(env, 5, seed=2)
    kept = env.get_state()
    env.set_state(part, rows)
    mixed = kept.clone()
    mixed[torch.from_numpy(index)] = part
    assert_same(env.get_state(), mixed)
    data, _ = play(env, 12, tensordict, seed=1)
    assert_same(data["next"][index], expected["next"][index])


def test_state_of_one_row_in_all_others():
    env = ant()
    _, tensordict = play(env, 4)
    env.set_state(env.get_state([2]))
    tensordict["action"] = torch.full((4, 8), 0.3)
    for _ in range(2 * 7):  # with the resets, whose random stream was copied too
        stepped, tensordict = env.step_and_maybe_reset(tensordict)
        tensordict["action"] = stepped["action"]
        assert_same(stepped["next"], stepped["next"][:1].expand(4))


def test_states_are_written_in_the_order_of_the_rows():
    env = slider()
    play(env, 4)
    state = env.get_state()
    env.set_state(state[[0, 1]], [3, 2])
    assert_same(env.get_state([3, 2]), state[[0, 1]])
    assert_same(env.get_state([0, 1]), state[[0, 1]])


def test_state_without_rng_keeps_the_streams():
    env = slider()
    play(env, 4)
    state = env.get_state().exclude("rng")
    play(env, 20)
    streams = env.get_state()["rng"]
    env.set_state(state)
    after = env.get_state()
    assert torch.equal(after["rng"], streams)
    assert_same(after.exclude("rng"), state)


def test_state_of_an_episode_that_has_ended():
    """A state between the end of an episode and its reset, in an environment without a limit."""
    env = MujocoBatchEnv(Slider(max_episode_steps=2), 2, seed=0)
    tensordict = act(env, act(env, env.reset(), 0.1)["next"], 0.1)["next"]
    assert tensordict["truncated"].all()
    without_limit = MujocoBatchEnv(Slider(), 2, seed=0)
    without_limit.set_state(env.get_state())
    assert not act(without_limit, tensordict, 0.1)["next", "truncated"].any()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: s.exclude("physics"), r"the state has no \['physics'\]"),
        (lambda s: s.exclude(("randomization", "body_mass", "draws")), "the state has no .*draws"),
        (lambda s: s[:3], r"batch size \(3,\) does not fit 4 rows"),
        (lambda s: s[0], r"batch size \(\) does not fit 4 rows"),
        (
            lambda s: s.set("physics", s["physics"][:, 1:]),
            "'physics' has the shape .* another task",
        ),
        (lambda s: s.set("rng", s["rng"][:, :5]), "'rng' has the shape"),
    ],
)
def test_state_that_does_not_fit(spoil, message):
    env = slider()
    env.reset()
    before = env.get_state()
    with pytest.raises(ValueError, match=message):
        env.set_state(spoil(env.get_state()))
    assert_same(env.get_state(), before)


def test_state_dict_that_does_not_fit():
    env = slider()
    for other, message in (
        (slider(3), "the state is that of 3 environments; this has 4"),
        (ant(), "it is the state of another task|the state has no"),
        (slider(randomization=()), "the state has no .*randomization"),
    ):
        with pytest.raises(ValueError, match=message):
            env.load_state_dict(other.state_dict())


def test_get_state_of_rows_that_do_not_exist():
    with pytest.raises(ValueError, match=r"distinct and in \[0, 4\), got \[4\]"):
        slider().get_state([4])


def saved_and_loaded(env, make):
    other = make(seed=5)
    other.load_state_dict(pickle.loads(pickle.dumps(env.state_dict())))
    return other


@pytest.mark.parametrize("make", [ant, slider])
@pytest.mark.parametrize(
    "transfer",
    [
        saved_and_loaded,
        lambda env, make: pickle.loads(pickle.dumps(env)),
        lambda env, make: copy.deepcopy(env),
    ],
    ids=["state_dict", "pickle", "deepcopy"],
)
def test_checkpoints_go_on_bit_for_bit(make, transfer):
    env = make()
    _, tensordict = play(env, 9)
    env.num_unstable[1] = 3
    other = transfer(env, make)
    assert_same(other.get_state(), env.get_state())
    assert torch.equal(other.num_unstable, env.num_unstable)
    expected, _ = play(env, 20, tensordict, seed=1)
    assert expected["next", "done"].sum() >= 8
    env.close()  # the copy lives on its own
    assert_same(play(other, 20, tensordict, seed=1)[0], expected)


def test_state_dict_is_a_snapshot():
    env = slider()
    play(env, 3)
    saved = env.state_dict()
    kept = copy.deepcopy(saved)
    env.num_unstable += 1
    play(env, 3)
    for key, value in kept["_extra_state"].items():
        assert torch.equal(saved["_extra_state"][key], value), key


@pytest.mark.parametrize(
    "fields", [["opt.gravity"], ["body_mass", "geom_friction"]], ids=lambda x: x[0]
)
def test_state_dict_of_any_randomised_field(fields):
    def make(seed):
        randomization = [ModelRandomization(field, 0.5, 2.0) for field in fields]
        return MujocoBatchEnv(Slider(), 2, seed=seed, randomization=randomization)

    env, other = make(0), make(1)
    env.reset()
    other.load_state_dict(env.state_dict())
    assert_same(other.get_state(), env.get_state())


# Processes


@pytest.fixture
def _collected():
    """No environment of another test is still to be collected when a test forks."""
    gc.collect()


@pytest.mark.usefixtures("_collected")
@pytest.mark.parametrize("driver", ["batch", "threads"])
@pytest.mark.parametrize("make", [ant, slider])
def test_a_forked_child_goes_on_from_the_state(make, driver):
    env = make(driver=driver)
    _, tensordict = play(env, 9)

    def go_on():
        return play(env, 9, tensordict)[0]["next", "observation"].double().tolist()

    answer = in_fork(go_on)
    assert answer == repr(go_on())  # and the parent is none the worse for it


@pytest.mark.usefixtures("_collected")
@pytest.mark.parametrize("make", [ant, slider])
@pytest.mark.parametrize("use", [False, True])
def test_a_forked_child_can_close(make, use):
    env = make()
    _, tensordict = play(env, 2)

    def close():
        if use:
            play(env, 2, tensordict)
        env.close()
        return "closed"

    assert in_fork(close, seconds=5) == "'closed'"
    play(env, 2, tensordict)


@pytest.mark.usefixtures("_collected")
def test_a_forked_child_can_forget_environments():
    """Also those that the parent has dropped, but not collected yet."""
    envs = [ant(), slider()]
    for env in envs:
        play(env, 2)
    dropped = [ant()]
    dropped.append(dropped)  # a cycle
    del dropped, env

    def forget():
        envs.clear()
        gc.collect()
        return "collected"

    assert in_fork(forget, seconds=5) == "'collected'"
    gc.collect()
    play(envs[0], 2)


@pytest.mark.parametrize("driver", ["batch", "threads"])
def test_a_task_of_the_main_module_reaches_a_spawned_child(monkeypatch, driver):
    """Where the main module, and its classes with it, have another name."""
    monkeypatch.setattr(Slider, "__module__", "__main__")
    env = slider(driver=driver)
    play(env, 9)
    pickled = env.__getstate__()
    monkeypatch.setattr(Slider, "__module__", "__mp_main__")
    other = MujocoBatchEnv.__new__(MujocoBatchEnv)
    other.__setstate__(pickled)
    assert_same(other.reset(), env.reset())


@pytest.mark.slow
def test_a_spawned_child_goes_on_from_the_state():
    env = slider()
    play(env, 9)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pending = pool.apply_async(operator.methodcaller("reset"), (env,))
        answer = pending.get(timeout=120)
    assert_same(answer, env.reset())


def test_collector():
    env = slider(3)
    collector = Collector(
        env, RandomPolicy(env.full_action_spec), frames_per_batch=3 * 10, total_frames=3 * 20
    )
    data = torch.cat([batch.clone() for batch in collector], 1)
    assert data.shape == (3, 20)
    done = data["next", "done"][..., 0]
    carried = (data["next", "observation"][:, :-1] == data["observation"][:, 1:]).all(-1)
    assert torch.equal(carried, ~done[:, :-1])
    assert done.sum() >= 3 * 2
    # Draws change at the start of an episode, and only there.
    mass = data["randomization", "body_mass"][..., 0]
    assert torch.equal(mass[:, 1:] != mass[:, :-1], done[:, :-1])
    collector.shutdown()


@pytest.mark.slow
def test_collectors_in_worker_processes():
    make = functools.partial(MujocoBatchEnv, "Ant-v5", 3, num_threads=2)
    env = make(seed=0)
    collector = MultiSyncCollector(
        [functools.partial(make, seed=seed) for seed in (0, 1)],
        RandomPolicy(env.full_action_spec),
        frames_per_batch=2 * 3 * 5,
        total_frames=2 * 3 * 10,
        cat_results="stack",
    )
    try:
        batches = [batch.clone() for batch in collector]
    finally:
        collector.shutdown()
    assert [batch.shape for batch in batches] == [(2, 3, 5)] * 2
    starts = torch.stack([make(seed=seed).reset()["observation"] for seed in (0, 1)])
    assert torch.equal(batches[0]["observation"][:, :, 0], starts)


# The end


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def resident() -> float:
    """In MB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs Linux's /proc")


def assert_threads_end(threads: int) -> None:
    """An ended thread may linger for an instant."""
    deadline = time.monotonic() + 5.0
    while num_threads() > threads and time.monotonic() < deadline:
        time.sleep(0.002)
    assert num_threads() <= threads


@needs_proc
@pytest.mark.parametrize(("driver", "times"), [("batch", 200), ("threads", 100)])
def test_closing_frees_threads_and_memory(driver, times):
    gc.collect()
    task = Slider(model=slider_spec().compile())
    threads, memory = num_threads(), {}
    for i in range(times):
        env = MujocoBatchEnv(task, 8, num_threads=2, driver=driver)
        act(env, env.reset(), 1.0)
        assert num_threads() > threads
        env.close()
        assert_threads_end(threads)
        memory[i] = resident()
    assert memory[times - 1] - memory[times // 4] < 4


@needs_proc
@pytest.mark.parametrize("driver", ["batch", "threads"])
def test_dropping_frees_the_threads_too(driver):
    gc.collect()
    threads = num_threads()
    env = MujocoBatchEnv(Slider(), 4, num_threads=3, driver=driver)
    act(env, env.reset(), 1.0)
    assert num_threads() > threads
    del env
    gc.collect()
    assert_threads_end(threads)


@needs_proc
def test_a_constructor_that_fails_leaves_no_thread():
    gc.collect()
    threads = num_threads()
    nose = [ModelRandomization("body_mass", 1, 2, names=["nose"])]
    for _ in range(3):
        with pytest.raises(ValueError, match="no body 'nose'"):
            slider(num_threads=3, randomization=nose)
    gc.collect()
    assert_threads_end(threads)


@pytest.mark.parametrize("driver", ["batch", "threads"])
def test_use_after_close(driver):
    env = slider(driver=driver)
    data, tensordict = play(env, 3)
    kept = data.clone()
    state = env.get_state()
    env.close()
    assert env.is_closed
    uses = [
        lambda: act(env, tensordict, 0.0),
        env.reset,
        env.get_state,
        env.state_dict,
        env.render,
        lambda: env.set_state(state),
        lambda: env.reset_to([0.0], [0.0]),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match="the environment is closed"):
            use()
    assert_same(data, kept)
    env.close()  # as with other environments of TorchRL, a second time does nothing
    env.close(raise_if_closed=False)
    with pytest.raises(RuntimeError, match="closed"):
        pickle.loads(pickle.dumps(env)).reset()


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


@pytest.mark.parametrize("name", ["HalfCheetah-v5", "Hopper-v5"])
def test_state_of_another_task_of_the_same_sizes(name):
    other = "Walker2d-v5" if name == "HalfCheetah-v5" else "Hopper-v5"
    drawn = [ModelRandomization("body_mass", 0.9, 1.1)] if other == name else None
    state = MujocoBatchEnv(name, 2, randomization=drawn).state_dict()
    with pytest.raises(ValueError, match=r"another task|do not belong here"):
        MujocoBatchEnv(other, 2).load_state_dict(state)


def test_what_a_task_sees_is_read_only():
    env = MujocoBatchEnv("Hopper-v5", 2, seed=0)
    for field in ("qpos", "qvel", "ctrl"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(env._sims, field)[:] = 0.0

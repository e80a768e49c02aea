"""States of rows, checkpoints, copies."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from envs.mujoco._tasks import (
    Slider,
    act,
    ant,
    assert_same,
    play,
    slider,
)

from torchrl_trudi.envs.mujoco import ModelRandomization, MujocoBatchEnv


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


@pytest.mark.parametrize("name", ["HalfCheetah-v5", "Hopper-v5"])
def test_state_of_another_task_of_the_same_sizes(name):
    other = "Walker2d-v5" if name == "HalfCheetah-v5" else "Hopper-v5"
    drawn = [ModelRandomization("body_mass", 0.9, 1.1)] if other == name else None
    state = MujocoBatchEnv(name, 2, randomization=drawn).state_dict()
    with pytest.raises(ValueError, match=r"another task|do not belong here"):
        MujocoBatchEnv(other, 2).load_state_dict(state)

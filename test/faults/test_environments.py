"""A NaN from an environment ends one episode and reaches nothing."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from faults._tasks import NAME, Faulty, FloatDone, registered
from tensordict import TensorDict
from torchrl.envs import check_env_specs

from torchrl_trudi.envs import MujocoBatchEnv, Quarantine, get_observation_norm, make_env
from torchrl_trudi.envs.mujoco.task import make_task

pytestmark = pytest.mark.faults
STEPS = 12


@pytest.fixture(autouse=True)
def _task():
    with registered():
        yield


def roll(steps=STEPS, num_envs=3, *, seed=0, **kwargs):
    Faulty.made = 0
    env = make_env(NAME, num_envs, seed=seed, backend="gymnasium", **kwargs)
    torch.manual_seed(0)
    return env, env.rollout(steps, break_when_any_done=False)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["observation", "reward"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_the_row_ends_there_and_no_other(where, value, dtype):
    """Row 1 goes wrong in its third step; the others are as without the fault."""
    options = {"where": where, "dtype": dtype, "normalize_observation": False}
    env, data = roll(value=value, **options)
    _, sound = roll(row=-5, **options)
    assert all(entry.isfinite().all() for entry in data.values(True, True))
    following = data["next"]
    expected = torch.zeros(3, STEPS, 1, dtype=torch.bool)
    expected[1, 2] = True
    assert torch.equal(following["quarantined"], expected)
    assert not data["quarantined"].any()
    assert following["done"][1, 2] and following["terminated"][1, 2]
    assert not following["truncated"][1, 2]
    assert following["reward"][1, 2] == 0
    # The stand-in is the last finite one; the sum of rewards has what was before.
    assert torch.equal(following["observation"][1, 2], data["observation"][1, 2])
    assert following["episode_reward"][1, 2] == 3 and following["step_count"][1, 2] == 3
    # It is reset, and goes on with a whole episode.
    assert data["observation"][1, 3, 1] == 0 and data["step_count"][1, 3] == 0
    assert data["observation"][1, 3, 0] != data["observation"][1, 2, 0]
    assert following["done"][1, :, 0].nonzero().flatten().tolist() == [2, 7]
    for row in (0, 2):
        for key, entry in sound.items(True, True):
            assert torch.equal(data[row].get(key), entry[row]), key
    (quarantine,) = [m for m in env.transform.modules() if isinstance(m, Quarantine)]
    assert quarantine.num_quarantined.tolist() == [0, 1, 0]


def test_specs_and_reserved_name():
    env, _ = roll(row=-5)
    check_env_specs(env)
    assert env.observation_spec["quarantined"].shape == (3, 1)
    check_env_specs(make_env("Hopper-v5", 2, num_threads=1))


def test_raise_is_an_option():
    with pytest.raises(FloatingPointError, match=r"non-finite 'observation' in 1 of 3 rows: 1\."):
        roll(on_nonfinite="raise")
    with pytest.raises(ValueError, match="on_nonfinite"):
        make_env(NAME, on_nonfinite="ignore")


@pytest.mark.parametrize("where", ["observation", "reward"])
def test_statistics_are_those_without_the_row(where):
    """Every state counts once, but the stand-in does not."""
    env, data = roll(where=where)
    Faulty.made = 0
    raw_env = make_env(
        NAME, 3, seed=0, where=where, normalize_observation=False, backend="gymnasium"
    )
    torch.manual_seed(0)
    raw = raw_env.rollout(STEPS, break_when_any_done=False)
    sound = ~raw["next", "quarantined"].squeeze(-1)
    counted = [raw["next", "observation"][sound]]
    starts = raw["step_count"].squeeze(-1) == 0
    counted.append(raw["observation"][starts])
    # The rollout ends with an end in none of the rows, so that no reset is missing.
    states = torch.cat(counted).double()
    statistics = get_observation_norm(env).get_statistics("observation")
    assert statistics.count == len(states)
    torch.testing.assert_close(statistics.mean, states.mean(0))
    torch.testing.assert_close(statistics.var, states.var(0, correction=0))
    assert data["next", "quarantined"].sum() == 1


def test_statistics_of_a_batch_without_faults_have_the_same_bits():
    """The masked update sums in another order: it must not be the usual one."""
    env, _ = roll(row=-5)
    other, _ = roll(row=-5, on_nonfinite="raise")
    ours, theirs = (get_observation_norm(e).get_statistics("observation") for e in (env, other))
    assert torch.equal(ours.mean, theirs.mean) and torch.equal(ours.var, theirs.var)


def test_a_reset_is_tried_again_and_then_an_error():
    # The first one is reset by the seed, which nobody looks at.
    _, data = roll(at=0, episodes=1 + 2)
    assert data["observation"].isfinite().all() and not data["next", "quarantined"].any()
    _, sound = roll(row=-5)
    for row in (0, 2):
        assert torch.equal(data["step_count"][row], sound["step_count"][row])
    with pytest.raises(
        FloatingPointError, match=rf"{NAME}.*in 1 of 3 rows, 3 resets in a row: 1\."
    ):
        roll(at=0, episodes=1 + 3)


def test_a_later_reset_touches_its_row_alone():
    Faulty.made = 0
    env = make_env(NAME, 3, backend="gymnasium", normalize_observation=False, at=0, episodes=0)
    env.rollout(2, break_when_any_done=False)
    faulty = env.base_env._env.envs[1].unwrapped
    data = env.step(env.rand_action(env.reset()))
    faulty.left = 2
    state = data["next"].clone()
    state["_reset"] = torch.tensor([[False], [True], [False]])
    after = env.reset(state)
    assert after["observation"].isfinite().all()
    assert after["observation"][:, 1].tolist() == [1, 0, 1] and faulty.left == 0
    assert after["step_count"].flatten().tolist() == [1, 0, 1]


def test_warns_with_task_and_rows_not_too_often(caplog, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("torchrl_trudi.envs.quarantine.time.monotonic", lambda: clock[0])
    with caplog.at_level(logging.WARNING):
        env, _ = roll(steps=20, at=2, episodes=10**6)
        (message,) = [r.getMessage() for r in caplog.records if r.name.endswith("quarantine")]
        assert NAME in message and "1 of its rows (1)" in message
        clock[0] = 61.0
        env.rollout(4, break_when_any_done=False)
        _, message = [r.getMessage() for r in caplog.records if r.name.endswith("quarantine")]
    assert "10 such steps since" in message  # nine of the rest, and this one


@pytest.mark.parametrize("flag", ["done", "terminated", "truncated"])
def test_flags_that_are_neither_true_nor_false(flag):
    env, transform = FloatDone(flag), Quarantine(["observation"])
    root = transform._reset(None, env._reset(None))
    for time in (1, 2):
        following = transform._step(root, env._step(root))
        assert following["quarantined"].flatten().tolist() == [time == 2, False]
    assert following["observation"].flatten().tolist() == [1, 2]
    assert following["reward"].flatten().tolist() == [0, 2]
    for key, expected in (("done", 1), ("terminated", 1), ("truncated", 0)):
        assert following[key].flatten().tolist() == [expected, 0]


class TestMujoco:
    def test_a_simulation_that_diverges(self):
        env = make_env("InvertedPendulum-v5", 3, seed=0, num_threads=1)
        env.rollout(2)
        norm = get_observation_norm(env).get_statistics("observation")
        before = norm.count.item()
        tensordict = env.step(env.rand_action(env.reset()))
        env.base_env._driver.bind("qvel")[1] = np.nan
        tensordict = env.step(env.rand_action(env.step_mdp(tensordict)))
        following = tensordict["next"]
        assert following["quarantined"].flatten().tolist() == [False, True, False]
        assert torch.equal(following["quarantined"], following["unstable"])
        assert following["terminated"].flatten().tolist() == [False, True, False]
        assert norm.count.item() == before + 3 + 3 + 2
        _, root = env.step_and_maybe_reset(
            env.rand_action(env.maybe_reset(env.step_mdp(tensordict)))
        )
        assert root["observation"].isfinite().all() and norm.mean.isfinite().all()

    def test_raise(self):
        env = make_env("InvertedPendulum-v5", 3, num_threads=1, on_nonfinite="raise")
        tensordict = env.reset()
        env.base_env._driver.bind("qvel")[1] = np.nan
        with pytest.raises(FloatingPointError, match="marked rows as 'unstable' in 1 of 3 rows: 1"):
            env.step(env.rand_action(tensordict))

    @pytest.mark.parametrize("attempts", [1, 3])
    @pytest.mark.parametrize("name", ["qpos", "observation"])
    def test_a_reset_is_tried_again(self, attempts, name, monkeypatch):
        """The first two initial states of row 1 are not finite."""
        task = make_task("InvertedPendulum-v5", {})
        env = MujocoBatchEnv(task, 3, seed=0, num_threads=1, reset_attempts=attempts)
        sound = env.reset()["observation"]
        env.set_seed(0)
        calls = []
        if name == "qpos":
            draw = task.initial_state

            def initial_state(sims, rng):
                qpos, qvel = draw(sims, rng)
                calls.append(len(qpos))
                if len(calls) < 3:
                    qpos[1 if len(qpos) == 3 else 0] = np.nan
                return qpos, qvel

            monkeypatch.setattr(task, "initial_state", initial_state)
        else:
            observe = task.observation

            def observation(sims):
                out = [np.array(part) for part in observe(sims)]
                calls.append(len(out[0]))
                if len(calls) < 3:
                    out[0][1 if calls[-1] == 3 else 0] = np.inf
                return out

            monkeypatch.setattr(task, "observation", observation)
        if attempts == 1:
            with pytest.raises(FloatingPointError, match=r"in the rows \[1\]"):
                env.reset()
            return
        after = env.reset()["observation"]
        assert calls == [3, 1, 1]
        assert torch.equal(after[[0, 2]], sound[[0, 2]])
        assert after[1].isfinite().all() and not torch.equal(after[1], sound[1])


def test_in_a_buffer_it_does_nothing():
    data = TensorDict({"observation": torch.full((2, 1), torch.nan)}, [2])
    assert Quarantine(["observation"])(data) is data
    with pytest.raises(ValueError, match="reset_attempts"):
        Quarantine(["observation"], reset_attempts=0)


def test_steps_that_wait_are_not_ended():
    """TorchRL steps some rows while others wait, with the numbers of before."""
    transform = Quarantine(["observation"])
    root = TensorDict({"observation": torch.zeros(2, 1)}, [2])
    transform._reset(None, root.clone())
    root["_step"] = torch.tensor([False, True])
    following = TensorDict(
        {
            "observation": torch.full((2, 1), torch.nan),
            "reward": torch.zeros(2, 1),
            "done": torch.zeros(2, 1, dtype=torch.bool),
        },
        [2],
    )
    assert transform._step(root, following)["quarantined"].flatten().tolist() == [False, True]


def test_without_a_first_reset():
    transform = Quarantine(["observation"])
    following = TensorDict({"observation": torch.full((2, 1), torch.nan)}, [2])
    assert (transform._step(TensorDict({}, [2]), following)["observation"] == 0).all()

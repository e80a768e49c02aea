"""The shortcuts through TorchRL's step and reset change nothing."""

from __future__ import annotations

import pytest
import torch
from envs.mujoco._tasks import assert_same, slider
from tensordict import TensorDict
from torchrl.envs import Compose, EnvBase, RewardSum, StepCounter, TransformedEnv

from torchrl_trudi.envs.mujoco._complete_outputs import CompleteOutputs

SHORTCUTS = ("_complete_done", "_step_proc_data", "maybe_reset")


def play_with_others(env, base_env, elapsed, steps):
    """Steps with tensordicts that carry entries which are not the environment's own."""
    generator = torch.Generator().manual_seed(0)
    num_envs = env.batch_size[0]

    def draw(*shape):
        return torch.rand(num_envs, *shape, generator=generator)

    tensordict, data = env.reset(), []
    state = base_env.get_state()
    state["elapsed_steps"] = torch.tensor(elapsed)
    base_env.set_state(state)
    for step in range(steps):
        tensordict["action"] = 2 * draw(1) - 1
        tensordict["hidden"] = draw(2, 3)
        tensordict["flag"] = torch.ones(num_envs, dtype=torch.bool)
        tensordict["policy", "count"] = torch.full((num_envs, 1), step)
        stepped, tensordict = env.step_and_maybe_reset(tensordict)
        data.append((stepped.clone(), tensordict.clone()))
    return data


@pytest.mark.parametrize("transformed", [False, True])
@pytest.mark.parametrize("elapsed", [[0], [0, 0, 0], [0, 2, 2, 3, 6]])
def test_same_as_without_them(elapsed, transformed, monkeypatch):
    def play():
        env = base_env = slider(len(elapsed))
        if transformed:
            env = TransformedEnv(env, Compose(RewardSum(), StepCounter()))
        return play_with_others(env, base_env, elapsed, 30)

    data = play()
    for name in SHORTCUTS:
        assert name in vars(CompleteOutputs)
        monkeypatch.delattr(CompleteOutputs, name)
    expected = play()
    ended = torch.stack([stepped["next", "done"] for stepped, _ in data]).squeeze(-1)
    assert ended.any()
    apart = ended.any(1) & ~ended.all(1)
    assert apart.any() == (len(set(elapsed)) > 1)
    for got, wanted in zip(data, expected, strict=True):
        assert_same(got[0], wanted[0])
        assert_same(got[1], wanted[1])


def test_only_rows_that_are_done_are_written_to():
    """Also where the others hold something that the environment did not return."""
    env = slider(3)
    tensordict = env.reset()
    observation = torch.full_like(tensordict["observation"], 7.0)
    tensordict["observation"] = observation
    tensordict["done"] = torch.tensor([[False], [True], [False]])
    assert env.maybe_reset(tensordict) is tensordict
    assert tensordict["observation"][[0, 2]].eq(7.0).all()
    assert tensordict["observation"][1].ne(7.0).all()
    assert not tensordict["done"].any()
    assert "_reset" not in tensordict
    assert observation.eq(7.0).all()  # the tensor that was given


def test_tensordicts_without_all_entries_take_the_long_way():
    env = slider(2)
    env.reset()
    done = torch.tensor([[True], [False]])
    made = env.maybe_reset(TensorDict({"done": done, "truncated": done, "terminated": done}, [2]))
    assert made["observation"][0].abs().sum() > 0
    assert not made["done"].any()
    with pytest.raises(RuntimeError, match="batch"):
        env.maybe_reset(TensorDict({"done": torch.ones(3, 1, dtype=torch.bool)}, [3]))


def test_without_a_row_that_is_done_nothing_is_reset(monkeypatch):
    env = slider(2)
    tensordict = env.reset()
    monkeypatch.setattr(env, "_reset", None)
    before = tensordict.clone()
    assert env.maybe_reset(tensordict) is tensordict
    assert_same(tensordict, before)


def test_type_checks_are_made_if_asked_for(monkeypatch):
    env = slider(2)
    env.run_type_checks = True
    seen = []
    original = EnvBase._step_proc_data
    monkeypatch.setattr(
        EnvBase, "_step_proc_data", lambda self, data: (seen.append(1), original(self, data))[1]
    )
    env.rollout(2)
    assert len(seen) == 2

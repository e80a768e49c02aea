from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import (
    Compose,
    EnvBase,
    ExplorationType,
    RewardScaling,
    RewardSum,
    TransformedEnv,
    VecNormV2,
    exploration_type,
    set_exploration_type,
)

from torchrl_trudi.envs import get_observation_norm, make_env
from torchrl_trudi.record import EvaluationResult, evaluate


class Lengths(EnvBase):
    """Row ``i`` has episodes of the ``lengths[i]`` in turn; each step is worth the action.

    Args:
        lengths (list[list[int]]): lengths of the successive episodes of each row, repeated.
    """

    def __init__(self, lengths):
        super().__init__(batch_size=[len(lengths)])
        self.lengths = lengths
        shape = (len(lengths), 1)
        self.observation_spec = Composite(observation=Unbounded(shape), shape=shape[:1])
        self.action_spec = Bounded(-9.0, 9.0, shape)
        self.reward_spec = Unbounded(shape)
        self.full_done_spec = Composite(
            {
                key: Categorical(2, shape=shape, dtype=torch.bool)
                for key in ("done", "terminated", "truncated")
            },
            shape=shape[:1],
        )
        self._set_seed(None)

    def _set_seed(self, seed):
        self.seed = seed
        self.step_count = [0] * len(self.lengths)
        self.episode = [-1] * len(self.lengths)

    def _observe(self):
        return torch.tensor(self.step_count, dtype=torch.float32)[:, None]

    def _reset(self, tensordict=None):
        mask = None if tensordict is None else tensordict.get("_reset", None)
        for i in range(len(self.lengths)):
            if mask is None or mask[i]:
                self.step_count[i], self.episode[i] = 0, self.episode[i] + 1
        return TensorDict({"observation": self._observe()}, self.batch_size)

    def _step(self, tensordict):
        self.step_count = [n + 1 for n in self.step_count]
        now = [row[k % len(row)] for row, k in zip(self.lengths, self.episode, strict=True)]
        done = torch.tensor(self.step_count)[:, None] >= torch.tensor(now)[:, None]
        even = torch.arange(len(now))[:, None] % 2 == 0
        return TensorDict(
            {
                "observation": self._observe(),
                "reward": tensordict["action"].clone(),
                "done": done,
                "terminated": done & even,
                "truncated": done & ~even,
            },
            self.batch_size,
        )


def one(tensordict):
    return tensordict.set("action", torch.ones(*tensordict.shape, 1, device=tensordict.device))


def make(lengths, *transforms):
    return TransformedEnv(Lengths(lengths), Compose(RewardSum(), *transforms))


def test_each_row_contributes_as_many_episodes_however_long():
    # Row 0 ends 8 times before row 1 ends once: the first four to end would all be of length 1.
    result = evaluate(make([[1], [8]]), one, 4)
    assert result.returns.tolist() == [1.0, 8.0, 1.0, 8.0]
    assert result.lengths.tolist() == [1, 8, 1, 8]
    assert result.terminated.tolist() == [True, False, True, False]


@pytest.mark.parametrize("num_episodes", range(1, 8))
def test_any_number_of_episodes(num_episodes):
    # Episode k of row i has length 10 * i + k + 1: every slot can be told apart.
    lengths = [[10 * i + k + 1 for k in range(4)] for i in range(3)]
    result = evaluate(make(lengths), one, num_episodes)
    expected = [lengths[e % 3][e // 3] for e in range(num_episodes)]
    assert result.num_episodes == num_episodes
    assert result.lengths.tolist() == expected
    assert result.returns.tolist() == expected


def test_no_bias_towards_short_episodes():
    # Half of all episodes of every row last 1 step and half 9: the mean is 5 and not below.
    lengths = [[1, 9], [9, 1]] * 4
    assert evaluate(make(lengths), one, 16).mean == 5.0


def test_returns_are_in_the_units_of_the_task():
    env = make([[3], [2]], RewardScaling(loc=0.0, scale=0.01))
    assert evaluate(env, one, 2).returns.tolist() == [3.0, 2.0]


def test_max_steps_cuts_and_resets():
    result = evaluate(make([[2], [1000]]), one, 4, max_steps=5)
    assert result.lengths.tolist() == [2, 5, 2, 5]
    assert result.returns.tolist() == [2.0, 5.0, 2.0, 5.0]
    assert result.terminated.tolist() == [True, False, True, False]


class Policy(TensorDictModule):
    """Records what it is run under; its `frozen_part` is in eval mode while it trains."""

    def __init__(self, fail=False):
        module = nn.Linear(1, 1)
        super().__init__(module, in_keys=["observation"], out_keys=["action"])
        self.frozen_part, self.fail = nn.Dropout().eval(), fail
        self.seen = []

    def forward(self, tensordict):
        self.seen.append((self.module.training, torch.is_grad_enabled(), exploration_type()))
        if self.fail:
            raise RuntimeError("boom")
        return super().forward(tensordict)


@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize("kind", [ExplorationType.DETERMINISTIC, ExplorationType.RANDOM])
@pytest.mark.filterwarnings("ignore:Support of VecNormV2")
def test_modes_are_set_and_put_back(kind, fail):
    policy = Policy(fail)
    thawed, frozen = (
        VecNormV2(in_keys=["observation"], out_keys=[key], reduce_batch_dims=True)
        for key in ("a", "b")
    )
    frozen.freeze()
    env = make([[2], [3]], thawed, frozen)
    with set_exploration_type(ExplorationType.MEAN):
        if fail:
            with pytest.raises(RuntimeError, match="boom"):
                evaluate(env, policy, 2, exploration_type=kind)
        else:
            evaluate(env, policy, 2, exploration_type=kind)
        assert exploration_type() is ExplorationType.MEAN
    assert set(policy.seen) == {(False, False, kind)}
    assert policy.training
    assert policy.module.training
    assert not policy.frozen_part.training
    assert torch.is_grad_enabled()
    assert not thawed.frozen
    assert frozen.frozen


@pytest.mark.filterwarnings("ignore:Support of VecNormV2")
def test_statistics_are_not_touched():
    norm = VecNormV2(in_keys=["observation"], reduce_batch_dims=True)
    env = make([[2], [3]], norm)
    env.rollout(3)
    before = norm._loc.clone(), norm._var.clone(), norm._count.clone()
    evaluate(env, one, 6)
    for now, then in zip((norm._loc, norm._var, norm._count), before, strict=True):
        assert (now == then).all()


def test_with_make_env():
    env = make_env("Pendulum-v1", 2, seed=0, reward_scale=0.1, max_episode_steps=4)
    env.rollout(3)
    before = {key: value.clone() for key, value in env.state_dict().items()}
    with set_exploration_type(ExplorationType.RANDOM):
        result, again = (evaluate(env, one, 5, max_steps=3, seed=3) for _ in range(2))
    assert not get_observation_norm(env).frozen
    assert all(torch.equal(value, before[key]) for key, value in env.state_dict().items())
    assert result.lengths.tolist() == [3] * 5
    assert torch.equal(result.returns, again.returns)
    assert result.returns.unique().numel() == 5
    # In the units of the task: those of an environment without scaling.
    raw = evaluate(
        make_env("Pendulum-v1", 2, normalize_observation=False), one, 5, max_steps=3, seed=3
    )
    assert torch.equal(result.returns, raw.returns)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda():
    env = make_env("Pendulum-v1", 3, seed=0, device="cuda", max_episode_steps=4)
    data = env.rollout(9, break_when_any_done=False)
    assert data.device.type == "cuda"
    assert get_observation_norm(env).get_statistics("observation").count.item() == 3 * (1 + 9 + 2)
    assert evaluate(env, one, 4, max_steps=3).lengths.tolist() == [3] * 4


def test_seed():
    env = make([[1, 2], [3, 4]])
    first = evaluate(env, one, 2, seed=5)
    evaluate(env, one, 1)
    assert env.base_env.seed == 5
    again = evaluate(env, one, 2, seed=5)
    assert torch.equal(first.returns, again.returns)


def test_env_without_batch_dimension():
    env = TransformedEnv(Lengths([[2, 3]]), Compose(RewardSum()))
    assert evaluate(env, one, 2).lengths.tolist() == [2, 3]


def test_summary():
    result = EvaluationResult(
        torch.tensor([1.0, 5.0]), torch.tensor([4, 6]), torch.tensor([True, True])
    )
    assert (result.mean, result.std, result.min, result.max) == (3.0, 2.0, 1.0, 5.0)
    assert result.to_dict("test") == {
        "test/return_mean": 3.0,
        "test/return_std": 2.0,
        "test/return_min": 1.0,
        "test/return_max": 5.0,
        "test/length_mean": 5.0,
        "test/terminated_fraction": 1.0,
    }
    single = EvaluationResult(torch.ones(1), torch.ones(1), torch.ones(1))
    assert single.std == 0.0


def test_bad_input():
    env = make([[2]])
    with pytest.raises(ValueError, match="num_episodes must be at least 1, got 0"):
        evaluate(env, one, 0)
    with pytest.raises(ValueError, match="max_steps must be at least 1, got 0"):
        evaluate(env, one, 1, max_steps=0)
    with pytest.raises(ValueError, match=r"'episode_reward'; append torchrl\.envs\.RewardSum"):
        evaluate(Lengths([[2]]), one, 1)

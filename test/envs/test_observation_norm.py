from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import StepCounter, TransformedEnv, VecNormV2, check_env_specs
from torchrl.envs.utils import RandomPolicy

from torchrl_trudi.envs import (
    RunningMeanVar,
    RunningObservationNorm,
    get_observation_norm,
    make_env,
)


def make(num_envs=3, **kwargs):
    return make_env("TestCounter-v0", num_envs, seed=0, backend="gymnasium", **kwargs)


def raw_states(rollout):
    """All states of a raw [E, T] rollout, each once: first ones, next ones, reset ones."""
    starts = rollout["step_count"][..., 0] == 0
    return torch.cat(
        [rollout["observation"][starts], rollout["next", "observation"].flatten(0, 1)]
    ).double()


def test_every_state_is_counted_exactly_once():
    steps = 8  # not a multiple of the episode length: the last row starts no episode
    env = make()
    env.rollout(steps, break_when_any_done=False)
    raw = make(normalize_observation=False).rollout(steps, break_when_any_done=False)
    states = raw_states(raw)
    stats = get_observation_norm(env).get_statistics("observation")
    assert stats.count.item() == len(states) == 3 * (1 + steps + 2)
    torch.testing.assert_close(stats.mean, states.mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(stats.var, states.var(0, correction=0), rtol=1e-10, atol=0)


def test_partial_reset_counts_the_rows_that_are_reset():
    env = make()
    stats = get_observation_norm(env).get_statistics("observation")
    tensordict = env.reset()
    assert stats.count.item() == 3
    before, mean = tensordict["observation"].clone(), stats.mean.clone()
    tensordict["_reset"] = torch.tensor([[False], [True], [False]])
    tensordict = env.reset(tensordict)
    assert stats.count.item() == 4
    assert not torch.equal(stats.mean, mean)
    # Rows that go on keep the value they had, normalised at the time.
    kept = torch.tensor([True, False, True])
    assert torch.equal(tensordict["observation"][kept], before[kept])
    assert not torch.equal(tensordict["observation"][1], before[1])


def test_values_are_those_of_the_updated_statistics():
    env, raw_env = make(), make(normalize_observation=False)
    stats = get_observation_norm(env).get_statistics("observation")
    tensordict, raw = env.reset(), raw_env.reset()
    torch.testing.assert_close(tensordict["observation"], stats.normalize(raw["observation"]))
    tensordict = env.rand_action(tensordict)
    raw["action"] = tensordict["action"]
    following = env.step(tensordict)["next"]
    expected = stats.normalize(raw_env.step(raw)["next", "observation"])
    assert torch.equal(following["observation"], expected)


@pytest.mark.parametrize("frames", [30, 24])
def test_collector_counts_each_state_once(frames):
    env = make()
    stats = get_observation_norm(env).get_statistics("observation")
    collector = Collector(
        env, RandomPolicy(env.full_action_spec), frames_per_batch=frames, total_frames=2 * frames
    )
    dones = sum(int(data["next", "done"].sum()) for data in collector)
    assert dones > 0
    assert stats.count.item() == 3 + 2 * frames + dones


def test_building_and_specs_count_nothing():
    env = make()
    env.fake_tensordict()
    env.observation_spec.zero()
    assert get_observation_norm(env).get_statistics("observation").count == 0
    env.set_seed(3)
    assert get_observation_norm(env).get_statistics("observation").count == 0


def test_frozen_counts_nothing_and_normalises():
    env = make()
    env.rollout(5)
    norm = get_observation_norm(env).freeze()
    before = {key: value.clone() for key, value in norm.state_dict().items()}
    rollout = env.rollout(5)
    for key, value in norm.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert rollout["next", "observation"].abs().max() < 5
    assert not norm.unfreeze().frozen
    env.rollout(5)
    count = norm.get_statistics("observation").count
    assert count > before["statistics.observation.count"]


def test_train_and_eval_mode_do_not_decide():
    env = make()
    env.train()
    env.eval()
    env.rollout(2)
    assert get_observation_norm(env).get_statistics("observation").count == 9


def test_evaluation_env_shares_live_statistics():
    env = make()
    norm = get_observation_norm(env)
    eval_env = make(training=False, observation_norm=norm)
    env.rollout(3)
    count = norm.get_statistics("observation").count.item()
    eval_env.rollout(3)
    assert norm.get_statistics("observation").count.item() == count
    raw = make(normalize_observation=False).reset()["observation"]
    eval_env.set_seed(0)
    expected = norm.get_statistics("observation").normalize(raw)
    assert torch.equal(eval_env.reset()["observation"], expected)
    # A second training environment adds to the same statistics.
    make(observation_norm=norm).rollout(1)
    assert norm.get_statistics("observation").count.item() == count + 6


def test_frozen_without_statistics_says_so():
    env = make(training=False)
    with pytest.raises(RuntimeError, match="statistics of 'observation' are empty"):
        env.reset()
    trained = make()
    trained.rollout(3)
    env.load_state_dict(trained.state_dict())
    assert env.reset()["observation"].isfinite().all()


def test_state_dict_round_trip_of_the_env():
    env, other = make(), make()
    env.rollout(7, break_when_any_done=False)
    other.load_state_dict(env.state_dict())
    for name in ("count", "mean", "var"):
        source = getattr(get_observation_norm(env).get_statistics("observation"), name)
        target = getattr(get_observation_norm(other).get_statistics("observation"), name)
        assert torch.equal(source, target), name


@pytest.mark.filterwarnings("ignore:Nested TransformedEnvs")
def test_wrapping_again_keeps_the_statistics():
    env = make()
    stats = get_observation_norm(env).get_statistics("observation")
    wrapped = TransformedEnv(env, StepCounter(step_count_key="other_count"))
    wrapped.rollout(2)
    assert get_observation_norm(wrapped).get_statistics("observation") is stats
    assert stats.count == 9


def test_partial_step_counts_the_rows_that_step():
    norm = RunningObservationNorm({"x": RunningMeanVar((1,))})
    tensordict = TensorDict({"_step": torch.tensor([[True], [False]])}, [2])
    norm._step(tensordict, TensorDict({"x": torch.tensor([[1.0], [9.0]])}, [2]))
    assert norm.get_statistics("x").count == 1
    assert norm.get_statistics("x").mean == 1.0


def test_replay_buffer_normalises_and_never_updates():
    norm = RunningObservationNorm({"x": RunningMeanVar((1,))})
    norm.get_statistics("x").update(torch.tensor([[0.0], [2.0]]))
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), transform=norm, batch_size=2)
    buffer.extend(TensorDict({"x": torch.full((4, 1), 2.01)}, [4]))
    torch.testing.assert_close(buffer.sample()["x"], torch.ones(2, 1))
    assert norm.get_statistics("x").count == 2


def test_out_keys_keep_the_raw_value_and_specs_hold():
    base = make(normalize_observation=False)
    norm = RunningObservationNorm({"observation": RunningMeanVar((2,))}, out_keys=["normalised"])
    env = TransformedEnv(base, norm)
    check_env_specs(env)
    tensordict = env.reset()
    assert (tensordict["observation"][:, 1] == 0).all()
    assert tensordict["normalised"].shape == (3, 2)


def test_nested_keys_have_their_own_statistics():
    norm = RunningObservationNorm({("a", "b"): RunningMeanVar(()), "a_b": RunningMeanVar(())})
    norm._call(TensorDict({"a": {"b": torch.ones(2)}, "a_b": torch.full((2,), 3.0)}, [2]))
    assert norm.get_statistics(("a", "b")).mean == 1.0
    assert norm.get_statistics("a_b").mean == 3.0
    assert "statistics.a/b.mean" in norm.state_dict()


def test_bad_input():
    with pytest.raises(ValueError, match="at least one key"):
        RunningObservationNorm({})
    with pytest.raises(ValueError, match="one entry per key"):
        RunningObservationNorm({"x": RunningMeanVar(())}, out_keys=["y", "z"])
    norm = RunningObservationNorm({"x": RunningMeanVar(())})
    with pytest.raises(KeyError, match=r"'y' is not normalised here; the keys are \['x'\]"):
        norm.get_statistics("y")
    with pytest.raises(KeyError, match="'x' is not in the tensordict"):
        norm._call(TensorDict({}, [2]))


# What keeps us from torchrl's own transform. When one of these fails, upstream has changed: look
# again whether it can replace ours.


@pytest.mark.filterwarnings("ignore:Support of VecNormV2")
def test_upstream_vecnorm_counts_rows_that_are_not_reset():
    base = make(normalize_observation=False)
    norm = VecNormV2(in_keys=["observation"], decay=1.0, reduce_batch_dims=True)
    env = TransformedEnv(base, norm)
    tensordict = env.reset()
    tensordict["_reset"] = torch.tensor([[False], [True], [False]])
    env.reset(tensordict)
    assert norm._count["observation"] == 6  # 4 states were seen


@pytest.mark.filterwarnings("ignore:Support of VecNormV2")
def test_upstream_vecnorm_loses_the_variance_of_offset_data():
    env = make(normalize_observation=False)
    norm = VecNormV2(in_keys=["observation"], decay=1.0, reduce_batch_dims=True)
    env = TransformedEnv(env, norm)
    for i in range(200):
        value = 1e4 + torch.tensor([0.0, 1.0, i % 2])
        norm._step(None, TensorDict({"observation": value[:, None].expand(3, 2).clone()}, [3]))
    variance = (norm._var - norm._loc.pow(2))["observation"]
    assert ((variance - 0.25).abs() > 0.1).all()

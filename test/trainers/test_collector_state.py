"""The place of a collector between two batches."""

from __future__ import annotations

import inspect

import pytest
import torch
from torchrl.collectors import Collector

from torchrl_trudi.envs import make_env
from torchrl_trudi.trainers.collector_state import CollectorState

pytestmark = pytest.mark.resume


def make(seed=0, num_envs=3, name="Hopper-v5", **kwargs):
    torch.manual_seed(seed)
    env = make_env(name, num_envs=num_envs, seed=seed, max_episode_steps=7, **kwargs)
    collector = Collector(env, None, frames_per_batch=5 * num_envs, total_frames=-1)
    return env, collector, iter(collector)


def test_the_next_batches_are_the_same():
    # The normaliser is a part of its own.
    env, collector, batches = make(normalize_observation=False)
    for _ in range(2):
        next(batches)
    state = CollectorState(collector, env).state_dict()
    torch.manual_seed(5)
    expected = [next(batches).clone() for _ in range(3)]
    other_env, other, other_batches = make(seed=9, normalize_observation=False)
    next(other_batches)
    place = CollectorState(other, other_env)
    place.load_state_dict(state)
    assert place.restored
    torch.manual_seed(5)
    for batch in expected:
        found = next(other_batches)
        assert (found["next", "done"] == batch["next", "done"]).all()
        for key, value in batch.items(True, True):
            if "traj_ids" not in key:
                assert torch.equal(found[key], value), key


def test_state_is_a_copy():
    env, collector, batches = make()
    next(batches)
    state = CollectorState(collector, env).state_dict()
    before = {key: value.clone() for key, value in state["carrier"].items()}
    next(batches)
    assert {"observation", "step_count", "episode_reward"} <= set(before)
    assert all(torch.equal(value, before[key]) for key, value in state["carrier"].items())


def test_other_environments_start_anew(caplog):
    env, collector, _ = make(name="InvertedPendulum-v5", backend="gymnasium")
    place = CollectorState(collector, env)
    state = place.state_dict()
    assert not state["exact"]
    place.load_state_dict(state)
    assert not place.restored and "new episodes start" in caplog.text


def test_another_number_of_environments_starts_anew(caplog):
    env, collector, _ = make()
    state = CollectorState(collector, env).state_dict()
    other, its_collector, _ = make(num_envs=2)
    place = CollectorState(its_collector, other)
    place.load_state_dict(state)
    assert not place.restored and "has 3 environments, this run 2" in caplog.text


def test_another_task_is_refused():
    env, collector, _ = make()
    state = CollectorState(collector, env).state_dict()
    other, its_collector, _ = make(name="Walker2d-v5")
    with pytest.raises(ValueError, match="another task"):
        CollectorState(its_collector, other).load_state_dict(state)


def test_torchrl_still_leaves_out_the_environments():
    """When this fails, ``Collector.state_dict`` has learned what ``CollectorState`` works around."""
    assert "not generally serializable" in inspect.getsource(Collector.load_state_dict)

"""Forked and spawned processes, collectors, and what closing an environment leaves behind."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import operator
import os
import pickle
import time

import pytest
import torch
from envs.mujoco._tasks import (
    Slider,
    act,
    ant,
    assert_same,
    in_fork,
    play,
    slider,
    slider_spec,
)
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.envs.utils import RandomPolicy

from torchrl_trudi.envs.mujoco import ModelRandomization, MujocoBatchEnv

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

"""The choice between MujocoBatchEnv and Gymnasium in make_env, and what differs between them."""

from __future__ import annotations

import copy
import sys
import textwrap
import warnings

import gymnasium
import numpy as np
import pytest
import torch
from torchrl.envs import ActionScaling, DoubleToFloat, check_env_specs

from torchrl_trudi.envs import (
    FiniteCheck,
    ModelRandomization,
    MujocoBatchEnv,
    Quarantine,
    get_observation_norm,
    make_env,
)
from torchrl_trudi.envs._gymnasium import GymnasiumVectorEnv
from torchrl_trudi.envs.mujoco import task

MASS = ModelRandomization("body_mass", 0.5, 2.0, names=["torso"])


@pytest.fixture(autouse=True)
def _working_directory(tmp_path, monkeypatch) -> None:
    """Gymnasium lets MuJoCo write its warnings to a file in the working directory."""
    monkeypatch.chdir(tmp_path)


def rollout(env, steps, seed=0):
    torch.manual_seed(seed)
    return env.rollout(steps, break_when_any_done=False)


def backend_of(env) -> type:
    return type(env.base_env)


# The choice


@pytest.mark.parametrize("name", ["Hopper-v5", "Humanoid-v5", "InvertedPendulum-v5"])
def test_tasks_of_mujoco_run_there_without_a_word(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backend_of(make_env(name, 2)) is MujocoBatchEnv
        assert backend_of(make_env(name, 2, backend="mujoco")) is MujocoBatchEnv


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"name": "Pendulum-v1"}, "Pendulum-v1 .*: it is not one of its tasks"),
        ({"name": "Hopper-v4"}, "Hopper-v4 .*: it is not one of its tasks"),
        ({"name": "TestCounter-v0", "length": 5}, "TestCounter-v0"),
        ({"name": "Hopper-v5", "render_mode": "rgb_array"}, "it has no option 'render_mode'"),
        ({"name": "Hopper-v5", "width": 3, "camera_id": 0}, "it has no option 'camera_id'"),
    ],
)
def test_others_run_in_gymnasium_with_one_warning(kwargs, reason):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        env = make_env(**kwargs, num_envs=2)
    assert backend_of(env) is GymnasiumVectorEnv
    ours = [entry for entry in caught if "MujocoBatchEnv" in str(entry.message)]
    assert [entry.category for entry in ours] == [UserWarning]
    assert ours[0].filename == __file__  # where make_env was called
    with pytest.warns(UserWarning, match=f"{reason}.*backend='gymnasium' asks for that"):
        make_env(**kwargs, num_envs=1)


@pytest.mark.parametrize("name", ["Hopper-v5", "Pendulum-v1"])
def test_who_asks_for_gymnasium_gets_it_without_a_word(name):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*MujocoBatchEnv")
        assert backend_of(make_env(name, 2, backend="gymnasium")) is GymnasiumVectorEnv


def test_async_is_gymnasium():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*MujocoBatchEnv")
        env = make_env("InvertedPendulum-v5", 1, vectorization="async")
    try:
        assert backend_of(env) is GymnasiumVectorEnv
    finally:
        env.close()
    with pytest.raises(ValueError, match=r"vectorization='async' belongs to backend='gymnasium'"):
        make_env("InvertedPendulum-v5", 1, vectorization="async", backend="mujoco")


@pytest.mark.parametrize("options", [{"num_threads": 2}, {"randomization": [MASS]}], ids=str)
@pytest.mark.parametrize(
    "kwargs",
    [
        {"name": "Hopper-v5", "backend": "gymnasium"},
        {"name": "Hopper-v5", "vectorization": "async"},
        {"name": "Pendulum-v1"},
    ],
)
@pytest.mark.filterwarnings("ignore:.*MujocoBatchEnv:UserWarning")
def test_options_of_mujoco_alone(kwargs, options):
    with pytest.raises(
        ValueError, match="num_threads and randomization belong to backend='mujoco'"
    ):
        make_env(**kwargs, **options)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        (
            {"backend": "mojoco"},
            ValueError,
            r"\['auto', 'mujoco', 'gymnasium'\]. Did you mean 'muj",
        ),
        (
            {"backend": "mujoco", "name": "Pendulum-v1"},
            ValueError,
            "'Pendulum-v1' is not a task of M",
        ),
        ({"backend": "mujoco", "name": "Hoper-v5"}, ValueError, "mean 'Hopper-v5'"),
        ({"helthy_reward": 3}, TypeError, "'helthy_reward'; it accepts .*'healthy_reward'.*mean '"),
        ({"dtype": torch.float64}, TypeError, r"make_env does not accept \['dtype'\]"),
        ({"driver": "threads"}, TypeError, r"make_env does not accept \['driver'\]"),
        ({"num_threads": 0}, ValueError, "num_threads must be an integer of at least 1"),
        ({"num_threads": "2"}, TypeError, "num_threads .* got '2'"),
        ({"randomization": ["body_mass"]}, TypeError, "must hold ModelRandomization"),
        ({"randomization": [ModelRandomization("body_mas", 1, 2)]}, ValueError, "body_mas"),
        ({"observation_keys": ["unstable"]}, ValueError, r"'unstable' cannot.*\['observation'\]"),
        ({"name": "no_such_module:Hopper-v5"}, ValueError, "no_such_module.*cannot be imported"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_bad_arguments(kwargs, error, message):
    with pytest.raises(error, match=message):
        make_env(**{"name": "Hopper-v5", **kwargs})


@pytest.mark.filterwarnings("ignore:.*MujocoBatchEnv:UserWarning")
def test_an_option_that_neither_has():
    """Gymnasium lists those it has."""
    with pytest.raises(TypeError, match="'lenght'; it accepts .*'length'.*Did you mean 'length'"):
        make_env("TestCounter-v0", lenght=3)
    with pytest.raises(TypeError, match="'healthy_rewad'.*Did you mean 'healthy_reward'"):
        make_env("Hopper-v5", backend="gymnasium", healthy_rewad=3)


def test_tasks_of_modules(tmp_path, monkeypatch):
    monkeypatch.setattr(task, "_REGISTRY", dict(task._REGISTRY))
    (tmp_path / "module_of_a_task.py").write_text(
        textwrap.dedent(
            """
            from torchrl_trudi.envs.mujoco import register_task
            from torchrl_trudi.envs.mujoco.tasks import Hopper

            class Lazy(Hopper):
                def __init__(self, weight=2.0):
                    super().__init__(ctrl_cost_weight=weight)

            register_task("Lazy-v0", Lazy)
            """
        )
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "module_of_a_task", raising=False)
    env = make_env("module_of_a_task:Lazy-v0", 2, weight=7.0)
    assert backend_of(env) is MujocoBatchEnv
    assert env.base_env.task.ctrl_cost_weight == 7.0
    assert backend_of(make_env("module_of_a_task:Lazy-v0", 2, backend="mujoco")) is MujocoBatchEnv
    monkeypatch.delitem(sys.modules, "module_of_a_task")


# The environments


@pytest.mark.parametrize("backend", ["mujoco", "gymnasium"])
def test_both_fulfil_the_contract(backend):
    env = make_env("Hopper-v5", 3, backend=backend, seed=0, reward_scale=0.1, normalize_action=True)
    check_env_specs(env)
    data = rollout(env, 5)
    for key in ("observation", "reward", "episode_reward"):
        assert data["next", key].dtype == torch.float32
    assert {"step_count", "terminated", "truncated", "done"} < set(data["next"].keys())


def test_backends_differ_in_nothing_but_the_first_reset():
    """Gymnasium's is reset by the seeding, and again by the rollout."""
    options = {"name": "Hopper-v5", "num_envs": 2, "seed": 3, "max_episode_steps": 15}
    options |= {"normalize_action": True, "reward_scale": 0.5}
    ours, theirs = (make_env(**options, backend=b) for b in ("mujoco", "gymnasium"))
    assert ours.base_env.seeds.tolist() == [GymnasiumVectorEnv.first_seed(3) + i for i in (0, 1)]
    ours.base_env.reset()
    first, second = rollout(ours, 40), rollout(theirs, 40)
    assert first["next", "done"].sum() >= 4
    for key in [
        "action",
        *(("next", k) for k in ("done", "terminated", "truncated", "step_count")),
    ]:
        assert torch.equal(first[key], second[key]), key
    for key in ("observation", "reward", "episode_reward"):
        torch.testing.assert_close(first["next", key], second["next", key], rtol=1e-5, atol=1e-5)


def test_mujoco_needs_no_conversion():
    transforms = {}
    for backend in ("mujoco", "gymnasium"):
        env = make_env("Hopper-v5", backend=backend)
        transforms[backend] = {type(m) for m in env.transform.modules()}
    assert transforms["gymnasium"] - transforms["mujoco"] == {DoubleToFloat}
    assert Quarantine in transforms["mujoco"] and FiniteCheck not in transforms["mujoco"]


def test_normalized_actions():
    env = make_env("InvertedPendulum-v5", 2, seed=0, normalize_action=True)
    assert any(isinstance(module, ActionScaling) for module in env.transform.modules())
    assert env.action_spec.space.high.unique().tolist() == [1.0]
    plain = make_env("InvertedPendulum-v5", 2, seed=0)
    assert plain.action_spec.space.high.unique().tolist() == [3.0]
    action = torch.tensor([[0.3], [-0.9]])
    first = env.step(env.reset().set("action", action))
    second = plain.step(plain.reset().set("action", 3 * action))
    assert torch.equal(first["next", "observation"], second["next", "observation"])


def test_draws_of_a_randomization_are_reported_and_not_normalised():
    env = make_env("Hopper-v5", 3, seed=0, randomization=[MASS], max_episode_steps=5)
    check_env_specs(env)
    data = rollout(env, 12)
    draws = data["randomization", "body_mass"]
    assert draws.shape == (3, 12, 1)
    assert 0.5 <= draws.min() < draws.max() < 2.0
    assert get_observation_norm(env).in_keys == ["observation"]
    raw = make_env("Hopper-v5", 3, seed=0, randomization=[MASS], normalize_observation=False)
    raw.base_env.reset()
    assert set(raw.reset().keys(True, True)) >= {"observation", ("randomization", "body_mass")}
    assert data["unstable"].dtype == torch.bool


def test_seeds_and_arguments_arrive():
    options = {"num_envs": 2, "num_threads": 2, "max_episode_steps": 7, "healthy_reward": 3.0}
    env = make_env("Hopper-v5", seed=5, **options)
    direct = MujocoBatchEnv("Hopper-v5", seed=5, **options)
    base = env.base_env
    assert base.seeds.tolist() == direct.seeds.tolist()
    assert base.max_episode_steps == 7
    assert base.task.healthy_reward == 3.0
    assert base._driver.num_threads == 2
    assert np.array_equal(base.get_state()["rng"], direct.get_state()["rng"])
    assert torch.equal(base.reset()["observation"], direct.reset()["observation"])
    first, second = (make_env("Hopper-v5", 2) for _ in range(2))
    assert first.base_env.seeds.tolist() != second.base_env.seeds.tolist()


def test_checkpoints():
    """The statistics are those of the transforms, the simulations those of the base environment."""
    options = {"name": "Hopper-v5", "num_envs": 2, "max_episode_steps": 6}
    env, other = (make_env(**options, seed=seed) for seed in (0, 1))
    rollout(env, 9)
    other.load_state_dict(copy.deepcopy(env.state_dict()))
    other.base_env.load_state_dict(copy.deepcopy(env.base_env.state_dict()))
    assert get_observation_norm(other).get_statistics("observation").count.item() == 2 * (1 + 9 + 1)
    assert (rollout(env, 9, seed=1) == rollout(other, 9, seed=1)).all()


def test_plain_gymnasium_task_is_untouched():
    """The tasks of the same name in Gymnasium's registry are still Gymnasium's."""
    env = gymnasium.make("Hopper-v5")
    assert env.unwrapped.__class__.__module__.startswith("gymnasium.envs.mujoco")
    env.close()

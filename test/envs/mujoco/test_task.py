"""Tasks of one's own: models, sensors, snapshots, the registry, and what a task sees."""

from __future__ import annotations

import copy
import pickle

import mujoco
import numpy as np
import pytest
import torch
from envs.mujoco._tasks import SCENE, SLIDER, Slider, act, assert_same, play, slider_spec
from torchrl.envs import check_env_specs

from torchrl_trudi.envs import make_env
from torchrl_trudi.envs.mujoco import (
    ModelRandomization,
    MujocoBatchEnv,
    MujocoTask,
    register_task,
    registered_tasks,
    task,
)
from torchrl_trudi.envs.mujoco._drivers import DRIVERS

PENDULUM = """<mujoco>
  <option timestep="0.01"/>
  <worldbody><body name="rod" pos="0 0 1">
    <joint name="hinge" axis="0 1 0" damping="0.1"/>
    <geom name="rod" size=".05" fromto="0 0 0 0 0 -.5" type="capsule"/>
    <site name="tip" pos="0 0 -.5"/>
  </body></worldbody>
  <actuator><motor joint="hinge" gear="2" ctrlrange="-1 0.5"/></actuator>
  <sensor><jointpos joint="hinge"/><framepos objtype="site" objname="tip"/></sensor>
</mujoco>"""


class Pendulum(MujocoTask):
    """As a user would write it."""

    def __init__(self, height: float = 1.4, *, model=None, **kwargs) -> None:
        model = mujoco.MjSpec.from_string(PENDULUM) if model is None else model
        super().__init__(model, frame_skip=5, max_episode_steps=20, **kwargs)
        self.height = height

    def setup(self, model):
        self.tip = model.site("tip").id

    def initial_state(self, sims, rng):
        return rng.uniform(-3.0, 3.0, 1), rng.standard_normal(1)

    def observation(self, sims):
        return sims.sensordata[:, :1], sims.qvel, sims.site_xpos[:, self.tip]

    def snapshot(self, sims):
        return sims.site_xpos[:, self.tip, 2:]

    def reward(self, sims, action, before, after):
        return (after - before)[:, 0] / sims.dt - 0.1 * np.square(action).sum(1)

    def terminated(self, sims):
        return sims.site_xpos[:, self.tip, 2] > self.height


@pytest.fixture
def registry(monkeypatch):
    """What a test registers is gone afterwards."""
    monkeypatch.setattr(task, "_REGISTRY", dict(task._REGISTRY))


@pytest.mark.parametrize("driver", ["batch", "threads"])
def test_equal_to_a_loop_over_plain_mujoco(driver):
    env = MujocoBatchEnv(Pendulum(), 3, seed=4, driver=driver, dtype=torch.float64, num_threads=2)
    check_env_specs(env)
    env.set_seed(4)
    data, _ = play(env, 60)
    assert env.action_spec.space.low.unique().item() == -1.0
    assert env.action_spec.space.high.unique().item() == 0.5
    ends = {"terminated": 0, "truncated": 0}
    model = mujoco.MjSpec.from_string(PENDULUM).compile()
    for row in range(3):
        rng, plain, t = np.random.default_rng(env.seeds[row]), mujoco.MjData(model), 0

        def start(plain=plain, rng=rng):
            mujoco.mj_resetData(model, plain)
            plain.qpos[:] = rng.uniform(-3.0, 3.0)
            plain.qvel[:] = rng.standard_normal()
            mujoco.mj_forward(model, plain)

        def observe(plain=plain):
            return np.concatenate([plain.sensordata[:1], plain.qvel, plain.site_xpos[0]])

        start()
        for step in data[row]:
            assert np.array_equal(step["observation"], observe())
            before = plain.site_xpos[0, 2]
            action = step["action"].numpy()
            plain.ctrl[:] = action
            mujoco.mj_step(model, plain, 5)
            t += 1
            following, height = step["next"], plain.site_xpos[0, 2]
            assert np.array_equal(following["observation"], observe())
            reward = (height - before) / 0.05 - 0.1 * np.square(action).sum()
            assert following["reward"].item() == pytest.approx(reward, rel=1e-6)
            assert following["terminated"].item() == (height > 1.4)
            assert following["truncated"].item() == (t == 20)
            ends["terminated"] += int(following["terminated"])
            ends["truncated"] += int(following["truncated"])
            if following["done"]:
                start()
                t = 0
    assert min(ends.values()) > 0


def test_models_of_all_kinds_are_the_same(tmp_path):
    file = tmp_path / "pendulum.xml"
    file.write_text(PENDULUM)
    spec = mujoco.MjSpec.from_string(PENDULUM)
    model = spec.compile()
    models = [spec, model, file, str(file)]
    rollouts = [play(MujocoBatchEnv(Pendulum(model=m), 2, seed=0), 8)[0] for m in models]
    for other in rollouts[1:]:
        assert_same(other, rollouts[0])


def test_a_model_that_is_given_is_copied():
    model = mujoco.MjSpec.from_string(PENDULUM).compile()
    env = MujocoBatchEnv(Pendulum(model=model), 2, seed=0)
    expected, _ = play(copy.deepcopy(env), 5)
    assert env.model is not model
    model.opt.gravity[:] = 0.0
    assert_same(play(env, 5)[0], expected)
    randomized = [ModelRandomization("opt.gravity", 0.5, 2)]
    for driver in ("batch", "threads"):
        play(MujocoBatchEnv(Pendulum(model=model), 2, driver=driver, randomization=randomized), 2)
    assert (model.opt.gravity == 0.0).all()


@pytest.mark.parametrize("compiled", [False, True])
def test_environments_of_any_model_can_be_copied(compiled):
    spec = mujoco.MjSpec.from_string(PENDULUM)
    env = MujocoBatchEnv(Pendulum(model=spec.compile() if compiled else spec), 2, seed=0)
    _, tensordict = play(env, 3)
    copies = [pickle.loads(pickle.dumps(env)), copy.deepcopy(env)]
    expected, _ = play(env, 30, tensordict)
    for other in copies:
        assert_same(play(other, 30, tensordict)[0], expected)


def test_one_task_in_several_environments():
    shared = Pendulum()
    envs = [MujocoBatchEnv(shared, n, seed=0) for n in (2, 3)]
    assert_same(play(envs[0], 6)[0], play(MujocoBatchEnv(Pendulum(), 2, seed=0), 6)[0])
    assert play(envs[1], 6)[0].shape == (3, 6)


def test_limits_and_randomization_of_a_task_are_defaults():
    mass = ModelRandomization("body_mass", 0.5, 2.0, names=["rod"])
    gravity = ModelRandomization("opt.gravity", 0.5, 2.0)
    task = Pendulum(randomization=[mass])
    own = MujocoBatchEnv(task, 2, seed=0)
    assert own.max_episode_steps == 20
    assert list(own.reset()["randomization"].keys()) == ["body_mass"]
    others = MujocoBatchEnv(task, 2, seed=0, randomization=[gravity], max_episode_steps=3)
    assert others.max_episode_steps == 3
    assert list(others.reset()["randomization"].keys()) == ["opt.gravity"]
    assert "randomization" not in MujocoBatchEnv(task, 2, randomization=()).reset()


# What a task sees


class Witness(Slider):
    """Keeps what it is given."""

    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        self.seen: dict[str, list] = {"initial_state": [], "observation": [], "reward": []}

    def initial_state(self, sims, rng):
        self.seen["initial_state"].append(
            (len(sims), len(rng), sims.qpos.copy(), sims.time.copy(), sims.xpos.copy())
        )
        return super().initial_state(sims, rng)

    def observation(self, sims):
        self.seen["observation"].append((len(sims), sims.qpos.shape, sims.xpos[:, 1, 0].copy()))
        return super().observation(sims)

    def reward(self, sims, action, before, after):
        self.seen["reward"].append((action.copy(), sims.ctrl.copy(), before.copy(), after.copy()))
        return super().reward(sims, action, before, after)


@pytest.mark.parametrize("driver", ["batch", "threads"])
def test_a_reset_shows_the_rows_that_are_reset(driver):
    task = Witness()
    env = MujocoBatchEnv(task, 4, seed=0, driver=driver)
    tensordict = act(env, env.reset(), 0.5)["next"]
    for seen in task.seen.values():
        seen.clear()
    tensordict["_reset"] = torch.tensor([[False], [True], [False], [True]])
    start = env.reset(tensordict)["observation"][[1, 3], 0].numpy()
    [(num, num_rngs, qpos, time, _)] = task.seen["initial_state"]
    assert num == num_rngs == 2
    assert qpos.tolist() == [[0.0], [0.0]]
    assert time.tolist() == [0.0, 0.0]
    [(num, shape, x)] = task.seen["observation"]
    assert num == 2
    assert shape == (2, 1)
    assert np.array_equal(x.astype(np.float32), start)


@pytest.mark.parametrize("driver", ["batch", "threads"])
def test_derived_fields_of_the_default_state(driver):
    """Not those of the episode before."""
    task = Witness()
    env = MujocoBatchEnv(task, 2, seed=0, driver=driver)
    act(env, env.reset(), 0.5)
    env.reset()
    assert (task.seen["initial_state"][-1][-1] == 0).all()


def test_what_a_reward_is_given():
    task = Witness(frame_skip=7)
    env = MujocoBatchEnv(task, 3, seed=0, dtype=torch.float64)
    first = env.reset()
    task.seen["reward"].clear()
    action = torch.tensor([[0.1], [-0.2], [5.0]])
    second = act(env, first, action)["next"]
    [(given, ctrl, before, after)] = task.seen["reward"]
    assert given.dtype == np.float32
    assert np.array_equal(given, action)
    assert ctrl.dtype == np.float64
    assert np.array_equal(ctrl, action.double())  # not clamped; MuJoCo clamps what it applies
    assert np.array_equal(before[:, 0], first["observation"][:, 0])
    assert np.array_equal(after[:, 0], second["observation"][:, 0])
    third = act(env, second, 0.0)["next"]
    assert np.array_equal(task.seen["reward"][-1][2], after)
    assert np.array_equal(task.seen["reward"][-1][3][:, 0], third["observation"][:, 0])
    assert env._sims.dt == pytest.approx(0.07)


@pytest.mark.parametrize("driver", ["batch", "threads"])
def test_model_fields(driver):
    seen = []

    class Weighed(Slider):
        def observation(self, sims):
            mass = sims.model_field("body_mass")
            seen.append((len(sims), mass[:, 1].copy(), sims.model_field("dof_damping").shape))
            return (np.broadcast_to(mass[:, 1:], (len(sims), 1)),)

    mass = ModelRandomization("body_mass", 2.0, 3.0, names=["mass"])
    env = MujocoBatchEnv(Weighed(), 3, seed=0, driver=driver, randomization=[mass])
    tensordict = env.reset()
    drawn = tensordict["randomization", "body_mass"]
    assert torch.equal(tensordict["observation"], drawn)  # the nominal mass is 1
    assert torch.equal(act(env, tensordict, 0.0)["next", "observation"], drawn)
    tensordict["_reset"] = torch.tensor([[False], [False], [True]])
    after = env.reset(tensordict)
    assert seen[-1][0] == len(seen[-1][1]) == 1
    assert after["observation"][2] == after["randomization", "body_mass"][2] != drawn[2]
    assert seen[-1][2] == (1, 1)
    seen.clear()
    env = MujocoBatchEnv(Weighed(), 3, seed=0, driver=driver)
    assert env.reset()["observation"].flatten().tolist() == [1.0] * 3
    assert seen[-1][1].tolist() == [1.0]


def test_model_fields_of_the_options():
    """Also those can be randomised, and a task may want to see them."""
    task = Slider()
    task.observation = lambda sims: (
        np.broadcast_to(sims.model_field("opt.gravity")[:, 2:], (len(sims), 1)),
    )
    gravity = ModelRandomization("opt.gravity", 0.5, 2.0, shared=True)
    tensordict = MujocoBatchEnv(task, 3, seed=0, randomization=[gravity]).reset()
    torch.testing.assert_close(
        tensordict["observation"], -9.81 * tensordict["randomization", "opt.gravity"]
    )


@pytest.mark.parametrize("function", ["observation", "reward", "terminated"])
def test_fields_that_do_not_exist(function):
    task = Slider()
    setattr(task, function, lambda sims, *args: sims.qposs)
    with pytest.raises(AttributeError, match="qposs"):
        MujocoBatchEnv(task)


@pytest.mark.parametrize("driver", ["batch", "threads"])
def test_fields_that_only_the_initial_state_reads(driver):
    """They are bound too, and those of the default state."""
    task = Slider()
    seen = []

    def initial_state(sims, rng):
        seen.append(sims.site_xpos.shape)
        return np.full((len(sims), 1), 0.25), np.zeros((len(sims), 1))

    task.initial_state = initial_state
    env = MujocoBatchEnv(task, 2, driver=driver)
    assert env.reset()["observation"][:, 0].tolist() == [0.25] * 2
    assert seen == [(2, 0, 3)] * 2  # tried out once, then reset


# The registry


@pytest.mark.usefixtures("registry")
def test_registered_tasks():
    before = registered_tasks()
    assert before == sorted(before)
    assert {"Humanoid-v5", "Pusher-v5"} < set(before)
    register_task("TestPendulum-v0", Pendulum)
    register_task("TestPendulum-v0", Pendulum)  # as a module that is imported twice does
    assert set(registered_tasks()) - set(before) == {"TestPendulum-v0"}
    env = MujocoBatchEnv("TestPendulum-v0", 2, seed=0, height=1.3)
    assert env.task.height == 1.3
    expected = MujocoBatchEnv(Pendulum(1.3), 2, seed=0)
    assert_same(play(env, 20)[0], play(expected, 20)[0])
    with pytest.raises(TypeError, match="'heigth'"):  # of the constructor, which takes **kwargs
        MujocoBatchEnv("TestPendulum-v0", heigth=1.3)


@pytest.mark.usefixtures("registry")
def test_make_env_by_name():
    register_task("TestSlider-v0", lambda limit=1.0: Slider(limit=limit, max_episode_steps=6))
    env = make_env("TestSlider-v0", 2, seed=0, limit=0.5, normalize_observation=False)
    assert isinstance(env.base_env, MujocoBatchEnv)
    check_env_specs(env)
    env.base_env.set_seed(0)
    data = play(env, 12)[0]
    expected = play(MujocoBatchEnv(Slider(limit=0.5, max_episode_steps=6), 2, seed=0), 12)[0]
    assert_same(
        data["next"].select("observation", "done"), expected["next"].select("observation", "done")
    )
    with pytest.raises(TypeError, match=r"'lenght'; it accepts \['limit'\]"):
        make_env("TestSlider-v0", lenght=1)


@pytest.mark.usefixtures("registry")
def test_what_cannot_be_registered():
    with pytest.raises(ValueError, match="another task 'Hopper-v5' already.*Hopper"):
        register_task("Hopper-v5", Pendulum)
    for name in ("", None, 3):
        with pytest.raises(TypeError, match="name of a task must be a string"):
            register_task(name, Pendulum)
    with pytest.raises(TypeError, match="must be callable"):
        register_task("TestPendulum-v0", Pendulum())
    assert "TestPendulum-v0" not in registered_tasks()


def test_a_task_has_to_say_what_it_is():
    with pytest.raises(TypeError, match="abstract"):
        MujocoTask(SLIDER)
    task = Pendulum()
    sims = object()
    assert MujocoTask.terminated(task, sims) is None
    assert MujocoTask.snapshot(task, sims) is None
    assert MujocoBatchEnv(Slider(model=slider_spec())).task.camera == {}


class Scene(MujocoTask):
    """Starts with more of the state than positions and velocities."""

    def __init__(self, fields: dict[str, float]) -> None:
        super().__init__(mujoco.MjSpec.from_string(SCENE))
        self.fields = fields

    def initial_state(self, sims, rng):
        return {
            field: value
            + rng.uniform(0.0, 0.1, getattr(sims, field)[0].size).reshape(
                getattr(sims, field).shape
            )
            for field, value in self.fields.items()
        }

    def observation(self, sims):
        return sims.act, sims.mocap_pos[:, 0], sims.mocap_quat[:, 0], sims.xpos[:, 1], sims.qvel

    def reward(self, sims, action, before, after):
        return np.zeros(len(sims))


@pytest.mark.parametrize("driver", sorted(DRIVERS))
def test_initial_states_of_other_fields(driver):
    values = {"act": 0.5, "mocap_pos": 2.0, "mocap_quat": 0.3}
    env = MujocoBatchEnv(Scene(values), 3, seed=0, driver=driver)
    for rows in ([True] * 3, [True, False, True]):
        mask = torch.tensor(rows).unsqueeze(-1)
        observation = env.reset(env.reset().set("_reset", mask))["observation"]
        for columns, value in ((slice(0, 1), 0.5), (slice(1, 4), 2.0), (slice(4, 8), 0.3)):
            part = observation[:, columns]
            assert ((part >= value) & (part < value + 0.1)).all()
        # The body that follows is where it was put; what was not named is as in the model.
        torch.testing.assert_close(observation[:, 8:11], observation[:, 1:4])
        assert (observation[:, 11:] == 0).all()
    assert len(observation.unique(dim=0)) == 3


def test_initial_states_of_other_fields_are_checked_too():
    with pytest.raises(FloatingPointError, match=r"initial mocap_pos is not finite.* \[0, 1\]"):
        MujocoBatchEnv(Scene({"mocap_pos": np.nan}), 2, seed=0).reset()
    with pytest.raises(ValueError, match=r"Scene.initial_state must return .*; got \['ctrl'\]"):
        MujocoBatchEnv(Scene({"ctrl": 0.0}), 2)

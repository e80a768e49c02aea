"""Arguments, models and tasks that are refused when an environment is made."""

from __future__ import annotations

import gc

import mujoco
import numpy as np
import pytest
import torch
from envs.mujoco._tasks import SLIDER, Slider, act, boxes, slider_spec, with_memory

from torchrl_trudi.envs.mujoco import ModelRandomization, MujocoBatchEnv, register_task

pytestmark = [pytest.mark.usefixtures("quiet"), pytest.mark.filterwarnings("error")]


# Arguments


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"task": "Hoper-v5"}, ValueError, "'Hoper-v5' is not a task.*mean 'Hopper-v5'"),
        ({"task": "Hopper"}, ValueError, "mean 'Hopper-v5'"),
        ({"task": None}, TypeError, "name of a task or an instance of MujocoTask, got None"),
        ({"task": Slider}, TypeError, "an instance of MujocoTask, got <class .* of type ABCMeta"),
        ({"num_envs": 0}, ValueError, "num_envs must be an integer of at least 1, got 0"),
        ({"num_envs": -1}, ValueError, "num_envs .* got -1"),
        ({"num_envs": 2.0}, TypeError, "num_envs .* got 2.0 of type float"),
        ({"num_envs": "2"}, TypeError, "num_envs .* got '2' of type str"),
        ({"num_envs": True}, TypeError, "num_envs .* got True, a bool"),
        ({"num_threads": 0}, ValueError, "num_threads must be an integer of at least 1, got 0"),
        ({"num_threads": 1.5}, TypeError, "num_threads .* got 1.5 of type float"),
        ({"seed": -1}, ValueError, "seed must be an integer of at least 0, got -1"),
        ({"seed": 0.5}, TypeError, "seed .* got 0.5"),
        ({"max_episode_steps": 0}, ValueError, "max_episode_steps .* at least 1, got 0"),
        ({"dtype": torch.float16}, ValueError, r"dtype=torch.float16 is not one of \[torch.float3"),
        ({"dtype": np.float32}, ValueError, "dtype=<class 'numpy.float32'> is not one of"),
        ({"dtype": []}, ValueError, r"dtype=\[\] is not one of"),
        ({"driver": "bach"}, ValueError, "'bach' is not one of .*Did you mean 'batch'"),
        ({"randomization": 3}, TypeError, "randomization must be a sequence of .*, got 3"),
        (
            {"randomization": ModelRandomization("body_mass", 1, 2)},
            TypeError,
            "must be a sequence of ModelRandomization, such as a list, got ModelRandomization",
        ),
        ({"randomization": ["body_mass"]}, TypeError, "must hold ModelRandomization, got 'body_m"),
        (
            {"randomization": [ModelRandomization("body_mass", 1, 2)] * 2},
            ValueError,
            r"once; \['body_mass', 'body_mass'\]",
        ),
        ({"healthy_rewad": 3}, TypeError, "not accept .*'healthy_rewad'; .*mean 'healthy_reward'"),
        ({"healthy_reward": "3"}, TypeError, "healthy_reward must be a number, got '3'"),
        ({"healthy_reward": np.nan}, ValueError, "healthy_reward must be finite, got nan"),
        ({"healthy_z_range": (2, 1)}, ValueError, r"\(low, high\) with low <= high, got \(2, 1\)"),
        ({"healthy_z_range": 2}, ValueError, "healthy_z_range must be a pair of numbers, got 2"),
        ({"terminate_when_unhealthy": 1}, TypeError, "must be True or False, got 1"),
        ({"frame_skip": 0}, ValueError, "frame_skip must be an integer of at least 1, got 0"),
        ({"frame_skip": 2.5}, TypeError, "frame_skip .* got 2.5"),
        ({"xml_file": "./none.xml"}, FileNotFoundError, "xml_file='./none.xml'"),
        ({"xml_file": "none.xml"}, FileNotFoundError, "xml_file='none.xml'"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_bad_arguments(kwargs, error, message):
    with pytest.raises(error, match=message):
        MujocoBatchEnv(**{"task": "Hopper-v5", **kwargs})


def test_options_belong_to_a_name():
    with pytest.raises(
        TypeError, match=r"\['limit'\] given with a task that is made already.*Slid"
    ):
        MujocoBatchEnv(Slider(), limit=3.0)


@pytest.mark.parametrize(
    "options", [{"frame_skip": 0}, {"max_episode_steps": 1.5}, {"randomization": 3}]
)
def test_bad_arguments_of_a_task(options):
    with pytest.raises((ValueError, TypeError), match=next(iter(options))):
        Slider(**options)


def test_environments_that_could_not_be_made_are_collected_silently():
    for kwargs in ({"task": "Hoper-v5"}, {"xml_file": "./none.xml"}, {"num_envs": 0}):
        with pytest.raises((ValueError, FileNotFoundError)):
            MujocoBatchEnv(**{"task": "Hopper-v5", **kwargs})
    gc.collect()


def test_a_factory_that_makes_no_task():
    register_task("TestNoTask-v0", lambda: 3)
    with pytest.raises(TypeError, match="TestNoTask-v0.*MujocoTask"):
        MujocoBatchEnv("TestNoTask-v0")


# Models


def test_files_that_do_not_exist_or_compile(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no MJCF file '.*none.xml'"):
        MujocoBatchEnv(Slider(model=tmp_path / "none.xml"))
    with pytest.raises(FileNotFoundError, match="there is no MJCF file"):
        MujocoBatchEnv(Slider(model=str(tmp_path)))
    file = tmp_path / "model.xml"
    for text, message in (
        ("<mujoco><worldbody></mujoco>", "cannot compile .*model.xml.*XML"),
        ("<mujoco><wordbody/></mujoco>", "(?s)cannot compile .*wordbody"),
        (
            "<mujoco><worldbody><body><joint/></body></worldbody></mujoco>",
            "mass and inertia of moving bodies",
        ),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            MujocoBatchEnv(Slider(model=file))
    file.unlink()
    spec = mujoco.MjSpec.from_string(
        "<mujoco><worldbody><body><joint/></body></worldbody></mujoco>"
    )
    with pytest.raises(ValueError, match="cannot compile the specification: .*mass and inertia"):
        MujocoBatchEnv(Slider(model=spec))
    with pytest.raises(TypeError, match="path of an MJCF file.*got 3 of type int"):
        MujocoBatchEnv(Slider(model=3))


def test_models_without_a_bounded_action():
    head, _, _ = SLIDER.format(timestep=0.01, stiffness=1).partition("<actuator>")
    with pytest.raises(ValueError, match="the model has no actuators"):
        MujocoBatchEnv(Slider(model=mujoco.MjSpec.from_string(head + "</mujoco>")))
    for limited in (False, True):
        model = slider_spec().compile()
        model.actuator_ctrllimited[:] = limited
        model.actuator_ctrlrange[:] = 0.5 if limited else [-1, 1]
        with pytest.raises(ValueError, match="every actuator of the model needs a ctrlrange"):
            MujocoBatchEnv(Slider(model=model))


def test_warnings_while_the_default_state_is_computed_are_not_written():
    model = with_memory(boxes(0.049), mujoco.mj_forward).get("warning")
    if model is None:
        pytest.skip("this MuJoCo never warns of too little memory")
    task = Slider(model=model, limit=1e9)
    task.initial_state = lambda sims, rng: (sims.qpos, sims.qvel)
    env = MujocoBatchEnv(task, 2, seed=0, num_threads=1)
    assert act(env, env.reset(), 0.0)["next", "unstable"].all()


def test_half_cheetah_loads_silently():
    assert MujocoBatchEnv("HalfCheetah-v5").reset()["observation"].shape == (1, 17)


# Tasks


class Broken(Slider):
    """Returns something else from one of its functions."""

    def __init__(self, name, value) -> None:
        super().__init__()
        setattr(self, name, lambda *args: value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("observation", np.zeros(1), r"Broken.observation must .* \[n, k\].* got \(1,\)"),
        (
            "observation",
            (np.zeros((1, 1)), np.zeros((3, 1))),
            r"observation must .* got \([13], 1\)",
        ),
        ("observation", [[0.0]], "observation must return numpy arrays"),
        (
            "reward",
            0.0,
            r"Broken.reward must return an array of real numbers of shape \[n\].* got \(\)",
        ),
        ("reward", np.zeros((1, 1)), r"reward must .* got \(1, 1\)"),
        ("reward", None, r"reward must"),
        ("terminated", np.zeros((1, 1), bool), r"Broken.terminated must return booleans of shape"),
        ("terminated", np.zeros(1), r"terminated must return booleans"),
        ("terminated", False, "terminated must return booleans"),
        ("snapshot", np.zeros(1), r"Broken.snapshot must .* \[n, k\].* got \(1,\)"),
        ("snapshot", np.zeros((3, 1)), r"snapshot must .* got \(3, 1\)"),
    ],
)
def test_shapes_of_what_a_task_returns(name, value, message):
    with pytest.raises(ValueError, match=message):
        MujocoBatchEnv(Broken(name, value))


@pytest.mark.parametrize("name", ["observation", "reward", "terminated", "snapshot"])
def test_shapes_of_what_a_task_returns_for_one_row_where_there_are_more(name):
    """What is right by chance for one row: the first row's, for all."""
    value = np.zeros(1, bool) if name == "terminated" else np.zeros((1, 1))
    task = Broken(name, value[:, 0] if name == "reward" else value)
    with pytest.raises(ValueError, match=f"Broken.{name} must"):
        MujocoBatchEnv(task, 3)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((np.zeros((2, 2)), np.zeros((2, 1))), r"must return qpos of shape .* got \(2, 2\)"),
        ((np.zeros((2, 1)), np.zeros(1)), r"must return qvel of shape .* got \(1,\)"),
        (np.zeros((2, 1)), "must return"),
        (None, "must return qpos and qvel, .*; got None"),
        ({"qpos": np.zeros((2, 2))}, r"must return qpos of shape \[n, 1\], .* got \(2, 2\)"),
        ({"act": np.zeros((2, 1))}, r"must return act of shape \[n, 0\], .* got \(2, 1\)"),
        ({"time": np.zeros(2)}, r"must return .* keys among \['qpos', .*; got \['time'\]"),
    ],
)
def test_initial_states_of_the_wrong_shape(value, message):
    with pytest.raises(ValueError, match=f"Broken.initial_state {message}"):
        MujocoBatchEnv(Broken("initial_state", value), 2)


def test_fields_that_are_read_now_and_then():
    """They are not there when they are wanted; better an error than zeros."""
    task = Slider()
    task.reward = lambda sims, action, *args: (
        sims.xpos[:, 1, 0] if (action > 0.5).any() else sims.qpos[:, 0]
    )
    env = MujocoBatchEnv(task, 2, seed=0)
    following = act(env, env.reset(), 0.1)["next"]
    with pytest.raises(AttributeError, match="'xpos' was not read when the environment was made"):
        act(env, following, 0.9)


def test_models_that_sleep():
    if not hasattr(mujoco.mjtEnableBit, "mjENBL_SLEEP"):
        pytest.skip("this MuJoCo has no sleep")
    model = slider_spec().compile()
    model.opt.enableflags |= int(mujoco.mjtEnableBit.mjENBL_SLEEP)
    with pytest.raises(ValueError, match="the model enables sleep"):
        MujocoBatchEnv(Slider(model=model))


def test_models_without_time():
    model = slider_spec().compile()
    for timestep in (0.0, -0.1, np.nan):
        model.opt.timestep = timestep
        with pytest.raises(ValueError, match="the timestep of the model must be positive"):
            MujocoBatchEnv(Slider(model=model))


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.float32, 1e39),
        *((d, v) for d in (torch.float32, torch.float64) for v in (np.nan, np.inf)),
    ],
)
def test_initial_observations_that_are_not_finite(dtype, value):
    task = Slider()
    task.observation = lambda sims: np.where(np.abs(sims.qpos) > 0.5, value, sims.qpos)
    env = MujocoBatchEnv(task, 3, dtype=dtype)
    env.reset_to([[0.1], [0.2], [0.3]], [0.0])
    with pytest.raises(FloatingPointError, match=r"not finite in the rows \[0, 2\]"):
        env.reset_to([[0.7], [0.2], [0.8]], [0.0])

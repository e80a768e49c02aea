"""Models and tasks that are small enough to predict, and helpers that several files use."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import mujoco
import numpy as np
import torch
from tensordict import TensorDictBase

from torchrl_trudi.envs.mujoco import ModelRandomization, MujocoBatchEnv, MujocoTask

# A mass on a spring, pushed by a motor. Without damping and with a large step it diverges, the
# sooner the further from the origin it starts.
SLIDER = """<mujoco>
  <option timestep="{timestep}"/>
  <worldbody><body name="mass">
    <joint name="slide" type="slide" axis="1 0 0" stiffness="{stiffness}"/>
    <geom name="ball" size="0.1" mass="1"/>
  </body></worldbody>
  <actuator><motor name="push" joint="slide" gear="5" ctrlrange="-1 1"/></actuator>
</mujoco>"""

# Contacts, an equality constraint, a tendon, a muscle-like actuator with a state, sensors.
SCENE = """<mujoco>
  <option timestep="0.004"/>
  <size nuserdata="2"/>
  <worldbody>
    <geom name="floor" type="plane" size="5 5 .1"/>
    <body name="target" mocap="true" pos="1 0 1"/>
    <body name="ball" pos="0 0 0.3"><freejoint/><geom name="ball" size="0.1"/></body>
    <body name="upper" pos="0 1 1">
      <joint name="shoulder" axis="0 1 0" damping="0.1"/>
      <geom name="upper" type="capsule" size="0.04" fromto="0 0 0 0.4 0 0"/>
      <body name="lower" pos="0.4 0 0">
        <joint name="elbow" axis="0 1 0" damping="0.1"/>
        <geom name="lower" type="capsule" size="0.04" fromto="0 0 0 0.4 0 0"/>
        <site name="tip" pos="0.4 0 0"/>
      </body>
    </body>
    <body name="bob" pos="0.8 1 0.7"><freejoint/><geom name="bob" size="0.05"/></body>
  </worldbody>
  <equality><connect body1="lower" body2="bob" anchor="0.4 0 0"/></equality>
  <tendon><fixed name="sum"><joint joint="shoulder" coef="1"/><joint joint="elbow" coef="1"/></fixed></tendon>
  <actuator>
    <motor name="shoulder" joint="shoulder" gear="3" ctrlrange="-1 1"/>
    <general name="elbow" joint="elbow" dyntype="filter" dynprm="0.05" gainprm="2" ctrlrange="-1 1"/>
  </actuator>
  <sensor>
    <accelerometer site="tip"/><framepos objtype="site" objname="tip"/><tendonpos tendon="sum"/>
    <framelinvel objtype="body" objname="ball"/>
  </sensor>
</mujoco>"""


def slider_spec(timestep: float = 0.01, stiffness: float = 3.0) -> mujoco.MjSpec:
    return mujoco.MjSpec.from_string(SLIDER.format(timestep=timestep, stiffness=stiffness))


def with_memory(model: str, state: Callable[[mujoco.MjModel, mujoco.MjData], None]) -> Any:
    """A model with so little memory that ``state`` gives a warning, and another: an error."""
    found: dict[str, mujoco.MjModel] = {}
    mujoco.set_mju_user_warning(lambda message: None)
    try:
        for memory in range(8, 80):
            size = f'<mujoco><size memory="{memory}K"/>'
            compiled = mujoco.MjSpec.from_string(model.replace("<mujoco>", size)).compile()
            data = mujoco.MjData(compiled)
            try:
                state(compiled, data)
                if data.warning.number.any():
                    found.setdefault("warning", compiled)
            except mujoco.FatalError:
                found.setdefault("error", compiled)
    finally:
        mujoco.set_mju_user_warning(None)
    return found


BOXES = """<mujoco><worldbody><geom type="plane" size="9 9 .1"/>
  {boxes}</worldbody><actuator><motor joint="z0" ctrlrange="-1 1"/></actuator></mujoco>"""


def boxes(height: float) -> str:
    """Boxes that can fall down, and touch the floor at ``height=0.05``."""
    one = """<body pos="{i} 0 {height}"><joint name="z{i}" type="slide" axis="0 0 1"/>
      <joint type="slide" axis="1 0 0"/><geom size=".05 .05 .05" type="box"/></body>"""
    return BOXES.format(boxes="".join(one.format(i=i, height=height) for i in range(6)))


class Slider(MujocoTask):
    """Observes position and velocity, is rewarded for progress, ends beyond ``limit``."""

    def __init__(
        self, *, limit: float = np.inf, spread: float = 1.0, model: Any = None, **kwargs: Any
    ) -> None:
        physics = {key: kwargs.pop(key) for key in ("timestep", "stiffness") if key in kwargs}
        super().__init__(slider_spec(**physics) if model is None else model, **kwargs)
        self.limit, self.spread = limit, spread

    def initial_state(self, sims, rng):
        return rng.uniform(-self.spread, self.spread, 1), np.zeros((len(sims), 1))

    def observation(self, sims):
        return sims.qpos, sims.qvel

    def snapshot(self, sims):
        return sims.qpos[:, :1]

    def reward(self, sims, action, before, after):
        return (after - before)[:, 0]

    def terminated(self, sims):
        return np.abs(sims.qpos[:, 0]) > self.limit


# Without cfrc_ext the physics keeps no MjData of its own for each row, with it (Ant) it does.
TASKS = ["InvertedPendulum-v5", "Ant-v5"]

MASS = (ModelRandomization("body_mass", 0.5, 2.0, names=["mass"]),)


def ant(num_envs: int = 4, seed: int | None = 0, **kwargs: Any) -> MujocoBatchEnv:
    """Episodes of 7 steps, so that there are ends of both kinds."""
    options = {"num_threads": 2, "max_episode_steps": 7, "healthy_z_range": (0.5, 1.0)}
    return MujocoBatchEnv("Ant-v5", num_envs, seed=seed, **{**options, **kwargs})


def slider(num_envs: int = 4, seed: int | None = 0, **kwargs: Any) -> MujocoBatchEnv:
    """The same, of a task that costs next to nothing, with a randomised mass."""
    options = {"num_threads": 2, "max_episode_steps": 7, "randomization": MASS}
    return MujocoBatchEnv(
        Slider(limit=1.05, frame_skip=10), num_envs, seed=seed, **options | kwargs
    )


def act(env, tensordict: TensorDictBase, action: float | torch.Tensor) -> TensorDictBase:
    """One step with an action, the same in all rows if it is a number."""
    action = torch.as_tensor(action, dtype=torch.float32)
    return env.step(tensordict.clone().set("action", action.expand(env.action_spec.shape).clone()))


def play(
    env, steps: int, start: TensorDictBase | None = None, seed: int = 0
) -> tuple[TensorDictBase, TensorDictBase]:
    """Steps with random actions and resets what is done.

    Returns the data ``[num_envs, steps]``, and the tensordict from which to play on.
    """
    generator = torch.Generator().manual_seed(seed)
    low, high = env.action_spec.space.low, env.action_spec.space.high
    tensordict, data = env.reset() if start is None else start.clone(), []
    for _ in range(steps):
        unit = torch.rand(low.shape, generator=generator)
        stepped, tensordict = env.step_and_maybe_reset(
            tensordict.set("action", low + (high - low) * unit)
        )
        data.append(stepped.clone())
    return torch.stack(data, 1), tensordict


def assert_same(first: TensorDictBase, second: TensorDictBase) -> None:
    """Equal entries, bit for bit."""
    assert set(first.keys(True, True)) == set(second.keys(True, True))
    for key, value in first.items(True, True):
        assert value.dtype == second[key].dtype, key
        assert torch.equal(value, second[key]), key


def in_fork(function: Callable[[], Any], seconds: float = 20.0) -> str:
    """The ``repr`` of what a function returns in a forked child, or what became of the child."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = repr(function())
        except BaseException as err:  # a child that went on would run the tests a second time
            answer = f"raised {err!r}"
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    try:
        deadline = time.monotonic() + seconds
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "hangs"
            time.sleep(0.01)
        return os.read(reader, 65536).decode() or "died"
    finally:
        os.close(reader)

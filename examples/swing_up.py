"""A task of one's own: swing up a pole on a cart, with a pole and joints that differ every time.

    python examples/trudi_humanoid.py env.name=swing_up:SwingUp-v0 collector.total_frames=200_000

trains a policy on it (``examples/`` is on Python's path when a script in it runs). Alone, this file
shows the environment:

    python examples/swing_up.py
"""

from __future__ import annotations

import math
from typing import Any

import mujoco
import numpy as np

from torchrl_trudi.envs import (
    ModelRandomization,
    MujocoBatchEnv,
    MujocoTask,
    RowGenerators,
    Simulations,
    register_task,
)

MODEL = """
<mujoco>
  <option timestep="0.01" integrator="implicitfast"/>
  <default><geom contype="0" conaffinity="0"/></default>
  <worldbody>
    <light pos="0 -2 3" dir="0 .5 -1"/>
    <geom type="capsule" fromto="-2 0 0 2 0 0" size=".01"/>
    <body name="cart">
      <joint name="slider" type="slide" axis="1 0 0" range="-2 2" limited="true" damping=".5"/>
      <geom type="box" size=".15 .1 .05" mass="1"/>
      <body name="pole">
        <joint name="hinge" axis="0 1 0" damping=".01"/>
        <geom type="capsule" fromto="0 0 0 0 0 .6" size=".03" mass=".2"/>
      </body>
    </body>
  </worldbody>
  <actuator><motor joint="slider" gear="10" ctrlrange="-1 1"/></actuator>
</mujoco>
"""


class SwingUp(MujocoTask):
    """Swing a pole up and keep it there.

    Args:
        randomize (bool, optional): whether the mass of the pole (0.5 to 2 times its own) and the
            damping of both joints (0.5 to 3 times) are drawn anew at each reset. Defaults to
            ``True``.
    """

    def __init__(self, randomize: bool = True) -> None:
        randomization = [
            ModelRandomization("body_mass", 0.5, 2.0, names=["pole"]),
            ModelRandomization("dof_damping", 0.5, 3.0),
        ]
        super().__init__(
            mujoco.MjSpec.from_string(MODEL),
            frame_skip=4,
            max_episode_steps=250,
            randomization=randomization if randomize else (),
            camera={"distance": 4.0, "azimuth": 90.0, "elevation": -10.0},
        )

    def initial_state(self, sims: Simulations, rng: RowGenerators) -> tuple[np.ndarray, np.ndarray]:
        qpos = rng.uniform(-0.1, 0.1, 2)
        qpos[:, 1] += math.pi  # the pole hangs
        return qpos, rng.uniform(-0.05, 0.05, 2)

    def observation(self, sims: Simulations) -> list[np.ndarray]:
        cart, angle = sims.qpos[:, :1], sims.qpos[:, 1:]
        return [cart, np.cos(angle), np.sin(angle), sims.qvel]

    def reward(self, sims: Simulations, action: np.ndarray, before: Any, after: Any) -> np.ndarray:
        upright = 0.5 * (1.0 + np.cos(sims.qpos[:, 1]))
        centred = 1.0 - 0.25 * np.abs(sims.qpos[:, 0])
        return upright * centred - 0.01 * np.square(sims.ctrl[:, 0])


register_task("SwingUp-v0", SwingUp)


if __name__ == "__main__":
    env = MujocoBatchEnv("SwingUp-v0", num_envs=4, seed=0)
    rollout = env.rollout(250, break_when_any_done=False)
    print(rollout)
    print("mass and damping factors of each environment:")
    print(rollout[:, 0]["randomization"].to_dict())
    print("return of random actions:", rollout["next", "reward"].sum((1, 2)).tolist())

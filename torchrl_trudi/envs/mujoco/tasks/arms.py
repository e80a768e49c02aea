"""Robot arms: Reacher and Pusher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mujoco
import numpy as np

from torchrl_trudi.envs.mujoco._generators import RowGenerators
from torchrl_trudi.envs.mujoco.simulations import Simulations
from torchrl_trudi.envs.mujoco.tasks._gymnasium import GymnasiumTask, check_numbers


class Reacher(GymnasiumTask):
    """``Reacher-v5``: bring a fingertip to a target.

    The options are those of ``gymnasium.make("Reacher-v5")``, where they are described.

    Args:
        xml_file (str, optional): the model. Defaults to Gymnasium's.
        frame_skip (int, optional): substeps of 10 ms. Defaults to ``2``.
        reward_dist_weight (float, optional): per m of distance. Defaults to ``1``.
        reward_control_weight (float, optional): per squared action. Defaults to ``1``.

    Raises:
        TypeError: if an option is of the wrong type.
        ValueError: if an option is out of range.
    """

    def __init__(
        self,
        xml_file: str = "reacher.xml",
        frame_skip: int = 2,
        reward_dist_weight: float = 1,
        reward_control_weight: float = 1,
    ) -> None:
        super().__init__(xml_file, frame_skip, {"trackbodyid": 0}, max_episode_steps=50)
        check_numbers(
            reward_dist_weight=reward_dist_weight, reward_control_weight=reward_control_weight
        )
        self.reward_dist_weight = reward_dist_weight
        self.reward_control_weight = reward_control_weight

    def setup(self, model: mujoco.MjModel) -> None:
        self._fingertip, self._target = model.body("fingertip").id, model.body("target").id

    def initial_state(self, sims: Simulations, rng: RowGenerators) -> tuple[np.ndarray, np.ndarray]:
        qpos = rng.uniform(-0.1, 0.1, sims.model.nq) + sims.qpos
        qpos[:, -2:] = rng.each(_draw_goal)
        qvel = sims.qvel + rng.uniform(-0.005, 0.005, sims.model.nv)
        qvel[:, -2:] = 0
        return qpos, qvel

    def _offset(self, sims: Simulations) -> np.ndarray:
        return sims.xpos[:, self._fingertip] - sims.xpos[:, self._target]

    def observation(self, sims: Simulations) -> Sequence[np.ndarray]:
        theta = sims.qpos[:, :2]
        return (
            np.cos(theta),
            np.sin(theta),
            sims.qpos[:, 2:],
            sims.qvel[:, :2],
            self._offset(sims)[:, :2],
        )

    def reward(self, sims: Simulations, action: np.ndarray, before: Any, after: Any) -> np.ndarray:
        distance = np.linalg.norm(self._offset(sims), axis=1)
        # The cost of control in float32, as Gymnasium computes it.
        control = -np.square(action).sum(1) * self.reward_control_weight
        return -distance * self.reward_dist_weight + control


def _draw_goal(generator: np.random.Generator) -> np.ndarray:
    while True:
        goal = generator.uniform(low=-0.2, high=0.2, size=2)
        if np.linalg.norm(goal) < 0.2:
            return goal


class Pusher(GymnasiumTask):
    """``Pusher-v5``: push an object to a goal.

    The options are those of ``gymnasium.make("Pusher-v5")``, where they are described.

    Args:
        xml_file (str, optional): the model. Defaults to Gymnasium's.
        frame_skip (int, optional): substeps of 10 ms. Defaults to ``5``.
        reward_near_weight (float, optional): per m from arm to object. Defaults to ``0.5``.
        reward_dist_weight (float, optional): per m from object to goal. Defaults to ``1``.
        reward_control_weight (float, optional): per squared action. Defaults to ``0.1``.

    Raises:
        TypeError: if an option is of the wrong type.
        ValueError: if an option is out of range.
    """

    def __init__(
        self,
        xml_file: str = "pusher_v5.xml",
        frame_skip: int = 5,
        reward_near_weight: float = 0.5,
        reward_dist_weight: float = 1,
        reward_control_weight: float = 0.1,
    ) -> None:
        super().__init__(
            xml_file, frame_skip, {"trackbodyid": -1, "distance": 4.0}, max_episode_steps=100
        )
        check_numbers(
            reward_near_weight=reward_near_weight,
            reward_dist_weight=reward_dist_weight,
            reward_control_weight=reward_control_weight,
        )
        self.reward_near_weight = reward_near_weight
        self.reward_dist_weight = reward_dist_weight
        self.reward_control_weight = reward_control_weight

    def setup(self, model: mujoco.MjModel) -> None:
        self._tips_arm, self._object, self._goal = (
            model.body(name).id for name in ("tips_arm", "object", "goal")
        )

    def initial_state(self, sims: Simulations, rng: RowGenerators) -> tuple[np.ndarray, np.ndarray]:
        qpos = sims.qpos.copy()
        qpos[:, -4:-2] = rng.each(_draw_cylinder)
        qpos[:, -2:] = 0.0  # the goal
        qvel = sims.qvel + rng.uniform(-0.005, 0.005, sims.model.nv)
        qvel[:, -4:] = 0
        return qpos, qvel

    def observation(self, sims: Simulations) -> Sequence[np.ndarray]:
        bodies = (self._tips_arm, self._object, self._goal)
        return (sims.qpos[:, :7], sims.qvel[:, :7], *(sims.xpos[:, body] for body in bodies))

    def reward(self, sims: Simulations, action: np.ndarray, before: Any, after: Any) -> np.ndarray:
        to_arm = sims.xpos[:, self._object] - sims.xpos[:, self._tips_arm]
        to_goal = sims.xpos[:, self._object] - sims.xpos[:, self._goal]
        near = -np.linalg.norm(to_arm, axis=1) * self.reward_near_weight
        distance = -np.linalg.norm(to_goal, axis=1) * self.reward_dist_weight
        # The cost of control in float32, as Gymnasium computes it.
        control = -np.square(action).sum(1) * self.reward_control_weight
        return distance + control + near


def _draw_cylinder(generator: np.random.Generator) -> np.ndarray:
    while True:
        position = np.concatenate(
            [
                generator.uniform(low=-0.3, high=0, size=1),
                generator.uniform(low=-0.2, high=0.2, size=1),
            ]
        )
        if np.linalg.norm(position) > 0.17:
            return position

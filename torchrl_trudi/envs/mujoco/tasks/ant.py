"""Ant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mujoco
import numpy as np

from torchrl_trudi.envs.mujoco._generators import RowGenerators
from torchrl_trudi.envs.mujoco.simulations import Simulations
from torchrl_trudi.envs.mujoco.tasks._gymnasium import (
    GymnasiumTask,
    check_flags,
    check_numbers,
    check_range,
    normal_velocity_state,
)


class Ant(GymnasiumTask):
    """``Ant-v5``: a four-legged robot that walks forward.

    The options are those of ``gymnasium.make("Ant-v5")``, where they are described.

    Args:
        xml_file (str, optional): the model. Defaults to Gymnasium's.
        frame_skip (int, optional): substeps of 10 ms. Defaults to ``5``.
        forward_reward_weight (float, optional): per m/s. Defaults to ``1``.
        ctrl_cost_weight (float, optional): per squared action. Defaults to ``0.5``.
        contact_cost_weight (float, optional): per squared, clipped contact force. Defaults to
            ``5e-4``.
        healthy_reward (float, optional): per healthy step. Defaults to ``1.0``.
        main_body (int or str, optional): the body whose position is rewarded. Defaults to ``1``.
        terminate_when_unhealthy (bool, optional): Defaults to ``True``.
        healthy_z_range (tuple, optional): heights (m) that are healthy. Defaults to
            ``(0.2, 1.0)``.
        contact_force_range (tuple, optional): contact forces are clipped to it. Defaults to
            ``(-1, 1)``.
        reset_noise_scale (float, optional): of the initial state. Defaults to ``0.1``.
        exclude_current_positions_from_observation (bool, optional): leaves x and y out. Defaults
            to ``True``.
        include_cfrc_ext_in_observation (bool, optional): Defaults to ``True``.

    Raises:
        TypeError: if an option is of the wrong type.
        ValueError: if an option is out of range, or there is no such body.
    """

    def __init__(
        self,
        xml_file: str = "ant.xml",
        frame_skip: int = 5,
        forward_reward_weight: float = 1,
        ctrl_cost_weight: float = 0.5,
        contact_cost_weight: float = 5e-4,
        healthy_reward: float = 1.0,
        main_body: int | str = 1,
        terminate_when_unhealthy: bool = True,
        healthy_z_range: tuple[float, float] = (0.2, 1.0),
        contact_force_range: tuple[float, float] = (-1.0, 1.0),
        reset_noise_scale: float = 0.1,
        exclude_current_positions_from_observation: bool = True,
        include_cfrc_ext_in_observation: bool = True,
    ) -> None:
        super().__init__(xml_file, frame_skip, {"distance": 4.0})
        check_numbers(
            forward_reward_weight=forward_reward_weight,
            ctrl_cost_weight=ctrl_cost_weight,
            contact_cost_weight=contact_cost_weight,
            healthy_reward=healthy_reward,
            reset_noise_scale=reset_noise_scale,
        )
        check_flags(
            terminate_when_unhealthy=terminate_when_unhealthy,
            exclude_current_positions_from_observation=exclude_current_positions_from_observation,
            include_cfrc_ext_in_observation=include_cfrc_ext_in_observation,
        )
        self.forward_reward_weight = forward_reward_weight
        self.ctrl_cost_weight = ctrl_cost_weight
        self.contact_cost_weight = contact_cost_weight
        self.healthy_reward = healthy_reward
        self.main_body = main_body
        self.terminate_when_unhealthy = terminate_when_unhealthy
        self.healthy_z_range = check_range("healthy_z_range", healthy_z_range)
        self.contact_force_range = check_range("contact_force_range", contact_force_range)
        self.reset_noise_scale = reset_noise_scale
        self.include_cfrc_ext_in_observation = include_cfrc_ext_in_observation
        self._first_position = 2 if exclude_current_positions_from_observation else 0

    def setup(self, model: mujoco.MjModel) -> None:
        try:
            self._body = model.body(self.main_body).id
        except (KeyError, IndexError) as err:
            names = [model.body(i).name for i in range(model.nbody)]
            raise ValueError(
                f"main_body={self.main_body!r} is not a body of the model; there are {names}."
            ) from err

    def initial_state(self, sims: Simulations, rng: RowGenerators) -> tuple[np.ndarray, np.ndarray]:
        return normal_velocity_state(sims, rng, self.reset_noise_scale)

    def _contact_forces(self, sims: Simulations) -> np.ndarray:
        return np.clip(sims.cfrc_ext, *self.contact_force_range).reshape(len(sims), -1)

    def observation(self, sims: Simulations) -> Sequence[np.ndarray]:
        parts = [sims.qpos[:, self._first_position :], sims.qvel]
        if self.include_cfrc_ext_in_observation:
            parts.append(self._contact_forces(sims)[:, 6:])  # all but the world's
        return parts

    def snapshot(self, sims: Simulations) -> np.ndarray:
        """The x coordinate of the main body, of the last substep."""
        return sims.xpos[:, self._body, :1]

    def _is_healthy(self, sims: Simulations) -> np.ndarray:
        low, high = self.healthy_z_range
        z = sims.qpos[:, 2]
        finite = np.isfinite(sims.qpos).all(1) & np.isfinite(sims.qvel).all(1)
        return finite & (low <= z) & (z <= high)

    def reward(self, sims: Simulations, action: np.ndarray, before: Any, after: Any) -> np.ndarray:
        x_velocity = (after - before)[:, 0] / sims.dt
        rewards = x_velocity * self.forward_reward_weight
        rewards = rewards + self._is_healthy(sims) * self.healthy_reward
        # In float32, as Gymnasium computes it.
        costs = self.ctrl_cost_weight * np.square(action).sum(1)
        costs = costs + self.contact_cost_weight * np.square(self._contact_forces(sims)).sum(1)
        return rewards - costs

    def terminated(self, sims: Simulations) -> np.ndarray | None:
        return ~self._is_healthy(sims) if self.terminate_when_unhealthy else None

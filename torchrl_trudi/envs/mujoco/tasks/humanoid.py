"""Humanoid and HumanoidStandup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from torchrl_trudi.envs.mujoco._generators import RowGenerators
from torchrl_trudi.envs.mujoco.simulations import Simulations
from torchrl_trudi.envs.mujoco.tasks._gymnasium import (
    GymnasiumTask,
    check_flags,
    check_numbers,
    check_range,
    uniform_state,
)


class _HumanoidBase(GymnasiumTask):
    """The observation and the reset that the two tasks share."""

    def __init__(
        self,
        xml_file: str,
        frame_skip: int,
        camera: dict[str, Any],
        reset_noise_scale: float,
        exclude_current_positions_from_observation: bool,
        **include: bool,
    ) -> None:
        super().__init__(xml_file, frame_skip, camera)
        check_numbers(reset_noise_scale=reset_noise_scale)
        check_flags(
            exclude_current_positions_from_observation=exclude_current_positions_from_observation,
            **{f"include_{name}_in_observation": value for name, value in include.items()},
        )
        self.reset_noise_scale = reset_noise_scale
        self._first_position = 2 if exclude_current_positions_from_observation else 0
        self._include = include

    def initial_state(self, sims: Simulations, rng: RowGenerators) -> tuple[np.ndarray, np.ndarray]:
        return uniform_state(sims, rng, self.reset_noise_scale)

    def observation(self, sims: Simulations) -> Sequence[np.ndarray]:
        n, include = len(sims), self._include
        parts = [sims.qpos[:, self._first_position :], sims.qvel]
        if include["cinert"]:
            parts.append(sims.cinert[:, 1:].reshape(n, -1))
        if include["cvel"]:
            parts.append(sims.cvel[:, 1:].reshape(n, -1))
        if include["qfrc_actuator"]:
            parts.append(sims.qfrc_actuator[:, 6:])
        if include["cfrc_ext"]:
            parts.append(sims.cfrc_ext[:, 1:].reshape(n, -1))
        return parts

    @staticmethod
    def _force_cost(sims: Simulations, weight: float, bounds: tuple[float, float]) -> np.ndarray:
        forces = sims.cfrc_ext.reshape(len(sims), -1)
        return np.clip(weight * np.square(forces).sum(1), *bounds)


class Humanoid(_HumanoidBase):
    """``Humanoid-v5``: run forward without falling over.

    The options are those of ``gymnasium.make("Humanoid-v5")``, where they are described.

    Args:
        xml_file (str, optional): the model. Defaults to Gymnasium's.
        frame_skip (int, optional): substeps of 3 ms. Defaults to ``5``.
        forward_reward_weight (float, optional): per m/s. Defaults to ``1.25``.
        ctrl_cost_weight (float, optional): per squared control. Defaults to ``0.1``.
        contact_cost_weight (float, optional): per squared contact force. Defaults to ``5e-7``.
        contact_cost_range (tuple, optional): bounds of the contact cost. Defaults to
            ``(-inf, 10)``.
        healthy_reward (float, optional): per healthy step. Defaults to ``5.0``.
        terminate_when_unhealthy (bool, optional): Defaults to ``True``.
        healthy_z_range (tuple, optional): heights (m) that are healthy. Defaults to ``(1, 2)``.
        reset_noise_scale (float, optional): of the initial state. Defaults to ``0.01``.
        exclude_current_positions_from_observation (bool, optional): leaves x and y out. Defaults
            to ``True``.
        include_cinert_in_observation (bool, optional): Defaults to ``True``.
        include_cvel_in_observation (bool, optional): Defaults to ``True``.
        include_qfrc_actuator_in_observation (bool, optional): Defaults to ``True``.
        include_cfrc_ext_in_observation (bool, optional): Defaults to ``True``.

    Raises:
        TypeError: if an option is of the wrong type.
        ValueError: if an option is out of range.
    """

    def __init__(
        self,
        xml_file: str = "humanoid.xml",
        frame_skip: int = 5,
        forward_reward_weight: float = 1.25,
        ctrl_cost_weight: float = 0.1,
        contact_cost_weight: float = 5e-7,
        contact_cost_range: tuple[float, float] = (-np.inf, 10.0),
        healthy_reward: float = 5.0,
        terminate_when_unhealthy: bool = True,
        healthy_z_range: tuple[float, float] = (1.0, 2.0),
        reset_noise_scale: float = 1e-2,
        exclude_current_positions_from_observation: bool = True,
        include_cinert_in_observation: bool = True,
        include_cvel_in_observation: bool = True,
        include_qfrc_actuator_in_observation: bool = True,
        include_cfrc_ext_in_observation: bool = True,
    ) -> None:
        super().__init__(
            xml_file,
            frame_skip,
            {"trackbodyid": 1, "distance": 4.0, "lookat": (0.0, 0.0, 2.0), "elevation": -20.0},
            reset_noise_scale,
            exclude_current_positions_from_observation,
            cinert=include_cinert_in_observation,
            cvel=include_cvel_in_observation,
            qfrc_actuator=include_qfrc_actuator_in_observation,
            cfrc_ext=include_cfrc_ext_in_observation,
        )
        check_numbers(
            forward_reward_weight=forward_reward_weight,
            ctrl_cost_weight=ctrl_cost_weight,
            contact_cost_weight=contact_cost_weight,
            healthy_reward=healthy_reward,
        )
        check_flags(terminate_when_unhealthy=terminate_when_unhealthy)
        self.forward_reward_weight = forward_reward_weight
        self.ctrl_cost_weight = ctrl_cost_weight
        self.contact_cost_weight = contact_cost_weight
        self.contact_cost_range = check_range("contact_cost_range", contact_cost_range)
        self.healthy_reward = healthy_reward
        self.terminate_when_unhealthy = terminate_when_unhealthy
        self.healthy_z_range = check_range("healthy_z_range", healthy_z_range)

    def snapshot(self, sims: Simulations) -> np.ndarray:
        """The x coordinate of the centre of mass, of the last substep."""
        mass = sims.model_field("body_mass")
        # A running sum adds the bodies up one after the other, as the einsum of Gymnasium does and
        # sum() does not: equal to the last bit.
        weighted = np.cumsum(sims.xipos[:, :, 0] * mass, axis=1)[:, -1:]
        return weighted / mass.sum(1, keepdims=True)

    def _is_healthy(self, sims: Simulations) -> np.ndarray:
        low, high = self.healthy_z_range
        z = sims.qpos[:, 2]
        return (low < z) & (z < high)

    def reward(self, sims: Simulations, action: np.ndarray, before: Any, after: Any) -> np.ndarray:
        x_velocity = (after - before)[:, 0] / sims.dt
        rewards = self.forward_reward_weight * x_velocity
        rewards = rewards + self._is_healthy(sims) * self.healthy_reward
        costs = self.ctrl_cost_weight * np.square(sims.ctrl).sum(1)
        return rewards - (
            costs + self._force_cost(sims, self.contact_cost_weight, self.contact_cost_range)
        )

    def terminated(self, sims: Simulations) -> np.ndarray | None:
        return ~self._is_healthy(sims) if self.terminate_when_unhealthy else None


class HumanoidStandup(_HumanoidBase):
    """``HumanoidStandup-v5``: get up from the ground.

    The options are those of ``gymnasium.make("HumanoidStandup-v5")``, where they are described.

    Args:
        xml_file (str, optional): the model. Defaults to Gymnasium's.
        frame_skip (int, optional): substeps of 3 ms. Defaults to ``5``.
        uph_cost_weight (float, optional): without effect, as in Gymnasium. Defaults to ``1``.
        ctrl_cost_weight (float, optional): per squared control. Defaults to ``0.1``.
        impact_cost_weight (float, optional): per squared contact force. Defaults to ``5e-7``.
        impact_cost_range (tuple, optional): bounds of the impact cost. Defaults to
            ``(-inf, 10)``.
        reset_noise_scale (float, optional): of the initial state. Defaults to ``0.01``.
        exclude_current_positions_from_observation (bool, optional): leaves x and y out. Defaults
            to ``True``.
        include_cinert_in_observation (bool, optional): Defaults to ``True``.
        include_cvel_in_observation (bool, optional): Defaults to ``True``.
        include_qfrc_actuator_in_observation (bool, optional): Defaults to ``True``.
        include_cfrc_ext_in_observation (bool, optional): Defaults to ``True``.

    Raises:
        TypeError: if an option is of the wrong type.
        ValueError: if an option is out of range.
    """

    def __init__(
        self,
        xml_file: str = "humanoidstandup.xml",
        frame_skip: int = 5,
        uph_cost_weight: float = 1,
        ctrl_cost_weight: float = 0.1,
        impact_cost_weight: float = 0.5e-6,
        impact_cost_range: tuple[float, float] = (-np.inf, 10.0),
        reset_noise_scale: float = 1e-2,
        exclude_current_positions_from_observation: bool = True,
        include_cinert_in_observation: bool = True,
        include_cvel_in_observation: bool = True,
        include_qfrc_actuator_in_observation: bool = True,
        include_cfrc_ext_in_observation: bool = True,
    ) -> None:
        super().__init__(
            xml_file,
            frame_skip,
            {"trackbodyid": 1, "distance": 4.0, "lookat": (0.0, 0.0, 0.8925), "elevation": -20.0},
            reset_noise_scale,
            exclude_current_positions_from_observation,
            cinert=include_cinert_in_observation,
            cvel=include_cvel_in_observation,
            qfrc_actuator=include_qfrc_actuator_in_observation,
            cfrc_ext=include_cfrc_ext_in_observation,
        )
        check_numbers(
            uph_cost_weight=uph_cost_weight,
            ctrl_cost_weight=ctrl_cost_weight,
            impact_cost_weight=impact_cost_weight,
        )
        self.ctrl_cost_weight = ctrl_cost_weight
        self.impact_cost_weight = impact_cost_weight
        self.impact_cost_range = check_range("impact_cost_range", impact_cost_range)

    def reward(self, sims: Simulations, action: np.ndarray, before: Any, after: Any) -> np.ndarray:
        height_reward = sims.qpos[:, 2] / sims.model.opt.timestep
        ctrl_cost = self.ctrl_cost_weight * np.square(sims.ctrl).sum(1)
        impact_cost = self._force_cost(sims, self.impact_cost_weight, self.impact_cost_range)
        return height_reward - ctrl_cost - impact_cost + 1

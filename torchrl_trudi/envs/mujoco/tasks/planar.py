"""Robots that move in a plane: HalfCheetah, Hopper, Walker2d, Swimmer."""

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
    normal_velocity_state,
    uniform_state,
)


class _Runner(GymnasiumTask):
    """Forward speed less the cost of control; positions may be left out of the observation."""

    # The coordinates that exclude_current_positions_from_observation leaves out.
    num_excluded = 1

    def __init__(
        self,
        xml_file: str,
        frame_skip: int,
        camera: dict[str, Any] | None,
        forward_reward_weight: float,
        ctrl_cost_weight: float,
        reset_noise_scale: float,
        exclude_current_positions_from_observation: bool,
    ) -> None:
        super().__init__(xml_file, frame_skip, camera)
        check_numbers(
            forward_reward_weight=forward_reward_weight,
            ctrl_cost_weight=ctrl_cost_weight,
            reset_noise_scale=reset_noise_scale,
        )
        check_flags(
            exclude_current_positions_from_observation=exclude_current_positions_from_observation
        )
        self.forward_reward_weight = forward_reward_weight
        self.ctrl_cost_weight = ctrl_cost_weight
        self.reset_noise_scale = reset_noise_scale
        excluded = self.num_excluded if exclude_current_positions_from_observation else 0
        self._first_position = excluded

    def initial_state(self, sims: Simulations, rng: RowGenerators) -> tuple[np.ndarray, np.ndarray]:
        return uniform_state(sims, rng, self.reset_noise_scale)

    def observation(self, sims: Simulations) -> Sequence[np.ndarray]:
        return sims.qpos[:, self._first_position :], sims.qvel

    def snapshot(self, sims: Simulations) -> np.ndarray:
        """The x coordinate."""
        return sims.qpos[:, :1]

    def reward(self, sims: Simulations, action: np.ndarray, before: Any, after: Any) -> np.ndarray:
        x_velocity = (after - before)[:, 0] / sims.dt
        # The cost in float32, as Gymnasium computes it.
        ctrl_cost = self.ctrl_cost_weight * np.square(action).sum(1)
        return self.forward_reward_weight * x_velocity + self._survival(sims) - ctrl_cost

    def _survival(self, sims: Simulations) -> np.ndarray | float:
        return 0.0


class HalfCheetah(_Runner):
    """``HalfCheetah-v5``: run forward.

    The options are those of ``gymnasium.make("HalfCheetah-v5")``, where they are described.

    Args:
        xml_file (str, optional): the model. Defaults to Gymnasium's.
        frame_skip (int, optional): substeps of 10 ms. Defaults to ``5``.
        forward_reward_weight (float, optional): per m/s. Defaults to ``1.0``.
        ctrl_cost_weight (float, optional): per squared action. Defaults to ``0.1``.
        reset_noise_scale (float, optional): of the initial state. Defaults to ``0.1``.
        exclude_current_positions_from_observation (bool, optional): leaves x out. Defaults to
            ``True``.

    Raises:
        TypeError: if an option is of the wrong type.
        ValueError: if an option is out of range.
    """

    def __init__(
        self,
        xml_file: str = "half_cheetah.xml",
        frame_skip: int = 5,
        forward_reward_weight: float = 1.0,
        ctrl_cost_weight: float = 0.1,
        reset_noise_scale: float = 0.1,
        exclude_current_positions_from_observation: bool = True,
    ) -> None:
        super().__init__(
            xml_file,
            frame_skip,
            {"distance": 4.0},
            forward_reward_weight,
            ctrl_cost_weight,
            reset_noise_scale,
            exclude_current_positions_from_observation,
        )

    def initial_state(self, sims: Simulations, rng: RowGenerators) -> tuple[np.ndarray, np.ndarray]:
        return normal_velocity_state(sims, rng, self.reset_noise_scale)


class Swimmer(_Runner):
    """``Swimmer-v5``: swim forward.

    The options are those of ``gymnasium.make("Swimmer-v5")``, where they are described.

    Args:
        xml_file (str, optional): the model. Defaults to Gymnasium's.
        frame_skip (int, optional): substeps of 10 ms. Defaults to ``4``.
        forward_reward_weight (float, optional): per m/s. Defaults to ``1.0``.
        ctrl_cost_weight (float, optional): per squared action. Defaults to ``1e-4``.
        reset_noise_scale (float, optional): of the initial state. Defaults to ``0.1``.
        exclude_current_positions_from_observation (bool, optional): leaves x and y out. Defaults
            to ``True``.

    Raises:
        TypeError: if an option is of the wrong type.
        ValueError: if an option is out of range.
    """

    num_excluded = 2

    def __init__(
        self,
        xml_file: str = "swimmer.xml",
        frame_skip: int = 4,
        forward_reward_weight: float = 1.0,
        ctrl_cost_weight: float = 1e-4,
        reset_noise_scale: float = 0.1,
        exclude_current_positions_from_observation: bool = True,
    ) -> None:
        super().__init__(
            xml_file,
            frame_skip,
            None,
            forward_reward_weight,
            ctrl_cost_weight,
            reset_noise_scale,
            exclude_current_positions_from_observation,
        )


class _Biped(_Runner):
    """A runner that is healthy while upright."""

    def __init__(
        self,
        *args: Any,
        healthy_reward: float,
        terminate_when_unhealthy: bool,
        healthy_z_range: tuple[float, float],
        healthy_angle_range: tuple[float, float],
    ) -> None:
        camera = {"trackbodyid": 2, "lookat": (0.0, 0.0, 1.15), "elevation": -20.0}
        xml_file, frame_skip, distance, *options = args
        super().__init__(xml_file, frame_skip, {**camera, "distance": distance}, *options)
        check_numbers(healthy_reward=healthy_reward)
        check_flags(terminate_when_unhealthy=terminate_when_unhealthy)
        self.healthy_reward = healthy_reward
        self.terminate_when_unhealthy = terminate_when_unhealthy
        self.healthy_z_range = check_range("healthy_z_range", healthy_z_range)
        self.healthy_angle_range = check_range("healthy_angle_range", healthy_angle_range)

    def observation(self, sims: Simulations) -> Sequence[np.ndarray]:
        return sims.qpos[:, self._first_position :], np.clip(sims.qvel, -10, 10)

    def _is_healthy(self, sims: Simulations) -> np.ndarray:
        z, angle = sims.qpos[:, 1], sims.qpos[:, 2]
        min_z, max_z = self.healthy_z_range
        min_angle, max_angle = self.healthy_angle_range
        return (min_z < z) & (z < max_z) & (min_angle < angle) & (angle < max_angle)

    def _survival(self, sims: Simulations) -> np.ndarray:
        return self._is_healthy(sims) * self.healthy_reward

    def terminated(self, sims: Simulations) -> np.ndarray | None:
        return ~self._is_healthy(sims) if self.terminate_when_unhealthy else None


class Hopper(_Biped):
    """``Hopper-v5``: hop forward on one leg.

    The options are those of ``gymnasium.make("Hopper-v5")``, where they are described.

    Args:
        xml_file (str, optional): the model. Defaults to Gymnasium's.
        frame_skip (int, optional): substeps of 2 ms. Defaults to ``4``.
        forward_reward_weight (float, optional): per m/s. Defaults to ``1.0``.
        ctrl_cost_weight (float, optional): per squared action. Defaults to ``1e-3``.
        healthy_reward (float, optional): per healthy step. Defaults to ``1.0``.
        terminate_when_unhealthy (bool, optional): Defaults to ``True``.
        healthy_state_range (tuple, optional): of all coordinates but x and z. Defaults to
            ``(-100, 100)``.
        healthy_z_range (tuple, optional): heights (m) that are healthy. Defaults to
            ``(0.7, inf)``.
        healthy_angle_range (tuple, optional): angles (rad) that are healthy. Defaults to
            ``(-0.2, 0.2)``.
        reset_noise_scale (float, optional): of the initial state. Defaults to ``5e-3``.
        exclude_current_positions_from_observation (bool, optional): leaves x out. Defaults to
            ``True``.

    Raises:
        TypeError: if an option is of the wrong type.
        ValueError: if an option is out of range.
    """

    def __init__(
        self,
        xml_file: str = "hopper.xml",
        frame_skip: int = 4,
        forward_reward_weight: float = 1.0,
        ctrl_cost_weight: float = 1e-3,
        healthy_reward: float = 1.0,
        terminate_when_unhealthy: bool = True,
        healthy_state_range: tuple[float, float] = (-100.0, 100.0),
        healthy_z_range: tuple[float, float] = (0.7, float("inf")),
        healthy_angle_range: tuple[float, float] = (-0.2, 0.2),
        reset_noise_scale: float = 5e-3,
        exclude_current_positions_from_observation: bool = True,
    ) -> None:
        super().__init__(
            xml_file,
            frame_skip,
            3.0,
            forward_reward_weight,
            ctrl_cost_weight,
            reset_noise_scale,
            exclude_current_positions_from_observation,
            healthy_reward=healthy_reward,
            terminate_when_unhealthy=terminate_when_unhealthy,
            healthy_z_range=healthy_z_range,
            healthy_angle_range=healthy_angle_range,
        )
        self.healthy_state_range = check_range("healthy_state_range", healthy_state_range)

    def _is_healthy(self, sims: Simulations) -> np.ndarray:
        low, high = self.healthy_state_range
        inside = super()._is_healthy(sims)
        for coordinates in (sims.qpos[:, 2:], sims.qvel):
            inside &= ((low < coordinates) & (coordinates < high)).all(1)
        return inside


class Walker2d(_Biped):
    """``Walker2d-v5``: walk forward on two legs.

    The options are those of ``gymnasium.make("Walker2d-v5")``, where they are described.

    Args:
        xml_file (str, optional): the model. Defaults to Gymnasium's.
        frame_skip (int, optional): substeps of 2 ms. Defaults to ``4``.
        forward_reward_weight (float, optional): per m/s. Defaults to ``1.0``.
        ctrl_cost_weight (float, optional): per squared action. Defaults to ``1e-3``.
        healthy_reward (float, optional): per healthy step. Defaults to ``1.0``.
        terminate_when_unhealthy (bool, optional): Defaults to ``True``.
        healthy_z_range (tuple, optional): heights (m) that are healthy. Defaults to
            ``(0.8, 2.0)``.
        healthy_angle_range (tuple, optional): angles (rad) that are healthy. Defaults to
            ``(-1, 1)``.
        reset_noise_scale (float, optional): of the initial state. Defaults to ``5e-3``.
        exclude_current_positions_from_observation (bool, optional): leaves x out. Defaults to
            ``True``.

    Raises:
        TypeError: if an option is of the wrong type.
        ValueError: if an option is out of range.
    """

    def __init__(
        self,
        xml_file: str = "walker2d_v5.xml",
        frame_skip: int = 4,
        forward_reward_weight: float = 1.0,
        ctrl_cost_weight: float = 1e-3,
        healthy_reward: float = 1.0,
        terminate_when_unhealthy: bool = True,
        healthy_z_range: tuple[float, float] = (0.8, 2.0),
        healthy_angle_range: tuple[float, float] = (-1.0, 1.0),
        reset_noise_scale: float = 5e-3,
        exclude_current_positions_from_observation: bool = True,
    ) -> None:
        super().__init__(
            xml_file,
            frame_skip,
            4.0,
            forward_reward_weight,
            ctrl_cost_weight,
            reset_noise_scale,
            exclude_current_positions_from_observation,
            healthy_reward=healthy_reward,
            terminate_when_unhealthy=terminate_when_unhealthy,
            healthy_z_range=healthy_z_range,
            healthy_angle_range=healthy_angle_range,
        )

"""InvertedPendulum and InvertedDoublePendulum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from torchrl_trudi.envs.mujoco._generators import RowGenerators
from torchrl_trudi.envs.mujoco.simulations import Simulations
from torchrl_trudi.envs.mujoco.tasks._gymnasium import (
    GymnasiumTask,
    check_numbers,
    normal_velocity_state,
    uniform_state,
)


class InvertedPendulum(GymnasiumTask):
    """``InvertedPendulum-v5``: balance a pole on a cart.

    The options are those of ``gymnasium.make("InvertedPendulum-v5")``, where they are described.

    Args:
        xml_file (str, optional): the model. Defaults to Gymnasium's.
        frame_skip (int, optional): substeps of 20 ms. Defaults to ``2``.
        reset_noise_scale (float, optional): of the initial state. Defaults to ``0.01``.

    Raises:
        TypeError: if an option is of the wrong type.
        ValueError: if an option is out of range.
    """

    def __init__(
        self,
        xml_file: str = "inverted_pendulum.xml",
        frame_skip: int = 2,
        reset_noise_scale: float = 0.01,
    ) -> None:
        super().__init__(xml_file, frame_skip, {"trackbodyid": 0, "distance": 2.04})
        check_numbers(reset_noise_scale=reset_noise_scale)
        self.reset_noise_scale = reset_noise_scale

    def initial_state(self, sims: Simulations, rng: RowGenerators) -> tuple[np.ndarray, np.ndarray]:
        return uniform_state(sims, rng, self.reset_noise_scale)

    def observation(self, sims: Simulations) -> Sequence[np.ndarray]:
        return sims.qpos, sims.qvel

    def terminated(self, sims: Simulations) -> np.ndarray:
        finite = np.isfinite(sims.qpos).all(1) & np.isfinite(sims.qvel).all(1)
        return ~finite | (np.abs(sims.qpos[:, 1]) > 0.2)

    def reward(self, sims: Simulations, action: np.ndarray, before: Any, after: Any) -> np.ndarray:
        return 1.0 - self.terminated(sims)


class InvertedDoublePendulum(GymnasiumTask):
    """``InvertedDoublePendulum-v5``: balance two poles on a cart.

    The options are those of ``gymnasium.make("InvertedDoublePendulum-v5")``, where they are
    described.

    Args:
        xml_file (str, optional): the model. Defaults to Gymnasium's.
        frame_skip (int, optional): substeps of 10 ms. Defaults to ``5``.
        healthy_reward (float, optional): per step that does not terminate. Defaults to ``10.0``.
        reset_noise_scale (float, optional): of the initial state. Defaults to ``0.1``.

    Raises:
        TypeError: if an option is of the wrong type.
        ValueError: if an option is out of range.
    """

    def __init__(
        self,
        xml_file: str = "inverted_double_pendulum.xml",
        frame_skip: int = 5,
        healthy_reward: float = 10.0,
        reset_noise_scale: float = 0.1,
    ) -> None:
        super().__init__(
            xml_file,
            frame_skip,
            {"trackbodyid": 0, "distance": 4.1225, "lookat": (0.0, 0.0, 0.12250000000000005)},
        )
        check_numbers(healthy_reward=healthy_reward, reset_noise_scale=reset_noise_scale)
        self.healthy_reward = healthy_reward
        self.reset_noise_scale = reset_noise_scale

    def initial_state(self, sims: Simulations, rng: RowGenerators) -> tuple[np.ndarray, np.ndarray]:
        return normal_velocity_state(sims, rng, self.reset_noise_scale)

    def observation(self, sims: Simulations) -> Sequence[np.ndarray]:
        angles = sims.qpos[:, 1:]
        return (
            sims.qpos[:, :1],
            np.sin(angles),
            np.cos(angles),
            np.clip(sims.qvel, -10, 10),
            np.clip(sims.qfrc_constraint[:, :1], -10, 10),
        )

    def terminated(self, sims: Simulations) -> np.ndarray:
        return sims.site_xpos[:, 0, 2] <= 1

    def reward(self, sims: Simulations, action: np.ndarray, before: Any, after: Any) -> np.ndarray:
        x, y = sims.site_xpos[:, 0, 0], sims.site_xpos[:, 0, 2]
        v1, v2 = sims.qvel[:, 1], sims.qvel[:, 2]
        dist_penalty = 0.01 * x**2 + (y - 2) ** 2
        vel_penalty = 1e-3 * v1**2 + 5e-3 * v2**2
        alive_bonus = self.healthy_reward * ~self.terminated(sims)
        return alive_bonus - dist_penalty - vel_penalty

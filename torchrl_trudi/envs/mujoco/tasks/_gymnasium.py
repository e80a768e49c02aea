"""What the Gymnasium tasks have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.envs.mujoco.mujoco_env import expand_model_path

from torchrl_trudi.envs.mujoco._generators import RowGenerators
from torchrl_trudi.envs.mujoco.simulations import Simulations
from torchrl_trudi.envs.mujoco.task import MujocoTask


class GymnasiumTask(MujocoTask):
    """A task of Gymnasium.

    Args:
        xml_file (str): the model. A name without a leading ``.``, ``/`` or ``~`` is one of
            Gymnasium's own files.
        frame_skip (int): substeps per action.
        camera (Mapping[str, Any], optional): attributes of the free camera.

    Keyword Args:
        max_episode_steps (int, optional): the limit of the task. Defaults to ``1000``.
    """

    def __init__(
        self,
        xml_file: str,
        frame_skip: int,
        camera: Mapping[str, Any] | None = None,
        *,
        max_episode_steps: int = 1000,
    ) -> None:
        try:
            path = expand_model_path(xml_file)
        except OSError as err:
            raise FileNotFoundError(f"xml_file={xml_file!r}: {err}") from err
        super().__init__(
            path, frame_skip=frame_skip, max_episode_steps=max_episode_steps, camera=camera
        )


def uniform_state(
    sims: Simulations, rng: RowGenerators, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """The model's default state with uniform noise on positions and velocities.

    Args:
        sims (Simulations): the rows to be reset.
        rng (RowGenerators): their generators.
        scale (float): the noise is in ``[-scale, scale)``.

    Returns:
        tuple of numpy.ndarray: ``qpos`` ``[n, nq]``, ``qvel`` ``[n, nv]``.
    """
    qpos = sims.qpos + rng.uniform(-scale, scale, sims.model.nq)
    return qpos, sims.qvel + rng.uniform(-scale, scale, sims.model.nv)


def normal_velocity_state(
    sims: Simulations, rng: RowGenerators, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """The model's default state with uniform noise on positions, normal noise on velocities.

    Args:
        sims (Simulations): the rows to be reset.
        rng (RowGenerators): their generators.
        scale (float): half-width of the uniform and standard deviation of the normal noise.

    Returns:
        tuple of numpy.ndarray: ``qpos`` ``[n, nq]``, ``qvel`` ``[n, nv]``.
    """
    qpos = sims.qpos + rng.uniform(-scale, scale, sims.model.nq)
    return qpos, sims.qvel + scale * rng.standard_normal(sims.model.nv)


def check_range(name: str, given: Sequence[float]) -> tuple[float, float]:
    """Checks that an option is a pair of numbers in order.

    Args:
        name (str): the option.
        given (Sequence[float]): its value; infinities are fine.

    Returns:
        tuple of float: lower and upper end.

    Raises:
        ValueError: if it is something else.
    """
    try:
        low, high = map(float, given)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a pair of numbers, got {given!r}.") from None
    if not low <= high:  # also catches NaN
        raise ValueError(f"{name} must be (low, high) with low <= high, got {given!r}.")
    return low, high


def check_numbers(**options: Any) -> None:
    """Checks that options are finite numbers.

    Args:
        **options: values by name.

    Raises:
        TypeError: if one is not a number.
        ValueError: if one is not finite.
    """
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
            raise TypeError(f"{name} must be a number, got {value!r}.")
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value!r}.")


def check_flags(**options: Any) -> None:
    """Checks that options are booleans.

    Args:
        **options: values by name.

    Raises:
        TypeError: if one is not.
    """
    for name, value in options.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}.")

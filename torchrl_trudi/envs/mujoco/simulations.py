"""What a task sees of the physics."""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np

from torchrl_trudi.envs.mujoco._logging import silent_physics
from torchrl_trudi.envs.mujoco._physics_driver import model_field


class Simulations:
    """The fields of ``MjData``, one row per simulation.

    ``sims.qpos`` is ``[n, nq]``, ``sims.xpos`` ``[n, nbody, 3]``, and so on for every field of
    ``MjData`` that has a fixed size, under its name and in its type. Arrays of the whole batch are
    live; at a reset the object holds the rows that are being reset, as copies. All of them are
    read-only.

    After a step, fields of the state (``qpos``, ``qvel``, ``ctrl``, ...) are those of the new
    state, and derived ones (``xpos``, ``cvel``, ``sensordata``, ...) those of the last substep's
    last stage, as ``mj_step`` leaves them. ``cfrc_ext``, ``cfrc_int`` and ``cacc`` are computed
    after the step from the data of that stage, as in Gymnasium, and are zero at a reset.

    Attributes:
        model (mujoco.MjModel): the model. Fields that are randomised differ between rows, see
            :meth:`model_field`.
        dt (float): seconds between actions.
    """

    def __init__(self, driver: Any, frame_skip: int, rows: np.ndarray | None = None) -> None:
        self._driver, self._rows = driver, rows
        self.model: mujoco.MjModel = driver.model
        self.dt: float = driver.model.opt.timestep * frame_skip

    def __len__(self) -> int:
        return self._driver.num_sims if self._rows is None else len(self._rows)

    def __getattr__(self, name: str) -> np.ndarray:
        if name.startswith("_"):
            raise AttributeError(name)
        array = self._driver.bind(name)
        # A view even of the whole batch, since what a task writes would move the robot.
        array = array.view() if self._rows is None else array[self._rows]
        array.flags.writeable = False
        # The next access finds the array without coming here.
        self.__dict__[name] = array
        return array

    def model_field(self, name: str) -> np.ndarray:
        """A field of the model, of each row.

        Args:
            name (str): the field of ``MjModel``.

        Returns:
            numpy.ndarray: ``[n, ...]``, or ``[1, ...]`` if it is the same in all rows.
        """
        array = self._driver.model_field(name)
        return array if self._rows is None or len(array) == 1 else array[self._rows]


class FieldProbe:
    """Stands in for a driver with one simulation, to learn which fields a task reads.

    Args:
        model (mujoco.MjModel): the model.

    Attributes:
        fields (set of str): the fields that were bound.
    """

    num_sims = 2

    def __init__(self, model: mujoco.MjModel) -> None:
        self.model = model
        self.fields: set[str] = set()
        self._data = mujoco.MjData(model)
        with silent_physics():
            mujoco.mj_forward(model, self._data)

    def bind(self, name: str) -> np.ndarray:
        """The field of the model's default state, ``[1, ...]``.

        Args:
            name (str): the field.

        Returns:
            numpy.ndarray: the array.

        Raises:
            AttributeError: if ``MjData`` has no such field.
        """
        value = getattr(self._data, name)
        self.fields.add(name)
        return np.repeat(np.asarray(value)[None], self.num_sims, 0)

    def model_field(self, name: str) -> np.ndarray:
        """The field of the model, ``[1, ...]``.

        Args:
            name (str): the field.

        Returns:
            numpy.ndarray: the array.
        """
        return model_field(self.model, name)[None]

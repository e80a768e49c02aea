"""The interface of the drivers: many simulations of one model, on several threads."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import mujoco
import numpy as np

# What mj_rnePostConstraint computes: a step leaves these alone unless a sensor asks for them, and
# then at another stage of a multi-stage integrator.
POST_CONSTRAINT_FIELDS = ("cacc", "cfrc_int", "cfrc_ext")

# What the future of a simulation depends on.
STATE = mujoco.mjtState.mjSTATE_INTEGRATION

# The fields of MjData that are parts of the state.
STATE_COMPONENTS = {
    "time": mujoco.mjtState.mjSTATE_TIME,
    "qpos": mujoco.mjtState.mjSTATE_QPOS,
    "qvel": mujoco.mjtState.mjSTATE_QVEL,
    "act": mujoco.mjtState.mjSTATE_ACT,
    "qacc_warmstart": mujoco.mjtState.mjSTATE_WARMSTART,
    "ctrl": mujoco.mjtState.mjSTATE_CTRL,
    "qfrc_applied": mujoco.mjtState.mjSTATE_QFRC_APPLIED,
    "xfrc_applied": mujoco.mjtState.mjSTATE_XFRC_APPLIED,
    "mocap_pos": mujoco.mjtState.mjSTATE_MOCAP_POS,
    "mocap_quat": mujoco.mjtState.mjSTATE_MOCAP_QUAT,
    "userdata": mujoco.mjtState.mjSTATE_USERDATA,
}


STATE_FIELDS = frozenset(STATE_COMPONENTS)


class PhysicsDriver(abc.ABC):
    """Steps ``num_sims`` simulations of a model and shows their fields as arrays.

    Every simulation is a row of :attr:`state` (``mjSTATE_INTEGRATION``), and its future depends on
    nothing else, so that results do not depend on the number of threads.

    Args:
        model (mujoco.MjModel): the model.
        num_sims (int): number of simulations.
        num_threads (int): number of threads.
        post_constraint (Sequence[str]): the fields among :data:`POST_CONSTRAINT_FIELDS` to
            compute after each step, by ``mj_rnePostConstraint`` on the data of its last stage.

    Attributes:
        state: the rows ``[num_sims, nstate]``, float64, live.
        warnings: MuJoCo's warnings during the last step, counted, ``[num_sims, num_kinds]``.
    """

    model: mujoco.MjModel
    state: np.ndarray
    warnings: np.ndarray

    def __init__(
        self,
        model: mujoco.MjModel,
        num_sims: int,
        num_threads: int,
        post_constraint: Sequence[str] = (),
    ) -> None:
        self.model, self.num_sims = model, num_sims
        self._sealed = False
        self.num_threads = min(num_threads, num_sims)
        self._expanded: dict[str, np.ndarray] = {}
        data = mujoco.MjData(model)
        self._default_state = np.empty(mujoco.mj_stateSize(model, STATE))
        mujoco.mj_getState(model, data, self._default_state, STATE)
        self._post = {
            name: np.zeros((num_sims, *getattr(data, name).shape)) for name in post_constraint
        }
        self._bound: dict[str, np.ndarray] = dict(self._post)

    def bind(self, name: str) -> np.ndarray:
        """The live array ``[num_sims, ...]`` of a field of ``MjData``.

        Fields of the state may be written. Others are those of the last call, as in ``MjData``.
        To be called before the first step and reset: a field bound later is zero until the next.

        Args:
            name (str): the field.

        Returns:
            numpy.ndarray: the array, the same one at every call.

        Raises:
            AttributeError: if there is no such field, or it has no fixed size.
        """
        array = self._bound.get(name)
        if array is None:
            if name in POST_CONSTRAINT_FIELDS:
                raise AttributeError(f"{name!r} is not computed by this driver.")
            if self._sealed and name not in STATE_FIELDS:
                raise AttributeError(
                    f"{name!r} was not read when the environment was made, and would be zero until "
                    "the next step: read it at every call, or in setup()."
                )
            array = self._bound[name] = self._bind(name)
        return array

    def seal(self) -> None:
        """Refuses derived fields that are not bound yet: their numbers would be missing."""
        self._sealed = True

    @abc.abstractmethod
    def _bind(self, name: str) -> np.ndarray: ...

    @abc.abstractmethod
    def step(self, nstep: int) -> np.ndarray:
        """Advances every simulation by ``nstep`` substeps.

        Args:
            nstep (int): number of substeps.

        Returns:
            numpy.ndarray: the ids of those in which MuJoCo raised an error.
        """

    def reset(self, ids: np.ndarray) -> None:
        """Puts simulations into the default state of the model, without computing anything.

        Args:
            ids (numpy.ndarray): which.
        """
        self.state[ids] = self._default_state
        qpos0 = self._expanded.get("qpos0")
        if qpos0 is not None:
            self.bind("qpos")[ids] = qpos0[ids]
        for field, part in (("body_pos", "mocap_pos"), ("body_quat", "mocap_quat")):
            placed = self._expanded.get(field)
            if placed is not None and self.model.nmocap:
                mocap = self.model.body_mocapid
                bodies = np.flatnonzero(mocap >= 0)
                values = placed[ids][:, bodies]
                if part == "mocap_quat":
                    values = values / np.linalg.norm(values, axis=-1, keepdims=True)
                self.bind(part)[ids[:, None], mocap[bodies]] = values

    @abc.abstractmethod
    def forward(self, ids: np.ndarray) -> None:
        """Computes the derived fields of simulations from their state (``mj_forward``).

        Args:
            ids (numpy.ndarray): which.

        Raises:
            RuntimeError: if MuJoCo raises an error.
        """

    @abc.abstractmethod
    def expand(self, name: str) -> np.ndarray:
        """Gives each simulation values of its own of a model field.

        Args:
            name (str): the field of ``MjModel``, or ``"opt.<name>"``.

        Returns:
            numpy.ndarray: the array ``[num_sims, ...]``. What is written to it counts from the
            next :meth:`set_const` of the row.

        Raises:
            ValueError: if there is no such field.
        """

    def model_field(self, name: str) -> np.ndarray:
        """The values of a model field, expanded or not.

        Args:
            name (str): the field of ``MjModel``.

        Returns:
            numpy.ndarray: ``[num_sims, ...]`` if it was expanded, else ``[1, ...]``.
        """
        values = self._expanded.get(name)
        if values is None:
            values = self._derived(name)
        return np.asarray(model_field(self.model, name))[None] if values is None else values

    @abc.abstractmethod
    def _derived(self, name: str) -> np.ndarray | None:
        """The values ``[num_sims, ...]`` of a field that follows from expanded ones."""

    @abc.abstractmethod
    def set_const(self, ids: np.ndarray) -> None:
        """Computes what follows from the expanded fields (``mj_setConst``).

        Args:
            ids (numpy.ndarray): which simulations.

        Raises:
            RuntimeError: if MuJoCo refuses the values.
        """

    @abc.abstractmethod
    def get_model(self, sim: int, model: mujoco.MjModel) -> None:
        """Writes the model of one simulation into ``model``."""

    def get_data(self, sim: int, data: mujoco.MjData) -> None:
        """Writes the state of one simulation into ``data``.

        Args:
            sim (int): the simulation.
            data (mujoco.MjData): data of the model.
        """
        mujoco.mj_setState(self.model, data, self.state[sim], STATE)

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the threads and lets go of the memory."""


def model_field(model: mujoco.MjModel, name: str) -> Any:
    """A field of a model, or of its options."""
    holder, name = (model.opt, name[4:]) if name.startswith("opt.") else (model, name)
    return getattr(holder, name, None)

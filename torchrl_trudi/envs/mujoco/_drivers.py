"""Drivers: many simulations of one model, on several threads."""

from __future__ import annotations

import abc
import copy
import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mujoco
import numpy as np

try:
    from mujoco import batch as mujoco_batch
except ImportError:  # MuJoCo before 3.17
    mujoco_batch = None

from torchrl_trudi.envs._validation import did_you_mean
from torchrl_trudi.envs.mujoco._logging import silent_physics

# What mj_rnePostConstraint computes: a step leaves these alone unless a sensor asks for them, and
# then at another stage of a multi-stage integrator.
POST_CONSTRAINT_FIELDS = ("cacc", "cfrc_int", "cfrc_ext")

# What the future of a simulation depends on.
_STATE = mujoco.mjtState.mjSTATE_INTEGRATION

# The fields of MjData that are parts of the state.
_STATE_COMPONENTS = {
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


STATE_FIELDS = frozenset(_STATE_COMPONENTS)


def default_num_threads() -> int:
    """The number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
        self._default_state = np.empty(mujoco.mj_stateSize(model, _STATE))
        mujoco.mj_getState(model, data, self._default_state, _STATE)
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
        mujoco.mj_setState(self.model, data, self.state[sim], _STATE)

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the threads and lets go of the memory."""


_alive: weakref.WeakSet[BatchDriver] = weakref.WeakSet()


def _abandon_all() -> None:
    """In a process that was forked from the one that made the drivers.

    Their threads do not exist here, so that ending them, as the destructor of a batch does, would
    wait for ever. One reference too many, and it never runs.
    """
    for driver in list(_alive):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(driver._batch._b))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)


class BatchDriver(PhysicsDriver):
    """:class:`mujoco.batch.Batch`: threads of C++, no Python between the simulations."""

    def __init__(
        self,
        model: mujoco.MjModel,
        num_sims: int,
        num_threads: int,
        post_constraint: Sequence[str] = (),
    ) -> None:
        super().__init__(model, num_sims, num_threads, post_constraint)
        # mj_rnePostConstraint needs the whole MjData of the last stage, which only a persistent
        # batch keeps, one per simulation.
        with silent_physics():
            self._batch = mujoco_batch.Batch(
                model, num_sims, self.num_threads, persistent=bool(post_constraint)
            )
        _alive.add(self)
        self.state = self._batch.state
        self.warnings = self._batch.warning[..., 1]
        if post_constraint:
            self._scratch = mujoco.MjData(model)
            self._scratch_model = model
            self._ncon = self._batch.bind("ncon")
            self._xfrc_applied = self._batch.bind("xfrc_applied")
            self._nonzero = np.zeros(num_sims, bool)
            # Body forces can come from contacts, from equality constraints and from the user.
            # The other two fields are never zero.
            self._all_rows = model.neq > 0 or set(post_constraint) != {"cfrc_ext"}

    def _bind(self, name: str) -> np.ndarray:
        if name not in mujoco_batch.DATA_FIELDS:
            raise AttributeError(
                f"{name!r} is not a field of MjData with a fixed size."
                f"{did_you_mean(name, mujoco_batch.DATA_FIELDS)}"
            )
        return self._batch.bind(name)

    def step(self, nstep: int) -> np.ndarray:
        self.warnings[...] = 0
        failed = np.empty(0, np.int64)
        with silent_physics():
            try:
                self._batch.step(nstep=nstep)
            except mujoco_batch.SimulationError as err:
                failed = np.asarray(err.ids)
            if self._post:
                self._compute_post_constraint()
        return failed

    def _compute_post_constraint(self) -> None:
        if self._all_rows:
            rows = np.ones(self.num_sims, bool)
        else:
            rows = self._ncon > 0
            if self._xfrc_applied.any():
                rows |= self._xfrc_applied.any((1, 2))
        stale = self._nonzero & ~rows
        if stale.any():
            self._zero_post_constraint(stale)
        self._nonzero[:] = rows
        batch, data, model = self._batch, self._scratch, self._scratch_model
        for sim in np.flatnonzero(rows).tolist():
            if self._expanded:
                batch.get_model(sim, model)
            batch.get_data(sim, data)
            mujoco.mj_rnePostConstraint(model, data)
            for name, array in self._post.items():
                array[sim] = getattr(data, name)

    def _zero_post_constraint(self, rows: np.ndarray) -> None:
        for array in self._post.values():
            array[rows] = 0.0

    def forward(self, ids: np.ndarray) -> None:
        with silent_physics():
            self._batch.forward(np.sort(ids))
        self._zero_post_constraint(ids)

    def expand(self, name: str) -> np.ndarray:
        if name not in self._expanded:
            self._expanded[name] = self._batch.expand(name)
            if self._post and self._scratch_model is self.model:
                self._scratch_model = copy.copy(self.model)
        return self._expanded[name]

    def set_const(self, ids: np.ndarray) -> None:
        with silent_physics():
            self._batch.set_const(np.sort(ids))

    def get_model(self, sim: int, model: mujoco.MjModel) -> None:
        self._batch.get_model(sim, model)

    def _derived(self, name: str) -> np.ndarray | None:
        if not self._expanded or name not in mujoco_batch.MODEL_FIELDS:
            return None
        return self._batch.expanded(name)

    def close(self) -> None:
        _alive.discard(self)
        # The arrays keep the memory of the batch alive, so all of them have to go.
        self.__dict__ = {"num_sims": self.num_sims, "model": self.model}


class ThreadDriver(PhysicsDriver):
    """A pool of Python threads over ``mj_step``, with one ``MjData`` per simulation.

    For MuJoCo before 3.17, and to check the other driver against.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        num_sims: int,
        num_threads: int,
        post_constraint: Sequence[str] = (),
    ) -> None:
        super().__init__(model, num_sims, num_threads, post_constraint)
        self._datas = [mujoco.MjData(model) for _ in range(num_sims)]
        self._models = [model] * num_sims
        self._outputs: list[str] = []
        self.state = np.tile(self._default_state, (num_sims, 1))
        self.warnings = np.zeros((num_sims, mujoco.mjtWarning.mjNWARNING.value), np.int32)
        self._chunks = np.array_split(np.arange(num_sims), self.num_threads)
        self._pool = ThreadPoolExecutor(self.num_threads) if self.num_threads > 1 else None

    def _bind(self, name: str) -> np.ndarray:
        component = _STATE_COMPONENTS.get(name)
        template = getattr(self._datas[0], name, None)
        if component is not None:
            start, size = _state_slice(self.model, component)
            array = self.state[:, start : start + size]
            shape = np.asarray(template).shape
            array = array[:, 0] if name == "time" else array.reshape(-1, *shape)
        elif type(template) is int or (
            isinstance(template, np.ndarray) and not name.startswith(_ARENA_PREFIXES)
        ):
            array = np.zeros((self.num_sims, *np.shape(template)), np.asarray(template).dtype)
            self._outputs.append(name)
        else:
            raise AttributeError(
                f"{name!r} is not a field of MjData with a fixed size."
                f"{did_you_mean(name, dir(self._datas[0]))}"
            )
        return array

    def _run(self, ids: np.ndarray, function: Callable[[int], None]) -> dict[int, str]:
        """Calls ``function`` with each id, on the threads; returns the errors of MuJoCo."""
        errors: dict[int, str] = {}

        def work(chunk: np.ndarray) -> None:
            for sim in chunk.tolist():
                model, data, row = self._models[sim], self._datas[sim], self.state[sim]
                mujoco.mj_setState(model, data, row, _STATE)
                try:
                    function(sim)
                except mujoco.FatalError as err:
                    errors[sim] = str(err)
                    continue
                mujoco.mj_getState(model, data, row, _STATE)
                for name in self._outputs:
                    self._bound[name][sim] = getattr(data, name)

        with silent_physics():
            if self._pool is None:
                work(ids)
            else:
                chunks = (
                    self._chunks
                    if len(ids) == self.num_sims
                    else np.array_split(ids, self.num_threads)
                )
                list(self._pool.map(work, chunks))
        return errors

    def step(self, nstep: int) -> np.ndarray:
        def step_one(sim: int) -> None:
            model, data = self._models[sim], self._datas[sim]
            data.warning.number[:] = 0
            mujoco.mj_step(model, data, nstep)
            self.warnings[sim] = data.warning.number
            if self._post:
                mujoco.mj_rnePostConstraint(model, data)
                for name, array in self._post.items():
                    array[sim] = getattr(data, name)

        self.warnings[:] = 0
        return np.array(sorted(self._run(np.arange(self.num_sims), step_one)), np.int64)

    def forward(self, ids: np.ndarray) -> None:
        errors = self._run(ids, lambda sim: mujoco.mj_forward(self._models[sim], self._datas[sim]))
        for array in self._post.values():
            array[ids] = 0.0
        self._raise(errors)

    @staticmethod
    def _raise(errors: dict[int, str]) -> None:
        if errors:
            sims = sorted(errors)
            raise RuntimeError(
                f"MuJoCo raised an error in the simulations {sims}: {errors[sims[0]]}"
            )

    def expand(self, name: str) -> np.ndarray:
        if name not in self._expanded:
            values = model_field(self.model, name)
            if isinstance(values, float):
                values = np.asarray(values)
            if not isinstance(values, np.ndarray):
                raise ValueError(f"{name!r} is not a field of MjModel.")
            self._expanded[name] = np.repeat(values[None], self.num_sims, 0)
            if self._models[0] is self.model:
                self._models = [copy.copy(self.model) for _ in range(self.num_sims)]
        return self._expanded[name]

    def set_const(self, ids: np.ndarray) -> None:
        scratch = mujoco.MjData(self.model)
        errors = {}
        with silent_physics():
            for sim in ids.tolist():
                for name, array in self._expanded.items():
                    if array.ndim == 1:
                        setattr(self._models[sim].opt, name[4:], float(array[sim]))
                    else:
                        model_field(self._models[sim], name)[...] = array[sim]
                try:
                    mujoco.mj_setConst(self._models[sim], scratch)
                except mujoco.FatalError as err:
                    errors[sim] = str(err)
        self._raise(errors)

    def get_model(self, sim: int, model: mujoco.MjModel) -> None:
        source = self._models[sim]
        for name in self._expanded:
            if not name.startswith("opt."):
                getattr(model, name)[...] = getattr(source, name)
            elif isinstance(getattr(model.opt, name[4:]), np.ndarray):
                getattr(model.opt, name[4:])[...] = getattr(source.opt, name[4:])
            else:
                setattr(model.opt, name[4:], getattr(source.opt, name[4:]))
        if self._expanded:
            with silent_physics():
                mujoco.mj_setConst(model, mujoco.MjData(model))

    def _derived(self, name: str) -> np.ndarray | None:
        if not self._expanded:
            return None
        values = np.stack([np.asarray(model_field(model, name)) for model in self._models])
        return None if (values == values[:1]).all() else values

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        self.__dict__ = {"num_sims": self.num_sims, "model": self.model}


def _state_slice(model: mujoco.MjModel, component: mujoco.mjtState) -> tuple[int, int]:
    """Where a component stands in a row of ``mjSTATE_INTEGRATION``: components go by their bit."""
    start, bit = 0, 1
    while bit < int(component):
        if bit & int(mujoco.mjtState.mjSTATE_INTEGRATION):
            start += mujoco.mj_stateSize(model, bit)
        bit <<= 1
    return start, mujoco.mj_stateSize(model, int(component))


# Arrays of MjData whose sizes change from step to step.
_ARENA_PREFIXES = ("efc_", "iefc_", "contact", "island", "dof_island", "map_", "tree_island")


def model_field(model: mujoco.MjModel, name: str) -> Any:
    """A field of a model, or of its options."""
    holder, name = (model.opt, name[4:]) if name.startswith("opt.") else (model, name)
    return getattr(holder, name, None)


DRIVERS: dict[str, type[PhysicsDriver]] = {"batch": BatchDriver, "threads": ThreadDriver}


def make_driver(name: str, *args: Any, **kwargs: Any) -> PhysicsDriver:
    """Makes a driver.

    Args:
        name (str): ``"batch"``, ``"threads"``, or ``"auto"``, the first one there is.
        *args: arguments of :class:`PhysicsDriver`.
        **kwargs: arguments of :class:`PhysicsDriver`.

    Returns:
        PhysicsDriver: the driver.

    Raises:
        RuntimeError: if MuJoCo is too old for the driver.
    """
    if name == "auto":
        name = "threads" if mujoco_batch is None else "batch"
    if name == "batch" and mujoco_batch is None:
        raise RuntimeError(
            f"driver='batch' needs mujoco.batch, of MuJoCo 3.17; this is {mujoco.__version__}. "
            "driver='threads' works with any."
        )
    return DRIVERS[name](*args, **kwargs)

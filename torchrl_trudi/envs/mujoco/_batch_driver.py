"""The driver over :class:`mujoco.batch.Batch`."""

from __future__ import annotations

import copy
import ctypes
import os
import weakref
from collections.abc import Sequence

import mujoco
import numpy as np

try:
    from mujoco import batch as mujoco_batch
except ImportError:  # MuJoCo before 3.17
    mujoco_batch = None

from torchrl_trudi.envs._validation import did_you_mean
from torchrl_trudi.envs.mujoco._logging import silent_physics
from torchrl_trudi.envs.mujoco._physics_driver import PhysicsDriver

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
            # Views into its memory, which stays where it is: what to copy, and where to.
            self._copies = [
                (getattr(self._scratch, name), array) for name, array in self._post.items()
            ]
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
        # One simulation after the other, for want of a call that does it on the threads: most of the
        # time is get_data's, which copies a whole MjData.
        get_data, data, model = self._batch.get_data, self._scratch, self._scratch_model
        for sim in np.flatnonzero(rows).tolist():
            if self._expanded:
                self._batch.get_model(sim, model)
            get_data(sim, data)
            mujoco.mj_rnePostConstraint(model, data)
            for source, target in self._copies:
                target[sim] = source

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

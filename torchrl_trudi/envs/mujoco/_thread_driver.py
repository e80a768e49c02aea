"""The driver over a pool of Python threads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import mujoco
import numpy as np

from torchrl_trudi.envs._validation import did_you_mean
from torchrl_trudi.envs.mujoco._logging import silent_physics
from torchrl_trudi.envs.mujoco._physics_driver import (
    STATE,
    STATE_COMPONENTS,
    PhysicsDriver,
    model_field,
)

# Arrays of MjData whose sizes change from step to step.
_ARENA_PREFIXES = ("efc_", "iefc_", "contact", "island", "dof_island", "map_", "tree_island")


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
        component = STATE_COMPONENTS.get(name)
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
                mujoco.mj_setState(model, data, row, STATE)
                try:
                    function(sim)
                except mujoco.FatalError as err:
                    errors[sim] = str(err)
                    continue
                mujoco.mj_getState(model, data, row, STATE)
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

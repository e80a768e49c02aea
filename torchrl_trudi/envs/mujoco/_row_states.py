"""States of the rows of a batched environment: checkpoints, pickles, forks."""

from __future__ import annotations

import abc
import copy
import os
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import EnvBase

from torchrl_trudi.envs.mujoco._generators import RowGenerators
from torchrl_trudi.envs.mujoco.randomization import ModelRandomization
from torchrl_trudi.envs.mujoco.task import MujocoTask


class RowStates(EnvBase):
    """The part of :class:`MujocoBatchEnv` that saves and restores what its future depends on.

    Attributes:
        num_unstable (torch.Tensor): ``[num_envs]`` int64, simulations that diverged.
    """

    num_envs: int
    num_unstable: torch.Tensor
    seeds: np.ndarray
    task: MujocoTask
    _driver: Any
    _pid: int
    _rng: RowGenerators
    _observations: list[np.ndarray]
    _snapshot: np.ndarray | None
    _elapsed: np.ndarray
    _ended: np.ndarray
    _randomization: Sequence[ModelRandomization]
    _draws: list[np.ndarray]

    @abc.abstractmethod
    def _start(self) -> None:
        """Makes the simulations, all in the default state of the model."""

    def get_state(self, rows: Any = None) -> TensorDict:
        """Everything that the future of some rows depends on.

        Args:
            rows (Sequence[int] or bool mask, optional): which. Defaults to ``None``, all.

        Returns:
            TensorDict: of batch size ``[k]``, on the CPU: ``"physics"`` (float64,
            ``mjSTATE_INTEGRATION``), ``"elapsed_steps"``, ``"rng"``, ``"observation"``, and, where
            the task has them, ``"snapshot"`` and ``"randomization"`` (draws and model values).
        """
        self._check_running()
        index = self._row_index(rows)
        state = {
            "physics": self._driver.state[index],
            "elapsed_steps": self._elapsed[index],
            "observation": self._observations[0][index],
            "ended": self._ended[:, index].T.copy(),
        }
        if self._snapshot is not None:
            state["snapshot"] = self._snapshot[index]
        tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in state.items()}
        tensors["rng"] = self._rng[index].get_state()
        for field, draws in zip(self._randomization, self._draws, strict=True):
            values = self._driver.expand(field.field)
            tensors.setdefault("randomization", {})[field.field] = {
                "draws": torch.from_numpy(draws[index]),
                "values": torch.from_numpy(values[index]),
            }
        return TensorDict(tensors, batch_size=[len(index)])

    def set_state(self, state: TensorDictBase, rows: Any = None) -> None:
        """Restores what :meth:`get_state` returned, in the same rows or in others.

        What follows is what followed then, bit for bit, if the actions are the same. Fields of
        the physics that are derived from the state are recomputed by the next step.

        Args:
            state (TensorDictBase): the state of ``k`` rows, or of one for all. Without ``"rng"``
                the rows keep their random streams.
            rows (Sequence[int] or bool mask, optional): the rows to write. Defaults to ``None``,
                all.

        Raises:
            ValueError: if the state does not fit the environment or the rows.
        """
        self._check_running()
        index = self._row_index(rows)
        expected = self.get_state(index[:1])
        missing = set(expected.keys(True, True)) - set(state.keys(True, True)) - {"rng"}
        surplus = set(state.keys(True, True)) - set(expected.keys(True, True))
        for what, keys in (("no", missing), ("entries that do not belong here:", surplus)):
            if keys:
                raise ValueError(f"the state has {what} {sorted(map(str, keys))}.")
        if len(state.batch_size) != 1 or state.batch_size[0] not in (1, len(index)):
            raise ValueError(
                f"a state of batch size {tuple(state.batch_size)} does not fit {len(index)} rows."
            )
        for key, value in expected.items(True, True):
            given = state.get(key, None)
            if given is not None and given.shape[1:] != value.shape[1:]:
                raise ValueError(
                    f"{key!r} has the shape {tuple(given.shape[1:])} per row, this environment "
                    f"{tuple(value.shape[1:])}: it is the state of another task."
                )
        state = state.cpu().expand(len(index))
        self._driver.state[index] = state["physics"].numpy()
        self._elapsed[index] = state["elapsed_steps"].numpy()
        self._observations[0][index] = state["observation"].numpy()
        self._ended[:, index] = state["ended"].numpy().T
        if self._snapshot is not None:
            self._snapshot[index] = state["snapshot"].numpy()
        if "rng" in state:
            self._rng[index].set_state(state["rng"])
        for field, draws in zip(self._randomization, self._draws, strict=True):
            entry = state["randomization", field.field]
            draws[index] = entry["draws"].numpy()
            self._driver.expand(field.field)[index] = entry["values"].numpy()
        if self._randomization:
            self._driver.set_const(index)

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        """The part of ``state_dict``: :meth:`get_state` of all rows, and :attr:`num_unstable`.

        Returns:
            dict: flat, of tensors, with a number that stands for the task.
        """
        state = self.get_state().flatten_keys("/").to_dict()
        return {**state, "num_unstable": self.num_unstable.clone(), "task": self._task_code()}

    def _task_code(self) -> torch.Tensor:
        """A number for the task, by which a checkpoint of another one with equal sizes is told."""
        # Without the module: that of a script has another name in the processes it spawns.
        return torch.tensor(zlib.crc32(type(self.task).__qualname__.encode()))

    def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restores what :meth:`get_extra_state` returned.

        Args:
            state (dict): the state.

        Raises:
            ValueError: if it is the state of another number of environments or of another task.
        """
        state = dict(state)
        num_unstable = state.pop("num_unstable", None)
        if num_unstable is None:
            raise ValueError("the state has no 'num_unstable': it is not that of a MujocoBatchEnv.")
        task = state.pop("task", None)
        if task is None or int(task) != int(self._task_code()):
            raise ValueError(f"it is the state of another task than {type(self.task).__name__}.")
        if len(num_unstable) != self.num_envs:
            raise ValueError(
                f"the state is that of {len(num_unstable)} environments; this has {self.num_envs}."
            )
        batch = TensorDict(state, batch_size=[self.num_envs]).unflatten_keys("/")
        self.set_state(batch)
        self.num_unstable = num_unstable.clone()

    def _row_index(self, rows: Any) -> np.ndarray:
        if rows is None:
            return np.arange(self.num_envs)
        array = np.asarray(rows.cpu() if isinstance(rows, torch.Tensor) else rows)
        if array.dtype == bool and array.shape == (self.num_envs,):
            return np.flatnonzero(array)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ValueError(
                f"rows must be a sequence of integers or a mask of shape ({self.num_envs},), got "
                f"{rows!r}."
            )
        if len(np.unique(array)) != len(array) or ((array < 0) | (array >= self.num_envs)).any():
            raise ValueError(
                f"rows must be distinct and in [0, {self.num_envs}), got {array.tolist()}."
            )
        return array.astype(np.int64)

    # Other processes

    def _check_running(self) -> None:
        if self._driver is None:
            raise RuntimeError("the environment is closed.")
        if self._pid != os.getpid():
            # Threads do not survive a fork: the child makes its own, and goes on from the state.
            # A renderer does not either, and is kept, since it cannot be freed here.
            self._pid = os.getpid()
            self.__dict__["_inherited_renderer"] = self._renderer
            self._restart(self.get_extra_state())

    def _restart(self, state: dict[str, torch.Tensor]) -> None:
        self._start()
        self.set_extra_state(state)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        state["_saved"] = None if self._driver is None else self.get_extra_state()
        for name in ("_driver", "_randomized", "_renderer", "_rng"):
            state[name] = None
        for name in ("_ctrl", "_sims", "_inherited_renderer"):
            state.pop(name, None)
        for name in ("_observations", "_elapsed", "_ended", "_snapshot"):
            state[name] = copy.deepcopy(state[name])
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        saved = state.pop("_saved")
        super().__setstate__(state)
        self._rng = RowGenerators.from_seeds(self.seeds.tolist())
        if saved is not None:
            self._restart(saved)

"""A batch of MuJoCo simulations as one TorchRL environment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import mujoco
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Binary, Bounded, Composite, Unbounded

from torchrl_trudi.envs._seeding import first_seed
from torchrl_trudi.envs._validation import check_choice, check_int, import_task
from torchrl_trudi.envs.cpus import available_cpus
from torchrl_trudi.envs.mujoco._action import read_action
from torchrl_trudi.envs.mujoco._complete_outputs import CompleteOutputs
from torchrl_trudi.envs.mujoco._drivers import DRIVERS, make_driver
from torchrl_trudi.envs.mujoco._generators import RowGenerators
from torchrl_trudi.envs.mujoco._model import check_model, load_model
from torchrl_trudi.envs.mujoco._physics_driver import POST_CONSTRAINT_FIELDS
from torchrl_trudi.envs.mujoco._row_states import RowStates
from torchrl_trudi.envs.mujoco._task_layout import as_parts, initial_fields, probe_task
from torchrl_trudi.envs.mujoco.randomization import (
    ModelRandomization,
    RandomizedField,
    check_randomization,
)
from torchrl_trudi.envs.mujoco.rendering import SimulationRenderer
from torchrl_trudi.envs.mujoco.simulations import Simulations
from torchrl_trudi.envs.mujoco.task import MujocoTask, make_task

_NUMPY_DTYPES = {torch.float32: np.float32, torch.float64: np.float64}


class MujocoBatchEnv(CompleteOutputs, RowStates):
    """Many simulations of one MuJoCo task, stepped together in this process.

    The physics runs on threads (:class:`mujoco.batch.Batch`); observations, rewards and ends of
    episodes are computed for the whole batch at once. The batch size is ``[num_envs]``, also for
    one environment. ``"next"`` holds true final observations, with ``"terminated"`` and
    ``"truncated"`` apart; TorchRL then resets the rows that are done, and no other. Results do
    not depend on the number of threads.

    The tasks of Gymnasium (``-v5``) are there under their names and with their options, equal to
    ``gymnasium.make`` step by step. :class:`MujocoTask` and :func:`register_task` add others.

    A simulation that diverges (MuJoCo warns or raises an error, or an observation or reward is
    not finite) ends its episode: ``"terminated"`` and ``"unstable"`` are set, the observation is
    the last one before, the reward is 0 and :attr:`num_unstable` counts it. Other rows are not
    affected, and no NaN leaves the environment. Actions that are not finite are refused instead,
    before anything is stepped.

    Args:
        task (str or MujocoTask): the name of a task (``"module:Task-v0"`` imports ``module``
            first), or a task.
        num_envs (int, optional): number of environments. Defaults to ``1``.

    Keyword Args:
        num_threads (int, optional): threads of the physics, the calling one included. Defaults to
            ``None``, as many as this process has CPUs.
        seed (int, optional): seeds the initial states: row ``i`` gets the generator of a Gymnasium
            environment seeded with ``env.seeds[i]``. Defaults to ``None``, not reproducible.
        device (torch.device or str, optional): device of the tensordicts; the physics is on the
            CPU. Defaults to ``None``, the CPU.
        dtype (torch.dtype, optional): of observations and rewards, ``torch.float32`` or
            ``torch.float64``. The computation is in float64. Defaults to ``torch.float32``.
        max_episode_steps (int, optional): truncates episodes after that many steps. Defaults to
            ``None``, the limit of the task.
        randomization (Sequence[ModelRandomization], optional): model fields drawn for each
            environment at each reset, reported under ``("randomization", field)``. Defaults to
            ``None``, those of the task.
        reset_attempts (int, optional): how many initial states are drawn for a row before its not
            being finite is an error. Defaults to ``1``.
        driver (str, optional): ``"batch"``, ``"threads"`` (a pool of Python threads, for MuJoCo
            before 3.17) or ``"auto"``, the faster one there is. Defaults to ``"auto"``.
        **task_options: options of the task, if it is given by name.

    Attributes:
        task (MujocoTask): the task.
        model (mujoco.MjModel): the model.
        seeds (numpy.ndarray): the seed of each row.
        num_unstable (torch.Tensor): ``[num_envs]`` int64, simulations that diverged, since the
            environment was made.

    Raises:
        ValueError: if the task is not known, its model does not compile, or an argument is out of
            range.
        TypeError: if an argument is of the wrong type or not accepted by the task.
        FileNotFoundError: if the model's file does not exist.
        FloatingPointError: by ``reset``, if the task's initial state, or its observation, is not
            finite, ``reset_attempts`` times.

    Examples:
        >>> from torchrl_trudi.envs.mujoco import MujocoBatchEnv
        >>> env = MujocoBatchEnv("Hopper-v5", num_envs=8, num_threads=2, seed=0)
        >>> rollout = env.rollout(20, break_when_any_done=False)
        >>> rollout["next", "observation"].shape
        torch.Size([8, 20, 11])
        >>> state = env.get_state()
        >>> _ = env.rollout(5)
        >>> env.set_state(state)
    """

    # Set before anything can fail: an environment that could not be made is closed too.
    _driver: Any = None
    _renderer: SimulationRenderer | None = None

    def __init__(
        self,
        task: str | MujocoTask,
        num_envs: int = 1,
        *,
        num_threads: int | None = None,
        seed: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        max_episode_steps: int | None = None,
        randomization: Sequence[ModelRandomization] | None = None,
        reset_attempts: int = 1,
        driver: str = "auto",
        **task_options: Any,
    ) -> None:
        num_envs = check_int("num_envs", num_envs, 1)
        if num_threads is not None:
            num_threads = check_int("num_threads", num_threads, 1)
        if max_episode_steps is not None:
            max_episode_steps = check_int("max_episode_steps", max_episode_steps, 1)
        if not isinstance(dtype, torch.dtype) or dtype not in _NUMPY_DTYPES:
            raise ValueError(f"dtype={dtype!r} is not one of {list(_NUMPY_DTYPES)}.")
        check_choice("driver", driver, ["auto", *DRIVERS])
        reset_attempts = check_int("reset_attempts", reset_attempts, 1)
        if isinstance(task, str):
            task = make_task(import_task(task), task_options)
        elif not isinstance(task, MujocoTask):
            raise TypeError(
                "task must be the name of a task or an instance of MujocoTask, got "
                f"{task!r} of type {type(task).__name__}."
            )
        elif not hasattr(task, "model_source"):
            raise TypeError(f"{type(task).__name__}.__init__ does not call super().__init__().")
        elif task_options:
            raise TypeError(
                f"{sorted(task_options)} given with a task that is made already; options belong "
                f"to a task given by name, or to the constructor of {type(task).__name__}."
            )
        super().__init__(
            device=torch.device("cpu" if device is None else device), batch_size=[num_envs]
        )
        self.task = task
        self.num_envs = num_envs
        self.dtype = dtype
        self.max_episode_steps = (
            task.max_episode_steps if max_episode_steps is None else max_episode_steps
        )
        self.reset_attempts = reset_attempts
        self._num_threads = available_cpus() if num_threads is None else num_threads
        self._driver_name = driver
        self._randomization = check_randomization(
            task.randomization if randomization is None else randomization
        )
        self.model = load_model(task.model_source)
        check_model(self.model)
        task.setup(self.model)
        self._layout = probe_task(task, self.model)
        self.num_unstable = torch.zeros(num_envs, dtype=torch.int64)
        self._set_seed(seed)
        self._make_arrays()
        self._start()
        self._make_specs()

    # Construction

    def _make_arrays(self) -> None:
        """Allocates what a step writes to."""
        n, layout, dtype = self.num_envs, self._layout, _NUMPY_DTYPES[self.dtype]
        # Two, because a simulation that diverges keeps its last observation.
        self._observations = [np.zeros((n, layout.observation_size), dtype) for _ in range(2)]
        size = layout.snapshot_size
        self._snapshot = None if size is None else np.zeros((n, size))
        self._elapsed = np.zeros(n, np.int64)
        self._ended = np.zeros((3, n), bool)  # terminated, truncated, unstable

    def _start(self) -> None:
        """Makes the simulations, all in the default state of the model."""
        self._pid = os.getpid()
        self._renderer = None
        driver = make_driver(
            self._driver_name,
            self.model,
            self.num_envs,
            self._num_threads,
            [field for field in POST_CONSTRAINT_FIELDS if field in self._layout.fields],
        )
        self._driver = driver
        for field in self._layout.fields:
            driver.bind(field)
        driver.seal()
        self._ctrl = driver.bind("ctrl")
        self._sims = Simulations(driver, self.task.frame_skip)
        self._randomized = [
            RandomizedField(r, self.model, driver.expand(r.field)) for r in self._randomization
        ]
        self._draws = [np.zeros((self.num_envs, r.num_draws)) for r in self._randomized]
        all_rows = np.arange(self.num_envs)
        driver.reset(all_rows)
        driver.forward(all_rows)

    def _make_specs(self) -> None:
        shape, device = self.batch_size, self.device
        column = (*shape, 1)
        observation = Composite(
            {
                group: Unbounded(
                    (*shape, columns.stop - columns.start), dtype=self.dtype, device=device
                )
                for group, columns in self._layout.groups.items()
            },
            unstable=Binary(n=1, shape=column, dtype=torch.bool, device=device),
            shape=shape,
            device=device,
        )
        for field, draws in zip(self._randomization, self._draws, strict=True):
            observation["randomization", field.field] = Unbounded(
                draws.shape, dtype=self.dtype, device=device
            )
        self.observation_spec = observation
        bounds = torch.from_numpy(self.model.actuator_ctrlrange.astype(np.float32))
        # Of their own memory each: tensors that share it cannot be sent to another process.
        low, high = (x.clone() for x in bounds.expand(*shape, *bounds.shape).unbind(-1))
        self._action_shape = low.shape
        self.action_spec = Bounded(low, high, dtype=torch.float32, device=device)
        self.reward_spec = Unbounded(column, dtype=self.dtype, device=device)
        self.done_spec = Composite(
            {
                key: Binary(n=1, shape=column, dtype=torch.bool, device=device)
                for key in ("done", "terminated", "truncated")
            },
            shape=shape,
            device=device,
        )

    # Seeds

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            seed = check_int("seed", seed, 0)
        entropy = np.random.SeedSequence(seed).entropy
        first = first_seed(int(entropy))  # type: ignore[arg-type]
        self.seeds = first + np.arange(self.num_envs)
        self._rng = RowGenerators.from_seeds(self.seeds.tolist())

    # Stepping

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._check_running()
        action = read_action(tensordict, self._action_shape)
        task, sims, before = self.task, self._sims, self._snapshot
        # TorchRL marks the rows to step while others wait for the end of their episodes.
        mask = tensordict.get("_step", None)
        waiting = None if mask is None or mask.all() else ~mask.reshape(-1).cpu().numpy()
        if waiting is not None:
            waiting = np.flatnonzero(waiting)
            kept = self.get_state(waiting)
        self._ctrl[:] = action
        failed = self._driver.step(task.frame_skip)
        warned = self._driver.warnings.any(1)
        if len(failed):
            warned[failed] = True

        last, now = self._observations
        # Of simulations that diverged.
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            self._write_observation(now, sims)
            after = task.snapshot(sims)
            reward = np.array(task.reward(sims, action, before, after), now.dtype)
            ends = task.terminated(sims)
            # A sum is finite only if all its terms are, and much cheaper than isfinite() of each.
            if not np.isfinite(now.sum()) or not np.isfinite(reward.sum()):
                warned |= ~np.isfinite(now).all(1) | ~np.isfinite(reward)
        if waiting is not None:
            warned[waiting] = False
        terminated, truncated, unstable = self._ended
        terminated[:] = False if ends is None else ends
        elapsed = self._elapsed  # += on the attribute would assign it, which costs a module 10 µs
        elapsed += 1
        if self.max_episode_steps is None:
            truncated[:] = False
        else:
            np.greater_equal(elapsed, self.max_episode_steps, out=truncated)
        unstable[:] = warned
        if before is not None:
            before[...] = after
        if warned.any():
            reward = np.where(warned, 0.0, reward).astype(now.dtype)
            now[warned] = last[warned]
            terminated |= warned
            self.num_unstable = self.num_unstable + torch.from_numpy(warned)
            # Whatever the simulation holds, it must not poison the next step.
            rows = np.flatnonzero(warned)
            self._driver.reset(rows)
            self._driver.forward(rows)
            if before is not None:
                before[rows] = task.snapshot(Simulations(self._driver, task.frame_skip, rows))
        self._observations.reverse()
        if waiting is not None:
            self.set_state(kept, waiting)
            reward[waiting] = 0.0
        return self._output(reward)

    def _write_observation(self, out: np.ndarray, sims: Simulations) -> None:
        parts = as_parts(self.task.observation(sims))
        for columns, part in zip(self._layout.columns, parts, strict=True):
            out[:, columns] = part

    def _output(self, reward: np.ndarray | None) -> TensorDictBase:
        # The arrays are written to again, so that what leaves is copied, once.
        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array.copy())

        terminated, truncated, unstable = self._ended
        data: dict[str, Any] = {
            **{
                group: tensor(self._observations[0][:, columns])
                for group, columns in self._layout.groups.items()
            },
            "unstable": tensor(unstable[:, None]),
            "terminated": tensor(terminated[:, None]),
            "truncated": tensor(truncated[:, None]),
            "done": torch.from_numpy((terminated | truncated)[:, None]),
        }
        if reward is not None:
            data["reward"] = torch.from_numpy(reward[:, None])
        if self._randomized:
            draws = {
                field.field: torch.from_numpy(drawn).to(self.dtype, copy=True)
                for field, drawn in zip(self._randomization, self._draws, strict=True)
            }
            data["randomization"] = self._tensordict(draws)
        return self._tensordict(data)

    def _tensordict(self, data: dict[str, Any]) -> TensorDict:
        # Of the right shapes: the constructor would look at each.
        made = TensorDict._new_unsafe(data, batch_size=self.batch_size, device=torch.device("cpu"))
        return made if self.device.type == "cpu" else made.to(self.device)

    # Resetting

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        if kwargs:
            raise TypeError(f"reset accepts no arguments of its own, got {sorted(kwargs)}.")
        self._check_running()
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is None:
            rows = np.arange(self.num_envs)
        else:
            rows = np.flatnonzero(mask.reshape(self.num_envs).cpu().numpy())
        if len(rows):
            self._reset_rows(rows)
        return self._output(None)

    def _reset_rows(self, rows: np.ndarray) -> None:
        for attempt in range(1, self.reset_attempts + 1):
            rows = self._start_episodes(rows, strict=attempt == self.reset_attempts)
            if not len(rows):
                break

    def _start_episodes(self, rows: np.ndarray, *, strict: bool) -> np.ndarray:
        """Starts episodes in drawn states; returns the rows whose state was not finite, if not strict."""
        driver, rng = self._driver, self._rng[rows]
        driver.reset(rows)
        if self._layout.initial_state_reads_derived:
            driver.forward(rows)
        sims = Simulations(driver, self.task.frame_skip, rows)
        initial = initial_fields(self.task, sims, rng)
        for draws, field in zip(self._draws, self._randomized, strict=True):
            draws[rows] = field.sample(rows, rng)
        if strict:
            self._check_initial_state(rows, initial)
            good = np.ones(len(rows), bool)
        else:
            good = ~self._bad_initial_state(rows, initial)
            if not good.all():
                initial = {
                    name: array[good] if _by_row(name, array) else array
                    for name, array in initial.items()
                }
        if self._randomized:
            driver.set_const(rows)
        refused = rows[~good]
        if good.any():
            refused = np.concatenate(
                [refused, self._write_state(rows[good], initial, strict=strict)]
            )
        return refused

    @staticmethod
    def _bad_initial_state(rows: np.ndarray, initial: Mapping[str, np.ndarray]) -> np.ndarray:
        """Which of the rows have a state that MuJoCo would put the default one in the place of."""
        bad = np.zeros(len(rows), bool)
        for name, array in initial.items():
            with np.errstate(invalid="ignore"):
                entries = ~(np.abs(array) < mujoco.mjMAXVAL)
            bad |= entries.reshape(len(rows), -1).any(1) if _by_row(name, array) else entries.any()
        return bad

    @classmethod
    def _check_initial_state(cls, rows: np.ndarray, initial: Mapping[str, np.ndarray]) -> None:
        for name, array in initial.items():
            bad = cls._bad_initial_state(rows, {name: array})
            if bad.any():
                raise FloatingPointError(
                    f"the initial {name} is not finite, or not below {mujoco.mjMAXVAL:g}, in the "
                    f"rows {rows[bad].tolist()}."
                )

    def _write_state(
        self, rows: np.ndarray, initial: Mapping[str, np.ndarray], *, strict: bool = True
    ) -> np.ndarray:
        """Starts an episode in a state; returns the rows whose observation was not finite, if not strict."""
        driver = self._driver
        for field, array in initial.items():
            driver.bind(field)[rows] = array
        driver.forward(rows)
        sims = Simulations(driver, self.task.frame_skip, rows)
        observation = np.empty((len(rows), self._observations[0].shape[1]), np.float64)
        self._write_observation(observation, sims)
        with np.errstate(over="ignore"):
            observation = observation.astype(_NUMPY_DTYPES[self.dtype])
        bad = rows[~np.isfinite(observation).all(1)]
        if strict and len(bad):
            raise FloatingPointError(
                f"the initial state gives an observation that is not finite in the rows "
                f"{bad.tolist()}."
            )
        # Those of bad rows too: they are started again, or an error has been raised.
        self._observations[0][rows] = observation
        if self._snapshot is not None:
            self._snapshot[rows] = self.task.snapshot(sims)
        self._elapsed[rows] = 0
        self._ended[:, rows] = False
        return bad

    def reset_to(self, qpos: Any, qvel: Any, rows: Any = None) -> TensorDictBase:
        """Starts episodes in given states.

        Args:
            qpos (array or torch.Tensor): positions, ``[k, nq]`` or ``[nq]`` for all.
            qvel (array or torch.Tensor): velocities, ``[k, nv]`` or ``[nv]`` for all.
            rows (Sequence[int] or bool mask, optional): the ``k`` rows. Defaults to ``None``, all.

        Returns:
            TensorDictBase: what ``reset`` returns, of the whole batch.

        Raises:
            ValueError: if a shape or a row is wrong, or a number is not finite.
            FloatingPointError: if a number is too large for MuJoCo, or gives an observation that is
                not finite.
        """
        self._check_running()
        index = self._row_index(rows)
        initial = {}
        for name, given, size in (("qpos", qpos, self.model.nq), ("qvel", qvel, self.model.nv)):
            array = np.asarray(given.cpu() if isinstance(given, torch.Tensor) else given, float)
            if array.shape not in ((size,), (len(index), size)):
                raise ValueError(
                    f"{name} must have the shape ({size},) or ({len(index)}, {size}), got "
                    f"{array.shape}."
                )
            if not np.isfinite(array).all():
                raise ValueError(f"{name} is not finite.")
            initial[name] = array
        if len(index):
            self._check_initial_state(index, initial)
            self._driver.reset(index)
            self._write_state(index, initial)
        return self._output(None)

    # Rendering

    def render(
        self,
        index: int = 0,
        *,
        width: int = 480,
        height: int = 480,
        camera: int | str | None = None,
    ) -> np.ndarray:
        """A picture of one environment.

        Needs OpenGL; without a display, set the environment variable ``MUJOCO_GL`` to ``egl`` or
        ``osmesa`` before ``mujoco`` is imported.

        Args:
            index (int, optional): which environment. Defaults to ``0``.

        Keyword Args:
            width (int, optional): pixels. Defaults to ``480``.
            height (int, optional): pixels. Defaults to ``480``.
            camera (int or str, optional): a camera of the model, by number or name; ``-1`` is the
                free camera that the task describes. Defaults to ``None``: the camera ``"track"``
                if the model has one, else the free camera.

        Returns:
            numpy.ndarray: ``[height, width, 3]``, uint8.

        Raises:
            RuntimeError: if there is no OpenGL.
            ValueError: if there is no such environment or camera.
        """
        self._check_running()
        index = check_int("index", index, 0)
        if index >= self.num_envs:
            raise ValueError(f"index={index}, but there are {self.num_envs} environments.")
        size = (check_int("width", width, 1), check_int("height", height, 1))
        if self._renderer is None or self._renderer.size != size:
            if self._renderer is not None:
                self._renderer.close()
                self._renderer = None
            self._renderer = SimulationRenderer(self._driver, *size, self.task.camera)
        return self._renderer.render(self._driver, index, camera)

    # Life cycle

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Ends the threads and frees the simulations.

        Keyword Args:
            raise_if_closed (bool, optional): of the base class; closing twice is no error here.
                Defaults to ``True``.
        """
        if self._renderer is not None and self._pid == os.getpid():
            self._renderer.close()
            self._renderer = None
        if self._driver is not None:
            self._driver.close()
        self._driver = None
        self.__dict__.pop("_ctrl", None)
        self.__dict__.pop("_sims", None)
        self._randomized = []
        super().close(raise_if_closed=raise_if_closed)


def _by_row(name: str, array: np.ndarray) -> bool:
    """Whether a field of an initial state has an entry for each row, and is not one for all."""
    return array.ndim > (2 if name.startswith("mocap") else 1)

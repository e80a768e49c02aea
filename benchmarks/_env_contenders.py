"""What `bench_envs.py` times: the batched environment and the physics in it.

`physics`, `env` and `env_raw` do the same work: one :class:`MujocoBatchEnv` is stepped beforehand
with pre-drawn actions, and all three replay that from the same state, with the same actions and the
same resets in the same rows. The first replay of each is checked to end in the recorded state, bit
for bit, so that what is compared is the cost of everything around the physics and nothing else.
"""

from __future__ import annotations

import abc
import itertools
import math
import time
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
import torch
from mujoco.batch import Batch
from tensordict import TensorDict

from torchrl_trudi.envs.mujoco import MujocoBatchEnv


@dataclass(frozen=True)
class Settings:
    """What all contenders have in common.

    Attributes:
        threads: threads of the physics, of those contenders that have them.
        seconds: about how long a repetition lasts.
        burn_in: steps before anything is timed, so that episodes are not all at their beginning.
    """

    threads: int
    seconds: float
    burn_in: int


class Contender(abc.ABC):
    """Environments of one task that can be stepped for a while.

    Args:
        name (str): as in the table.
        num_envs (int): number of environments.
    """

    def __init__(self, name: str, num_envs: int) -> None:
        self.name, self.num_envs = name, num_envs

    def prepare(self) -> None:  # noqa: B027, a hook that most do not need
        """Called before each repetition, outside the measured time."""

    @abc.abstractmethod
    def run(self) -> int:
        """One repetition.

        Returns:
            int: the environment steps made.
        """

    def close(self) -> None:  # noqa: B027
        """Lets go of the environments."""


def draw_actions(rng: np.random.Generator, low: Any, high: Any, shape: tuple) -> np.ndarray:
    """Uniform actions in the actuators' range, float32."""
    return rng.uniform(low, high, shape).astype(np.float32)


class Loop(Contender):
    """Something that goes on where it stopped, as many steps as make a repetition."""

    def __init__(self, name: str, num_envs: int, settings: Settings) -> None:
        super().__init__(name, num_envs)
        self._clock = itertools.count()
        self._steps = settings.burn_in
        self.run()
        began = time.perf_counter()
        self._steps = 1
        while True:
            self.run()
            elapsed = time.perf_counter() - began
            if elapsed > settings.seconds / 4:
                break
            self._steps *= 2
        # 1 + 2 + 4 + ... steps were timed.
        self._steps = math.ceil((2 * self._steps - 1) * settings.seconds / elapsed)

    def run(self) -> int:
        return sum(self._step(next(self._clock)) for _ in range(self._steps))

    @abc.abstractmethod
    def _step(self, step: int) -> int:
        """One step of all environments; returns how many of them really stepped."""


# The environment and the physics in it


@dataclass(frozen=True)
class Recording:
    """A stretch of simulation, to be replayed.

    Attributes:
        start: the state of the environment (`MujocoBatchEnv.get_state`).
        actions: ``[steps, num_envs, nu]``.
        resets: at each step the rows that ended, and the ``qpos`` and ``qvel`` they start from
            anew; or ``None``.
        end: the state of the physics after the last step.
    """

    start: TensorDict
    actions: torch.Tensor
    resets: list[tuple[np.ndarray, np.ndarray, np.ndarray] | None]
    end: torch.Tensor

    @property
    def num_resets(self) -> int:
        return sum(len(reset[0]) for reset in self.resets if reset is not None)


def _raw_step(env: MujocoBatchEnv, data: TensorDict, action: torch.Tensor) -> torch.Tensor | None:
    """A step, and a reset of what ended, without TorchRL's `step` and `reset` around them."""
    done = env._step(data.set("action", action)).get("done")
    if not done.any():
        return None
    env._reset(TensorDict({"_reset": done}, batch_size=env.batch_size))
    return done


def record(env: MujocoBatchEnv, settings: Settings, rng: np.random.Generator) -> Recording:
    """Steps the environment for about the time of a repetition and writes down what happens.

    The clocks of the episodes are spread over the time limit first: rows of a task without
    another end would otherwise all be reset in the same step, of some repetitions only.
    """
    num_envs, model = env.num_envs, env.model
    low, high = model.actuator_ctrlrange.T
    empty = TensorDict({}, batch_size=env.batch_size)

    def draw(steps: int) -> torch.Tensor:
        return torch.from_numpy(draw_actions(rng, low, high, (steps, num_envs, model.nu)))

    env.reset()
    state = env.get_state()
    if env.max_episode_steps is not None:
        state["elapsed_steps"] = torch.from_numpy(
            rng.integers(0, env.max_episode_steps, num_envs, dtype=np.int64)
        )
    env.set_state(state)
    actions = draw(settings.burn_in)
    began = time.perf_counter()
    for action in actions:
        _raw_step(env, empty, action)
    per_step = (time.perf_counter() - began) / len(actions)

    start = env.get_state()
    actions = draw(max(1, math.ceil(settings.seconds / per_step)))
    resets: list[tuple[np.ndarray, np.ndarray, np.ndarray] | None] = []
    for action in actions:
        done = _raw_step(env, empty, action)
        if done is None:
            resets.append(None)
            continue
        rows = np.flatnonzero(done.numpy())
        # mjSTATE_INTEGRATION begins with time, qpos and qvel.
        physics = env.get_state(rows)["physics"].numpy()
        qpos, qvel, _ = np.split(physics[:, 1:], [model.nq, model.nq + model.nv], axis=1)
        resets.append((rows, qpos.copy(), qvel.copy()))
    return Recording(start, actions, resets, env.get_state()["physics"])


class _Replay(Contender):
    """Replays a recording, and checks at construction that it does."""

    def __init__(self, name: str, recording: Recording) -> None:
        super().__init__(name, len(recording.start))
        self._recording = recording
        self.prepare()
        self.run()
        if not torch.equal(self._get_physics(), recording.end):
            raise RuntimeError(f"{name} did not end in the state that was recorded.")

    @abc.abstractmethod
    def _get_physics(self) -> torch.Tensor: ...


class BarePhysics(_Replay):
    """`mujoco.batch.Batch` and nothing else: controls, steps and the recorded resets."""

    def __init__(self, env: MujocoBatchEnv, recording: Recording, settings: Settings) -> None:
        self._frame_skip = env.task.frame_skip
        self._batch = Batch(env.model, env.num_envs, min(settings.threads, env.num_envs))
        # Views of the state, so that no derived field is copied out.
        self._qpos, self._qvel, self._ctrl = map(self._batch.bind, ("qpos", "qvel", "ctrl"))
        super().__init__("physics", recording)

    def prepare(self) -> None:
        self._batch.state[:] = self._recording.start["physics"].numpy()

    def run(self) -> int:
        batch, qpos, qvel, ctrl = self._batch, self._qpos, self._qvel, self._ctrl
        frame_skip, no_stage = self._frame_skip, mujoco.mjtStage.mjSTAGE_NONE.value
        actions = self._recording.actions.numpy()
        for action, reset in zip(actions, self._recording.resets, strict=True):
            ctrl[:] = action
            batch.step(nstep=frame_skip)
            if reset is not None:
                rows, new_qpos, new_qvel = reset
                batch.reset(rows, stage=no_stage)
                qpos[rows] = new_qpos
                qvel[rows] = new_qvel
                batch.forward(rows)
        return len(actions) * self.num_envs

    def _get_physics(self) -> torch.Tensor:
        return torch.from_numpy(self._batch.state)

    def close(self) -> None:
        del self._batch, self._qpos, self._qvel, self._ctrl


class BatchEnv(_Replay):
    """:class:`MujocoBatchEnv` through TorchRL, `step_and_maybe_reset`."""

    def __init__(self, name: str, env: MujocoBatchEnv, recording: Recording) -> None:
        self._env = env
        super().__init__(name, recording)

    def prepare(self) -> None:
        self._data = self._env.reset()
        self._env.set_state(self._recording.start)

    def run(self) -> int:
        env, data = self._env, self._data
        for action in self._recording.actions:
            data.set("action", action)
            _, data = env.step_and_maybe_reset(data)
        return len(self._recording.actions) * self.num_envs

    def _get_physics(self) -> torch.Tensor:
        return self._env.get_state()["physics"]


class RawBatchEnv(BatchEnv):
    """:class:`MujocoBatchEnv` without TorchRL's own share of a step: `_step` and `_reset`."""

    def run(self) -> int:
        env, data = self._env, TensorDict({}, batch_size=self._env.batch_size)
        for action in self._recording.actions:
            _raw_step(env, data, action)
        return len(self._recording.actions) * self.num_envs


def make_replays(
    env: MujocoBatchEnv, settings: Settings, rng: np.random.Generator
) -> list[Contender]:
    """The three contenders over one environment, which the caller closes."""
    recording = record(env, settings, rng)
    ended = recording.num_resets / (len(recording.actions) * env.num_envs)
    print(
        f"  {env.num_envs:>5} envs: {len(recording.actions)} steps a repetition, "
        f"{100 * ended:.2f} % of the frames end an episode"
    )
    return [
        BarePhysics(env, recording, settings),
        BatchEnv("env", env, recording),
        RawBatchEnv("env_raw", env, recording),
    ]

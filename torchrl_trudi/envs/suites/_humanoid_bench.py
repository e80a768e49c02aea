"""HumanoidBench: plain Gymnasium tasks, in vectorised environments.

https://github.com/carlosferrazza/humanoid-bench
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.data import Categorical, TensorSpec
from torchrl.envs import EnvBase
from torchrl.envs.gym_like import BaseInfoDictReader

from torchrl_trudi.envs._gymnasium import make_gymnasium_env
from torchrl_trudi.envs._validation import did_you_mean
from torchrl_trudi.envs.observation_keys import SUCCESS_KEY
from torchrl_trudi.envs.suites.registry import list_tasks


class HumanoidBenchWrapper(gymnasium.Wrapper):
    """One sub-environment, without what HumanoidBench does to its surroundings.

    Some of its tasks draw their goals from NumPy's global generator, which nothing seeds: here each
    has a state of its own, set by ``reset(seed=...)``, and the global one is left as it was. Some
    report success, in ``info["success"]``, and not in every step: here it is always there.

    Args:
        env (gymnasium.Env): the task.
    """

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self._random_state = np.random.RandomState().get_state()

    @contextlib.contextmanager
    def _own_random_state(self) -> Iterator[None]:
        outer = np.random.get_state()
        np.random.set_state(self._random_state)
        try:
            yield
        finally:
            self._random_state = np.random.get_state()
            np.random.set_state(outer)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """As :meth:`gymnasium.Env.reset`.

        Keyword Args:
            seed (int, optional): also that of this environment's global random numbers.
            options (dict, optional): passed on.

        Returns:
            tuple: the observation, and ``info`` with ``"success"``.
        """
        if seed is not None:
            self._random_state = np.random.RandomState(seed).get_state()
        with self._own_random_state():
            observation, info = self.env.reset(seed=seed, options=options)
        return observation, _with_success(info)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """As :meth:`gymnasium.Env.step`.

        Args:
            action (numpy.ndarray): the action.

        Returns:
            tuple: observation, reward, terminated, truncated, and ``info`` with ``"success"``.
        """
        with self._own_random_state():
            observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, bool(terminated), bool(truncated), _with_success(info)


def _with_success(info: dict[str, Any]) -> dict[str, Any]:
    # Nothing else is read, and it may be of any type.
    return {SUCCESS_KEY: bool(info.get(SUCCESS_KEY, False))}


class _SuccessReader(BaseInfoDictReader):
    """Writes the success flags ``[num_envs, 1]`` into the tensordict."""

    def __init__(self, num_envs: int, device: torch.device) -> None:
        self._num_envs, self._device = num_envs, device

    def __call__(self, info_dict: dict[str, Any], tensordict: TensorDictBase) -> TensorDictBase:
        success = info_dict.get(SUCCESS_KEY, np.zeros(self._num_envs, dtype=bool))
        flags = torch.as_tensor(np.asarray(success, dtype=bool), device=self._device)
        return tensordict.set(SUCCESS_KEY, flags.reshape(self._num_envs, 1))

    @property
    def info_spec(self) -> dict[str, TensorSpec]:
        """The spec of the flags.

        Returns:
            dict: by their key.
        """
        shape = (self._num_envs, 1)
        return {SUCCESS_KEY: Categorical(2, shape, dtype=torch.bool, device=self._device)}


def _make_one(make: Callable[[], gymnasium.Env]) -> gymnasium.Env:
    # HumanoidBench writes a line for each environment.
    with contextlib.redirect_stdout(io.StringIO()):
        return HumanoidBenchWrapper(make())


def make(
    task: str,
    num_envs: int,
    *,
    seed: int | None,
    device: torch.device,
    num_threads: int | None,
    vectorization: str,
    max_episode_steps: int | None,
    env_kwargs: Mapping[str, Any],
) -> EnvBase:
    """Makes a task of HumanoidBench, without transforms.

    Raises:
        ValueError: if there is no such task, if ``num_threads`` is given, or if the task opens a
            viewer and ``render_mode`` does not name one.
        TypeError: if the task does not accept one of ``env_kwargs``.
    """
    if num_threads is not None:
        raise ValueError(
            "num_threads belongs to the MuJoCo backend and EnvPool; HumanoidBench steps its "
            "environments one after the other, or in a process each (vectorization='async')."
        )
    if task not in gymnasium.registry:
        listed = [each.task for each in list_tasks("humanoid_bench") if not each.variants]
        raise ValueError(f"HumanoidBench has no task {task!r}.{did_you_mean(task, listed)}")
    try:
        env = make_gymnasium_env(
            task,
            num_envs,
            device=device,
            vectorization=vectorization,
            max_episode_steps=max_episode_steps,
            # Its default opens a viewer for each environment, of a gigabyte.
            env_kwargs={"render_mode": None, **env_kwargs},
            wrap=_make_one,
        )
    except AttributeError as error:
        if "Unexpected mode" not in str(error):
            raise
        raise ValueError(
            f"{task!r} opens a viewer when it is made: give render_mode='rgb_array', which needs an "
            "OpenGL context (MUJOCO_GL=egl) and about a gigabyte for each environment."
        ) from error
    try:
        env.set_info_dict_reader(_SuccessReader(num_envs, device))
        if seed is not None:
            env.set_seed(seed)
    except Exception:
        env.close()
        raise
    return env

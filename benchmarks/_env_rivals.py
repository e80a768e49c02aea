"""What `bench_envs.py` compares the batched environment with, and collectors over it."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import torch
from _env_contenders import Contender, Loop, Settings, draw_actions
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from torchrl.collectors import Collector
from torchrl.envs import EnvBase
from torchrl.envs.transforms import VecNormV2
from torchrl.envs.utils import RandomPolicy

from torchrl_trudi.envs import make_env
from torchrl_trudi.envs.mujoco import MujocoBatchEnv

HAS_ENVPOOL = importlib.util.find_spec("envpool") is not None

# The pre-drawn actions are gone through again and again.
_ACTION_POOL = 128


class VectorLoop(Loop):
    """A vector environment with Gymnasium's interface, its own loop and its own autoreset.

    The call after an episode's end resets the environment instead of stepping it, and is not
    counted as a frame.
    """

    def __init__(
        self, name: str, env: Any, num_envs: int, settings: Settings, rng: np.random.Generator
    ) -> None:
        self._env = env
        space = env.action_space if name == "envpool" else env.single_action_space
        shape = (_ACTION_POOL, num_envs, *space.shape)
        self._actions = draw_actions(rng, space.low, space.high, shape)
        self._env.reset()
        self._num_ended = 0
        super().__init__(name, num_envs, settings)

    def _step(self, step: int) -> int:
        stepped = self.num_envs - self._num_ended
        _, _, terminated, truncated, _ = self._env.step(self._actions[step % _ACTION_POOL])
        self._num_ended = np.count_nonzero(terminated | truncated)
        return stepped

    def close(self) -> None:
        self._env.close()


class TorchRLLoop(Loop):
    """A TorchRL environment, `step_and_maybe_reset`."""

    def __init__(
        self, name: str, env: EnvBase, settings: Settings, rng: np.random.Generator
    ) -> None:
        self._env = env
        low, high = env.action_spec_unbatched.space.low, env.action_spec_unbatched.space.high
        (num_envs,) = env.batch_size
        shape = (_ACTION_POOL, num_envs, *low.shape)
        self._actions = torch.from_numpy(draw_actions(rng, low.numpy(), high.numpy(), shape))
        self._data = env.reset()
        super().__init__(name, num_envs, settings)

    def _step(self, step: int) -> int:
        self._data.set("action", self._actions[step % _ACTION_POOL])
        _, self._data = self._env.step_and_maybe_reset(self._data)
        return self.num_envs

    def close(self) -> None:
        self._env.close()


def make_rivals(
    task: str, num_envs: int, settings: Settings, rng: np.random.Generator
) -> list[Contender]:
    """Gymnasium, and TorchRL over Gymnasium."""
    makers = [lambda: gymnasium.make(task)] * num_envs
    return [
        # First, because it forks. TorchRL makes "spawn" the default when it is imported; each
        # process would import Torch then.
        VectorLoop("gym_async", AsyncVectorEnv(makers, context="fork"), num_envs, settings, rng),
        VectorLoop("gym_sync", SyncVectorEnv(makers), num_envs, settings, rng),
        TorchRLLoop(
            "torchrl_gym",
            make_env(task, num_envs, backend="gymnasium", normalize_observation=False),
            settings,
            rng,
        ),
    ]


def envpool_tasks() -> list[str]:
    """The tasks that EnvPool has; none if it is not installed."""
    if not HAS_ENVPOOL:
        return []
    import envpool

    return envpool.list_all_envs()


def make_envpool(
    task: str, num_envs: int, settings: Settings, rng: np.random.Generator
) -> list[Contender]:
    """EnvPool, if it is installed and has the task."""
    if task not in envpool_tasks():
        return []
    import envpool

    threads = min(settings.threads, num_envs)
    env = envpool.make_gymnasium(task, num_envs=num_envs, num_threads=threads, seed=0)
    return [VectorLoop("envpool", env, num_envs, settings, rng)]


# Collection


class CollectorLoop(Loop):
    """TorchRL's collector with random actions; a step is a batch of 16 steps of each environment."""

    def __init__(self, name: str, env: EnvBase, settings: Settings) -> None:
        (num_envs,) = env.batch_size
        self._collector = Collector(
            env,
            RandomPolicy(env.action_spec),
            frames_per_batch=16 * num_envs,
            total_frames=-1,
            auto_register_policy_transforms=False,
        )
        self._batches = iter(self._collector)
        super().__init__(name, num_envs, settings)

    def _step(self, step: int) -> int:
        return next(self._batches).numel()

    def close(self) -> None:
        self._collector.shutdown()


def make_collectors(task: str, num_envs: int, settings: Settings) -> list[Contender]:
    """Collectors over more and more of the environment that training uses."""

    def training_env(**kwargs: Any) -> EnvBase:
        return make_env(
            task,
            num_envs,
            num_threads=settings.threads,
            normalize_action=True,
            reward_scale=0.1,
            backend="mujoco",
            **kwargs,
        )

    makers: dict[str, Callable[[], EnvBase]] = {
        "collector_bare": lambda: MujocoBatchEnv(task, num_envs, num_threads=settings.threads),
        "collector_no_norm": lambda: training_env(normalize_observation=False),
        "collector_running_norm": training_env,
        # Where the other one would be; infinite memory, as that has.
        "collector_vecnorm_v2": lambda: training_env(normalize_observation=False).append_transform(
            VecNormV2(["observation"], decay=1.0, reduce_batch_dims=True)
        ),
    }
    # Its steps are batches.
    settings = replace(settings, burn_in=math.ceil(settings.burn_in / 16))
    return [CollectorLoop(name, make(), settings) for name, make in makers.items()]

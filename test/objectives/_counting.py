"""One task that counts its steps, built in each of the ways in which an environment can be made.

The observation is the step count ``t``, from 0 at each reset, so that ``V(s) = s`` is known at every
state and the state after a reset cannot be taken for a final one. The reward of a step from ``t`` is
``1 + t / 2``. At each reset a length of 2 to 6 is drawn: the episode terminates there, and is truncated
after :data:`LIMIT` steps. So one rollout has all three kinds of end: terminated (2 to 4), both in one
step (5), truncated (6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import gymnasium
import mujoco
import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data import Binary, Bounded, Composite, Unbounded
from torchrl.envs import EnvBase, GymEnv

from torchrl_trudi.envs import MujocoTask, make_env, register_task
from torchrl_trudi.envs.mujoco.task import _REGISTRY

LIMIT = 5
NAME = "TestCounting-v0"


class CountingEnv(EnvBase):
    """The task as a batched TorchRL environment."""

    def __init__(self, num_envs: int, seed: int) -> None:
        super().__init__(batch_size=[num_envs])
        column = (num_envs, 1)
        self.observation_spec = Composite(observation=Unbounded(column), shape=self.batch_size)
        self.action_spec = Bounded(-torch.ones(column), torch.ones(column))
        self.reward_spec = Unbounded(column)
        self.done_spec = Composite(
            {
                key: Binary(1, column, dtype=torch.bool)
                for key in ("done", "terminated", "truncated")
            },
            shape=self.batch_size,
        )
        self.count, self.length = torch.zeros(column), torch.zeros(column)
        self.set_seed(seed)

    def _set_seed(self, seed: int | None) -> None:
        self.rng = np.random.default_rng(seed)

    def _output(self, terminated: torch.Tensor, truncated: torch.Tensor) -> TensorDict:
        return TensorDict(
            {
                "observation": self.count.clone(),
                "terminated": terminated,
                "truncated": truncated,
                "done": terminated | truncated,
            },
            self.batch_size,
        )

    def _reset(self, tensordict: TensorDict | None = None, **kwargs) -> TensorDict:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        mask = torch.ones_like(self.count, dtype=torch.bool) if mask is None else mask
        drawn = torch.from_numpy(self.rng.integers(2, 7, self.count.shape)).to(self.count)
        self.count = self.count.masked_fill(mask, 0.0)
        self.length = torch.where(mask, drawn, self.length)
        flags = torch.zeros_like(mask)
        return self._output(flags, flags.clone())

    def _step(self, tensordict: TensorDict) -> TensorDict:
        reward = 1 + self.count / 2
        self.count = self.count + 1
        return self._output(self.count >= self.length, self.count >= LIMIT).set("reward", reward)


class CountingGymnasium(gymnasium.Env):
    """The task as a Gymnasium environment, truncated by its registration."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0.0, np.inf, (1,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.length = 0, self.np_random.integers(2, 7)
        return np.array([self.count], np.float32), {}

    def step(self, action):
        reward = 1 + self.count / 2
        self.count += 1
        return np.array([self.count], np.float32), reward, self.count >= self.length, False, {}


# The first hinge turns by one radian per step, the second holds the length, the third is pushed.
HINGES = """<mujoco>
  <option timestep="1" gravity="0 0 0" integrator="Euler"/>
  <worldbody>
    <body><joint name="count" axis="0 0 1"/><geom size=".1"/></body>
    <body pos="1 0 0"><joint name="length" axis="0 0 1"/><geom size=".1"/></body>
    <body pos="2 0 0"><joint name="pushed" axis="0 0 1"/><geom size=".1"/></body>
  </worldbody>
  <actuator><motor joint="pushed" gear=".001" ctrlrange="-1 1"/></actuator>
</mujoco>"""


class CountingHinges(MujocoTask):
    """The task as a user's task of :class:`MujocoBatchEnv`."""

    def __init__(self) -> None:
        model = mujoco.MjSpec.from_string(HINGES)
        super().__init__(model, frame_skip=1, max_episode_steps=LIMIT)

    def initial_state(self, sims, rng):
        qpos, qvel = np.zeros((len(sims), 3)), np.zeros((len(sims), 3))
        qpos[:, 1] = np.floor(rng.uniform(2.0, 7.0, 1))[:, 0]
        qvel[:, 0] = 1.0
        return qpos, qvel

    def observation(self, sims):
        return np.rint(sims.qpos[:, :1])

    def reward(self, sims, action, before, after):
        return 1 + (np.rint(sims.qpos[:, 0]) - 1) / 2

    def terminated(self, sims):
        return np.rint(sims.qpos[:, 0]) >= np.rint(sims.qpos[:, 1])


@contextmanager
def registered() -> Iterator[None]:
    """The task is known to Gymnasium and to :class:`MujocoBatchEnv` inside the block."""
    gymnasium.register(NAME, entry_point=CountingGymnasium, max_episode_steps=LIMIT)
    register_task(NAME, CountingHinges)
    try:
        yield
    finally:
        del gymnasium.registry[NAME], _REGISTRY[NAME]


def _made(backend: str, num_envs: int, **kwargs) -> Callable[[int], EnvBase]:
    return lambda seed: make_env(
        NAME, num_envs, seed=seed, backend=backend, normalize_observation=False, **kwargs
    )


def _made_by_torchrl(seed: int) -> EnvBase:
    env = GymEnv(NAME)
    env.set_seed(seed)
    return env


PATHS: dict[str, Callable[[int], EnvBase]] = {
    "batched": lambda seed: CountingEnv(3, seed),
    "mujoco": _made("mujoco", 3),
    "mujoco-one": _made("mujoco", 1),
    "gymnasium": _made("gymnasium", 3),
    "gymnasium-one": _made("gymnasium", 1),
    "gymnasium-async": _made("gymnasium", 2, vectorization="async"),
    "torchrl-gym": _made_by_torchrl,
}
"""Ways to make the environment, by name; each takes a seed."""

"""Tasks and environments that go wrong on demand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import EnvBase

NAME = "TestFaulty-v0"


class Faulty(gymnasium.Env):
    """Observes ``[offset, step]`` with reward ``step``; an episode has ``length`` steps.

    The offset is drawn at each reset. In the episodes of the row whose number is ``row``, the step
    ``at`` returns ``value`` in its ``"observation"`` or ``"reward"``, in the first ``episodes`` of
    them; ``at=0`` is the reset.
    """

    made = 0  # rows are told apart by the order in which they are built

    def __init__(
        self, length=5, row=1, at=3, where="observation", value=np.nan, episodes=1, dtype=np.float64
    ) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), dtype)
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.length, self.at, self.where, self.value = length, at, where, value
        # One more is built first, for its spaces.
        self.faulty = Faulty.made - 1 == row
        Faulty.made += 1
        self.left = episodes

    def _observe(self, fault: bool):
        value = self.value if fault and self.where == "observation" else self.time
        return np.array([self.offset, value], self.observation_space.dtype)

    def _fault(self) -> bool:
        if not self.faulty or self.time != self.at or not self.left:
            return False
        self.left -= 1
        return True

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.offset = 0, self.np_random.uniform()
        return self._observe(self._fault()), {}

    def step(self, action):
        self.time += 1
        fault = self._fault()
        reward = self.value if fault and self.where == "reward" else float(self.time)
        return self._observe(fault), reward, self.time == self.length, False, {}


@contextmanager
def registered() -> Iterator[None]:
    Faulty.made = 0
    gymnasium.register(NAME, entry_point=Faulty, max_episode_steps=100)
    try:
        yield
    finally:
        del gymnasium.envs.registration.registry[NAME]


class FloatDone(EnvBase):
    """Flags of floating point type; the row 0 has a NaN in its ``flag`` at the second step."""

    def __init__(self, flag: str) -> None:
        super().__init__(batch_size=[2])
        self.flag, self.time = flag, 0
        self.observation_spec = Composite(observation=Unbounded((2, 1)), shape=(2,))
        self.action_spec = Bounded(-1, 1, (2, 1))
        self.reward_spec = Unbounded((2, 1))
        self.done_spec = Composite(
            {key: Unbounded((2, 1)) for key in ("done", "terminated", "truncated")}, shape=(2,)
        )

    def _flags(self, value: float = 0.0) -> dict[str, torch.Tensor]:
        flags = {key: torch.zeros(2, 1) for key in ("done", "terminated", "truncated")}
        flags[self.flag][0] = value
        return flags

    def _reset(self, tensordict, **kwargs):
        self.time = 0
        return TensorDict({"observation": torch.zeros(2, 1), **self._flags()}, [2])

    def _step(self, tensordict):
        self.time += 1
        observation = torch.full((2, 1), float(self.time))
        flags = self._flags(torch.nan if self.time == 2 else 0.0)
        return TensorDict({"observation": observation, "reward": observation, **flags}, [2])

    def _set_seed(self, seed) -> None:
        pass

"""Tasks that are small enough to predict every number of."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces


class Counter(gymnasium.Env):
    """Observes ``[offset, step]``; terminates after ``length`` steps, with reward ``step``.

    The offset is drawn at each reset. ``nan_at`` returns a NaN at that step, in the episodes
    whose offset is below ``nan_below``.
    """

    def __init__(self, length: int = 3, nan_at: int = -1, nan_below: float = np.inf) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.length, self.nan_at, self.nan_below = length, nan_at, nan_below

    def _observe(self):
        is_nan = self.step_count == self.nan_at and self.offset < self.nan_below
        return np.array([self.offset, np.nan if is_nan else self.step_count], np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.step_count, self.offset = 0, self.np_random.uniform()
        return self._observe(), {}

    def step(self, action):
        self.step_count += 1
        terminated = self.step_count == self.length
        return self._observe(), float(self.step_count), terminated, False, {}


class AnySpaces(Counter):
    """A counter whose observation is drawn from any space, with any action space."""

    def __init__(self, observation_space=None, action_space=None) -> None:
        super().__init__()
        self.observation_space = observation_space or self.observation_space
        self.action_space = action_space or self.action_space

    def _observe(self):
        if self.step_count == 0:
            self.observation_space.seed(int(self.offset * 1e6))
        return self.observation_space.sample()


@pytest.fixture(autouse=True)
def _tasks() -> Iterator[None]:
    tasks = {"TestCounter-v0": Counter, "TestAnySpaces-v0": AnySpaces}
    for name, entry_point in tasks.items():
        gymnasium.register(name, entry_point=entry_point, max_episode_steps=100)
    yield
    for name in tasks:
        del gymnasium.envs.registration.registry[name]


@pytest.fixture
def dict_space() -> spaces.Dict:
    return spaces.Dict(
        {
            "proprio": spaces.Box(-5.0, 5.0, (3,), np.float64),
            "goal": spaces.Dict({"xy": spaces.Box(-1.0, 1.0, (2,), np.float32)}),
            "pixel_row": spaces.Box(0, 255, (4,), np.uint8),
        }
    )


@pytest.fixture
def make_space() -> Callable[..., spaces.Box]:
    return lambda low, high, dtype=np.float32: spaces.Box(low, high, (2,), dtype)

"""EnvPool: C++ ports of Gymnasium's and dm_control's MuJoCo tasks, Playground's robots, and more.

https://github.com/sail-sg/envpool
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from torchrl_trudi.envs._gymnasium import _check_action_space
from torchrl_trudi.envs._seeding import first_seed
from torchrl_trudi.envs._validation import RESERVED_KEYS, did_you_mean, list_rows
from torchrl_trudi.envs.cpus import available_cpus
from torchrl_trudi.envs.observation_keys import PRIVILEGED_KEY, SUCCESS_KEY
from torchrl_trudi.envs.suites.registry import list_tasks

# Playground's names of what the policy and what only the critic sees.
_RENAMED = {"state": "observation", "privileged_state": PRIVILEGED_KEY}

# What EnvPoolEnv decides itself.
_DECIDED = {"num_envs", "batch_size", "seed", "env_seed", "num_threads", "max_num_players"} | {
    "max_episode_steps",
    "gym_reset_return_info",
    "from_pixels",
}


class EnvPoolEnv(EnvBase):
    """A task of EnvPool as a TorchRL environment with TorchRL's resets.

    EnvPool resets a row in the step after its episode's last, and returns the row's new first
    observation from that step, with reward 0 and ``elapsed_step == 0``: a transition that did not
    happen, in which the action was dropped. Here a row that is done is reset by ``reset``, as TorchRL
    asks for, by its number, so that the step after it is the first of its episode. The last
    observation of an episode is the true final one, as EnvPool returns it. A row that is stepped though
    it is done, without a reset, would give such a transition: that is an error.

    Further differences from ``torchrl.envs.MultiThreadedEnv``: partial resets return the rows in
    their places, seeds are EnvPool's own lists of seeds, flags and rewards have the shape
    ``[num_envs, 1]``, and everything is float32.

    Args:
        task (str): a task of EnvPool with a bounded Box action.
        num_envs (int): number of sub-environments.

    Keyword Args:
        seed (int, optional): sub-environment ``i`` gets ``first_seed(seed) + i``. Defaults to
            ``None``: a fresh one (EnvPool's own default is always 42).
        device (torch.device, optional): device of the tensordicts; EnvPool's arrays are copied to it.
            Defaults to ``None``, the CPU.
        num_threads (int, optional): threads of EnvPool. Defaults to ``None``, as many as this process
            has CPUs.
        max_episode_steps (int, optional): truncates episodes. Defaults to ``None``, the limit of the
            task.
        env_kwargs (Mapping[str, Any], optional): further options of ``envpool.make``. Defaults to
            none.

    Raises:
        ValueError: if the task is not known or its spaces are not supported.
        TypeError: if EnvPool has no such option for the task.
        RuntimeError: later, by ``step``, if a row that is done was not reset.
    """

    batch_locked = True

    def __init__(
        self,
        task: str,
        num_envs: int,
        *,
        seed: int | None = None,
        device: torch.device | None = None,
        num_threads: int | None = None,
        max_episode_steps: int | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        device = torch.device("cpu") if device is None else device
        super().__init__(device=device, batch_size=torch.Size([num_envs]))
        self.task, self.num_envs = task, num_envs
        options = dict(env_kwargs or {})
        _check_options(task, options)
        # More threads than rows would only wait.
        threads = min(available_cpus() if num_threads is None else num_threads, num_envs)
        self._options = {**options, "num_envs": num_envs, "num_threads": threads}
        if max_episode_steps is not None:
            self._options["max_episode_steps"] = max_episode_steps
        self._make_specs()
        self._pool: Any = None
        self._last: TensorDict | None = None
        self.set_seed(seed)

    def _make_specs(self) -> None:
        import envpool

        with _explained(self.task):
            spec = envpool.make_spec(self.task, **self._options)
        action = spec.gymnasium_action_space
        _check_action_space(self.task, action)
        observation = spec.gymnasium_observation_space
        spaces = (
            observation.spaces
            if isinstance(observation, gymnasium.spaces.Dict)
            else {"observation": observation}
        )
        self._entries = _names(self.task, spaces)
        self._success = "info:success" in spec.state_array_spec
        shape = self.batch_size
        keys: dict[str, Any] = {
            key: Unbounded((*shape, int(np.prod(spaces[name].shape or ()))), device=self.device)
            for name, key in self._entries.items()
        }
        if self._success:
            keys[SUCCESS_KEY] = _flag(shape, self.device)
        self.observation_spec = Composite(keys, shape=shape, device=self.device)
        low, high = (
            torch.as_tensor(bound, dtype=torch.float32, device=self.device).expand(*shape, -1)
            for bound in (action.low, action.high)
        )
        self.action_spec = Bounded(low=low, high=high, dtype=torch.float32, device=self.device)
        self.reward_spec = Unbounded((*shape, 1), device=self.device)
        flags: dict[str, Any] = {
            key: _flag(shape, self.device) for key in ("done", "terminated", "truncated")
        }
        self.done_spec = Composite(flags, shape=shape, device=self.device)

    def _set_seed(self, seed: int | None) -> None:
        # EnvPool takes seeds when it is made, and no later: it is made anew at the next reset.
        if seed is None:
            seed = int(np.random.SeedSequence().generate_state(1)[0])
        first = first_seed(seed)
        self._seeds = [first + row for row in range(self.num_envs)]
        self._close_pool()

    def _make_pool(self) -> Any:
        import envpool

        with _explained(self.task):
            return envpool.make_gymnasium(self.task, seed=self._seeds, **self._options)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if self._pool is None:
            self._pool, self._last = self._make_pool(), None
        if mask is not None and self._last is not None:
            rows = mask.reshape(self.batch_size).cpu()
        else:
            rows = torch.ones(self.batch_size, dtype=torch.bool)
        numbers = rows.nonzero().squeeze(-1)
        last = self._last if self._last is not None else self.observation_spec.zero().cpu()
        if numbers.numel():
            observation, info = self._pool.reset(numbers.numpy().astype(np.int32))
            # EnvPool answers in the order in which its threads finish.
            order = torch.from_numpy(np.array(info["env_id"], dtype=np.int64))
            fresh = self._observe(observation, {}, numbers.numel())
            last = last.clone()
            last[order] = fresh
        self._last = last
        return last.clone().to(self.device).update(self.done_spec.zero())

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self._pool is None:
            raise RuntimeError(f"the environment {self.task!r} was stepped before its reset.")
        action = tensordict.get("action").detach().cpu().numpy()
        observation, reward, terminated, truncated, info = self._pool.step(action)
        order = torch.from_numpy(np.array(info["env_id"], dtype=np.int64))
        fake = np.asarray(info["elapsed_step"]) == 0
        if fake.any():
            raise RuntimeError(
                f"rows {list_rows(sorted(order[torch.from_numpy(fake)].tolist()))} of {self.task!r} "
                "were done and were stepped without a reset: EnvPool reset them itself and dropped "
                "their actions. TorchRL's rollout and collectors reset in time."
            )
        result = self._observe(observation, info, self.num_envs)
        # EnvPool says "truncated" alone of an episode that also terminated in its last step; Playground's
        # tasks say so next to it.
        terminated = np.asarray(terminated) | (np.asarray(info.get("terminated", 0)) != 0)
        terminated, truncated = (
            torch.tensor(flag, dtype=torch.bool).unsqueeze(-1) for flag in (terminated, truncated)
        )
        result["reward"] = torch.tensor(reward, dtype=torch.float32).unsqueeze(-1)
        result["terminated"], result["truncated"] = terminated, truncated
        result["done"] = terminated | truncated
        # Into the order of the rows.
        result = result[order.argsort()]
        self._last = result.select(*self.observation_spec.keys()).clone()
        return result.to(self.device)

    def _observe(self, observation: Any, info: Mapping[str, Any], rows: int) -> TensorDict:
        entries = observation if isinstance(observation, dict) else {"observation": observation}
        # torch.tensor copies: EnvPool may write its next answer into the same memory.
        data: dict[str, Any] = {
            key: torch.tensor(np.asarray(entries[name]), dtype=torch.float32).reshape(rows, -1)
            for name, key in self._entries.items()
        }
        if self._success:
            success = info.get("success", np.zeros(rows))
            data[SUCCESS_KEY] = torch.tensor(np.asarray(success) != 0).reshape(rows, 1)
        return TensorDict(data, [rows])

    def _close_pool(self) -> None:
        # getattr: EnvBase may close an environment whose construction failed.
        if getattr(self, "_pool", None) is not None:
            self._pool.close()
        self._pool = None

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Frees the simulations.

        Keyword Args:
            raise_if_closed (bool, optional): as for every TorchRL environment. Defaults to
                ``True``.
        """
        self._close_pool()
        super().close(raise_if_closed=raise_if_closed)


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
) -> EnvPoolEnv:
    """Makes a task of EnvPool, without transforms; see :class:`EnvPoolEnv`.

    Raises:
        ValueError: also if ``vectorization`` is not ``"sync"``: EnvPool steps on its own threads.
    """
    if vectorization != "sync":
        raise ValueError(
            f"vectorization={vectorization!r} belongs to backend='gymnasium'; EnvPool steps on its "
            "own threads, num_threads of them."
        )
    return EnvPoolEnv(
        task,
        num_envs,
        seed=seed,
        device=device,
        num_threads=num_threads,
        max_episode_steps=max_episode_steps,
        env_kwargs=env_kwargs,
    )


def _flag(shape: torch.Size, device: torch.device | None) -> Categorical:
    return Categorical(2, (*shape, 1), dtype=torch.bool, device=device)


def _check_options(task: str, options: Mapping[str, Any]) -> None:
    import envpool

    names = envpool.list_all_envs()
    if task not in names:
        listed = [each.task for each in list_tasks("envpool")]
        # Of its thousands of names the listed ones are meant more often.
        hint = did_you_mean(task, listed) or did_you_mean(task, names)
        raise ValueError(f"{task!r} is not a task that EnvPool {envpool.__version__} knows.{hint}")
    decided = sorted(_DECIDED.intersection(options))
    if decided:
        raise TypeError(
            f"the options {decided} of EnvPool cannot be given: num_envs, seed, num_threads and "
            "max_episode_steps are arguments of make_env, and the others are decided there."
        )
    accepted = sorted(set(envpool.make_spec(task)._config_keys) - _DECIDED)
    for name in options:
        if name not in accepted:
            raise TypeError(
                f"EnvPool has no option {name!r} for {task!r}; it has {accepted}."
                f"{did_you_mean(name, accepted)}"
            )


def _names(task: str, spaces: Mapping[str, gymnasium.Space]) -> dict[str, str]:
    for name, space in spaces.items():
        if not isinstance(space, gymnasium.spaces.Box):
            raise ValueError(
                f"the entry {name!r} of the observation of {task!r} is {space}; a Box is needed."
            )
    # Both, or the name is the task's own.
    renamed = _RENAMED if set(_RENAMED) <= set(spaces) else {}
    names = {name: renamed.get(name, name) for name in spaces}
    taken = sorted(RESERVED_KEYS.intersection(names.values()))
    if taken:
        raise ValueError(f"the observation of {task!r} has the entries {taken}, which are taken.")
    return names


@contextlib.contextmanager
def _explained(task: str) -> Iterator[None]:
    try:
        yield
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"EnvPool cannot make {task!r}: {error}") from error

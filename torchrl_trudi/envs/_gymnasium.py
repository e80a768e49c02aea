"""Vectorised Gymnasium environments with TorchRL's reset semantics."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from torchrl.envs import GymWrapper

from torchrl_trudi.envs._seeding import first_seed
from torchrl_trudi.envs._validation import RESERVED_KEYS, did_you_mean, import_task
from torchrl_trudi.envs.mujoco import registered_tasks

VECTORIZATIONS = {"sync": SyncVectorEnv, "async": AsyncVectorEnv}


class GymnasiumVectorEnv(GymWrapper):
    """TorchRL wrapper of a Gymnasium vector environment that does not reset itself.

    With ``autoreset_mode=DISABLED``, resets are TorchRL's: the rows marked by ``"_reset"`` and no
    other, after the true final observation has been returned. Differs from the upstream wrapper
    where that falls short:

    - ``env.reset(tensordict)`` without a ``"_reset"`` entry resets everything (upstream reads the
      missing mask), and the mask may be on an accelerator;
    - seeds are hashed: sub-environment ``i`` gets ``first_seed(seed) + i``.

    Args:
        env (gymnasium.vector.VectorEnv): a vector environment with ``autoreset_mode=DISABLED``.
        **kwargs: arguments of :class:`~torchrl.envs.GymWrapper`.
    """

    first_seed = staticmethod(first_seed)

    def _set_seed(self, seed: int | None) -> None:
        super()._set_seed(None if seed is None else self.first_seed(seed))

    def _replace_reset(self, reset: torch.Tensor | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        if reset is None:
            return kwargs
        mask = reset.reshape(self.batch_size).cpu().numpy()
        return {**kwargs, "options": {**(kwargs.get("options") or {}), "reset_mask": mask}}


def make_gymnasium_env(
    name: str,
    num_envs: int,
    *,
    device: torch.device,
    vectorization: str,
    max_episode_steps: int | None,
    env_kwargs: Mapping[str, Any],
    wrap: Callable[[Callable[[], gymnasium.Env]], gymnasium.Env] | None = None,
) -> GymnasiumVectorEnv:
    """Builds the batched environment, without transforms.

    Args:
        name (str): a registered task, with its version; ``"module:Task-v0"`` imports ``module``
            first.
        num_envs (int): number of sub-environments.

    Keyword Args:
        device (torch.device): device of the tensordicts.
        vectorization (str): ``"sync"``, all in this process, or ``"async"``, one process each.
        max_episode_steps (int, optional): truncates episodes; ``None`` keeps the limit of the
            task.
        env_kwargs (Mapping[str, Any]): arguments of the task.
        wrap (callable, optional): makes each sub-environment from the function that would, and can be
            pickled. Defaults to ``None``, the function itself.

    Returns:
        GymnasiumVectorEnv: the environment, of batch size ``[num_envs]``.

    Raises:
        ValueError: if the task is not known or its spaces are not supported.
        TypeError: if the task does not accept one of ``env_kwargs``.
    """
    spec = _find_spec(name)
    # The spec rather than the name: worker processes need not have the task registered.
    make_one: Callable[[], gymnasium.Env] = functools.partial(
        gymnasium.make,
        spec,
        max_episode_steps=max_episode_steps,
        disable_env_checker=True,
        **env_kwargs,
    )
    if wrap is not None:
        make_one = functools.partial(wrap, make_one)
    _check_task(spec, make_one, env_kwargs)
    vector_class = VECTORIZATIONS[vectorization]
    vector = vector_class([make_one] * num_envs, autoreset_mode=AutoresetMode.DISABLED)
    return GymnasiumVectorEnv(vector, device=device)


def _find_spec(name: str) -> EnvSpec:
    task = import_task(name)
    registry = gymnasium.envs.registration.registry
    if task not in registry:
        raise ValueError(
            f"{task!r} is not a task that Gymnasium knows; names include the version "
            f"('Ant-v5'), and 'module:Task-v0' imports a module that registers it."
            f"{did_you_mean(task, [*registry, *registered_tasks()])}"
        )
    return registry[task]


def _check_task(
    spec: EnvSpec, make_one: Callable[[], gymnasium.Env], env_kwargs: Mapping[str, Any]
) -> None:
    # One instance is built for its spaces, so that an error comes before num_envs of them exist.
    try:
        env = make_one()
    except TypeError as err:
        match = re.search(r"unexpected keyword argument '(\w+)'", str(err))
        if match is None or match[1] not in env_kwargs:
            raise
        accepted = sorted(set(_constructor_arguments(spec)))
        raise TypeError(
            f"the task {spec.id!r} does not accept the argument {match[1]!r}; it accepts "
            f"{accepted}.{did_you_mean(match[1], accepted)}"
        ) from err
    try:
        _check_action_space(spec.id, env.action_space)
        _check_observation_space(spec.id, env.observation_space)
    finally:
        env.close()


def _constructor_arguments(spec: EnvSpec) -> Iterator[str]:
    # An `__init__` with **kwargs usually hands them to its parent, so all of them are listed.
    entry_point = spec.entry_point
    if entry_point is None:  # a task with a vectorised form only
        return
    creator = entry_point if callable(entry_point) else load_env_creator(entry_point)
    inits = (
        [base.__init__ for base in creator.__mro__ if "__init__" in vars(base)]
        if inspect.isclass(creator)
        else [creator]
    )
    for init in inits:
        for parameter in inspect.signature(init).parameters.values():
            named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if named and parameter.name != "self":
                yield parameter.name


def _check_action_space(name: str, space: gymnasium.Space) -> None:
    needed = "a Box action space of floating point dtype with finite bounds is needed"
    if not isinstance(space, gymnasium.spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        raise ValueError(f"the action space of {name!r} is {space}; {needed}.")
    if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        raise ValueError(f"the action space of {name!r} is unbounded, {space}; {needed}.")
    if len(space.shape) != 1:
        raise ValueError(
            f"the action space of {name!r} is {space}, of shape {space.shape}; a vector is needed. "
            "gymnasium.wrappers.TransformAction can reshape it."
        )


def _check_observation_space(
    name: str, space: gymnasium.Space, prefix: tuple[str, ...] = ()
) -> None:
    if isinstance(space, gymnasium.spaces.Dict):
        taken = RESERVED_KEYS.intersection(space.spaces) if not prefix else None
        if taken:
            raise ValueError(
                f"the observation of {name!r} has the entries {sorted(taken)}, names that the "
                "environment writes itself; rename them with a gymnasium wrapper."
            )
        for key, sub_space in space.spaces.items():
            _check_observation_space(name, sub_space, (*prefix, key))
    elif not isinstance(space, gymnasium.spaces.Box):
        where = f"entry {'/'.join(prefix)!r} of the observation" if prefix else "observation"
        raise ValueError(
            f"the {where} of {name!r} is {space}; a Box, or a Dict of Box, is needed. "
            "gymnasium.wrappers.FlattenObservation turns other spaces into a Box."
        )

"""From ``"suite/Task"`` to the adapter that makes its environment."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import gymnasium
import torch
from torchrl.envs import EnvBase

from torchrl_trudi.envs._validation import did_you_mean
from torchrl_trudi.envs.suites.registry import (
    SUITES,
    Suite,
    SuiteNotInstalledError,
    SuiteNotSupportedError,
    find_task,
    list_tasks,
)

__all__ = ["make_suite_env", "split_name"]


def split_name(name: Any) -> tuple[str, str]:
    """The suite of a task, and its name in it.

    A name without a slash is a task of Gymnasium. So is one whose first part is one of Gymnasium's
    own namespaces, and ``"module:anything"``: there the slash belongs to the task.

    Args:
        name (str): ``"suite/Task"``, or a task of Gymnasium.

    Returns:
        tuple of str: the suite and the task.

    Raises:
        TypeError: if ``name`` is not a string.
        ValueError: if what is before the slash is neither a suite nor a namespace. The message has
            the nearest suite.

    Examples:
        >>> from torchrl_trudi.envs.suites.dispatch import split_name
        >>> split_name("envpool/MetaWorld/Reach-v3")
        ('envpool', 'MetaWorld/Reach-v3')
        >>> split_name("Humanoid-v5")
        ('gymnasium', 'Humanoid-v5')
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be the name of a task, got {name!r}.")
    prefix, slash, task = name.partition("/")
    # What Gymnasium has under the whole name was there first.
    if not slash or ":" in name or name in gymnasium.registry:
        return "gymnasium", name
    if prefix in SUITES:
        return prefix, task
    if any(spec.namespace == prefix for spec in gymnasium.registry.values()):
        return "gymnasium", name  # whose error says that it has no such task
    raise ValueError(
        f"{prefix!r} in {name!r} is neither a suite, {list(SUITES)}, nor a namespace that Gymnasium "
        f"knows ('module:{name}' imports a module that registers it).{did_you_mean(prefix, SUITES)}"
    )


def make_suite_env(
    suite_name: str,
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
    """Builds the batched environment of a suite other than Gymnasium, without transforms.

    Args:
        suite_name (str): name of the suite.
        task (str): name of the task in it.
        num_envs (int): number of sub-environments.

    Keyword Args:
        seed (int, optional): seed of the batch; ``None``, not reproducible.
        device (torch.device): device of the tensordicts.
        num_threads (int, optional): threads of the simulator, where it has some.
        vectorization (str): ``"sync"`` or ``"async"``, where Gymnasium vectorises it.
        max_episode_steps (int, optional): truncates episodes; ``None`` keeps the limit of the task.
        env_kwargs (Mapping[str, Any]): arguments of the task.

    Returns:
        EnvBase: the environment, of batch size ``[num_envs]``.

    Raises:
        SuiteNotSupportedError: if this version has no adapter for the suite.
        SuiteNotInstalledError: if its simulator is not installed, or cannot be imported.
        ValueError: if the task is not known, stands for several or cannot be run.
        TypeError: if the task does not accept one of ``env_kwargs``.
    """
    suite = SUITES[suite_name]
    _check_variants(suite, task)
    if suite.adapter is None:
        instead = f" {suite.instead}." if suite.instead else ""
        raise SuiteNotSupportedError(
            f"the suite {suite.name!r} is not supported yet in this version of torchrl_trudi: its "
            f"tasks and presets are listed, and make_env cannot make {task!r}.{instead}"
            f"{_nearest(suite, task)}"
        )
    if not suite.is_installed():
        raise SuiteNotInstalledError(
            f"the suite {suite.name!r} is not installed: {suite.install}.{_nearest(suite, task)}"
        )
    try:
        importlib.import_module(suite.module)
    except ImportError as error:
        raise SuiteNotInstalledError(
            f"the suite {suite.name!r} cannot be imported ({error}). To install it: "
            f"{suite.install}."
        ) from error
    adapter = importlib.import_module(suite.adapter)
    return adapter.make(
        task,
        num_envs,
        seed=seed,
        device=device,
        num_threads=num_threads,
        vectorization=vectorization,
        max_episode_steps=max_episode_steps,
        env_kwargs=env_kwargs,
    )


def _check_variants(suite: Suite, task: str) -> None:
    listed = {each.task: each for each in list_tasks(suite.name)}
    if task in listed and (variants := find_task(f"{suite.name}/{task}").variants):
        names = " or ".join(repr(f"{suite.name}/{variant}") for variant in variants)
        raise ValueError(
            f"{suite.name}/{task} stands for two tasks in the paper's list, which does not say "
            f"which of them was run: name {names}."
        )


def _nearest(suite: Suite, task: str) -> str:
    names = [each.task for each in list_tasks(suite.name)]
    return "" if task in names else did_you_mean(task, names)

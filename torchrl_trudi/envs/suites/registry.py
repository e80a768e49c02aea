"""The suites, what they need, and how to find a task by its name."""

from __future__ import annotations

import dataclasses
import importlib.util

from torchrl_trudi.envs._validation import check_choice, did_you_mean
from torchrl_trudi.envs.suites.tasks import TASKS, SuiteTask

__all__ = [
    "SUITES",
    "Suite",
    "SuiteNotInstalledError",
    "SuiteNotSupportedError",
    "find_task",
    "get_suite",
    "list_tasks",
]


class SuiteNotInstalledError(ImportError):
    """A suite's simulator is not installed; the message says how to install it."""


class SuiteNotSupportedError(NotImplementedError):
    """A suite is listed, with its tasks and presets, and has no adapter in this version."""


@dataclasses.dataclass(frozen=True)
class Suite:
    """A simulator and its tasks.

    Attributes:
        name (str): the first part of ``"suite/task"``.
        module (str): the module that is imported when one of its environments is made, and not
            before.
        install (str): how to install it: a command, or where to read about it.
        adapter (str or None): the module that makes its environments, ``None`` if this version has
            none.
        instead (str or None): what to use meanwhile, if there is no adapter.

    Examples:
        >>> from torchrl_trudi.envs.suites import get_suite
        >>> get_suite("gymnasium").is_installed()
        True
    """

    name: str
    module: str
    install: str
    adapter: str | None = None
    instead: str | None = None

    def is_installed(self) -> bool:
        """Whether the simulator can be found. Nothing of it is imported.

        Returns:
            bool: whether its module is there.
        """
        try:
            return importlib.util.find_spec(self.module) is not None
        except ValueError:  # a module that was put into sys.modules without a spec
            return True


_ADAPTERS = "torchrl_trudi.envs.suites"

SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        # Made by make_env itself.
        Suite("gymnasium", "gymnasium", 'pip install "gymnasium[mujoco]"', "torchrl_trudi.envs"),
        Suite(
            "playground",
            "mujoco_playground",
            "pip install playground brax mujoco-mjx jax",
            instead="EnvPool has ports of many of its tasks, such as "
            "'envpool/G1JoystickFlatTerrain-v1' and 'envpool/CartpoleBalance-v1'",
        ),
        Suite("maniskill", "mani_skill", "pip install mani_skill"),
        Suite(
            "humanoid_bench",
            "humanoid_bench",
            "git clone https://github.com/carlosferrazza/humanoid-bench && "
            "pip install -e humanoid-bench",
            f"{_ADAPTERS}._humanoid_bench",
        ),
        Suite("envpool", "envpool", "pip install envpool", f"{_ADAPTERS}._envpool"),
        Suite(
            "mjlab",
            "mjlab",
            "pip install mjlab, in an environment of its own, because it pins mujoco",
        ),
        Suite(
            "isaaclab",
            "isaaclab",
            "see https://isaac-sim.github.io/IsaacLab (needs NVIDIA Isaac Sim)",
        ),
        Suite("isaacgym", "isaacgym", "see https://developer.nvidia.com/isaac-gym"),
    )
}
"""The suites by name."""


def get_suite(name: str) -> Suite:
    """A suite by its name.

    Args:
        name (str): such as ``"envpool"``.

    Returns:
        Suite: the suite.

    Raises:
        ValueError: if there is none of that name; the message has all names, the nearest first.

    Examples:
        >>> from torchrl_trudi.envs.suites import get_suite
        >>> get_suite("envpool").install
        'pip install envpool'
    """
    return SUITES[check_choice("suite", name, SUITES)]


def list_tasks(suite: str | None = None) -> list[SuiteTask]:
    """The tasks that are known, installed or not.

    A suite may have more, which :func:`~torchrl_trudi.envs.make_env` makes too.

    Args:
        suite (str, optional): only those of this suite. Defaults to ``None``, all.

    Returns:
        list of SuiteTask: the tasks.

    Raises:
        ValueError: if there is no such suite.

    Examples:
        >>> from torchrl_trudi.envs.suites import list_tasks
        >>> sum(task.paper for task in list_tasks())
        73
    """
    if suite is not None:
        get_suite(suite)
    return [task for task in TASKS if suite in (None, task.suite)]


def find_task(name: str) -> SuiteTask:
    """A task of the list by its name.

    Args:
        name (str): ``"suite/task"``.

    Returns:
        SuiteTask: the task.

    Raises:
        ValueError: if there is no such suite, or no such task in the list of the suite. The message
            has the nearest names.

    Examples:
        >>> from torchrl_trudi.envs.suites import find_task
        >>> find_task("maniskill/PickCube-v1").metric
        'success_once'
    """
    suite, _, task = name.partition("/")
    get_suite(suite)
    for each in TASKS:
        if (each.suite, each.task) == (suite, task):
            return each
    names = [each.task for each in list_tasks(suite)]
    raise ValueError(
        f"{task!r} is not among the listed tasks of {suite!r}; "
        f"`python -m torchrl_trudi.envs.suites --suite {suite}` lists them."
        f"{did_you_mean(task, names)}"
    )

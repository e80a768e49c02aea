"""``python -m torchrl_trudi.envs.suites``: the table of all tasks, or the options of one."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from torchrl_trudi.envs.suites.presets import get_preset
from torchrl_trudi.envs.suites.registry import (
    SUITES,
    find_task,
    get_suite,
    list_tasks,
)

__all__ = ["main", "make_overrides", "make_table"]

_COLUMNS = ("suite", "task", "paper", "observation", "action", "preset", "metric")


def make_table(suite: str | None = None) -> list[dict[str, Any]]:
    """The table as data.

    Args:
        suite (str, optional): only this suite. Defaults to ``None``, all.

    Returns:
        list of dict: one for each task, with the keys ``suite``, ``task``, ``paper``,
        ``paper_inferred``, ``observation``, ``action``, ``privileged``, ``preset``, ``metric``,
        ``variants``, ``installed``, ``supported`` and ``install``. Sizes that are not known are
        ``None``.

    Raises:
        ValueError: if there is no such suite.

    Examples:
        >>> from torchrl_trudi.envs.suites.__main__ import make_table
        >>> row = make_table("humanoid_bench")[0]
        >>> row["task"], row["paper"]
        ('h1hand-stand-v0', True)
    """
    tasks = list_tasks(suite)
    installed = {name: get_suite(name).is_installed() for name in {task.suite for task in tasks}}
    return [
        {
            "suite": task.suite,
            "task": task.task,
            "paper": task.paper,
            "paper_inferred": task.paper_inferred,
            "observation": task.observation,
            "action": task.action,
            "privileged": task.privileged,
            "preset": task.preset,
            "metric": task.metric,
            "variants": list(task.variants),
            "installed": installed[task.suite],
            "supported": get_suite(task.suite).adapter is not None,
            "install": get_suite(task.suite).install,
        }
        for task in tasks
    ]


def make_overrides(name: str, max_episode_steps: int | None = None) -> list[str]:
    """A task and its preset as arguments of ``examples/trudi_humanoid.py``.

    Args:
        name (str): ``"suite/Task"``.
        max_episode_steps (int, optional): the limit of the task, where the discount factor depends
            on it. Defaults to ``None``.

    Returns:
        list of str: ``"option=value"``, beginning with the task.

    Raises:
        ValueError: if the task is not in the list, has no preset, stands for several tasks or needs
            ``max_episode_steps``.

    Examples:
        >>> from torchrl_trudi.envs.suites.__main__ import make_overrides
        >>> make_overrides("envpool/G1JoystickFlatTerrain-v1")[:3]
        ['env.name=envpool/G1JoystickFlatTerrain-v1', 'env.num_envs=1024', 'env.reward_scale=1.0']
    """
    task = find_task(name)
    if task.variants:
        names = " or ".join(f"{task.suite}/{variant}" for variant in task.variants)
        raise ValueError(f"{name} stands for two tasks: name {names}.")
    if task.preset is None:
        raise ValueError(f"there are no published settings for {name}.")
    settings = get_preset(task.preset).settings(task.task, max_episode_steps)
    return [f"env.name={name}", *(f"{key}={value}" for key, value in settings.items())]


def _cell(row: dict[str, Any], column: str) -> str:
    value = row[column]
    if column == "paper":
        # The star: a conclusion, not the paper's word.
        return ("yes" if value else "no") + ("*" if row["paper_inferred"] else "")
    return "-" if value is None else str(value)


def _format(table: list[dict[str, Any]], suites: Sequence[str]) -> str:
    rows = [_COLUMNS, *(tuple(_cell(row, column) for column in _COLUMNS) for row in table)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines += ["", f"{sum(row['paper'] for row in table)} of these are the paper's."]
    if any(row["paper_inferred"] for row in table):
        lines.append(
            "* inferred: the paper has 24 of Playground's 25 control tasks and does not say which."
        )
    lines.append("")
    for name in suites:
        suite = SUITES[name]
        state = "installed" if suite.is_installed() else f"not installed: {suite.install}"
        if suite.adapter is None:
            state += " (not supported yet: make_env cannot make its tasks)"
        lines.append(f"{name}: {state}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the table, or the options of one task, to standard output.

    Args:
        argv (sequence of str, optional): the arguments. Defaults to ``None``, those of the process.

    Returns:
        int: the exit code: 0.

    Raises:
        SystemExit: with code 2 if an argument is wrong.
    """
    parser = argparse.ArgumentParser(
        prog="python -m torchrl_trudi.envs.suites",
        description="List the benchmark tasks, and what is installed.",
    )
    parser.add_argument("--json", action="store_true", help="a JSON list with an object per task")
    parser.add_argument("--suite", metavar="NAME", help=f"only this one of {', '.join(SUITES)}")
    parser.add_argument(
        "--overrides",
        metavar="SUITE/TASK",
        help="instead, this task and its preset as arguments of examples/trudi_humanoid.py",
    )
    parser.add_argument(
        "--max-episode-steps",
        type=int,
        metavar="N",
        help="with --overrides: the task's limit, which ManiSkill's gamma depends on",
    )
    arguments = parser.parse_args(argv)
    try:
        if arguments.overrides is not None:
            overrides = make_overrides(arguments.overrides, arguments.max_episode_steps)
            sys.stdout.write(" ".join(overrides) + "\n")
            return 0
        table = make_table(arguments.suite)
    except ValueError as error:
        parser.error(str(error))
    if arguments.json:
        text = json.dumps(table, indent=1)
    else:
        text = _format(table, list(SUITES) if arguments.suite is None else [arguments.suite])
    sys.stdout.write(f"{text}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

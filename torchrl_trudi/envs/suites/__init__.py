"""The benchmark suites: their tasks behind one name each, their presets, and what they need.

Nothing of a simulator is imported before one of its environments is made.
"""

from __future__ import annotations

from torchrl_trudi.envs.suites.presets import (
    PRESETS,
    HumanoidBenchPreset,
    ManiSkillPreset,
    PlaygroundDMCPreset,
    PlaygroundHumanoidPreset,
    SuitePreset,
    get_preset,
    maniskill_gamma,
)
from torchrl_trudi.envs.suites.registry import (
    SUITES,
    Suite,
    SuiteNotInstalledError,
    SuiteNotSupportedError,
    find_task,
    get_suite,
    list_tasks,
)
from torchrl_trudi.envs.suites.tasks import SuiteTask

__all__ = [
    "PRESETS",
    "SUITES",
    "HumanoidBenchPreset",
    "ManiSkillPreset",
    "PlaygroundDMCPreset",
    "PlaygroundHumanoidPreset",
    "Suite",
    "SuiteNotInstalledError",
    "SuiteNotSupportedError",
    "SuitePreset",
    "SuiteTask",
    "find_task",
    "get_preset",
    "get_suite",
    "list_tasks",
    "maniskill_gamma",
]

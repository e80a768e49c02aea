"""The published settings of each suite (arXiv 2606.15260), as data.

Every value is the paper's unless its field says otherwise. A preset does not change an environment:
:meth:`SuitePreset.settings` names the options of a run that it stands for.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torchrl_trudi.envs._validation import check_choice, check_int

__all__ = [
    "PRESETS",
    "HumanoidBenchPreset",
    "ManiSkillPreset",
    "PlaygroundDMCPreset",
    "PlaygroundHumanoidPreset",
    "SuitePreset",
    "get_preset",
    "maniskill_gamma",
]


def maniskill_gamma(max_episode_steps: int) -> float:
    """ManiSkill's discount factor: ``1 - 10 / max_episode_steps``.

    Its horizon, ``1 / (1 - gamma)``, is a tenth of the longest episode, whatever the task.

    Args:
        max_episode_steps (int): the limit of the task, more than 10.

    Returns:
        float: the discount factor.

    Raises:
        TypeError: if it is not an integer.
        ValueError: if it is not above 10: nothing after the first step would count.

    Examples:
        >>> from torchrl_trudi.envs.suites import maniskill_gamma
        >>> maniskill_gamma(50)
        0.8
    """
    return 1 - 10 / check_int("max_episode_steps", max_episode_steps, 11)


@dataclasses.dataclass(frozen=True)
class SuitePreset:
    """Published settings of a suite.

    Attributes:
        name (str): name of the preset.
        total_frames (int): environment steps of a run: "env steps".
        num_envs (int): environments: the first factor of "envs x T".
        steps_per_env (int): steps of each between updates: the second factor, T.
        num_minibatches (int): minibatches per epoch.
        num_epochs (int): passes over each batch.
        gamma (float or None): discount factor; ``None`` where it depends on the task.
        vmin (float): smallest value of the critic's histogram.
        vmax (float): largest value of it.
        num_layers (int): linear layers of the score network, first and last included.
        hidden_size (int): their width.
        norm (str): normalisation between them, ``"layer"`` or ``"none"``.
        num_steps (int): denoising steps, "N".
        eps (float): bound on the path KL, "eps".
        init_temperature (float): initial entropy temperature, "alpha_0".
        init_multiplier (float): initial KL multiplier, "beta_0".
        target_entropy_scale (float): target entropy per action dimension, negated, "m_ent".
        reward_scale (float): factor on the reward. Inferred: the paper names none, and its value
            ranges are those of unscaled rewards.
    """

    name: str
    total_frames: int
    num_envs: int
    steps_per_env: int
    num_minibatches: int
    num_epochs: int
    gamma: float | None
    vmin: float
    vmax: float
    num_layers: int
    hidden_size: int
    norm: str
    num_steps: int = 8
    eps: float = 0.1
    init_temperature: float = 1.0
    init_multiplier: float = 0.01
    target_entropy_scale: float = 4.0
    reward_scale: float = 1.0

    def value_range(self, task: str) -> tuple[float, float]:
        """The smallest and the largest value of the critic's histogram.

        Args:
            task (str): name of the task, with or without that of its suite.

        Returns:
            tuple of float: ``(vmin, vmax)``.
        """
        return self.vmin, self.vmax

    def discount(self, max_episode_steps: int | None = None) -> float:
        """The discount factor.

        Args:
            max_episode_steps (int, optional): the limit of the task, where the factor depends on
                it. Defaults to ``None``.

        Returns:
            float: the discount factor.

        Raises:
            ValueError: if it depends on ``max_episode_steps``, which was not given.
        """
        if self.gamma is not None:
            return self.gamma
        if max_episode_steps is None:
            raise ValueError(
                f"the discount factor of the preset {self.name!r} depends on the length of the "
                "task's episodes: give max_episode_steps."
            )
        return maniskill_gamma(max_episode_steps)

    def settings(self, task: str, max_episode_steps: int | None = None) -> dict[str, Any]:
        """The options of a training run that the preset stands for.

        Args:
            task (str): name of the task, with or without that of its suite.
            max_episode_steps (int, optional): the limit of the task, where the discount factor
                depends on it. Defaults to ``None``.

        Returns:
            dict: values by the dotted key of
            :class:`~torchrl_trudi.trainers.config.TrainConfig`.

        Raises:
            ValueError: if ``max_episode_steps`` is needed.

        Examples:
            >>> from torchrl_trudi.envs.suites import get_preset
            >>> settings = get_preset("humanoid_bench").settings("h1hand-package-v0")
            >>> settings["critic.vmin"], settings["critic.vmax"]
            (-10000.0, 10000.0)
        """
        vmin, vmax = self.value_range(task)
        return {
            "env.num_envs": self.num_envs,
            "env.reward_scale": self.reward_scale,
            "collector.total_frames": self.total_frames,
            "collector.frames_per_batch": self.num_envs * self.steps_per_env,
            "policy.num_steps": self.num_steps,
            "policy.num_layers": self.num_layers,
            "policy.hidden_size": self.hidden_size,
            "policy.norm": self.norm,
            "trust_region.eps": self.eps,
            "trust_region.init_multiplier": self.init_multiplier,
            "critic.vmin": vmin,
            "critic.vmax": vmax,
            "objective.gamma": self.discount(max_episode_steps),
            "objective.init_temperature": self.init_temperature,
            "objective.target_entropy_scale": self.target_entropy_scale,
            "optim.num_minibatches": self.num_minibatches,
            "optim.num_epochs": self.num_epochs,
        }


@dataclasses.dataclass(frozen=True)
class PlaygroundDMCPreset(SuitePreset):
    """Playground's control tasks. The temperature starts a hundred times lower than elsewhere."""

    name: str = "playground_dmc"
    total_frames: int = 50_000_000
    num_envs: int = 1024
    steps_per_env: int = 128
    num_minibatches: int = 64
    num_epochs: int = 8
    gamma: float | None = 0.99
    vmin: float = 0.0
    vmax: float = 150.0
    num_layers: int = 4
    hidden_size: int = 256
    norm: str = "none"
    init_temperature: float = 0.01


@dataclasses.dataclass(frozen=True)
class PlaygroundHumanoidPreset(SuitePreset):
    """Playground's joystick tasks of the humanoids G1 and T1."""

    name: str = "playground_humanoid"
    total_frames: int = 50_000_000
    num_envs: int = 1024
    steps_per_env: int = 128
    num_minibatches: int = 16
    num_epochs: int = 8
    gamma: float | None = 0.97
    vmin: float = -10.0
    vmax: float = 10.0
    num_layers: int = 4
    hidden_size: int = 256
    norm: str = "none"


@dataclasses.dataclass(frozen=True)
class ManiSkillPreset(SuitePreset):
    """ManiSkill3. The discount factor is that of :func:`maniskill_gamma`."""

    name: str = "maniskill"
    total_frames: int = 50_000_000
    num_envs: int = 1024
    steps_per_env: int = 128
    num_minibatches: int = 64
    num_epochs: int = 4
    gamma: float | None = None
    vmin: float = -15.0
    vmax: float = 15.0
    num_layers: int = 3
    hidden_size: int = 512
    norm: str = "layer"


_HUMANOID_BENCH_RANGES = {
    "reach": 2000.0,
    "truck": 1000.0,
    "maze": 1000.0,
    "push": 1000.0,
    "basketball": 2000.0,
    "package": 10_000.0,
}


@dataclasses.dataclass(frozen=True)
class HumanoidBenchPreset(SuitePreset):
    """HumanoidBench. Six tasks have rewards that need a wider range of values than the others."""

    name: str = "humanoid_bench"
    total_frames: int = 50_000_000
    num_envs: int = 64
    steps_per_env: int = 128
    num_minibatches: int = 4
    num_epochs: int = 8
    gamma: float | None = 0.99
    vmin: float = -250.0
    vmax: float = 250.0
    num_layers: int = 3
    hidden_size: int = 512
    norm: str = "layer"

    def value_range(self, task: str) -> tuple[float, float]:
        """The smallest and the largest value of the critic's histogram, symmetric about 0.

        Args:
            task (str): name of the task, with or without that of its suite.

        Returns:
            tuple of float: ``(vmin, vmax)``.
        """
        # "humanoid_bench/h1hand-reach-v0" is about reaching, on whichever robot.
        parts = task.rpartition("/")[2].split("-")
        bound = _HUMANOID_BENCH_RANGES.get(parts[1]) if len(parts) > 1 else None
        return (self.vmin, self.vmax) if bound is None else (-bound, bound)


PRESETS: dict[str, SuitePreset] = {
    preset.name: preset
    for preset in (
        PlaygroundDMCPreset(),
        PlaygroundDMCPreset(name="playground_dmc_small", steps_per_env=32, num_minibatches=16),
        PlaygroundHumanoidPreset(),
        ManiSkillPreset(),
        HumanoidBenchPreset(),
    )
}
"""The presets by name. ``playground_dmc_small`` is the paper's variant with shorter rollouts."""


def get_preset(name: str) -> SuitePreset:
    """A preset by its name.

    Args:
        name (str): such as ``"maniskill"``; the ``preset`` of a
            :class:`~torchrl_trudi.envs.suites.SuiteTask`.

    Returns:
        SuitePreset: the preset.

    Raises:
        ValueError: if there is none of that name.

    Examples:
        >>> import dataclasses
        >>> from torchrl_trudi.envs.suites import get_preset
        >>> dataclasses.replace(get_preset("playground_dmc"), num_envs=64).num_envs
        64
    """
    return PRESETS[check_choice("preset", name, PRESETS)]

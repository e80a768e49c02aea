"""What a benchmark is asked to run: the settings and the command of each cell."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from torchrl_trudi.record.benchmark_cells import Cell, CellRecord
from torchrl_trudi.trainers import ConfigError, TrainConfig, register_configs, validate
from torchrl_trudi.trainers.options import format_value, nearest
from torchrl_trudi.trainers.overrides import find_problems

EXAMPLES = Path(__file__).resolve().parent
ROOT = EXAMPLES.parent
CONFIG_DIR = EXAMPLES / "config"
TRAINER = EXAMPLES / "trudi_humanoid.py"

# What two runs of one cell may differ in: it changes neither the numbers nor what they mean.
_FREE = ("resume", "collector.total_frames", "logger.")
_COMPARED = ("logger.eval_interval", "logger.eval_episodes")
# What the runner sets itself.
_OWN = (
    *("seed", "task", "arm", "resume", "num_threads", "env.num_threads", "env.name"),
    *("collector.total_frames", "logger.dir", "logger.eval_interval", "logger.eval_episodes"),
    *("logger.checkpoint_interval", "logger.progress"),
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is the same in all cells of a call.

    Args:
        frames: environment steps; ``None`` takes those of the task's preset.
        eval_interval: environment steps between evaluations.
        eval_episodes: episodes per evaluation.
        threads: CPU threads of a cell.
        overrides: further overrides for the trainer.
    """

    frames: int | None = None
    eval_interval: int = 50_000
    eval_episodes: int = 10
    threads: int = 1
    overrides: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Plan:
    """One cell as it is asked for.

    Args:
        cell: its folder.
        task: Gymnasium id.
        frames: environment steps.
        config: the settings that a cell must keep, by dotted key.
        settings: those of the call.
    """

    cell: Cell
    task: str
    frames: int
    config: dict[str, Any]
    settings: Settings

    @property
    def is_peer(self) -> bool:
        """Whether a script of its own runs it, instead of the trainer."""
        return self.cell.arm in peers()

    def command(self, run_dir: Path, resume: bool) -> list[str]:
        """The command line that starts or continues the cell's run.

        Args:
            run_dir: the run directory.
            resume: whether to continue the run in it.

        Returns:
            The words.
        """
        s, cell = self.settings, self.cell
        if self.is_peer:
            assert not resume
            script = peers()[cell.arm]
            return [
                *(sys.executable, str(script), "--task", cell.preset, "--seed", str(cell.seed)),
                *("--frames", str(self.frames), "--eval-interval", str(s.eval_interval)),
                *("--eval-episodes", str(s.eval_episodes), "--threads", str(s.threads)),
                *("--dir", str(run_dir)),
            ]
        common = [
            f"collector.total_frames={self.frames}",
            # What an interrupted cell loses is at most what lies between two rows.
            f"logger.checkpoint_interval={s.eval_interval}",
            "logger.progress=false",
        ]
        if resume:
            # The other settings are the run's own, which have been compared with those asked for.
            return [sys.executable, str(TRAINER), f"resume={_quote(run_dir)}", *common]
        words = [f"task={cell.preset}", f"arm={cell.arm}", *_setting_words(cell.seed, s), *common]
        return [sys.executable, str(TRAINER), *words, f"logger.dir={_quote(run_dir)}", *s.overrides]

    def differences(self, record: CellRecord) -> list[str]:
        """What the cell on disk has otherwise than it is asked for.

        Args:
            record: the cell's record.

        Returns:
            One line for each setting: its value there, and the one asked for.
        """
        return compare(record.config, self.config)


def compare(before: dict[str, Any], asked: dict[str, Any]) -> list[str]:
    """Differences of two settings.

    Args:
        before: those of a run.
        asked: those asked for.

    Returns:
        One line for each difference.
    """
    # An option that the run does not know yet had no other value than today's default.
    defaults = fixed_settings(validate(TrainConfig())) if "env.name" in asked else {}
    lines = []
    for key in sorted(before.keys() | asked.keys()):
        old, new = before.get(key, defaults.get(key)), asked.get(key)
        if old != new:
            lines.append(f"{key}: {format_value(old)} -> {format_value(new)}")
    return lines


def peers() -> dict[str, Path]:
    """The arms that are not ours.

    Returns:
        Script by name of the arm.
    """
    return {path.stem: path for path in sorted((EXAMPLES / "peers").glob("[!_]*.py"))}


def arms() -> list[str]:
    """Names of all arms.

    Returns:
        Those of the trainer, then those of others.
    """
    return [*_presets("arm"), *peers()]


def tasks() -> list[str]:
    """Names of all tasks.

    Returns:
        The presets.
    """
    return _presets("task")


def plan(out: Path, preset: str, arm: str, seed: int, settings: Settings) -> Plan:
    """Work out one cell.

    Args:
        out: directory of the benchmark.
        preset: name of the task's preset.
        arm: name of the arm.
        seed: seed.
        settings: those of the call.

    Returns:
        The cell as it is asked for.

    Raises:
        ConfigError: for an unknown task or arm, or settings that cannot be run.
    """
    for kind, name, known in (("task", preset, tasks()), ("arm", arm, arms())):
        if name not in known:
            hint = nearest(name, known)
            raise ConfigError(
                f"{kind}: got {name!r}"
                + (f" (did you mean {hint!r}?)" if hint else "")
                + f", accepted: {', '.join(known)}"
            )
    cell = Cell(out, preset, arm, seed)
    if arm in peers():
        if settings.overrides:
            raise ConfigError(f"--set: the arm {arm!r} is no configuration of the trainer")
        _check_peer(arm, preset)
        config = compose_config(preset, "trudi", seed, settings)
        fixed = {
            "env.name": config.env.name,
            "seed": seed,
            "threads": settings.threads,
            **{f"logger.{k}": getattr(settings, k) for k in ("eval_interval", "eval_episodes")},
        }
        return Plan(cell, config.env.name, config.collector.total_frames, fixed, settings)
    config = compose_config(preset, arm, seed, settings)
    return Plan(
        cell, config.env.name, config.collector.total_frames, fixed_settings(config), settings
    )


def compose_config(preset: str, arm: str, seed: int, settings: Settings) -> TrainConfig:
    """The configuration of the trainer for a cell.

    Args:
        preset: name of the task's preset.
        arm: name of the arm.
        seed: seed.
        settings: those of the call.

    Returns:
        The checked configuration.

    Raises:
        ConfigError: if it cannot be run.
    """
    check_extra(settings.overrides)
    words = [f"task={preset}", f"arm={arm}", *_setting_words(seed, settings), *settings.overrides]
    if settings.frames is not None:
        words.append(f"collector.total_frames={settings.frames}")
    register_configs()
    try:
        with initialize_config_dir(version_base=None, config_dir=str(CONFIG_DIR)):
            composed = compose("trudi_humanoid", words)
    except Exception as error:  # Hydra's and OmegaConf's errors have no base of their own
        reason = str(error.__cause__ or error).splitlines()[0]
        raise ConfigError(f"task={preset} arm={arm}: {reason}") from error
    return validate(composed)


def check_extra(overrides: Sequence[str]) -> None:
    """Check the overrides of ``--set``.

    Args:
        overrides: the words, ``KEY=VALUE``.

    Raises:
        ConfigError: for a word that is no override, or one of what the runner sets itself.
    """
    problems = find_problems(overrides, config_dir=CONFIG_DIR)
    if problems:
        raise ConfigError("\n".join(f"--set: {problem}" for problem in problems))
    for word in overrides:
        override = OverridesParser.create().parse_override(word)
        if override.key_or_group in _OWN or override.is_sweep_override():
            raise ConfigError(f"--set: got {word!r}, accepted: one value of an option other than "
                              f"{', '.join(_OWN)}")  # fmt: skip


def fixed_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings that all runs of a cell share.

    Args:
        config: a configuration, or its mapping.

    Returns:
        Value by dotted key.
    """
    return fixed_of_tree(dataclasses.asdict(config))


def fixed_of_tree(tree: dict[str, Any]) -> dict[str, Any]:
    """The settings that all runs of a cell share, from a stored configuration.

    Args:
        tree: settings by section and name.

    Returns:
        Value by dotted key.
    """
    flat: dict[str, Any] = {}

    def walk(node: dict[str, Any], prefix: str) -> None:
        for name, value in node.items():
            key = f"{prefix}{name}"
            if isinstance(value, dict) and key != "env.kwargs":
                walk(value, f"{key}.")
            elif key in _COMPARED or not key.startswith(_FREE):
                flat[key] = value

    walk(tree, "")
    return flat


def code_commit() -> str:
    """The commit of the code that runs.

    Returns:
        The SHA, with ``-dirty`` if the package or the examples differ from it; ``unknown`` outside
        a repository.
    """

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != ROOT:
            return "unknown"
        changed = git("status", "--porcelain", "--", "torchrl_trudi", "examples")
        return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def child_environment(threads: int) -> dict[str, str]:
    """The environment of a cell's process.

    Args:
        threads: CPU threads of a cell.

    Returns:
        This process's, with this checkout's package first on the path.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}


def _check_peer(arm: str, preset: str) -> None:
    """Before anything runs: whether the script of an arm has the task, and the package it needs."""
    spec = importlib.util.spec_from_file_location(arm, peers()[arm])
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    if preset not in script.TASKS:
        raise ConfigError(f"{arm}: has no settings for {preset!r}, only {', '.join(script.TASKS)}")
    if importlib.util.find_spec(script.PACKAGE) is None:
        raise ConfigError(f'{arm}: needs {script.PACKAGE}: pip install -e ".[benchmark]"')


def _presets(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml"))


def _setting_words(seed: int, settings: Settings) -> list[str]:
    return [
        f"seed={seed}",
        f"num_threads={settings.threads}",
        f"env.num_threads={settings.threads}",
        f"logger.eval_interval={settings.eval_interval}",
        f"logger.eval_episodes={settings.eval_episodes}",
    ]


def _quote(path: Path) -> str:
    text = str(path)
    if re.fullmatch(r"[\w./-]+", text):
        return text
    # In quotes, Hydra takes commas, equal signs and spaces as they are.
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

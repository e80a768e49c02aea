"""Run directories: one per run, never overwritten, with what is needed to repeat the run."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib.metadata
import itertools
import json
import logging
import os
import platform
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchrl_trudi.trainers.config import CHOICES, LoggerConfig, TrainConfig
from torchrl_trudi.trainers.options import ConfigError, format_value

__all__ = [
    "CONFIG_FILE",
    "FIXED_ON_RESUME",
    "VERSIONS_FILE",
    "find_run",
    "library_versions",
    "load_config",
    "lock_run",
    "make_run_dir",
    "record_resume",
    "resumed_config",
    "run_id",
]

_logger = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
"""The resolved configuration; its presence is what makes a directory a run."""

RUN_ID = "run"
"""Entry of the versions file: a number of the run's own."""

LOCK_FILE = ".lock"
"""Held by the process that writes a run."""

VERSIONS_FILE = "versions.json"
"""Versions of the libraries of a run."""

FIXED_ON_RESUME = (
    "env.name",
    "env.kwargs",
    "env.max_episode_steps",
    "env.normalize_action",
    "env.normalize_observation",
    "env.normalize_keys",
    "env.reward_scale",
    "policy",
    "objective.kind",
    "objective.ratio",
    "critic.kind",
    "critic.in_keys",
    "critic.hidden_size",
    "critic.num_layers",
    "critic.vmin",
    "critic.vmax",
    "critic.num_bins",
    "trust_region.mode",
    "trust_region.bound",
    "trust_region.old_policy",
)
"""Options and sections that a resumed run must share with its checkpoint: the task, what the
checkpoint's tensors look like, and the scale of the values they encode."""

_PACKAGES = ("torch", "torchrl", "tensordict", "gymnasium", "mujoco", "numpy")


def make_run_dir(directory: str | Path, config: TrainConfig, resume: str | None = None) -> Path:
    """Make the directory of a new run, or check and return that of a run to be continued.

    The directory of a run to be continued is not written, see :func:`record_resume`.

    For a new run, ``directory`` is used as it is if it is absent or empty. If it holds a run
    already, the first free of ``directory-1``, ``directory-2``, ... is used. The default of
    ``logger.dir``, and any directory with other content, is a parent in which
    ``<env.name>-<seed>-<YYYYmmdd-HHMMSS>`` is made. Nothing is ever overwritten, also when several
    processes start at once. ``config.yaml`` and ``versions.json`` are written into the directory.

    Args:
        directory: the value of ``logger.dir``.
        config: the checked configuration of the run.
        resume: directory of the run to continue, or ``"latest"`` for the newest run in
            ``directory``; ``None`` starts a new run.

    Returns:
        The run directory.

    Raises:
        ConfigError: if the directory cannot be made or written; if there is no run to continue; or
            if ``config`` asks for another task or architecture than that run has, with each
            difference as ``key: old -> new``.
    """
    if resume is not None:
        return _reuse(find_run(resume, directory), config)

    text = OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)
    target = Path(directory)
    try:
        for candidate in _candidates(target, config):
            candidate.mkdir(parents=True, exist_ok=True)
            if _claim(candidate, text):
                break
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(
            f"logger.dir: got {str(directory)!r}, but it or a part of it is a file; "
            "accepted: a directory, existing or not"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"logger.dir: got {str(directory)!r}, which cannot be made or written "
            f"({error.strerror}); accepted: a writable directory"
        ) from error
    if candidate.parent == target.parent and candidate != target:
        _logger.info("%s holds a run already: this run goes to %s", target, candidate)
    else:
        _logger.info("run directory: %s", candidate)
    versions = {**library_versions(), RUN_ID: uuid.uuid4().hex}
    _replace(candidate / VERSIONS_FILE, _to_json(versions))
    return candidate


def find_run(resume: str, directory: str | Path) -> Path:
    """Find the run that ``resume`` means.

    Args:
        resume: a run directory, or ``"latest"``.
        directory: where ``"latest"`` looks: this directory itself, its numbered siblings
            ``directory-1``, ... and the directories in it. The newest is the one started or resumed
            last.

    Returns:
        The run directory.

    Raises:
        ConfigError: if there is no such run.
    """
    if resume != "latest":
        run = Path(resume)
        if not (run / CONFIG_FILE).is_file():
            state = f"holds no {CONFIG_FILE}" if run.is_dir() else "is not a directory"
            raise ConfigError(
                f"resume: got {resume!r}, which {state}; accepted: a run directory, or latest"
            )
        return run
    parent = Path(directory)
    places = [parent, *_numbered_siblings(parent)]
    if parent.is_dir():
        places += [path for path in parent.iterdir() if path.is_dir()]
    runs = [path for path in places if (path / CONFIG_FILE).is_file()]
    if not runs:
        raise ConfigError(
            f"resume: got 'latest', but there is no run in {str(directory)!r} (logger.dir); "
            "accepted: a run directory, or latest when logger.dir holds one"
        )
    return max(runs, key=lambda path: ((path / CONFIG_FILE).stat().st_mtime_ns, path.name))


def resumed_config(
    resume: str, directory: str | Path, overrides: Sequence[str]
) -> tuple[Path, DictConfig]:
    """The configuration with which a run goes on: its own, with the command line's overrides.

    Args:
        resume: a run directory, or ``"latest"``.
        directory: where ``"latest"`` looks, see :func:`find_run`.
        overrides: words of the command line, ``KEY=VALUE``.

    Returns:
        The run directory and the merged configuration.

    Raises:
        ConfigError: if there is no such run, or for an override that is not ``KEY=VALUE`` of an
            option, such as a preset: the run has its own values.
    """
    run = find_run(resume, directory)
    config = load_config(run)
    for word in overrides:
        override = OverridesParser.create().parse_override(word)
        key = override.key_or_group
        if override.is_delete() or key.split(".")[0] not in TrainConfig.__dataclass_fields__:
            raise ConfigError(
                f"resume: got {word!r}, accepted: single options; the others are those of the run"
            )
        if key in CHOICES and isinstance(override.value(), str):
            key = f"{key}.kind"
        OmegaConf.update(config, key, override.value(), force_add=True)
    # "latest" was looked up here, once.
    OmegaConf.update(config, "resume", str(run))
    return run, config


def load_config(run_dir: str | Path) -> DictConfig:
    """Read the configuration that a run was started with.

    It is not validated: a run of an older version may have other options.

    Args:
        run_dir: a run directory.

    Returns:
        The configuration.

    Raises:
        ConfigError: if it cannot be read.
    """
    path = Path(run_dir) / CONFIG_FILE
    try:
        config = OmegaConf.load(path)
    except FileNotFoundError as error:
        raise ConfigError(f"{str(run_dir)!r} is not a run: it has no {CONFIG_FILE}") from error
    except (OSError, OmegaConfBaseException, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error}") from error
    if not isinstance(config, DictConfig) or not config:
        raise ConfigError(
            f"{str(path)!r} holds no configuration: was the run cut off at its start?"
        )
    return config


@contextlib.contextmanager
def lock_run(run_dir: str | Path) -> Iterator[None]:
    """Context in which no other process writes into a run directory.

    The lock is the operating system's and ends with the process, however it ends. It holds between
    processes of one machine, and of several where the file system passes locks on.

    Args:
        run_dir: the run directory.

    Raises:
        ConfigError: if another process is in it.
    """
    with (Path(run_dir) / LOCK_FILE).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"{str(run_dir)!r} is in use: another process writes this run; wait for it, or stop it"
            ) from error
        yield


def library_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that decide what a run computes.

    Returns:
        Version by name; ``"not installed"`` for a library that is missing.
    """
    # Read from the package and not from installed metadata: a source tree on the path is what runs.
    import torchrl_trudi

    versions = {"python": platform.python_version()}
    versions["torchrl_trudi"] = getattr(torchrl_trudi, "__version__", "unknown")
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _candidates(target: Path, config: TrainConfig) -> Iterator[Path]:
    """Where the run may go, best first, without end."""
    default = target == Path(LoggerConfig().dir)
    is_run = (target / CONFIG_FILE).exists()
    occupied = target.is_dir() and any(target.iterdir())
    if default or (occupied and not is_run):
        # Environment ids may hold a namespace: ``namespace/Name-v0``.
        name = config.env.name.replace("/", "-").replace(":", "-")
        target = target / f"{name}-{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    yield target
    for number in itertools.count(1):
        candidate = target.with_name(f"{target.name}-{number}")
        # A sibling with other content is somebody else's.
        if not candidate.exists() or (candidate.is_dir() and not any(candidate.iterdir())):
            yield candidate


def _numbered_siblings(directory: Path) -> list[Path]:
    parent = directory.parent
    if not directory.name or not parent.is_dir():
        return []
    prefix = f"{directory.name}-"
    return [
        path
        for path in parent.iterdir()
        if path.name.startswith(prefix) and path.name[len(prefix) :].isdigit()
    ]


def _claim(directory: Path, text: str) -> bool:
    """Take the directory by writing its config file; false if another run has it.

    The exclusive creation is the claim: of several processes that see the same absent or empty
    directory, exactly one succeeds.
    """
    try:
        descriptor = os.open(directory / CONFIG_FILE, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    return True


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _to_json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def _changes(run_dir: Path, config: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """What a configuration changes in a run: its value and the one asked for, by key."""
    old = _flatten(OmegaConf.to_container(load_config(run_dir), resolve=True))
    new = _flatten(dataclasses.asdict(config))
    # An option that the stored run does not know yet had no other value than today's default.
    defaults = _flatten(dataclasses.asdict(TrainConfig()))
    return {
        key: (before, new.get(key))
        for key in sorted(old.keys() | new.keys())
        if (before := old.get(key, defaults.get(key))) != new.get(key)
    }


def _line(key: str, change: tuple[Any, Any]) -> str:
    return f"{key}: {format_value(change[0])} -> {format_value(change[1])}"


def _reuse(run_dir: Path, config: TrainConfig) -> Path:
    """Check that ``config`` can continue the run."""
    changed = _changes(run_dir, config)
    fixed = list(FIXED_ON_RESUME)
    if config.optim.lr_schedule == "kl_adaptive":
        # The learning rate goes on from where the schedule has brought it.
        fixed.append("optim.lr")
    blocking = [
        key for key in changed if any(key == name or key.startswith(f"{name}.") for name in fixed)
    ]
    if blocking:
        raise ConfigError(
            f"resume: the run in {str(run_dir)!r} cannot continue with these changes "
            "(its value -> the one asked for); give its values, or start a new run\n"
            + "\n".join(f"  {_line(key, changed[key])}" for key in blocking)
        )
    return run_dir


def record_resume(run_dir: str | Path, config: TrainConfig) -> None:
    """Write into a run's directory that it goes on, and with what.

    To be called by the one process that has the run (:func:`lock_run`), when everything is loaded: a
    call that ends before that changes nothing. The configuration before is kept as ``config.N.yaml``.

    Args:
        run_dir: the run directory.
        config: the checked configuration with which it goes on.

    Raises:
        ConfigError: if the directory cannot be written.
    """
    run_dir = Path(run_dir)
    changed = _changes(run_dir, config)
    for key, change in changed.items():
        if key != "resume" and not key.startswith("logger."):
            _logger.info("resume: changed %s", _line(key, change))

    versions_path = run_dir / VERSIONS_FILE
    versions = library_versions()
    before_versions = _read_json(versions_path)
    for name, version in versions.items():
        before = before_versions.get(name, version)
        if before != version:
            _logger.warning("resume: the run used %s %s, now %s", name, before, version)
    if RUN_ID in before_versions:
        versions[RUN_ID] = before_versions[RUN_ID]
    try:
        # Always written: its time is what "latest" goes by. The config before it is kept.
        if any(key != "resume" for key in changed):
            _replace(_free_name(run_dir), (run_dir / CONFIG_FILE).read_text(encoding="utf-8"))
        text = OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)
        _replace(run_dir / CONFIG_FILE, text)
        _replace(versions_path, _to_json(versions))
    except OSError as error:
        raise ConfigError(f"resume: cannot write to {str(run_dir)!r} ({error.strerror})") from error


def run_id(run_dir: str | Path) -> str | None:
    """The number of a run, which its checkpoints bear too; ``None`` for a run of an older version.

    Args:
        run_dir: the run directory.
    """
    return _read_json(Path(run_dir) / VERSIONS_FILE).get(RUN_ID)


def _read_json(path: Path) -> dict[str, str]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # Versions are information: a run without them can still be continued.
        return {}


def _free_name(run_dir: Path) -> Path:
    names = (run_dir / f"config.{number}.yaml" for number in itertools.count())
    return next(path for path in names if not path.exists())


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat

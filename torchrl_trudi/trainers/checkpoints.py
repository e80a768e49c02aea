"""Checkpoints of a run: written whole, the newest and the best kept, a damaged one passed over."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrl.checkpoint import Checkpoint, CheckpointRotation

from torchrl_trudi.trainers.config import TrainConfig
from torchrl_trudi.trainers.options import ConfigError
from torchrl_trudi.trainers.task_interface import TaskInterface

__all__ = ["FORMAT_VERSION", "RunCheckpoints"]

_log = logging.getLogger(__name__)

FORMAT_VERSION = 2
"""Version of what a checkpoint of a run holds. 1: without the state of the environments, and without
this number."""

_NEW_IN_2 = {"collector"}
"""Components that a checkpoint of version 1 does not have."""

_OF_A_RANK = {"collector", "ranks"}
"""Components that fit one number of processes."""


class RunCheckpoints:
    """Saves and restores the parts of a run, in ``RUN/checkpoints``.

    A checkpoint is one file. It is written under another name, flushed to the disk and then renamed,
    so that a process killed at any moment, or a full disk, leaves the ones before it as they are.
    The newest ``keep_last`` are kept, and the one with the best evaluation. One process at a time may
    write, see :func:`~torchrl_trudi.trainers.run_dir.lock_run`.

    Tensors are read with ``weights_only``: a checkpoint cannot run code.

    Args:
        directory (str or Path): where the checkpoints are; made with the first.
        components (Mapping): parts by name, each with ``state_dict`` and ``load_state_dict``, or a
            dict of JSON values.

    Keyword Args:
        keep_last (int, optional): newest checkpoints kept. Defaults to ``3``.
        num_ranks (int, optional): processes of the run. The state of the environments is that of one
            number of them: with another one new episodes start, and a warning says so.
            Defaults to ``1``.
        run_id (str, optional): number of the run, see :func:`~torchrl_trudi.trainers.run_dir.run_id`: a
            checkpoint with another one is refused. Defaults to ``None``: none is asked for.
        task (TaskInterface, optional): stored beside the parts, so that the policy can be built without an
            environment. Defaults to ``None``.

    Examples:
        >>> import tempfile, torch
        >>> from torchrl_trudi.trainers import TrainConfig
        >>> from torchrl_trudi.trainers.checkpoints import RunCheckpoints
        >>> net, progress = torch.nn.Linear(2, 2), {"frames": 64}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoints = RunCheckpoints(folder, {"net": net, "progress": progress})
        ...     path = checkpoints.save(64, TrainConfig())
        ...     progress["frames"] = 0
        ...     loaded = checkpoints.load()
        >>> path == loaded, progress
        (True, {'frames': 64})
    """

    def __init__(
        self,
        directory: str | Path,
        components: Mapping[str, Any],
        *,
        keep_last: int = 3,
        num_ranks: int = 1,
        run_id: str | None = None,
        task: TaskInterface | None = None,
    ) -> None:
        self._checkpoint = Checkpoint(**components, format="archive")
        self._names = set(components)
        self._num_ranks = num_ranks
        self._run_id = run_id
        self._task = task
        self._rotation = CheckpointRotation(
            directory, keep_last=keep_last, keep_best=("return", "max")
        )

    @property
    def directory(self) -> Path:
        """Where the checkpoints are."""
        return self._rotation.directory

    def latest(self) -> Path | None:
        """The newest checkpoint that is one, by its manifest."""
        return self._rotation.latest()

    def best(self) -> Path | None:
        """The kept checkpoint with the best evaluation, ``None`` without any."""
        return self._rotation.best()

    def save(self, step: int, config: TrainConfig, *, value: float | None = None) -> Path:
        """Write a checkpoint, and delete those that are not to be kept.

        Args:
            step (int): environment frames so far; part of the name.
            config (TrainConfig): stored beside the parts.

        Keyword Args:
            value (float, optional): what "best" goes by, the return of an evaluation at this point.

        Returns:
            Path: the checkpoint.

        Raises:
            OSError: it could not be written; the checkpoints before it are as they were.
        """
        directory = self.directory
        directory.mkdir(parents=True, exist_ok=True)
        # The name that the rotation knows. Its own ``save`` would not wait for the disk before it
        # renames the new checkpoint and deletes old ones.
        target = directory / f"{self._rotation.prefix}-{step:012d}.torchrl"
        # Everything half written is in here, where nothing looks for checkpoints.
        incoming = directory / ".incoming"
        shutil.rmtree(incoming, ignore_errors=True)  # of a process that was killed while saving
        incoming.mkdir()
        stage = incoming / target.name
        metadata: dict[str, Any] = {
            "format": FORMAT_VERSION,
            "frames": step,
            "config": dataclasses.asdict(config),
        }
        if self._num_ranks > 1:
            metadata["ranks"] = self._num_ranks
        if self._run_id is not None:
            metadata["run"] = self._run_id
        if self._task is not None:
            metadata["task"] = self._task.to_dict()
        if value is not None:
            metadata["return"] = float(value)
        try:
            self._checkpoint.save(stage, metadata=metadata)
            _flush(stage)
            os.replace(stage, target)
            _flush(directory)
        finally:
            shutil.rmtree(incoming, ignore_errors=True)
        self._rotation.prune()
        return target

    def load(self, *, map_location: Any = None) -> Path:
        """Restore the newest checkpoint that can be read; one that cannot is named in a warning.

        Keyword Args:
            map_location (optional): device of the tensors.

        Returns:
            Path: the checkpoint.

        Raises:
            ConfigError: there is none, or none that can be read, or it is of a later version.
        """
        paths = [path for path in self._paths() if path.exists()]
        if not paths:
            raise ConfigError(f"resume: {self.directory} has no checkpoint to continue from")
        problems = []
        for path in paths:
            try:
                self._load(path, map_location)
            except ConfigError:
                raise
            except Exception as error:  # a damaged file fails in as many ways as there are bytes
                problems.append(f"{path.name}: {str(error).splitlines()[0]}")
                _log.warning(
                    "resume: checkpoint %s cannot be read, and is passed over", problems[-1]
                )
                continue
            return path
        raise ConfigError(
            f"resume: none of the checkpoints in {self.directory} can be read\n"
            + "\n".join(f"  {problem}" for problem in problems)
        )

    def _paths(self) -> list[Path]:
        """Everything that has a checkpoint's name, newest first: also what has no manifest any more."""
        if not self.directory.is_dir():
            return []
        prefix = f"{self._rotation.prefix}-"
        found = {}
        for path in self.directory.iterdir():
            text = path.name.removesuffix(".torchrl").removeprefix(prefix)
            if path.name.startswith(prefix) and text.isdigit():
                found[path] = int(text)
        return sorted(found, key=lambda path: found[path], reverse=True)

    def _load(self, path: Path, map_location: Any) -> None:
        manifest = Checkpoint.manifest(path)
        metadata = manifest.get("metadata", {})
        version, num_ranks = metadata.get("format", 1), metadata.get("ranks", 1)
        if version > FORMAT_VERSION:
            raise ConfigError(
                f"resume: {path} has format {version}, this version of torchrl_trudi reads up to "
                f"{FORMAT_VERSION}: update it"
            )
        of = metadata.get("run")
        if None not in (of, self._run_id) and of != self._run_id:
            raise ConfigError(
                f"resume: {path} is a checkpoint of another run; remove it from there, or start a new run"
            )
        absent = _NEW_IN_2 if version < 2 else set()
        if num_ranks != self._num_ranks:
            absent = absent | _OF_A_RANK
            if version >= 2:
                _log.warning(
                    "resume: %s was saved by %d process(es), and goes on with %d: the environments start "
                    "new episodes",
                    path.name,
                    num_ranks,
                    self._num_ranks,
                )
        if version < 2 and absent & self._names:
            _log.warning(
                "resume: %s is of an older version, without the state of the environments: they "
                "start new episodes",
                path.name,
            )
        self._checkpoint.load(
            path, components=sorted(self._names - absent), map_location=map_location
        )


def _flush(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Cells of a benchmark on disk: one folder for each task, arm and seed.

``OUT/TASK/ARM/seedK/`` holds ``cell.json`` (what was asked, by which code, and how it went),
``log.txt`` (what the runs printed), a lock and one run directory; a cell that had to be started
again from nothing keeps the earlier attempt beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchrl_trudi.record.benchmark import BenchmarkDataError, Row, run_rows
from torchrl_trudi.record.scalars import read_scalars

__all__ = ["Attempt", "Cell", "CellLocked", "CellRecord", "cells_in", "trained_frames"]

CELL_FILE = "cell.json"
LOG_FILE = "log.txt"
LOCK_FILE = "lock"
STATUSES = ("running", "finished", "failed", "interrupted")


class CellLocked(RuntimeError):
    """Another process is running the cell."""


@dataclasses.dataclass
class Attempt:
    """One process that worked on a cell.

    Args:
        commit: commit of the code, ``-dirty`` if it had been changed.
        command: the command line; ``None`` if it is not known.
        from_frames: frames of the checkpoint from which it went on; 0 for a new run.
        run: name of the run directory in the cell's folder; ``.`` is that folder itself.
        versions: library versions.
        started: time of its start (ISO 8601).
        wall_clock_s: how long it took, evaluation included; ``None`` while it runs, or if it was
            killed together with its runner.
        exit_code: exit status; negative for a signal, ``None`` as above.
        log_tail: last lines of the log, if it failed.
    """

    commit: str
    command: list[str] | None
    from_frames: int
    run: str
    versions: dict[str, str]
    started: str | None = None
    wall_clock_s: float | None = None
    exit_code: int | None = None
    log_tail: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class CellRecord:
    """What ``cell.json`` says.

    Args:
        task: Gymnasium id.
        preset: name of the task's preset, as in the path.
        arm: name of the arm.
        seed: seed.
        status: ``running``, ``finished``, ``failed`` or ``interrupted``.
        frames: environment steps asked for.
        config: the settings asked for, by dotted key.
        overrides: extra overrides of the command line.
        adopted: whether the run was started by hand and entered here later.
        attempts: the processes so far.
    """

    task: str
    preset: str
    arm: str
    seed: int
    status: str
    frames: int
    config: dict[str, Any]
    overrides: list[str] = dataclasses.field(default_factory=list)
    adopted: bool = False
    attempts: list[Attempt] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Cell:
    """The folder of one task, arm and seed.

    Args:
        out: directory of the benchmark.
        preset: name of the task's preset.
        arm: name of the arm.
        seed: seed.
    """

    out: Path
    preset: str
    arm: str
    seed: int

    @property
    def path(self) -> Path:
        """The folder."""
        return self.out / self.preset / self.arm / f"seed{self.seed}"

    @property
    def log_path(self) -> Path:
        """Where the output of its runs goes."""
        return self.path / LOG_FILE

    def __str__(self) -> str:
        return f"{self.preset}/{self.arm}/seed{self.seed}"

    def read(self) -> CellRecord | None:
        """The record.

        Returns:
            What ``cell.json`` says, or ``None`` if there is none.

        Raises:
            BenchmarkDataError: if it cannot be read.
        """
        path = self.path / CELL_FILE
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            attempts = [Attempt(**attempt) for attempt in data.pop("attempts")]
            for name in ("commit", "wall_clock_s"):
                data.pop(name, None)
            record = CellRecord(**data, attempts=attempts)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise BenchmarkDataError(f"{path} cannot be read: {error}") from error
        if record.status not in STATUSES:
            raise BenchmarkDataError(f"{path}: status {record.status!r}, accepted: {STATUSES}")
        return record

    def write(self, record: CellRecord) -> None:
        """Replace the record.

        Args:
            record: the new one.
        """
        data = dataclasses.asdict(record)
        attempts = data.pop("attempts")
        # For a reader's convenience; the attempts are what is read back.
        data["commit"] = attempts[-1]["commit"] if attempts else None
        data["wall_clock_s"] = round(sum(a["wall_clock_s"] or 0.0 for a in attempts), 1)
        data["attempts"] = attempts
        self.path.mkdir(parents=True, exist_ok=True)
        temporary = self.path / f".{CELL_FILE}.{os.getpid()}"
        temporary.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, self.path / CELL_FILE)

    def lock(self) -> int:
        """Claim the cell for this process, and for those that inherit the descriptor.

        Returns:
            The descriptor: closing it in all these processes gives the cell back, and so does their
            death, however it comes.

        Raises:
            CellLocked: if another process has the cell.
        """
        # Only where it is called: Windows has no such module, and can still read data.
        import fcntl

        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path / LOCK_FILE, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise CellLocked(f"{self}: another process is running it") from error
        return descriptor

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Context in which this process has the cell.

        Raises:
            CellLocked: if another process has it.
        """
        descriptor = self.lock()
        try:
            yield
        finally:
            os.close(descriptor)

    def new_run_dir(self) -> Path:
        """A run directory that no attempt has used.

        Returns:
            ``run``, or the first free of ``run-1``, ``run-2``, ...
        """
        candidate, number = self.path / "run", 0
        while candidate.exists():
            number += 1
            candidate = self.path / f"run-{number}"
        return candidate

    def rows(self, record: CellRecord) -> list[Row]:
        """The evaluations of the cell's run.

        Args:
            record: the cell's record.

        Returns:
            A row for each evaluation; none if there is no run yet.

        Raises:
            BenchmarkDataError: if the run has not logged its time.
        """
        if not record.attempts:
            return []
        run = record.attempts[-1].run
        # A run that was started again from nothing owes nothing to the attempts before.
        commits = [(a.from_frames, a.commit) for a in record.attempts if a.run == run]
        try:
            return run_rows(
                self.path / run, task=record.task, arm=self.arm, seed=self.seed, commits=commits
            )
        except FileNotFoundError:
            return []


def cells_in(out: str | Path) -> list[Cell]:
    """The folders of a benchmark's directory that may be cells.

    Args:
        out: the directory.

    Returns:
        The cells, by name, with or without a record.

    Raises:
        FileNotFoundError: if there is no such directory.
    """
    out = Path(out)
    if not out.is_dir():
        raise FileNotFoundError(f"{str(out)!r} is not a directory")
    cells = []
    for path in sorted(out.glob("*/*/seed*")):
        number = re.fullmatch(r"seed(\d+)", path.name)
        if number and path.is_dir():
            cells.append(Cell(out, path.parts[-3], path.parts[-2], int(number[1])))
    return sorted(cells, key=lambda cell: (cell.preset, cell.arm, cell.seed))


def trained_frames(run_dir: str | Path) -> tuple[int, int]:
    """How far a run has come.

    Args:
        run_dir: run directory.

    Returns:
        Frames of its newest checkpoint, and frames of its last evaluation; 0 for none.
    """
    run_dir = Path(run_dir)
    numbers = [
        int(match[1])
        for path in run_dir.glob("checkpoints/checkpoint-*")
        if (match := re.fullmatch(r"checkpoint-(\d+)(\.torchrl)?", path.name))
    ]
    try:
        evaluated = read_scalars(run_dir).get("eval/return_stochastic", [[0]])[0]
    except FileNotFoundError:
        evaluated = [0]
    return max(numbers, default=0), int(max(evaluated))

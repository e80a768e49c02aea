"""The data of a benchmark: one row per evaluation of a run, in one CSV file.

A run belongs to a cell: a task, an arm (one variant of a method) and a seed. The file is tidy, so
that any program can read it, and it only changes as a whole.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from torchrl_trudi.record.scalars import read_scalars

__all__ = [
    "COLUMNS",
    "BenchmarkDataError",
    "Row",
    "merge_rows",
    "read_rows",
    "run_rows",
    "training_seconds",
    "write_rows",
]

Key = tuple[str, str, int, int]


class BenchmarkDataError(ValueError):
    """Data of a benchmark that cannot be read, or that contradicts other data."""


@dataclasses.dataclass(frozen=True, order=True)
class Row:
    """One evaluation of one run.

    Args:
        task: Gymnasium id.
        arm: name of the arm.
        seed: seed of the run.
        frames: environment steps until then.
        return_deterministic: mean return of the noise-free policy, in the units of the task.
        return_stochastic: mean return of the sampling policy.
        wall_s: seconds of collecting and learning until then, evaluation excluded.
        commit: commit of the code that made it.
    """

    task: str
    arm: str
    seed: int
    frames: int
    return_deterministic: float
    return_stochastic: float
    wall_s: float
    commit: str

    @property
    def cell(self) -> tuple[str, str, int]:
        """Task, arm and seed."""
        return self.task, self.arm, self.seed

    @property
    def key(self) -> Key:
        """What no two rows of a file share: task, arm, seed and frames."""
        return (*self.cell, self.frames)


COLUMNS = tuple(field.name for field in dataclasses.fields(Row))
"""Columns of the file, in their order."""


def training_seconds(run_dir: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of collecting and learning of a run against its frames.

    Args:
        run_dir: run directory.

    Returns:
        Frames and cumulative seconds after each iteration. From ``time/seconds`` where the run has
        logged it; before, and for runs that never did, from ``time/frames_per_second``.

    Raises:
        FileNotFoundError: if the directory has no scalars.
        BenchmarkDataError: if the run has logged neither.
    """
    scalars = read_scalars(run_dir)
    logged = dict(zip(*(a.tolist() for a in scalars.get("time/seconds", _EMPTY)), strict=True))
    if "time/frames_per_second" not in scalars:
        if not logged:
            raise BenchmarkDataError(
                f"{str(run_dir)!r} has logged neither time/seconds nor time/frames_per_second"
            )
        return np.array(list(logged)), np.array(list(logged.values()))
    frames, speed = scalars["time/frames_per_second"]
    order = np.argsort(frames, kind="stable")
    frames, speed = frames[order], speed[order]
    seconds, total = [], 0.0
    for count, before, rate in zip(frames, [0, *frames[:-1]], speed, strict=True):
        total = logged.get(int(count), total + (count - before) / rate)
        seconds.append(total)
    return frames, np.array(seconds)


_EMPTY = (np.empty(0, np.int64), np.empty(0))


def run_rows(
    run_dir: str | Path, *, task: str, arm: str, seed: int, commits: Sequence[tuple[int, str]]
) -> list[Row]:
    """The evaluations of a run.

    Args:
        run_dir: run directory.

    Keyword Args:
        task: Gymnasium id.
        arm: name of the arm.
        seed: seed of the run.
        commits: pairs of a number of frames and the commit that has continued the run from there,
            in order; the first begins at 0.

    Returns:
        A row for each evaluation; none if the run has made none yet.

    Raises:
        FileNotFoundError: if the directory has no scalars.
        BenchmarkDataError: if the run has not logged its time.
    """
    scalars = read_scalars(run_dir)
    returns = [
        dict(zip(*(a.tolist() for a in scalars.get(f"eval/return_{kind}", _EMPTY)), strict=True))
        for kind in ("deterministic", "stochastic")
    ]
    # An evaluation that was cut off between its two halves does not count.
    both = sorted(returns[0].keys() & returns[1].keys())
    if not both:
        return []
    frames, seconds = training_seconds(run_dir)
    rows = []
    for count in both:
        wall = seconds[np.searchsorted(frames, count, side="right") - 1]
        commit = [commit for start, commit in commits if start < count][-1]
        # Rounded as in the file, so that a row equals itself after it has been read back.
        noise_free, sampled = (round(float(each[count]), 4) for each in returns)
        seconds_there = round(float(wall), 1)
        rows.append(Row(task, arm, seed, int(count), noise_free, sampled, seconds_there, commit))
    return rows


def read_rows(path: str | Path) -> list[Row]:
    """Read a data file.

    Args:
        path: the CSV file.

    Returns:
        Its rows, sorted.

    Raises:
        FileNotFoundError: if there is no such file.
        BenchmarkDataError: if it is not a data file, or holds an evaluation twice; names the line.
    """
    path = Path(path)
    reader = csv.reader(io.StringIO(path.read_text(encoding="utf-8")))
    header = next(reader, None)
    if header != list(COLUMNS):
        raise BenchmarkDataError(f"{path}, line 1: got {header}, accepted: {list(COLUMNS)}")
    rows: dict[Key, Row] = {}
    for line in reader:
        try:
            task, arm, seed, frames, deterministic, stochastic, wall, commit = line
            row = Row(
                *(task, arm, int(seed), int(frames)),
                *(float(deterministic), float(stochastic), float(wall), commit),
            )
        except ValueError as error:
            raise BenchmarkDataError(
                f"{path}, line {reader.line_num}: got {line}, accepted: {', '.join(COLUMNS)}"
            ) from error
        if row.key in rows:
            raise BenchmarkDataError(
                f"{path}, line {reader.line_num}: a second row for {describe(row.key)}"
            )
        rows[row.key] = row
    return sorted(rows.values())


def write_rows(path: str | Path, rows: Iterable[Row]) -> None:
    """Write a data file, whole or not at all.

    Args:
        path: the CSV file; its directory is made if absent, and an existing file replaced.
        rows: the rows, in any order.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(dataclasses.astuple(row) for row in sorted(rows))
    os.replace(temporary, path)


def merge_rows(old: Iterable[Row], new: Iterable[Row], *, replace: bool = False) -> list[Row]:
    """Add rows to those of a file.

    Args:
        old: the rows of the file.
        new: the rows to add.

    Keyword Args:
        replace: where a cell's new rows contradict its old ones, drop all its old ones; otherwise
            that is an error.

    Returns:
        All rows, sorted; a row that both have counts once.

    Raises:
        BenchmarkDataError: if the two have different values for an evaluation, and ``replace`` is
            false; names each.
    """
    kept = {row.key: row for row in old}
    new = list(new)
    conflicts = [row for row in new if not _same(kept.get(row.key, row), row)]
    if conflicts and not replace:
        lines = [
            f"  {describe(row.key)}: {_values(kept[row.key])} in the file, {_values(row)} in the run"
            for row in conflicts
        ]
        raise BenchmarkDataError(
            f"{len(conflicts)} evaluations have other values in the file:\n" + "\n".join(lines)
        )
    dropped = {row.cell for row in conflicts}
    merged = {key: row for key, row in kept.items() if row.cell not in dropped}
    merged.update((row.key, row) for row in new)
    return sorted(merged.values())


def describe(key: Key) -> str:
    """A key in words.

    Args:
        key: task, arm, seed and frames.

    Returns:
        For instance ``Hopper-v5, trudi, seed 0, 51200 frames``.
    """
    task, arm, seed, frames = key
    return f"{task}, {arm}, seed {seed}, {frames} frames"


def _values(row: Row) -> str:
    return ", ".join(str(value) for value in dataclasses.astuple(row)[4:])


def _same(a: Row, b: Row) -> bool:
    def comparable(row: Row) -> tuple[object, ...]:
        # A diverged run may have NaN, which equals nothing.
        values = dataclasses.astuple(row)
        return tuple("nan" if isinstance(x, float) and math.isnan(x) else x for x in values)

    return comparable(a) == comparable(b)

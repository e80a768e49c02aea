"""Scalars of a run: TensorBoard for looking, a CSV file for plotting and testing."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.tensorboard import SummaryWriter

__all__ = ["SCALARS_FILE", "ScalarWriter", "read_scalars"]

SCALARS_FILE = "scalars.csv"
"""File of the scalars in a run directory: columns ``frames,name,value``, one row per scalar."""

_HEADER = ["frames", "name", "value"]


class ScalarWriter:
    """Write scalars to TensorBoard and to ``scalars.csv`` in a run directory.

    The CSV is in long format, so a metric that appears late or only sometimes needs no column of
    its own, and the file only ever grows. Every :meth:`write` is flushed: what was logged survives
    a killed process.

    TensorBoard is written by ``SummaryWriter`` and not by TorchRL's ``TensorboardLogger`` because
    only the former can hide (``purge_step``) what was logged after the checkpoint that a run resumes
    from.

    Args:
        log_dir: run directory; made if absent.
        resume_from: frame count of the checkpoint that the run resumes from; scalars logged later
            than it are dropped, because they will be logged again. ``None`` for a new run.

    Raises:
        FileExistsError: for a new run if ``log_dir`` has scalars already.

    Examples:
        >>> import tempfile
        >>> from torchrl_trudi.record import ScalarWriter, read_scalars
        >>> with tempfile.TemporaryDirectory() as run:
        ...     with ScalarWriter(run) as writer:
        ...         writer.write(128, {"train/return": 1.5})
        ...     frames, values = read_scalars(run)["train/return"]
        >>> int(frames[0]), float(values[0])
        (128, 1.5)
    """

    def __init__(self, log_dir: str | Path, resume_from: int | None = None) -> None:
        self.log_dir = Path(log_dir)
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self.path = self.log_dir / SCALARS_FILE
        if resume_from is None:
            if self.path.exists():
                raise FileExistsError(
                    f"{self.path} exists already; pass resume_from to continue it, "
                    "or another log_dir"
                )
            self._start([])
        else:
            rows = _rows(self.path) if self.path.exists() else iter(())
            self._start([row for row in rows if row[0] <= resume_from])
        self._file: io.TextIOWrapper | None = self.path.open("a", encoding="utf-8", newline="")
        purge = None if resume_from is None else resume_from + 1
        self._tensorboard = SummaryWriter(str(self.log_dir), purge_step=purge)

    def _start(self, rows: list[tuple[int, str, float]]) -> None:
        # Replaced whole, so that a crash while resuming loses nothing.
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        with temporary.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(_HEADER)
            writer.writerows(rows)
        os.replace(temporary, self.path)

    def write(self, frames: int, scalars: Mapping[str, Any]) -> None:
        """Log scalars at a point of the run.

        Args:
            frames: environment steps so far.
            scalars: value by name, a number or a tensor of one element. A tensor or array of one
                dimension is logged as ``name/0``, ``name/1``, ... NaN and infinity are written as
                they are, so that a diverged run shows.

        Raises:
            TypeError: if a value is not a number or a tensor of at most one dimension.
            ValueError: if a name is empty or holds a line break, or the writer is closed.
        """
        if self._file is None:
            raise ValueError("the writer is closed")
        # Everything is checked before anything is written.
        rows = [row for name, value in scalars.items() for row in _expand(name, value)]
        writer = csv.writer(self._file, lineterminator="\n")
        writer.writerows((int(frames), name, repr(value)) for name, value in rows)
        self._file.flush()
        for name, value in rows:
            self._tensorboard.add_scalar(name, value, global_step=int(frames))
        self._tensorboard.flush()

    def close(self) -> None:
        """Close both files; closing twice is allowed."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self._tensorboard.close()

    def __enter__(self) -> ScalarWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_scalars(run_dir: str | Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Read what a :class:`ScalarWriter` wrote; also while the run is still going.

    Args:
        run_dir: run directory.

    Returns:
        By name, frames (int64) and values (float64), in the order they were logged.

    Raises:
        FileNotFoundError: if the directory has no scalars.
        ValueError: if the file is not one of scalars; names the line.
    """
    path = Path(run_dir) / SCALARS_FILE
    if not path.is_file():
        raise FileNotFoundError(f"no {SCALARS_FILE} in {str(run_dir)!r}: not a run directory?")
    series: dict[str, tuple[list[int], list[float]]] = {}
    for frames, name, value in _rows(path):
        xs, ys = series.setdefault(name, ([], []))
        xs.append(frames)
        ys.append(value)
    return {
        name: (np.asarray(xs, dtype=np.int64), np.asarray(ys, dtype=np.float64))
        for name, (xs, ys) in series.items()
    }


def _rows(path: Path) -> Iterator[tuple[int, str, float]]:
    text = path.read_text(encoding="utf-8")
    # A process killed while writing leaves a last line without its end: it may be half a number.
    complete = text[: text.rfind("\n") + 1]
    reader = csv.reader(io.StringIO(complete))
    header = next(reader, None)
    if header is not None and header != _HEADER:
        raise ValueError(f"{path}, line 1: got {header}, accepted: {_HEADER}")
    for row in reader:
        try:
            frames, name, value = row
            yield int(frames), name, float(value)
        except ValueError as error:
            raise ValueError(
                f"{path}, line {reader.line_num}: got {row}, accepted: frames,name,value"
            ) from error


def _expand(name: str, value: Any) -> list[tuple[str, float]]:
    if not isinstance(name, str) or not name or "\n" in name or "\r" in name:
        raise ValueError(f"scalar name: got {name!r}, accepted: text of one line, not empty")
    if isinstance(value, torch.Tensor):
        # NumPy has no bfloat16.
        value = value.detach().cpu().to(torch.float64).numpy()
    try:
        if value is None:
            raise TypeError("NumPy would read None as NaN")
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"scalar {name!r}: got {type(value).__name__}, accepted: a number or a tensor"
        ) from error
    if array.size == 1:
        return [(name, float(array.reshape(())))]
    if array.ndim != 1:
        raise TypeError(
            f"scalar {name!r}: got shape {array.shape}, accepted: one element, or one dimension"
        )
    return [(f"{name}/{index}", float(entry)) for index, entry in enumerate(array)]

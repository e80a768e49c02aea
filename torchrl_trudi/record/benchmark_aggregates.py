"""Aggregates over the seeds and tasks of a benchmark, by rliable.

Interquartile means with bootstrap intervals stratified by task, performance profiles and
probabilities of improvement, after Agarwal et al. (2021, arXiv 2108.13264). Needs the packages of
the extra ``benchmark``; they are imported where they are used.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import importlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchrl_trudi.record.benchmark import BenchmarkDataError, Row

__all__ = [
    "Anchor",
    "Comparison",
    "Estimate",
    "compare",
    "improvement_probability",
    "iqm",
    "iqm_point",
    "normalized_scores",
    "performance_profile",
    "probability_of_improvement",
    "read_anchors",
]

RETURNS = ("deterministic", "stochastic")


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval.

    Args:
        point: its value on the data.
        low: lower end of the interval; NaN if there is only one seed.
        high: upper end.
    """

    point: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Anchor:
    """What a normalised score of 0 and of 1 mean on a task.

    Args:
        random: return of a policy that acts at random.
        reference: return of the reference.
        note: what the reference is.
    """

    random: float
    reference: float
    note: str


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Scores of arms on tasks, each task at one number of frames.

    Args:
        tasks: Gymnasium ids.
        arms: names of the arms.
        frames: by task, the largest number of frames that all runs there have.
        scores: by task and arm, the score of each seed: its last evaluation up to these frames.
        at: by task and arm, the frames of these evaluations, smallest and largest.
        missing: task, arm and seed without a score; the seeds are those that any cell has.
    """

    tasks: list[str]
    arms: list[str]
    frames: dict[str, int]
    scores: dict[str, dict[str, dict[int, float]]]
    at: dict[str, dict[str, tuple[int, int]]]
    missing: list[tuple[str, str, int]]


def compare(
    rows: Iterable[Row],
    *,
    tasks: Sequence[str] | None = None,
    arms: Sequence[str] | None = None,
    returns: str = "deterministic",
    frames: int | None = None,
) -> Comparison:
    """Choose the evaluations at which arms are compared.

    Args:
        rows: the data.

    Keyword Args:
        tasks: tasks to compare on; by default all.
        arms: arms to compare; by default all.
        returns: ``"deterministic"`` or ``"stochastic"``.
        frames: compare at no more than these; by default as many as all have.

    Returns:
        The scores.

    Raises:
        BenchmarkDataError: if a task or an arm is not in the data, or no evaluation is left.
    """
    if returns not in RETURNS:
        raise BenchmarkDataError(f"returns: got {returns!r}, accepted: {', '.join(RETURNS)}")
    rows = list(rows)
    known_tasks = sorted({row.task for row in rows})
    known_arms = sorted({row.arm for row in rows}, key=_arm_order)
    for kind, asked, known in (("task", tasks, known_tasks), ("arm", arms, known_arms)):
        for name in asked or ():
            if name not in known:
                raise BenchmarkDataError(
                    f"{kind}: got {name!r}, the data has: {', '.join(known) or 'none'}"
                )
    tasks, arms = list(tasks or known_tasks), list(arms or known_arms)
    runs: dict[tuple[str, str, int], list[Row]] = {}
    for row in sorted(rows):
        if row.task in tasks and row.arm in arms:
            runs.setdefault(row.cell, []).append(row)
    if not runs:
        raise BenchmarkDataError("no evaluations to compare")
    seeds = sorted({seed for _, _, seed in runs})

    common: dict[str, int] = {}
    scores: dict[str, dict[str, dict[int, float]]] = {}
    at: dict[str, dict[str, tuple[int, int]]] = {}
    missing = []
    for task in tasks:
        ends = [run[-1].frames for (name, _, _), run in runs.items() if name == task]
        common[task] = min([*ends, frames] if frames is not None else ends, default=0)
        scores[task], at[task] = {}, {}
        for arm in arms:
            found = {}
            for seed in seeds:
                upto = [r for r in runs.get((task, arm, seed), ()) if r.frames <= common[task]]
                if upto:
                    found[seed] = upto[-1]
                else:
                    missing.append((task, arm, seed))
            if found:
                key = f"return_{returns}"
                scores[task][arm] = {seed: getattr(row, key) for seed, row in found.items()}
                used = [row.frames for row in found.values()]
                at[task][arm] = min(used), max(used)
    return Comparison(tasks, arms, common, scores, at, missing)


def normalized_scores(
    comparison: Comparison, anchors: Mapping[str, Anchor], tasks: Sequence[str]
) -> dict[str, np.ndarray]:
    """Scores of the arms that have all tasks, in units of the anchors.

    Args:
        comparison: the scores.
        anchors: by task, what 0 and 1 mean.
        tasks: the tasks, each of which has an anchor.

    Returns:
        By arm, an array of shape ``[seeds, tasks]`` of the seeds that it has on all tasks. An arm
        that has no such seed is not in it.
    """
    result = {}
    for arm in comparison.arms:
        columns = [comparison.scores[task].get(arm, {}) for task in tasks]
        seeds = sorted(set.intersection(*map(set, columns))) if columns else []
        if seeds:
            raw = np.array([[column[seed] for column in columns] for seed in seeds])
            zero = np.array([anchors[task].random for task in tasks])
            one = np.array([anchors[task].reference for task in tasks])
            result[arm] = (raw - zero) / (one - zero)
    return result


def iqm(scores: np.ndarray, *, reps: int = 2000, name: str = "") -> Estimate:
    """Interquartile mean over all entries.

    Of ``n`` entries, rliable cuts ``floor(n / 4)`` at either end: with fewer than four it is the
    mean.

    Args:
        scores: array of shape ``[seeds, tasks]``.

    Keyword Args:
        reps: resamples of the bootstrap.
        name: seeds the bootstrap, so that an estimate depends on nothing but its data and name.

    Returns:
        The mean with its interval.
    """
    metrics = _rliable("metrics")
    point, low, high = _bootstrap(
        scores, lambda x: np.array([metrics.aggregate_iqm(x)]), reps, f"iqm {name}"
    )
    return Estimate(float(point[0]), float(low[0]), float(high[0]))


def iqm_point(scores: Sequence[float] | np.ndarray) -> float:
    """Interquartile mean over all entries, without an interval.

    Args:
        scores: numbers.

    Returns:
        The mean.
    """
    return float(_rliable("metrics").aggregate_iqm(np.asarray(scores)))


def performance_profile(
    scores: np.ndarray, taus: np.ndarray, *, reps: int = 2000, name: str = ""
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fraction of runs above each of some scores.

    Args:
        scores: array of shape ``[seeds, tasks]``.
        taus: the scores.

    Keyword Args:
        reps: resamples of the bootstrap.
        name: seeds the bootstrap.

    Returns:
        The fractions, and the lower and upper ends of their pointwise intervals.
    """
    # rliable's score_distributions, without its loop over the thresholds.
    return _bootstrap(scores, lambda x: (x[..., None] > taus).mean((0, 1)), reps, f"profile {name}")


def improvement_probability(x: np.ndarray, y: np.ndarray) -> float:
    """Probability that a run of ``x`` is better than one of ``y``, mean over tasks.

    That of rliable (the Mann-Whitney U statistic, ties count half) in a fraction of the time.

    Args:
        x: scores of shape ``[seeds, tasks]``.
        y: scores of shape ``[other seeds, tasks]``.

    Returns:
        The probability.

    Examples:
        >>> import numpy as np
        >>> from torchrl_trudi.record.benchmark_aggregates import improvement_probability
        >>> improvement_probability(np.array([[1.0], [3.0]]), np.array([[2.0], [0.0]]))
        0.75
    """
    pairs = np.sign(x[:, None] - y[None])
    return float((pairs.mean() + 1) / 2)


def probability_of_improvement(
    comparison: Comparison, x: str, y: str, *, reps: int = 2000
) -> tuple[Estimate, list[str]] | None:
    """Probability that a run of one arm is better than one of another, mean over tasks.

    Args:
        comparison: the scores.
        x: the one arm.
        y: the other.

    Keyword Args:
        reps: resamples of the bootstrap.

    Returns:
        The probability with its interval, and the tasks: those on which both arms have a score.
        ``None`` if there is none.
    """
    tasks, columns = [], ([], [])  # type: ignore[var-annotated]
    for task in comparison.tasks:
        of_task = comparison.scores[task]
        if x in of_task and y in of_task:
            tasks.append(task)
            for arm, column in zip((x, y), columns, strict=True):
                column.append(list(of_task[arm].values()))
    if not tasks:
        return None
    # As many rows as the task with the fewest: an array is rectangular.
    arrays = [np.array([c[: min(map(len, column))] for c in column]).T for column in columns]
    point, low, high = _bootstrap(
        arrays, lambda a, b: np.array([improvement_probability(a, b)]), reps, f"{x} over {y}"
    )
    return Estimate(float(point[0]), float(low[0]), float(high[0])), tasks


def read_anchors(path: str | Path) -> dict[str, Anchor]:
    """Read what normalised scores of 0 and 1 mean.

    Args:
        path: a CSV file with the columns ``task, random, reference, note``.

    Returns:
        Anchor by task.

    Raises:
        FileNotFoundError: if there is no such file.
        BenchmarkDataError: if it cannot be read; names the line.
    """
    with Path(path).open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        anchors = {}
        for row in reader:
            try:
                anchor = Anchor(float(row["random"]), float(row["reference"]), row["note"])
                if anchor.random == anchor.reference:
                    raise ValueError("the two are equal")
                anchors[row["task"]] = anchor
            except (KeyError, TypeError, ValueError) as error:
                raise BenchmarkDataError(
                    f"{path}, line {reader.line_num}: got {row}, accepted: "
                    "task,random,reference,note with two different numbers"
                ) from error
    return anchors


def _arm_order(arm: str) -> tuple[bool, str]:
    # The method first, then the others by name.
    return arm != "trudi", arm


def _rliable(module: str) -> Any:
    try:
        return importlib.import_module(f"rliable.{module}")
    except ImportError as error:
        raise ImportError(
            f'aggregates need rliable ({error}): pip install "torchrl_trudi[benchmark]", or in a '
            'checkout pip install -e ".[benchmark]"'
        ) from error


def _bootstrap(
    scores: np.ndarray | list[np.ndarray],
    function: Callable[..., np.ndarray],
    reps: int,
    name: str,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values of a function on the data, and its percentile interval."""
    library = _rliable("library")
    several = isinstance(scores, list)
    if min(len(each) for each in (scores if several else [scores])) < 2:
        # Resamples of a single seed are that seed: no spread would look like certainty.
        point = function(*scores) if several else function(scores)
        return point, np.full_like(point, np.nan), np.full_like(point, np.nan)
    with _seeded(zlib.crc32(name.encode())):
        points, intervals = library.get_interval_estimates({"x": scores}, function, reps=reps)
    return points["x"], intervals["x"][0], intervals["x"][1]


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """rliable draws from NumPy's global generator, whatever random_state it is given."""
    state = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(state)

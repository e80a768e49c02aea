"""The report of a benchmark: a Markdown page and its pictures, made from the data file alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from torchrl_trudi.record.benchmark import BenchmarkDataError, Row
from torchrl_trudi.record.benchmark_aggregates import (
    Anchor,
    Comparison,
    Estimate,
    iqm,
    normalized_scores,
    performance_profile,
    probability_of_improvement,
)
from torchrl_trudi.record.benchmark_plots import plot_curves, plot_estimates, plot_profiles

__all__ = ["write_report"]

REPORT_FILE = "report.md"
TITLE = "# Benchmark report"
PICTURES = ("curves.png", "aggregate.png", "profiles.png", "improvement.png")


def write_report(
    out: str | Path,
    rows: Sequence[Row],
    comparison: Comparison,
    anchors: Mapping[str, Anchor],
    *,
    returns: str = "deterministic",
    baseline: str = "trudi",
    reps: int = 2000,
    source: str = "",
) -> Path:
    """Write the page and its pictures.

    Args:
        out: directory; ``report.md`` and the pictures in it are replaced.
        rows: the data.
        comparison: the scores to compare.
        anchors: by task, what normalised scores mean.

    Keyword Args:
        returns: which return the scores are.
        baseline: the arm whose probability of improvement over the others is estimated.
        reps: resamples of the bootstrap.
        source: name of the data file, for the text.

    Returns:
        The path of the page.

    Raises:
        BenchmarkDataError: if the directory holds files of these names that are no report.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    _check_ours(out)
    # A picture that this report does not make would belong to another one.
    for name in PICTURES:
        (out / name).unlink(missing_ok=True)
    tasks, arms = comparison.tasks, comparison.arms
    plot_curves(rows, out / "curves.png", tasks=tasks, arms=arms, returns=returns)
    text = [
        TITLE,
        f"From `{Path(source).name}` by `examples/benchmark.py report`. Scores are returns of the "
        f"{returns} policy, in the units of the task, at the last evaluation up to the frames given. "
        "These are, for each task, the largest number that all runs there have. IQM is the interquartile "
        "mean; with fewer than four seeds it is the mean. Brackets: 95 % percentile intervals of a "
        f"bootstrap over seeds, stratified by task, {reps} resamples (rliable); with few seeds they "
        "are too narrow, with one there is none.",
        "## By task",
        _table(
            ["arm", *(f"{task}, {comparison.frames[task]:,} frames" for task in tasks)],
            [[arm, *(_score(comparison, task, arm, reps) for task in tasks)] for arm in arms],
        ),
        "![returns against frames](curves.png)",
        "## All tasks",
        *_aggregates(out, comparison, anchors, reps),
        "## Probability of improvement",
        *_improvements(out, comparison, baseline, reps),
        "## Cells",
        _cells(rows, comparison),
        _missing(comparison),
    ]
    path = out / REPORT_FILE
    path.write_text("\n\n".join(text) + "\n", encoding="utf-8")
    return path


def _check_ours(out: Path) -> None:
    page = out / REPORT_FILE
    if page.exists() and page.read_text(encoding="utf-8").startswith(TITLE):
        return
    taken = [name for name in (REPORT_FILE, *PICTURES) if (out / name).exists()]
    if taken:
        raise BenchmarkDataError(
            f"{out} holds {', '.join(taken)} and no benchmark report; give another directory"
        )


def _score(comparison: Comparison, task: str, arm: str, reps: int) -> str:
    values = comparison.scores[task].get(arm)
    if not values:
        return "missing"
    estimate = iqm(np.array([list(values.values())]).T, reps=reps, name=f"{task} {arm}")
    seeds = f"{len(values)} seed" + "s" * (len(values) != 1)
    return f"{_format(estimate, '.0f')}, {seeds}"


def _aggregates(
    out: Path, comparison: Comparison, anchors: Mapping[str, Anchor], reps: int
) -> list[str]:
    tasks = [task for task in comparison.tasks if task in anchors]
    without = [task for task in comparison.tasks if task not in anchors]
    text = []
    if without:
        text.append(f"No anchors, so not in this section: {', '.join(without)}.")
    scores = normalized_scores(comparison, anchors, tasks) if tasks else {}
    if not scores:
        return [*text, "No arm has a seed with a score on each task."]
    left_out = [arm for arm in comparison.arms if arm not in scores]
    estimates = {arm: iqm(x, reps=reps, name=f"all {arm}") for arm, x in scores.items()}
    plot_estimates(estimates, out / "aggregate.png", label="IQM of normalised scores", line=1.0)
    highest = max(1.0, *(float(x.max()) for x in scores.values()))
    lowest = min(0.0, *(float(x.min()) for x in scores.values()))
    taus = np.linspace(lowest, highest, 201)
    profiles = {arm: performance_profile(x, taus, reps=reps, name=arm) for arm, x in scores.items()}
    plot_profiles(profiles, taus, out / "profiles.png", arms=comparison.arms)
    text += [
        "Scores are normalised task by task: (score - random) / (reference - random).",
        _table(
            ["task", "random", "reference", "the reference is", "frames"],
            [
                [
                    *(task, f"{anchors[task].random:g}", f"{anchors[task].reference:g}"),
                    *(anchors[task].note, f"{comparison.frames[task]:,}"),
                ]
                for task in tasks
            ],
        ),
        _table(
            ["arm", "IQM of normalised scores", "seeds", "tasks"],
            [
                [arm, _format(estimates[arm], ".3f"), str(len(x)), str(x.shape[1])]
                for arm, x in scores.items()
            ],
        ),
        "Only seeds that an arm has on all these tasks count here."
        + (f" Left out, for having none: {', '.join(left_out)}." if left_out else ""),
        "![aggregate](aggregate.png)",
        "![performance profiles](profiles.png)",
    ]
    return text


def _improvements(out: Path, comparison: Comparison, baseline: str, reps: int) -> list[str]:
    if baseline not in comparison.arms:
        return [f"The arm `{baseline}` is not among those compared."]
    estimates, lines = {}, []
    for arm in comparison.arms:
        if arm == baseline:
            continue
        found = probability_of_improvement(comparison, baseline, arm, reps=reps)
        if found is None:
            lines.append([arm, "no task in common", ""])
        else:
            estimates[f"over {arm}"], tasks = found
            lines.append([arm, _format(found[0], ".2f"), ", ".join(tasks)])
    if not lines:
        return ["There is no other arm."]
    text = [
        f"Probability that a run of `{baseline}` scores higher than one of the other arm, mean over "
        "the tasks that both have.",
        _table(["over", "probability", "tasks"], lines),
    ]
    if estimates:
        label = f"P({baseline} > other arm)"
        plot_estimates(estimates, out / "improvement.png", label=label, line=0.5)
        text.append("![probability of improvement](improvement.png)")
    return text


def _cells(rows: Sequence[Row], comparison: Comparison) -> str:
    lines = []
    for task in comparison.tasks:
        for arm in comparison.arms:
            values = comparison.scores[task].get(arm)
            if not values:
                continue
            last = {row.seed: row for row in sorted(rows) if (row.task, row.arm) == (task, arm)}
            first, final = comparison.at[task][arm]
            trained = [row.frames for row in last.values()]
            hours = np.median([row.wall_s for row in last.values()]) / 3600
            commits = sorted({row.commit for row in rows if (row.task, row.arm) == (task, arm)})
            lines.append(
                [
                    *(task, arm, str(len(values)), ", ".join(map(str, values))),
                    *(_span(first, final), _span(min(trained), max(trained)), f"{hours:.2f}"),
                    ", ".join(_short(commit) for commit in commits),
                ]
            )
    header = ["task", "arm", "seeds", "which", "frames compared", "frames trained"]
    return _table([*header, "hours (median)", "commits"], lines)


def _missing(comparison: Comparison) -> str:
    if not comparison.missing:
        return "No cell is missing."
    names = ", ".join(f"{task}/{arm}/seed {seed}" for task, arm, seed in comparison.missing)
    return f"Missing cells ({len(comparison.missing)}): {names}."


def _short(commit: str) -> str:
    sha, dirty, _ = commit.partition("-dirty")
    return sha[:10] + dirty


def _span(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _format(estimate: Estimate, spec: str) -> str:
    text = format(estimate.point, spec)
    if math.isfinite(estimate.low):
        text += f" [{estimate.low:{spec}}, {estimate.high:{spec}}]"
    return text


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)

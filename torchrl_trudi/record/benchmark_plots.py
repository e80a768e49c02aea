"""Pictures of a benchmark, made from its data alone.

Matplotlib's global state (backend, current figure, settings) is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchrl_trudi.record.benchmark import Row
from torchrl_trudi.record.benchmark_aggregates import Estimate, iqm_point

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_curves", "plot_estimates", "plot_profiles"]


def plot_curves(
    rows: Sequence[Row],
    out_path: str | Path,
    *,
    tasks: Sequence[str],
    arms: Sequence[str],
    returns: str = "deterministic",
) -> Path:
    """Draw returns against frames, a panel for each task: seeds thin, their IQM thick.

    Args:
        rows: the data.
        out_path: the PNG file.

    Keyword Args:
        tasks: the panels.
        arms: the colours.
        returns: ``"deterministic"`` or ``"stochastic"``.

    Returns:
        The path of the file.
    """
    columns = min(3, len(tasks))
    lines = -(-len(tasks) // columns)
    figure = _figure(5 * columns, 3.6 * lines + 0.6)
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    for axes in panels[len(tasks) :]:
        axes.set_visible(False)
    for axes, task in zip(panels, tasks, strict=False):
        for index, arm in enumerate(arms):
            seeds: dict[int, dict[int, float]] = {}
            for row in sorted(rows):
                if (row.task, row.arm) == (task, arm):
                    value = getattr(row, f"return_{returns}")
                    seeds.setdefault(row.seed, {})[row.frames] = value
            color = f"C{index % 10}"
            for curve in seeds.values():
                axes.plot(list(curve), list(curve.values()), color=color, alpha=0.35, linewidth=0.7)
            if seeds:
                common = sorted(set.intersection(*map(set, seeds.values())))
                middle = [iqm_point([seeds[seed][x] for seed in seeds]) for x in common]
                label = f"{arm} ({len(seeds)})"
                axes.plot(common, middle, color=color, linewidth=2, marker=".", label=label)
        axes.set_title(task)
        axes.set_xlabel("environment frames")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="best", fontsize="small", title="arm (seeds)")
    for axes in panels[::columns]:
        axes.set_ylabel(f"return, {returns} policy")
    return _save(figure, out_path)


def plot_estimates(
    estimates: Mapping[str, Estimate],
    out_path: str | Path,
    *,
    label: str,
    line: float | None = None,
) -> Path:
    """Draw estimates with their intervals, one below the other.

    Args:
        estimates: by name, the first at the top.
        out_path: the PNG file.

    Keyword Args:
        label: what the axis shows.
        line: where to draw a vertical line.

    Returns:
        The path of the file.
    """
    figure = _figure(6, 1.2 + 0.4 * len(estimates))
    axes = figure.subplots()
    for position, each in enumerate(estimates.values()):
        if np.isfinite(each.low):
            axes.plot([each.low, each.high], [position] * 2, color="C0", linewidth=6, alpha=0.5)
        axes.plot([each.point], [position], color="black", marker="|", markersize=14)
    axes.set_yticks(range(len(estimates)), list(estimates))
    axes.set_ylim(len(estimates) - 0.5, -0.5)
    if line is not None:
        axes.axvline(line, color="black", linestyle="--", linewidth=1)
    axes.set_xlabel(label)
    axes.grid(alpha=0.3, axis="x")
    return _save(figure, out_path)


def plot_profiles(
    profiles: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]],
    taus: np.ndarray,
    out_path: str | Path,
    *,
    arms: Sequence[str],
) -> Path:
    """Draw the fraction of runs above each normalised score.

    Args:
        profiles: by arm, the fractions and the ends of their intervals.
        taus: the scores.
        out_path: the PNG file.

    Keyword Args:
        arms: all arms of the report: an arm has one colour in all pictures.

    Returns:
        The path of the file.
    """
    figure = _figure(6, 4)
    axes = figure.subplots()
    for arm, (point, low, high) in profiles.items():
        color = f"C{list(arms).index(arm) % 10}"
        axes.plot(taus, point, color=color, label=arm, drawstyle="steps-post")
        if np.isfinite(low).all():
            axes.fill_between(taus, low, high, color=color, alpha=0.15, step="post")
    axes.set_xlabel("normalised score")
    axes.set_ylabel("fraction of runs above it")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize="small")
    return _save(figure, out_path)


def _figure(width: float, height: float) -> Figure:
    # Imported here: matplotlib is slow to load and only drawing needs it.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, out_path: str | Path) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    out_path = Path(out_path)
    out_path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(str(out_path))
    return out_path

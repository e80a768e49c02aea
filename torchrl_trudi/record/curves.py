"""Learning curves of one or several runs, drawn from their ``scalars.csv``.

``python -m torchrl_trudi.record.curves RUN [RUN ...] -o out.png`` draws the return against
environment frames, and below it the path KL against its bound. Several runs, for instance seeds of
one setting, are drawn thin with their mean on top.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from torchrl_trudi.record.scalars import read_scalars

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["main", "plot_learning_curve"]

TRAIN_RETURN = "train/return"
EVAL_DETERMINISTIC = "eval/return_deterministic"
EVAL_STOCHASTIC = "eval/return_stochastic"
KL = "train/kl"
KL_BOUND = "train/kl_bound"

_Series = tuple[np.ndarray, np.ndarray]


def plot_learning_curve(
    run_dirs: str | Path | Sequence[str | Path],
    out_path: str | Path,
    *,
    title: str | None = None,
    smooth: int = 1,
    kl_bound: float | None = None,
    train_return: str = TRAIN_RETURN,
    eval_deterministic: str = EVAL_DETERMINISTIC,
    eval_stochastic: str = EVAL_STOCHASTIC,
    kl: str = KL,
    kl_bound_name: str = KL_BOUND,
) -> Path:
    """Draw return and path KL of one or several runs into a PNG file.

    Matplotlib's global state (backend, current figure, settings) is left alone.

    Args:
        run_dirs: one run directory, or several that are drawn together with their mean.
        out_path: the PNG file; its directory is made if absent.
        title: title of the figure; by default the name of the run, or the number of runs.
        smooth: the training return is averaged over this many points to its left.
        kl_bound: the bound on the KL; by default the last value logged as ``kl_bound_name``, if any.
        train_return: name of the scalar with the training return.
        eval_deterministic: name of the scalar with the return of the noise-free policy.
        eval_stochastic: name of the scalar with the return of the sampling policy.
        kl: name of the scalar with the path KL.
        kl_bound_name: name of the scalar with the bound.

    Returns:
        The path of the file.

    Raises:
        FileNotFoundError: if a directory is no run.
        ValueError: if no run is given, the file is not a PNG, ``smooth`` is less than 1, or no run
            has any of the returns.
    """
    # Imported here: matplotlib is slow to load and only drawing needs it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    out_path = Path(out_path)
    runs = [Path(run_dirs)] if isinstance(run_dirs, (str, Path)) else [Path(p) for p in run_dirs]
    if not runs:
        raise ValueError("run_dirs: got no run, accepted: at least one run directory")
    if out_path.suffix.lower() != ".png":
        raise ValueError(f"out_path: got {str(out_path)!r}, accepted: a file name ending in .png")
    if smooth < 1:
        raise ValueError(f"smooth: got {smooth}, accepted: at least 1")

    scalars = [read_scalars(run) for run in runs]
    returns = {
        "training": [_moving_average(s, smooth) for s in _collect(scalars, train_return)],
        "evaluation, noise-free": _collect(scalars, eval_deterministic),
        "evaluation, sampled": _collect(scalars, eval_stochastic),
    }
    if not any(returns.values()):
        found = sorted({name for run in scalars for name in run})
        raise ValueError(
            f"no returns to draw: got scalars {found}, accepted: at least one of "
            f"{[train_return, eval_deterministic, eval_stochastic]}"
        )

    figure = Figure(figsize=(7, 6), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for index, (label, series) in enumerate(returns.items()):
        _draw(top, series, f"C{index}", label)
    if title is None:
        title = runs[0].resolve().name if len(runs) == 1 else f"{len(runs)} runs"
    top.set_title(title)
    top.set_ylabel("return")
    top.legend(loc="best")

    _draw(bottom, _collect(scalars, kl), "C3", "path KL")
    bounds = [run[kl_bound_name][1][-1] for run in scalars if kl_bound_name in run]
    if kl_bound is not None:
        bounds = [kl_bound]
    for position, bound in enumerate(sorted(set(bounds))):
        once = "bound" if position == 0 else None
        bottom.axhline(bound, color="black", linestyle="--", linewidth=1, label=once)
    bottom.set_ylabel("path KL")
    bottom.set_ylim(bottom=0)
    bottom.set_xlabel("environment frames")
    if bottom.get_legend_handles_labels()[0]:
        bottom.legend(loc="best")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)

    out_path.parent.mkdir(parents=True, exist_ok=True)
    canvas.print_png(str(out_path))
    return out_path


def mean_curve(series: Sequence[_Series]) -> _Series:
    """Mean of several curves whose points need not coincide.

    Args:
        series: frames and values of each curve, frames increasing.

    Returns:
        Frames and mean where all curves exist; linear interpolation between the points of each.
        Both are empty if the curves do not overlap.
    """
    grid = np.unique(np.concatenate([frames for frames, _ in series]))
    start = max(frames[0] for frames, _ in series)
    stop = min(frames[-1] for frames, _ in series)
    grid = grid[(grid >= start) & (grid <= stop)]
    return grid, np.mean([np.interp(grid, frames, values) for frames, values in series], axis=0)


def _collect(scalars: Sequence[dict[str, _Series]], name: str) -> list[_Series]:
    """The curve of each run that has it, without the points that cannot be drawn."""
    curves = []
    for run in scalars:
        frames, values = run.get(name, (np.empty(0), np.empty(0)))
        keep = np.isfinite(values)
        if keep.any():
            curves.append((frames[keep], values[keep]))
    return curves


def _moving_average(series: _Series, window: int) -> _Series:
    frames, values = series
    sums = np.cumsum(np.concatenate([[0.0], values]))
    stop = np.arange(1, len(values) + 1)
    start = np.maximum(stop - window, 0)
    return frames, (sums[stop] - sums[start]) / (stop - start)


def _draw(axes: Axes, series: Sequence[_Series], color: str, label: str) -> None:
    # A single point is invisible as a line.
    marker = "." if any(len(frames) < 30 for frames, _ in series) else None
    if len(series) == 1:
        axes.plot(*series[0], color=color, label=label, marker=marker)
        return
    for frames, values in series:
        axes.plot(frames, values, color=color, alpha=0.3, linewidth=0.8)
    if series:
        axes.plot(*mean_curve(series), color=color, label=f"{label} (mean)", marker=marker)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line of this module.

    Args:
        argv: arguments; by default those of the process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m torchrl_trudi.record.curves",
        description="Draw return and path KL of one or several runs.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory")
    parser.add_argument("-o", "--out", required=True, help="PNG file to write")
    parser.add_argument("--title", help="title of the figure")
    parser.add_argument(
        "--smooth", type=int, default=1, help="average the training return over this many points"
    )
    parser.add_argument("--kl-bound", type=float, help="bound on the KL, if the run logged none")
    args = parser.parse_args(argv)
    try:
        plot_learning_curve(
            args.runs, args.out, title=args.title, smooth=args.smooth, kl_bound=args.kl_bound
        )
    except (FileNotFoundError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


if __name__ == "__main__":
    main(sys.argv[1:])

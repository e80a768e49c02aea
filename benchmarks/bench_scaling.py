"""Cost per frame of the learner against environments, minibatch, denoising steps and width.

    python benchmarks/bench_scaling.py [--quick] [--csv FILE] [--plot FILE] [--axes num_steps width]

One axis at a time around the Humanoid preset; one thread, medians, the points of an axis taking turns.
No physics: the observations are synthetic. Per frame of experience:

- acting: the actor on ``num_envs`` observations, recording its chain
- estimation: targets of a rollout, with a chain of its own at every next state
- update: critic and actor, loss to Adam, in as many minibatches as a frame is used in (the epochs)
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
from pathlib import Path

import torch
from _scaling_point import PARTS, Point, make_learner
from _timing import medians_ms, pin_one_thread

AXES = {
    "num_envs": (16, 64, 256, 1024, 4096),
    "minibatch": (64, 128, 256, 512, 1024, 2048),
    "num_steps": (1, 2, 4, 8, 16),
    "width": (64, 128, 256, 512, 1024),
}
QUICK_AXES = {
    "num_envs": (16, 64, 256),
    "minibatch": (128, 256, 512),
    "num_steps": (1, 4, 8),
    "width": (64, 256),
}
TITLES = {
    "num_envs": "environments",
    "minibatch": "minibatch",
    "num_steps": "denoising steps N",
    "width": "width",
}
Row = tuple[str, int, str, float]


def sweep(
    axis: str, values: tuple[int, ...], repeats: int, device: torch.device | None = None
) -> list[Row]:
    """Costs along one axis.

    Args:
        axis: name of a field of the point.
        values: its values.
        repeats: repetitions of each call.
        device: where it runs.

    Returns:
        Rows of axis, value, part and us per frame.
    """
    learners = {
        value: make_learner(dataclasses.replace(Point.preset(), **{axis: value}), device)
        for value in values
    }
    functions = {
        f"{value} {part}": learner.functions[part]
        for value, learner in learners.items()
        for part in PARTS
    }
    times = medians_ms(functions, repeats)
    return [
        (axis, value, part, 1e3 * times[f"{value} {part}"] / learner.frames[part])
        for value, learner in learners.items()
        for part in PARTS
    ]


def series(rows: list[Row], axis: str, part: str | None = None) -> tuple[list[int], list[float]]:
    """Values and costs of a part, or of all parts together, along an axis."""
    costs: dict[int, float] = {}
    for name, value, of, cost in rows:
        if name == axis and part in (None, of):
            costs[value] = costs.get(value, 0.0) + cost
    return list(costs), list(costs.values())


def write_csv(rows: list[Row], path: Path) -> None:
    """Writes a row per axis, value and part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("axis", "value", "part", "us_per_frame"))
        writer.writerows((*row[:3], f"{row[3]:.2f}") for row in rows)


def plot(rows: list[Row], path: Path) -> None:
    """Draws cost against value, both logarithmic, a panel per axis."""
    # Imported here: only drawing needs it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    axes_names = list(dict.fromkeys(row[0] for row in rows))
    figure = Figure(figsize=(4 * len(axes_names), 3.6), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(axes_names), sharey=True, squeeze=False)[0]
    for panel, axis in zip(panels, axes_names, strict=True):
        for part in PARTS:
            panel.loglog(*series(rows, axis, part), marker=".", label=part)
        values, costs = series(rows, axis)
        panel.loglog(values, costs, marker=".", color="black", label="together")
        if axis == "num_steps":
            linear = [costs[0] * value / values[0] for value in values]
            (line,) = panel.loglog(values, linear, color="black", linestyle="--")
            panel.legend([line], ["linear in N"], fontsize="small")
        panel.set_xlabel(TITLES[axis])
        panel.set_xticks(values, [str(value) for value in values])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
    panels[0].set_ylabel("us per frame")
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.print_png(str(path))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES), help="which axes")
    parser.add_argument("--repeats", type=int, default=15, help="repetitions (15)")
    parser.add_argument("--quick", action="store_true", help="fewer points, 3 repetitions")
    parser.add_argument("--device", type=torch.device, help="cpu or cuda")
    parser.add_argument("--csv", type=Path, help="write the rows into this file")
    parser.add_argument("--plot", type=Path, help="draw them into this PNG file")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {args.repeats}")
    if args.plot is not None and args.plot.suffix.lower() != ".png":
        parser.error(f"--plot must end in .png, got {args.plot}")
    if args.quick:
        args.repeats = min(args.repeats, 3)
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    pin_one_thread()
    rows: list[Row] = []
    for axis in args.axes:
        found = sweep(axis, (QUICK_AXES if args.quick else AXES)[axis], args.repeats, args.device)
        rows += found
        print(f"us per frame, {TITLES[axis]}")
        print("".join(f"{name:>12}" for name in ("", *PARTS, "together")))
        for value, total in zip(*series(found, axis), strict=True):
            costs = [row[3] for row in found if row[1] == value]
            print(f"{value:>12}" + "".join(f"{cost:12.1f}" for cost in (*costs, total)))
    if args.csv is not None:
        write_csv(rows, args.csv)
    if args.plot is not None:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()

"""How much of the machine the learner uses: its matrix products against the rate that they run at alone.

    python benchmarks/bench_machine.py [--csv FILE] [--repeats 15]

One thread, medians. First the products of the hidden layer, alone, at several numbers of rows; then
acting, estimation and update at the Humanoid preset, in multiply-adds per frame counted from the sizes
(`_flops.py`), and the fraction of the best of those rates that they reach. Activations, norms, the
kernels of the chain, Adam and Python are in the time and not in the count.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable
from pathlib import Path

import _flops
import torch
from _scaling_point import Learner, Point, make_learner
from _timing import medians_ms, pin_one_thread

ROWS = (64, 256, 1024, 2048, 8192)


def matmul_rates(
    width: int, repeats: int, device: torch.device | None = None
) -> dict[tuple[int, int, int], float]:
    """GFLOP/s of ``[rows, width] x [width, width]``, taking turns.

    Args:
        width: the width.
        repeats: repetitions.
        device: where it runs.

    Returns:
        Rates by rows, width and width.
    """
    weight = torch.randn(width, width, device=device)

    def product(rows: int) -> Callable[[], object]:
        left, out = (torch.randn(rows, width, device=device) for _ in range(2))
        # Often enough that the clock does not count.
        calls = max(1, 8192 // rows)

        def run() -> None:
            for _ in range(calls):
                torch.mm(left, weight, out=out)

        return run

    times = medians_ms({str(rows): product(rows) for rows in ROWS}, repeats)
    return {
        (rows, width, width): 2e-6 * max(1, 8192 // rows) * rows * width**2 / times[str(rows)]
        for rows in ROWS
    }


def multiply_adds(point: Point, learner: Learner) -> dict[str, float]:
    """Multiply-adds per frame of each part."""
    sizes = point.sizes
    return {
        "acting": _flops.chain(sizes),
        "estimation": _flops.estimation(sizes),
        "update": _flops.update(
            sizes, point.epochs, learner.gate, steps_beyond=learner.steps_beyond
        ),
    }


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15, help="repetitions (15)")
    parser.add_argument("--device", type=torch.device, help="cpu or cuda")
    parser.add_argument("--csv", type=Path, help="write the rows into this file")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {args.repeats}")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    pin_one_thread()
    point = Point.preset()
    rates = matmul_rates(point.width, args.repeats, args.device)
    best = max(rates.values())
    rows = []
    for (left, inner, right), rate in rates.items():
        rows.append((f"[{left}, {inner}] x [{inner}, {right}]", "", "", rate, rate / best))
    learner = make_learner(point, args.device)
    times = medians_ms(learner.functions, args.repeats)
    counts = multiply_adds(point, learner)
    for part, count in counts.items():
        microseconds = 1e3 * times[part] / learner.frames[part]
        rate = 2e-3 * count / microseconds
        rows.append((part, f"{2e-6 * count:.3f}", f"{microseconds:.2f}", rate, rate / best))
    header = ("part", "mflop_per_frame", "us_per_frame", "gflop_per_second", "fraction_of_matmul")
    table = [header, *((*row[:3], f"{row[3]:.2f}", f"{row[4]:.3f}") for row in rows)]
    for line in table:
        print(f"{line[0]:<26}" + "".join(f"{cell:>20}" for cell in line[1:]))
    print(f"inside the trust region: {learner.gate:.3f}, steps beyond: {learner.steps_beyond:.2f}")
    if args.csv is not None:
        args.csv.parent.mkdir(parents=True, exist_ok=True)
        with args.csv.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(table)


if __name__ == "__main__":
    main()

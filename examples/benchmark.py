"""A benchmark: seeds x tasks x arms, and its tables and pictures.

    python examples/benchmark.py run --tasks halfcheetah hopper --arms trudi reppo --seeds 0 1 2
    python examples/benchmark.py collect --csv docs/results/gymnasium_v5.csv
    python examples/benchmark.py report --csv docs/results/gymnasium_v5.csv --out docs/results/gymnasium_v5

``run`` goes on where it stopped. How it all works: ``docs/benchmark.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

DEFAULT_OUT = "runs/benchmark"


def run(args: argparse.Namespace) -> int:
    """Run the cells that are not finished."""
    from _benchmark_plan import Settings, plan
    from _benchmark_runner import next_step, run_plans

    from torchrl_trudi.trainers import ConfigError

    settings = Settings(
        *(args.frames, args.eval_interval, args.eval_episodes, args.threads, tuple(args.set))
    )
    out = Path(args.out).resolve()
    # Seeds outermost: an interrupted benchmark has whole comparisons.
    plans = [
        plan(out, task, arm, seed, settings)
        for seed in dict.fromkeys(args.seeds)
        for task in dict.fromkeys(args.tasks)
        for arm in dict.fromkeys(args.arms)
    ]
    problems, steps = [], []
    for each in plans:
        try:
            steps.append(next_step(each, each.cell.read(), args.retry_failed))
        except ConfigError as error:
            problems.append(str(error))
    # Before the first cell starts, and not after the last one before it.
    if problems:
        raise ConfigError("\n".join(problems))
    if args.dry_run:
        for each, (step, directory, frames) in zip(plans, steps, strict=True):
            goal = f"{frames:,} of {each.frames:,} frames"
            print(f"{each.cell}: {step}, {goal}")
            if step in ("start", "resume"):
                where = each.cell.new_run_dir() if directory is None else directory
                print("  " + " ".join(each.command(where, resume=step == "resume")))
        return 0
    return run_plans(plans, args.jobs, args.retry_failed)


def adopt(args: argparse.Namespace) -> int:
    """Write the records of cells whose runs were started by hand."""
    from _benchmark_adopt import adopt as adopt_cells

    for line in adopt_cells(Path(args.out).resolve(), args.commit, args.set, args.unfinished):
        print(line)
    return 0


def collect(args: argparse.Namespace) -> int:
    """Merge the evaluations of a directory's cells into a data file."""
    from torchrl_trudi.record.benchmark import merge_rows, read_rows, write_rows
    from torchrl_trudi.record.benchmark_cells import cells_in

    path = Path(args.csv)
    old = read_rows(path) if path.exists() else []
    new = []
    for cell in cells_in(args.out):
        record = cell.read()
        if record is None:
            print(f"{cell}: left out, it has no cell.json (adopt it if it was started by hand)")
        elif record.status != "finished" and not args.unfinished:
            print(f"{cell}: left out, it is {record.status} (--unfinished takes it)")
        else:
            new += cell.rows(record)
    rows = merge_rows(old, new, replace=args.replace)
    write_rows(path, rows)
    print(f"{path}: {len(rows)} rows, {len(rows) - len(old):+d}")
    return 0


def positive(text: str) -> int:
    """An integer of at least 1; underscores may group its digits."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, accepted: at least 1")
    return value


def natural(text: str) -> int:
    """An integer of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"got {text}, accepted: at least 0")
    return value


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    description, _, epilog = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)

    each = commands.add_parser("run", help="run the cells that are not finished")
    each.set_defaults(function=run)
    each.add_argument("--tasks", nargs="+", required=True, help="presets of examples/config/task")
    each.add_argument(
        "--arms",
        nargs="+",
        required=True,
        help="presets of examples/config/arm, and examples/peers",
    )
    each.add_argument("--seeds", nargs="+", type=natural, required=True)
    each.add_argument("--frames", type=positive, help="default: those of the task's preset")
    each.add_argument("--eval-interval", type=positive, default=50_000)
    each.add_argument("--eval-episodes", type=positive, default=10)
    each.add_argument("--threads", type=positive, default=1, help="CPU threads of a cell")
    each.add_argument("--jobs", type=positive, default=1, help="cells at a time")
    each.add_argument("--out", default=DEFAULT_OUT, help=f"default: {DEFAULT_OUT}")
    each.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a further override"
    )
    each.add_argument("--retry-failed", action="store_true", help="try failed cells again")
    each.add_argument("--dry-run", action="store_true", help="only say what would be done")

    each = commands.add_parser("adopt", help="enter runs that were started by hand")
    each.set_defaults(function=adopt)
    each.add_argument("--out", default=DEFAULT_OUT, help="holds TASK/ARM/seedK[/run]")
    each.add_argument("--commit", required=True, help="commit of the code that made them")
    each.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a further override they had",
    )
    each.add_argument(
        "--unfinished", action="store_true", help="also interrupted ones, for run to continue"
    )

    each = commands.add_parser("collect", help="merge the evaluations into a data file")
    each.set_defaults(function=collect)
    each.add_argument("--out", default=DEFAULT_OUT, help="directory of the cells")
    each.add_argument("--csv", required=True, help="the data file")
    each.add_argument(
        "--replace", action="store_true", help="new values win where a cell has others in the file"
    )
    each.add_argument(
        "--unfinished", action="store_true", help="also cells that are running or have failed"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = make_parser()
    args = parser.parse_args(argv)
    from torchrl_trudi.record.benchmark import BenchmarkDataError
    from torchrl_trudi.trainers import ConfigError

    try:
        return args.function(args)
    except (ConfigError, BenchmarkDataError, FileNotFoundError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


if __name__ == "__main__":
    # `... | head` is no reason for a traceback.
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())

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
ANCHORS = Path(__file__).resolve().parents[1] / "docs" / "results" / "gymnasium_v5_anchors.csv"
RANDOM_TASKS = ("Ant-v5", "HalfCheetah-v5", "Hopper-v5", "Humanoid-v5", "Walker2d-v5")


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


def report(args: argparse.Namespace) -> int:
    """Make the tables and the pictures of a data file."""
    from torchrl_trudi.record.benchmark import read_rows
    from torchrl_trudi.record.benchmark_aggregates import compare, read_anchors
    from torchrl_trudi.record.benchmark_report import write_report

    rows = read_rows(args.csv)
    comparison = compare(
        rows, tasks=args.tasks, arms=args.arms, returns=args.returns, frames=args.frames
    )
    anchors = read_anchors(args.anchors)
    path = write_report(
        args.out,
        rows,
        comparison,
        anchors,
        returns=args.returns,
        baseline=args.baseline,
        reps=args.reps,
        source=args.csv,
    )
    print(f"{path} and its pictures")
    return 0


def random_returns(args: argparse.Namespace) -> int:
    """Measure a policy that acts at random, the zero of normalised scores."""
    import gymnasium
    import numpy as np

    print("task,random,std,episodes")
    for name in args.tasks:
        env = gymnasium.make(name)
        env.action_space.seed(args.seed)
        env.reset(seed=args.seed)
        returns = []
        for _ in range(args.episodes):
            env.reset()
            total, done = 0.0, False
            while not done:
                _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
                total += float(reward)
                done = terminated or truncated
            returns.append(total)
        print(f"{name},{np.mean(returns):.1f},{np.std(returns):.1f},{args.episodes}", flush=True)
        env.close()
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

    each = commands.add_parser("report", help="make tables and pictures of a data file")
    each.set_defaults(function=report)
    each.add_argument("--csv", required=True, help="the data file")
    each.add_argument(
        "--out", required=True, help="directory of the report; an old one is replaced"
    )
    each.add_argument("--tasks", nargs="+", help="Gymnasium ids; default: all in the file")
    each.add_argument("--arms", nargs="+", help="default: all in the file")
    each.add_argument("--returns", choices=("deterministic", "stochastic"), default="deterministic")
    each.add_argument("--frames", type=positive, help="compare at no more than these")
    each.add_argument("--baseline", default="trudi", help="the arm compared with each other one")
    each.add_argument("--anchors", default=str(ANCHORS), help="what scores of 0 and 1 mean")
    each.add_argument("--reps", type=positive, default=2000, help="resamples of the bootstrap")

    each = commands.add_parser("random", help="measure a policy that acts at random")
    each.set_defaults(function=random_returns)
    each.add_argument("--tasks", nargs="+", default=list(RANDOM_TASKS), help="Gymnasium ids")
    each.add_argument("--episodes", type=positive, default=100)
    each.add_argument("--seed", type=natural, default=0)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = make_parser()
    args = parser.parse_args(argv)
    from torchrl_trudi.record.benchmark import BenchmarkDataError
    from torchrl_trudi.trainers import ConfigError

    try:
        return args.function(args)
    except (ConfigError, BenchmarkDataError, OSError, UnicodeDecodeError, ImportError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


if __name__ == "__main__":
    # `... | head` is no reason for a traceback.
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())

"""Enter runs that were started by hand into a benchmark."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from _benchmark_plan import ROOT, Settings, compare, compose_config, fixed_of_tree, fixed_settings
from omegaconf import OmegaConf

from torchrl_trudi.record.benchmark_cells import Attempt, Cell, CellRecord, cells_in, trained_frames
from torchrl_trudi.trainers import ConfigError, load_config
from torchrl_trudi.trainers.run_dir import CONFIG_FILE, VERSIONS_FILE

# How fast a run was, not what it computed: free to be anything in a run made by hand.
_THREADS = ("num_threads", "env.num_threads")


def adopt(out: Path, commit: str, overrides: Sequence[str], unfinished: bool = False) -> list[str]:
    """Write the record of each cell that has a run and none.

    Args:
        out: directory of the benchmark.
        commit: commit of the code that made the runs.
        overrides: further overrides that the runs had.
        unfinished: whether runs that have not reached their frames are entered too, as interrupted.

    Returns:
        One line for each cell.

    Raises:
        ConfigError: if a run is not what its folder's name says; nothing is written then.
    """
    commit = _full(commit)
    lines, problems, records = [], [], []
    for cell in cells_in(out):
        if cell.read() is not None:
            lines.append(f"{cell}: has a record already")
            continue
        runs = [path for path in (cell.path / "run", cell.path) if (path / CONFIG_FILE).is_file()]
        if not runs:
            lines.append(f"{cell}: left out, it has no run")
            continue
        try:
            record = _record(cell, runs[0], commit, overrides)
        except ConfigError as error:
            problems.append(f"{cell}: {error}")
            continue
        if record.status != "finished" and not unfinished:
            lines.append(f"{cell}: left out, its run has not reached {record.frames:,} frames")
            continue
        records.append((cell, record))
        lines.append(f"{cell}: adopted, {record.status}")
    if problems:
        raise ConfigError("\n".join(problems))
    for cell, record in records:
        with cell.locked():
            cell.write(record)
    return lines


def _record(cell: Cell, run: Path, commit: str, overrides: Sequence[str]) -> CellRecord:
    tree = OmegaConf.to_container(load_config(run), resolve=True)
    assert isinstance(tree, dict)
    typed = {str(key): value for key, value in tree.items()}
    found = fixed_of_tree(typed)
    frames = typed["collector"]["total_frames"]
    logger = typed["logger"]
    settings = Settings(
        frames, logger["eval_interval"], logger["eval_episodes"], overrides=tuple(overrides)
    )
    asked = fixed_settings(compose_config(cell.preset, cell.arm, cell.seed, settings))
    for key in _THREADS:
        asked[key] = found.get(key)
    differences = compare(found, asked)
    if differences:
        raise ConfigError(
            f"its run in {run} has other settings than its name says (its value -> the arm's); "
            "give further overrides with --set\n" + "\n".join(f"  {line}" for line in differences)
        )
    checkpoint, evaluated = trained_frames(run)
    status = "finished" if min(checkpoint, evaluated) >= frames else "interrupted"
    name = run.relative_to(cell.path).as_posix()
    attempt = Attempt(commit, None, 0, name, _versions(run))
    record = CellRecord(asked["env.name"], cell.preset, cell.arm, cell.seed, status, frames, found)
    return dataclasses.replace(record, overrides=list(overrides), adopted=True, attempts=[attempt])


def _versions(run: Path) -> dict[str, str]:
    try:
        return json.loads((run / VERSIONS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _full(commit: str) -> str:
    """The full name of a commit that this repository knows; any other as it is given."""
    base, dirty, _ = commit.partition("-dirty")
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", f"{base}^{{commit}}"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return commit
    return done.stdout.strip() + dirty

"""Run the cells of a benchmark as processes: some at a time, resumable, stopped cleanly."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from _benchmark_plan import Plan, child_environment, code_commit

from torchrl_trudi.record.benchmark_cells import Attempt, CellLocked, CellRecord, trained_frames
from torchrl_trudi.trainers import ConfigError
from torchrl_trudi.trainers.run_dir import CONFIG_FILE, library_versions

LOG_TAIL = 15
# Seconds between the signals that ask a process to stop, each less polite than the one before.
GRACE = 60.0


class CellFailed(RuntimeError):
    """A cell that has failed in an earlier call."""


@dataclasses.dataclass
class Job:
    """A cell whose process is running."""

    plan: Plan
    record: CellRecord
    process: subprocess.Popen
    lock: int
    log: IO[str]
    begin: float


def next_step(
    plan: Plan, record: CellRecord | None, retry_failed: bool = False
) -> tuple[str, Path | None, int]:
    """What is left to do in a cell.

    Args:
        plan: the cell as it is asked for.
        record: the cell's record, if it has one.
        retry_failed: whether a cell that has failed is tried again. Not of itself: a run that
            diverged would be repeated until it does not, and its arm look better than it is.

    Returns:
        ``"finished"``, ``"failed"``, ``"resume"`` or ``"start"``, the run directory (``None`` for a
        new one), and the frames from which it goes on.

    Raises:
        ConfigError: if the cell on disk has other settings.
    """
    if record is None:
        if (plan.cell.path / "run").exists() or (plan.cell.path / CONFIG_FILE).exists():
            raise ConfigError(
                f"{plan.cell}: holds a run that was started by hand; enter it with adopt, or move it"
            )
        return "start", None, 0
    differences = plan.differences(record)
    if differences:
        raise ConfigError(
            f"{plan.cell}: has other settings than those asked for (its value -> the one asked "
            "for); give its values, or another --out\n"
            + "\n".join(f"  {line}" for line in differences)
        )
    if not record.attempts:
        return "start", None, 0
    run = plan.cell.path / record.attempts[-1].run
    checkpoint, evaluated = trained_frames(run)
    if evaluated >= plan.frames and (plan.is_peer or checkpoint >= plan.frames):
        return "finished", run, evaluated
    if record.status == "failed" and not retry_failed:
        return "failed", run, checkpoint
    if checkpoint and not plan.is_peer:
        return "resume", run, checkpoint
    return "start", None, 0


def run_plans(plans: Sequence[Plan], jobs: int, retry_failed: bool = False) -> int:
    """Run cells until each is finished, has failed, or the process is told to stop.

    Args:
        plans: the cells; all have been compared with what is on disk.
        jobs: processes at a time.
        retry_failed: whether cells that have failed are tried again.

    Returns:
        Exit status: 0, or 1 if a cell failed, or 128 and the signal's number.
    """
    waiting = list(plans)
    running: list[Job] = []
    failed: list[str] = []
    skipped = 0
    with _stop_signals() as stop:
        try:
            while (waiting or running) and not stop:
                while waiting and len(running) < jobs and not stop:
                    plan = waiting.pop(0)
                    try:
                        job = _start(plan, retry_failed)
                    except CellLocked as error:
                        skipped += 1
                        _say(f"{error}: left to it")
                        continue
                    except (ConfigError, CellFailed) as error:
                        failed.append(str(plan.cell))
                        _say(str(error))
                        continue
                    if job is not None:
                        running.append(job)
                for job in [job for job in running if job.process.poll() is not None]:
                    running.remove(job)
                    if not _finish(job, interrupted=False):
                        failed.append(str(job.plan.cell))
                time.sleep(0.1)
        finally:
            # Also if something above has gone wrong: no process is left behind.
            _stop(running)
            for job in running:
                _finish(job, interrupted=True)
    if stop:
        _say("stopped; the same command continues")
        return 128 + stop[0]
    if failed:
        _say(f"{len(failed)} of {len(plans)} cells failed: {', '.join(failed)}")
    if skipped:
        _say(f"{skipped} of {len(plans)} cells are another process's")
    return 1 if failed else 0


def _start(plan: Plan, retry_failed: bool) -> Job | None:
    """Start a cell's process; ``None`` if nothing is left to do."""
    cell, settings = plan.cell, plan.settings
    lock = cell.lock()
    try:
        # Read under the lock: another runner may have finished it meanwhile.
        record = cell.read()
        step, run, frames = next_step(plan, record, retry_failed)
        if step == "failed":
            raise CellFailed(f"{cell}: has failed before, {cell.log_path} (--retry-failed goes on)")
        if step == "finished":
            assert record is not None
            if record.status != "finished":
                record.status = "finished"
                cell.write(record)
            _say(f"{cell}: finished already ({frames:,} frames)")
            os.close(lock)
            return None
        if record is None:
            record = CellRecord(
                plan.task, cell.preset, cell.arm, cell.seed, "running", plan.frames, plan.config
            )
        elif step == "start" and record.attempts:
            _say(f"{cell}: its last attempt cannot be continued, starts again from nothing")
        record.status, record.frames = "running", plan.frames
        record.overrides = list(settings.overrides)
        run = cell.new_run_dir() if run is None else run
        command = plan.command(run, resume=step == "resume")
        commit = code_commit()
        name = os.path.relpath(run, cell.path)
        before = record.attempts[-1].commit if step == "resume" else commit
        if before != commit:
            _say(f"{cell}: was made by commit {before}, goes on with {commit}")
        started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        record.attempts.append(Attempt(commit, command, frames, name, library_versions(), started))
        cell.write(record)
        log = cell.log_path.open("a", encoding="utf-8")
        log.write(f"\n== {started} {' '.join(command)}\n")
        log.flush()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=child_environment(settings.threads),
            # Ctrl-C reaches this process alone, which passes it on.
            start_new_session=True,
            # Should this process be killed, the lock lasts as long as the cell's does.
            pass_fds=(lock,),
        )
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(lock)
        raise
    _say(f"{cell}: {'continues from' if frames else 'starts at'} {frames:,} frames")
    return Job(plan, record, process, lock, log, time.perf_counter())


def _finish(job: Job, interrupted: bool) -> bool:
    """Record how a cell's process ended; whether all is well."""
    record, cell = job.record, job.plan.cell
    attempt = record.attempts[-1]
    attempt.exit_code = code = job.process.returncode
    attempt.wall_clock_s = round(time.perf_counter() - job.begin, 1)
    job.log.close()
    # A process that was told to stop may end well, too: what counts is how far it came.
    _, evaluated = trained_frames(cell.path / attempt.run)
    if code == 0 and evaluated >= job.plan.frames:
        record.status = "finished"
    elif interrupted or code == 0:
        record.status = "interrupted"
    else:
        record.status = "failed"
        text = cell.log_path.read_text(encoding="utf-8", errors="replace")
        attempt.log_tail = text.splitlines()[-LOG_TAIL:]
    cell.write(record)
    os.close(job.lock)
    _say(f"{cell}: {record.status} after {attempt.wall_clock_s:.0f} s")
    if record.status == "failed":
        _say(f"  exit code {code}, {cell.log_path} ends with:")
        for line in attempt.log_tail:
            _say(f"  | {line}")
    return record.status != "failed"


def _stop(running: Sequence[Job]) -> None:
    """Ask the processes to end, then make them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        alive = [job for job in running if job.process.poll() is None]
        for job in alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.process.pid, number)
        deadline = time.monotonic() + GRACE
        while any(job.process.poll() is None for job in alive) and time.monotonic() < deadline:
            time.sleep(0.05)


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Context in which SIGINT and SIGTERM only leave their number in the list."""
    stop: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(n, lambda number, _: stop.append(number)) for n in numbers]
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _say(text: str) -> None:
    print(text, flush=True)

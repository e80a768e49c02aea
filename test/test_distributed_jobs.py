"""Jobs of several processes that end, one way or another, and go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from _rank_workers import train
from _ranks import free_port, run_ranks
from _runs import SCRIPT, final_state, words

from torchrl_trudi.record import read_scalars

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

BATCH = 32


def settings(run: Path, iterations: int, resume: bool = False) -> dict:
    base: dict = {
        "env": {"name": "Hopper-v5", "num_envs": 4, "max_episode_steps": 11},
        "collector": {"total_frames": iterations * BATCH, "frames_per_batch": BATCH},
        "policy": {"hidden_size": 8},
        "critic": {"hidden_size": 8, "num_bins": 11},
        "optim": {"num_minibatches": 2, "num_epochs": 2},
        "logger": {"dir": str(run), "eval_episodes": 0, "progress": False},
        "device": "cpu",
        "num_threads": 1,
    }
    if resume:
        base["resume"] = str(run)
    return base


@pytest.mark.resume
def test_two_halves_are_the_whole(tmp_path):
    """Both ranks go on in mid-episode with their own random numbers: bit for bit."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    run_ranks(train, settings(whole, 6))
    run_ranks(train, settings(halves, 3))
    run_ranks(train, settings(halves, 6, resume=True))
    first, second = final_state(whole), final_state(halves)
    assert first.keys() == second.keys() and any("ranks" in name for name in first)
    assert [name for name in first if first[name] != second[name]] == []


@pytest.mark.resume
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_processes(tmp_path, before, after):
    """What was learned goes on; the episodes are new ones."""
    run = tmp_path / "run"
    run_ranks(train, settings(run, 3), size=before)
    results = run_ranks(train, settings(run, 6, resume=True), size=after)
    assert len({result["state"] for result in results}) == 1
    frames, _ = read_scalars(run)["train/kl"]
    assert frames.tolist() == [32 * i for i in range(1, 7)]
    count = results[0]["norm"]["count"]
    new = sum(len(result["seen"]) for result in results)
    assert count > new  # those of the first part are kept


class Job:
    """``torchrun`` with two processes."""

    def __init__(self, run: Path, **more: object) -> None:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
        launcher += [f"--master-port={free_port()}"]
        self.run = run
        self.log = (run.parent / "log").open("w+b")
        self.process = subprocess.Popen(
            [*launcher, str(SCRIPT), *words(settings(run, 1_000_000), **more)],
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> Job:
        try:
            self.wait_for_iterations()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            for rank in (0, 1):
                for pid in self.pids(rank):
                    os.kill(pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait()
        self.log.close()

    def output(self) -> str:
        return Path(self.log.name).read_text(errors="replace")

    def wait_for_iterations(self, seconds: float = 180.0) -> None:
        end, scalars = time.monotonic() + seconds, self.run / "scalars.csv"
        while not (scalars.exists() and scalars.stat().st_size > 3000):
            assert self.process.poll() is None and time.monotonic() < end, self.output()
            time.sleep(0.1)

    def pids(self, rank: int) -> list[int]:
        """The process of a rank, found by its environment among the launcher's children."""
        found = []
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        for pid in map(int, children.split()):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in variables:
                found.append(pid)
        return found


def test_sigterm_to_the_launcher_stops_all_and_saves(tmp_path):
    run = tmp_path / "run"
    with Job(run) as job:
        job.process.send_signal(signal.SIGTERM)
        job.process.wait(60)
        output = job.output()
    assert job.process.returncode != 0 and "SIGTERM; resume=" in output
    frames = int(read_scalars(run)["train/kl"][0][-1])
    assert [path.name for path in (run / "checkpoints").iterdir()] == [
        f"checkpoint-{frames:012d}.torchrl"
    ]
    # And both go on from there.
    results = run_ranks(train, settings(run, frames // BATCH + 2, resume=True))
    assert results[0]["state"] == results[1]["state"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_dead_rank_ends_the_job(tmp_path, rank):
    with Job(tmp_path / "run") as job:
        (pid,) = job.pids(rank)
        os.kill(pid, signal.SIGKILL)
        assert job.process.wait(90) != 0


def test_a_rank_that_hangs_ends_the_job(tmp_path):
    with Job(tmp_path / "run", **{"distributed.timeout_s": 5}) as job:
        (pid,) = job.pids(1)
        os.kill(pid, signal.SIGSTOP)
        assert job.process.wait(120) != 0
        assert "imed out" in job.output()

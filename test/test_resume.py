"""A run that was interrupted ends as the run that was not: bit for bit, on the CPU."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from _runs import SCRIPT, final_state, words

from torchrl_trudi.record import read_scalars
from torchrl_trudi.trainers import ConfigError, validate
from torchrl_trudi.trainers.update import TruDiUpdate

pytestmark = pytest.mark.resume

OLD_RUN = Path(__file__).parent / "trainers" / "data" / "run_v1.tar.gz"
BATCH = 32

ARMS = {
    "diffusion-pathwise": {},
    "gaussian-pathwise": {"policy": {"kind": "gaussian"}},
    "diffusion-surrogate": {
        "objective": {"kind": "surrogate"},
        "optim": {"lr_schedule": "kl_adaptive"},
        "trust_region": {"stop_factor": 0.5},
    },
    "gaussian-surrogate": {
        "policy": {"kind": "gaussian"},
        "objective": {"kind": "surrogate"},
        "critic": {"kind": "mse"},
    },
}


def settings(run: Path, iterations: int, *, resume: bool = False, **sections) -> dict:
    base: dict = {
        "env": {"name": "InvertedPendulum-v5", "num_envs": 4},
        "collector": {"total_frames": iterations * BATCH, "frames_per_batch": BATCH},
        "policy": {"hidden_size": 8},
        "critic": {"hidden_size": 8, "num_bins": 11},
        "optim": {"num_minibatches": 2, "num_epochs": 2},
        "logger": {
            "dir": str(run),
            "eval_interval": 4 * BATCH,
            "eval_episodes": 2,
            "checkpoint_interval": 5 * BATCH,
            "progress": False,
        },
        "device": "cpu",
        "num_threads": 1,
    }
    if resume:
        base["resume"] = str(run)
    for name, section in sections.items():
        base[name] = {**base.get(name, {}), **section}
    return base


def scalars(run: Path) -> dict[str, list[tuple[int, str]]]:
    """What was logged, but for times; of evaluations those that both runs make."""
    out = {}
    for name, (frames, values) in read_scalars(run).items():
        if not name.startswith("time/"):
            pairs = zip(frames.tolist(), map(repr, values.tolist()), strict=True)
            out[name] = [
                pair for pair in pairs if name.startswith("train/") or pair[0] % (4 * BATCH) == 0
            ]
    return out


def assert_same(first: Path, second: Path) -> None:
    states = final_state(first), final_state(second)
    assert states[0].keys() == states[1].keys()
    different = [name for name, value in states[0].items() if value != states[1][name]]
    assert not different
    assert len(states[0]) > 50
    assert scalars(first) == scalars(second)


# The other two say the same of one change each.
SLOW = pytest.mark.slow
QUICK = {"diffusion-pathwise", "gaussian-surrogate"}


@pytest.mark.parametrize(
    "arm", [pytest.param(arm, marks=() if arm in QUICK else SLOW) for arm in ARMS]
)
def test_two_halves_are_the_whole(script, tmp_path, arm):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    script.train(validate(settings(whole, 6, **ARMS[arm])))
    script.train(validate(settings(halves, 3, **ARMS[arm])))
    script.train(validate(settings(halves, 6, resume=True, **ARMS[arm])))
    assert_same(whole, halves)


def test_in_mid_episode_with_contacts(script, tmp_path):
    """Episodes that go on over the interruption, with warm starts, counters and the normaliser."""
    task = {"env": {"name": "Hopper-v5", "num_envs": 4, "max_episode_steps": 11}}
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    script.train(validate(settings(whole, 6, **task)))
    script.train(validate(settings(halves, 3, **task)))
    script.train(validate(settings(halves, 6, resume=True, **task)))
    assert_same(whole, halves)


def _signal_at(monkeypatch, number: int, call: int) -> None:
    """Send a signal to this process in the midst of an update."""
    step, calls = TruDiUpdate.__call__, []

    def interrupted(self, batch):
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return step(self, batch)

    monkeypatch.setattr(TruDiUpdate, "__call__", interrupted)


def _interrupt(script, monkeypatch, tmp_path, call: int, number: int = signal.SIGTERM) -> None:
    whole, parts = tmp_path / "whole", tmp_path / f"parts-{call}"
    if not whole.exists():
        script.train(validate(settings(whole, 7)))
    with monkeypatch.context() as patch:
        _signal_at(patch, number, call)
        script.train(validate(settings(parts, 7)))
    frames = read_scalars(parts)["train/kl"][0][-1]
    assert frames == -(-call // 4) * BATCH  # to the end of that iteration
    script.train(validate(settings(parts, 7, resume=True)))
    assert_same(whole, parts)


def test_a_signal_ends_the_run_after_the_iteration(script, monkeypatch, tmp_path, capsys):
    _interrupt(script, monkeypatch, tmp_path, 6)
    assert "by SIGTERM; resume=" in capsys.readouterr().out


@pytest.mark.slow
def test_at_random_moments(script, monkeypatch, tmp_path):
    generator = random.Random(0)
    for call in generator.sample(range(1, 25), 20):
        number = generator.choice([signal.SIGTERM, signal.SIGINT])
        _interrupt(script, monkeypatch, tmp_path, call, number)


def _start(run: Path, **kwargs) -> subprocess.Popen:
    command = [sys.executable, str(SCRIPT), *words(settings(run, 10_000))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **kwargs)


def _wait_for(condition, process, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0].decode()
        assert time.monotonic() < end
        time.sleep(0.05)


def test_as_a_process(script, tmp_path):
    """SIGTERM from outside: exit status 0, a checkpoint, and the same run afterwards; and one writer."""
    run = tmp_path / "run"
    process = _start(run, cwd=tmp_path)
    try:
        _wait_for(
            lambda: (
                len((run / "scalars.csv").read_bytes()) > 2000
                if run.exists() and (run / "scalars.csv").exists()
                else False
            ),
            process,
        )
        with pytest.raises(ConfigError, match="in use"):
            script.train(validate(settings(run, 20_000, resume=True)))
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0 and b"by SIGTERM" in out
    frames = int(read_scalars(run)["train/kl"][0][-1])
    script.train(validate(settings(run, frames // BATCH + 2, resume=True)))
    whole = tmp_path / "whole"
    script.train(validate(settings(whole, frames // BATCH + 2)))
    assert_same(whole, run)


def test_a_run_of_the_version_before(script, tmp_path, caplog):
    with tarfile.open(OLD_RUN) as archive:
        archive.extractall(tmp_path, filter="data")
    run = tmp_path / "run"
    config = script.resumed_config(str(run), "runs", ["collector.total_frames=128"])[1]
    config.logger.dir = str(run)
    script.train(validate(config))
    assert "older version" in caplog.text
    frames, values = read_scalars(run)["train/kl"]
    assert frames.tolist() == [32, 64, 96, 128] and len(values) == 4
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "checkpoint-000000000064",
        "checkpoint-000000000128.torchrl",
    ]


def test_a_damaged_checkpoint_is_passed_over(script, tmp_path, caplog):
    run, whole = tmp_path / "run", tmp_path / "whole"
    script.train(validate(settings(run, 6)))
    script.train(validate(settings(whole, 7)))
    older, newest = sorted((run / "checkpoints").glob("*.torchrl"))[-2:]
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 0xFF
    newest.write_bytes(content)
    script.train(validate(settings(run, 7, resume=True)))
    assert f"{newest.name}" in caplog.text and "passed over" in caplog.text
    assert older.exists()
    assert_same(whole, run)


def test_a_full_disk(script, monkeypatch, tmp_path, caplog):
    """While saving: an error in the log, and the run goes on. While logging: saved, and an error."""
    from torchrl_trudi.record import ScalarWriter
    from torchrl_trudi.trainers.checkpoints import RunCheckpoints

    full = OSError(28, "No space left on device")
    save = RunCheckpoints.save

    def fail_at(frames):
        def failing(self, step, config, **kwargs):
            if step == frames:
                raise full
            return save(self, step, config, **kwargs)

        return failing

    run = tmp_path / "saving"
    monkeypatch.setattr(RunCheckpoints, "save", fail_at(5 * BATCH))
    script.train(validate(settings(run, 6)))
    assert "checkpoint at 160 frames failed: [Errno 28]" in caplog.text
    assert [path.name for path in (run / "checkpoints").iterdir()] == [
        "checkpoint-000000000192.torchrl"
    ]

    run, write = tmp_path / "logging", ScalarWriter.write

    def failing_write(self, frames, values):
        if frames == 3 * BATCH:
            raise full
        write(self, frames, values)

    with monkeypatch.context() as patch:
        patch.setattr(ScalarWriter, "write", failing_write)
        with pytest.raises(ConfigError, match="log cannot be written .*No space left"):
            script.train(validate(settings(run, 6)))
    script.train(validate(settings(run, 6, resume=True)))
    whole = tmp_path / "whole"
    script.train(validate(settings(whole, 6)))
    assert final_state(run) == final_state(whole)


def test_a_refused_resume_changes_nothing(script, tmp_path):
    """Whether it is refused at once, by the frames, or because another process has the run."""
    from torchrl_trudi.trainers.run_dir import lock_run

    run = tmp_path / "run"
    script.train(validate(settings(run, 2)))
    files = ("config.yaml", "versions.json")
    before = [((run / name).read_bytes(), (run / name).stat().st_mtime_ns) for name in files]
    changed = {"optim": {"lr": 0.5}}
    with pytest.raises(ConfigError, match="frames already"):
        script.train(validate(settings(run, 2, resume=True, **changed)))
    with lock_run(run), pytest.raises(ConfigError, match="in use"):
        script.train(validate(settings(run, 4, resume=True, **changed)))
    assert [((run / n).read_bytes(), (run / n).stat().st_mtime_ns) for n in files] == before
    script.train(validate(settings(run, 3, resume=True)))
    assert len(list(run.glob("config.*.yaml"))) == 1


def test_a_checkpoint_of_another_run_is_refused(script, tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    for each in (run, other):
        script.train(validate(settings(each, 2)))
    (checkpoint,) = (run / "checkpoints").iterdir()
    checkpoint.write_bytes((other / "checkpoints" / checkpoint.name).read_bytes())
    with pytest.raises(ConfigError, match="of another run"):
        script.train(validate(settings(run, 4, resume=True)))


def test_other_numbers_of_environments(script, tmp_path, caplog):
    """New episodes, and back again."""
    run = tmp_path / "run"
    script.train(validate(settings(run, 2)))
    for iterations, num_envs in ((3, 8), (4, 4)):
        script.train(validate(settings(run, iterations, resume=True, env={"num_envs": num_envs})))
        assert f"environments, this run {num_envs}: new episodes start" in caplog.text
    assert read_scalars(run)["train/kl"][0].tolist() == [32, 64, 96, 128]


def test_another_bound_of_a_projected_policy(script, tmp_path, monkeypatch):
    """The policy acts with the bound of the call, not with that of the checkpoint."""
    from torchrl_trudi.trainers import builders

    run, actors = tmp_path / "run", []
    build = builders.build_actor
    monkeypatch.setattr(
        builders, "build_actor", lambda *args: actors.append(build(*args)) or actors[-1]
    )
    for iterations, eps in ((2, 0.1), (3, 0.02)):
        region = {"mode": "projection", "eps": eps}
        config = settings(run, iterations, resume=iterations > 2, trust_region=region)
        script.train(validate(config))
    assert [actor.module.eps for actor in actors] == [0.1, 0.02]


def test_the_learning_rate_of_a_schedule_is_not_for_a_resumed_run_to_set(script, tmp_path):
    run, schedule = tmp_path / "run", {"lr_schedule": "kl_adaptive"}
    script.train(validate(settings(run, 2, optim=schedule)))
    with pytest.raises(ConfigError, match=r"optim\.lr: 0\.0003 -> 0\.0001"):
        script.train(validate(settings(run, 4, resume=True, optim={**schedule, "lr": 1e-4})))


def test_evaluation_changes_nothing(script, tmp_path):
    with_it, without = tmp_path / "with", tmp_path / "without"
    script.train(validate(settings(with_it, 6, logger={"dir": str(with_it)})))
    config = validate(settings(without, 6))
    config = dataclasses.replace(config, logger=dataclasses.replace(config.logger, eval_episodes=0))
    script.train(config)
    assert final_state(with_it) == final_state(without)
    logged = [
        {name: pairs for name, pairs in scalars(run).items() if name.startswith("train/")}
        for run in (with_it, without)
    ]
    assert logged[0] == logged[1] and any(name.startswith("eval/") for name in scalars(with_it))

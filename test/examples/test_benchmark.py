"""examples/benchmark.py, from the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import _benchmark_plan
import benchmark
import pytest
import yaml
from _benchmark_plan import Settings, arms, compose_config, plan, tasks

from torchrl_trudi.record.benchmark import read_rows
from torchrl_trudi.record.benchmark_cells import Cell
from torchrl_trudi.trainers import ConfigError

ROOT = Path(__file__).parents[2]
STUB = Path(__file__).with_name("_stub_trainer.py")
OURS = sorted(path.stem for path in (ROOT / "examples" / "config" / "arm").glob("*.yaml"))


@pytest.fixture(autouse=True)
def stub(monkeypatch):
    """The trainer is replaced, unless a test asks for processes of its own."""
    monkeypatch.setattr(_benchmark_plan, "TRAINER", STUB)


def run(out, *words, seeds="0", frames=2000, command_arms="trudi"):
    return benchmark.main(
        [
            *("run", "--out", str(out), "--tasks", "inverted_pendulum", "--frames", str(frames)),
            *("--eval-interval", "1000", "--eval-episodes", "2", "--arms", *command_arms.split()),
            *("--seeds", *seeds.split(), *words),
        ]
    )


def refused(capsys, *args, **options):
    with pytest.raises(SystemExit) as error:
        run(*args, **options)
    assert error.value.code == 2
    return capsys.readouterr().err


def record(out, arm="trudi", seed=0):
    found = Cell(out, "inverted_pendulum", arm, seed).read()
    assert found is not None
    return found


class TestArms:
    @pytest.mark.parametrize(
        "arm",
        OURS,
    )
    def test_every_arm_is_a_valid_configuration(self, arm):
        for task in tasks():
            compose_config(task, arm, 0, Settings())

    def test_names(self):
        assert arms() == [*OURS, "sb3_ppo"]
        assert {"trudi", "reppo", "no_trust_region", "adjoint"} < set(OURS)

    def test_arm_and_task_go_together(self):
        config = compose_config("halfcheetah", "adjoint", 3, Settings(frames=50_000, threads=2))
        assert (config.env.name, config.critic.vmax) == ("HalfCheetah-v5", 130.0)
        assert config.objective.num_adjoint_steps == 2
        assert (config.collector.total_frames, config.seed, config.num_threads) == (50_000, 3, 2)

    def test_the_default_arm_changes_nothing(self):
        text = (ROOT / "examples" / "config" / "arm" / "trudi.yaml").read_text()
        assert yaml.safe_load(text) is None

    def test_peer(self, tmp_path):
        pytest.importorskip("stable_baselines3", reason="needs the extra benchmark")
        found = plan(tmp_path, "hopper", "sb3_ppo", 1, Settings(frames=5000))
        words = found.command(tmp_path / "x", resume=False)
        assert words[1].endswith("sb3_ppo.py") and words[words.index("--frames") + 1] == "5000"
        assert found.task == "Hopper-v5"
        with pytest.raises(ConfigError, match="no settings for 'inverted_pendulum', only ant"):
            plan(tmp_path, "inverted_pendulum", "sb3_ppo", 1, Settings())
        with pytest.raises(ConfigError, match="no configuration of the trainer"):
            plan(tmp_path, "hopper", "sb3_ppo", 1, Settings(overrides=("optim.lr=1e-3",)))

    def test_peer_without_its_package(self, tmp_path, monkeypatch):
        find = _benchmark_plan.importlib.util.find_spec
        monkeypatch.setattr(
            _benchmark_plan.importlib.util,
            "find_spec",
            lambda name, *a: None if name == "stable_baselines3" else find(name, *a),
        )
        with pytest.raises(ConfigError, match=r"needs stable_baselines3: pip install -e"):
            plan(tmp_path, "hopper", "sb3_ppo", 1, Settings())


class TestRun:
    def test_cells(self, tmp_path, capsys):
        assert run(tmp_path, "--jobs", "2", seeds="0 1", command_arms="trudi reppo") == 0
        found = record(tmp_path, "reppo", 1)
        assert (found.task, found.status, found.frames) == ("InvertedPendulum-v5", "finished", 2000)
        assert found.config["policy.kind"] == "gaussian"
        (attempt,) = found.attempts
        assert attempt.exit_code == 0 and attempt.wall_clock_s > 0 and attempt.versions["torch"]
        assert attempt.command[1:5] == [str(STUB), "task=inverted_pendulum", "arm=reppo", "seed=1"]
        assert "done" in (tmp_path / "inverted_pendulum/reppo/seed1/log.txt").read_text()
        capsys.readouterr()

        # Finished cells are not run again; with more frames they go on.
        assert run(tmp_path) == 0
        assert run(tmp_path, frames=1000) == 0
        assert capsys.readouterr().out.count("finished already") == 2
        assert run(tmp_path, frames=4000) == 0
        again = record(tmp_path)
        assert again.frames == 4000 and [a.from_frames for a in again.attempts] == [0, 2000]
        assert again.attempts[1].command[2].startswith("resume=")

    def test_dry_run(self, tmp_path, capsys):
        assert run(tmp_path / "new", "--dry-run", "--set", "optim.lr=1e-3") == 0
        out = capsys.readouterr().out
        assert "start, 0 of 2,000 frames" in out and "optim.lr=1e-3" in out
        assert list(tmp_path.iterdir()) == []

    def test_other_settings_are_refused(self, tmp_path, capsys):
        assert run(tmp_path, "--set", "optim.lr=1e-3") == 0
        before = (tmp_path / "inverted_pendulum/trudi/seed0/cell.json").read_bytes()
        err = refused(capsys, tmp_path)
        assert "inverted_pendulum/trudi/seed0: has other settings" in err
        assert "optim.lr: 0.001 -> 0.0003" in err
        err = refused(capsys, tmp_path, "--set", "optim.lr=1e-3", "--eval-interval", "500")
        assert "logger.eval_interval: 1000 -> 500" in err
        assert (tmp_path / "inverted_pendulum/trudi/seed0/cell.json").read_bytes() == before

    def test_a_failure_is_recorded_and_the_others_go_on(self, tmp_path, capsys):
        assert run(tmp_path, seeds="13 1") == 1
        out = capsys.readouterr().out
        assert "1 of 2 cells failed: inverted_pendulum/trudi/seed13" in out
        assert "| the loss is NaN" in out
        found = record(tmp_path, seed=13)
        assert (found.status, found.attempts[0].exit_code) == ("failed", 1)
        assert found.attempts[0].log_tail[-1] == "the loss is NaN"
        assert record(tmp_path, seed=1).status == "finished"
        # Not tried again of itself: a diverged run would be repeated until it does not.
        assert run(tmp_path, seeds="13") == 1
        assert len(record(tmp_path, seed=13).attempts) == 1
        assert run(tmp_path, "--retry-failed", seeds="13") == 1
        assert [a.from_frames for a in record(tmp_path, seed=13).attempts] == [0, 1000]

    def test_a_run_without_a_checkpoint_starts_again(self, tmp_path, capsys):
        assert run(tmp_path) == 0
        cell = tmp_path / "inverted_pendulum/trudi/seed0"
        (cell / "run" / "checkpoints").rename(cell / "elsewhere")
        assert run(tmp_path) == 0
        assert "starts again from nothing" in capsys.readouterr().out
        assert [a.run for a in record(tmp_path).attempts] == ["run", "run-1"]
        assert (cell / "run" / "scalars.csv").exists()

    def test_a_cell_of_another_process(self, tmp_path, capsys):
        cell = Cell(tmp_path, "inverted_pendulum", "trudi", 0)
        with cell.locked():
            assert run(tmp_path) == 0
        assert "another process is running it" in capsys.readouterr().out
        assert cell.read() is None

    def test_a_run_made_by_hand(self, tmp_path, capsys):
        (tmp_path / "inverted_pendulum/trudi/seed0/run").mkdir(parents=True)
        assert "enter it with adopt" in refused(capsys, tmp_path)

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--arms", "trudy"], "arm: got 'trudy' (did you mean 'trudi'?), accepted: adjoint"),
            (["--tasks", "hoper"], "task: got 'hoper' (did you mean 'hopper'?)"),
            (["--set", "optim.lrr=1"], "--set: unknown option 'optim.lrr'"),
            (["--set", "seed=3"], "accepted: one value of an option other than seed"),
            (["--frames", "10"], "collector.total_frames: got 10"),
            (["--jobs", "0"], "got 0, accepted: at least 1"),
        ],
    )
    def test_errors(self, tmp_path, capsys, words, message):
        assert message in refused(capsys, tmp_path, *words)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
    )
    def test_stop_and_continue(self, tmp_path, number):
        """The signal reaches the runner alone; no child is left, and nothing done is lost."""
        code = (
            "import sys, _benchmark_plan, benchmark; from pathlib import Path;"
            f"_benchmark_plan.TRAINER = Path({str(STUB)!r}); sys.exit(benchmark.main(sys.argv[1:]))"
        )
        words = [
            *("run", "--out", str(tmp_path), "--tasks", "inverted_pendulum", "--seeds", "0", "1"),
            *("--arms", "trudi", "--frames", "50000", "--eval-interval", "1000", "--jobs", "2"),
        ]
        path = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
        process = subprocess.Popen(
            [sys.executable, "-c", code, *words],
            env={**os.environ, "PYTHONPATH": path, "STUB_DELAY": "0.2"},
            stdout=subprocess.PIPE,
            text=True,
        )
        checkpoints = [
            tmp_path / f"inverted_pendulum/trudi/seed{seed}/run/checkpoints" for seed in (0, 1)
        ]
        deadline = time.monotonic() + 60
        while not all(each.is_dir() for each in checkpoints) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 128 + number
        assert "the same command continues" in out
        assert [record(tmp_path, seed=seed).status for seed in (0, 1)] == ["interrupted"] * 2
        # Both gave their locks back, so neither process is alive.
        for seed in (0, 1):
            os.close(Cell(tmp_path, "inverted_pendulum", "trudi", seed).lock())
        assert benchmark.main([*words[:-4], "--eval-interval", "1000"]) == 0
        assert record(tmp_path).attempts[1].from_frames >= 1000
        assert record(tmp_path).status == "finished"


class TestAdoptAndCollect:
    @pytest.fixture
    def by_hand(self, tmp_path):
        """A run as the trainer makes it, in the layouts that people choose."""

        def make(arm, seed, inner="run", frames=2000, total=2000, **changes):
            settings = Settings(total, 1000, 2)
            config = compose_config("inverted_pendulum", arm, seed, settings)
            tree = json.loads(json.dumps(config, default=vars))
            tree["num_threads"] = None
            for key, value in changes.items():
                section, name = key.split("__")
                tree[section][name] = value
            path = tmp_path / "inverted_pendulum" / arm / f"seed{seed}" / inner
            path.mkdir(parents=True)
            (path / "config.yaml").write_text(yaml.safe_dump(tree))
            (path / "versions.json").write_text('{"torch": "2"}')
            lines = ["frames,name,value"]
            for at in range(1000, frames + 1, 1000):
                lines.append(f"{at},time/frames_per_second,100.0")
                lines += [f"{at},eval/return_{k}ic,5.0" for k in ("determinist", "stochast")]
                (path / "checkpoints" / f"checkpoint-{at:012d}").mkdir(parents=True)
            (path / "scalars.csv").write_text("\n".join(lines) + "\n")

        return make

    def adopt(self, out, *words):
        return benchmark.main(["adopt", "--out", str(out), "--commit", "0123abc", *words])

    def collect(self, out, *words):
        return benchmark.main(
            ["collect", "--out", str(out), "--csv", str(out / "data.csv"), *words]
        )

    def test_adopt_and_collect(self, tmp_path, by_hand, capsys):
        by_hand("trudi", 0)
        by_hand("reppo", 0, inner=".")
        by_hand("reppo", 1, frames=1000)
        assert self.collect(tmp_path) == 0
        assert capsys.readouterr().out.count("adopt it if it was started by hand") == 3
        assert self.adopt(tmp_path) == 0
        assert "reppo/seed1: left out, its run has not reached 2,000" in capsys.readouterr().out
        assert self.collect(tmp_path) == 0
        rows = read_rows(tmp_path / "data.csv")
        assert [(r.arm, r.frames, r.wall_s, r.commit) for r in rows] == [
            (arm, frames, frames / 100, "0123abc") for arm in ("reppo", "trudi") for frames in (1000, 2000)
        ]  # fmt: skip
        found = record(tmp_path, "reppo")
        assert found.adopted and found.attempts[0].run == "."
        assert found.attempts[0].versions == {"torch": "2"}

        # The runner takes it as its own; its threads are part of what it is.
        err = refused(capsys, tmp_path)
        assert "num_threads: null -> 1" in err and err.count("->") == 2
        assert self.adopt(tmp_path, "--unfinished") == 0
        assert record(tmp_path, "reppo", 1).status == "interrupted"

    def test_adopt_refuses_another_arm(self, tmp_path, by_hand, capsys):
        by_hand("reppo", 0, policy__kind="diffusion")
        by_hand("trudi", 0, optim__lr=1e-3)
        with pytest.raises(SystemExit):
            self.adopt(tmp_path)
        err = capsys.readouterr().err
        assert "policy.kind: diffusion -> gaussian" in err and "optim.lr: 0.001 -> 0.0003" in err
        assert not list(tmp_path.rglob("cell.json"))

    def test_adopt_with_overrides(self, tmp_path, by_hand):
        by_hand("trudi", 0, optim__lr=1e-3)
        assert self.adopt(tmp_path, "--set", "optim.lr=1e-3") == 0
        assert record(tmp_path).overrides == ["optim.lr=1e-3"]

    def test_conflict(self, tmp_path, capsys):
        assert run(tmp_path) == 0
        assert self.collect(tmp_path) == 0
        path = tmp_path / "data.csv"
        text = path.read_text()
        path.write_text(text.replace("trudi,0,2000,2000.0", "trudi,0,2000,7.0") + OTHER)
        with pytest.raises(SystemExit):
            self.collect(tmp_path)
        assert "1 evaluations have other values in the file" in capsys.readouterr().err
        assert "2000,7.0" in path.read_text()
        assert self.collect(tmp_path, "--replace") == 0
        assert path.read_text() == "".join(
            [text.splitlines(True)[0], OTHER, *text.splitlines(True)[1:]]
        )

    def test_unfinished_cells(self, tmp_path, capsys):
        run(tmp_path, seeds="13")
        assert self.collect(tmp_path) == 0
        assert "left out, it is failed" in capsys.readouterr().out
        assert self.collect(tmp_path, "--unfinished") == 0
        assert [r.frames for r in read_rows(tmp_path / "data.csv")] == [1000]


OTHER = "Hopper-v5,trudi,0,1000,1.0,2.0,3.0,abc\n"


def test_report(tmp_path, capsys):
    pytest.importorskip("rliable", reason="needs the extra benchmark")
    path = tmp_path / "data.csv"
    header = "task,arm,seed,frames,return_deterministic,return_stochastic,wall_s,commit\n"
    path.write_text(header + OTHER)
    words = ["report", "--csv", str(path), "--out", str(tmp_path / "report"), "--reps", "10"]
    assert benchmark.main(words) == 0
    text = (tmp_path / "report" / "report.md").read_text()
    assert "| Hopper-v5 | 18.8 | 1654 | PPO after 4M frames | 1,000 |" in text
    with pytest.raises(SystemExit):
        benchmark.main([*words, "--arms", "x"])
    assert "arm: got 'x', the data has: trudi" in capsys.readouterr().err


def test_random(capsys):
    assert benchmark.main(["random", "--tasks", "InvertedPendulum-v5", "--episodes", "3"]) == 0
    name, mean, _, episodes = capsys.readouterr().out.splitlines()[1].split(",")
    assert (name, episodes) == ("InvertedPendulum-v5", "3") and 2 < float(mean) < 30


def real(*words):
    """The command line itself, with the real trainer."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / "benchmark.py"), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_real_runs(tmp_path):
    """Two arms, killed on the way, continued, collected, reported."""
    pytest.importorskip("rliable", reason="needs the extra benchmark")
    words = [
        *(
            "run",
            "--out",
            str(tmp_path),
            "--tasks",
            "inverted_pendulum",
            "--arms",
            "trudi",
            "reppo",
        ),
        *("--seeds", "0", "--frames", "4096", "--eval-interval", "1024", "--eval-episodes", "2"),
        *("--jobs", "2", "--set", "optim.num_epochs=1"),
    ]
    process = real(*words)
    first = tmp_path / "inverted_pendulum/trudi/seed0/run/checkpoints"
    deadline = time.monotonic() + 200
    while not list(first.glob("checkpoint-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=100)
    process = real(*words)
    out, _ = process.communicate(timeout=400)
    assert process.returncode == 0, out
    assert record(tmp_path).status == record(tmp_path, "reppo").status == "finished"
    data = tmp_path / "data.csv"
    assert benchmark.main(["collect", "--out", str(tmp_path), "--csv", str(data)]) == 0
    rows = read_rows(data)
    for arm in ("trudi", "reppo"):
        mine = [row for row in rows if row.arm == arm]
        assert [row.frames for row in mine] == [1024, 2048, 3072, 4096]
        seconds = [row.wall_s for row in mine]
        assert seconds == sorted(seconds) and seconds[0] > 0
    words = ["report", "--csv", str(data), "--out", str(tmp_path / "report"), "--reps", "20"]
    assert benchmark.main(words) == 0
    assert "InvertedPendulum-v5, 4,096 frames" in (tmp_path / "report" / "report.md").read_text()


@pytest.mark.slow
def test_sb3_ppo(tmp_path):
    """The other library's arm: the frames of the trainer's evaluations, and what it leaves."""
    pytest.importorskip("stable_baselines3", reason="needs the extra benchmark")
    words = [
        *("run", "--out", str(tmp_path), "--tasks", "hopper", "--arms", "sb3_ppo", "--seeds", "0"),
        *("--frames", "5000", "--eval-interval", "4000", "--eval-episodes", "2"),
    ]
    assert benchmark.main(words) == 0
    cell = Cell(tmp_path, "hopper", "sb3_ppo", 0)
    found = cell.read()
    assert found is not None and (found.status, found.task) == ("finished", "Hopper-v5")
    rows = cell.rows(found)
    assert [row.frames for row in rows] == [4096, 6144]
    assert 0 < rows[0].wall_s < rows[1].wall_s
    assert all(0 < row.return_deterministic < 1000 for row in rows)
    run = cell.path / "run"
    for name in ("model.zip", "vec_normalize.pkl", "settings.json", "versions.json"):
        assert (run / name).stat().st_size > 0
    assert json.loads((run / "settings.json").read_text())["PPO"]["n_steps"] == 512
    assert benchmark.main(words) == 0
    assert len(cell.read().attempts) == 1

    script = [sys.executable, str(ROOT / "examples" / "peers" / "sb3_ppo.py"), "--task", "hopper"]
    again = subprocess.run([*script, "--dir", str(run)], capture_output=True, text=True)
    assert again.returncode == 2 and "exists and is not empty" in again.stderr

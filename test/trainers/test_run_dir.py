from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re

import pytest
from omegaconf import OmegaConf

from torchrl_trudi.trainers import run_dir as module
from torchrl_trudi.trainers.config import ConfigError, TrainConfig, validate
from torchrl_trudi.trainers.run_dir import (
    find_run,
    library_versions,
    load_config,
    make_run_dir,
    record_resume,
    run_id,
)


@pytest.fixture(autouse=True)
def _in_tmp_path(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def set_time(run, seconds):
    os.utime(run / "config.yaml", (seconds, seconds))


def test_absent_directory_becomes_the_run(tmp_path):
    config = validate({"seed": 4, "optim": {"lr": 1e-5}})
    run = make_run_dir(tmp_path / "a" / "b", config)
    assert run == tmp_path / "a" / "b"
    assert validate(load_config(run)) == config
    versions = json.loads((run / "versions.json").read_text())
    assert set(versions) >= {
        *("torch", "torchrl", "tensordict", "gymnasium", "mujoco", "torchrl_trudi", "python")
    }
    assert sorted(path.name for path in run.iterdir()) == ["config.yaml", "versions.json"]


def test_config_file_is_resolved(tmp_path):
    config = TrainConfig()
    config.logger.dir = "x/${seed}"
    make_run_dir(tmp_path / "run", config)
    assert "dir: x/0" in (tmp_path / "run" / "config.yaml").read_text()


def test_empty_directory_becomes_the_run(tmp_path):
    (tmp_path / "run").mkdir()
    assert make_run_dir(tmp_path / "run", TrainConfig()) == tmp_path / "run"


def test_a_run_is_never_overwritten(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    runs = [make_run_dir(tmp_path / "run", validate({"seed": seed})) for seed in range(3)]
    assert [run.name for run in runs] == ["run", "run-1", "run-2"]
    assert [load_config(run).seed for run in runs] == [0, 1, 2]
    assert "holds a run already: this run goes to" in caplog.text


def test_a_foreign_sibling_is_left_alone(tmp_path):
    make_run_dir(tmp_path / "run", TrainConfig())
    (tmp_path / "run-1").mkdir()
    (tmp_path / "run-1" / "notes.txt").touch()
    (tmp_path / "run-2").touch()
    assert make_run_dir(tmp_path / "run", TrainConfig()).name == "run-3"
    assert [path.name for path in (tmp_path / "run-1").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("occupied", [False, True])
def test_default_directory_is_a_parent(occupied, monkeypatch):
    directory = "runs"
    if occupied:
        make_run_dir(directory, TrainConfig())
    run = make_run_dir(directory, validate({"env": {"name": "ns/Hopper-v5"}, "seed": 2}))
    assert run.parent.name == "runs"
    assert re.fullmatch(r"ns-Hopper-v5-2-\d{8}-\d{6}", run.name)


def test_directory_with_other_content_is_a_parent(tmp_path):
    (tmp_path / "notes.txt").touch()
    run = make_run_dir(tmp_path, TrainConfig())
    assert run.parent == tmp_path and run.name.startswith("Humanoid-v5-0-")


def test_same_second(monkeypatch):
    monkeypatch.setattr(module.time, "strftime", lambda _: "20260101-000000")
    names = [make_run_dir("runs", TrainConfig()).name for _ in range(3)]
    base = "Humanoid-v5-0-20260101-000000"
    assert names == [base, f"{base}-1", f"{base}-2"]


def test_lost_race_goes_to_a_sibling(tmp_path, monkeypatch):
    # Another process claims the directory between the look and the claim.
    claim = module._claim

    def late(directory, text):
        if directory.name == "run":
            (directory / "config.yaml").write_text("seed: 99\n")
        return claim(directory, text)

    monkeypatch.setattr(module, "_claim", late)
    assert make_run_dir(tmp_path / "run", TrainConfig()).name == "run-1"
    assert load_config(tmp_path / "run").seed == 99


def _make(directory, barrier, queue):
    barrier.wait()
    queue.put(str(make_run_dir(directory, TrainConfig())))


def test_processes_that_start_at_once_get_directories_of_their_own(tmp_path):
    # Forked: the test is about the file system, and spawning would import everything four times.
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(4), context.Queue()
    workers = [
        context.Process(target=_make, args=(tmp_path / "run", barrier, queue)) for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    runs = {queue.get(timeout=30) for _ in workers}
    for worker in workers:
        worker.join()
    assert len(runs) == 4


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match=r"^logger\.dir: got .*file.* accepted: a directory"):
            make_run_dir(path, TrainConfig())


def test_unwritable_directory(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(module.os, "open", refuse)
    with pytest.raises(ConfigError, match=r"^logger\.dir: .*Permission denied.*writable"):
        make_run_dir(tmp_path / "run", TrainConfig())


def test_resume_reuses_the_directory_and_keeps_the_old_config(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    run = make_run_dir(tmp_path / "run", TrainConfig())
    longer = validate(
        {
            "collector": {"total_frames": 2_000_000},
            "logger": {"progress": False},
            "resume": str(run),
        }
    )
    assert make_run_dir("elsewhere", longer, resume=str(run)) == run
    assert validate(load_config(run)) == TrainConfig()  # nothing is written before all is loaded
    record_resume(run, longer)
    assert validate(load_config(run)) == longer
    assert OmegaConf.load(run / "config.0.yaml").collector.total_frames == 500_000
    assert "changed collector.total_frames: 500000 -> 2000000" in caplog.text
    assert "logger" not in caplog.text
    assert not (tmp_path / "elsewhere").exists()
    # Nothing has changed since: no further copy.
    record_resume(run, longer)
    assert not (run / "config.1.yaml").exists()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"env": {"name": "Ant-v5"}}, "env.name: Humanoid-v5 -> Ant-v5"),
        ({"env": {"kwargs": {"a": 1}}}, "env.kwargs.a: null -> 1"),
        ({"env": {"reward_scale": 1}}, "env.reward_scale: 0.1 -> 1.0"),
        ({"policy": {"num_steps": 4}}, "policy.num_steps: 8 -> 4"),
        ({"policy": {"backward_network": True}}, "policy.backward_network: false -> true"),
        ({"critic": {"num_bins": 51}}, "critic.num_bins: 151 -> 51"),
    ],
)
def test_resume_refuses_another_task_or_architecture(tmp_path, change, line):
    run = make_run_dir(tmp_path / "run", TrainConfig())
    before = (run / "config.yaml").read_bytes()
    with pytest.raises(ConfigError) as error:
        make_run_dir(tmp_path, validate(change), resume=str(run))
    assert str(error.value).splitlines()[1:] == [f"  {line}"]
    assert (run / "config.yaml").read_bytes() == before


@pytest.mark.parametrize(
    "change",
    [
        {"collector": {"total_frames": 5_000_000}},
        {"optim": {"lr": 1e-4}},
        {"critic": {"aux_coeff": 0.5}},
        {"logger": {"eval_interval": 5}},
        {"device": "cpu"},
    ],
)
def test_resume_allows_other_changes(tmp_path, change):
    run = make_run_dir(tmp_path / "run", TrainConfig())
    assert make_run_dir(tmp_path, validate(change), resume=str(run)) == run


def test_resume_of_a_run_without_an_option_that_is_new(tmp_path):
    run = make_run_dir(tmp_path / "run", TrainConfig())
    old = load_config(run)
    del old.policy["learn_prior"]
    OmegaConf.save(old, run / "config.yaml")
    make_run_dir(tmp_path, TrainConfig(), resume=str(run))
    del old.policy["num_steps"]
    OmegaConf.save(old, run / "config.yaml")
    with pytest.raises(ConfigError, match="policy.num_steps: 8 -> 4"):
        make_run_dir(tmp_path, validate({"policy": {"num_steps": 4}}), resume=str(run))


def test_resume_warns_of_other_versions(tmp_path, caplog):
    run = make_run_dir(tmp_path / "run", TrainConfig())
    versions = library_versions()
    number = run_id(run)
    assert number
    (run / "versions.json").write_text(json.dumps({**versions, "torch": "1.0", "run": number}))
    record_resume(run, TrainConfig())
    assert f"the run used torch 1.0, now {versions['torch']}" in caplog.text
    assert json.loads((run / "versions.json").read_text()) == {**versions, "run": number}


def test_latest_is_the_run_started_or_resumed_last(tmp_path):
    parent = tmp_path / "runs"
    runs = [make_run_dir(parent / name, TrainConfig()) for name in "abc"]
    for seconds, run in zip((30, 10, 20), runs, strict=True):
        set_time(run, seconds)
    (parent / "d").mkdir()  # newer, but no run
    assert find_run("latest", parent) == runs[0]
    record_resume(runs[1], TrainConfig())
    assert find_run("latest", parent) == runs[1]


def test_latest_knows_numbered_siblings(tmp_path):
    first, second = (make_run_dir(tmp_path / "run", TrainConfig()) for _ in range(2))
    other = make_run_dir(tmp_path / "run-other", TrainConfig())
    for seconds, run in zip((10, 20, 30), (first, second, other), strict=True):
        set_time(run, seconds)
    assert find_run("latest", tmp_path / "run") == second


def test_resume_without_a_run(tmp_path):
    with pytest.raises(ConfigError, match=r"^resume: .*no run in '.*none'.*accepted"):
        find_run("latest", tmp_path / "none")
    with pytest.raises(ConfigError, match=r"^resume: got '.*none', which is not a directory"):
        find_run(str(tmp_path / "none"), tmp_path)
    with pytest.raises(ConfigError, match=r"which holds no config\.yaml"):
        find_run(str(tmp_path), tmp_path)


def test_cut_off_config_is_named(tmp_path):
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ConfigError, match="holds no configuration"):
        load_config(tmp_path)
    (tmp_path / "config.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="is not a run"):
        load_config(tmp_path / "none")


def test_versions_of_missing_libraries(monkeypatch):
    monkeypatch.setattr(module, "_PACKAGES", ("surely-not-installed",))
    assert library_versions()["surely-not-installed"] == "not installed"

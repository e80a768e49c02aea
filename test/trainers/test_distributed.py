"""Two processes that train as one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from _rank_workers import collectives, misfit, one_update, statistics, train
from _ranks import run_ranks

from torchrl_trudi.envs import available_cpus
from torchrl_trudi.record import read_scalars
from torchrl_trudi.trainers import ConfigError, TrainConfig
from torchrl_trudi.trainers.distributed import Ranks
from torchrl_trudi.trainers.rank_share import rank_seed, share_of
from torchrl_trudi.trainers.update import TruDiUpdate

pytestmark = pytest.mark.distributed

BATCH = 32


def settings(run, iterations: int, **sections) -> dict:
    base: dict = {
        "env": {"name": "Hopper-v5", "num_envs": 4, "max_episode_steps": 11},
        "collector": {"total_frames": iterations * BATCH, "frames_per_batch": BATCH},
        "policy": {"hidden_size": 8},
        "critic": {"hidden_size": 8, "num_bins": 11},
        "optim": {"num_minibatches": 2, "num_epochs": 2},
        "logger": {
            "dir": str(run),
            "eval_interval": 4 * BATCH,
            "eval_episodes": 2,
            "progress": False,
        },
        "device": "cpu",
        "num_threads": 1,
    }
    for name, section in sections.items():
        base[name] = {**base[name], **section} if isinstance(section, dict) else section
    return base


def test_collectives():
    first, second = run_ranks(collectives)
    assert first["any"] == second["any"] == [True, False]
    assert first["all"] == second["all"] == [False, True]
    assert first["sum"] == second["sum"] == 3
    assert first["mean"] == second["mean"] == [1.0, 0.5]
    expected = {"kl": [0.5, 2.0], "kl_max": [1.0, 0.0], "per_step": [[0.5] * 3] * 2}
    assert first["metrics"] == second["metrics"] == expected
    expected = [[0, 0], True, [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]]
    assert first["broadcast"] == second["broadcast"] == expected
    assert first["main"] == second["main"] == "of 0"
    assert first["error"].startswith("ZeroDivisionError")
    assert second["error"].startswith("RankError: rank 0 failed: ZeroDivisionError")
    assert first["gather"] == [0, 10] and second["gather"] == []
    assert first["gradients"] == second["gradients"] == [[1.0, 0.5], [2.0, 1.0], None]


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_statistics_are_those_of_all_data(offset):
    first, second = run_ranks(statistics, offset)
    assert first == second
    assert first["count"] == [473, 473]
    for name in ("mean", "var"):
        torch.testing.assert_close(
            torch.tensor(first[name][0]), torch.tensor(first[name][1]), rtol=1e-9, atol=1e-9
        )


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [
        ("diffusion", torch.float64, 1e-10),
        ("gaussian", torch.float64, 1e-10),
        ("surrogate", torch.float64, 1e-10),
        ("diffusion", torch.float32, 2e-6),
        ("surrogate", torch.float32, 2e-6),
    ],
)
def test_two_halves_step_as_the_whole(kind, dtype, tolerance):
    for out in (results := run_ranks(one_update, kind, dtype)):
        assert out["moved"] > 1e-3 and out["gate"] == 0.5
        assert out["gap"] < tolerance
        assert out["metrics"] < (1e-10 if dtype == torch.float64 else 1e-4)
    assert results[0]["bits"] == results[1]["bits"]


def check_ranks(results, frames: int) -> None:
    first, second = results
    assert first["run"] == second["run"]
    assert first["state"] == second["state"]
    assert first["duals"] == second["duals"]
    rows = np.concatenate([first["seen"], second["seen"]]).astype(np.float64)
    assert len(rows) == first["norm"]["count"] == second["norm"]["count"] >= frames
    # Each has episodes of its own.
    assert not {row.tobytes() for row in first["seen"]} & {row.tobytes() for row in second["seen"]}
    for name, value in (("mean", rows.mean(0)), ("var", rows.var(0))):
        assert first["norm"][name].tobytes() == second["norm"][name].tobytes()
        np.testing.assert_allclose(first["norm"][name], value, rtol=1e-6, atol=1e-9)


def test_a_run(tmp_path):
    """Five iterations: the same parameters, duals and statistics; one rank logs, evaluates and saves."""
    run = tmp_path / "run"
    check_ranks(run_ranks(train, settings(run, 5)), 5 * BATCH)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    scalars = read_scalars(run)
    assert scalars["train/kl"][0].tolist() == [32 * i for i in range(1, 6)]
    assert scalars["eval/return_stochastic"][0].tolist() == [128, 160]
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert checkpoint.name == "checkpoint-000000000160.torchrl"


@pytest.mark.slow
def test_a_run_of_the_surrogate(tmp_path):
    sections = {
        "objective": {"kind": "surrogate"},
        "trust_region": {"stop_factor": 0.5},
    }
    config = settings(tmp_path / "run", 5)
    config["optim"]["lr_schedule"] = "kl_adaptive"
    check_ranks(run_ranks(train, {**config, **sections}), 5 * BATCH)


def test_a_config_that_cannot_be_shared(tmp_path):
    config = settings(tmp_path / "run", 5, env={"num_envs": 1}, optim={"num_minibatches": 32})
    for message in run_ranks(misfit, config):
        assert (
            "env.num_envs: got 1, accepted with 2 processes: a multiple of 2, for instance 2"
            in message
        )
        assert "collector.frames_per_batch: got 32" in message and "instance 64" in message
    assert not (tmp_path / "run").exists()


def test_shares():
    config = TrainConfig()
    ranks = Ranks("cpu")
    assert share_of(config, ranks) is config
    ranks.world_size, ranks.rank = 4, 3
    share = share_of(config, ranks)
    assert share.env.num_envs == 16 and share.collector.frames_per_batch == 512
    assert share.optim == config.optim and share.collector.total_frames == 500_000
    config.optim.cudagraphs = True
    with pytest.raises(ConfigError, match="optim.cudagraphs: got True, accepted with 4 processes"):
        share_of(config, ranks)


def test_seeds_of_ranks():
    seeds = {rank_seed(seed, rank) for seed in range(50) for rank in range(20)}
    assert len(seeds) == 50 + 50 * 19 and rank_seed(3, 0) == 3
    assert all(0 <= seed < 2**62 for seed in seeds)


def test_environment(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="RANK: got None in the environment"):
        Ranks("cpu")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ConfigError, match="device: got 'cuda:0', accepted with 2 processes"):
        Ranks("cuda:0")
    assert Ranks("cpu").rank == 1
    alone = available_cpus()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert available_cpus() == max(1, alone // 2)


def test_no_cudagraphs_with_reduced_gradients():
    from _rank_workers import make_update

    update, *_ = make_update("diffusion", None)
    with pytest.raises(ValueError, match="CUDA graphs"):
        TruDiUpdate(
            update.loss,
            update.optim_actor,
            update.optim_critic,
            cudagraphs=True,
            reduce_gradients=lambda params: None,
        )

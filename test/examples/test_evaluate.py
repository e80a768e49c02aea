"""examples/evaluate.py on the checkpoint of a tiny run."""

from __future__ import annotations

import json

import evaluate
import pytest
import torch

from torchrl_trudi.envs import get_observation_norm
from torchrl_trudi.trainers import validate
from torchrl_trudi.trainers.builders import build_actor, build_critic, build_env, build_loss
from torchrl_trudi.trainers.checkpoints import RunCheckpoints

pytestmark = pytest.mark.export


@pytest.fixture(scope="module", params=["diffusion", "gaussian"])
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    sizes = {"hidden_size": 16}
    config = validate(
        {
            "env": {"name": "InvertedPendulum-v5", "num_envs": 2},
            "policy": {**sizes, "kind": request.param},
            "critic": {**sizes, "num_bins": 11},
            "device": "cpu",
        }
    )
    env = build_env(config)
    env.rollout(5)
    actor = build_actor(config, env)
    parts = {"loss": build_loss(config, actor, build_critic(config, env))}
    parts["observation_norm"] = get_observation_norm(env)
    RunCheckpoints(folder / "checkpoints", parts).save(10, config)
    return request.param, folder


def test_report(run, tmp_path, capsys):
    kind, folder = run
    words = [str(folder), "--episodes", "5", "--num-envs", "2", "--max-steps", "20"]
    words += ["--best-of", "3", "--plot", str(tmp_path / "a" / "plot.png")]
    if kind == "diffusion":
        words += ["--scales", "1.0", "0.5"]
    evaluate.main(words)
    report = json.loads(capsys.readouterr().out)
    results = report["results"]
    assert list(results)[:2] == ["deterministic", "stochastic"] and "best_of_3" in results
    for each in results.values():
        low, high = each["return_interval"]
        assert low <= each["return_mean"] <= high and each["episodes"] == 5
    if kind == "diffusion":
        assert results["scale_1"] == results["deterministic"]
    assert (tmp_path / "a" / "plot.png").stat().st_size > 1000
    evaluate.main([*words, "--json", str(tmp_path / "b" / "report.json")])
    assert json.loads((tmp_path / "b" / "report.json").read_text("utf-8")) == report


def test_errors(run, tmp_path, capsys):
    with pytest.raises(SystemExit, match="error: there is no checkpoint or run"):
        evaluate.main([str(tmp_path / "absent")])
    with pytest.raises(SystemExit):
        evaluate.main([str(tmp_path), "--episodes", "0"])
    assert "must be at least 1" in capsys.readouterr().err
    kind, folder = run
    if kind == "gaussian":
        with pytest.raises(SystemExit, match="--scales: only"):
            evaluate.main([str(folder), "--scales", "1.0"])


def test_interval():
    values = torch.randn(4000) + 3
    low, high = evaluate.interval(values)
    assert low < values.mean() < high
    assert 0.05 < high - low < 0.08

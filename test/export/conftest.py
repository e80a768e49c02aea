"""Checkpoints of small policies that were never trained, with weights that make them act."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torchrl_trudi.envs import get_observation_norm
from torchrl_trudi.trainers import validate
from torchrl_trudi.trainers.builders import build_actor, build_critic, build_env, build_loss
from torchrl_trudi.trainers.checkpoints import RunCheckpoints
from torchrl_trudi.trainers.task_interface import TaskInterface

VARIANTS = {
    "diffusion": {"policy": {"num_steps": 3}},
    "gaussian": {"policy": {"kind": "gaussian"}},
    "projection": {"policy": {"num_steps": 2}, "trust_region": {"mode": "projection"}},
    "own_box": {"policy": {"num_steps": 2}, "env": {"normalize_action": False}},
    "raw": {"policy": {"num_steps": 2}, "env": {"normalize_observation": False}},
}


def _make_run(folder: Path, variant: str, *, task: bool = True):
    """A run directory with one checkpoint, and the parts that are in it."""
    torch.manual_seed(0)
    settings = {name: dict(section) for name, section in VARIANTS[variant].items()}
    settings.setdefault("env", {}).update(name="InvertedPendulum-v5", num_envs=4)
    settings["policy"]["hidden_size"] = 16
    settings["critic"] = {"hidden_size": 16, "num_bins": 11}
    config = validate({**settings, "device": "cpu"})
    env = build_env(config)
    env.rollout(20, break_when_any_done=False)
    actor = build_actor(config, env)
    for name, parameter in actor.named_parameters():
        if "output.weight" in name:
            torch.nn.init.normal_(parameter)
    loss = build_loss(config, actor, build_critic(config, env))
    parts = {"loss": loss}
    if config.env.normalize_observation:
        parts["observation_norm"] = get_observation_norm(env)
    interface = TaskInterface.of(env, actor.observation_keys) if task else None
    RunCheckpoints(folder / "checkpoints", parts, task=interface).save(80, config)
    return env, actor


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Run directory, environment and actor of each variant."""
    made = {}

    def get(variant: str):
        if variant not in made:
            folder = tmp_path_factory.mktemp(variant)
            made[variant] = (folder, *_make_run(folder, variant))
        return made[variant]

    return get


@pytest.fixture(scope="session")
def onnx_files(runs, tmp_path_factory):
    """An ONNX file of a variant, written once."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    from torchrl_trudi.export import export_policy

    made = {}

    def get(variant: str, stochastic: bool = False) -> Path:
        key = (variant, stochastic)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("onnx") / "policy.onnx"
            export_policy(runs(variant)[0], made[key], stochastic=stochastic)
        return made[key]

    return get


@pytest.fixture
def make_run():
    """See ``_make_run``."""
    return _make_run

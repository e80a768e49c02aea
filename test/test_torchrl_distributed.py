"""TorchRL's collectors in other processes take the actor and the environment."""

from __future__ import annotations

import functools

import pytest
import torch
from _ranks import free_port
from torchrl.collectors.distributed import DistributedCollector

from torchrl_trudi.envs import make_env
from torchrl_trudi.modules import DiffusionActor

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

make = functools.partial(make_env, "InvertedPendulum-v5", 2)


def make_actor() -> DiffusionActor:
    env = make()
    obs_dim, action_dim = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]
    return DiffusionActor(
        action_dim,
        obs_dim,
        num_steps=2,
        spec=env.action_spec,
        return_chain=True,
        return_dist_params=True,
    )


def check(data, actor: DiffusionActor) -> None:
    """The record is whole, and is that of this actor."""
    flat = data.reshape(-1)
    assert flat.shape == (32,)
    kernels = {name: flat["denoising", name] for name in ("chain", "loc", "scale")}
    with torch.no_grad():
        loc, scale = actor.module.score(flat["observation"], kernels["chain"])
    torch.testing.assert_close(loc, kernels["loc"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        scale.expand_as(loc), kernels["scale"].expand_as(loc), rtol=1e-4, atol=1e-4
    )


def test_distributed_collector():
    actor = make_actor()
    collector = DistributedCollector(
        [make, make],
        actor,
        frames_per_batch=32,
        total_frames=64,
        backend="gloo",
        launcher="mp",
        sync=True,
        tcp_port=free_port(),
        collector_kwargs={"auto_register_policy_transforms": False},
    )
    try:
        for data in collector:
            check(data, actor)
    finally:
        collector.shutdown()


def test_ray_collector():
    pytest.importorskip("ray")
    from torchrl.collectors.distributed import RayCollector

    actor = make_actor()
    collector = RayCollector([make], actor, frames_per_batch=32, total_frames=64)
    try:
        for data in collector:
            check(data, actor)
    finally:
        collector.shutdown()

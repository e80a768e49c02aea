"""The policy and the loss that a configuration asks for."""

from __future__ import annotations

import pytest
from torch import nn

from torchrl_trudi.modules import DiffusionActor, GaussianActor
from torchrl_trudi.trainers import validate
from torchrl_trudi.trainers.builders import build_actor, build_critic, build_env, build_loss


def build(policy=None, **sections):
    config = validate(
        {
            "env": {"name": "InvertedPendulum-v5", "num_envs": 2},
            "policy": {"hidden_size": 8, "num_layers": 4, "norm": "rms"} | (policy or {}),
            "critic": {"hidden_size": 8, "num_bins": 21},
            "device": "cpu",
            **sections,
        }
    )
    env = build_env(config)
    actor = build_actor(config, env)
    loss = build_loss(config, actor, build_critic(config, env))
    env.close()
    return actor, loss


def widths(network: nn.Module) -> list[tuple[int, int]]:
    hidden = [each for each in network.hidden if isinstance(each, nn.Linear)]
    return [(each.in_features, each.out_features) for each in hidden]


def test_diffusion_is_the_default():
    actor, loss = build()
    assert type(actor) is DiffusionActor and actor.num_steps == 8
    assert (loss.trajectory_kl.kl_type, loss.target_entropy_scale) == ("simplified", 4.0)


def test_gaussian_of_equal_width():
    actor, loss = build({"kind": "gaussian", "init_scale": 0.5})
    other, _ = build()
    assert type(actor) is GaussianActor and actor.num_steps == 1
    network = actor.module.network
    assert widths(network) == widths(other.module.score_network) == [(8, 8)] * 2
    assert str(network.hidden) == str(other.module.score_network.hidden)
    assert network.extractor.scale_mapping(network.output.bias).tolist() == pytest.approx([0.5] * 2)
    assert (loss.trajectory_kl.kl_type, loss.target_entropy_scale) == ("full", 0.5)
    assert actor.return_chain and actor.return_dist_params


@pytest.mark.parametrize("kind", ["diffusion", "gaussian"])
def test_the_kind_s_own_values_can_be_replaced(kind):
    _, loss = build(
        {"kind": kind},
        trust_region={"kl": "simplified"},
        objective={"target_entropy_scale": 1.5},
    )
    assert (loss.trajectory_kl.kl_type, loss.target_entropy_scale) == ("simplified", 1.5)

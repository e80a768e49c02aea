"""The policy and the loss that a configuration asks for."""

from __future__ import annotations

import pytest
from torch import nn
from torchrl.objectives.value import GAE

from torchrl_trudi.modules import (
    ChainActor,
    DenoisingModel,
    DiffusionActor,
    GaussianActor,
    GaussianModel,
    HLGaussValueOperator,
    ProjectedModel,
)
from torchrl_trudi.objectives import TruDiPPOLoss
from torchrl_trudi.trainers import validate
from torchrl_trudi.trainers.builders import (
    build_actor,
    build_critic,
    build_env,
    build_loss,
    build_lr_schedule,
    build_update,
)


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


SURROGATE = {"kind": "surrogate"}


@pytest.mark.parametrize("critic", ["hl_gauss", "mse"])
@pytest.mark.parametrize("policy", ["diffusion", "gaussian"])
def test_surrogate(policy, critic):
    objective = {
        **SURROGATE,
        "gamma": 0.9,
        "lmbda": 0.8,
        "clip_epsilon": 0.1,
        "entropy": "surrogate",
        "entropy_coeff": 0.3,
        "normalize_advantage": False,
    }
    actor, loss = build(
        {"kind": policy},
        objective=objective,
        critic={"kind": critic, "hidden_size": 8, "num_layers": 3, "num_bins": 21},
        trust_region={"mode": "lagrangian", "eps": 0.3},
    )
    assert type(loss) is TruDiPPOLoss and loss.actor_network is actor
    assert actor.return_path_log_prob and actor.event_dims == 2
    assert (loss.trajectory_kl.mode, float(loss.trajectory_kl.eps)) == (
        "lagrangian",
        pytest.approx(0.3),
    )
    assert float(loss.clip_epsilon) == pytest.approx(0.1)
    assert (loss.entropy_type, float(loss.entropy_coeff)) == ("surrogate", pytest.approx(0.3))
    assert not loss.normalize_advantage
    estimator = loss.value_estimator
    assert type(estimator) is GAE
    assert (float(estimator.gamma), float(estimator.lmbda)) == pytest.approx((0.9, 0.8))
    linears = [m for m in loss.critic_network.modules() if isinstance(m, nn.Linear)]
    assert linears[0].in_features == 4 and len(linears) == (4 if critic == "mse" else 6)
    assert isinstance(loss.critic_network, HLGaussValueOperator) == (critic == "hl_gauss")


def test_one_ratio_per_step():
    actor, _ = build(objective={**SURROGATE, "ratio": "step"})
    assert actor.event_dims == 1


@pytest.mark.parametrize("ratio", ["path", "step"])
def test_projection_mode_of_the_surrogate(ratio):
    """The policy that acts projected records what the ratio needs."""
    actor, loss = build(
        objective={"kind": "surrogate", "ratio": ratio},
        trust_region={"mode": "projection", "eps": 0.2, "regression_coeff": 3.0},
    )
    assert isinstance(loss, TruDiPPOLoss) and isinstance(actor.module, ProjectedModel)
    assert actor.event_dims == (1 if ratio == "step" else 2)
    assert actor.return_chain and actor.return_dist_params and actor.return_path_log_prob
    region = loss.trajectory_kl
    assert (region.mode, region.share, region.regression_coeff.item()) == (
        "projection",
        "uniform",
        3,
    )


def test_lr_schedule():
    settings = {"lr": 1e-3, "dual_lr": 1e-2, "lr_schedule": "kl_adaptive", "max_lr": 2e-3}
    config = validate({"optim": settings, "trust_region": {"eps": 0.2}, "device": "cpu"})
    _, loss = build()
    update = build_update(config, loss)
    schedule = build_lr_schedule(config, update)
    policy, duals = update.optim_actor.param_groups
    schedule.step(0.41)
    assert (policy["lr"], duals["lr"]) == (pytest.approx(1e-3 / 1.5), 1e-2)
    schedule.step(0.2)
    assert policy["lr"] == pytest.approx(1e-3 / 1.5)
    for _ in range(5):
        schedule.step(0.09)
    assert policy["lr"] == 2e-3
    assert build_lr_schedule(validate({"device": "cpu"}), update) is None


@pytest.mark.parametrize(
    "kind, model, kl",
    [("diffusion", DenoisingModel, "simplified"), ("gaussian", GaussianModel, "full")],
)
@pytest.mark.parametrize("old_policy", ["recorded", "replayed"])
def test_projection_mode(kind, model, kl, old_policy):
    """The policy acts projected, in the box of the task, with the bound of the trust region."""
    settings = {"mode": "projection", "eps": 0.2, "regression_coeff": 3.0, "old_policy": old_policy}
    actor, loss = build({"kind": kind}, trust_region=settings)
    assert type(actor) is ChainActor and isinstance(actor.module, ProjectedModel)
    assert isinstance(actor.module.model, model) and isinstance(actor.module.anchor, model)
    region = loss.trajectory_kl
    assert (region.mode, region.share, region.regression_coeff.item()) == (
        "projection",
        "uniform",
        3,
    )
    assert (region.eps.item(), actor.module.eps) == pytest.approx((0.2, 0.2))
    assert region.kl_type == actor.module.kl_type == kl
    assert actor.return_noise == (old_policy == "replayed")
    assert actor.return_dist_params == (old_policy == "recorded")

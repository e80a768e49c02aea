"""Weights, duals and observations out of all proportion, in float32."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from torchrl_trudi.modules import (
    DiffusionActor,
    GaussianActor,
    GaussianNetwork,
    HLGaussCritic,
    HLGaussValueOperator,
    ScoreNetwork,
)
from torchrl_trudi.objectives import TruDiLoss, TruDiPPOLoss
from torchrl_trudi.trainers.update import TruDiUpdate

pytestmark = pytest.mark.faults
ACTION, OBS, ROWS = 4, 7, 32
ARMS = {
    "pathwise": ("diffusion", "pathwise"),
    "adjoint": ("diffusion", "adjoint"),
    "gaussian": ("gaussian", "pathwise"),
    "surrogate": ("diffusion", "surrogate"),
    "gaussian surrogate": ("gaussian", "surrogate"),
}


def make(arm: str):
    kind, objective = ARMS[arm]
    record = ("return_chain", "return_dist_params", "return_log_prob", "return_path_log_prob")
    record = dict.fromkeys(record, True)
    sizes = {"hidden_size": 32, "output_gain": 1.0}
    if kind == "diffusion":
        network = ScoreNetwork(ACTION, OBS, **sizes)
        actor = DiffusionActor(ACTION, score_network=network, **record)
    else:
        network = GaussianNetwork(ACTION, OBS, **sizes)
        actor = GaussianActor(ACTION, network=network, **record)
    surrogate = objective == "surrogate"
    critic = HLGaussCritic(OBS + (0 if surrogate else ACTION), -20.0, 130.0, hidden_size=32)
    if surrogate:
        return actor, TruDiPPOLoss(actor, HLGaussValueOperator(critic, in_keys=["observation"]))
    return actor, TruDiLoss(actor, HLGaussValueOperator(critic), actor_gradient=objective)


def network(actor):
    return getattr(actor.module, "score_network", None) or actor.module.network


def scale(module):
    for param in module.parameters():
        param.mul_(1e4)


EXTREMES = {
    "output layer * 1e4": lambda actor, loss: scale(network(actor).output),
    "policy * 1e4": lambda actor, loss: scale(network(actor)),
    "critic * 1e4": lambda actor, loss: [p.mul_(1e4) for p in loss.critic_parameters()],
    "friction -50": lambda actor, loss: actor.module.friction_raw.fill_(-50.0),
    "friction +50": lambda actor, loss: actor.module.friction_raw.fill_(50.0),
    "temperature -30": lambda actor, loss: loss.log_temperature.fill_(-30.0),
    "temperature +30": lambda actor, loss: loss.log_temperature.fill_(30.0),
    "multiplier -30": lambda actor, loss: loss.trajectory_kl.log_multiplier.fill_(-30.0),
    "multiplier +30": lambda actor, loss: loss.trajectory_kl.log_multiplier.fill_(30.0),
    "observations 1e6": lambda actor, loss: None,
}


@pytest.mark.parametrize("when", ["acting", "updating"])
@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("arm", ARMS)
def test_everything_stays_finite(arm, extreme, when):
    """Of the policy that acts, or of one that left the acting one behind."""
    actor, loss = make(arm)
    if extreme.startswith("friction") and not hasattr(actor.module, "friction_raw"):
        pytest.skip("has no friction")
    if extreme.startswith("temperature") and not hasattr(loss, "log_temperature"):
        pytest.skip("has no temperature")
    push = torch.no_grad()(EXTREMES[extreme])
    if when == "acting":
        push(actor, loss)
    size = 1e6 if extreme.startswith("observations") else 1.0
    with torch.no_grad():
        batch = actor(TensorDict({"observation": size * torch.randn(ROWS, OBS)}, [ROWS]))
    if when == "updating":
        push(actor, loss)
    assert all(value.isfinite().all() for value in batch.values(True, True))
    assert (batch["action"].abs() <= 1).all()
    batch["value_target"], batch["advantage"] = torch.randn(2, ROWS, 1)
    batch["next", "critic", "embedding"] = torch.randn(ROWS, 32)
    update = TruDiUpdate(
        loss,
        torch.optim.Adam(loss.actor_param_groups(lr=3e-4), fused=True),
        torch.optim.Adam(loss.critic_parameters(), lr=3e-4, fused=True),
    )
    losses = loss.actor_loss(batch).update(loss.critic_loss(batch))
    assert all(value.isfinite().all() for value in losses.values()), losses
    sum(value for key, value in losses.items() if key.startswith("loss_")).backward()
    for name, param in loss.named_parameters():
        assert param.grad is None or param.grad.isfinite().all(), name
    metrics = update(batch)
    assert metrics["skipped"] == 0 and metrics["skipped_critic"] == 0
    assert all(param.isfinite().all() for param in loss.parameters())


@pytest.mark.parametrize("num_steps", [1, 2, 8, 32])
def test_the_chain_without_friction_is_bounded(num_steps):
    """And a moderate friction is what it is."""
    model = DiffusionActor(ACTION, OBS, num_steps=num_steps).module
    exact = model.step_sizes().unsqueeze(-1) / model.friction()
    assert torch.equal(model.kernel_coefficients()[0], exact)
    with torch.no_grad():
        model.friction_raw.fill_(-50.0)
        eta, std = model.kernel_coefficients()
        chain = model.sample(torch.randn(16, OBS))
    assert (1 - eta / 2.5**2).abs().prod(0).max() <= 1.001e8
    assert chain.latents.abs().max() < 1e12
    torch.testing.assert_close(std, (2 * eta).sqrt())


def test_what_overflows_is_skipped():
    """Without friction, and with all weights of the policy out of proportion too, the regression's
    squares of the adjoint gradient can leave float32: no step, and no harm."""
    actor, loss = make("adjoint")
    with torch.no_grad():
        scale(network(actor))
        actor.module.friction_raw.fill_(-50.0)
        loss.log_temperature.fill_(-80.0)
        batch = actor(TensorDict({"observation": torch.randn(ROWS, OBS)}, [ROWS]))
    batch["value_target"], batch["next", "critic", "embedding"] = (
        torch.randn(ROWS, 1),
        torch.randn(ROWS, 32),
    )
    update = TruDiUpdate(
        loss,
        torch.optim.Adam(loss.actor_param_groups(lr=3e-4), fused=True),
        torch.optim.Adam(loss.critic_parameters(), lr=3e-4, fused=True),
    )
    before = [p.detach().clone() for p in loss.actor_parameters()]
    metrics = update(batch)
    assert metrics["skipped"] == 1 and metrics["skipped_critic"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, loss.actor_parameters(), strict=True))


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("shift", [-200.0, 200.0])
def test_ratios_beyond_the_exponential(shift, sign):
    """The branch that the clipping does not take must not send a NaN back either."""
    actor, loss = make("gaussian surrogate")
    with torch.no_grad():
        batch = actor(TensorDict({"observation": torch.randn(ROWS, OBS)}, [ROWS]))
    batch["denoising", "path_log_prob"] -= shift
    batch["advantage"] = sign * torch.rand(ROWS, 1)
    loss.normalize_advantage = False
    losses = loss.actor_loss(batch)
    assert all(value.isfinite().all() for value in losses.values())
    losses["loss_objective"].backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in loss.parameters())

"""The learner at given sizes, on synthetic states: what the scripts of this folder time and count."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDict

from torchrl_trudi.modules import (
    DiffusionActor,
    HLGaussCritic,
    HLGaussValueOperator,
    ScoreNetwork,
)
from torchrl_trudi.objectives import TrajectoryKLProjection, TruDiLoss

MAX_GRAD_NORM = 0.5


@dataclass(frozen=True)
class Sizes:
    """Sizes of the networks; the defaults are those of the Humanoid preset.

    Attributes:
        obs: observation size.
        act: action size.
        width: width of the score network and of the critic.
        num_steps: denoising steps.
        num_layers: linear layers of the score network.
        critic_layers: linear layers of each part of the critic.
        num_bins: bins of the critic's histogram.
    """

    obs: int = 348
    act: int = 17
    width: int = 256
    num_steps: int = 8
    num_layers: int = 3
    critic_layers: int = 2
    num_bins: int = 151


def make_actor(sizes: Sizes, *, device: torch.device | None = None, **kwargs) -> DiffusionActor:
    """An actor whose control is not almost zero."""
    network = ScoreNetwork(
        sizes.act,
        sizes.obs,
        num_layers=sizes.num_layers,
        hidden_size=sizes.width,
        output_gain=1.0,
        device=device,
    )
    return DiffusionActor(
        sizes.act, score_network=network, num_steps=sizes.num_steps, device=device, **kwargs
    )


def make_parts(
    sizes: Sizes, *, device: torch.device | None = None, **kwargs
) -> tuple[DiffusionActor, TruDiLoss]:
    """An actor that records its chain, and the loss."""
    actor = make_actor(sizes, device=device, return_chain=True, return_dist_params=True)
    critic = HLGaussCritic(
        sizes.obs + sizes.act,
        -10.0,
        10.0,
        num_bins=sizes.num_bins,
        hidden_size=sizes.width,
        num_layers=sizes.critic_layers,
        device=device,
    )
    region = TrajectoryKLProjection(actor, eps=0.1)
    return actor, TruDiLoss(actor, HLGaussValueOperator(critic), trajectory_kl=region, **kwargs)


def make_batch(actor: DiffusionActor, batch: int) -> TensorDict:
    """States with the recorded chain, and what the critic's loss reads."""
    network = actor.module.score_network
    device = actor.module.low.device
    observation = torch.randn(batch, network.obs_dim, device=device)
    with torch.no_grad():
        data = actor(TensorDict({"observation": observation}, [batch]))
    data["value_target"] = torch.randn(batch, 1, device=device)
    width = network.input.out_features
    data["next", "critic", "embedding"] = torch.randn(batch, width, device=device)
    return data


def move_policy(loss: TruDiLoss, batch: TensorDict) -> None:
    """Moves the policy off the recorded one, and puts the bound where half of the states pass."""
    with torch.no_grad():
        for parameter in loss.actor_parameters():
            parameter.add_(0.02 * parameter.abs().mean() * torch.randn_like(parameter))
        loss.trajectory_kl.eps.copy_(loss.trajectory_kl.path_kl(batch).kl.median())


def set_gate(loss: TruDiLoss, batch: TensorDict, gate: float) -> None:
    """Puts the bound where the fraction ``gate`` of the states passes."""
    with torch.no_grad():
        kl = loss.trajectory_kl.path_kl(batch).kl.sort().values
        inside = round(gate * len(kl))
        # Strictly between two states.
        below = kl[inside - 1] if inside else torch.zeros_like(kl[0])
        above = kl[inside] if inside < len(kl) else 2 * kl[-1]
        loss.trajectory_kl.eps.copy_((below + above) / 2)


@torch.no_grad()
def steps_beyond(loss: TruDiLoss, batch: TensorDict) -> float:
    """Mean number of steps that the gate evaluates at the states beyond it."""
    per_step = loss.trajectory_kl.path_kl(batch).per_step
    total = per_step.cumsum(-1)
    beyond = total[:, -1] >= loss.trajectory_kl.eps
    if not beyond.any():
        return float(per_step.shape[-1])
    # Steps are taken two by two, up to the pair that passes the bound.
    first = (total >= loss.trajectory_kl.eps).float().argmax(-1)[beyond]
    return (first // 2 * 2 + 2).clamp_max(per_step.shape[-1]).float().mean().item()


def actor_total(loss: TruDiLoss, batch: TensorDict) -> torch.Tensor:
    """The sum of the losses of the actor's update."""
    out = loss.actor_loss(batch)
    return sum(out[key] for key in ("loss_actor", "loss_temperature", "loss_kl_multiplier"))


def step(
    parameters: list[torch.nn.Parameter], optim: torch.optim.Optimizer, total: torch.Tensor
) -> None:
    """Backward pass, clipping and the optimiser's step."""
    optim.zero_grad()
    total.backward()
    torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
    optim.step()

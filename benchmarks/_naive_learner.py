"""The published computation, written out literally: what the learner is timed and checked against.

Per environment step a chain to act and another one at the next state, with the critic's value; per
actor update a fresh path of the old policy and both networks along it, step after step; the whole
network on the concatenated input at every step; both branches of the gate for every state.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import nn

from torchrl_trudi.modules import DenoisingModel, DiffusionActor
from torchrl_trudi.modules.distributions import gaussian_kl, gaussian_log_prob
from torchrl_trudi.objectives import TruDiLoss


class Chain(NamedTuple):
    """``x_0 .. x_N`` and the means of ``x_1 .. x_N``."""

    latents: list[torch.Tensor]
    means: list[torch.Tensor]


def control(network: nn.Module, latent: torch.Tensor, observation: torch.Tensor, n: int):
    """The plain network on ``[latent, observation, step embedding]``."""
    step = network.step_embedding(torch.full(latent.shape[:-1], float(n), dtype=latent.dtype))
    hidden = network.hidden(network.input(torch.cat([latent, observation, step], -1)))
    return network.output(hidden).clamp(-network.output_clip, network.output_clip)


def mean(model: DenoisingModel, latent: torch.Tensor, observation: torch.Tensor, n: int):
    """The mean of a forward kernel."""
    eta = model.step_sizes()[n] / model.friction()
    drift = model.drift(latent) + control(model.score_network, latent, observation, n)
    return latent + eta * drift


def sample(model: DenoisingModel, observation: torch.Tensor, noise: torch.Tensor) -> Chain:
    """A chain from standard normals ``[B, N + 1, A]``."""
    _, scale = model.kernel_coefficients()
    latents, means = [model.initial_latent(noise[:, 0])], []
    for n in range(model.num_steps):
        means.append(mean(model, latents[-1], observation, n))
        latents.append(means[-1] + scale[n] * noise[:, n + 1])
    return Chain(latents, means)


def log_prob(model: DenoisingModel, chain: Chain) -> tuple[torch.Tensor, torch.Tensor]:
    """The surrogate ``L``, and ``running``."""
    eta, scale = model.kernel_coefficients()
    log_weight = torch.zeros(())
    for n in range(model.num_steps):
        x, y = chain.latents[n], chain.latents[n + 1]
        backward = gaussian_log_prob(x, y + eta[n] * model.drift(y), scale[n])
        log_weight = log_weight + backward - gaussian_log_prob(y, chain.means[n], scale[n])
    running = -(log_weight + model.log_det(chain.latents[-1]))
    return running + gaussian_log_prob(chain.latents[0], *model.prior()), running


def path_kl(
    model: DenoisingModel, old: Chain, observation: torch.Tensor, eps_dtype: torch.dtype
) -> torch.Tensor:
    """KL of an old chain to the current policy, one step after the other, ``[B]``."""
    _, scale = model.kernel_coefficients()
    total = torch.zeros(len(observation), dtype=eps_dtype)
    for n in range(model.num_steps):
        new = mean(model, old.latents[n], observation, n)
        old_scale = scale[n].detach()  # of a policy that is fixed
        total = total + gaussian_kl(old.means[n], old_scale, new, scale[n], "simplified")
    return total


def actor_loss(
    loss: TruDiLoss,
    old_model: DenoisingModel,
    batch: TensorDict,
    noise: torch.Tensor,
    old_noise: torch.Tensor,
) -> torch.Tensor:
    """The sum of the actor's, the temperature's and the multiplier's loss."""
    model, region = loss.actor_network.module, loss.trajectory_kl
    observation = batch["observation"]
    chain = sample(model, observation, noise)
    surrogate, running = log_prob(model, chain)
    state = batch.select("observation").set("action", model.squash(chain.latents[-1]))
    with loss.critic_network_params.data.to_module(
        loss.critic_network, preserve_module_state=False
    ):
        value = loss.critic_network(state)["state_action_value"].squeeze(-1)
    with torch.no_grad():
        old = sample(old_model, observation, old_noise)
    kl = path_kl(model, old, observation, value.dtype)
    objective = loss.temperature.detach() * surrogate - value
    gated = torch.where(kl < region.eps, objective, region.multiplier.detach() * kl)
    entropy = -(running.mean() + model.log_volume()).detach()
    gap = loss.target_entropy_scale * noise.shape[-1] + entropy
    duals = (loss.temperature * gap).sum()
    return gated.mean() + duals - (region.multiplier * (kl.detach().mean() - region.eps)).sum()


@torch.no_grad()
def rollout_values(
    actor: DiffusionActor, critic: nn.Module, observations: torch.Tensor
) -> list[torch.Tensor]:
    """Acting and bootstrap values along ``[T + 1, E, O]``: two chains and a value each step."""
    model, values = actor.module, []
    for t in range(len(observations) - 1):
        now, following = observations[t], observations[t + 1]
        chain = sample(model, now, model.draw_noise((len(now),)))
        model.squash(chain.latents[-1])
        chain = sample(model, following, model.draw_noise((len(now),)))
        action = model.squash(chain.latents[-1])
        log_prob(model, chain)
        state = TensorDict({"observation": following, "action": action}, [len(now)])
        values.append(critic(state)["state_action_value"])
    return values

"""Small models with non-trivial parameters, and the chain written out from the formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from torch import distributions as D
from torch import nn

from torchrl_trudi.modules import DenoisingModel, ScoreNetwork, StepSizes

ACTION_DIM, OBS_DIM, NUM_STEPS = 2, 3, 4

# The same examples at every run, however busy the machine.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")


class PlainControl(nn.Module):
    """A control without the three projection methods: any module with this signature will do."""

    def __init__(self, **factory) -> None:
        super().__init__()
        self.linear = nn.Linear(ACTION_DIM + OBS_DIM + 1, ACTION_DIM, **factory)

    def forward(self, latent, observation, step):
        step = step.expand(latent.shape[:-1]).unsqueeze(-1)
        return self.linear(torch.cat([latent, observation, step], -1)).sin()


def _randomize(module: nn.Module, scale: float = 0.3, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(scale * noise.to(parameter))
    return module


def _make_model(
    num_steps: int = NUM_STEPS,
    *,
    network: dict | None = None,
    plain: bool = False,
    steps: dict | None = None,
    backward: bool = False,
    action_dim: int = ACTION_DIM,
    obs_dim: int = OBS_DIM,
    seed: int = 0,
    device=None,
    dtype=torch.float64,
    **kwargs,
) -> DenoisingModel:
    factory = {"device": device, "dtype": dtype}

    def make_network():
        if plain:
            return PlainControl(**factory)
        sizes = {"hidden_size": 8, "num_frequencies": 3, "step_dim": 4} | (network or {})
        return ScoreNetwork(action_dim, obs_dim, **sizes, **factory)

    with torch.random.fork_rng():
        torch.manual_seed(seed)  # equal seeds, equal parameters
        model = DenoisingModel(
            make_network(),
            action_dim,
            num_steps,
            step_sizes=None if steps is None else StepSizes(num_steps, **steps, **factory),
            backward_network=make_network() if backward else None,
            **factory,
            **kwargs,
        )
    return _randomize(model, seed=seed)


def _weights(num_steps: int, schedule: str) -> list[float]:
    weights = []
    for n in range(num_steps):
        t = (num_steps - n) / num_steps
        weights.append(
            {
                "cosine": 0.999 * math.cos(math.pi / 2 * (1.008 - t) / 1.008) ** 2 + 0.001,
                "linear": (1 - t) * 0.001 + t,
                "constant": 1.0,
            }[schedule]
        )
    return weights


def _literal_chain(
    model: DenoisingModel,
    observation: torch.Tensor,
    noise: torch.Tensor,
    *,
    schedule: str = "cosine",
    score_scale: float = 1.0,
    initial_latent: torch.Tensor | None = None,
) -> SimpleNamespace:
    """The stochastic chain, step by step from the formulas, with torch.distributions."""
    num_steps = model.num_steps
    raw = F.softplus(model.step_sizes.raw)
    if model.step_sizes.learn == "per_step":
        delta = list(raw)
    else:
        delta = [raw[0] * w for w in _weights(num_steps, schedule)]
    friction = F.softplus(model.friction_raw)
    if model.learn_prior:
        prior = D.Normal(model.prior_mean, F.softplus(model.prior_std_raw))
    else:
        prior = D.Normal(torch.zeros_like(model.prior_std), model.prior_std)
    half, center = (model.high - model.low) / 2, (model.high + model.low) / 2

    x = initial_latent
    if x is None:
        x = (prior.loc + prior.scale * noise[..., 0, :]).detach()
    latents, means, stds = [x], [], []
    forward, backward = 0, 0
    for n in range(num_steps):
        step = torch.full(x.shape[:-1], float(n), dtype=x.dtype, device=x.device)
        eta = delta[n] / friction
        std = (2 * eta).sqrt().expand(x.shape[-1:])
        control = score_scale * model.score_network(x, observation, step)
        mean = x + eta * (-(x - prior.loc) / prior.scale**2 + control)
        new = mean + std * noise[..., n + 1, :]
        back = -(new - prior.loc) / prior.scale**2
        if model.backward_network is not None:
            back = back + model.backward_network(new, observation, step + 1)
        forward = forward + D.Normal(mean, std).log_prob(new).sum(-1)
        backward = backward + D.Normal(new + eta * back, std).log_prob(x).sum(-1)
        x = new
        latents.append(x)
        means.append(mean)
        stds.append(std)
    squash = D.ComposeTransform([D.TanhTransform(), D.AffineTransform(center, half)])
    action = squash(x)
    log_det = squash.log_abs_det_jacobian(x, action).sum(-1)
    terminal = prior.log_prob(latents[0]).sum(-1)
    log_weight = backward - forward
    return SimpleNamespace(
        latents=torch.stack(latents, -2),
        loc=torch.stack(means, -2),
        scale=torch.stack(stds),
        action=action,
        forward=forward,
        log_prob=terminal - log_weight - log_det,
        running=-(log_weight + log_det),
        terminal=terminal,
        log_weight=log_weight,
        log_det=log_det,
    )


@pytest.fixture(scope="session")
def randomize() -> Callable[..., nn.Module]:
    """``randomize(module, scale, seed)`` moves every parameter away from its initial value."""
    return _randomize


@pytest.fixture(scope="session")
def make_model() -> Callable[..., DenoisingModel]:
    """A small float64 chain with 2 actions, 3 observations, 4 steps and random parameters."""
    return _make_model


@pytest.fixture(scope="session")
def literal_chain() -> Callable[..., SimpleNamespace]:
    """The chain and its log-probability pieces, written out."""
    return _literal_chain


@pytest.fixture(scope="session")
def literal_weights() -> Callable[[int, str], list[float]]:
    """Step-size weights, written out."""
    return _weights

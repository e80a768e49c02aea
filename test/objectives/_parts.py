"""Small float64 parts, and the formulas of the paper written out literally."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from torchrl_trudi.modules import (
    ChainActor,
    DiffusionActor,
    GaussianActor,
    GaussianNetwork,
    HLGaussCritic,
    HLGaussValueOperator,
    ScoreNetwork,
)

OBS, ACTION, STEPS = 3, 2, 3
DTYPE = torch.float64


def make_actor(*, dtype=DTYPE, obs=OBS, action=ACTION, num_steps=STEPS, **kwargs) -> DiffusionActor:
    """An actor whose control is not almost zero at the start, and which records everything."""
    recorded = ("return_chain", "return_dist_params", "return_log_prob", "return_path_log_prob")
    network = ScoreNetwork(action, obs, hidden_size=8, output_gain=1.0, dtype=dtype)
    return DiffusionActor(
        action,
        score_network=network,
        num_steps=num_steps,
        noise_key="noise",
        dtype=dtype,
        **{**dict.fromkeys(recorded, True), **kwargs},
    )


def make_gaussian(*, dtype=DTYPE, **kwargs) -> GaussianActor:
    """The same with the Gaussian policy."""
    recorded = ("return_chain", "return_dist_params", "return_log_prob", "return_path_log_prob")
    network = GaussianNetwork(ACTION, OBS, hidden_size=8, output_gain=1.0, dtype=dtype)
    return GaussianActor(
        ACTION,
        network=network,
        noise_key="noise",
        dtype=dtype,
        **{**dict.fromkeys(recorded, True), **kwargs},
    )


def make_critic(
    *, dtype=DTYPE, obs=OBS, action=ACTION, in_keys=None, out_keys=None, **kwargs
) -> HLGaussValueOperator:
    critic = HLGaussCritic(
        obs + action, -2.0, 3.0, num_bins=11, hidden_size=8, dtype=dtype, **kwargs
    )
    return HLGaussValueOperator(critic, in_keys=in_keys, out_keys=out_keys)


class LinearQ(nn.Module):
    """``Q(s, a) = c.s + d.a``, with known coefficients."""

    def __init__(self, state=(1.0, -2.0, 0.5), action=(0.7, -0.3)) -> None:
        super().__init__()
        self.c = nn.Parameter(torch.tensor(state, dtype=DTYPE))
        self.d = nn.Parameter(torch.tensor(action, dtype=DTYPE))

    def forward(self, observation, action):
        return (observation @ self.c + action @ self.d).unsqueeze(-1)


def linear_critic(observation_key="observation", **kwargs) -> TensorDictModule:
    return TensorDictModule(
        LinearQ(**kwargs), in_keys=[observation_key, "action"], out_keys=["state_action_value"]
    )


def draw_noise(*batch: int, num_steps=STEPS, action=ACTION, dtype=DTYPE) -> torch.Tensor:
    return torch.randn(*batch, num_steps + 1, action, dtype=dtype)


def make_states(*batch: int, obs=OBS, dtype=DTYPE) -> TensorDict:
    return TensorDict({"observation": torch.randn(*batch, obs, dtype=dtype)}, batch)


def make_batch(actor: ChainActor, *batch: int, **kwargs) -> TensorDict:
    """States with what the actor records there, and the noise that it used."""
    dtype = next(actor.parameters()).dtype
    data = make_states(*batch, dtype=dtype, **kwargs)
    data["noise"] = draw_noise(
        *batch, num_steps=actor.num_steps, action=actor.module.action_dim, dtype=dtype
    )
    with torch.no_grad():
        return actor(data)


def make_rollout(actor: ChainActor, *batch: int) -> TensorDict:
    """A rollout [*B, T] of continuing steps in which each next row is the following state."""
    data = make_batch(actor, *batch)
    observation, dtype = data["observation"], data["observation"].dtype
    last = torch.randn_like(observation[..., :1, :])
    flags = torch.zeros(*batch, 1, dtype=torch.bool)
    data["next"] = TensorDict(
        {
            "observation": torch.cat([observation[..., 1:, :], last], -2),
            "reward": torch.randn(*batch, 1, dtype=dtype),
            "done": flags.clone(),
            "terminated": flags.clone(),
            "truncated": flags.clone(),
        },
        batch,
    )
    return data


def end(data: TensorDict, index, kind: str) -> None:
    """End an episode at a step: ``"terminated"``, ``"truncated"`` or ``"both"``."""
    data["next", "done"][index] = True
    for flag in ("terminated", "truncated"):
        if kind in (flag, "both"):
            data["next", flag][index] = True


@torch.no_grad()
def nudge(module, scale: float = 0.1) -> None:
    """Move every parameter a little."""
    for param in module.parameters():
        param.add_(scale * torch.randn_like(param))


def gradients(loss: torch.Tensor, params) -> list[torch.Tensor]:
    """Gradients, zeros where there is none; the graph is kept."""
    params = list(params)
    found = torch.autograd.grad(loss, params, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(params, found, strict=True)]


def assert_all_close(actual, expected) -> None:
    actual, expected = list(actual), list(expected)
    assert len(actual) == len(expected) > 0
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-11)


# -- the formulas ------------------------------------------------------------------


def normal_log_prob(x, loc, scale):
    return torch.distributions.Normal(loc, scale).log_prob(x).sum(-1)


def kernel(model, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``eta_n`` and its noise scale, with the cosine weights computed here."""
    t = (model.num_steps - n) / model.num_steps
    weight = 0.999 * math.cos(0.5 * math.pi * (1.008 - t) / 1.008) ** 2 + 0.001
    eta = weight / model.num_steps / F.softplus(model.friction_raw)
    return eta, torch.sqrt(2 * eta)


def mean_step(model, observation, x, n: int) -> torch.Tensor:
    eta, _ = kernel(model, n)
    return x + eta * (-x / 2.5**2 + model.score_network(x, observation, torch.tensor(n)))


def literal_sample(actor, observation, noise):
    """Action, running part and surrogate log-probability of a fresh chain, step by step."""
    model = actor.module
    x = 2.5 * noise[..., 0, :]
    terminal = normal_log_prob(x, torch.zeros_like(x), torch.tensor(2.5, dtype=x.dtype))
    log_weight = 0.0
    for n in range(model.num_steps):
        eta, scale = kernel(model, n)
        mean = mean_step(model, observation, x, n)
        after = mean + scale * noise[..., n + 1, :]
        back = after + eta * (-after / 2.5**2)
        log_weight = log_weight + normal_log_prob(x, back, scale)
        log_weight = log_weight - normal_log_prob(after, mean, scale)
        x = after
    log_det = (2 * (math.log(2) - x - F.softplus(-2 * x))).sum(-1)
    running = -(log_weight + log_det)
    return x.tanh(), running, running + terminal


def literal_kl(actor, data, kind: str = "simplified") -> torch.Tensor:
    """Divergence of every step on the recorded chain, ``[*B, N]``."""
    chain, old_loc = data["denoising", "chain"], data["denoising", "loc"]
    old_scale, out = data["denoising", "scale"], []
    for n in range(actor.num_steps):
        mean = mean_step(actor.module, data["observation"], chain[..., n, :], n)
        _, scale = kernel(actor.module, n)
        before, mu = old_scale[..., n, :], old_loc[..., n, :]
        if kind == "simplified":
            # 1e-8 in the denominator guards a vanishing scale.
            out.append(((mean - mu) ** 2 / (2 * before**2 + 1e-8)).sum(-1))
        else:
            ratio = torch.log(scale / before)
            square = (before**2 + (mu - mean) ** 2) / (2 * scale**2)
            out.append((ratio + square - 0.5).sum(-1))
    return torch.stack(out, -1)


def literal_return(gamma, lmbda, alpha, value, log_prob, reward, terminated, truncated, mask=True):
    """Soft TD(lambda) returns of one sequence of Python numbers."""
    out = [0.0] * len(reward)
    for t in reversed(range(len(reward))):
        soft = reward[t]
        if not (mask and terminated[t]):
            soft -= gamma * alpha * log_prob[t]
        if terminated[t]:
            out[t] = soft
        elif truncated[t] or t == len(reward) - 1:
            out[t] = soft + gamma * value[t]
        else:
            out[t] = soft + gamma * (lmbda * out[t + 1] + (1 - lmbda) * value[t])
    return out

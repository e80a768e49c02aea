"""How tightly the path-space surrogate holds the log-probability of the action."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from tensordict import TensorDictBase

from torchrl_trudi.modules.chain_model import DenoisingChain
from torchrl_trudi.modules.denoising import DenoisingModel
from torchrl_trudi.modules.distributions import gaussian_log_prob
from torchrl_trudi.modules.tensordict_module import ChainActor
from torchrl_trudi.objectives.trajectory_kl import check_not_empty

__all__ = ["PathELBO", "SurrogateGap", "path_elbo", "surrogate_gap"]


class PathELBO(NamedTuple):
    """The evidence bound of final latents, and its parts.

    Fields:
        elbo (torch.Tensor): ``forward - backward + terminal``, ``[*B]``.
        forward (torch.Tensor): log-density of the chain's steps under the policy, ``[*B]``.
        backward (torch.Tensor): that of the backward draw, ``[*B]``.
        terminal (torch.Tensor): log-density of its ``x_0`` under the prior, ``[*B]``.
    """

    elbo: torch.Tensor
    forward: torch.Tensor
    backward: torch.Tensor
    terminal: torch.Tensor


class SurrogateGap(NamedTuple):
    """The surrogate of recorded chains, and the log-probability for which it stands.

    All in units of the action space, with the log-Jacobian of the squashing.

    Fields:
        gap (torch.Tensor): ``surrogate - log_prob``, ``[*B]``.
        surrogate (torch.Tensor): :math:`L` of the recorded chain, ``[*B]``.
        log_prob (torch.Tensor): importance-weighted estimate of the action's log-probability, ``[*B]``.
        elbo (torch.Tensor): mean evidence bound of the same paths, ``[*B]``.
    """

    gap: torch.Tensor
    surrogate: torch.Tensor
    log_prob: torch.Tensor
    elbo: torch.Tensor


def path_elbo(
    model: DenoisingModel,
    observation: torch.Tensor,
    final: torch.Tensor,
    noise: torch.Tensor | None = None,
) -> PathELBO:
    r"""Evidence bound of the density of final latents, on one backward path for each.

    With :math:`x_{N-1}, \dots, x_0` drawn backwards from :math:`x_N` by :math:`B_n`,

    .. math::
        \mathrm{ELBO} = \sum_n \log F_n(x_{n+1} | x_n) - \sum_n \log B_n(x_n | x_{n+1}) + \log p_0(x_0)

    which is :math:`\log p(x_N | s)` minus :math:`\mathrm{KL}(B \| posterior)` in expectation, the
    divergence of the backward paths from those by which the policy itself arrives at :math:`x_N`.
    On paths of the policy, the same quantity is the surrogate :math:`L` (without the squashing), and
    exceeds :math:`\log p` by the divergence the other way round:
    :math:`\mathrm E[L] = \mathrm E[\log p] + \mathrm{KL}(posterior \| B)`. Both gaps close where the
    policy's chain, run backwards, is :math:`B`.

    On the policy's own actions the expected gradient of :math:`\log p` is zero, so maximising the
    bound there only pulls the chain to its backward kernels: self-distillation of a policy on its own
    samples. The bound is the full one. The term :math:`-\log B`, the entropy of the backward draw, is
    constant for the score network, whose gradient goes through :math:`\log F` alone; it is not for
    friction, step sizes, a learned prior and a learned backward control, which get the gradient of
    the bound through the draw.

    Args:
        model (DenoisingModel): the chain.
        observation (torch.Tensor): ``[*B, O]``.
        final (torch.Tensor): final latents :math:`x_N`, before the squashing, ``[*B, A]``.
        noise (torch.Tensor, optional): standard normals of the backward path, ``[*B, N, A]``. Drawn
            if not given.

    Returns:
        PathELBO: the bound and its parts, each ``[*B]``.

    Raises:
        ValueError: noise of another shape.

    Examples:
        >>> import torch
        >>> from torchrl_trudi.modules import DenoisingModel, ScoreNetwork
        >>> from torchrl_trudi.objectives import path_elbo
        >>> model = DenoisingModel(ScoreNetwork(2, 3, hidden_size=16), action_dim=2, num_steps=4)
        >>> observation = torch.randn(5, 3)
        >>> final = model.sample(observation).latents[..., -1, :].detach()
        >>> bound = path_elbo(model, observation, final)
        >>> bound.elbo.shape
        torch.Size([5])
        >>> (-bound.elbo.mean()).backward()
    """
    latents, backward = model.sample_backward(observation, final, noise)
    loc, scale = model.score(observation, latents)
    forward = gaussian_log_prob(latents[..., 1:, :], loc, scale).sum(-1)
    terminal = gaussian_log_prob(latents[..., 0, :], *model.prior())
    return PathELBO(forward - backward + terminal, forward, backward, terminal)


@torch.no_grad()
def surrogate_gap(
    actor: ChainActor, tensordict: TensorDictBase, num_paths: int = 64
) -> SurrogateGap:
    r"""How much the surrogate :math:`L` of recorded chains exceeds the log-probability of their actions.

    The log-probability is estimated by the log-mean-exp of the bound of :func:`path_elbo` over
    ``num_paths`` backward paths (importance weighting, arXiv 1509.00519). In expectation the estimate
    is at most the log-probability and grows to it with the number of paths. So the mean gap, over
    chains drawn from ``actor`` as it is, is at least the true one, which is
    :math:`\mathrm{KL}(posterior \| B) \ge 0`. The gap of a single chain may have either sign.

    A diagnostic: it costs ``num_paths`` evaluations of the chain, and has no gradient. A state with a
    wide spread of weights needs more paths: compare with twice as many.

    Args:
        actor (ChainActor): the policy, around a :class:`~torchrl_trudi.modules.DenoisingModel`.
        tensordict (TensorDictBase): states ``[*B]`` with the chains that ``actor`` recorded there. Where
            there are none, fresh ones are drawn.
        num_paths (int, optional): backward paths per state. Defaults to ``64``.

    Returns:
        SurrogateGap: the gap and what it is made of, each ``[*B]``.

    Raises:
        ValueError: another model, ``num_paths < 1``, or an empty batch.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_trudi.modules import DiffusionActor, ScoreNetwork
        >>> from torchrl_trudi.objectives import surrogate_gap
        >>> network = ScoreNetwork(2, 3, hidden_size=16)
        >>> actor = DiffusionActor(2, score_network=network, return_chain=True)
        >>> data = actor(TensorDict({"observation": torch.randn(4, 3)}, [4]))
        >>> surrogate_gap(actor, data, num_paths=8).gap.shape
        torch.Size([4])
    """
    model = actor.module
    if num_paths < 1:
        raise ValueError(f"num_paths must be at least 1, got {num_paths}.")
    if not isinstance(model, DenoisingModel):
        raise ValueError(
            "The gap is that of a denoising chain, with its backward kernels, which a "
            f"{type(model).__name__} does not have."
        )
    check_not_empty(tensordict)
    observation = actor.observation(tensordict)
    latents = tensordict.get(actor.tensor_keys.chain, None)
    if latents is None:
        latents = model.sample(observation).latents
    chain = DenoisingChain(latents, *model.score(observation, latents))
    own = model.log_prob(observation, chain)
    final = latents[..., -1, :]
    # One path of each state at a time: all at once may not fit the memory.
    bounds = torch.stack([path_elbo(model, observation, final).elbo for _ in range(num_paths)])
    log_prob = bounds.logsumexp(0) - math.log(num_paths) - own.log_det
    return SurrogateGap(
        own.log_prob - log_prob, own.log_prob, log_prob, bounds.mean(0) - own.log_det
    )

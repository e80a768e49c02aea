"""Closed forms for diagonal Gaussians, reduced over the last dimension."""

from __future__ import annotations

import math
from typing import Literal

import torch

__all__ = ["gaussian_entropy", "gaussian_kl", "gaussian_log_prob"]

_LOG_2PI = math.log(2 * math.pi)

KLName = Literal["full", "simplified"]


def gaussian_log_prob(value: torch.Tensor, loc: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Log-density of ``N(loc, diag(scale**2))``.

    Args:
        value (torch.Tensor): points, ``[*B, A]``.
        loc (torch.Tensor): means, broadcastable to ``[*B, A]``.
        scale (torch.Tensor): standard deviations, broadcastable to ``[*B, A]``.

    Returns:
        torch.Tensor: log-densities, ``[*B]``.
    """
    return (-0.5 * ((value - loc) / scale).square() - scale.log() - 0.5 * _LOG_2PI).sum(-1)


def gaussian_entropy(scale: torch.Tensor) -> torch.Tensor:
    """Differential entropy of ``N(., diag(scale**2))`` in nats: ``[*B, A] -> [*B]``."""
    return (scale.log() + 0.5 * (1 + _LOG_2PI)).sum(-1)


def gaussian_kl(
    loc_p: torch.Tensor,
    scale_p: torch.Tensor,
    loc_q: torch.Tensor,
    scale_q: torch.Tensor,
    kind: KLName = "full",
) -> torch.Tensor:
    r"""KL divergence :math:`\mathrm{KL}(p \| q)` of diagonal Gaussians, in nats.

    ``"full"``: :math:`\sum_i \log(\sigma^q_i / \sigma^p_i) + \frac{(\sigma^p_i)^2 + (\mu^p_i - \mu^q_i)^2}{2 (\sigma^q_i)^2} - \tfrac12`.

    ``"simplified"``: :math:`\sum_i (\mu^p_i - \mu^q_i)^2 / (2 (\sigma^p_i)^2 + 10^{-8})`, the form of the
    published runs (arXiv 2606.15260): the variance ratio is dropped; equal to ``"full"`` when the scales
    agree, up to the :math:`10^{-8}` that guards a vanishing scale.

    Args:
        loc_p (torch.Tensor): means of ``p``, ``[*B, A]``.
        scale_p (torch.Tensor): standard deviations of ``p``, broadcastable.
        loc_q (torch.Tensor): means of ``q``, ``[*B, A]``.
        scale_q (torch.Tensor): standard deviations of ``q``, broadcastable; unused by ``"simplified"``.
        kind (str, optional): ``"full"`` or ``"simplified"``. Defaults to ``"full"``.

    Returns:
        torch.Tensor: divergences, ``[*B]``.

    Raises:
        ValueError: unknown ``kind``.
    """
    difference = loc_q - loc_p
    if kind == "simplified":
        return (difference.square() / (2 * scale_p.square() + 1e-8)).sum(-1)
    if kind != "full":
        raise ValueError(f"Unknown KL {kind!r}; choose 'full' or 'simplified'.")
    # Written with the ratio so that equal scales give exactly 0 for that part.
    ratio = scale_p / scale_q
    return (0.5 * (ratio.square() + (difference / scale_q).square() - 1) - ratio.log()).sum(-1)

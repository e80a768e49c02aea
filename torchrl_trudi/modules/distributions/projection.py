"""Closed-form projection of diagonal Gaussians onto a KL ball around others."""

from __future__ import annotations

from typing import Literal

import torch

from torchrl_trudi.modules.distributions.gaussian import KLName, gaussian_kl

__all__ = ["project_gaussian", "project_path"]

ShareName = Literal["uniform", "proportional"]

# Halvings of the bracket, first of its logarithm and then of its width, and Newton steps after them.
_BISECTIONS, _NEWTON_STEPS = 18, 3


def _margin(dtype: torch.dtype) -> float:
    """How far below the bound to aim, relatively, so that rounding does not pass it."""
    return 128 * torch.finfo(dtype).eps


def _excess(v: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """``v - log(p)`` of ``p = 1 + v`` to full relative accuracy, also next to 0."""
    small = v.abs() < torch.finfo(v.dtype).eps ** (1 / 6)
    s = torch.where(small, v, 0.0)
    series = s * s * (1 / 2 + s * (-1 / 3 + s * (1 / 4 + s * (-1 / 5 + s * (1 / 6 - s / 7)))))
    return torch.where(small, series, v - torch.where(small, 1.0, p).log())


def _kl_at(t: torch.Tensor, precision: torch.Tensor, pull: torch.Tensor) -> torch.Tensor:
    """Full KL of the point ``t`` of the path of :func:`project_gaussian`, ``[*B]``."""
    t = t.unsqueeze(-1)
    p = (1 - t) + t * precision
    return 0.5 * (_excess(t * (precision - 1), p) + (t * pull).square() / p).sum(-1)


def _slope_at(t: torch.Tensor, precision: torch.Tensor, pull: torch.Tensor) -> torch.Tensor:
    """Derivative of :func:`_kl_at` in ``t``, a sum of terms that are not negative."""
    t = t.unsqueeze(-1)
    v, p = t * (precision - 1), (1 - t) + t * precision
    return 0.5 * ((precision - 1) * v / p + (t * pull / p) * (pull / p) * (2 + v)).sum(-1)


def _solve(
    precision: torch.Tensor, pull: torch.Tensor, bound: torch.Tensor, inside: torch.Tensor
) -> torch.Tensor:
    """The ``t`` at which the KL is ``bound``, differentiable; 1 where ``inside``."""
    bound = torch.where(inside, 1.0, bound * (1 - _margin(pull.dtype)))
    fixed, target = (precision.detach(), pull.detach()), bound.detach()
    # The KL is convex in t and 0 at 0, so that it is at most t times that at 1.
    high = torch.ones_like(target)
    low = (target / _kl_at(high, *fixed)).clamp(torch.finfo(pull.dtype).tiny, 1.0)
    for _ in range(_BISECTIONS):
        middle = torch.where(high > 2 * low, low.sqrt() * high.sqrt(), (low + high) / 2)
        beyond = _kl_at(middle, *fixed) > target
        low, high = torch.where(beyond, low, middle), torch.where(beyond, middle, high)

    def step(t, kl, goal):
        # One of Newton's, which from above stays above: the KL is convex.
        slope = torch.where(inside, 1.0, _slope_at(t, *fixed))
        return t - torch.where(inside, 0.0, kl - goal) / slope

    for _ in range(_NEWTON_STEPS):
        high = step(high, _kl_at(high, *fixed), target)
    # The last step is that of the implicit function theorem: it has the derivative of the root.
    return torch.where(inside, 1.0, step(high, _kl_at(high, precision, pull), bound))


def project_gaussian(
    loc_old: torch.Tensor,
    scale_old: torch.Tensor,
    loc: torch.Tensor,
    scale: torch.Tensor,
    bound: torch.Tensor | float,
    kind: KLName = "full",
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Move Gaussians towards old ones until ``KL(old || .)`` is within a bound.

    A trust-region projection in the sense of arXiv 2101.09207, along a path from the old Gaussian
    (:math:`t = 0`) to the given one (:math:`t = 1`), with the largest :math:`t` inside the bound:

    - ``"full"``: the path is that of the geometric mixtures :math:`q_t \propto q_{old}^{1 - t} q^t`, Gaussians
      that interpolate the precision, and the mean weighted by it, linearly. In an exponential family
      :math:`\mathrm{KL}(q_{old} \| q_t)` is a Bregman divergence of the log-partition function, hence
      convex in :math:`t` and 0 at 0: it grows along the path and meets the bound once. That root is
      found by bisection and Newton's method in a fixed number of tensor operations. With equal
      scales it is :math:`t = \sqrt{bound / \mathrm{KL}}`.
    - ``"simplified"``: :math:`t = \sqrt{bound / \mathrm{KL}}` on the mean. This divergence does not read the
      scale and so does not bound it: the scale is returned as it is.

    A Gaussian inside the bound is returned as it is, bit by bit. One beyond it lands on the bound, but for a
    relative margin of 128 machine epsilons for rounding; the rounding of the returned mean itself
    comes on top where it is large in units of the scale (beyond about 100 in float32).
    Differentiable once in all four tensors, on both sides of the bound.

    Args:
        loc_old (torch.Tensor): old means, ``[*B, A]``.
        scale_old (torch.Tensor): old standard deviations, broadcastable.
        loc (torch.Tensor): means, ``[*B, A]``.
        scale (torch.Tensor): standard deviations, broadcastable.
        bound (torch.Tensor or float): bound on the KL, broadcastable to ``[*B]``; positive where it
            is exceeded.
        kind (str, optional): ``"full"`` or ``"simplified"``, see
            :func:`~torchrl_trudi.modules.gaussian_kl`. Defaults to ``"full"``.

    Returns:
        tuple of torch.Tensor: means ``[*B, A]``, and standard deviations: ``[*B, A]`` with ``"full"``,
        else ``scale``.

    Raises:
        ValueError: unknown ``kind``.

    Examples:
        >>> import torch
        >>> from torchrl_trudi.modules import gaussian_kl, project_gaussian
        >>> old = torch.zeros(3), torch.ones(3)
        >>> new = torch.full((3,), 1e4), torch.full((3,), 1e-3)
        >>> gaussian_kl(*old, *project_gaussian(*old, *new, bound=0.1))
        tensor(0.1000)
    """
    if kind == "simplified":
        kl = gaussian_kl(loc_old, scale_old, loc, scale, "simplified")
        bound = torch.as_tensor(bound, dtype=kl.dtype, device=kl.device)
        inside = kl <= bound
        # Selected before the root and the division: their gradients at 0 are not numbers.
        aim = bound * (1 - _margin(kl.dtype))
        ratio = torch.where(inside, 1.0, aim / torch.where(inside, 1.0, kl))
        moved = loc_old + ratio.sqrt().unsqueeze(-1) * (loc - loc_old)
        return torch.where(inside.unsqueeze(-1), loc, moved), scale
    if kind != "full":
        raise ValueError(f"Unknown KL {kind!r}; choose 'full' or 'simplified'.")
    precision, pull = _coordinates(loc_old, scale_old, loc, scale)
    kl = _kl_at(torch.ones_like(pull[..., 0]), precision, pull)
    bound = torch.as_tensor(bound, dtype=kl.dtype, device=kl.device).expand_as(kl)
    inside = kl <= bound
    t = _solve(precision, pull, bound, inside).unsqueeze(-1)
    p = (1 - t) + t * precision
    moved, spread = loc_old + scale_old * (t * pull / p), scale_old / p.sqrt()
    keep = inside.unsqueeze(-1)
    return torch.where(keep, loc, moved), torch.where(keep, scale, spread)


def _coordinates(
    loc_old: torch.Tensor, scale_old: torch.Tensor, loc: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Precision, and precision times mean, in units of the old Gaussian around its mean."""
    precision = (scale_old / scale).square()
    pull = precision * ((loc - loc_old) / scale_old)
    return precision.expand_as(pull), pull


def project_path(
    loc_old: torch.Tensor,
    scale_old: torch.Tensor,
    loc: torch.Tensor,
    scale: torch.Tensor,
    eps: torch.Tensor | float,
    *,
    kind: KLName = "full",
    share: ShareName = "uniform",
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Project the kernels of every step of a chain, so that the KL of the path is within a bound.

    Each step gets a share of the bound and is projected onto it by :func:`project_gaussian`:

    - ``"uniform"``: :math:`\epsilon / N`.
    - ``"proportional"``: :math:`\epsilon\, \mathrm{KL}_n / \max(\epsilon, \sum_m \mathrm{KL}_m)`, its part of what all
      steps ask for. A path inside the bound is left as it is, another one lands on it.

    Args:
        loc_old (torch.Tensor): old means, ``[*B, N, A]``.
        scale_old (torch.Tensor): old standard deviations, broadcastable.
        loc (torch.Tensor): means, ``[*B, N, A]``.
        scale (torch.Tensor): standard deviations, broadcastable.
        eps (torch.Tensor or float): bound on the KL of the path, a positive scalar.

    Keyword Args:
        kind (str, optional): ``"full"`` or ``"simplified"``. Defaults to ``"full"``.
        share (str, optional): ``"uniform"`` or ``"proportional"``. Defaults to ``"uniform"``.

    Returns:
        tuple of torch.Tensor: see :func:`project_gaussian`.

    Raises:
        ValueError: unknown ``kind`` or ``share``.

    Examples:
        >>> import torch
        >>> from torchrl_trudi.modules import gaussian_kl, project_path
        >>> loc_old, scale = torch.zeros(2, 1), torch.ones(2, 1)
        >>> loc = torch.tensor([[0.0], [1.0]])  # the first of two steps has not moved
        >>> for share in ("uniform", "proportional"):
        ...     projected = project_path(loc_old, scale, loc, scale, eps=0.1, share=share)
        ...     print(gaussian_kl(loc_old, scale, *projected))
        tensor([0.0000, 0.0500])
        tensor([0.0000, 0.1000])
    """
    if share not in ("uniform", "proportional"):
        raise ValueError(f"Unknown share {share!r}; choose 'uniform' or 'proportional'.")
    eps = torch.as_tensor(eps, dtype=loc.dtype, device=loc.device)
    bound = eps / loc.shape[-2]
    if share == "proportional":
        if kind == "full":
            precision, pull = _coordinates(loc_old, scale_old, loc, scale)
            kl = _kl_at(torch.ones_like(pull[..., 0]), precision, pull)
        else:
            kl = gaussian_kl(loc_old, scale_old, loc, scale, kind)
        total = kl.sum(-1, keepdim=True)
        # A factor of exactly 1 inside the bound.
        bound = kl * (eps / torch.clamp(total, min=eps))
    return project_gaussian(loc_old, scale_old, loc, scale, bound, kind)

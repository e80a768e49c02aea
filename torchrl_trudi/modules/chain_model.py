"""What the losses and the actor's front ask of a policy that makes its action by a Markov chain."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from torchrl_trudi.modules.distributions.gaussian import KLName

__all__ = ["ChainModel", "DenoisingChain", "PathLogProb"]

_LOG_2 = math.log(2.0)


class DenoisingChain(NamedTuple):
    """A chain and the kernels that produced it.

    Fields:
        latents (torch.Tensor): states ``x_0 .. x_N``, ``[*B, N + 1, A]``.
        loc (torch.Tensor): means of ``x_1 .. x_N``, ``[*B, N, A]``.
        scale (torch.Tensor): standard deviations, ``[N, A]``, or ``[*B, N, A]`` where they depend on
            the observation.
    """

    latents: torch.Tensor
    loc: torch.Tensor
    scale: torch.Tensor


class PathLogProb(NamedTuple):
    r"""Pieces of the log-probability surrogate (arXiv 2606.15260).

    Fields:
        log_prob (torch.Tensor): :math:`L = running + terminal`, ``[*B]``.
        running (torch.Tensor): :math:`-(\log w + \log|\det|)`, ``[*B]``.
        terminal (torch.Tensor): :math:`\log p_0(x_0)`, ``[*B]``.
        log_weight (torch.Tensor): :math:`\log w = \sum_n \log B_n - \log F_n`, ``[*B]``.
        log_det (torch.Tensor): log-Jacobian of the squashing into the action box, ``[*B]``.
    """

    log_prob: torch.Tensor
    running: torch.Tensor
    terminal: torch.Tensor
    log_weight: torch.Tensor
    log_det: torch.Tensor


def inner_box(
    low: torch.Tensor, high: torch.Tensor, reference: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds in another type, rounded towards the inside.

    Rounded to the nearest, the bound of a box in float64 can lie outside of it in float32, and so
    would actions at that bound.

    Args:
        low (torch.Tensor): lower bounds.
        high (torch.Tensor): upper bounds.
        reference (torch.Tensor): a tensor of the type and device wanted.

    Returns:
        tuple of torch.Tensor: the largest box of that type inside of the given one.
    """
    inner = []
    for bound, towards in ((low, torch.inf), (high, -torch.inf)):
        bound = bound.to(reference.device)
        near = bound.to(reference.dtype)
        outside = near.to(torch.float64) - bound.to(torch.float64)
        outside = outside < 0 if towards > 0 else outside > 0
        if outside.any():
            near = torch.where(outside, torch.nextafter(near, torch.full_like(near, towards)), near)
        inner.append(near)
    return inner[0], inner[1]


def select_steps(values: torch.Tensor, steps: slice | torch.Tensor) -> torch.Tensor:
    """Some steps of a chain: ``[*B, N, A] -> [*B, K, A]``.

    Args:
        values (torch.Tensor): one entry per step.
        steps (slice or torch.Tensor): a slice, or indices ``[*B, K]``.
    """
    if isinstance(steps, slice):
        return values[..., steps, :]
    return values.gather(-2, steps.unsqueeze(-1).expand(*steps.shape, values.shape[-1]))


class ChainModel(nn.Module, ABC):
    r"""Base of the policies whose action is the squashed end of a chain with Gaussian kernels.

    A chain starts at ``x_0``, takes ``N`` steps :math:`x_{n+1} \sim \mathcal N(\mu_n(x_n, s), \mathrm{diag}\, \sigma_n^2)`
    and ends in the action :math:`\tanh(x_N)`, mapped to the box ``[low, high]``. This class has the box
    and the checks; a policy adds its kernels and its log-probability. The actor's front
    (:class:`~torchrl_trudi.modules.ChainActor`) and the losses use nothing but what is declared here, so
    that one trust region and one objective serve every such policy.

    Subclasses: :class:`~torchrl_trudi.modules.DenoisingModel`, :class:`~torchrl_trudi.modules.GaussianModel`,
    and :class:`~torchrl_trudi.modules.ProjectedModel` around either.

    Args:
        action_dim (int): action size ``A``.
        num_steps (int): number of steps ``N``.

    Raises:
        ValueError: a size below 1.
    """

    default_kl: KLName
    """The KL that a trust region takes unless it is told: see :func:`~torchrl_trudi.modules.gaussian_kl`."""

    default_target_entropy_scale: float
    """The entropy target that a loss takes unless it is told, see :class:`~torchrl_trudi.objectives.TruDiLoss`."""

    low: torch.Tensor
    high: torch.Tensor

    step_sizes: Callable[[], torch.Tensor | None]
    """The sizes of the chain's steps, ``[N]``, where it has such."""

    def __init__(self, action_dim: int, num_steps: int) -> None:
        super().__init__()
        if action_dim < 1 or num_steps < 1:
            raise ValueError(
                f"action_dim and num_steps must be at least 1, got {action_dim} and {num_steps}."
            )
        self.action_dim = action_dim
        self.num_steps = num_steps

    def _register_box(
        self,
        low: torch.Tensor | float | None,
        high: torch.Tensor | float | None,
        reference: torch.Tensor,
    ) -> None:
        """Check the bounds of the action box and keep them.

        Args:
            low (torch.Tensor or float, optional): ``[A]`` or scalar; ``None`` for ``-1``.
            high (torch.Tensor or float, optional): ``[A]`` or scalar; ``None`` for ``1``.
            reference (torch.Tensor): a tensor with the model's device and dtype.
        """
        # Checked as the model holds them: a box can be degenerate in its dtype only.
        low, high = inner_box(
            torch.as_tensor(-1.0 if low is None else low),
            torch.as_tensor(1.0 if high is None else high),
            reference,
        )
        for name, bound in (("low", low), ("high", high)):
            if bound.ndim > 1 or (bound.ndim == 1 and bound.shape[0] != self.action_dim):
                raise ValueError(
                    f"{name} must be a scalar or have shape [{self.action_dim}], "
                    f"got {tuple(bound.shape)}."
                )
            if not bound.isfinite().all():
                raise ValueError(f"The action box must be bounded, got {name}={bound.tolist()}.")
        if not (low < high).all():
            raise ValueError(
                f"The action box needs low < high, got low={low.tolist()}, high={high.tolist()}."
            )
        self.register_buffer("low", low.expand(self.action_dim).clone())
        self.register_buffer("high", high.expand(self.action_dim).clone())

    # -- sampling ----------------------------------------------------------------

    def draw_noise(
        self, batch_shape: torch.Size | tuple, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        """Standard normals for one chain per batch element, ``[*B, N + 1, A]``."""
        return torch.randn(
            *batch_shape,
            self.num_steps + 1,
            self.action_dim,
            device=self.low.device,
            dtype=self.low.dtype,
            generator=generator,
        )

    def _check_noise(
        self,
        noise: torch.Tensor | None,
        batch_shape: torch.Size,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        if noise is None:
            return self.draw_noise(batch_shape, generator)
        expected = (*batch_shape, self.num_steps + 1, self.action_dim)
        if tuple(noise.shape) != expected:
            raise ValueError(f"noise must have shape {expected}, got {tuple(noise.shape)}.")
        return noise

    @abstractmethod
    def initial_latent(self, noise: torch.Tensor) -> torch.Tensor:
        """``x_0`` from standard normals ``[*B, A]``; it carries no gradient."""

    @abstractmethod
    def sample(
        self,
        observation: torch.Tensor,
        noise: torch.Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> DenoisingChain:
        """Draw a differentiable chain.

        Args:
            observation (torch.Tensor): ``[*B, O]``.
            noise (torch.Tensor, optional): standard normals ``[*B, N + 1, A]``. Drawn if not given.

        Keyword Args:
            generator (torch.Generator, optional): random generator for the noise.

        Returns:
            DenoisingChain: latents, means and scales.
        """

    @abstractmethod
    def sample_detached(
        self,
        observation: torch.Tensor,
        noise: torch.Tensor | None = None,
        *,
        initial_latent: torch.Tensor | None = None,
        step_sizes: torch.Tensor | None = None,
    ) -> DenoisingChain:
        """Draw a chain whose means carry no gradient, the path of a frozen policy.

        Args:
            observation (torch.Tensor): ``[*B, O]``.
            noise (torch.Tensor, optional): standard normals ``[*B, N + 1, A]``.

        Keyword Args:
            initial_latent (torch.Tensor, optional): ``x_0`` ``[*B, A]`` instead of the model's own.
            step_sizes (torch.Tensor, optional): step sizes ``[N]`` instead of the model's own.

        Returns:
            DenoisingChain: latents, detached means and scales.
        """

    @abstractmethod
    def deterministic_chain(self, observation: torch.Tensor) -> DenoisingChain:
        """The noise-free chain, a function of the observation alone, and the kernels along it.

        Args:
            observation (torch.Tensor): ``[*B, O]``.

        Returns:
            DenoisingChain: every latent after the first is the mean of its kernel.
        """

    @abstractmethod
    def step_kernels(
        self, observation: torch.Tensor, *, step_sizes: torch.Tensor | None = None
    ) -> Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]:
        """The kernels one at a time, for sampling, with the observations entering the network once.

        Args:
            observation (torch.Tensor): ``[*B, O]``.

        Keyword Args:
            step_sizes (torch.Tensor, optional): step sizes ``[N]`` instead of the model's own.

        Returns:
            Callable: ``kernel(latent, n)``, with ``x_n`` ``[*B, A]`` and the step ``n``. It returns the
            mean ``[*B, A]`` and the scale ``[A]`` or ``[*B, A]``.
        """

    # -- scoring -----------------------------------------------------------------

    @abstractmethod
    def kernels_along(
        self,
        observation: torch.Tensor,
        latents: torch.Tensor,
        *,
        step_sizes: torch.Tensor | None = None,
    ) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """:meth:`score` in parts, with the observations entering the network once.

        Args:
            observation (torch.Tensor): ``[*B, O]``.
            latents (torch.Tensor): chain ``[*B, N + 1, A]``.

        Keyword Args:
            step_sizes (torch.Tensor, optional): step sizes ``[N]`` instead of the model's own.

        Returns:
            Callable: ``kernels(rows=None, steps=slice(None))``; ``rows`` are integers that index the
            first dimension, ``steps`` is a slice of ``K`` steps or their indices ``[*b, K]``. It
            returns means ``[*b, K, A]`` and scales ``[K, A]`` or ``[*b, K, A]``.
        """

    def score(
        self,
        observation: torch.Tensor,
        latents: torch.Tensor,
        *,
        step_sizes: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Kernels of this model at the states of a given chain, all steps in one batched call.

        Args:
            observation (torch.Tensor): ``[*B, O]``.
            latents (torch.Tensor): chain ``[*B, N + 1, A]``, from any policy.

        Keyword Args:
            step_sizes (torch.Tensor, optional): step sizes ``[N]`` instead of the model's own.

        Returns:
            tuple of torch.Tensor: means ``[*B, N, A]`` and scales ``[N, A]`` or ``[*B, N, A]``.
        """
        kernels = self.kernels_along(observation, latents, step_sizes=step_sizes)
        return kernels()

    @abstractmethod
    def log_prob(self, observation: torch.Tensor, chain: DenoisingChain) -> PathLogProb:
        """Log-probability ``L`` of the action of a chain drawn from this model, or what stands for it.

        Args:
            observation (torch.Tensor): ``[*B, O]``.
            chain (DenoisingChain): the chain with this model's means and scales at its states.

        Returns:
            PathLogProb: ``L`` and its pieces, each ``[*B]``.
        """

    def _check_chain(self, latents: torch.Tensor) -> None:
        if latents.shape[-2:] != (self.num_steps + 1, self.action_dim):
            raise ValueError(
                f"A chain of this model has shape [*B, {self.num_steps + 1}, {self.action_dim}], "
                f"got {tuple(latents.shape)}."
            )

    # -- squashing ---------------------------------------------------------------

    def squash(self, latent: torch.Tensor) -> torch.Tensor:
        """Action of a final latent: ``tanh``, then the affine map to ``[low, high]``; ``[*B, A]``."""
        action = latent.tanh()
        # Halved first: the width of a very wide box is infinite.
        center, half = self.high / 2 + self.low / 2, self.high / 2 - self.low / 2
        # Rounding of the affine map can leave the box by one ulp.
        return torch.minimum(torch.maximum(center + half * action, self.low), self.high)

    def saturation(self, action: torch.Tensor) -> torch.Tensor:
        """Fraction of action entries within 1 % of a bound of the box, a scalar."""
        unit = 2 * (action - self.low) / (self.high - self.low) - 1
        return (unit.abs() > 0.98).to(action.dtype).mean()

    def log_volume(self) -> torch.Tensor:
        r"""Log-Jacobian of the map from the unit box: :math:`\sum_i \log\frac{h_i - l_i}{2}`, a scalar.

        ``log_prob + log_volume`` is the log-probability of the action in units of its box, which does
        not depend on the units of the action space.
        """
        return (self.high / 2 - self.low / 2).log().sum()

    def log_det(self, latent: torch.Tensor) -> torch.Tensor:
        r"""Log-Jacobian of :meth:`squash`: :math:`\sum_i 2 (\log 2 - x_i - \mathrm{softplus}(-2 x_i)) + \log\frac{h_i - l_i}{2}`, ``[*B]``."""
        return (2 * (_LOG_2 - latent - F.softplus(-2 * latent))).sum(-1) + self.log_volume()

    def extra_repr(self) -> str:
        return f"action_dim={self.action_dim}, num_steps={self.num_steps}"

"""Distribution over the transitions of a denoising chain."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch.distributions import constraints
from torch.distributions.distribution import Distribution
from torch.distributions.kl import register_kl

from torchrl_trudi.modules.distributions.gaussian import (
    KLName,
    gaussian_entropy,
    gaussian_kl,
    gaussian_log_prob,
)

__all__ = ["DenoisingPath"]


class DenoisingPath(Distribution):
    r"""The forward kernels :math:`F_n(x_{n+1} | x_n) = \mathcal N(\mu_n(x_n), \mathrm{diag}\, \sigma_n^2)` of a chain.

    The parameters are the means and scales at the states :math:`x_n` that a chain visited
    (teacher forcing), so that scoring a chain and comparing two policies on it need no second
    rollout. The prior of :math:`x_0` is left out. It cancels in the ratio and the divergence of
    policies that share it; of policies with a learned prior these are the parts without the prior.

    Args:
        loc (torch.Tensor): means, ``[*B, N, A]``.
        scale (torch.Tensor): standard deviations, ``[*B, N, A]`` or anything that broadcasts to it.
        event_dims (int, optional): ``2``: the whole path is one event, log-probabilities and
            divergences have shape ``[*B]``. ``1``: every step is an event, they have shape
            ``[*B, N]``. Defaults to ``2``.
        validate_args (bool, optional): whether to check the parameters against their constraints.
            Defaults to ``False``.

    Raises:
        ValueError: ``event_dims`` not 1 or 2, or ``loc`` with fewer than 2 dimensions.

    Examples:
        >>> import torch
        >>> from torch.distributions import kl_divergence
        >>> from torchrl_trudi.modules import DenoisingPath
        >>> chain = torch.randn(5, 9, 2)  # 8 steps, 2 actions
        >>> old = DenoisingPath(torch.zeros(5, 8, 2), torch.ones(8, 2))
        >>> new = DenoisingPath(torch.full((5, 8, 2), 0.1), torch.ones(8, 2))
        >>> old.log_prob(chain).shape, kl_divergence(old, new).shape
        (torch.Size([5]), torch.Size([5]))
        >>> kl_divergence(old, new)[0]  # 16 * 0.1 ** 2 / 2
        tensor(0.0800)
    """

    arg_constraints: ClassVar = {
        "loc": constraints.independent(constraints.real, 2),
        "scale": constraints.independent(constraints.positive, 2),
    }
    support = constraints.independent(constraints.real, 2)
    has_rsample = False

    def __init__(
        self,
        loc: torch.Tensor,
        scale: torch.Tensor,
        event_dims: Literal[1, 2] = 2,
        validate_args: bool | None = False,
    ) -> None:
        if event_dims not in (1, 2):
            raise ValueError(f"event_dims must be 1 (per step) or 2 (path), got {event_dims}.")
        if loc.ndim < 2:
            raise ValueError(f"loc must have shape [*B, N, A], got {tuple(loc.shape)}.")
        self.loc = loc
        self.scale = scale
        self.event_dims = event_dims
        self.num_steps = loc.shape[-2]
        batch_shape = loc.shape[:-2] if event_dims == 2 else loc.shape[:-1]
        event_shape = (
            torch.Size([self.num_steps + 1, loc.shape[-1]]) if event_dims == 2 else loc.shape[-1:]
        )
        super().__init__(batch_shape, event_shape, validate_args=validate_args)

    @property
    def mean(self) -> torch.Tensor:
        """Means of ``x_1 .. x_N`` given the visited states, ``[*B, N, A]``."""
        return self.loc

    @property
    def variance(self) -> torch.Tensor:
        """Variances of ``x_1 .. x_N`` given the visited states, ``[*B, N, A]``."""
        return self.scale.square().expand_as(self.loc)

    def expand(self, batch_shape, _instance=None):
        """Expand the batch dimensions, see :meth:`torch.distributions.Distribution.expand`."""
        batch_shape = torch.Size(batch_shape)
        shape = batch_shape + self.loc.shape[-self.event_dims :]
        return type(self)(
            self.loc.expand(shape), self.scale.expand(shape), self.event_dims, validate_args=False
        )

    def sample(self, sample_shape: torch.Size | list[int] | tuple[int, ...] = ()) -> torch.Tensor:
        """Not available: a chain needs the network at every new state.

        Raises:
            NotImplementedError: always; sample with the actor (``DiffusionActor``) instead.
        """
        raise NotImplementedError(
            "DenoisingPath holds the kernels at the states of one recorded chain, so it cannot draw "
            "another chain. Sample with DiffusionActor or DenoisingModel.sample."
        )

    rsample = sample

    def _reduce(self, per_step: torch.Tensor) -> torch.Tensor:
        return per_step.sum(-1) if self.event_dims == 2 else per_step

    def log_prob(self, value: torch.Tensor) -> torch.Tensor:
        """Log-density of a chain's transitions, without the prior of ``x_0``.

        Args:
            value (torch.Tensor): chain ``[*B, N + 1, A]``, index 0 the prior sample.

        Returns:
            torch.Tensor: ``[*B]`` (``event_dims=2``) or ``[*B, N]`` (``event_dims=1``).

        Raises:
            ValueError: the chain does not have one state more than there are steps.
        """
        if value.shape[-2] != self.num_steps + 1:
            raise ValueError(
                f"A chain of {self.num_steps} steps has {self.num_steps + 1} states, got a value "
                f"of shape {tuple(value.shape)}."
            )
        return self._reduce(gaussian_log_prob(value[..., 1:, :], self.loc, self.scale))

    def entropy(self) -> torch.Tensor:
        """Entropy of the transitions in nats, ``[*B]`` or ``[*B, N]``; exact, since the scales depend on no latent."""
        return self._reduce(gaussian_entropy(self.scale.expand_as(self.loc)))

    def kl(self, other: DenoisingPath, kind: KLName = "full") -> torch.Tensor:
        """``KL(self || other)`` on this chain's states.

        Averaged over chains drawn from ``self`` this is an unbiased estimate of the KL divergence of
        the path measures, which bounds that of the action distributions.

        Args:
            other (DenoisingPath): kernels at the same states.
            kind (str, optional): ``"full"`` or ``"simplified"``, see
                :func:`~torchrl_trudi.modules.gaussian_kl`. Defaults to ``"full"``.

        Returns:
            torch.Tensor: ``[*B]`` or ``[*B, N]``, by ``self.event_dims``.
        """
        return self._reduce(gaussian_kl(self.loc, self.scale, other.loc, other.scale, kind))


@register_kl(DenoisingPath, DenoisingPath)
def _kl_denoising_path(p: DenoisingPath, q: DenoisingPath) -> torch.Tensor:
    return p.kl(q)

"""The tanh-Gaussian policy as a tensor-only module: a chain of one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchrl_trudi.modules.chain_model import (
    ChainModel,
    DenoisingChain,
    PathLogProb,
    select_steps,
)
from torchrl_trudi.modules.distributions.gaussian import KLName, gaussian_log_prob

__all__ = ["GaussianModel"]


class GaussianModel(ChainModel):
    r"""A tanh-Gaussian policy, as a chain of one step (the actor of REPPO, arXiv 2507.11019).

    The chain goes from an unused :math:`x_0 = 0` to the latent :math:`x_1 \sim \mathcal N(\mu_\theta(s), \mathrm{diag}\, \sigma_\theta(s)^2)`,
    and the action is :math:`\tanh(x_1)` mapped to the box ``[low, high]``. With one step and no latent
    behind it, everything that a chain has in general is exact here: the log-probability ``L`` is that
    of the action, and the path KL is the KL divergence of the two action distributions. The module
    works on plain tensors; its TensorDict front is :class:`~torchrl_trudi.modules.GaussianActor`.

    Args:
        network (nn.Module): ``network(observation [*B, O])`` returns mean and standard deviation, each
            ``[*B, A]``, such as :class:`~torchrl_trudi.modules.GaussianNetwork`.
        action_dim (int): action size ``A``.

    Keyword Args:
        low (torch.Tensor or float, optional): lower bounds of the action box, ``[A]`` or scalar.
            Defaults to ``-1``.
        high (torch.Tensor or float, optional): upper bounds. Defaults to ``1``.
        device (torch.device, optional): device of the bounds.
        dtype (torch.dtype, optional): dtype of the bounds.

    Raises:
        ValueError: ``action_dim`` below 1, bounds that are not finite or not ``low < high``; a network
            with another number of outputs.

    Examples:
        >>> import torch
        >>> from torchrl_trudi.modules import GaussianModel, GaussianNetwork
        >>> model = GaussianModel(GaussianNetwork(2, 3, hidden_size=16), action_dim=2)
        >>> observation = torch.randn(5, 3)
        >>> chain = model.sample(observation)
        >>> chain.latents.shape, chain.loc.shape, chain.scale.shape
        (torch.Size([5, 2, 2]), torch.Size([5, 1, 2]), torch.Size([5, 1, 2]))
        >>> model.log_prob(observation, chain).log_prob.shape
        torch.Size([5])
    """

    # The scale is as free as the mean: a bound that does not see it would not bound the policy.
    default_kl: KLName = "full"
    default_target_entropy_scale: float = 0.5

    def __init__(
        self,
        network: nn.Module,
        action_dim: int,
        *,
        low: torch.Tensor | float | None = None,
        high: torch.Tensor | float | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(action_dim, num_steps=1)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.network = network
        self._register_box(low, high, torch.zeros((), **factory))

    def step_sizes(self) -> None:
        """``None``: the step has no size."""
        return None

    def kernel(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of the latent.

        Args:
            observation (torch.Tensor): ``[*B, O]``.

        Returns:
            tuple of torch.Tensor: each ``[*B, 1, A]``.
        """
        # In the type of the observation, also where the network answers in another one (autocast).
        loc, scale = (part.to(observation.dtype) for part in self.network(observation))
        for name, value in (("mean", loc), ("standard deviation", scale)):
            if value.shape[-1] != self.action_dim:
                raise ValueError(
                    f"The network's {name} must have shape [*B, {self.action_dim}], "
                    f"got {tuple(value.shape)}."
                )
        return loc.unsqueeze(-2), scale.unsqueeze(-2)

    # -- sampling ----------------------------------------------------------------

    def initial_latent(self, noise: torch.Tensor) -> torch.Tensor:
        """Zeros of the shape of ``noise``, ``[*B, A]``: the chain has no prior."""
        return torch.zeros_like(noise)

    def sample(
        self,
        observation: torch.Tensor,
        noise: torch.Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> DenoisingChain:
        """Draw a latent, differentiable in the network (the reparametrisation trick).

        Args:
            observation (torch.Tensor): ``[*B, O]``.
            noise (torch.Tensor, optional): standard normals ``[*B, 2, A]``, of which index 1 makes the
                latent and index 0 is unused. Drawn if not given.

        Keyword Args:
            generator (torch.Generator, optional): random generator for the noise.

        Returns:
            DenoisingChain: latents ``[*B, 2, A]``, means and scales ``[*B, 1, A]``.

        Raises:
            ValueError: noise of another shape.
        """
        noise = self._check_noise(noise, observation.shape[:-1], generator)
        loc, scale = self.kernel(observation)
        return self._chain(loc + scale * noise[..., 1:, :], loc, scale)

    def sample_detached(
        self,
        observation: torch.Tensor,
        noise: torch.Tensor | None = None,
        *,
        initial_latent: torch.Tensor | None = None,
        step_sizes: torch.Tensor | None = None,
    ) -> DenoisingChain:
        """Draw a latent without gradient.

        Args:
            observation (torch.Tensor): ``[*B, O]``.
            noise (torch.Tensor, optional): standard normals ``[*B, 2, A]``.

        Keyword Args:
            initial_latent (torch.Tensor, optional): unused; for the signature of the base class.
            step_sizes (torch.Tensor, optional): unused, likewise.

        Returns:
            DenoisingChain: see :meth:`sample`.
        """
        with torch.no_grad():
            return self.sample(observation, noise)

    def deterministic_chain(self, observation: torch.Tensor) -> DenoisingChain:
        """The mean in the place of the latent, see :meth:`ChainModel.deterministic_chain`."""
        loc, scale = self.kernel(observation)
        return self._chain(loc, loc, scale)

    def sample_deterministic(self, observation: torch.Tensor) -> torch.Tensor:
        """The chain that ends in the mean.

        Args:
            observation (torch.Tensor): ``[*B, O]``.

        Returns:
            torch.Tensor: latents, ``[*B, 2, A]``.
        """
        return self.deterministic_chain(observation).latents

    def _chain(
        self, latent: torch.Tensor, loc: torch.Tensor, scale: torch.Tensor
    ) -> DenoisingChain:
        latents = torch.cat([self.initial_latent(latent), latent], -2)
        return DenoisingChain(latents, loc, scale)

    def step_kernels(
        self, observation: torch.Tensor, *, step_sizes: torch.Tensor | None = None
    ) -> Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]:
        """See :meth:`ChainModel.step_kernels`; the kernel depends on no latent and no step size."""
        loc, scale = (part.squeeze(-2) for part in self.kernel(observation))
        return lambda latent, n: (loc, scale)

    # -- scoring -----------------------------------------------------------------

    def kernels_along(
        self,
        observation: torch.Tensor,
        latents: torch.Tensor,
        *,
        step_sizes: torch.Tensor | None = None,
    ) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """See :meth:`ChainModel.kernels_along`; the kernel depends on no latent and no step size."""
        self._check_chain(latents)
        pair = self.kernel(observation)

        def kernels(
            rows: torch.Tensor | None = None, steps: slice | torch.Tensor = slice(None)
        ) -> tuple[torch.Tensor, torch.Tensor]:
            loc, scale = pair if rows is None else (part[rows] for part in pair)
            return select_steps(loc, steps), select_steps(scale, steps)

        return kernels

    def log_prob(self, observation: torch.Tensor, chain: DenoisingChain) -> PathLogProb:
        """Log-probability of the action, exact.

        Args:
            observation (torch.Tensor): ``[*B, O]``; not read, the chain has all that is needed.
            chain (DenoisingChain): the chain with this model's means and scales.

        Returns:
            PathLogProb: ``L`` and its pieces, each ``[*B]``; ``running`` is ``L`` and ``terminal`` zero.
        """
        latents, loc, scale = chain
        log_weight = -gaussian_log_prob(latents[..., 1:, :], loc, scale).sum(-1)
        log_det = self.log_det(latents[..., -1, :])
        running = -(log_weight + log_det)
        return PathLogProb(running, running, torch.zeros_like(running), log_weight, log_det)

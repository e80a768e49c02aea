"""The denoising chain as a tensor-only module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from torchrl_trudi.modules._control import ChainControl
from torchrl_trudi.modules.chain_model import (
    ChainModel,
    DenoisingChain,
    PathLogProb,
    select_steps,
)
from torchrl_trudi.modules.distributions.gaussian import KLName, gaussian_log_prob
from torchrl_trudi.modules.step_sizes import StepSizes, inverse_softplus

__all__ = ["DenoisingModel"]

# By how much the uncontrolled steps of a chain can enlarge a latent, all together: the squares of what
# comes out, and their gradients, have to stay within float32.
_LARGEST_GROWTH = 1e8


class DenoisingModel(ChainModel):
    r"""An N-step denoising chain with a learned control (arXiv 2606.15260).

    The chain discretises an Ornstein-Uhlenbeck process that leaves the prior
    :math:`\mathcal N(\mu_0, \mathrm{diag}\, \sigma_0^2)` invariant, steered by a control :math:`u_\theta`:

    .. math::
        \mu_n(x) = x + \eta_n \big(-(x - \mu_0) / \sigma_0^2 + u_\theta(x, s, n)\big), \qquad
        x_{n+1} = \mu_n(x_n) + \sqrt{2 \eta_n}\, \epsilon_n, \qquad \eta_{n,i} = \delta_n / f_i

    with step sizes :math:`\delta_n` and frictions :math:`f_i = \mathrm{softplus}(\phi_i)`. The action
    is :math:`\tanh(x_N)` mapped to the box ``[low, high]``. The module works on plain tensors; its
    TensorDict front is :class:`~torchrl_trudi.modules.DiffusionActor`.

    Args:
        score_network (nn.Module): control ``u(latent [*B, A], observation [*B, O], step [*]) -> [*B, A]``.
            A network with the three ``project_observation`` / ``project_steps`` /
            ``forward_projected`` methods of :class:`~torchrl_trudi.modules.ScoreNetwork` sees the
            observation once per chain instead of once per step.
        action_dim (int): action size ``A``.
        num_steps (int, optional): number of denoising steps ``N``. Defaults to ``8``.

    Keyword Args:
        step_sizes (StepSizes, optional): step sizes. Defaults to the fixed cosine schedule.
        friction (str, optional): ``"per_dim"`` (one per action dimension) or ``"scalar"``.
            Defaults to ``"per_dim"``.
        learn_friction (bool, optional): whether the friction is a parameter (else a buffer).
            Starts at 1. Defaults to ``True``.
        init_std (float, optional): standard deviation of the prior. Defaults to ``2.5``.
        learn_prior (bool, optional): learned mean and (softplus) standard deviation of the prior.
            Defaults to ``False``.
        backward_network (nn.Module, optional): learned control of the backward kernels, called at
            ``(x_{n+1}, n + 1)``; same signature as ``score_network``. Defaults to ``None``
            (uncontrolled).
        low (torch.Tensor or float, optional): lower bounds of the action box, ``[A]`` or scalar.
            Defaults to ``-1``.
        high (torch.Tensor or float, optional): upper bounds. Defaults to ``1``.
        device (torch.device, optional): device of the parameters.
        dtype (torch.dtype, optional): dtype of the parameters.

    Raises:
        ValueError: sizes below 1, unknown ``friction``, ``init_std <= 0``, bounds that are not
            finite or not ``low < high``, step sizes for another number of steps.

    Examples:
        >>> import torch
        >>> from torchrl_trudi.modules import DenoisingModel, ScoreNetwork
        >>> model = DenoisingModel(ScoreNetwork(2, 3, hidden_size=16), action_dim=2, num_steps=4)
        >>> observation = torch.randn(5, 3)
        >>> chain = model.sample(observation)
        >>> chain.latents.shape, chain.loc.shape, chain.scale.shape
        (torch.Size([5, 5, 2]), torch.Size([5, 4, 2]), torch.Size([4, 2]))
        >>> loc, scale = model.score(observation, chain.latents)  # all steps in one call
        >>> torch.testing.assert_close(loc, chain.loc)
        >>> model.log_prob(observation, chain).log_prob.shape
        torch.Size([5])
    """

    # The friction, and with it the scales, hardly moves: the published runs leave it out of the KL.
    default_kl: KLName = "simplified"
    default_target_entropy_scale: float = 4.0
    step_sizes: StepSizes
    prior_std: torch.Tensor
    _steps: torch.Tensor

    def __init__(
        self,
        score_network: nn.Module,
        action_dim: int,
        num_steps: int = 8,
        *,
        step_sizes: StepSizes | None = None,
        friction: Literal["per_dim", "scalar"] = "per_dim",
        learn_friction: bool = True,
        init_std: float = 2.5,
        learn_prior: bool = False,
        backward_network: nn.Module | None = None,
        low: torch.Tensor | float | None = None,
        high: torch.Tensor | float | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(action_dim, num_steps)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        if friction not in ("per_dim", "scalar"):
            raise ValueError(f"friction must be 'per_dim' or 'scalar', got {friction!r}.")
        if not init_std > 0:
            raise ValueError(f"init_std must be positive, got {init_std}.")
        if step_sizes is None:
            step_sizes = StepSizes(num_steps, **factory)
        elif step_sizes.num_steps != num_steps:
            raise ValueError(
                f"step_sizes are for {step_sizes.num_steps} steps, the chain has {num_steps}."
            )
        self.score_network = score_network
        self.backward_network = backward_network
        self.step_sizes = step_sizes
        friction_raw = inverse_softplus(
            torch.ones(action_dim if friction == "per_dim" else 1, **factory)
        )
        if learn_friction:
            self.friction_raw = nn.Parameter(friction_raw)
        else:
            self.register_buffer("friction_raw", friction_raw)
        self.learn_prior = learn_prior
        self._init_std = float(init_std)
        std = torch.full((action_dim,), float(init_std), **factory)
        if learn_prior:
            self.prior_mean = nn.Parameter(torch.zeros(action_dim, **factory))
            self.prior_std_raw = nn.Parameter(inverse_softplus(std))
        else:
            self.register_buffer("prior_std", std)
        self._register_box(low, high, std)
        self.register_buffer("_steps", torch.arange(num_steps + 1, **factory), persistent=False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set friction and prior to their initial values; networks and step sizes reset themselves."""
        one = torch.ones_like(self.friction_raw)
        self.friction_raw.copy_(inverse_softplus(one))
        if self.learn_prior:
            self.prior_mean.zero_()
            self.prior_std_raw.copy_(inverse_softplus(self._init_std * torch.ones_like(self.low)))

    # -- kernels -----------------------------------------------------------------

    def prior(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of the prior, each ``[A]``."""
        if self.learn_prior:
            return self.prior_mean, F.softplus(self.prior_std_raw)
        return torch.zeros_like(self.prior_std), self.prior_std

    def friction(self) -> torch.Tensor:
        """Friction ``f``, ``[A]``."""
        # The floor only matters once softplus underflows; it keeps 1 / f finite.
        floor = torch.finfo(self.friction_raw.dtype).tiny ** 0.25
        return F.softplus(self.friction_raw).clamp_min(floor).expand(self.action_dim)

    def kernel_coefficients(
        self, step_sizes: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        r"""Coefficients of all kernels.

        Args:
            step_sizes (torch.Tensor, optional): step sizes ``[N]`` to use instead of the model's own.

        Returns:
            tuple of torch.Tensor: :math:`\eta` and :math:`\sqrt{2\eta}`, each ``[N, A]``. Where the friction
            vanishes, :math:`\eta` stops where the steps :math:`1 - \eta / \sigma_0^2` would make a chain grow
            without bound (:math:`11 \sigma_0^2` for 8 steps).
        """
        sizes = self.step_sizes() if step_sizes is None else step_sizes
        eta = sizes.unsqueeze(-1) / self.friction()
        limit = (1 + _LARGEST_GROWTH ** (1 / self.num_steps)) * self.prior()[1].detach().square()
        eta = torch.minimum(eta, limit)
        return eta, (2 * eta).sqrt()

    def drift(self, latent: torch.Tensor) -> torch.Tensor:
        """Uncontrolled drift ``-(x - mu_0) / sigma_0^2``, same shape as ``latent``."""
        mean, std = self.prior()
        return (mean - latent) / std.square()

    def _affine_drift(self, eta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The uncontrolled step as ``keep * x + shift``, hoisted out of the chain's loop.

        Args:
            eta (torch.Tensor): ``[N, A]``.

        Returns:
            tuple: ``keep`` ``[N, A]`` and ``shift`` ``[N, A]``, which is ``None`` where it is zero.
        """
        mean, std = self.prior()
        rate = eta / std.square()
        return 1 - rate, rate * mean if self.learn_prior else None

    def _control(self, observation: torch.Tensor) -> ChainControl:
        """The control of the forward kernels."""
        return ChainControl(self.score_network, observation, self._steps[:-1])

    def _mean_function(
        self,
        eta: torch.Tensor,
        control: ChainControl,
        score_scale: float = 1.0,
    ) -> Callable[[torch.Tensor, int], torch.Tensor]:
        """The mean of the step from ``x_n`` as a function of the latent and ``n``."""
        keeps, shifts = self._affine_drift(eta)
        keep = keeps.unbind(0)
        shift = None if shifts is None else shifts.unbind(0)
        gains = (eta if score_scale == 1.0 else score_scale * eta).unbind(0)

        def mean(latent: torch.Tensor, n: int) -> torch.Tensor:
            drifted = latent * keep[n]
            if shift is not None:
                drifted = drifted + shift[n]
            return torch.addcmul(drifted, gains[n], control.at(latent, n))

        return mean

    # -- sampling ----------------------------------------------------------------

    def initial_latent(self, noise: torch.Tensor) -> torch.Tensor:
        """``x_0`` from standard normals ``[*B, A]``; it carries no gradient."""
        mean, std = self.prior()
        return (mean + std * noise).detach()

    def sample(
        self,
        observation: torch.Tensor,
        noise: torch.Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> DenoisingChain:
        """Draw a chain from the stochastic process.

        The result is differentiable in the network, step sizes and friction through the whole chain.

        Args:
            observation (torch.Tensor): ``[*B, O]``.
            noise (torch.Tensor, optional): standard normals ``[*B, N + 1, A]``; index 0 makes
                ``x_0``, index ``n + 1`` the step from ``x_n``. Drawn if not given.

        Keyword Args:
            generator (torch.Generator, optional): random generator for the noise.

        Returns:
            DenoisingChain: latents, means and scales.

        Raises:
            ValueError: noise of another shape.
        """
        batch_shape = observation.shape[:-1]
        noise = self._check_noise(noise, batch_shape, generator)
        eta, scale = self.kernel_coefficients()
        control = self._control(observation)
        step = self._mean_function(eta, control)
        # All steps' increments at once, and views of them: no work per step but the network's.
        increments = (scale * noise[..., 1:, :]).unbind(-2)
        latent = self.initial_latent(noise[..., 0, :])
        latents, means = [latent], []
        for n in range(self.num_steps):
            means.append(step(latent, n))
            latent = means[-1] + increments[n]
            latents.append(latent)
        return DenoisingChain(torch.stack(latents, -2), torch.stack(means, -2), scale)

    def sample_detached(
        self,
        observation: torch.Tensor,
        noise: torch.Tensor | None = None,
        *,
        initial_latent: torch.Tensor | None = None,
        step_sizes: torch.Tensor | None = None,
    ) -> DenoisingChain:
        """Draw a chain whose means carry no gradient.

        This is the path of the frozen policy in the reference estimator of the path KL. Gradients
        flow only through the noise scale, and only if ``step_sizes`` require them.

        Args:
            observation (torch.Tensor): ``[*B, O]``.
            noise (torch.Tensor, optional): standard normals ``[*B, N + 1, A]``.

        Keyword Args:
            initial_latent (torch.Tensor, optional): ``x_0`` ``[*B, A]``; by default made from
                ``noise`` and this model's prior.
            step_sizes (torch.Tensor, optional): step sizes ``[N]`` instead of the model's own.

        Returns:
            DenoisingChain: latents, detached means and scales.
        """
        noise = self._check_noise(noise, observation.shape[:-1])
        eta, scale = self.kernel_coefficients(step_sizes)
        with torch.no_grad():
            control = self._control(observation)
            step = self._mean_function(eta, control)
        latent = self.initial_latent(noise[..., 0, :]) if initial_latent is None else initial_latent
        latents, means = [latent], []
        for n in range(self.num_steps):
            with torch.no_grad():
                means.append(step(latent, n))
            latent = means[-1] + scale[n] * noise[..., n + 1, :]
            latents.append(latent)
        return DenoisingChain(torch.stack(latents, -2), torch.stack(means, -2), scale)

    def sample_deterministic(
        self,
        observation: torch.Tensor,
        initial_latent: torch.Tensor | None = None,
        *,
        score_scale: float = 1.0,
    ) -> torch.Tensor:
        r"""The noise-free chain :math:`x_{n+1} = x_n + \eta_n (-(x_n - \mu_0) / \sigma_0^2 + k\, u_\theta)`.

        Args:
            observation (torch.Tensor): ``[*B, O]``.
            initial_latent (torch.Tensor, optional): ``x_0``, ``[*B, A]``. Defaults to the prior mean,
                which makes the action a function of the observation alone.

        Keyword Args:
            score_scale (float, optional): factor ``k`` of the control. Defaults to ``1``.

        Returns:
            torch.Tensor: latents, ``[*B, N + 1, A]``.
        """
        eta, _ = self.kernel_coefficients()
        control = self._control(observation)
        step = self._mean_function(eta, control, score_scale)
        if initial_latent is None:
            mean, _ = self.prior()
            initial_latent = mean.expand(*observation.shape[:-1], self.action_dim)
        latent = initial_latent
        latents = [latent]
        for n in range(self.num_steps):
            latent = step(latent, n)
            latents.append(latent)
        return torch.stack(latents, -2)

    def deterministic_chain(self, observation: torch.Tensor) -> DenoisingChain:
        """See :meth:`ChainModel.deterministic_chain`; it starts at the prior mean."""
        latents = self.sample_deterministic(observation)
        # The noise-free step is the kernel's mean.
        _, scale = self.kernel_coefficients()
        return DenoisingChain(latents, latents[..., 1:, :], scale)

    def step_kernels(
        self, observation: torch.Tensor, *, step_sizes: torch.Tensor | None = None
    ) -> Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]:
        """See :meth:`ChainModel.step_kernels`."""
        eta, scale = self.kernel_coefficients(step_sizes)
        mean, scales = self._mean_function(eta, self._control(observation)), scale.unbind(0)
        return lambda latent, n: (mean(latent, n), scales[n])

    # -- scoring -----------------------------------------------------------------

    def control(
        self, observation: torch.Tensor, latents: torch.Tensor, steps: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The control at given states of the chain, in one batched call.

        Args:
            observation (torch.Tensor): ``[*B, O]``.
            latents (torch.Tensor): states ``[*B, K, A]``.
            steps (torch.Tensor, optional): their step indices, integers ``[*B, K]``. Defaults to
                ``None``: ``K = N``, in order.

        Returns:
            torch.Tensor: ``[*B, K, A]``.
        """
        return self._control(observation).along(latents, slice(None) if steps is None else steps)

    def kernels_along(
        self,
        observation: torch.Tensor,
        latents: torch.Tensor,
        *,
        step_sizes: torch.Tensor | None = None,
    ) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """See :meth:`ChainModel.kernels_along`."""
        self._check_chain(latents)
        eta, scale = self.kernel_coefficients(step_sizes)
        keep, shift = self._affine_drift(eta)
        control = self._control(observation)

        def kernels(
            rows: torch.Tensor | None = None, steps: slice | torch.Tensor = slice(None)
        ) -> tuple[torch.Tensor, torch.Tensor]:
            part, latent = control, latents[..., :-1, :]
            shared = isinstance(steps, slice)
            if shared:  # before the rows, which are copied
                latent = select_steps(latent, steps)
            if rows is not None:
                part, latent = control.take(rows), latent[rows]
            if not shared:
                latent = select_steps(latent, steps)
            drifted = latent * keep[steps]
            if shift is not None:
                drifted = drifted + shift[steps]
            return torch.addcmul(drifted, eta[steps], part.along(latent, steps)), scale[steps]

        return kernels

    def backward_mean(self, observation: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """Means of the backward kernels ``B_n(x_n | x_{n+1})``, ``[*B, N, A]``.

        Args:
            observation (torch.Tensor): ``[*B, O]``; read only by a learned backward control.
            latents (torch.Tensor): chain ``[*B, N + 1, A]``.
        """
        eta, _ = self.kernel_coefficients()
        latent = latents[..., 1:, :]
        drift = self.drift(latent)
        if self.backward_network is not None:
            control = ChainControl(self.backward_network, observation, self._steps[1:])
            drift = drift + control.along(latent)
        return latent + eta * drift

    def sample_backward(
        self,
        observation: torch.Tensor,
        final: torch.Tensor,
        noise: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        r"""Draw a chain backwards from where it ends, with the backward kernels.

        :math:`x_n \sim B_n(\cdot | x_{n+1})` for :math:`n = N-1, \dots, 0`. It is differentiable in
        ``final``, step sizes, friction, a learned prior and a learned backward control. Without the
        latter it takes no network call.

        Args:
            observation (torch.Tensor): ``[*B, O]``; read only by a learned backward control.
            final (torch.Tensor): final latents :math:`x_N`, ``[*B, A]``.
            noise (torch.Tensor, optional): standard normals ``[*B, N, A]``; index ``n`` makes
                :math:`x_n`. Drawn if not given.

        Returns:
            tuple of torch.Tensor: the chain ``[*B, N + 1, A]``, which ends in ``final``, and
            :math:`\sum_n \log B_n(x_n | x_{n+1})`, ``[*B]``.

        Raises:
            ValueError: noise of another shape.
        """
        expected = (*final.shape[:-1], self.num_steps, self.action_dim)
        if noise is None:
            noise = torch.randn(expected, device=final.device, dtype=self.low.dtype)
        elif tuple(noise.shape) != expected:
            raise ValueError(f"noise must have shape {expected}, got {tuple(noise.shape)}.")
        eta, scale = self.kernel_coefficients()
        keep, shift = self._affine_drift(eta)
        control = None
        if self.backward_network is not None:
            control = ChainControl(self.backward_network, observation, self._steps[1:])
        latent = final
        latents = [latent]
        for n in reversed(range(self.num_steps)):
            mean = latent * keep[n]
            if shift is not None:
                mean = mean + shift[n]
            if control is not None:
                mean = mean + eta[n] * control.at(latent, n)
            latent = mean + scale[n] * noise[..., n, :]
            latents.append(latent)
        # Of a draw with this noise: exact, where differences of latents would cancel.
        log_prob = gaussian_log_prob(noise, torch.zeros_like(scale), torch.ones_like(scale))
        log_prob = (log_prob - scale.log().sum(-1)).sum(-1)
        return torch.stack(latents[::-1], -2), log_prob

    def log_prob(self, observation: torch.Tensor, chain: DenoisingChain) -> PathLogProb:
        r"""Log-probability surrogate ``L`` of a chain drawn from this model.

        :math:`E[L | s] \ge E[\log \pi(a | s)]`; ``L`` stands for the log-probability of the action
        everywhere (arXiv 2606.15260).

        Args:
            observation (torch.Tensor): ``[*B, O]``.
            chain (DenoisingChain): the chain with this model's means and scales at its states.

        Returns:
            PathLogProb: ``L`` and its pieces, each ``[*B]``.
        """
        latents, loc, scale = chain
        forward = gaussian_log_prob(latents[..., 1:, :], loc, scale)
        backward = gaussian_log_prob(
            latents[..., :-1, :], self.backward_mean(observation, latents), scale
        )
        log_weight = (backward - forward).sum(-1)
        log_det = self.log_det(latents[..., -1, :])
        terminal = gaussian_log_prob(latents[..., 0, :], *self.prior())
        running = -(log_weight + log_det)
        return PathLogProb(running + terminal, running, terminal, log_weight, log_det)

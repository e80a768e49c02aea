"""A policy whose kernels are projected onto a trust region around a frozen copy of its network."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch

from torchrl_trudi.modules.chain_model import ChainModel, DenoisingChain, PathLogProb
from torchrl_trudi.modules.distributions.gaussian import KLName
from torchrl_trudi.modules.distributions.projection import project_gaussian

__all__ = ["KernelPair", "ProjectedModel"]


class KernelPair(NamedTuple):
    """Kernels of the anchor and of the trainable model at the same states.

    Fields:
        loc_anchor (torch.Tensor): the anchor's means, ``[*B, N, A]``.
        scale_anchor (torch.Tensor): the anchor's standard deviations, ``[N, A]`` or ``[*B, N, A]``.
        loc (torch.Tensor): the trainable model's means, not projected, ``[*B, N, A]``.
        scale (torch.Tensor): the trainable model's standard deviations, likewise.
    """

    loc_anchor: torch.Tensor
    scale_anchor: torch.Tensor
    loc: torch.Tensor
    scale: torch.Tensor


class ProjectedModel(ChainModel):
    r"""A chain whose every kernel is projected onto the trust region around a frozen anchor.

    It holds a trainable model and a frozen copy of it, the anchor, and its kernels are

    .. math::
        F_n(\cdot | x, s) = \mathrm{proj}\big(F^\theta_n(\cdot | x, s);\ F^{anchor}_n(\cdot | x, s),\ \epsilon / N\big)

    with the projection of :func:`~torchrl_trudi.modules.project_gaussian`, in the spirit of trust-region
    projection layers (arXiv 2101.09207). It samples, scores and evaluates (the noise-free chain too) with
    these. So, at every state, latent and step, visited or not, and whatever the trainable model answers:
    :math:`\mathrm{KL}(F^{anchor}_n \| F_n) \le \epsilon / N`, and the path KL from the anchor is at most
    :math:`\epsilon`. Every step has the same share, because a chain is sampled before its later steps are
    known. With ``kl="simplified"`` the scale is that of the trainable model, outside of the
    trust region, as this divergence does not read it.

    The price is a second evaluation of the network at each step, and its backward pass with respect
    to the latent (the anchor's parameters get no gradient).

    **From one iteration to the next.** Iteration :math:`k` acts with
    :math:`\pi_k = \mathrm{proj}(\theta_k; anchor_k)`. At the start of the update :meth:`update_anchor` sets
    :math:`anchor_{k+1} := \theta_k`, the network without the projection: the projection is no network, and
    projecting onto :math:`\pi_k` itself would take :math:`anchor_k` too, and so on, one more network per
    iteration. So the new policy is within :math:`\epsilon` of :math:`\theta_k`, and of :math:`\pi_k` as far as
    :math:`\theta_k` stands for it. A regression term
    (:meth:`~torchrl_trudi.objectives.TrajectoryKLProjection.regression`) pulls :math:`\theta` to the projection
    to that end, and :class:`~torchrl_trudi.objectives.TrajectoryKLProjection` reports
    what is left on the visited states, :math:`\mathrm{KL}(\pi_k \| \theta_k)`, as ``anchor_gap``. With equal
    scales the root of the KL is a norm, so that there
    :math:`\mathrm{KL}(\pi_k \| \pi_{k+1}) \le (\sqrt{\epsilon} + \sqrt{gap})^2`.

    The prior of :math:`x_0` is the trainable model's; a learned one is outside of the trust region, as with
    the other modes of :class:`~torchrl_trudi.objectives.TrajectoryKLProjection`.

    Args:
        model (ChainModel): the trainable model. The anchor is a copy of it as it is now.
        eps (float, optional): bound on the path KL from the anchor, in nats. Defaults to ``0.1``.

    Keyword Args:
        kl (str, optional): ``"simplified"`` or ``"full"``, see :func:`~torchrl_trudi.modules.gaussian_kl`.
            Defaults to ``None``, the model's own.

    Raises:
        ValueError: ``eps <= 0``, an unknown ``kl``.
        TypeError: the model is projected already.

    Examples:
        >>> import torch
        >>> from torchrl_trudi.modules import DenoisingModel, ProjectedModel, ScoreNetwork
        >>> model = DenoisingModel(ScoreNetwork(2, 3, hidden_size=16), action_dim=2, num_steps=4)
        >>> projected = ProjectedModel(model, eps=0.1)
        >>> _ = torch.nn.init.normal_(model.score_network.output.weight)  # a huge step
        >>> observation = torch.randn(5, 3)
        >>> chain = projected.sample(observation)
        >>> old, _ = projected.anchor.score(observation, chain.latents)
        >>> kl = ((chain.loc - old) / chain.scale).square().sum(-1) / 2
        >>> bool((kl <= 0.1 / 4 + 1e-6).all())
        True
    """

    eps: float

    def __init__(self, model: ChainModel, eps: float = 0.1, *, kl: KLName | None = None) -> None:
        if isinstance(model, ProjectedModel):
            raise TypeError("The model is projected already.")
        if not eps > 0:
            raise ValueError(f"eps must be positive, got {eps}.")
        if kl is None:
            kl = model.default_kl
        if kl not in ("simplified", "full"):
            raise ValueError(f"kl must be 'simplified' or 'full', got {kl!r}.")
        super().__init__(model.action_dim, model.num_steps)
        self.model = model
        self.anchor = copy.deepcopy(model).requires_grad_(False)
        self._register_box(model.low, model.high, model.low)
        # A setting, not state: a checkpoint must not bring back the one it was made with.
        # A number: as a buffer it would be among the parameters of a loss in functional form, and so state.
        self.eps = float(eps)
        self.kl_type = self.default_kl = kl
        self.default_target_entropy_scale = model.default_target_entropy_scale

    def step_sizes(self) -> torch.Tensor | None:
        """Step sizes of the trainable model."""
        return self.model.step_sizes()

    @torch.no_grad()
    def update_anchor(self) -> None:
        """Copy the trainable model as it is, buffers included and not projected, into the anchor.

        Call it once per iteration, before the first update:
        :meth:`~torchrl_trudi.objectives.TrajectoryKLProjection.update_old_policy` does.
        """
        for kind in ("parameters", "buffers"):
            pairs = zip(getattr(self.anchor, kind)(), getattr(self.model, kind)(), strict=True)
            for old, new in pairs:
                old.copy_(new)

    def project(self, pair: KernelPair) -> tuple[torch.Tensor, torch.Tensor]:
        """The kernels of this policy from those of its two models.

        Args:
            pair (KernelPair): kernels, ``[*B, A]`` or ``[*B, K, A]``.

        Returns:
            tuple of torch.Tensor: means and scales.
        """
        return project_gaussian(*pair, self.eps / self.num_steps, self.kl_type)

    # -- sampling ----------------------------------------------------------------

    def initial_latent(self, noise: torch.Tensor) -> torch.Tensor:
        """``x_0`` from standard normals ``[*B, A]``; it carries no gradient."""
        return self.model.initial_latent(noise)

    def step_kernels(
        self, observation: torch.Tensor, *, step_sizes: torch.Tensor | None = None
    ) -> Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]:
        """See :meth:`ChainModel.step_kernels`; projected."""
        # The anchor's mean is a function of the latent, through which the gradient passes.
        old, new = (
            part.step_kernels(observation, step_sizes=step_sizes)
            for part in (self.anchor, self.model)
        )
        return lambda latent, n: self.project(KernelPair(*old(latent, n), *new(latent, n)))

    def sample(
        self,
        observation: torch.Tensor,
        noise: torch.Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> DenoisingChain:
        """See :meth:`ChainModel.sample`; differentiable in the trainable model.

        Raises:
            ValueError: noise of another shape.
        """
        noise = self._check_noise(noise, observation.shape[:-1], generator)
        return self._chain(observation, noise, self.initial_latent(noise[..., 0, :]), None)

    def _chain(
        self,
        observation: torch.Tensor,
        noise: torch.Tensor,
        latent: torch.Tensor,
        step_sizes: torch.Tensor | None,
    ) -> DenoisingChain:
        kernel = self.step_kernels(observation, step_sizes=step_sizes)
        latents, means, scales = [latent], [], []
        for n in range(self.num_steps):
            loc, scale = kernel(latents[-1], n)
            means.append(loc)
            scales.append(scale)
            latents.append(loc + scale * noise[..., n + 1, :])
        return DenoisingChain(*(torch.stack(parts, -2) for parts in (latents, means, scales)))

    def sample_detached(
        self,
        observation: torch.Tensor,
        noise: torch.Tensor | None = None,
        *,
        initial_latent: torch.Tensor | None = None,
        step_sizes: torch.Tensor | None = None,
    ) -> DenoisingChain:
        """See :meth:`ChainModel.sample_detached`; without any gradient."""
        noise = self._check_noise(noise, observation.shape[:-1])
        if initial_latent is None:
            initial_latent = self.initial_latent(noise[..., 0, :])
        with torch.no_grad():
            return self._chain(observation, noise, initial_latent, step_sizes)

    def deterministic_chain(self, observation: torch.Tensor) -> DenoisingChain:
        """See :meth:`ChainModel.deterministic_chain`; every latent is a projected mean."""
        shape = (*observation.shape[:-1], self.num_steps + 1, self.action_dim)
        return self.sample(observation, self.low.new_zeros(shape))

    # -- scoring -----------------------------------------------------------------

    def pairs_along(
        self,
        observation: torch.Tensor,
        latents: torch.Tensor,
        *,
        step_sizes: torch.Tensor | None = None,
    ) -> Callable[..., KernelPair]:
        """:meth:`kernels_along` before the projection.

        Args:
            observation (torch.Tensor): ``[*B, O]``.
            latents (torch.Tensor): chain ``[*B, N + 1, A]``.

        Keyword Args:
            step_sizes (torch.Tensor, optional): step sizes ``[N]`` instead of the models' own.

        Returns:
            Callable: ``pairs(rows=None, steps=slice(None))``, see :meth:`kernels_along`; it returns a
            :class:`KernelPair`.
        """
        old, new = (
            part.kernels_along(observation, latents, step_sizes=step_sizes)
            for part in (self.anchor, self.model)
        )
        return lambda *args, **kwargs: KernelPair(*old(*args, **kwargs), *new(*args, **kwargs))

    def kernels_along(
        self,
        observation: torch.Tensor,
        latents: torch.Tensor,
        *,
        step_sizes: torch.Tensor | None = None,
    ) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """See :meth:`ChainModel.kernels_along`; projected."""
        pairs = self.pairs_along(observation, latents, step_sizes=step_sizes)
        return lambda *args, **kwargs: self.project(pairs(*args, **kwargs))

    def log_prob(self, observation: torch.Tensor, chain: DenoisingChain) -> PathLogProb:
        r"""The trainable model's ``log_prob`` of a projected chain.

        It takes means and scales from the chain. The backward kernels of a denoising chain have the
        chain's scale too, and the drift of the trainable model's friction: where ``kl="full"`` has changed the
        scale, the two belong to slightly different processes. The surrogate's bound,
        :math:`E[L] \ge E[\log \pi]`, holds for any backward kernels, and so for these.

        Args:
            observation (torch.Tensor): ``[*B, O]``.
            chain (DenoisingChain): the chain with the projected means and scales.

        Returns:
            PathLogProb: ``L`` and its pieces, each ``[*B]``.
        """
        return self.model.log_prob(observation, chain)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, eps={self.eps:g}, kl={self.kl_type!r}"

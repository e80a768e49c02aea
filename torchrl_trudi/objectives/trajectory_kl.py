"""Trust region over the denoising path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, TensorDictParams
from tensordict.nn import dispatch
from torch import nn
from torchrl.objectives.common import LossModule
from torchrl.objectives.utils import _reduce

from torchrl_trudi.modules._feed_forward import check_feed_forward
from torchrl_trudi.modules.chain_model import select_steps
from torchrl_trudi.modules.distributions.gaussian import KLName, gaussian_kl
from torchrl_trudi.modules.distributions.projection import ShareName, project_path
from torchrl_trudi.modules.projected_model import KernelPair, ProjectedModel
from torchrl_trudi.modules.tensordict_module import ChainActor

__all__ = ["PathKL", "ProjectedPathKL", "TrajectoryKLProjection"]

Mode = Literal["switch", "penalty", "lagrangian", "projection", "none"]
MODES = ("switch", "penalty", "lagrangian", "projection", "none")
Reduction = Literal["mean", "sum", "none"]
REDUCTIONS = ("mean", "sum", "none")


def check_not_empty(tensordict: TensorDictBase) -> None:
    """Raise ValueError for a batch without rows, of which there is no mean."""
    if not tensordict.batch_size.numel():
        raise ValueError(f"The batch is empty: its shape is {tuple(tensordict.shape)}.")


class PathKL(NamedTuple):
    """Path KL of a batch of states.

    Fields:
        per_step (torch.Tensor): the chosen divergence of each step, mean over paths, ``[*B, N]``.
        per_step_full (torch.Tensor): the full divergence of each step, detached, ``[*B, N]``.
    """

    per_step: torch.Tensor
    per_step_full: torch.Tensor

    @property
    def kl(self) -> torch.Tensor:
        """Path KL per state, ``[*B]``."""
        return self.per_step.sum(-1)


class ProjectedPathKL(NamedTuple):
    """Path KL of a batch of states in ``mode="projection"``.

    "Old" is the policy that acted; the "center" is the one around which the kernels are projected:
    the anchor of a :class:`~torchrl_trudi.modules.ProjectedModel`, else the old policy itself.

    Fields:
        per_step (torch.Tensor): KL(old || projected) of each step, ``[*B, N]``.
        per_step_full (torch.Tensor): the full divergence of each step, detached, ``[*B, N]``.
        center (torch.Tensor): KL(center || projected) of each step, at most its share of the bound,
            detached, ``[*B, N]``.
        unprojected (torch.Tensor): KL(center || network) of each step, detached, ``[*B, N]``.
        gap (torch.Tensor): KL(old || center) of each step, detached, ``[*B, N]``.
        regression (torch.Tensor): the term that pulls the network to the projection, weighted by its
            coefficient, ``[*B]``.
    """

    per_step: torch.Tensor
    per_step_full: torch.Tensor
    center: torch.Tensor
    unprojected: torch.Tensor
    gap: torch.Tensor
    regression: torch.Tensor

    @property
    def kl(self) -> torch.Tensor:
        """Path KL per state, ``[*B]``."""
        return self.per_step.sum(-1)


class TrajectoryKLProjection(LossModule):
    r"""Trust region that holds a diffusion policy to the old one at every denoising step (arXiv 2606.15260).

    Of a Gaussian policy, whose chain has one step, it is the KL trust region of REPPO (arXiv 2507.11019).

    The KL divergence of the path measures bounds that of the action distributions, and is a sum of
    closed-form Gaussian terms along a path drawn from the old policy:

    .. math::
        \mathrm{kl}(s) = \sum_n \mathrm{KL}\big(F^{old}_n(\cdot | x_n) \,\|\, F^{new}_n(\cdot | x_n)\big),
        \qquad x \sim \pi_{old}

    How it enters the actor loss :math:`J` with the objective :math:`o(s)`, the bound
    :math:`\epsilon` and the multiplier :math:`\beta`:

    - ``"switch"``: :math:`J = \mathrm{mean}_s [\mathrm{kl}(s) < \epsilon\ ?\ o(s) : \beta\, \mathrm{kl}(s)]`,
      the published gate: each state carries gradient through one branch.
    - ``"lagrangian"``: :math:`J = \mathrm{mean}_s [o(s) + \beta\, \mathrm{kl}(s)]`, learned :math:`\beta`.
    - ``"penalty"``: the same with :math:`\beta` fixed at ``init_multiplier``.
    - ``"projection"``: :math:`J = \mathrm{mean}_s [o(s) + c\, r(s)]`. Every kernel is moved in closed form onto its
      share of the bound (:func:`~torchrl_trudi.modules.project_path`; trust-region projection layers,
      arXiv 2101.09207), so that the objective needs no gate, and :math:`r(s) = \sum_n \mathrm{KL}(\mathrm{sg}(projected_n) \| network_n)`
      pulls the network, which is free to leave the bound, to the projection. See below.
    - ``"none"``: :math:`J = \mathrm{mean}_s\, o(s)`; the KL is only reported.

    **Projection.** What is projected, and around what, depends on the actor:

    - Its model is a :class:`~torchrl_trudi.modules.ProjectedModel`: it acts and is scored with projected
      kernels, around the anchor, and the path KL from the anchor is within the bound at every
      state. The bound holds against the policy that acted up to ``anchor_gap``, see there.
      :class:`~torchrl_trudi.objectives.TruDiLoss`, which samples fresh chains, needs this one. Its
      steps have equal shares, since it acts before it knows the later ones.
    - Any other model: the kernels of the loss are projected around the recorded ones, and the
      path KL from the policy that acted is within the bound on the recorded chain, exactly. It is
      for surrogate objectives, which read the recorded chain alone. The network itself acts,
      without the projection, within the bound as far as the regression has pulled it there.

    :meth:`projected_kernels` scores the recorded chain in both cases.

    :math:`\beta` is kept in log space and moved by
    :math:`J_\beta = -\beta\, \mathrm{sg}(\mathrm{mean}_s (\mathrm{kl}(s) - \epsilon))`.

    A learned prior is outside of the trust region, as in the published estimator: both policies'
    paths start from the current prior, and its own KL is not added.

    Used alone, ``forward`` gives ``loss_trajectory_kl`` (zero for the states inside the bound in
    ``"switch"`` mode) and ``loss_kl_multiplier``, to be added to any other actor loss. A loss that
    has its objective per state calls :meth:`path_kl` and :meth:`combine`, as
    :class:`~torchrl_trudi.objectives.TruDiLoss` does.

    Args:
        actor_network (ChainActor): the policy.

    Keyword Args:
        mode (str, optional): ``"switch"``, ``"penalty"``, ``"lagrangian"``, ``"projection"`` or
            ``"none"``. Defaults to ``"switch"``.
        kl (str, optional): ``"simplified"`` (published) or ``"full"``, see
            :func:`~torchrl_trudi.modules.gaussian_kl`. Defaults to ``None``, the policy's own:
            ``"simplified"`` for a diffusion policy, ``"full"`` for a Gaussian.
        direction (str, optional): ``"forward"``, KL(old || new) on old paths, or ``"reverse"``,
            full KL(new || old) on one differentiable new path, which needs ``old_policy="target"``.
            Defaults to ``"forward"``.
        bound (str, optional): ``"path"``: one bound on the sum over steps. ``"step"``: every step
            is held to ``eps / N``, with a multiplier each. Defaults to ``"path"``.
        eps (float, optional): the bound, in nats. Defaults to ``0.1``.
        init_multiplier (float, optional): initial (or fixed) multiplier. Defaults to ``0.01``.
        old_policy (str, optional): ``"recorded"``: the path, means and scales that the actor wrote
            while collecting, so that one batched network call is all. ``"target"``: fresh paths from
            a frozen copy of the actor, refreshed by :meth:`update_old_policy`; the reference
            estimator. ``"replayed"``: the recorded path once more, made by that copy from the noise
            that the actor wrote (``return_noise=True``): about a third of the memory of the record,
            for one pass of the old network over the chain at each call.
            Defaults to ``"recorded"``.
        num_paths (int, optional): fresh paths per state with ``"target"``. Defaults to ``1``.
        reduction (str, optional): ``"mean"`` or ``"sum"`` over the states, or ``"none"``: both losses of
            ``forward`` per state, ``[*B]``. Inside of another loss, that loss's counts.
            The diagnostics are means always. Defaults to ``"mean"``.
        share (str, optional): with ``"projection"``, the share of the bound that each step gets:
            ``"uniform"``, ``eps / N``, or ``"proportional"``, in proportion to its KL before the
            projection, see :func:`~torchrl_trudi.modules.project_path`. Defaults to ``"uniform"``.
        regression_coeff (float, optional): with ``"projection"``, the coefficient :math:`c`.
            Defaults to ``1.0``.

    Raises:
        NotImplementedError: a recurrent policy.
        ValueError: an unknown choice, ``eps <= 0``, ``init_multiplier <= 0``, ``num_paths < 1``,
            several paths without ``"target"`` or with ``"reverse"``, or ``"reverse"`` without
            ``"target"``: it needs the old network on a path of the new policy, and a batch has only
            a path of the old one; ``"projection"`` with ``"target"``: it needs the kernels that acted;
            ``"proportional"`` in another mode, with ``bound="step"`` or with an actor that acts
            projected; such an actor in another mode, or with another ``eps`` or ``kl`` than its own;
            ``regression_coeff < 0``.
        KeyError: ``forward`` without the recorded entries.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_trudi.modules import DiffusionActor, ScoreNetwork
        >>> from torchrl_trudi.objectives import TrajectoryKLProjection
        >>> actor = DiffusionActor(
        ...     2, score_network=ScoreNetwork(2, 3, hidden_size=16),
        ...     return_chain=True, return_dist_params=True,
        ... )
        >>> with torch.no_grad():
        ...     data = actor(TensorDict({"observation": torch.randn(4, 3)}, [4]))
        >>> trust_region = TrajectoryKLProjection(actor, mode="lagrangian")
        >>> losses = trust_region(data)
        >>> bool(losses["kl"] < 1e-6)  # the policy has not moved yet
        True
        >>> (losses["loss_trajectory_kl"] + losses["loss_kl_multiplier"]).backward()
    """

    @dataclass
    class _AcceptedKeys:
        """Tensordict keys that can be set with ``set_keys``.

        Attributes:
            chain (NestedKey): recorded chain. Defaults to the actor's.
            loc (NestedKey): recorded means. Defaults to the actor's.
            scale (NestedKey): recorded scales. Defaults to the actor's.
            noise (NestedKey): recorded standard normals. Defaults to the actor's.
        """

        chain: NestedKey = ("denoising", "chain")
        loc: NestedKey = ("denoising", "loc")
        scale: NestedKey = ("denoising", "scale")
        noise: NestedKey = ("denoising", "noise")

    default_keys = _AcceptedKeys
    actor_network: ChainActor
    actor_network_params: TensorDictParams
    target_actor_network_params: TensorDictParams

    def __init__(
        self,
        actor_network: ChainActor,
        *,
        mode: Mode = "switch",
        kl: KLName | None = None,
        direction: Literal["forward", "reverse"] = "forward",
        bound: Literal["path", "step"] = "path",
        eps: float = 0.1,
        init_multiplier: float = 0.01,
        old_policy: Literal["recorded", "replayed", "target"] = "recorded",
        num_paths: int = 1,
        reduction: Reduction = "mean",
        share: ShareName = "uniform",
        regression_coeff: float = 1.0,
    ) -> None:
        # Before anything is asked of it: a policy with a recurrent part is a sequence of modules.
        check_feed_forward(actor_network, "policy")
        if kl is None:
            kl = actor_network.module.default_kl
        for name, value, choices in (
            ("mode", mode, MODES),
            ("kl", kl, ("simplified", "full")),
            ("direction", direction, ("forward", "reverse")),
            ("bound", bound, ("path", "step")),
            ("old_policy", old_policy, ("recorded", "replayed", "target")),
            ("reduction", reduction, REDUCTIONS),
            ("share", share, ("uniform", "proportional")),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {value!r}.")
        if not (eps > 0 and init_multiplier > 0):
            raise ValueError(
                f"eps and init_multiplier must be positive, got {eps} and {init_multiplier}."
            )
        if num_paths < 1:
            raise ValueError(f"num_paths must be at least 1, got {num_paths}.")
        if old_policy != "target" and num_paths > 1:
            raise ValueError(
                f"A batch holds one recorded path per state; num_paths={num_paths} needs "
                "old_policy='target'."
            )
        if direction == "reverse" and num_paths > 1:
            raise ValueError(f"direction='reverse' uses one path, got num_paths={num_paths}.")
        if old_policy != "target" and direction == "reverse":
            raise ValueError(
                "direction='reverse' evaluates the old network on a path of the new policy, which "
                "needs old_policy='target'."
            )
        self._check_projection(actor_network, mode, kl, bound, eps, old_policy, share)
        if not regression_coeff >= 0:
            raise ValueError(f"regression_coeff must not be negative, got {regression_coeff}.")
        super().__init__()
        self._in_keys: list[NestedKey] | None = None
        self._out_keys: list[NestedKey] | None = None
        self.convert_to_functional(
            actor_network, "actor_network", create_target_params=old_policy != "recorded"
        )
        # The targets are refreshed by update_old_policy, not by a TargetNetUpdater.
        self._has_update_associated["actor_network"] = True
        self.mode, self.kl_type, self.direction = mode, kl, direction
        self.bound, self.old_policy, self.num_paths = bound, old_policy, num_paths
        self.reduction = reduction
        self.share: ShareName = share
        if mode == "projection":
            self.metric_keys = (*self.metric_keys, *self.projection_metric_keys)
        self.num_steps = actor_network.num_steps
        reference = next(actor_network.parameters())
        size = 1 if bound == "path" else self.num_steps
        log_multiplier = reference.new_full((size,), init_multiplier, requires_grad=False).log()
        if mode in ("switch", "lagrangian"):
            self.log_multiplier = nn.Parameter(log_multiplier)
        else:
            self.register_buffer("log_multiplier", log_multiplier, persistent=False)
        # Kept: where the parameters are swapped for others, the multiplier may be a plain tensor.
        self._learns_multiplier = isinstance(self.log_multiplier, nn.Parameter)
        # Settings, not state: a checkpoint must not bring back those it was made with.
        self.register_buffer("eps", reference.new_tensor(eps), persistent=False)
        self.register_buffer(
            "regression_coeff", reference.new_tensor(float(regression_coeff)), persistent=False
        )
        keys = actor_network.tensor_keys
        self.set_keys(chain=keys.chain, loc=keys.loc, scale=keys.scale, noise=keys.noise)

    @staticmethod
    def _check_projection(
        actor: ChainActor, mode: str, kl: str, bound: str, eps: float, old_policy: str, share: str
    ) -> None:
        """What does not go together in or outside of ``mode="projection"``."""
        model = actor.module
        acts_projected = isinstance(model, ProjectedModel)
        if mode == "projection" and old_policy == "target":
            raise ValueError(
                "mode='projection' needs the kernels of the policy that acted: old_policy='recorded' "
                "or 'replayed', not 'target'."
            )
        if mode != "projection" and acts_projected:
            raise ValueError(
                f"The actor's model is a ProjectedModel, which needs mode='projection', got {mode!r}."
            )
        if share == "proportional":
            if mode != "projection":
                raise ValueError(f"share='proportional' needs mode='projection', got {mode!r}.")
            if bound == "step":
                raise ValueError(
                    "bound='step' gives every step eps / N; share='proportional' needs bound='path'."
                )
            if acts_projected:
                raise ValueError(
                    "share='proportional' needs the KL of all steps of a chain, which an actor that "
                    "acts projected (ProjectedModel) does not know before the chain is made; use "
                    "share='uniform'."
                )
        if isinstance(model, ProjectedModel):
            own = (model.eps, model.kl_type)
            if (float(eps), kl) != own:
                raise ValueError(
                    f"The trust region has eps={eps:g} and kl={kl!r}, the ProjectedModel of its actor "
                    f"eps={own[0]:g} and kl={own[1]!r}: they must be the same."
                )

    def _forward_value_estimator_keys(self, **kwargs) -> None:
        # No value estimator here.
        self._in_keys = None

    @property
    def in_keys(self) -> list[NestedKey]:
        """Keys that ``forward`` reads."""
        if self._in_keys is not None:
            return self._in_keys
        keys = list(self.actor_network.observation_keys)
        if self.old_policy == "recorded":
            keys += [self.tensor_keys.chain, self.tensor_keys.loc, self.tensor_keys.scale]
        elif self.old_policy == "replayed":
            keys.append(self.tensor_keys.noise)
        return keys

    @in_keys.setter
    def in_keys(self, values) -> None:
        self._in_keys = values

    @property
    def out_keys(self) -> list[NestedKey]:
        """Keys of the output of ``forward``."""
        if self._out_keys is None:
            self._out_keys = ["loss_trajectory_kl", "loss_kl_multiplier", *self.metric_keys]
        return self._out_keys

    @out_keys.setter
    def out_keys(self, values) -> None:
        self._out_keys = values

    metric_keys: tuple[str, ...] = (
        "kl",
        "kl_full",
        "kl_per_step",
        "kl_max",
        "gate_fraction",
        "kl_multiplier",
    )
    projection_metric_keys = ("kl_projected_max", "kl_unprojected", "anchor_gap", "regression")

    # -- the divergence ------------------------------------------------------------

    @property
    def multiplier(self) -> torch.Tensor:
        """The multiplier ``beta``, ``[1]`` or ``[N]``."""
        return self.log_multiplier.exp()

    def path_kl(
        self, tensordict: TensorDictBase, noise: torch.Tensor | None = None
    ) -> PathKL | ProjectedPathKL:
        """Path KL between the old and the current policy at each state.

        Args:
            tensordict (TensorDictBase): states ``[*B]``, with the recorded chain if
                ``old_policy="recorded"``, and with the noise if it is ``"replayed"``.
            noise (torch.Tensor, optional): standard normals of the fresh paths with ``"target"``:
                ``[*B, num_paths, N + 1, A]``, without the ``num_paths`` dimension in the reverse
                direction. Drawn if not given.

        Returns:
            PathKL: the divergence of every step; a :class:`ProjectedPathKL` in ``"projection"`` mode.
        """
        if self.mode == "projection":
            return self.projected_kernels(tensordict)[2]
        if self.old_policy != "target":
            return self._recorded_kl(self.replay(tensordict))
        if self.direction == "forward":
            return self._target_kl(tensordict, noise)
        return self._reverse_kl(tensordict, noise)

    @torch.no_grad()
    def replay(self, tensordict: TensorDictBase) -> TensorDictBase:
        """With ``old_policy="replayed"``, the states with the record of the old policy's chain.

        Args:
            tensordict (TensorDictBase): states ``[*B]`` with the recorded noise.

        Returns:
            TensorDictBase: a copy with chain, means and scales; the input itself if it has them, or
            with another ``old_policy``.

        Raises:
            KeyError: no recorded noise.
        """
        keys = self.tensor_keys
        if self.old_policy != "replayed" or tensordict.get(keys.chain, None) is not None:
            return tensordict
        noise = tensordict.get(keys.noise, None)
        if noise is None:
            raise KeyError(
                f"The recorded noise is not in the batch (key {keys.noise}): collect with an actor "
                "built with return_noise=True."
            )
        actor = self.actor_network
        # Without autocast, as it was acted.
        with (
            torch.autocast(noise.device.type, enabled=False),
            self.target_actor_network_params.to_module(actor, preserve_module_state=False),
        ):
            chain = actor.module.sample(actor.observation(tensordict), noise)
        # Made anew: of a call without a tensordict, a nested part that holds the noise alone has all of
        # its dimensions for batch dimensions, in which the means do not fit.
        tensordict = TensorDict(
            dict(tensordict.items(True, True)), tensordict.batch_size, device=tensordict.device
        )
        tensordict.set(keys.chain, chain.latents)
        tensordict.set(keys.loc, chain.loc)
        return tensordict.set(keys.scale, chain.scale.expand_as(chain.loc))

    def _recorded(self, tensordict: TensorDictBase) -> tuple[torch.Tensor, ...]:
        """The recorded chain, its means and its scales, each ``[*B, ., A]``."""
        if self.old_policy == "target":
            raise ValueError(
                "This needs the chain that acted: old_policy='recorded' or 'replayed', not 'target'."
            )
        recorded = []
        for role in ("chain", "loc", "scale"):
            key = getattr(self.tensor_keys, role)
            recorded.append(tensordict.get(key, None))
            if recorded[-1] is None:
                raise KeyError(
                    f"The recorded {role} is not in the batch (key {key}): collect with an actor "
                    "built with return_chain=True and return_dist_params=True, or use "
                    "old_policy='target'."
                )
        steps = (*recorded[0].shape[:-2], self.num_steps, recorded[0].shape[-1])
        for role, entry in zip(("loc", "scale"), recorded[1:], strict=True):
            if entry.shape != steps:  # it would broadcast
                raise ValueError(
                    f"The recorded {role} must have the shape {steps} beside a chain of "
                    f"{tuple(recorded[0].shape)}, got {tuple(entry.shape)}."
                )
        # The old policy is a constant, also if it was recorded with gradients on.
        return tuple(entry.detach() for entry in recorded)

    def _recorded_kl(self, tensordict: TensorDictBase) -> PathKL:
        latents, _, _ = self._recorded(tensordict)
        with self.actor_network_params.to_module(self.actor_network, preserve_module_state=False):
            observation = self.actor_network.observation(tensordict)
            loc, scale = self.actor_network.module.score(observation, latents)
        return self.compare(tensordict, loc, scale)

    def compare(self, tensordict: TensorDictBase, loc: torch.Tensor, scale: torch.Tensor) -> PathKL:
        """Path KL of kernels that have been evaluated already, for a loss that scores the chain itself.

        Args:
            tensordict (TensorDictBase): states ``[*B]`` with the recorded chain.
            loc (torch.Tensor): the current policy's means at the recorded chain, ``[*B, N, A]``.
            scale (torch.Tensor): its scales, anything that broadcasts to it.

        Returns:
            PathKL: the divergence of every step.

        Raises:
            ValueError: ``old_policy="target"``, which has no recorded chain.
            KeyError: nothing recorded.
        """
        _, loc_old, scale_old = self._recorded(tensordict)
        return self._compare(loc_old, scale_old, loc, scale)

    # -- the projection ------------------------------------------------------------

    def project(
        self,
        loc_old: torch.Tensor,
        scale_old: torch.Tensor,
        loc: torch.Tensor,
        scale: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Kernels of all steps of a chain, moved inside the bound around old ones.

        Args:
            loc_old (torch.Tensor): old means, ``[*B, N, A]``.
            scale_old (torch.Tensor): old standard deviations, broadcastable.
            loc (torch.Tensor): the network's means, ``[*B, N, A]``.
            scale (torch.Tensor): the network's standard deviations, broadcastable.

        Returns:
            tuple of torch.Tensor: means and scales, see :func:`~torchrl_trudi.modules.project_path`.
        """
        return project_path(
            loc_old, scale_old, loc, scale, self.eps, kind=self.kl_type, share=self.share
        )

    def regression(
        self,
        loc_projected: torch.Tensor,
        scale_projected: torch.Tensor,
        loc: torch.Tensor,
        scale: torch.Tensor,
    ) -> torch.Tensor:
        """The coefficient times ``KL(sg(projected) || network)``, which the network is to minimise.

        Args:
            loc_projected (torch.Tensor): projected means, ``[*B, N, A]``; no gradient reaches them.
            scale_projected (torch.Tensor): projected standard deviations, likewise.
            loc (torch.Tensor): the network's means, ``[*B, N, A]``.
            scale (torch.Tensor): the network's standard deviations, broadcastable.

        Returns:
            torch.Tensor: ``[*B]``; 0 where the projection has left the kernels as they were.
        """
        goal = loc_projected.detach(), scale_projected.detach()
        return self.regression_coeff * gaussian_kl(*goal, loc, scale, self.kl_type).sum(-1)

    def projected_kernels(
        self, tensordict: TensorDictBase
    ) -> tuple[torch.Tensor, torch.Tensor, ProjectedPathKL]:
        """Score the recorded chain with projected kernels: all that a surrogate objective needs.

        One call of the network on all steps; a second one, of the anchor, if the actor acts projected.

        Args:
            tensordict (TensorDictBase): states ``[*B]`` with the recorded chain.

        Returns:
            tuple: means ``[*B, N, A]`` and scales, differentiable, for the likelihood of the chain,
            and the divergences, for :meth:`combine` and :meth:`metrics`.

        Raises:
            ValueError: another ``mode``.
            KeyError: nothing recorded.
        """
        if self.mode != "projection":
            raise ValueError(f"This needs mode='projection', got {self.mode!r}.")
        tensordict = self.replay(tensordict)
        latents, loc_old, scale_old = self._recorded(tensordict)
        with self.actor_network_params.to_module(self.actor_network, preserve_module_state=False):
            model = self.actor_network.module
            observation = self.actor_network.observation(tensordict)
            if isinstance(model, ProjectedModel):
                pair = model.pairs_along(observation, latents)()
            else:
                pair = KernelPair(loc_old, scale_old, *model.score(observation, latents))
        (center_loc, center_scale), network = pair[:2], pair[2:]
        loc, scale = self.project(center_loc, center_scale, *network)
        moved = self._compare(loc_old, scale_old, loc, scale)
        with torch.no_grad():
            center = gaussian_kl(center_loc, center_scale, loc, scale, self.kl_type)
            unprojected = gaussian_kl(center_loc, center_scale, *network, self.kl_type)
            gap = gaussian_kl(loc_old, scale_old, center_loc, center_scale, self.kl_type)
        kl = ProjectedPathKL(
            moved.per_step,
            moved.per_step_full,
            center=center,
            unprojected=unprojected,
            gap=gap,
            regression=self.regression(loc, scale, *network),
        )
        return loc, scale, kl

    def sampled_penalty(self, tensordict: TensorDictBase, steps: torch.Tensor) -> torch.Tensor:
        """An estimate of :meth:`penalty` from some steps of the recorded chain.

        Args:
            tensordict (TensorDictBase): states ``[B]`` with the recorded chain.
            steps (torch.Tensor): indices ``[B, K]``, drawn evenly.

        Returns:
            torch.Tensor: ``[B]``, unbiased.

        Raises:
            ValueError: ``old_policy="target"``, which has no recorded chain.
            KeyError: nothing recorded.
        """
        tensordict = self.replay(tensordict)
        latents, loc_old, scale_old = self._recorded(tensordict)
        with self.actor_network_params.to_module(self.actor_network, preserve_module_state=False):
            observation = self.actor_network.observation(tensordict)
            kernels = self.actor_network.module.kernels_along(observation, latents)
            loc, scale = kernels(steps=steps)
        loc_old, scale_old = select_steps(loc_old, steps), select_steps(scale_old, steps)
        per_step = self._compare(loc_old, scale_old, loc, scale).per_step
        multiplier = self.multiplier.detach()
        if self.bound == "step":
            multiplier = multiplier[steps]
        return self.num_steps / steps.shape[-1] * (multiplier * per_step).sum(-1)

    @torch.no_grad()
    def split(
        self, tensordict: TensorDictBase, *, complete: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, PathKL]:
        """Sort states into those inside and those beyond their bound, on the recorded chain.

        The KL of a step is never negative. So the steps are evaluated two by two, and a state whose
        steps exceed the bound is beyond it, whatever the others are: they are not evaluated.

        Args:
            tensordict (TensorDictBase): states ``[B]`` with the recorded chain.

        Keyword Args:
            complete (bool, optional): evaluate all steps of all states. Defaults to ``False``.

        Returns:
            tuple: integer indices of the states inside and of those beyond, and the KL of the
            former, or, if ``complete``, of the former followed by the latter.

        Raises:
            ValueError: ``old_policy="target"``, which has no recorded chain.
            KeyError: nothing recorded.
        """
        tensordict = self.replay(tensordict)
        latents, loc_old, scale_old = self._recorded(tensordict)
        size, num_steps = loc_old.shape[0], self.num_steps
        left = torch.arange(size, device=loc_old.device)
        inside = left.new_ones(size, dtype=torch.bool)
        result: PathKL | None = None
        with self.actor_network_params.to_module(self.actor_network, preserve_module_state=False):
            observation = self.actor_network.observation(tensordict)
            kernels = self.actor_network.module.kernels_along(observation, latents)
            for start in range(0, num_steps, 2):
                steps = slice(start, start + 2)
                rows = None if len(left) == size else left
                loc, scale = kernels(rows, steps)
                index = slice(None) if rows is None else rows
                kl = self._compare(loc_old[index, steps], scale_old[index, steps], loc, scale)
                if result is None:
                    # What is not evaluated stays zero: the test below is that of the whole path.
                    result = PathKL(*(part.new_zeros(size, num_steps) for part in kl))
                for total, part in zip(result, kl, strict=True):
                    total[left, steps] = part
                if not complete:
                    seen = PathKL(*(part[left] for part in result))
                    keep = self.inside(seen)
                    inside[left] = keep
                    left = left[keep]
                    if not len(left):
                        break
        assert result is not None
        if complete:
            inside = self.inside(result)
        within, beyond = inside.nonzero().squeeze(-1), (~inside).nonzero().squeeze(-1)
        order = torch.cat([within, beyond]) if complete else within
        return within, beyond, PathKL(*(part[order] for part in result))

    def _target_kl(self, tensordict: TensorDictBase, noise: torch.Tensor | None) -> PathKL:
        actor = self.actor_network
        observation = actor.observation(tensordict)
        observation = observation.unsqueeze(-2).expand(
            *observation.shape[:-1], self.num_paths, observation.shape[-1]
        )
        with self.actor_network_params.to_module(actor, preserve_module_state=False):
            # Both kernels use the current step sizes, so that learned sizes do not count as a
            # divergence of the controls; they then carry gradient through the old path's noise.
            step_sizes = actor.module.step_sizes()
            if noise is None:
                noise = actor.module.draw_noise(observation.shape[:-1])
            initial = actor.module.initial_latent(noise[..., 0, :])
        with self.target_actor_network_params.to_module(actor, preserve_module_state=False):
            old = actor.module.sample_detached(
                observation, noise, initial_latent=initial, step_sizes=step_sizes
            )
        with self.actor_network_params.to_module(actor, preserve_module_state=False):
            loc, scale = actor.module.score(observation, old.latents)
        kl = self._compare(old.loc, old.scale, loc, scale)
        return PathKL(kl.per_step.mean(-2), kl.per_step_full.mean(-2))

    def _reverse_kl(self, tensordict: TensorDictBase, noise: torch.Tensor | None) -> PathKL:
        actor = self.actor_network
        with self.actor_network_params.to_module(actor, preserve_module_state=False):
            observation = actor.observation(tensordict)
            step_sizes = actor.module.step_sizes()
            new = actor.module.sample(observation, noise)
        with self.target_actor_network_params.to_module(actor, preserve_module_state=False):
            loc_old, scale_old = actor.module.score(observation, new.latents, step_sizes=step_sizes)
        kl = gaussian_kl(new.loc, new.scale, loc_old, scale_old, "full")
        return PathKL(kl, kl.detach())

    def _compare(self, loc_old, scale_old, loc, scale) -> PathKL:
        per_step = gaussian_kl(loc_old, scale_old, loc, scale, self.kl_type)
        if self.kl_type == "full":
            return PathKL(per_step, per_step.detach())
        with torch.no_grad():
            return PathKL(per_step, gaussian_kl(loc_old, scale_old, loc, scale, "full"))

    # -- the losses ------------------------------------------------------------------

    def inside(self, kl: PathKL | ProjectedPathKL) -> torch.Tensor:
        """Whether each state is strictly inside its bound, boolean ``[*B]``.

        In ``"projection"`` mode: whether its kernels are so without the projection.
        """
        if isinstance(kl, ProjectedPathKL):
            if self.share == "uniform":
                return (kl.unprojected < self.eps / self.num_steps).all(-1)
            return kl.unprojected.sum(-1) < self.eps
        if self.bound == "path":
            return kl.kl < self.eps
        return (kl.per_step < self.eps / self.num_steps).all(-1)

    def penalty(self, kl: PathKL | ProjectedPathKL) -> torch.Tensor:
        """The KL weighted by the detached multiplier, ``[*B]``."""
        multiplier = self.multiplier.detach()
        if self.bound == "path":
            return multiplier * kl.kl
        return (multiplier * kl.per_step).sum(-1)

    def combine(self, objective: torch.Tensor, kl: PathKL | ProjectedPathKL) -> torch.Tensor:
        """Join a per-state objective and the trust region.

        Args:
            objective (torch.Tensor): loss to minimise per state, ``[*B]``.
            kl (PathKL): from :meth:`path_kl`.

        Returns:
            torch.Tensor: per-state loss, ``[*B]``.
        """
        if self.mode == "switch":
            return torch.where(self.inside(kl), objective, self.penalty(kl))
        if isinstance(kl, ProjectedPathKL):
            return objective + kl.regression
        if self.mode == "none":
            return objective
        return objective + self.penalty(kl)

    def multiplier_loss(
        self, kl: PathKL | ProjectedPathKL, reduction: Reduction | None = None
    ) -> torch.Tensor:
        """The dual loss ``J_beta``; zero where the multiplier is fixed.

        Args:
            kl (PathKL): from :meth:`path_kl`.
            reduction (str, optional): instead of the module's own. Defaults to ``None``.

        Returns:
            torch.Tensor: a scalar, or ``[*B]`` with ``"none"``.
        """
        per_step = kl.per_step.detach()
        if not (self._learns_multiplier or self.log_multiplier.requires_grad):
            loss = torch.zeros_like(per_step[..., 0])
        elif self.bound == "path":
            loss = -(self.multiplier * (per_step.sum(-1, keepdim=True) - self.eps)).sum(-1)
        else:
            loss = -(self.multiplier * (per_step - self.eps / self.num_steps)).sum(-1)
        return _reduce(loss, self.reduction if reduction is None else reduction)

    def metrics(self, kl: PathKL | ProjectedPathKL) -> dict[str, torch.Tensor]:
        """Detached diagnostics: scalars, and ``kl_per_step`` ``[N]``.

        In ``"projection"`` mode, with the center that :class:`ProjectedPathKL` speaks of, also
        ``kl_projected_max``, KL(center || projected), the largest of the batch, which is at most ``eps``;
        ``kl_unprojected``, KL(center || network); ``anchor_gap``, KL(old || center), 0 unless the actor acts
        projected; and the mean ``regression`` term.
        """
        projection: dict[str, torch.Tensor] = {}
        if isinstance(kl, ProjectedPathKL):
            projection = {
                "kl_projected_max": kl.center.sum(-1).max(),
                "kl_unprojected": kl.unprojected.sum(-1).mean(),
                "anchor_gap": kl.gap.sum(-1).mean(),
                "regression": kl.regression.detach().mean(),
            }
        with torch.no_grad():
            per_state = kl.kl.detach()
            per_step = kl.per_step.detach().reshape(-1, self.num_steps).mean(0)
            return {
                "kl": per_state.mean(),
                "kl_full": kl.per_step_full.sum(-1).mean(),
                "kl_per_step": per_step,
                "kl_max": per_state.max(),
                "gate_fraction": self.inside(kl).to(per_state.dtype).mean(),
                "kl_multiplier": self.multiplier.mean(),
                **projection,
            }

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The trust region's losses and diagnostics.

        Args:
            tensordict (TensorDictBase): states, see :meth:`path_kl`.

        Returns:
            TensorDict: ``loss_trajectory_kl``, ``loss_kl_multiplier`` and the ``metric_keys``.

        Raises:
            ValueError: an empty batch.
        """
        check_not_empty(tensordict)
        kl = self.path_kl(tensordict)
        loss = _reduce(self.combine(torch.zeros_like(kl.kl), kl), self.reduction)
        return TensorDict(
            {
                "loss_trajectory_kl": loss,
                "loss_kl_multiplier": self.multiplier_loss(kl),
                **self.metrics(kl),
            }
        )

    def reset_parameters_recursive(self) -> None:
        """Reset the policy's parameters; the old policy becomes a copy of the new one."""
        with self.actor_network_params.to_module(self.actor_network, preserve_module_state=False):
            self.actor_network.reset_parameters_recursive()
        self.update_old_policy()

    @torch.no_grad()
    def update_old_policy(self) -> None:
        """Copy the current policy, buffers included, into the old one.

        Call it once per iteration, before the first update. With ``old_policy="recorded"`` the old
        policy is in the batch and there is nothing to copy. It moves the anchor of an actor that
        acts projected, too (:meth:`ProjectedModel.update_anchor`): the actor acts by its network
        right after.
        """
        if self.old_policy != "recorded":
            # With the anchor of then: together they are the policy that acted.
            self.target_actor_network_params.data.update_(self.actor_network_params.data)
        model = self.actor_network.module
        if isinstance(model, ProjectedModel):
            with self.actor_network_params.to_module(
                self.actor_network, preserve_module_state=False
            ):
                model.update_anchor()

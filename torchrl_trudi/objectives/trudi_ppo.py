"""Clipped likelihood-ratio objective on a recorded chain, with a trust region on its path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from tensordict import (
    LazyStackedTensorDict,
    NestedKey,
    TensorDict,
    TensorDictBase,
    TensorDictParams,
    unravel_key,
)
from tensordict.nn import TensorDictModule, dispatch
from torchrl.objectives import ClipPPOLoss, ValueEstimators
from torchrl.objectives.value import ValueEstimatorBase, VTrace

from torchrl_trudi.modules.chain_model import DenoisingChain
from torchrl_trudi.modules.distributions import DenoisingPath
from torchrl_trudi.modules.tensordict_module import ChainActor, HLGaussValueOperator
from torchrl_trudi.objectives._parameters import ActorCriticParameters
from torchrl_trudi.objectives.trajectory_kl import (
    REDUCTIONS,
    PathKL,
    ProjectedPathKL,
    Reduction,
    TrajectoryKLProjection,
    check_not_empty,
)

__all__ = ["TruDiPPOLoss"]

EntropyName = Literal["path", "surrogate"]

_LARGEST_LOG_RATIO = 40.0


class _ProjectedPath(DenoisingPath):
    """Projected kernels with the divergences that were measured on the way to them."""

    def __init__(
        self, loc: torch.Tensor, scale: torch.Tensor, event_dims: Any, *, path_kl: ProjectedPathKL
    ) -> None:
        super().__init__(loc, scale, event_dims)
        self.path_kl = path_kl


class TruDiPPOLoss(ActorCriticParameters, ClipPPOLoss):
    r"""PPO on the denoising chain, held to the old policy at every denoising step.

    The chain that acted is scored once by the current policy, all steps in one batched call. From
    that come the likelihood ratio, the entropy and the path KL:

    .. math::
        \rho(s) = \prod_n \frac{F_n(x_{n+1} | x_n)}{F^{old}_n(x_{n+1} | x_n)}, \qquad
        o(s) = -\min\big(\rho A,\ \mathrm{clip}(\rho, 1 - \epsilon_c, 1 + \epsilon_c) A\big) - c\, H(s)

    and the actor's loss is :math:`\mathrm{mean}_s\, \mathrm{combine}(o(s), \mathrm{kl}(s))` with ``combine``
    of :class:`~torchrl_trudi.objectives.TrajectoryKLProjection`. The clipped objective is that of
    :class:`~torchrl.objectives.ClipPPOLoss` (arXiv 1707.06347), whose arguments, keys and value
    estimators (:class:`~torchrl.objectives.value.GAE` by default) it has; with ``mode="none"`` it is that
    loss. The chain is the action of the decision process here: its ratio bounds nothing on the
    action's own, which is intractable, but has the same expected gradient at the old policy.

    With an actor of ``event_dims=2`` there is one ratio for the path. With ``event_dims=1`` every step
    has one, and is clipped by itself; the objective is the sum over steps, so that both forms have
    the same gradient at the old policy (:class:`~torchrl.objectives.ClipPPOLoss` takes the mean).

    **Projection.** With a trust region of ``mode="projection"`` ratio, entropy and KL are those of the
    projected kernels :math:`\tilde F_n` (:meth:`~TrajectoryKLProjection.projected_kernels`), and the actor's
    loss is :math:`\mathrm{mean}_s [\tilde o(s) + c_r\, r(s)]` with the regression term :math:`r(s)` under
    ``"loss_trajectory_kl"``. What holds depends on the actor:

    - Any actor: the kernels are projected around the recorded ones. The policy that the objective
      improves is within ``eps`` of the one that acted, on every recorded state, whatever the network
      answers. The network, which acts next, is so as far as the regression has pulled it there.
      ``share="uniform"`` or ``"proportional"``.
    - An actor that acts projected (:class:`~torchrl_trudi.modules.ProjectedModel`): the kernels are those it
      would act with, within ``eps`` of its anchor at every state, visited or not. The anchor is the
      network of the last iteration, not its projection: once :meth:`update_old_policy` has moved it, the ratio
      to the policy that acted is 1 but for what ``anchor_gap`` measures. ``share="uniform"`` alone.

    The objective has no gradient along the path on which a kernel beyond its bound was projected (with
    proportional shares: along those of all kernels together), whatever the advantage: what leads back
    inside is the regression.

    With a :class:`~torchrl_trudi.modules.GaussianActor` this is PPO, with a KL trust region.

    Args:
        actor_network (ChainActor): the policy. It must have recorded the chain, its means and scales
            and its forward log-probability (``return_chain``, ``return_dist_params`` and
            ``return_path_log_prob``).
        critic_network (TensorDictModule, optional): value of a state, under ``"state_value"``. An
            :class:`~torchrl_trudi.modules.HLGaussValueOperator` of the observation alone is regressed by
            cross-entropy to the HL-Gauss targets (arXiv 2403.03950), any other by ``loss_critic_type``.
            ``None`` needs ``critic_coeff=0``.

    Keyword Args:
        trajectory_kl (TrajectoryKLProjection, optional): the trust region, built on
            ``actor_network``, with ``old_policy="recorded"``. Defaults to
            ``TrajectoryKLProjection(actor_network)``.
        entropy (str, optional): whose entropy is rewarded. ``"path"``: that of the chain's kernels,
            in closed form; of a Gaussian policy, that before the squashing. ``"surrogate"``:
            :math:`-L`, the stand-in for the entropy of the action (of a Gaussian policy, the entropy
            itself), estimated on the recorded chain as
            :math:`-\mathrm{mean}\, \mathrm{clip}(\rho) (L - \bar L)`, with the batch's mean
            :math:`\bar L` as baseline. Defaults to ``"path"``.
        clip_epsilon (float or tuple of float, optional): clip range of the ratio. Defaults to ``0.2``.
        entropy_coeff (float, optional): weight :math:`c`. Defaults to ``0.0``, which leaves the entropy out
            of the loss and logs it.
        normalize_advantage (bool, optional): standardise the advantage over the batch; over those of all
            processes, if the attribute ``sum_over_ranks`` is set.
            Defaults to ``True``.
        critic_coeff (float, optional): weight of the critic's loss. Defaults to ``1.0``.
        loss_critic_type (str, optional): ``"l1"``, ``"l2"`` or ``"smooth_l1"``, for a critic without
            histogram. Defaults to ``"l2"``.
        reduction (str, optional): ``"mean"`` or ``"sum"`` over the states, or ``"none"``: every loss per
            state, ``[*B]``; that of ``trajectory_kl`` does not count. The diagnostics are means always.
            Defaults to ``"mean"``.
        **kwargs: further arguments of :class:`~torchrl.objectives.ClipPPOLoss`: ``clip_value`` (not
            with a histogram critic), ``advantage_norm``, ``delay_actor`` (not with a projection),
            ``max_importance_ratio``, ``normalize_advantage_exclude_dims``, ``log_explained_variance``,
            ``device``.

    Raises:
        ValueError: a trust region on another actor, or that has no recorded path
            (``old_policy="target"`` or ``"replayed"``); ``delay_actor`` with a projection; an unknown
            ``entropy`` or ``reduction``; a critic that reads the action; ``clip_value`` with a histogram
            critic; ``functional=False``; another ``action`` key than the chain's; an empty batch.
        KeyError: missing entries in the batch.
        NotImplementedError: the value estimator V-trace, which draws an action from the kernels of
            the recorded chain, where none can be drawn.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_trudi.modules import (
        ...     DiffusionActor, HLGaussCritic, HLGaussValueOperator, ScoreNetwork
        ... )
        >>> from torchrl_trudi.objectives import TruDiPPOLoss
        >>> actor = DiffusionActor(
        ...     2, score_network=ScoreNetwork(2, 3, hidden_size=16),
        ...     return_chain=True, return_dist_params=True, return_path_log_prob=True,
        ... )
        >>> critic = HLGaussValueOperator(
        ...     HLGaussCritic(3, -1.0, 1.0, hidden_size=16, predict_embedding=False), ["observation"]
        ... )
        >>> loss = TruDiPPOLoss(actor, critic)
        >>> with torch.no_grad():
        ...     data = actor(TensorDict({"observation": torch.randn(4, 3)}, [4]))
        >>> data["advantage"] = torch.randn(4, 1)  # these two come from loss.value_estimator
        >>> data["value_target"] = torch.randn(4, 1)
        >>> losses = loss(data)
        >>> sorted(key for key in losses.keys() if key.startswith("loss_"))
        ['loss_critic', 'loss_kl_multiplier', 'loss_objective', 'loss_trajectory_kl']
        >>> sum(value for key, value in losses.items() if key.startswith("loss_")).backward()
    """

    @dataclass
    class _AcceptedKeys(ClipPPOLoss._AcceptedKeys):
        """The keys of :class:`~torchrl.objectives.ClipPPOLoss`, and those of a histogram critic.

        Attributes:
            value_logits (NestedKey): the critic's logits. Defaults to ``("critic", "logits")``.
        """

        value_logits: NestedKey = ("critic", "logits")

    default_keys = _AcceptedKeys
    # V-trace draws a sample of the distribution (or takes its mode) instead of scoring the recorded
    # one; the kernels along a recorded chain have no sample but that chain.
    SUPPORTED_VALUE_ESTIMATORS = tuple(
        each
        for each in ClipPPOLoss.SUPPORTED_VALUE_ESTIMATORS
        if each is not ValueEstimators.VTrace
    )
    actor_network: ChainActor
    critic_network: TensorDictModule
    critic_network_params: TensorDictParams
    target_actor_network_params: TensorDictParams
    target_critic_network_params: TensorDictParams
    trajectory_kl: TrajectoryKLProjection
    _in_keys: list[NestedKey] | None
    _out_keys: list[NestedKey] | None
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __init__(
        self,
        actor_network: ChainActor,
        critic_network: TensorDictModule | None = None,
        *,
        trajectory_kl: TrajectoryKLProjection | None = None,
        entropy: EntropyName = "path",
        clip_epsilon: float | tuple[float, float] = 0.2,
        entropy_coeff: float = 0.0,
        normalize_advantage: bool = True,
        critic_coeff: float | None = None,
        loss_critic_type: str = "l2",
        reduction: Reduction | None = None,
        **kwargs: Any,
    ) -> None:
        if trajectory_kl is None:
            trajectory_kl = TrajectoryKLProjection(actor_network)
        elif trajectory_kl.actor_network is not actor_network:
            raise ValueError("trajectory_kl must be built on the same actor_network.")
        if trajectory_kl.old_policy != "recorded":
            raise ValueError(
                "The ratio is taken on the recorded chain, and so is the KL: the trust region needs "
                f"old_policy='recorded', got {trajectory_kl.old_policy!r}."
            )
        if trajectory_kl.mode == "projection" and kwargs.get("delay_actor"):
            raise ValueError(
                "delay_actor=True does not go with mode='projection': the delayed policy would be a "
                "network, the current one its projection around the recorded kernels, and their ratio "
                "not 1 where the two agree."
            )
        bounds = clip_epsilon if isinstance(clip_epsilon, tuple | list) else (clip_epsilon,)
        if not all(bound > 0 for bound in bounds):
            raise ValueError(f"clip_epsilon must be positive, got {clip_epsilon}.")
        if entropy not in ("path", "surrogate"):
            raise ValueError(f"entropy must be 'path' or 'surrogate', got {entropy!r}.")
        if reduction not in (None, *REDUCTIONS):
            raise ValueError(f"reduction must be one of {REDUCTIONS}, got {reduction!r}.")
        if not kwargs.get("functional", True):
            raise ValueError(
                "functional=False is not supported: the policy's parameters are shared with the "
                "trust region in functional form."
            )
        if critic_network is not None and actor_network.action_key in critic_network.in_keys:
            raise ValueError(
                "The critic must be the value of a state: it reads the action "
                f"{actor_network.action_key!r}, among its in_keys {list(critic_network.in_keys)}."
            )
        histogram = isinstance(critic_network, HLGaussValueOperator)
        if histogram and kwargs.get("clip_value"):
            raise ValueError(
                "clip_value clips the error of a scalar value; a histogram critic has none."
            )
        # An optional advantage norm is upstream's other way to scale.
        if kwargs.get("advantage_norm") is not None:
            normalize_advantage = False
        super().__init__(
            actor_network,
            critic_network,
            clip_epsilon=clip_epsilon,
            # Weighted here, inside of the gate.
            entropy_bonus=False,
            entropy_coeff=float(entropy_coeff),
            normalize_advantage=normalize_advantage,
            critic_coeff=critic_coeff,
            loss_critic_type=loss_critic_type,
            reduction=reduction,
            **kwargs,
        )
        self.entropy_type = entropy
        self.trajectory_kl = trajectory_kl
        # Registered once, in the trust region.
        del self._modules["actor_network_params"]
        # Settings, not state: a checkpoint must not bring back those it was made with.
        for name, value in list(self.named_buffers(recurse=False)):
            delattr(self, name)
            self.register_buffer(name, value, persistent=False)
        self._has_histogram = histogram
        if isinstance(critic_network, HLGaussValueOperator):
            self.set_keys(value=critic_network.value_key, value_logits=critic_network.out_keys[1])

    # -- parameters ------------------------------------------------------------------

    @property
    def actor_network_params(self) -> TensorDictParams:
        """The policy's parameters, which are registered in the trust region."""
        return self.trajectory_kl.actor_network_params

    def reset_parameters_recursive(self) -> None:
        """Reset the parameters of the networks; the duals and the settings stay."""
        self.trajectory_kl.reset_parameters_recursive()
        if self.delay_actor:
            self._modules["target_actor_network_params"].data.update_(
                self.actor_network_params.data
            )
        if self.critic_network is not None:
            self._reset_module_parameters("critic_network", self.critic_network)

    # -- keys ------------------------------------------------------------------------

    @property
    def minibatch_keys(self) -> list[NestedKey]:
        """What an update reads of a minibatch whose advantages and targets are there.

        The ``in_keys`` have, besides, what the value estimator reads where they are not.
        """
        keys = list(self.trajectory_kl.in_keys)
        critic = [] if self.critic_network is None else list(self.critic_network.in_keys)
        for key in (
            *critic,
            self.tensor_keys.sample_log_prob,
            self.tensor_keys.advantage,
            *([self.tensor_keys.value_target] if self._has_critic else []),
            *([self.tensor_keys.value] if self.clip_value else []),
        ):
            if key not in keys:
                keys.append(unravel_key(key))
        return keys

    def _set_in_keys(self) -> None:
        # Set for the first time by the base class, before there is a trust region.
        if "trajectory_kl" not in self._modules:
            return
        keys = self.minibatch_keys
        if self.critic_network is not None:
            names = self.tensor_keys
            inputs = [*self.critic_network.in_keys, names.reward, names.done, names.terminated]
            keys += [unravel_key(("next", key)) for key in inputs]
        self._in_keys = keys

    def _forward_value_estimator_keys(self, **kwargs) -> None:
        action, chain = unravel_key(self.tensor_keys.action), self.actor_network.tensor_keys.chain
        if action != chain:
            # The actor scores its own entry.
            raise ValueError(f"The action key is that of the chain, {chain!r}, got {action!r}.")
        super()._forward_value_estimator_keys(**kwargs)
        self._out_keys = None

    @property
    def out_keys(self) -> list[NestedKey]:
        """Keys of the output of ``forward``."""
        if self._out_keys is None:
            keys = [
                "loss_objective",
                "loss_trajectory_kl",
                "loss_kl_multiplier",
                *self.trajectory_kl.metric_keys,
                *(
                    "entropy",
                    "saturation_fraction",
                    "clip_fraction",
                    "kl_approx",
                    "ESS",
                    "max_ratio",
                    "mean_ratio",
                ),
            ]
            if self._has_critic:
                keys.append("loss_critic")
                if self._has_histogram:
                    keys.append("target_clip_fraction")
                if self.clip_value:
                    keys.append("value_clip_fraction")
                if self.log_explained_variance:
                    keys.append("explained_variance")
            self._out_keys = keys
        return self._out_keys

    @out_keys.setter
    def out_keys(self, values) -> None:
        self._out_keys = values

    # -- losses ------------------------------------------------------------------------

    def actor_loss(self, tensordict: TensorDictBase) -> TensorDict:
        """Losses of the actor and of the multiplier.

        Args:
            tensordict (TensorDictBase): transitions ``[*B]`` with the actor's observations, the
                recorded chain and ``advantage`` ``[*B, 1]``.

        Returns:
            TensorDict: ``loss_objective``, ``loss_trajectory_kl`` and ``loss_kl_multiplier``, to be summed,
            and detached diagnostics.

        Raises:
            KeyError: no advantage, or nothing recorded.
            ValueError: an empty batch.
        """
        return self._actor_loss(tensordict, update_norm=False)

    def _actor_loss(self, tensordict: TensorDictBase, *, update_norm: bool) -> TensorDict:
        check_not_empty(tensordict)
        advantage = tensordict.get(self.tensor_keys.advantage, None)
        if advantage is None:
            raise KeyError(
                f"No advantage under {self.tensor_keys.advantage!r}: run loss.value_estimator on the "
                "rollout before it is cut into minibatches."
            )
        if isinstance(tensordict, LazyStackedTensorDict):
            # Upstream pads the entries of a lazy stack, always along its first dimension.
            tensordict = tensordict.contiguous()
        self._check_shapes(tensordict)
        advantage = self._maybe_normalize_advantage(advantage, tensordict, update_norm=update_norm)
        # The one scoring pass: the kernels in ``dist`` serve ratio, entropy and KL.
        log_weight, dist, kl_approx, log_is_weight = self._log_weight(
            tensordict, adv_shape=advantage.shape[:-1]
        )
        if self.actor_network.event_dims == 1:
            advantage = advantage.unsqueeze(-2)  # the same for every step
        clipped = log_weight.clamp(*self._clip_bounds)
        clip_fraction = (clipped != log_weight).to(log_weight.dtype).mean()
        acted = log_weight if log_is_weight is None else log_weight + log_is_weight
        # The exponential of more is infinite, and the gradient of the branch not taken then NaN.
        acted = acted.clamp_max(_LARGEST_LOG_RATIO)
        bounded = clipped if log_is_weight is None else clipped + log_is_weight
        gain = torch.minimum(acted.exp() * advantage, bounded.exp() * advantage)
        entropy, entropy_gain = self._entropies(tensordict, dist, log_weight)
        objective = -self._over_steps(gain) - self.entropy_coeff * entropy_gain

        trust_region = self.trajectory_kl
        if isinstance(dist, _ProjectedPath):
            kl: PathKL | ProjectedPathKL = dist.path_kl
        else:
            kl = trust_region.compare(tensordict, dist.loc, dist.scale)
        if trust_region.mode == "switch":
            objective = torch.where(trust_region.inside(kl).unsqueeze(-1), objective, 0.0)
        penalty = trust_region.combine(torch.zeros_like(kl.kl), kl)
        # Of each state, whatever the trust region's own reduction is.
        dual = trust_region.multiplier_loss(kl, "none")
        return TensorDict(
            {
                "loss_objective": self._reduce_loss(objective.squeeze(-1), tensordict),
                "loss_trajectory_kl": self._reduce_loss(penalty, tensordict),
                "loss_kl_multiplier": self._reduce_loss(dual, tensordict),
                **trust_region.metrics(kl),
                "entropy": entropy.detach().mean(),
                "saturation_fraction": self._saturation(tensordict),
                "clip_fraction": clip_fraction,
                "kl_approx": kl_approx.detach().mean(),
                **_ratio_metrics(self._over_steps(acted.detach())),
            }
        )

    def _get_cur_log_prob(
        self, tensordict: TensorDictBase, params: TensorDictParams | None = None
    ) -> tuple[torch.Tensor, DenoisingPath, bool]:
        """Upstream's way to the current kernels: in projection mode they are the projected ones."""
        if self.trajectory_kl.mode != "projection":
            return super()._get_cur_log_prob(tensordict, params)
        loc, scale, kl = self.trajectory_kl.projected_kernels(tensordict)
        dist = _ProjectedPath(loc, scale, self.actor_network.event_dims, path_kl=kl)
        chain = tensordict.get(self.trajectory_kl.tensor_keys.chain).detach()
        return dist.log_prob(chain), dist, False

    def _saturation(self, tensordict: TensorDictBase) -> torch.Tensor:
        """Of the recorded actions, see :meth:`ChainModel.saturation`."""
        chain = tensordict.get(self.trajectory_kl.tensor_keys.chain)
        model = self.actor_network.module
        return model.saturation(model.squash(chain[..., -1, :].detach()))

    def _standardize_advantage(
        self, advantage: torch.Tensor, tensordict: TensorDictBase
    ) -> torch.Tensor:
        reduce = self.sum_over_ranks
        if reduce is None:
            return super()._standardize_advantage(advantage, tensordict)
        if self.normalize_advantage_exclude_dims or "shifted_valid" in tensordict:
            raise ValueError(
                "sum_over_ranks standardises over all entries of the batch: without "
                "normalize_advantage_exclude_dims and without a mask."
            )
        # The same numbers as upstream's on the batches of all ranks, one after the other.
        count, total = reduce(
            torch.stack([advantage.new_tensor(advantage.numel()), advantage.sum()])
        )
        centered = advantage - total / count
        variance = reduce(centered.square().sum()) / (count - 1)
        return centered / variance.sqrt().clamp_min(torch.finfo(torch.float).resolution)

    def _check_shapes(self, tensordict: TensorDictBase) -> None:
        """Entries of another shape would broadcast, against each other or over the batch."""
        batch = tuple(tensordict.shape)
        steps = (self.actor_network.num_steps,) if self.actor_network.event_dims == 1 else ()
        keys = self.tensor_keys
        for key, expected in (
            (keys.sample_log_prob, (*batch, *steps)),
            (keys.advantage, (*batch, 1)),
            (keys.value_target, (*batch, 1)),
        ):
            entry = tensordict.get(key, None)
            if entry is not None and tuple(entry.shape) != expected:
                raise ValueError(
                    f"{key!r} must have the shape {expected} in a batch of {batch}, got "
                    f"{tuple(entry.shape)}: with another one the objective would be an outer product."
                )

    def _over_steps(self, values: torch.Tensor) -> torch.Tensor:
        """The path's sum, where there is an entry for each step: ``[*B, N, 1]`` to ``[*B, 1]``."""
        return values.sum(-2) if self.actor_network.event_dims == 1 else values

    def _entropies(
        self, tensordict: TensorDictBase, dist: DenoisingPath, log_weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The entropy of each state, and what has the entropy's gradient, each ``[*B, 1]``."""
        if self.entropy_type == "path":
            entropy = self._over_steps(dist.entropy().unsqueeze(-1))
            return entropy, entropy
        actor = self.actor_network
        chain = DenoisingChain(
            tensordict.get(self.trajectory_kl.tensor_keys.chain), dist.loc, dist.scale
        )
        with self.actor_network_params.to_module(actor, preserve_module_state=False):
            model = actor.module
            log_prob = model.log_prob(actor.observation(tensordict), chain).log_prob
            # In units of the box, as everywhere.
            log_prob = (log_prob + model.log_volume()).unsqueeze(-1)
        # The chain is one of the old policy: the ratio makes it one of the current one, and gives
        # the gradient its score-function part.
        weight = self._over_steps(log_weight).clamp(*self._clip_bounds).exp()
        return -log_prob, -weight * (log_prob - log_prob.detach().mean())

    def critic_loss(self, tensordict: TensorDictBase) -> TensorDict:
        """Loss of the critic, weighted by ``critic_coeff``.

        Args:
            tensordict (TensorDictBase): transitions ``[*B]`` with the critic's inputs and
                ``value_target`` ``[*B, 1]``.

        Returns:
            TensorDict: ``loss_critic`` and detached diagnostics.

        Raises:
            KeyError: no value target.
            ValueError: an empty batch.
        """
        check_not_empty(tensordict)
        # Copied, since a critic writes its value.
        tensordict = tensordict.copy()
        loss, value_clip_fraction, explained_variance = self.loss_critic(tensordict)
        out = TensorDict({"loss_critic": self._reduce_loss(loss.squeeze(-1), tensordict)})
        if self._has_histogram:
            target = tensordict.get(self.tensor_keys.value_target)
            with self.critic_network_params.to_module(
                self.critic_network, preserve_module_state=False
            ):
                fraction = self.critic_network.support.clip_fraction(target)
            out.set("target_clip_fraction", fraction)
        if value_clip_fraction is not None:
            out.set("value_clip_fraction", value_clip_fraction)
        if explained_variance is not None:
            out.set("explained_variance", explained_variance.mean())
        return out

    def loss_critic(
        self, tensordict: TensorDictBase
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The critic's error per state, see :meth:`torchrl.objectives.PPOLoss.loss_critic`.

        Args:
            tensordict (TensorDictBase): see :meth:`critic_loss`.

        Returns:
            tuple: the error times ``critic_coeff`` ``[*B, 1]``, the fraction of clipped values or
            ``None``, and the explained variance or ``None``.
        """
        if not self._has_histogram:
            return super().loss_critic(tensordict)
        keys = self.tensor_keys
        target = tensordict.get(keys.value_target, None)
        if target is None:
            raise KeyError(
                f"No value target under {keys.value_target!r}: run loss.value_estimator on the "
                "rollout before it is cut into minibatches."
            )
        target = target.detach()
        # The histogram's support is made of buffers of the critic: it is used with its parameters.
        with self.critic_network_params.to_module(self.critic_network, preserve_module_state=False):
            out = self.critic_network(tensordict.select(*self.critic_network.in_keys))
            support = self.critic_network.support
            loss = support.cross_entropy(out.get(keys.value_logits), target.squeeze(-1))
        explained_variance = None
        if self.log_explained_variance:
            value = out.get(keys.value).detach()
            eps = torch.finfo(target.dtype).eps
            left = (target - value).var(dim=0, correction=0)
            explained_variance = 1 - left / (target.var(dim=0, correction=0) + eps)
        return self.critic_coeff * loss.unsqueeze(-1), None, explained_variance

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """All losses of a batch.

        Without an ``advantage`` the input must be a rollout ``[*B, T]``, on which the value estimator
        is run first.

        Args:
            tensordict (TensorDictBase): see :meth:`actor_loss` and :meth:`critic_loss`.

        Returns:
            TensorDict: losses under ``loss_*``, to be summed, and detached diagnostics.

        Raises:
            RuntimeError: no advantage, and no critic to compute it.
            ValueError: an empty batch.
        """
        check_not_empty(tensordict)
        tensordict = tensordict.copy()
        estimates = tensordict.get(self.tensor_keys.advantage, None) is None
        if estimates:
            if self.critic_network is None:
                raise RuntimeError(
                    "There is no advantage in the batch, and no critic to compute it."
                )
            if tensordict.get(unravel_key(("next", self.tensor_keys.reward)), None) is None:
                raise KeyError(
                    f"There is no advantage under {self.tensor_keys.advantage!r}, and the batch is no rollout "
                    "to compute it from: run loss.value_estimator on the rollout before it is cut into "
                    "minibatches."
                )
            self.value_estimator(
                tensordict,
                params=self._cached_critic_network_params_detached,
                target_params=self.target_critic_network_params,
            )
        out = self._actor_loss(tensordict, update_norm=estimates)
        return out.update(self.critic_loss(tensordict)) if self._has_critic else out

    def make_value_estimator(
        self,
        value_type: ValueEstimators
        | str
        | type[ValueEstimatorBase]
        | ValueEstimatorBase
        | None = None,
        **hyperparams,
    ) -> TruDiPPOLoss:
        """See :meth:`torchrl.objectives.PPOLoss.make_value_estimator`.

        Args:
            value_type (ValueEstimators, type or ValueEstimatorBase, optional): Defaults to
                :class:`~torchrl.objectives.value.GAE`.
            **hyperparams: arguments of the estimator, such as ``gamma`` and ``lmbda``.

        Returns:
            TruDiPPOLoss: self.

        Raises:
            NotImplementedError: V-trace, or an estimator that upstream's loss does not have.
        """
        vtrace = isinstance(value_type, type) and issubclass(value_type, VTrace)
        if vtrace or isinstance(value_type, VTrace):
            value_type = ValueEstimators.VTrace  # refused by its name
        super().make_value_estimator(value_type, **hyperparams)
        return self


def _ratio_metrics(log_weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Effective sample size (as a fraction), largest and mean ratio of log-ratios ``[*B, 1]``."""
    flat = log_weight.flatten()
    size = (2 * flat.logsumexp(0) - (2 * flat).logsumexp(0)).exp()
    ratio = flat.exp()
    return {"ESS": size / len(flat), "max_ratio": ratio.max(), "mean_ratio": ratio.mean()}

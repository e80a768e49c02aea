"""The TruDi loss: pathwise actor, HL-Gauss critic, duals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, TensorDictParams, unravel_key
from tensordict.nn import dispatch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torchrl.objectives.common import LossModule
from torchrl.objectives.utils import _reduce, dispatch_value_estimator
from torchrl.objectives.value import ValueEstimatorBase

from torchrl_trudi.modules._feed_forward import check_feed_forward
from torchrl_trudi.modules.chain_model import ChainModel, select_steps
from torchrl_trudi.modules.denoising import DenoisingModel
from torchrl_trudi.modules.distributions import gaussian_log_prob
from torchrl_trudi.modules.projected_model import ProjectedModel
from torchrl_trudi.modules.tensordict_module import ChainActor, HLGaussValueOperator
from torchrl_trudi.objectives._parameters import ActorCriticParameters
from torchrl_trudi.objectives.elbo import path_elbo
from torchrl_trudi.objectives.trajectory_kl import (
    REDUCTIONS,
    PathKL,
    ProjectedPathKL,
    Reduction,
    TrajectoryKLProjection,
    check_not_empty,
)
from torchrl_trudi.objectives.value import SOFT_TD_LAMBDA, SoftTDLambdaEstimator

__all__ = ["TruDiLoss"]


def _steered(model: ChainModel) -> DenoisingModel:
    """The model as one with a control, which the adjoint gradient regresses."""
    if not isinstance(model, DenoisingModel):
        raise ValueError(
            "actor_gradient='adjoint' regresses the control of a denoising chain, which a "
            f"{type(model).__name__} does not have; use 'pathwise'."
        )
    return model


def _check_elbo(elbo_coeff: float, model: ChainModel, trust_region: TrajectoryKLProjection) -> None:
    """What the evidence bound needs: a chain with backward kernels, and where recorded ones end."""
    if not elbo_coeff >= 0:
        raise ValueError(f"elbo_coeff must not be negative, got {elbo_coeff}.")
    if elbo_coeff > 0 and not isinstance(model, DenoisingModel):
        raise ValueError(
            "elbo_coeff > 0 needs the backward kernels of a denoising chain, which a "
            f"{type(model).__name__} does not have."
        )
    if elbo_coeff > 0 and trust_region.old_policy == "target":
        raise ValueError(
            "elbo_coeff > 0 needs the actions that were taken: old_policy='recorded' or 'replayed', "
            "not 'target'."
        )


class TruDiLoss(ActorCriticParameters, LossModule):
    r"""TruDi: pathwise maximum-entropy actor-critic with a trust region on the denoising path (arXiv 2606.15260).

    Actor, on a fresh stochastic chain with surrogate log-probability :math:`L` (sg: stop gradient):

    .. math::
        J &= \mathrm{mean}_s\, \mathrm{combine}\big(\mathrm{sg}(\alpha) L - Q(s, a),\ \mathrm{kl}(s)\big) \\
        J_\alpha &= \alpha\, \mathrm{sg}\big(A\, m_{ent} + \mathrm{mean}_s(-running)\big)

    with ``combine`` and the multiplier's loss of
    :class:`~torchrl_trudi.objectives.TrajectoryKLProjection`. Critic: cross-entropy to the HL-Gauss
    targets of ``value_target`` plus ``aux_coeff`` times the squared error of the predicted next
    embedding. The actor's loss holds the critic's parameters fixed.

    ``forward`` gives all losses of a batch at once. The published loop steps the critic first and the
    actor on the stepped critic: call :meth:`critic_loss` and :meth:`actor_loss` for that.

    With ``elbo_coeff`` :math:`= c > 0` the objective of a state is
    :math:`\mathrm{sg}(\alpha) L - Q(s, a) - c\, \mathrm{ELBO}(x_N)` on the recorded chain's final latent, see
    :func:`~torchrl_trudi.objectives.path_elbo`. It is part of the objective: in ``"switch"`` mode the states beyond
    the bound get none of it, so that the trust region holds it as well.

    With a :class:`~torchrl_trudi.modules.GaussianActor`, whose chain has one step and whose :math:`L` is the
    log-probability of the action, this is REPPO's actor (arXiv 2507.11019).

    Args:
        actor_network (ChainActor): the policy.
        critic_network (HLGaussValueOperator): Q function. Any TensorDictModule that writes
            ``value`` serves :meth:`actor_loss` alone.

    Keyword Args:
        trajectory_kl (TrajectoryKLProjection, optional): the trust region, built on
            ``actor_network``. Defaults to ``TrajectoryKLProjection(actor_network)``.
        init_temperature (float, optional): initial :math:`\alpha`. Defaults to ``0.01``.
        learn_temperature (bool, optional): whether :math:`\alpha` is a parameter. Defaults to ``True``.
        target_entropy_scale (float, optional): :math:`m_{ent}`; the target of :math:`-running` is
            ``-target_entropy_scale`` per action dimension, with the log-probability taken in units of the
            action box, so that it does not depend on the units of the action space. Defaults to
            ``None``, the policy's own: ``4.0`` for a diffusion policy, ``0.5`` for a Gaussian.
        aux_coeff (float, optional): weight of the auxiliary loss. Defaults to ``1.0``.
        split_by_gate (bool, optional): with ``mode="switch"`` and a recorded or replayed old policy, evaluate
            the path KL of all states without a graph first, and then build a graph only for the
            branch that each state takes: same loss and gradient, about half the work. The parts
            have different sizes each time, so it is left out in compiled code and CUDA graphs.
            Defaults to ``True``.
        actor_gradient (str, optional): ``"pathwise"`` differentiates :math:`\alpha L - Q` through
            the chain. ``"adjoint"`` draws the chain without a graph and regresses the control on
            the closed-form target of :meth:`adjoint_target`; friction and step sizes get no
            gradient from it. A Gaussian policy has no control. Defaults to ``"pathwise"``.
        num_adjoint_steps (int, optional): with ``"adjoint"``, how many of the chain's steps are
            regressed per state, drawn without replacement; the sum is scaled to all of them. Where
            the states are split by the gate, the KL of those beyond it is estimated in the same
            way. Defaults to ``None``, all.
        entropy_fraction (float, optional): where the states are split by the gate, the entropy of
            those beyond it is needed for the temperature alone. It is estimated on this fraction
            of them, drawn without replacement: unbiased, with less work. Defaults to ``1.0``.
        elbo_coeff (float, optional): weight of the evidence bound of the recorded actions, which keeps
            :math:`L` close to the log-probability for which it stands, at the price of one more evaluation of the
            recorded states. ``0`` leaves it out, at no cost. Defaults to ``0.0``.
        reduction (str, optional): ``"mean"`` or ``"sum"`` over the states, or ``"none"``: every loss per
            state, ``[*B]``, in the input's order. The diagnostics are means always.
            Defaults to ``"mean"``.

    Raises:
        NotImplementedError: a recurrent network.
        ValueError: ``init_temperature <= 0``, ``aux_coeff < 0``, ``elbo_coeff < 0``, ``entropy_fraction`` outside
            ``(0, 1]``, or below 1 with ``reduction="none"``; an unknown ``reduction``; a trust region on
            another actor, or in ``"projection"`` mode on one that does not act projected
            (:class:`~torchrl_trudi.modules.ProjectedModel`); a critic that does not read the action;
            ``"adjoint"`` with a policy that has no control; ``elbo_coeff > 0`` with one that has no backward
            kernels or with ``old_policy="target"``.
        KeyError: missing entries in the batch.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_trudi.modules import (
        ...     DiffusionActor, HLGaussCritic, HLGaussValueOperator, ScoreNetwork
        ... )
        >>> from torchrl_trudi.objectives import TruDiLoss
        >>> actor = DiffusionActor(
        ...     2, score_network=ScoreNetwork(2, 3, hidden_size=16),
        ...     return_chain=True, return_dist_params=True,
        ... )
        >>> critic = HLGaussValueOperator(HLGaussCritic(5, -1.0, 1.0, hidden_size=16))
        >>> loss = TruDiLoss(actor, critic)
        >>> with torch.no_grad():
        ...     data = actor(TensorDict({"observation": torch.randn(4, 3)}, [4]))
        >>> data["value_target"] = torch.randn(4, 1)  # these two come from loss.value_estimator
        >>> data["next", "critic", "embedding"] = torch.randn(4, 16)
        >>> losses = loss(data)
        >>> sorted(key for key in losses.keys() if key.startswith("loss_"))
        ['loss_actor', 'loss_critic', 'loss_kl_multiplier', 'loss_temperature']
        >>> sum(value for key, value in losses.items() if key.startswith("loss_")).backward()
    """

    @dataclass
    class _AcceptedKeys:
        """Tensordict keys that can be set with ``set_keys``.

        Attributes:
            action (NestedKey): action. Defaults to the actor's.
            value (NestedKey): the critic's value. Defaults to ``"state_action_value"``.
            value_target (NestedKey): target of the value. Defaults to ``"value_target"``.
            value_logits (NestedKey): the critic's logits. Defaults to ``("critic", "logits")``.
            embedding (NestedKey): the critic's embedding; its next-state counterpart, as the
                estimator writes it, is the auxiliary target. Defaults to ``("critic", "embedding")``.
            next_embedding (NestedKey): the critic's prediction of it. Defaults to
                ``("critic", "next_embedding")``.
            mask (NestedKey): optional weights ``[*B, 1]`` of the critic's loss; the means still
                divide by the batch size. Defaults to ``"mask"``.
            reward (NestedKey): Defaults to ``"reward"``.
            done (NestedKey): Defaults to ``"done"``.
            terminated (NestedKey): Defaults to ``"terminated"``.
        """

        action: NestedKey = "action"
        value: NestedKey = "state_action_value"
        value_target: NestedKey = "value_target"
        value_logits: NestedKey = ("critic", "logits")
        embedding: NestedKey = ("critic", "embedding")
        next_embedding: NestedKey = ("critic", "next_embedding")
        mask: NestedKey = "mask"
        reward: NestedKey = "reward"
        done: NestedKey = "done"
        terminated: NestedKey = "terminated"

    default_keys = _AcceptedKeys
    default_value_estimator = SOFT_TD_LAMBDA
    critic_network: HLGaussValueOperator
    critic_network_params: TensorDictParams
    target_critic_network_params: TensorDictParams
    trajectory_kl: TrajectoryKLProjection

    def __init__(
        self,
        actor_network: ChainActor,
        critic_network: HLGaussValueOperator,
        *,
        trajectory_kl: TrajectoryKLProjection | None = None,
        init_temperature: float = 0.01,
        learn_temperature: bool = True,
        target_entropy_scale: float | None = None,
        aux_coeff: float = 1.0,
        split_by_gate: bool = True,
        actor_gradient: Literal["pathwise", "adjoint"] = "pathwise",
        num_adjoint_steps: int | None = None,
        entropy_fraction: float = 1.0,
        elbo_coeff: float = 0.0,
        reduction: Reduction = "mean",
    ) -> None:
        if not init_temperature > 0:
            raise ValueError(f"init_temperature must be positive, got {init_temperature}.")
        if not aux_coeff >= 0:
            raise ValueError(f"aux_coeff must not be negative, got {aux_coeff}.")
        if not 0 < entropy_fraction <= 1:
            raise ValueError(f"entropy_fraction must be in (0, 1], got {entropy_fraction}.")
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {REDUCTIONS}, got {reduction!r}.")
        if reduction == "none" and entropy_fraction < 1:
            raise ValueError(
                "reduction='none' needs the entropy of every state, which "
                f"entropy_fraction={entropy_fraction} leaves out."
            )
        check_feed_forward(critic_network, "critic")
        if trajectory_kl is None:
            trajectory_kl = TrajectoryKLProjection(actor_network)
        elif trajectory_kl.actor_network is not actor_network:
            raise ValueError("trajectory_kl must be built on the same actor_network.")
        if trajectory_kl.mode == "projection" and not isinstance(
            actor_network.module, ProjectedModel
        ):
            raise ValueError(
                "mode='projection' here needs an actor that acts projected, since this loss samples "
                "fresh chains: ChainActor(ProjectedModel(actor.module), ...)."
            )
        if actor_network.action_key not in critic_network.in_keys:
            raise ValueError(
                f"The critic must be a Q function: the action {actor_network.action_key!r} is not "
                f"among its in_keys {list(critic_network.in_keys)}."
            )
        if actor_gradient not in ("pathwise", "adjoint"):
            raise ValueError(
                f"actor_gradient must be 'pathwise' or 'adjoint', got {actor_gradient!r}."
            )
        if actor_gradient == "adjoint":
            _steered(actor_network.module)
        _check_elbo(elbo_coeff, actor_network.module, trajectory_kl)
        if num_adjoint_steps is not None:
            if actor_gradient != "adjoint":
                raise ValueError("num_adjoint_steps needs actor_gradient='adjoint'.")
            if not 1 <= num_adjoint_steps <= actor_network.num_steps:
                raise ValueError(
                    f"num_adjoint_steps must be in [1, {actor_network.num_steps}], got "
                    f"{num_adjoint_steps}."
                )
        super().__init__()
        self._in_keys: list[NestedKey] | None = None
        self._out_keys: list[NestedKey] | None = None
        self.actor_gradient = actor_gradient
        self.num_adjoint_steps = num_adjoint_steps
        self.trajectory_kl = trajectory_kl
        self.convert_to_functional(critic_network, "critic_network")
        reference = next(actor_network.parameters())
        log_temperature = reference.new_full((1,), init_temperature, requires_grad=False).log()
        if learn_temperature:
            self.log_temperature = nn.Parameter(log_temperature)
        else:
            self.register_buffer("log_temperature", log_temperature, persistent=False)
        # Kept: where the parameters are swapped for others, the duals may be plain tensors.
        self._learns_temperature = learn_temperature
        if target_entropy_scale is None:
            target_entropy_scale = actor_network.module.default_target_entropy_scale
        self.target_entropy_scale = target_entropy_scale
        self.split_by_gate = split_by_gate
        self.entropy_fraction = entropy_fraction
        self.elbo_coeff = float(elbo_coeff)
        self.reduction = reduction
        # A setting, not state: a checkpoint must not bring back the one it was made with.
        self.register_buffer("aux_coeff", reference.new_tensor(float(aux_coeff)), persistent=False)
        self._has_auxiliary = (
            aux_coeff > 0
            and isinstance(critic_network, HLGaussValueOperator)
            and critic_network.module.predictor is not None
        )
        names = {"action": actor_network.action_key}
        if isinstance(critic_network, HLGaussValueOperator):
            roles = ("value", "value_logits", "embedding", "next_embedding")
            names.update(zip(roles, critic_network.out_keys, strict=False))
        self.set_keys(**names)

    # The actor's parameters are registered once, in the trust region.

    @property
    def actor_network(self) -> ChainActor:
        """The policy."""
        return self.trajectory_kl.actor_network

    @property
    def actor_network_params(self) -> TensorDictParams:
        """The policy's parameters."""
        return self.trajectory_kl.actor_network_params

    @property
    def target_actor_network_params(self) -> TensorDictParams:
        """The old policy's parameters (``old_policy="target"`` or ``"replayed"``), else the detached current ones."""
        return self.trajectory_kl.target_actor_network_params

    # -- keys ------------------------------------------------------------------------

    def _forward_value_estimator_keys(self, **kwargs) -> None:
        action = unravel_key(self.tensor_keys.action)
        if action != self.actor_network.action_key:
            # The critic would go on reading the recorded action, and give the actor no gradient.
            raise ValueError(
                f"The action key is the actor's {self.actor_network.action_key!r}, got {action!r}."
            )
        if self._value_estimator is not None:
            self._value_estimator.set_keys(**self._estimator_keys())
        self._in_keys = None

    @property
    def _next_embedding_key(self) -> NestedKey:
        return unravel_key(("next", self.tensor_keys.embedding))

    def _estimator_keys(self) -> dict[str, NestedKey]:
        names = ("value_target", "value", "reward", "done", "terminated", "embedding")
        return {name: getattr(self.tensor_keys, name) for name in names}

    @property
    def in_keys(self) -> list[NestedKey]:
        """Keys that ``forward`` reads."""
        if self._in_keys is not None:
            return self._in_keys
        keys = list(self.trajectory_kl.in_keys)
        for key in (
            *self.critic_network.in_keys,
            self.tensor_keys.action,
            self.tensor_keys.value_target,
            *([self._next_embedding_key] if self._has_auxiliary else []),
        ):
            if key not in keys:
                keys.append(key)
        return keys

    @in_keys.setter
    def in_keys(self, values) -> None:
        self._in_keys = values

    @property
    def out_keys(self) -> list[NestedKey]:
        """Keys of the output of ``forward``."""
        if self._out_keys is None:
            self._out_keys = [
                "loss_actor",
                "loss_critic",
                "loss_temperature",
                "loss_kl_multiplier",
                *self.trajectory_kl.metric_keys,
                "entropy",
                "temperature",
                "saturation_fraction",
                "value_cross_entropy",
                "auxiliary_error",
                "target_clip_fraction",
            ]
        return self._out_keys

    @out_keys.setter
    def out_keys(self, values) -> None:
        self._out_keys = values

    # -- parameters ------------------------------------------------------------------

    @property
    def temperature(self) -> torch.Tensor:
        r"""The temperature :math:`\alpha`, ``[1]``."""
        return self.log_temperature.exp()

    def get_temperature(self) -> torch.Tensor:
        """Same as :attr:`temperature`, for the value estimator, which follows it."""
        return self.temperature

    def dual_parameters(self) -> Iterator[nn.Parameter]:
        """Trainable temperature and multiplier, in log space."""
        if isinstance(self.log_temperature, nn.Parameter):
            yield self.log_temperature
        yield from super().dual_parameters()

    @property
    def minibatch_keys(self) -> list[NestedKey]:
        """What an update reads of a minibatch whose targets are there: the ``in_keys``."""
        return self.in_keys

    def reset_parameters_recursive(self) -> None:
        """Reset the parameters of the networks; the duals and the settings stay."""
        self.trajectory_kl.reset_parameters_recursive()
        super().reset_parameters_recursive()

    # -- losses ------------------------------------------------------------------------

    def actor_loss(
        self,
        tensordict: TensorDictBase,
        *,
        noise: torch.Tensor | None = None,
        kl_noise: torch.Tensor | None = None,
        elbo_noise: torch.Tensor | None = None,
    ) -> TensorDict:
        """Losses of the actor and the duals.

        Args:
            tensordict (TensorDictBase): states ``[*B]`` with the actor's and critic's observations
                and what ``trajectory_kl.in_keys`` names of the record.

        Keyword Args:
            noise (torch.Tensor, optional): standard normals of the sampled chain ``[*B, N + 1, A]``.
            kl_noise (torch.Tensor, optional): those of the fresh old paths, see
                :meth:`TrajectoryKLProjection.path_kl`.
            elbo_noise (torch.Tensor, optional): those of the backward paths ``[*B, N, A]``, with
                ``elbo_coeff > 0``.

        Returns:
            TensorDict: ``loss_actor``, ``loss_temperature``, ``loss_kl_multiplier`` and diagnostics.

        Raises:
            ValueError: an empty batch.
        """
        check_not_empty(tensordict)
        kl: PathKL | ProjectedPathKL
        if self._splits_by_gate() and not self._is_transformed(tensordict):
            loss_actor, running, saturation, kl = self._gated_actor_parts(
                tensordict, noise, elbo_noise
            )
        else:
            loss_actor, running, saturation, kl = self._dense_actor_parts(
                tensordict, noise, kl_noise, elbo_noise
            )
        # In units of the action box: the target then means the same for every action space.
        model = self.actor_network.module
        entropy = -(running + model.log_volume())
        gap = self.target_entropy_scale * model.action_dim + entropy
        loss_temperature = (
            self.temperature.squeeze(0) * gap if self._learns_temperature else torch.zeros_like(gap)
        )
        return TensorDict(
            {
                "loss_actor": _reduce(loss_actor, self.reduction),
                "loss_temperature": _reduce(loss_temperature, self.reduction),
                "loss_kl_multiplier": self.trajectory_kl.multiplier_loss(kl, self.reduction),
                **self.trajectory_kl.metrics(kl),
                "entropy": entropy.mean(),
                "temperature": self.temperature.detach().squeeze(),
                "saturation_fraction": saturation,
            }
        )

    def _splits_by_gate(self) -> bool:
        """Whether each state is to be evaluated in its own branch of the gate only."""
        trust_region = self.trajectory_kl
        return (
            self.split_by_gate
            and trust_region.mode == "switch"
            and trust_region.old_policy != "target"
            # Which states are inside is data: the sizes of the two parts change from call to call.
            and not torch.compiler.is_compiling()
            and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
        )

    def _is_transformed(self, tensordict: TensorDictBase) -> bool:
        """Whether ``torch.vmap`` may hide a dimension of what the gate depends on."""
        read = [tensordict.get(key, None) for key in self.trajectory_kl.in_keys]
        own = [self.trajectory_kl.eps, *self.actor_network_params.values(True, True)]
        return any(
            is_functorch_wrapped_tensor(entry) for entry in (*read, *own) if entry is not None
        )

    def _objective(
        self,
        tensordict: TensorDictBase,
        noise: torch.Tensor | None,
        elbo_noise: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The objective of each state, ``-log|det| - log w`` of its fresh chain, and its action."""
        objective, running, action = self._policy_objective(tensordict, noise)
        if self.elbo_coeff > 0:
            final = tensordict.get(self.trajectory_kl.tensor_keys.chain)[..., -1, :].detach()
            with self._actor_context() as actor:
                model, observation = _steered(actor.module), actor.observation(tensordict)
                elbo = path_elbo(model, observation, final, elbo_noise).elbo
            objective = objective - self.elbo_coeff * elbo
        return objective, running, action

    def _policy_objective(
        self, tensordict: TensorDictBase, noise: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the policy is to minimise on a fresh chain, and of it what :meth:`_objective` gives."""
        if self.actor_gradient == "adjoint":
            return self._adjoint_objective(tensordict, noise)
        with self._actor_context() as actor:
            action, _, log_prob = actor.rsample(tensordict, noise)
        objective = self.temperature.detach() * log_prob.log_prob - self._value(tensordict, action)
        return objective, log_prob.running, action

    @contextmanager
    def _actor_context(self) -> Iterator[ChainActor]:
        """The policy, with its parameters."""
        actor = self.actor_network
        with self.actor_network_params.to_module(actor, preserve_module_state=False):
            yield actor

    @property
    def _state_keys(self) -> list[NestedKey]:
        """What the critic reads besides the action."""
        return [key for key in self.critic_network.in_keys if key != self.tensor_keys.action]

    def _value(self, tensordict: TensorDictBase, action: torch.Tensor) -> torch.Tensor:
        """The critic's value of an action, its parameters held fixed, ``[*B]``."""
        state = tensordict.select(*self._state_keys)
        state.set(self.tensor_keys.action, action)
        with self.critic_network_params.detach().to_module(
            self.critic_network, preserve_module_state=False
        ):
            critic: Any = self.critic_network
            if isinstance(critic, HLGaussValueOperator):
                return critic.value(state)
            return critic(state).get(self.tensor_keys.value).squeeze(-1)

    def _adjoint_objective(
        self, tensordict: TensorDictBase, noise: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with torch.no_grad(), self._actor_context() as actor:
            action, chain, log_prob = actor.rsample(tensordict, noise)
        final = chain.latents[..., -1, :]
        target = self.adjoint_target(tensordict, final)
        with self._actor_context() as actor:
            model = _steered(actor.module)
            eta = model.kernel_coefficients()[0].detach()
            latents, scale, steps = chain.latents[..., :-1, :], 1.0, None
            if self.num_adjoint_steps is not None:
                steps = self._adjoint_steps(tensordict)
                scale = model.num_steps / self.num_adjoint_steps
                latents, target = select_steps(latents, steps), select_steps(target, steps)
                eta = eta[steps]
            control = model.control(actor.observation(tensordict), latents, steps)
        residual = (eta / 4 * (control - target).square()).sum((-1, -2))
        return self.temperature.detach() * scale * residual, log_prob.running, action

    def _adjoint_steps(self, tensordict: TensorDictBase) -> torch.Tensor:
        """The steps to regress at each state, ``[*B, K]``."""
        reference = self.actor_network.module.low
        shape = (*tensordict.shape, self.actor_network.num_steps)
        order = torch.rand(shape, device=reference.device).argsort(-1)
        return order[..., : self.num_adjoint_steps]

    def adjoint_target(self, tensordict: TensorDictBase, final: torch.Tensor) -> torch.Tensor:
        r"""What the control of an optimal chain is, on average over chains that end in ``final``.

        Up to discretisation, :math:`L = \sum_n \log (F_n / F^0_n) + \log p_0(x_N) - \log|\det|` with
        the uncontrolled kernels :math:`F^0`, whose process is reversible. The actor's problem is then
        one of stochastic optimal control with running cost :math:`\tfrac{\eta_n}{4} u^2`, the KL
        of a step, and terminal cost :math:`g / \alpha`,
        :math:`g(x) = \alpha (\log p_0(x) - \log|\det|(x)) - Q(s, a(x))`. Its optimal control is
        :math:`u_n(x_n) = -2\, \mathrm{E}[\mathrm{adj}_n | x_n]` over optimally controlled chains, with
        the lean adjoint (arXiv 2409.08861, 2606.22630), explicit because the drift is linear:

        .. math::
            \mathrm{adj}_n = \prod_{k=n+1}^{N-1} (1 - \eta_k / \sigma_0^2)\, \nabla g(x_N) / \alpha

        Args:
            tensordict (TensorDictBase): the critic's observations, ``[*B]``.
            final (torch.Tensor): final latents :math:`x_N`, ``[*B, A]``.

        Returns:
            torch.Tensor: :math:`-2\, \mathrm{adj}_n`, ``[*B, N, A]``, without gradient.
        """
        temperature = self.temperature.detach()
        with torch.enable_grad(), self._actor_context() as actor:
            model = _steered(actor.module)
            latent = final.detach().requires_grad_(True)
            prior = gaussian_log_prob(latent, *(part.detach() for part in model.prior()))
            cost = temperature * (prior - model.log_det(latent))
            cost = cost - self._value(tensordict, model.squash(latent))
            (gradient,) = torch.autograd.grad(cost.sum(), latent)
            eta = model.kernel_coefficients()[0].detach()
            keep = 1 - eta / model.prior()[1].detach().square()
        # Products of the factors after each step; an empty product after the last.
        factors = torch.cat([keep[1:], torch.ones_like(keep[:1])])
        factors = factors.flip(0).cumprod(0).flip(0)
        return -2 / temperature * factors * gradient.unsqueeze(-2)

    def _dense_actor_parts(
        self,
        tensordict: TensorDictBase,
        noise: torch.Tensor | None,
        kl_noise: torch.Tensor | None,
        elbo_noise: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PathKL | ProjectedPathKL]:
        """Both branches for every state: loss and ``running`` per state, mean of the saturation, KL."""
        if self.elbo_coeff > 0:
            tensordict = self.trajectory_kl.replay(tensordict)
        objective, running, action = self._objective(tensordict, noise, elbo_noise)
        kl = self.trajectory_kl.path_kl(tensordict, kl_noise)
        loss = self.trajectory_kl.combine(objective, kl)
        return loss, running.detach(), self.actor_network.module.saturation(action.detach()), kl

    def _gated_actor_parts(
        self,
        tensordict: TensorDictBase,
        noise: torch.Tensor | None,
        elbo_noise: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PathKL]:
        """The same numbers and gradients, with a graph only for the branch that a state takes."""
        trust_region = self.trajectory_kl
        shape = tensordict.shape
        tensordict = tensordict.reshape(-1)
        size = tensordict.shape[0]
        if noise is None:
            # Drawn for all states at once, as in the dense form.
            noise = self.actor_network.module.draw_noise((size,))
        noise = noise.reshape(size, *noise.shape[-2:])
        ends = []
        if self.elbo_coeff > 0:
            ends.append(trust_region.tensor_keys.chain)
            if elbo_noise is None:
                elbo_noise = torch.randn_like(noise[..., 1:, :])
            elbo_noise = elbo_noise.reshape(size, *elbo_noise.shape[-2:])
        # Once for all that follows.
        tensordict = trust_region.replay(tensordict)
        samples_steps = self.num_adjoint_steps is not None
        within, beyond, kl = trust_region.split(tensordict, complete=samples_steps)
        # Indexing copies: only what is read.
        keys = trust_region.tensor_keys
        record = (keys.chain, keys.loc, keys.scale)
        tensordict = tensordict.select(
            *self.actor_network.observation_keys, *record, *self._state_keys
        )
        losses, runnings, saturation = [], [], noise.new_zeros(())
        if len(within):
            read = (*self.actor_network.observation_keys, *self._state_keys, *ends)
            objective, part_running, action = self._objective(
                tensordict.select(*read)[within],
                noise[within],
                None if elbo_noise is None else elbo_noise[within],
            )
            losses.append(objective)
            runnings.append(part_running.detach())
            saturation = len(within) * self.actor_network.module.saturation(action.detach())
        if len(beyond):
            part = tensordict[beyond]
            if samples_steps:
                penalty = trust_region.sampled_penalty(part, self._adjoint_steps(part))
            else:
                kl_beyond = trust_region.path_kl(part)
                penalty = trust_region.penalty(kl_beyond)
                pairs = zip(kl, kl_beyond, strict=True)
                kl = PathKL(*(torch.cat([first, second.detach()]) for first, second in pairs))
            losses.append(penalty)
            # The temperature's loss is a mean over all states.
            noise = noise[beyond]
            if self.entropy_fraction < 1:
                count = max(1, round(self.entropy_fraction * len(beyond)))
                some = torch.randperm(len(beyond), device=beyond.device)[:count]
                part, noise = part[some], noise[some]
            with torch.no_grad(), self._actor_context() as actor:
                action, _, log_prob = actor.rsample(part, noise)
            running = log_prob.running
            if len(noise) < len(beyond):
                # Their mean stands for those that were not drawn.
                running = running.mean().expand(len(beyond))
            runnings.append(running)
            saturation = saturation + len(beyond) * self.actor_network.module.saturation(action)
        order = torch.cat([within, beyond])

        def in_order(parts: torch.Tensor) -> torch.Tensor:
            rows = torch.empty_like(parts).index_copy(0, order, parts)
            return rows.reshape((*shape, *parts.shape[1:]))

        kl = PathKL(*(in_order(part) for part in kl))
        return in_order(torch.cat(losses)), in_order(torch.cat(runnings)), saturation / size, kl

    def critic_loss(self, tensordict: TensorDictBase) -> TensorDict:
        """Loss of the critic.

        Args:
            tensordict (TensorDictBase): transitions ``[*B]`` with the critic's inputs,
                ``value_target`` and, for the auxiliary loss, the next embedding; all of them are in
                ``in_keys``. Rows whose next
                embedding is not finite are left out of the auxiliary loss.

        Returns:
            TensorDict: ``loss_critic``, its detached parts ``value_cross_entropy`` and
            ``auxiliary_error``, and ``target_clip_fraction``.

        Raises:
            ValueError: an empty batch.
        """
        check_not_empty(tensordict)
        keys = self.tensor_keys
        target = tensordict.get(keys.value_target, None)
        if target is None:
            raise KeyError(
                f"No value target under {keys.value_target!r}: run loss.value_estimator on the "
                "rollout before it is cut into minibatches."
            )
        target = target.detach().squeeze(-1)
        mask = tensordict.get(keys.mask, None)
        mask = torch.ones_like(target) if mask is None else mask.to(target).squeeze(-1)
        # The histogram's support is made of buffers of the critic: it is used with its parameters.
        with self.critic_network_params.to_module(self.critic_network, preserve_module_state=False):
            out = self.critic_network(tensordict.select(*self.critic_network.in_keys))
            support = self.critic_network.support
            loss_value = mask * support.cross_entropy(out.get(keys.value_logits), target)
            clip_fraction = support.clip_fraction(target)
        loss_auxiliary = torch.zeros_like(loss_value)
        if self._has_auxiliary:
            goal = tensordict.get(self._next_embedding_key, None)
            if goal is None:
                raise KeyError(
                    f"No next embedding under {self._next_embedding_key!r}: run "
                    "loss.value_estimator on the rollout and keep this entry in the minibatches "
                    "(loss.in_keys has it), or build the loss with aux_coeff=0."
                )
            prediction = out.get(keys.next_embedding)
            valid = goal.isfinite().all(-1, keepdim=True)
            # Selected before squaring: NaN * 0 is NaN in the gradient too.
            error = torch.where(valid, prediction - goal.detach().nan_to_num(), 0.0)
            loss_auxiliary = mask * error.square().mean(-1)
        loss_critic = loss_value + self.aux_coeff * loss_auxiliary
        return TensorDict(
            {
                "loss_critic": _reduce(loss_critic, self.reduction),
                "value_cross_entropy": loss_value.detach().mean(),
                "auxiliary_error": loss_auxiliary.detach().mean(),
                "target_clip_fraction": clip_fraction,
            }
        )

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """All losses of a batch.

        Without a ``value_target`` entry the input must be a rollout ``[*B, T]``, on which the value
        estimator is run first.

        Args:
            tensordict (TensorDictBase): see :meth:`actor_loss` and :meth:`critic_loss`.

        Returns:
            TensorDict: losses under ``loss_*``, to be summed, and detached diagnostics.
        """
        check_not_empty(tensordict)
        if tensordict.get(self.tensor_keys.value_target, None) is None:
            tensordict = tensordict.copy()
            self.value_estimator(tensordict, params=self.critic_network_params)
        return self.actor_loss(tensordict).update(self.critic_loss(tensordict))

    # -- value estimator -----------------------------------------------------------------

    def make_value_estimator(
        self,
        value_type: str | type[ValueEstimatorBase] | ValueEstimatorBase | None = None,
        **hyperparams,
    ) -> TruDiLoss:
        """Build the value estimator.

        Args:
            value_type (str, type or ValueEstimatorBase, optional): ``"soft_td_lambda"``, an
                estimator class (built on this loss) or instance. Defaults to ``"soft_td_lambda"``.
            **hyperparams: arguments of the estimator, such as ``gamma`` and ``lmbda``.

        Returns:
            TruDiLoss: self.

        Raises:
            NotImplementedError: an upstream estimator of state values; this loss's critic is a Q
                function.
        """
        if value_type is None:
            value_type = self.default_value_estimator
        if isinstance(value_type, ValueEstimatorBase):
            self.value_type = type(value_type)
            self._value_estimator = value_type
        elif isinstance(value_type, type) and issubclass(value_type, SoftTDLambdaEstimator):
            self.value_type = value_type
            self._value_estimator = value_type.for_loss(self, **hyperparams)
        elif isinstance(value_type, type):
            raise NotImplementedError(
                f"{value_type.__name__} estimates state values; the critic of {type(self).__name__} "
                f"is a Q function. Supported: {SOFT_TD_LAMBDA!r} or a SoftTDLambdaEstimator class."
            )
        else:
            dispatch_value_estimator(self, value_type, supported=[SOFT_TD_LAMBDA], **hyperparams)
        self._value_estimator.set_keys(**self._estimator_keys())
        return self

    def _default_value_estimator(self) -> None:
        self.make_value_estimator(self.default_value_estimator)

"""Value estimators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, TensorDictParams
from tensordict.nn import TensorDictModule, dispatch
from torchrl.objectives.utils import register_value_estimator
from torchrl.objectives.value import ValueEstimatorBase

from torchrl_trudi.modules._feed_forward import check_feed_forward
from torchrl_trudi.modules.chain_model import DenoisingChain
from torchrl_trudi.modules.tensordict_module import ChainActor, HLGaussValueOperator
from torchrl_trudi.objectives.functional import soft_td_lambda_return
from torchrl_trudi.objectives.quarantine import before_marked

__all__ = ["SOFT_TD_LAMBDA", "SoftTDLambdaEstimator"]

#: Name under which losses find the estimator: ``loss.make_value_estimator(SOFT_TD_LAMBDA)``.
SOFT_TD_LAMBDA = "soft_td_lambda"


@register_value_estimator(SOFT_TD_LAMBDA, default_kwargs={"gamma": 0.99, "lmbda": 0.95})
class SoftTDLambdaEstimator(ValueEstimatorBase):
    r"""Soft TD(:math:`\lambda`) targets of a state-action value (arXiv 2507.11019, 2606.15260).

    For every step it takes a draw :math:`a' \sim \pi(\cdot | s')` at the true next state, evaluates
    :math:`Q(s', a')` and the log-probability, and applies
    :func:`~torchrl_trudi.objectives.soft_td_lambda_return`. It writes ``value_target``, and under
    ``"next"`` the action, its log-probability, the value and (if the critic has one) the embedding,
    which the auxiliary loss regresses. The returns take the log-probability in units of the action
    box, so that they do not depend on the units of the action space; what is written is the
    log-probability itself.

    The next state of a terminal step is not used; where it is not finite, the root state takes its place in
    the network calls and the next embedding is marked NaN, so that the auxiliary loss skips the row.
    In the next state of any other step such a value is an error (on a GPU it goes into the targets).

    A step marked by a ``("next", "quarantined")`` entry (:class:`~torchrl_trudi.envs.Quarantine`) has a
    target that means nothing. The step before it bootstraps from the state between the two, as if it were
    truncated.

    Unlike its relatives in torchrl it writes no advantage: the pathwise actor loss needs none.

    Keyword Args:
        gamma (float): discount.
        lmbda (float): trace decay.
        value_network (TensorDictModule): Q function of ``(observation, action)``.
        actor_network (ChainActor): the policy that draws ``a'``.
        temperature (float or callable): entropy temperature, or a function without arguments that
            returns it. Defaults to ``0.0``.
        mask_terminal_entropy (bool, optional): see
            :func:`~torchrl_trudi.objectives.soft_td_lambda_return`. Defaults to ``True``.
        reuse_actions (bool, optional): whether the draw at the next state is, within an episode, the
            next row's recorded action, with its log-probability from the recorded chain: an
            on-policy draw that costs no network call. A chain of its own is then only drawn at
            final states and in the last row. Needs the recorded action, and its log-probability
            (of an actor with ``return_log_prob=True``) or the recorded chain, means and scales.
            Defaults to ``False``, a chain of its own everywhere.
        chunk_size (int, optional): largest number of transitions per network call; ``None`` for one
            call. Defaults to ``None``.
        device (torch.device, optional): device of the buffers.

    Raises:
        NotImplementedError: a recurrent network.
        ValueError: ``gamma`` or ``lmbda`` outside of ``[0, 1]``, ``chunk_size < 1``, or (in
            ``forward``) a padded rollout, or a next state that is not finite at a step
            that is not terminal.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_trudi.modules import (
        ...     DiffusionActor, HLGaussCritic, HLGaussValueOperator, ScoreNetwork
        ... )
        >>> from torchrl_trudi.objectives import SoftTDLambdaEstimator
        >>> actor = DiffusionActor(2, score_network=ScoreNetwork(2, 3, hidden_size=16))
        >>> critic = HLGaussValueOperator(HLGaussCritic(5, -1.0, 1.0, hidden_size=16))
        >>> estimator = SoftTDLambdaEstimator(
        ...     gamma=0.99, lmbda=0.95, value_network=critic, actor_network=actor
        ... )
        >>> done = torch.zeros(4, 5, 1, dtype=torch.bool)
        >>> data = TensorDict({"observation": torch.randn(4, 5, 3), "next": {
        ...     "observation": torch.randn(4, 5, 3), "reward": torch.randn(4, 5, 1),
        ...     "done": done, "terminated": done.clone()}}, [4, 5])
        >>> estimator(data)["value_target"].shape
        torch.Size([4, 5, 1])
    """

    @dataclass
    class _AcceptedKeys(ValueEstimatorBase._AcceptedKeys):
        """The keys of the base class, the critic's embedding, and a mark.

        Attributes:
            embedding (NestedKey): the critic's embedding. Defaults to the critic's own, or
                ``("critic", "embedding")``.
            invalid (NestedKey): marks steps, under ``"next"``, whose return means nothing; the entry
                is optional. Defaults to ``"quarantined"``.
        """

        # Repeated, because the base class's set_keys looks for the names in this class itself.
        advantage: NestedKey = "advantage"
        value_target: NestedKey = "value_target"
        value: NestedKey = "state_value"
        reward: NestedKey = "reward"
        done: NestedKey = "done"
        terminated: NestedKey = "terminated"
        steps_to_next_obs: NestedKey = "steps_to_next_obs"
        sample_log_prob: NestedKey | None = None
        embedding: NestedKey = ("critic", "embedding")
        invalid: NestedKey = "quarantined"

    default_keys = _AcceptedKeys

    def __init__(
        self,
        *,
        gamma: float | torch.Tensor,
        lmbda: float | torch.Tensor,
        value_network: TensorDictModule,
        actor_network: ChainActor,
        temperature: float | Callable[[], torch.Tensor] = 0.0,
        mask_terminal_entropy: bool = True,
        reuse_actions: bool = False,
        chunk_size: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        for name, rate in (("gamma", gamma), ("lmbda", lmbda)):
            if not 0 <= float(rate) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {rate}.")
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {chunk_size}.")
        check_feed_forward(value_network, "critic")
        check_feed_forward(actor_network, "policy")
        super().__init__(value_network=value_network, device=device)
        self.__dict__["actor_network"] = actor_network
        self.__dict__["_temperature"] = temperature
        self.__dict__["_loss"] = None
        # float64, so that a float64 rollout is not discounted with a rounded factor. Not part of the
        # state: a checkpoint must not bring back the settings it was made with.
        factory = {"device": self._device, "dtype": torch.float64}
        self.register_buffer("gamma", torch.as_tensor(gamma, **factory), persistent=False)
        self.register_buffer("lmbda", torch.as_tensor(lmbda, **factory), persistent=False)
        self.mask_terminal_entropy = mask_terminal_entropy
        self.reuse_actions = reuse_actions
        self.chunk_size = chunk_size
        if isinstance(value_network, HLGaussValueOperator):
            self.set_keys(value=value_network.value_key, embedding=value_network.out_keys[2])
        elif "state_action_value" in getattr(value_network, "out_keys", ()):
            self.set_keys(value="state_action_value")

    @classmethod
    def for_loss(cls, loss_module, **hyperparams) -> SoftTDLambdaEstimator:
        """Build the estimator on a loss's networks and temperature."""
        hyperparams.setdefault("device", loss_module._default_device)
        hyperparams.setdefault("value_network", loss_module.critic_network)
        hyperparams.setdefault("actor_network", loss_module.actor_network)
        hyperparams.setdefault("temperature", loss_module.get_temperature)
        estimator = cls(**hyperparams)
        # The loss owns the parameters: after a deepcopy, a cast or a move the networks' own are
        # other tensors.
        estimator.__dict__["_loss"] = loss_module
        return estimator

    def _with_params(self, name: str, params: TensorDictBase | None = None):
        """Context in which a network has the given parameters, else those of the loss, if any."""
        network = self.actor_network if name == "actor_network" else self.value_network
        if params is None and network is getattr(self._loss, name, None):
            params = getattr(self._loss, f"{name}_params")
        if params is None:
            return nullcontext()
        return params.data.to_module(network, preserve_module_state=False)

    @property
    def temperature(self) -> float | torch.Tensor:
        """Current entropy temperature."""
        value = self._temperature() if callable(self._temperature) else self._temperature
        return value.detach() if isinstance(value, torch.Tensor) else value

    @property
    def in_keys(self) -> list[NestedKey]:
        """Keys that ``forward`` reads."""
        keys = self.tensor_keys
        observations = self._observation_keys()
        recorded = self._recorded_keys if self.reuse_actions else []
        # Root observations stand in for the missing next ones of terminal steps.
        return (
            [("next", key) for key in (keys.reward, keys.done, keys.terminated)]
            + [("next", *((key,) if isinstance(key, str) else key)) for key in observations]
            + observations
            + recorded
        )

    @property
    def out_keys(self) -> list[NestedKey]:
        """Keys that ``forward`` writes."""
        return [self.tensor_keys.value_target]

    def _observation_keys(self) -> list[NestedKey]:
        action_key = self.actor_network.action_key
        keys = list(self.actor_network.observation_keys)
        keys += [k for k in self.value_network.in_keys if k != action_key and k not in keys]
        return keys

    def _next_states(
        self, tensordict: TensorDictBase, terminated: torch.Tensor
    ) -> tuple[TensorDict, torch.Tensor]:
        """Observations of the true next states, and which rows have one."""
        following = tensordict.get("next")
        states = TensorDict({}, batch_size=tensordict.batch_size, device=tensordict.device)
        present = torch.ones_like(terminated)
        for key in self._observation_keys():
            observation = following.get(key, None)
            if observation is None:
                raise KeyError(f"The next state has no entry {key!r}.")
            missing = ~observation.isfinite().flatten(terminated.ndim - 1).all(-1, keepdim=True)
            present = present & ~missing
            # Only where the next state is not used: elsewhere a NaN has to show.
            replace = missing & terminated
            replace = replace.reshape(replace.shape + (1,) * (observation.ndim - replace.ndim))
            states.set(key, torch.where(replace, tensordict.get(key), observation))
        bad = ~present & ~terminated
        # On a GPU the test would wait for the device; there the value goes on into the targets and
        # the loss, which a training loop looks at once per iteration.
        if bad.device.type == "cpu" and bad.any():
            rows = bad.squeeze(-1).nonzero().tolist()
            raise ValueError(
                f"The next state is not finite at {len(rows)} steps that are not terminal (rows "
                f"{rows[:8]}); the return cannot bootstrap there."
            )
        return states, present

    @dispatch
    def forward(
        self,
        tensordict: TensorDictBase,
        *,
        params: TensorDictBase | None = None,
        target_params: TensorDictBase | None = None,
    ) -> TensorDictBase:
        """Compute the targets of a rollout.

        Args:
            tensordict (TensorDictBase): rollout ``[*B, T]`` (time is the dimension named
                ``"time"``, or the last one).

        Keyword Args:
            params (TensorDictBase, optional): parameters of the value network.
            target_params (TensorDictBase, optional): parameters for the next values, instead of
                ``params``.

        Returns:
            TensorDictBase: the input, with ``value_target`` ``[*B, T, 1]`` and the entries under
            ``"next"`` written.
        """
        if tensordict.batch_dims < 1:
            raise RuntimeError(
                f"Expected a rollout [*B, T], got batch_size={tensordict.batch_size}."
            )
        keys = self.tensor_keys
        if tensordict.get(("collector", "mask"), None) is not None:
            raise ValueError(
                "The rollout is padded (it has a collector mask), and padding would be taken for "
                "data: collect with split_trajs=False; the done flags separate the trajectories."
            )
        done = tensordict.get(("next", keys.done))
        terminated = tensordict.get(("next", keys.terminated), default=done)
        states, present = self._next_states(tensordict, terminated)
        next_params = params if target_params is None else target_params
        with (
            torch.no_grad(),
            self._with_params("actor_network"),
            self._with_params("critic_network", next_params),
        ):
            evaluated = self._draw_actions(tensordict, states, done | terminated)
            self._evaluate(evaluated)
        log_prob = evaluated.get("log_prob")
        value = evaluated.get("value")
        following = tensordict.get("next")
        following.set(self.actor_network.action_key, evaluated.get(self.actor_network.action_key))
        following.set(self.actor_network.tensor_keys.log_prob, log_prob.squeeze(-1))
        following.set(keys.value, value)
        embedding = evaluated.get("embedding", None)
        if embedding is not None:
            following.set(keys.embedding, embedding.masked_fill(~present, torch.nan))
        tensordict.set(
            keys.value_target,
            self.value_estimate(tensordict, next_value=value, next_log_prob=log_prob),
        )
        return tensordict

    def _draw_actions(
        self, tensordict: TensorDictBase, states: TensorDict, done: torch.Tensor
    ) -> TensorDict:
        """The next states with an action of the policy and its log-probability."""
        action_key = self.actor_network.action_key
        flat = states.reshape(-1)
        if not self.reuse_actions:
            action, log_prob = self._sample(flat)
            flat.set(action_key, action).set("log_prob", log_prob)
            return flat.reshape(states.batch_size)
        log_prob = self._recorded_log_prob(tensordict).unsqueeze(-1)
        # The draw at a row's next state is the next row's own, but where an episode or the rollout
        # ends.
        time = self._get_time_dim(None, tensordict)
        last = torch.zeros_like(done)
        last.select(time, -1).fill_(True)
        fresh = (done | last).flatten().nonzero().squeeze(-1)
        drawn, drawn_log_prob = self._sample(flat[fresh])
        # In the type of the policy, which that of the action space need not be.
        action = tensordict.get(action_key).to(drawn.dtype).roll(-1, time).flatten(0, -2)
        log_prob = log_prob.roll(-1, time).flatten(0, -2)
        action[fresh], log_prob[fresh] = drawn, drawn_log_prob
        flat.set(action_key, action).set("log_prob", log_prob)
        return flat.reshape(states.batch_size)

    @property
    def _recorded_keys(self) -> list[NestedKey]:
        """What ``reuse_actions`` reads of the actor's record: the action, and ``L`` or its parts."""
        actor = self.actor_network
        if actor.return_log_prob:
            return [actor.action_key, actor.tensor_keys.log_prob]
        return [actor.action_key, *actor.dist_sample_keys, *actor.dist_params_keys]

    def _recorded_log_prob(self, tensordict: TensorDictBase) -> torch.Tensor:
        """``L`` of the recorded actions, ``[*B, T]``."""
        actor, recorded = self.actor_network, self._recorded_keys
        missing = [key for key in recorded if tensordict.get(key, None) is None]
        if missing:
            raise KeyError(
                f"reuse_actions=True needs the recorded entries {missing}: collect with an "
                "actor built with return_log_prob=True, or with return_chain=True and "
                "return_dist_params=True."
            )
        if actor.return_log_prob:
            return tensordict.get(recorded[1])
        chain = DenoisingChain(*(tensordict.get(k) for k in recorded[1:]))
        return actor.module.log_prob(actor.observation(tensordict), chain).log_prob

    def _sample(self, states: TensorDictBase) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [self.actor_network.rsample(part) for part in self._chunks(states)]
        actions, _, log_probs = zip(*parts, strict=True)
        return torch.cat(actions), torch.cat([x.log_prob for x in log_probs]).unsqueeze(-1)

    def _chunks(self, states: TensorDictBase) -> Sequence[TensorDictBase]:
        size = states.shape[0] if self.chunk_size is None else self.chunk_size
        return states.split(size)

    def _evaluate(self, states: TensorDict) -> None:
        """Writes the critic's outputs."""
        keys, network = self.tensor_keys, self.value_network
        parts = []
        for part in self._chunks(states.reshape(-1).select(*network.in_keys)):
            if isinstance(network, HLGaussValueOperator):
                value, embedding = network.value_and_embedding(part)
                parts.append((value.unsqueeze(-1), embedding))
                continue
            # A copy, or the chunk would keep all that the network writes.
            out = network(part.copy())
            written = (out.get(keys.value), out.get(keys.embedding, None))
            parts.append(tuple(entry for entry in written if entry is not None))
        for name, entry in zip(("value", "embedding"), zip(*parts, strict=True), strict=False):
            states.set(name, torch.cat(entry).unflatten(0, states.batch_size))

    def value_estimate(
        self,
        tensordict: TensorDictBase,
        target_params: TensorDictParams | None = None,
        next_value: torch.Tensor | None = None,
        next_log_prob: torch.Tensor | None = None,
        time_dim: int | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """Returns from given next values and log-probabilities.

        Args:
            tensordict (TensorDictBase): rollout ``[*B, T]``.
            target_params: unused; for the signature of the base class.
            next_value (torch.Tensor, optional): ``Q(s', a')`` ``[*B, T, 1]``. Defaults to the entry
                that ``forward`` wrote.
            next_log_prob (torch.Tensor, optional): ``L'`` ``[*B, T, 1]``, likewise.
            time_dim (int, optional): time dimension.

        Returns:
            torch.Tensor: ``[*B, T, 1]``.
        """
        keys = self.tensor_keys
        following = tensordict.get("next")
        if next_value is None:
            next_value = following.get(keys.value)
        if next_log_prob is None:
            next_log_prob = following.get(self.actor_network.tensor_keys.log_prob).unsqueeze(-1)
        reward = following.get(keys.reward)
        done = ended = following.get(keys.done)
        time_dim = self._get_time_dim(time_dim, tensordict)
        invalid = following.get(keys.invalid, None)
        if invalid is not None:
            ended = done | before_marked(invalid, time_dim)
        with self._with_params("actor_network"):
            log_volume = self.actor_network.module.log_volume().detach()
        return soft_td_lambda_return(
            self.gamma.to(reward),
            self.lmbda.to(reward),
            self.temperature,
            next_value,
            # In units of the action box: the entropy would otherwise pay a constant per step that
            # depends on the units of the action space, and so favour long or short episodes.
            next_log_prob + log_volume,
            reward,
            ended,
            following.get(keys.terminated, default=done),
            mask_terminal_entropy=self.mask_terminal_entropy,
            time_dim=time_dim,
        )

"""The TensorDict front of a policy that makes its action by a chain, and records it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase, is_batchedtensor, unravel_key
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    dispatch,
    set_skip_existing,
)
from tensordict.nn.probabilistic import interaction_type
from torchrl.data import Bounded, Composite, TensorSpec
from torchrl.modules import SafeModule

from torchrl_trudi.modules._feed_forward import check_feed_forward
from torchrl_trudi.modules.chain_model import (
    ChainModel,
    DenoisingChain,
    PathLogProb,
    inner_box,
)
from torchrl_trudi.modules.distributions import DenoisingPath

__all__ = ["ChainActor"]


def action_bounds(spec: TensorSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds ``[A]`` of a box action spec, batched or not.

    Args:
        spec (TensorSpec): the action spec; all dimensions but the last are those of a batch.

    Returns:
        tuple of torch.Tensor: ``low`` and ``high``, each ``[A]``.

    Raises:
        NotImplementedError: the spec is discrete or unbounded.
        ValueError: the bounds differ between the batch rows of the spec.
    """
    if not isinstance(spec, Bounded) or not spec.dtype.is_floating_point:
        raise NotImplementedError(
            "The actor acts in a continuous box: it needs a floating-point Bounded spec, "
            f"got {spec}."
        )
    low, high = spec.space.low, spec.space.high
    if low.ndim == 0:
        raise ValueError(f"The action spec needs a last dimension, got a scalar: {spec}.")
    if not (low.isfinite().all() and high.isfinite().all()):
        raise NotImplementedError(
            f"The actor squashes into a bounded box, but the action spec is unbounded: {spec}."
        )
    low, high = (bound.reshape(-1, bound.shape[-1]) for bound in (low, high))
    if not ((low == low[:1]).all() and (high == high[:1]).all()):
        raise ValueError(
            f"The action bounds must be the same for all rows of a batched spec, got {spec}."
        )
    return low[0], high[0]


class ActionEntry(NamedTuple):
    """The action's key, its spec and its box.

    Fields:
        key (NestedKey): the action key.
        spec (Composite, optional): the spec with this entry alone.
        low (torch.Tensor, optional): lower bounds ``[A]``.
        high (torch.Tensor, optional): upper bounds ``[A]``.
    """

    key: NestedKey
    spec: Composite | None
    low: torch.Tensor | None
    high: torch.Tensor | None


def action_entry(
    spec: TensorSpec | None, out_keys: Sequence[NestedKey] | None, action_dim: int
) -> ActionEntry:
    """Check what an actor was told about its action.

    Args:
        spec (TensorSpec, optional): action spec, or a Composite holding it.
        out_keys (sequence of NestedKey, optional): the action key; ``None`` for ``["action"]``.
        action_dim (int): action size ``A``.

    Returns:
        ActionEntry: the key, and spec and bounds if there is a spec.

    Raises:
        NotImplementedError: an unbounded or discrete ``spec``.
        ValueError: several ``out_keys``, a spec of another size.
        KeyError: a Composite ``spec`` without the action.
    """
    out_keys = ["action"] if out_keys is None else list(out_keys)
    if len(out_keys) != 1:
        raise ValueError(
            "out_keys is the action key alone; the chain's keys are set with set_keys. "
            f"Got {out_keys}."
        )
    key = unravel_key(out_keys[0])
    if spec is None:
        return ActionEntry(key, None, None, None)
    if isinstance(spec, Composite) and key not in spec.keys(True, True):
        raise KeyError(f"The spec has no entry {key!r}; it has {list(spec.keys(True, True))}.")
    action_spec = spec[key] if isinstance(spec, Composite) else spec
    low, high = action_bounds(action_spec)
    if low.shape[-1] != action_dim:
        raise ValueError(
            f"action_dim is {action_dim}, but the spec has {low.shape[-1]} dimensions."
        )
    composite = Composite({key: action_spec}, shape=action_spec.shape[:-1])
    return ActionEntry(key, composite, low, high)


class ChainActor(SafeModule):
    r"""Actor whose action is the end of a chain with Gaussian kernels, which it can record.

    The front of any :class:`~torchrl_trudi.modules.ChainModel`; most users want one of its two
    subclasses, :class:`~torchrl_trudi.modules.DiffusionActor` and
    :class:`~torchrl_trudi.modules.GaussianActor`, which build the model too. The losses take any
    of them.

    Under ``RANDOM`` exploration (the default outside of any context, see
    ``default_interaction_type``) it samples the chain. Under ``DETERMINISTIC``, ``MODE``, ``MEAN`` or
    ``MEDIAN`` it takes the model's noise-free chain.

    It follows the interface of torchrl's probabilistic actors (``get_dist``,
    ``build_dist_from_params``, ``log_prob``, ``dist_params_keys``, ``dist_sample_keys``,
    ``log_prob_keys``), with the chain in the role of the sample. It is not a
    :class:`~torchrl.modules.ProbabilisticActor`, because its losses read the chain with the means and
    scales behind it as one record, whose last latent is the exact value before the squashing, so
    that no log-probability has to invert a rounded ``tanh``.

    Args:
        module (ChainModel): the policy on plain tensors; its box is that of ``spec``.
        in_keys (sequence of NestedKey, optional): observations, concatenated in order.
            Defaults to ``["observation"]``.
        out_keys (sequence of NestedKey, optional): the action key. Defaults to ``["action"]``.

    Keyword Args:
        spec (TensorSpec, optional): action spec (or a Composite holding it): a bounded
            floating-point box. The action is written in its type, whatever that of the network.
            Defaults to ``None``.
        return_chain (bool, optional): write the chain ``[*B, N + 1, A]``. Defaults to ``False``.
        return_dist_params (bool, optional): write the kernels' means and scales, ``[*B, N, A]``.
            Defaults to ``False``.
        return_log_prob (bool, optional): write the log-probability ``L`` of the action, or what stands
            for it, ``[*B]``. Defaults to ``False``.
        return_path_log_prob (bool, optional): write the forward log-probability of the chain, the
            denominator of likelihood ratios: ``[*B]``, or ``[*B, N]`` with ``event_dims=1``.
            Defaults to ``False``.
        return_noise (bool, optional): write the standard normals of the chain, ``[*B, N + 1, A]``: with the
            old policy's parameters they stand for the whole record, see
            ``TrajectoryKLProjection(old_policy="replayed")``. Defaults to ``False``.
        event_dims (int, optional): ``2`` for whole-path, ``1`` for per-step distributions, see
            :class:`~torchrl_trudi.modules.DenoisingPath`. Defaults to ``2``.
        noise_key (NestedKey, optional): optional input with the standard normals
            ``[*B, N + 1, A]`` of the chain; when the entry is there it is used instead of the random
            generator. Defaults to ``None``: no such input is read.
        default_interaction_type (InteractionType, optional): exploration outside of any
            :func:`~torchrl.envs.set_exploration_type` context. Defaults to ``RANDOM``.
        check_observation (bool, optional): raise on a non-finite observation (CPU only: on a GPU the
            check would wait for the device at every step). Defaults to ``True``.
        safe (bool, optional): see :class:`~torchrl.modules.SafeModule`. The action is in its box by
            construction. Defaults to ``False``.

    Raises:
        NotImplementedError: an unbounded or discrete ``spec``; a recurrent network (a recurrent module of
            torchrl inside, or ``is_init`` or a recurrent state among the ``in_keys``).
        ValueError: a spec of another size or box than the model's, keys that coincide; a non-finite
            observation.
        KeyError: a Composite ``spec`` without the action; :meth:`get_dist` without a recorded chain.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import NormalParamExtractor
        >>> from torch import nn
        >>> from torchrl_trudi.modules import ChainActor, GaussianModel
        >>> network = nn.Sequential(nn.Linear(3, 4), NormalParamExtractor())
        >>> actor = ChainActor(GaussianModel(network, action_dim=2), return_chain=True)
        >>> td = actor(TensorDict({"observation": torch.randn(4, 3)}, [4]))
        >>> td["action"].shape, td["denoising", "chain"].shape
        (torch.Size([4, 2]), torch.Size([4, 2, 2]))
    """

    @dataclass
    class _AcceptedKeys:
        """Tensordict keys that can be set with ``set_keys``.

        Attributes:
            chain (NestedKey): the chain. Defaults to ``("denoising", "chain")``.
            loc (NestedKey): the kernels' means. Defaults to ``("denoising", "loc")``.
            scale (NestedKey): the kernels' scales. Defaults to ``("denoising", "scale")``.
            log_prob (NestedKey): the log-probability surrogate. Defaults to ``("denoising", "log_prob")``.
            path_log_prob (NestedKey): the forward log-probability of the chain. Defaults to
                ``("denoising", "path_log_prob")``.
            noise (NestedKey): the standard normals. Defaults to ``("denoising", "noise")``.
        """

        chain: NestedKey = ("denoising", "chain")
        loc: NestedKey = ("denoising", "loc")
        scale: NestedKey = ("denoising", "scale")
        log_prob: NestedKey = ("denoising", "log_prob")
        path_log_prob: NestedKey = ("denoising", "path_log_prob")
        noise: NestedKey = ("denoising", "noise")

    default_keys = _AcceptedKeys
    module: ChainModel

    def __init__(
        self,
        module: ChainModel,
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        *,
        spec: TensorSpec | None = None,
        return_chain: bool = False,
        return_dist_params: bool = False,
        return_log_prob: bool = False,
        return_path_log_prob: bool = False,
        return_noise: bool = False,
        event_dims: Literal[1, 2] = 2,
        noise_key: NestedKey | None = None,
        default_interaction_type: InteractionType = InteractionType.RANDOM,
        check_observation: bool = True,
        safe: bool = False,
    ) -> None:
        in_keys = ["observation"] if in_keys is None else list(in_keys)
        if event_dims not in (1, 2):
            raise ValueError(f"event_dims must be 1 (per step) or 2 (path), got {event_dims}.")
        action = action_entry(spec, out_keys, module.action_dim)
        if action.low is not None and action.high is not None:
            box = inner_box(action.low, action.high, module.low)
            for name, given in zip(("low", "high"), box, strict=True):
                own = getattr(module, name)
                if not torch.equal(own, given):
                    raise ValueError(
                        f"The model's action box is not that of the spec: its {name} is "
                        f"{own.tolist()}, the spec's {given.tolist()}."
                    )
        super().__init__(
            module, in_keys=in_keys, out_keys=[action.key], spec=action.spec, safe=safe
        )
        check_feed_forward(self, "policy")
        self._observation_keys: list[NestedKey] = [unravel_key(key) for key in in_keys]
        self.action_key = action.key
        self._action_dtype = None if action.low is None else action.low.dtype
        self.return_chain = return_chain
        self.return_dist_params = return_dist_params
        self.return_log_prob = return_log_prob
        self.return_path_log_prob = return_path_log_prob
        self.return_noise = return_noise
        self.event_dims = event_dims
        self.noise_key = None if noise_key is None else unravel_key(noise_key)
        self.default_interaction_type = InteractionType(default_interaction_type)
        self.check_observation = check_observation
        self._tensor_keys = self._AcceptedKeys()
        self._wire_keys()

    # -- keys ----------------------------------------------------------------------

    @property
    def tensor_keys(self) -> _AcceptedKeys:
        """The configured tensordict keys."""
        return self._tensor_keys

    def set_keys(self, **kwargs: NestedKey) -> None:
        """Set tensordict key names, see :class:`ChainActor._AcceptedKeys`.

        Args:
            **kwargs (NestedKey): new names by role (``chain``, ``loc``, ``scale``, ``log_prob``,
                ``path_log_prob``, ``noise``).

        Raises:
            ValueError: an unknown role.
        """
        accepted = asdict(self._tensor_keys)
        for role in kwargs:
            if role not in accepted:
                raise ValueError(
                    f"{role} is not an accepted tensordict key. Accepted keys are: {list(accepted)}."
                )
        accepted.update({role: unravel_key(key) for role, key in kwargs.items()})
        names = [self.action_key, *self.observation_keys, *accepted.values()]
        if len(set(names)) < len(names):
            raise ValueError(f"The actor's keys must differ from each other, got {names}.")
        self._tensor_keys = self._AcceptedKeys(**accepted)
        self._wire_keys()

    def _wire_keys(self) -> None:
        keys = self.tensor_keys
        # Acting does not read the chain, scoring does: losses that select the actor's inputs
        # (A2CLoss) have to keep it.
        self.in_keys = [*self._observation_keys, keys.chain]
        out_keys = [self.action_key]
        if self.return_chain:
            out_keys.append(keys.chain)
        if self.return_dist_params:
            out_keys += [keys.loc, keys.scale]
        if self.return_log_prob:
            out_keys.append(keys.log_prob)
        if self.return_path_log_prob:
            out_keys.append(keys.path_log_prob)
        if self.return_noise:
            out_keys.append(keys.noise)
        self.out_keys = out_keys
        spec = Composite({self.action_key: self.spec[self.action_key]}, shape=self.spec.shape)
        for key in out_keys[1:]:
            spec[key] = None
        self._spec = spec
        # Losses of torchrl look for one such module to learn the parameters' keys (KLPENPPOLoss).
        self.dist_module = ProbabilisticTensorDictModule(
            in_keys={"loc": keys.loc, "scale": keys.scale},
            out_keys=[keys.chain],
            distribution_class=DenoisingPath,
            distribution_kwargs={"event_dims": self.event_dims},
            log_prob_key=keys.path_log_prob,
        )

    @property
    def dist_params_keys(self) -> list[NestedKey]:
        """Keys of the distribution parameters: means and scales."""
        return [self.tensor_keys.loc, self.tensor_keys.scale]

    @property
    def dist_sample_keys(self) -> list[NestedKey]:
        """Key of the distribution's sample: the chain."""
        return [self.tensor_keys.chain]

    @property
    def log_prob_keys(self) -> list[NestedKey]:
        """Key of the sample's log-probability: that of the chain's transitions."""
        return [self.tensor_keys.path_log_prob]

    @property
    def log_prob_key(self) -> NestedKey:
        """See :attr:`log_prob_keys`."""
        return self.tensor_keys.path_log_prob

    # -- acting ----------------------------------------------------------------------

    @property
    def observation_keys(self) -> list[NestedKey]:
        """Keys of the observations; ``in_keys`` also has the chain, which only scoring reads."""
        return self._observation_keys

    @property
    def num_steps(self) -> int:
        """Number of steps of the chain."""
        return self.module.num_steps

    def observation(self, tensordict: TensorDictBase) -> torch.Tensor:
        """The network's input: the entries of ``observation_keys``, concatenated, ``[*B, O]``."""
        keys = self.observation_keys
        parts = [tensordict.get(key) for key in keys]
        missing = [key for key, part in zip(keys, parts, strict=True) if part is None]
        if missing:
            raise KeyError(
                f"The actor's inputs {missing} are not among the entries "
                f"{sorted(map(str, tensordict.keys(True, True)))}."
            )
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    def _check_finite(self, observation: torch.Tensor) -> None:
        if (
            not self.check_observation
            or observation.is_cuda
            or torch.compiler.is_compiling()
            or is_batchedtensor(observation)
        ):
            return
        if not observation.isfinite().all():
            where = ""
            if observation.ndim > 1:
                rows = (~observation.isfinite()).any(-1).nonzero().tolist()
                total = observation.shape[:-1].numel()
                where = f" in rows {rows[:8]} ({len(rows)} of {total})"
            raise ValueError(
                f"The observation {self.observation_keys} has non-finite values{where}."
            )

    @dispatch(auto_batch_size=False)
    @set_skip_existing(None)
    def forward(self, tensordict: TensorDictBase, **kwargs) -> TensorDictBase:
        """Act on the observation, and record what was asked for.

        Entries that an earlier call left in ``tensordict`` are never read, and are overwritten.

        Args:
            tensordict (TensorDictBase): holds the observations, and optionally ``noise_key``.

        Returns:
            TensorDictBase: the input, with ``out_keys`` written.
        """
        observation = self.observation(tensordict)
        self._check_finite(observation)
        exploration = interaction_type()
        if exploration is None:
            exploration = self.default_interaction_type
        if exploration == InteractionType.RANDOM:
            noise = None if self.noise_key is None else tensordict.get(self.noise_key, None)
            if noise is None:
                noise = self.module.draw_noise(observation.shape[:-1])
            chain = self.module.sample(observation, noise)
        else:
            chain = self.module.deterministic_chain(observation)
            noise = None
        if self.return_noise:
            # That of the noise-free chain is zero.
            noise = torch.zeros_like(chain.latents) if noise is None else noise
            tensordict.set(self.tensor_keys.noise, noise)
        return self._write(tensordict, observation, chain)

    def _write(
        self, tensordict: TensorDictBase, observation: torch.Tensor, chain: DenoisingChain
    ) -> TensorDictBase:
        keys = self.tensor_keys
        action = self.module.squash(chain.latents[..., -1, :])
        if self._action_dtype is not None:
            # That of the spec, which may be another one than that of the network.
            action = action.to(self._action_dtype)
        tensordict.set(self.action_key, action)
        if self.return_chain:
            tensordict.set(keys.chain, chain.latents)
        if self.return_dist_params:
            tensordict.set(keys.loc, chain.loc)
            tensordict.set(keys.scale, chain.scale.expand_as(chain.loc))
        if self.return_log_prob:
            tensordict.set(keys.log_prob, self.module.log_prob(observation, chain).log_prob)
        if self.return_path_log_prob:
            dist = DenoisingPath(chain.loc, chain.scale, self.event_dims)
            tensordict.set(keys.path_log_prob, dist.log_prob(chain.latents))
        return tensordict

    def rsample(
        self, tensordict: TensorDictBase, noise: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, DenoisingChain, PathLogProb]:
        """Draw a differentiable chain whatever the exploration type, for pathwise losses.

        Losses run under deterministic exploration, so they must not sample by calling the actor.

        Args:
            tensordict (TensorDictBase): holds the observations; nothing is written.
            noise (torch.Tensor, optional): standard normals ``[*B, N + 1, A]``.

        Returns:
            tuple: action ``[*B, A]``, the chain, and its log-probability pieces.
        """
        observation = self.observation(tensordict)
        chain = self.module.sample(observation, noise)
        action = self.module.squash(chain.latents[..., -1, :])
        return action, chain, self.module.log_prob(observation, chain)

    # -- scoring ----------------------------------------------------------------------

    def get_dist(self, tensordict: TensorDictBase, **kwargs) -> DenoisingPath:
        """The current policy's kernels at the states of the recorded chain, in one batched call.

        Args:
            tensordict (TensorDictBase): holds the observations and the chain.

        Returns:
            DenoisingPath: batch shape ``[*B]``, or ``[*B, N]`` with ``event_dims=1``.

        Raises:
            KeyError: no chain in the input.
        """
        latents = tensordict.get(self.tensor_keys.chain, None)
        if latents is None:
            raise KeyError(
                f"No chain under {self.tensor_keys.chain}: collect with an actor built with "
                "return_chain=True."
            )
        loc, scale = self.module.score(self.observation(tensordict), latents)
        return DenoisingPath(loc, scale, self.event_dims)

    def build_dist_from_params(self, tensordict: TensorDictBase, **kwargs) -> DenoisingPath:
        """The acting policy's kernels, from the recorded means and scales.

        Args:
            tensordict (TensorDictBase): holds the entries of ``dist_params_keys``.

        Raises:
            KeyError: no recorded means or scales in the input.
        """
        params = [tensordict.get(key, None) for key in self.dist_params_keys]
        if any(param is None for param in params):
            raise KeyError(
                f"No kernel parameters under {self.dist_params_keys}: collect with an actor built "
                "with return_dist_params=True."
            )
        return DenoisingPath(params[0], params[1], self.event_dims)

    def log_prob(self, tensordict: TensorDictBase) -> torch.Tensor:
        """Forward log-probability of the recorded chain under the current policy, ``[*B]`` or ``[*B, N]``."""
        return self.get_dist(tensordict).log_prob(tensordict.get(self.tensor_keys.chain))

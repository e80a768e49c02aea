"""Tanh-Gaussian actor, with the record of a chain of one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from tensordict import NestedKey
from tensordict.nn import InteractionType
from torch import nn
from torchrl.data import TensorSpec

from torchrl_trudi.modules.gaussian_model import GaussianModel
from torchrl_trudi.modules.networks import GaussianNetwork
from torchrl_trudi.modules.tensordict_module.chain_actor import ChainActor, action_entry

__all__ = ["GaussianActor"]


class GaussianActor(ChainActor):
    r"""Tanh-Gaussian actor for the losses of the diffusion policy (the actor of REPPO, arXiv 2507.11019).

    The control arm of :class:`~torchrl_trudi.modules.DiffusionActor`: the same front, the same record and
    the same losses, with a Gaussian of state-dependent mean and scale in the place of the denoising
    chain. Its chain has one step, ``N = 1``: index 0 is an unused zero, index 1 the latent before the
    squashing; the recorded log-probability is the exact one of the action. Under ``RANDOM`` exploration
    it samples, under ``DETERMINISTIC``, ``MODE``, ``MEAN`` or ``MEDIAN`` it acts by the squashed mean.

    It is not a :class:`~torchrl.modules.ProbabilisticActor` with a
    :class:`~torchrl.modules.TanhNormal`, because the same losses read one record (chain, mean, scale), and
    the exact latent in it makes an ``atanh`` of the rounded action unnecessary.

    :class:`~torchrl_trudi.objectives.TruDiLoss` takes the full KL and the entropy target of a Gaussian unless
    it is told otherwise; ``actor_gradient="adjoint"`` is for denoising chains only.

    Args:
        action_dim (int): action size ``A``.
        obs_dim (int, optional): summed observation size. Needed unless ``network`` is given.
        network (nn.Module, optional): returns mean and standard deviation, see
            :class:`~torchrl_trudi.modules.GaussianModel`. Defaults to
            ``GaussianNetwork(action_dim, obs_dim)``.
        in_keys (sequence of NestedKey, optional): observations, concatenated in order.
            Defaults to ``["observation"]``.
        out_keys (sequence of NestedKey, optional): the action key. Defaults to ``["action"]``.

    Keyword Args:
        spec (TensorSpec, optional): action spec (or a Composite holding it): a bounded
            floating-point box, whose bounds the action takes. Defaults to ``None``: the action is
            in ``(-1, 1)``.
        return_chain (bool, optional): write the chain ``[*B, 2, A]``. Defaults to ``False``.
        return_dist_params (bool, optional): write mean and scale, ``[*B, 1, A]``. Defaults to
            ``False``.
        return_log_prob (bool, optional): write the log-probability of the action, ``[*B]``.
            Defaults to ``False``.
        return_path_log_prob (bool, optional): write the log-probability of the latent, the denominator
            of likelihood ratios: ``[*B]``, or ``[*B, 1]`` with ``event_dims=1``. Defaults to ``False``.
        return_noise (bool, optional): write the standard normals that made the latent, ``[*B, 2, A]``
            (index 0 unused), see :class:`~torchrl_trudi.modules.DiffusionActor`. Defaults to ``False``.
        event_dims (int, optional): ``2`` or ``1``, see :class:`~torchrl_trudi.modules.DenoisingPath`.
            Defaults to ``2``.
        noise_key (NestedKey, optional): optional input with the standard normals ``[*B, 2, A]`` (index
            0 unused); when the entry is there it is used instead of the random generator. Defaults
            to ``None``: no such input is read.
        default_interaction_type (InteractionType, optional): exploration outside of any
            :func:`~torchrl.envs.set_exploration_type` context. Defaults to ``RANDOM``.
        check_observation (bool, optional): raise on a non-finite observation (CPU only: on a GPU the
            check would wait for the device at every step). Defaults to ``True``.
        safe (bool, optional): see :class:`~torchrl.modules.SafeModule`. The action is in its box by
            construction. Defaults to ``False``.
        device (torch.device, optional): device of the parameters.
        dtype (torch.dtype, optional): dtype of the parameters.

    Raises:
        NotImplementedError: an unbounded or discrete ``spec``.
        ValueError: sizes that disagree (``action_dim``, ``spec``), neither ``obs_dim`` nor ``network``,
            keys that coincide; a non-finite observation.
        KeyError: a Composite ``spec`` without the action; :meth:`get_dist` without a recorded chain.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Bounded
        >>> from torchrl_trudi.modules import GaussianActor, GaussianNetwork
        >>> actor = GaussianActor(
        ...     action_dim=2,
        ...     network=GaussianNetwork(2, 3, hidden_size=16),
        ...     spec=Bounded(-2.0, 2.0, (2,)),
        ...     return_chain=True,
        ...     return_dist_params=True,
        ...     return_log_prob=True,
        ... )
        >>> td = actor(TensorDict({"observation": torch.randn(4, 3)}, [4]))
        >>> td["action"].shape, td["denoising", "chain"].shape, td["denoising", "log_prob"].shape
        (torch.Size([4, 2]), torch.Size([4, 2, 2]), torch.Size([4]))
    """

    module: GaussianModel

    def __init__(
        self,
        action_dim: int,
        obs_dim: int | None = None,
        network: nn.Module | None = None,
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
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        action = action_entry(spec, out_keys, action_dim)
        if network is None:
            if obs_dim is None:
                raise ValueError("Pass obs_dim, or a network.")
            network = GaussianNetwork(action_dim, obs_dim, device=device, dtype=dtype)
        module = GaussianModel(
            network, action_dim, low=action.low, high=action.high, device=device, dtype=dtype
        )
        super().__init__(
            module,
            in_keys,
            [action.key],
            spec=action.spec,
            return_chain=return_chain,
            return_dist_params=return_dist_params,
            return_log_prob=return_log_prob,
            return_path_log_prob=return_path_log_prob,
            return_noise=return_noise,
            event_dims=event_dims,
            noise_key=noise_key,
            default_interaction_type=default_interaction_type,
            check_observation=check_observation,
            safe=safe,
        )

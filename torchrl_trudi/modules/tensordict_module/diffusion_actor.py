"""Denoising diffusion actor with a recorded chain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from tensordict import NestedKey
from tensordict.nn import InteractionType
from torch import nn
from torchrl.data import TensorSpec

from torchrl_trudi.modules.denoising import DenoisingModel
from torchrl_trudi.modules.networks import ScoreNetwork
from torchrl_trudi.modules.step_sizes import StepSizes
from torchrl_trudi.modules.tensordict_module.chain_actor import ChainActor, action_entry

__all__ = ["DiffusionActor"]


class DiffusionActor(ChainActor):
    r"""Actor that samples actions by an N-step denoising chain and can record the chain (arXiv 2606.15260).

    Under ``RANDOM`` exploration (the default outside of any context, see
    ``default_interaction_type``) it samples the stochastic chain. Under ``DETERMINISTIC``, ``MODE``,
    ``MEAN`` or ``MEDIAN`` it runs the noise-free chain from the prior mean, so that the same
    observation always gives the same action; the recorded log-probability is then that of the
    noise-free chain under the stochastic kernels.

    With everything recorded (``return_chain``, ``return_dist_params``, ``return_log_prob``), a batch
    holds the acting policy: losses compare the current network with it in one batched call,
    :meth:`get_dist`, without a second network or rollout.

    The actor follows the interface of torchrl's probabilistic actors (``get_dist``,
    ``build_dist_from_params``, ``log_prob``, ``dist_params_keys``, ``dist_sample_keys``,
    ``log_prob_keys``), with the chain in the role of the sample, and so works with
    :class:`~torchrl.objectives.PPOLoss` and its relatives.

    Unlike torchrl's own :class:`torchrl.modules.DiffusionActor` (a DDPM for behaviour cloning), it
    has a log-probability and a trust region; the leading constructor arguments are the same, without
    the beta schedule. :class:`~torchrl.objectives.DiffusionBCLoss` regresses the added noise, which
    is not what this chain's control is, so it does not apply here.

    Args:
        action_dim (int): action size ``A``.
        obs_dim (int, optional): summed observation size. Needed unless ``score_network`` is given.
        score_network (nn.Module, optional): control network, see
            :class:`~torchrl_trudi.modules.DenoisingModel`. Defaults to
            ``ScoreNetwork(action_dim, obs_dim)``.
        num_steps (int, optional): number of denoising steps ``N``. Defaults to ``8``.
        in_keys (sequence of NestedKey, optional): observations, concatenated in order.
            Defaults to ``["observation"]``.
        out_keys (sequence of NestedKey, optional): the action key. Defaults to ``["action"]``.

    Keyword Args:
        spec (TensorSpec, optional): action spec (or a Composite holding it): a bounded
            floating-point box, whose bounds the action takes. Defaults to ``None``: the action is
            in ``(-1, 1)``.
        return_chain (bool, optional): write the chain ``[*B, N + 1, A]``. Defaults to ``False``.
        return_dist_params (bool, optional): write the kernels' means and scales, ``[*B, N, A]``.
            Defaults to ``False``.
        return_log_prob (bool, optional): write the log-probability surrogate ``L``, ``[*B]``.
            Defaults to ``False``.
        return_path_log_prob (bool, optional): write the forward log-probability of the chain, the
            denominator of likelihood ratios: ``[*B]``, or ``[*B, N]`` with ``event_dims=1``.
            Defaults to ``False``.
        return_noise (bool, optional): write the standard normals of the chain, ``[*B, N + 1, A]``: with the
            old policy's parameters they stand for the whole record, see
            ``TrajectoryKLProjection(old_policy="replayed")``. Defaults to ``False``.
        event_dims (int, optional): ``2`` for whole-path, ``1`` for per-step distributions, see
            :class:`~torchrl_trudi.modules.DenoisingPath`. Defaults to ``2``.
        step_sizes (StepSizes, optional): see :class:`~torchrl_trudi.modules.DenoisingModel`.
        friction (str, optional): ``"per_dim"`` or ``"scalar"``. Defaults to ``"per_dim"``.
        learn_friction (bool, optional): whether the friction, and with it the noise scale, is
            learned. Defaults to ``True``.
        init_std (float, optional): standard deviation of the prior. Defaults to ``2.5``.
        learn_prior (bool, optional): learned mean and standard deviation of the prior. Defaults to
            ``False``.
        backward_network (nn.Module, optional): learned backward control. Defaults to ``None``.
        noise_key (NestedKey, optional): optional input with the standard normals
            ``[*B, N + 1, A]`` of the chain; when the entry is there it is used instead of the random
            generator. Defaults to ``None``: no such input is read.
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
        ValueError: sizes that disagree (``action_dim``, ``spec``, ``step_sizes``), neither ``obs_dim``
            nor ``score_network``, keys that coincide; a non-finite observation.
        KeyError: a Composite ``spec`` without the action; :meth:`get_dist` without a recorded chain.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Bounded
        >>> from torchrl_trudi.modules import DiffusionActor, ScoreNetwork
        >>> actor = DiffusionActor(
        ...     action_dim=2,
        ...     score_network=ScoreNetwork(2, 3, hidden_size=16),
        ...     spec=Bounded(-2.0, 2.0, (2,)),
        ...     return_chain=True,
        ...     return_dist_params=True,
        ...     return_log_prob=True,
        ... )
        >>> td = actor(TensorDict({"observation": torch.randn(4, 3)}, [4]))
        >>> td["action"].shape, td["denoising", "chain"].shape, td["denoising", "log_prob"].shape
        (torch.Size([4, 2]), torch.Size([4, 9, 2]), torch.Size([4]))
        >>> # the current policy at the states of the recorded chain: one batched call
        >>> actor.get_dist(td).log_prob(td["denoising", "chain"]).shape
        torch.Size([4])
    """

    module: DenoisingModel

    def __init__(
        self,
        action_dim: int,
        obs_dim: int | None = None,
        score_network: nn.Module | None = None,
        num_steps: int = 8,
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
        step_sizes: StepSizes | None = None,
        friction: Literal["per_dim", "scalar"] = "per_dim",
        learn_friction: bool = True,
        init_std: float = 2.5,
        learn_prior: bool = False,
        backward_network: nn.Module | None = None,
        noise_key: NestedKey | None = None,
        default_interaction_type: InteractionType = InteractionType.RANDOM,
        check_observation: bool = True,
        safe: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        action = action_entry(spec, out_keys, action_dim)
        if score_network is None:
            if obs_dim is None:
                raise ValueError("Pass obs_dim, or a score_network.")
            score_network = ScoreNetwork(action_dim, obs_dim, device=device, dtype=dtype)
        module = DenoisingModel(
            score_network,
            action_dim,
            num_steps,
            step_sizes=step_sizes,
            friction=friction,
            learn_friction=learn_friction,
            init_std=init_std,
            learn_prior=learn_prior,
            backward_network=backward_network,
            low=action.low,
            high=action.high,
            device=device,
            dtype=dtype,
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

"""The parts of a run from its configuration."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NestedKey, unravel_key
from tensordict.nn import TensorDictModule
from torchrl.data import TensorSpec
from torchrl.envs import EnvBase
from torchrl.modules import MLP, ValueOperator
from torchrl.objectives import KLAdaptiveLR, ValueEstimators

from torchrl_trudi.envs import (
    ChainCast,
    RunningObservationNorm,
    get_observation_keys,
    make_env,
)
from torchrl_trudi.envs.observation_keys import PRIVILEGED_KEY
from torchrl_trudi.envs.suites import SuiteNotInstalledError, SuiteNotSupportedError
from torchrl_trudi.modules import (
    ChainActor,
    DiffusionActor,
    GaussianActor,
    GaussianNetwork,
    HLGaussCritic,
    HLGaussValueOperator,
    ProjectedModel,
    ScoreNetwork,
    StepSizes,
)
from torchrl_trudi.objectives import TrajectoryKLProjection, TruDiLoss, TruDiPPOLoss
from torchrl_trudi.trainers.config import ConfigError, TrainConfig
from torchrl_trudi.trainers.distributed import Ranks
from torchrl_trudi.trainers.options import nearest
from torchrl_trudi.trainers.update import TruDiUpdate

__all__ = [
    "build_actor",
    "build_actor_from_sizes",
    "build_buffer_transform",
    "build_critic",
    "build_env",
    "build_loss",
    "build_lr_schedule",
    "build_update",
]


def build_env(
    config: TrainConfig,
    *,
    num_envs: int | None = None,
    seed: int | None = None,
    observation_norm: RunningObservationNorm | None = None,
) -> EnvBase:
    """The training environment, or with ``observation_norm`` an evaluation environment.

    Args:
        config: the checked configuration.
        num_envs: number of sub-environments instead of ``config.env.num_envs``.
        seed: seed instead of ``config.seed``.
        observation_norm: the training environment's normalisation, whose statistics the evaluation
            environment shares, frozen.

    Returns:
        The environment, on the CPU.

    Raises:
        ConfigError: the task does not exist, refuses an option, or belongs to a suite that is not
            installed or not supported.
    """
    try:
        return _make_env(config, num_envs, seed, observation_norm)
    except (
        ValueError,
        TypeError,
        SuiteNotInstalledError,
        SuiteNotSupportedError,
    ) as error:
        # What the environment refuses is an option of the run.
        raise ConfigError(f"env: {error}") from error


def _make_env(
    config: TrainConfig,
    num_envs: int | None,
    seed: int | None,
    observation_norm: RunningObservationNorm | None,
) -> EnvBase:
    return make_env(
        config.env.name,
        config.env.num_envs if num_envs is None else num_envs,
        seed=config.seed if seed is None else seed,
        normalize_action=config.env.normalize_action,
        normalize_observation=config.env.normalize_observation,
        observation_norm=observation_norm,
        # Shared statistics have their own.
        observation_keys=None
        if observation_norm is not None
        else _nested(config.env.normalize_keys),
        reward_scale=config.env.reward_scale,
        training=observation_norm is None,
        backend=config.env.backend,
        num_threads=config.env.num_threads,
        vectorization=config.env.vectorization,
        max_episode_steps=config.env.max_episode_steps,
        on_nonfinite=config.env.on_nonfinite,
        **config.env.kwargs,
    )


def _nested(names: list[str] | None) -> list[NestedKey] | None:
    """Keys of entries from their names, ``"outer/inner"`` of nested ones."""
    return None if names is None else [unravel_key(tuple(name.split("/"))) for name in names]


def _inputs(
    env: EnvBase, names: list[str] | None, option: str, *, privileged: bool = True
) -> tuple[list[NestedKey], int]:
    """Keys of the entries that a network reads, and the sum of their sizes.

    Without ``privileged``, what a suite marks as not for the policy has to be named to be read.
    """
    spec = env.observation_spec
    entries = {key if isinstance(key, str) else "/".join(key): key for key in spec.keys(True, True)}
    own = [key for key in get_observation_keys(env) if privileged or key != PRIVILEGED_KEY]
    chosen = [name for name, key in entries.items() if key in own] if names is None else names
    keys, size = [], 0
    for name in chosen:
        if name not in entries:
            hint = nearest(name, [n for n, key in entries.items() if key in own])
            raise ConfigError(
                f"{option}: got {name!r}, which is not an entry of the observation"
                + (f" (did you mean {hint!r}?)" if hint else "")
                + f", accepted: {', '.join(n for n, key in entries.items() if key in own)}"
            )
        leaf = spec[entries[name]]
        if leaf.ndim != spec.ndim + 1 or not leaf.dtype.is_floating_point:
            raise ConfigError(
                f"{option}: got {'null' if names is None else repr(name)}, and the entry {name!r} has "
                f"the shape {tuple(leaf.shape[spec.ndim :])} and the type {leaf.dtype}; accepted: "
                "entries that are vectors of floating-point numbers"
            )
        keys.append(entries[name])
        size += leaf.shape[-1]
    return keys, size


def build_actor(
    config: TrainConfig, env: EnvBase, device: torch.device | None = None
) -> ChainActor:
    """The policy, which records its chain.

    Args:
        config: the checked configuration.
        env: an environment of the task.
        device: device of the parameters.

    Returns:
        The policy.

    Raises:
        ConfigError: ``policy.in_keys`` names something that is not a vector of the observation.
    """
    in_keys, obs_dim = _inputs(env, config.policy.in_keys, "policy.in_keys", privileged=False)
    return build_actor_from_sizes(config, in_keys, obs_dim, env.action_spec, device)


def build_actor_from_sizes(
    config: TrainConfig,
    in_keys: list[NestedKey],
    obs_dim: int,
    action_spec: TensorSpec,
    device: torch.device | None = None,
) -> ChainActor:
    """The policy of :func:`build_actor`, without an environment.

    Args:
        config: the checked configuration.
        in_keys: entries of the observation that the policy reads.
        obs_dim: the sum of their sizes.
        action_spec: the box in which it acts.
        device: device of the parameters.

    Returns:
        The policy.
    """
    policy = config.policy
    action_dim = action_spec.shape[-1]
    sizes: dict[str, Any] = {
        "num_layers": policy.num_layers,
        "hidden_size": policy.hidden_size,
        "norm": policy.norm,
        "activation": policy.activation,
        "device": device,
    }
    front: dict[str, Any] = {
        "in_keys": in_keys,
        "spec": action_spec.to(device),
        **_record(config),
        "device": device,
    }
    if policy.kind == "gaussian":
        network = GaussianNetwork(action_dim, obs_dim, init_scale=policy.init_scale, **sizes)
        return _projected(config, GaussianActor(action_dim, network=network, **front))

    actor = DiffusionActor(
        action_dim,
        score_network=ScoreNetwork(action_dim, obs_dim, **sizes),
        num_steps=policy.num_steps,
        step_sizes=StepSizes(
            policy.num_steps,
            schedule=policy.step_size_schedule,
            learn=policy.learn_step_sizes,
            device=device,
        ),
        friction=policy.friction,
        learn_friction=policy.learn_friction,
        init_std=policy.init_std,
        learn_prior=policy.learn_prior,
        backward_network=(
            ScoreNetwork(action_dim, obs_dim, **sizes) if policy.backward_network else None
        ),
        **front,
    )
    return _projected(config, actor)


def _projected(config: TrainConfig, actor: ChainActor) -> ChainActor:
    """The policy as it is, or in projection mode one that acts with projected kernels."""
    region = config.trust_region
    if region.mode != "projection":
        return actor
    model = ProjectedModel(actor.module, region.eps, kl=region.kl)
    return ChainActor(model, in_keys=actor.observation_keys, spec=actor.spec, **_record(config))


def _record(config: TrainConfig) -> dict[str, Any]:
    """What the policy has to write for the losses."""
    old_policy = config.trust_region.old_policy
    if config.objective.kind == "surrogate":
        return {
            "return_chain": True,
            "return_dist_params": True,
            "return_path_log_prob": True,
            "event_dims": 1 if config.objective.ratio == "step" else 2,
        }
    if old_policy == "recorded":
        return {"return_chain": True, "return_dist_params": True}
    return {
        "return_noise": old_policy == "replayed",
        "return_log_prob": config.objective.reuse_actions,
    }


def build_critic(
    config: TrainConfig, env: EnvBase, device: torch.device | None = None
) -> TensorDictModule:
    """The value of a state and an action, or with the surrogate objective of a state.

    Args:
        config: the checked configuration.
        env: an environment of the task.
        device: device of the parameters.

    Returns:
        The critic.

    Raises:
        ConfigError: ``critic.in_keys`` names something that is not a vector of the observation.
    """
    critic = config.critic
    in_keys, in_dim = _inputs(env, critic.in_keys, "critic.in_keys")
    of_states = config.objective.kind == "surrogate"
    if not of_states:
        in_dim += env.action_spec.shape[-1]
        in_keys.append("action")
    if critic.kind == "mse":
        network = MLP(in_dim, 1, num_cells=[critic.hidden_size] * critic.num_layers, device=device)
        return ValueOperator(network, in_keys=in_keys)
    return HLGaussValueOperator(
        HLGaussCritic(
            in_dim,
            critic.vmin,
            critic.vmax,
            num_bins=critic.num_bins,
            hidden_size=critic.hidden_size,
            num_layers=critic.num_layers,
            # The next embedding is the auxiliary target of the pathwise critic alone.
            predict_embedding=not of_states,
            device=device,
        ),
        in_keys=in_keys,
    )


def build_loss(
    config: TrainConfig, actor: ChainActor, critic: TensorDictModule
) -> TruDiLoss | TruDiPPOLoss:
    """The loss with its trust region and value estimator.

    Args:
        config: the checked configuration.
        actor: the policy.
        critic: the critic.

    Returns:
        The loss.
    """
    region, objective = config.trust_region, config.objective
    trajectory_kl = TrajectoryKLProjection(
        actor,
        mode=region.mode,
        kl=region.kl,
        direction=region.direction,
        bound=region.bound,
        eps=region.eps,
        init_multiplier=region.init_multiplier,
        old_policy=region.old_policy,
        num_paths=region.num_paths,
        share=region.share,
        regression_coeff=region.regression_coeff,
    )
    if objective.kind == "surrogate":
        surrogate = TruDiPPOLoss(
            actor,
            critic,
            trajectory_kl=trajectory_kl,
            clip_epsilon=objective.clip_epsilon,
            normalize_advantage=objective.normalize_advantage,
            entropy=objective.entropy,
            entropy_coeff=objective.entropy_coeff,
        )
        surrogate.make_value_estimator(
            ValueEstimators.GAE, gamma=objective.gamma, lmbda=objective.lmbda
        )
        return surrogate
    assert isinstance(critic, HLGaussValueOperator)
    loss = TruDiLoss(
        actor,
        critic,
        trajectory_kl=trajectory_kl,
        init_temperature=objective.init_temperature,
        target_entropy_scale=objective.target_entropy_scale,
        aux_coeff=config.critic.aux_coeff,
        actor_gradient=objective.actor_gradient,
        num_adjoint_steps=objective.num_adjoint_steps,
        entropy_fraction=objective.entropy_fraction,
        elbo_coeff=objective.elbo_coeff,
    )
    loss.make_value_estimator(
        "soft_td_lambda",
        gamma=objective.gamma,
        lmbda=objective.lmbda,
        reuse_actions=objective.reuse_actions,
    )
    return loss


def build_buffer_transform(config: TrainConfig) -> ChainCast | None:
    """What keeps the batch of an iteration small, or ``None``.

    Args:
        config: the checked configuration.
    """
    name = config.collector.chain_dtype
    return None if name == "float32" else ChainCast(getattr(torch, name))


def build_update(
    config: TrainConfig, loss: TruDiLoss | TruDiPPOLoss, ranks: Ranks | None = None
) -> TruDiUpdate:
    """The optimisers, and the step that each minibatch takes with them.

    Args:
        config: the checked configuration.
        loss: the losses.
        ranks: the processes that step together, if there are several: on means over all of them.

    Returns:
        The step; its optimisers are ``update.optim_actor`` and ``update.optim_critic``.

    Raises:
        ConfigError: what the step refuses, such as ``optim.cudagraphs`` without a GPU.
    """
    optim = config.optim
    groups = loss.actor_param_groups(
        lr=optim.lr, dual_lr=optim.dual_lr, weight_decay=optim.weight_decay
    )
    # One kernel over all parameters instead of some per parameter.
    settings: dict[str, Any] = {"fused": True, "capturable": optim.cudagraphs}
    critic = loss.critic_parameters()
    reduce_gradients = None
    if ranks is not None and ranks.several:
        reduce_gradients = ranks.average_gradients
        if isinstance(loss, TruDiPPOLoss):
            loss.sum_over_ranks = ranks.sum
    try:
        return TruDiUpdate(
            loss,
            torch.optim.Adam(groups, **settings),
            torch.optim.Adam(critic, lr=optim.lr, weight_decay=optim.weight_decay, **settings),
            max_grad_norm=optim.max_grad_norm,
            compile=optim.compile,
            autocast_dtype=torch.bfloat16 if optim.autocast else None,
            cudagraphs=optim.cudagraphs,
            reduce_gradients=reduce_gradients,
        )
    except ValueError as error:
        raise ConfigError(f"optim: {error}") from error


def build_lr_schedule(config: TrainConfig, update: TruDiUpdate) -> KLAdaptiveLR | None:
    """What changes the policy's learning rate after each iteration, or ``None``.

    Args:
        config: the checked configuration.
        update: the step with its optimisers.

    Returns:
        The schedule; its ``step`` takes the KL of the last epoch.
    """
    if config.optim.lr_schedule == "constant":
        return None
    policy: Any = _FirstGroup(update.optim_actor)
    return KLAdaptiveLR(policy, target_kl=config.trust_region.eps, max_lr=config.optim.max_lr)


class _FirstGroup:
    """An optimiser with the policy's parameters alone, for a schedule.

    The duals keep their learning rate: a multiplier that slows down with the policy could not catch
    up with it.
    """

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self._optim = optim

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        # Looked up each time: loading a state makes new groups.
        return self._optim.param_groups[:1]

"""The policy of a checkpoint, without the rest of the run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, unravel_key
from torchrl.checkpoint import Checkpoint
from torchrl.data import Bounded
from torchrl.envs import ExplorationType, set_exploration_type

import torchrl_trudi
from torchrl_trudi.envs import RunningMeanVar, RunningObservationNorm
from torchrl_trudi.export.onnx_policy import PolicyMetadata
from torchrl_trudi.export.policy_module import PolicyModule
from torchrl_trudi.modules import ChainActor
from torchrl_trudi.trainers import ConfigError, TrainConfig, validate
from torchrl_trudi.trainers.builders import build_actor, build_actor_from_sizes, build_env
from torchrl_trudi.trainers.checkpoints import FORMAT_VERSION, RunCheckpoints
from torchrl_trudi.trainers.task_interface import TaskInterface

__all__ = ["RestoredPolicy", "find_checkpoint", "restore_policy"]

_PREFIXES = ("trajectory_kl.actor_network_params.module.", "actor_network_params.module.")


class _State:
    """Takes what a checkpoint has of a component, whatever it is."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = dict(state_dict)


@dataclasses.dataclass
class RestoredPolicy:
    """A policy as it acted in its run.

    Args:
        actor (ChainActor): the policy, in eval mode, on the CPU.
        norm (RunningObservationNorm, optional): the frozen normalisation of the entries that the
            policy reads, ``None`` without one.
        run_norm (RunningObservationNorm, optional): that of all entries, for an environment of the run.
        task (TaskInterface): what it has to know of its task.
        config (TrainConfig): the configuration of the run.
        frames (int): environment steps of the training.
        config_hash (str): SHA-256 of the stored configuration.
        loss_state (dict): state of the run's loss, with the critic.
    """

    actor: ChainActor
    norm: RunningObservationNorm | None
    run_norm: RunningObservationNorm | None
    task: TaskInterface
    config: TrainConfig
    frames: int
    config_hash: str
    loss_state: dict[str, Any]

    def metadata(self, *, stochastic: bool) -> PolicyMetadata:
        """What the exported policy says of itself."""
        count = 0
        if self.norm is not None:
            count = min(int(self.norm.get_statistics(k).count) for k in self.norm.in_keys)
        task = self.task
        return PolicyMetadata(
            observation=task.observation,
            action_names=task.action_names,
            low=task.low,
            high=task.high,
            num_steps=self.actor.num_steps,
            stochastic=stochastic,
            dt=task.dt,
            normalizer_count=count,
            frames=self.frames,
            policy=self.config.policy.kind,
            config_hash=self.config_hash,
            version=torchrl_trudi.__version__,
        )

    def module(self) -> PolicyModule:
        """All of it as one module on plain tensors."""
        sizes = [
            (key, size)
            for key, (_, size) in zip(self.task.in_keys, self.task.observation, strict=True)
        ]
        bounds: dict[str, Any] = {}
        if self.config.env.normalize_action:
            bounds = dict(zip(("low", "high"), self.task.bounds(), strict=True))
        module = PolicyModule(self.actor.module, sizes, norm=self.norm, **bounds)
        return module.requires_grad_(False).eval()

    @torch.no_grad()
    def act(self, observation: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        """The action by way of the transforms and the actor, as in the run; not by :meth:`module`.

        Args:
            observation (torch.Tensor): ``[B, O]``, in the units of the task.
            noise (torch.Tensor, optional): standard normals ``[B, N + 1, A]``; noise-free without.

        Returns:
            torch.Tensor: ``[B, A]``, in the units of the task.
        """
        sizes = [size for _, size in self.task.observation]
        parts = dict(zip(self.task.in_keys, observation.split(sizes, -1), strict=True))
        tensordict = TensorDict({}, observation.shape[:-1])
        for key, part in parts.items():
            tensordict.set(key, part)
        if self.norm is not None:
            self.norm(tensordict)
        kind = ExplorationType.DETERMINISTIC
        if noise is not None:
            tensordict.set("noise", noise)
            kind = ExplorationType.RANDOM
        given, self.actor.noise_key = self.actor.noise_key, "noise"
        try:
            with set_exploration_type(kind):
                action = self.actor(tensordict).get(self.actor.action_key)
        finally:
            self.actor.noise_key = given
        if not self.config.env.normalize_action:
            return action
        low, high = self.task.bounds()
        return (low + high) / 2 + (high - low) / 2 * action


def find_checkpoint(path: str | os.PathLike) -> Path:
    """The checkpoint that a path means.

    Args:
        path (str or Path): a checkpoint, or the directory of a run, of which the newest is taken.

    Returns:
        Path: the checkpoint.

    Raises:
        ConfigError: there is none.
    """
    given = Path(path)
    if given.is_dir() and not Checkpoint.is_checkpoint(given):
        found = RunCheckpoints(given / "checkpoints", {"loss": _State()}).latest()
        if found is None:
            raise ConfigError(f"{str(path)!r} has no checkpoint in {str(given / 'checkpoints')!r}")
        return found
    if not given.exists():
        raise ConfigError(f"there is no checkpoint or run {str(path)!r}")
    if not Checkpoint.is_checkpoint(given):
        raise ConfigError(f"{str(path)!r} is neither a checkpoint nor the directory of a run")
    return given


def restore_policy(path: str | os.PathLike) -> RestoredPolicy:
    """Builds the policy of a checkpoint.

    No environment is made, unless the checkpoint is of a version that did not describe its task.

    Args:
        path (str or Path): a checkpoint, or the directory of a run.

    Returns:
        RestoredPolicy: the policy.

    Raises:
        ConfigError: no checkpoint, one of a later version, or one that does not hold what its
            configuration says.
    """
    path = find_checkpoint(path)
    manifest = Checkpoint.manifest(path)
    metadata = manifest.get("metadata", {})
    if "config" not in metadata:
        raise ConfigError(f"{path} is not a checkpoint of a training run: it has no configuration")
    if metadata.get("format", 1) > FORMAT_VERSION:
        raise ConfigError(
            f"{path} has format {metadata['format']}, this version of torchrl_trudi reads up to "
            f"{FORMAT_VERSION}: update it"
        )
    # Where the run computed says nothing of where the policy will.
    config = validate({**metadata["config"], "device": "cpu"})
    parts: dict[str, Any] = {"loss": _State()}
    if config.env.normalize_observation:
        parts["observation_norm"] = _State()
    Checkpoint(**parts, format="archive").load(path, components=sorted(parts), map_location="cpu")

    # The random numbers of the first weights, which are replaced, are nobody's business.
    with torch.random.fork_rng(devices=[]):
        if "task" in metadata:
            task = TaskInterface.from_dict(metadata["task"])
            actor = build_actor_from_sizes(config, task.in_keys, task.obs_dim, _box(config, task))
        else:
            env = build_env(config, num_envs=1)
            try:
                actor = build_actor(config, env)
                task = TaskInterface.of(env, actor.observation_keys)
            finally:
                env.close()
    _load_model(actor, parts["loss"].values, path)
    norm = run_norm = None
    if "observation_norm" in parts:
        statistics = _statistics(parts["observation_norm"].values)
        run_norm = RunningObservationNorm(statistics, frozen=True)
        read = {key: statistics[key] for key in task.in_keys if key in statistics}
        norm = RunningObservationNorm(read, frozen=True) if read else None
    text = json.dumps(metadata["config"], sort_keys=True)
    return RestoredPolicy(
        actor=actor.requires_grad_(False).eval(),
        norm=norm,
        run_norm=run_norm,
        task=task,
        config=config,
        frames=int(metadata.get("frames", 0)),
        config_hash=hashlib.sha256(text.encode()).hexdigest(),
        loss_state=parts["loss"].values,
    )


def _box(config: TrainConfig, task: TaskInterface) -> Bounded:
    """The box in which the policy acts."""
    low, high = task.bounds()
    if config.env.normalize_action:
        low, high = -torch.ones_like(low), torch.ones_like(high)
    return Bounded(low, high, low.shape, dtype=low.dtype)


def _load_model(actor: ChainActor, state: dict[str, Any], path: Path) -> None:
    """Puts the policy's part of a loss's state into the model."""
    given: dict[str, Any] = {}
    for prefix in _PREFIXES:
        given = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        if given:
            break
    own = actor.module.state_dict()
    # A loss keeps the buffers that a module's own state leaves out.
    derived = {name for name, _ in actor.module.named_buffers()} - own.keys()
    given = {name: value for name, value in given.items() if name not in derived}
    try:
        actor.module.load_state_dict(given)
    except RuntimeError as error:
        raise ConfigError(
            f"{path} does not hold the policy of its configuration: {error}"
        ) from error


def _statistics(state: dict[str, Any]) -> dict[NestedKey, RunningMeanVar]:
    """The statistics of a normalisation's state, by the entry that they are of."""
    found: dict[NestedKey, RunningMeanVar] = {}
    for full, mean in state.items():
        if full.startswith("statistics.") and full.endswith(".mean"):
            prefix = full.removesuffix("mean")
            name = prefix.removeprefix("statistics.").removesuffix(".")
            statistics = RunningMeanVar(mean.shape)
            statistics.load_state_dict(
                {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            )
            found[unravel_key(tuple(name.split("/")))] = statistics
    return found

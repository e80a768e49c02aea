"""Unbiased episode returns of a policy in a batched environment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import nn
from torchrl.envs import (
    EnvBase,
    ExplorationType,
    TransformedEnv,
    set_exploration_type,
    step_mdp,
)


@dataclass(frozen=True)
class EvaluationResult:
    """Returns and lengths of complete episodes.

    Entry ``i`` is episode ``i // num_envs`` of sub-environment ``i % num_envs``, whatever the
    order in which episodes ended.

    Args:
        returns (torch.Tensor): sum of rewards of each episode, in the units of the task, shape
            ``[num_episodes]``, on the CPU.
        lengths (torch.Tensor): number of steps of each episode, int64, shape ``[num_episodes]``.
        terminated (torch.Tensor): whether the episode reached a terminal state, as opposed to a
            time limit, bool, shape ``[num_episodes]``.

    Examples:
        >>> import torch
        >>> from torchrl_trudi.record import EvaluationResult
        >>> result = EvaluationResult(
        ...     torch.tensor([1.0, 3.0]), torch.tensor([10, 20]), torch.tensor([True, False])
        ... )
        >>> result.mean, result.std
        (2.0, 1.0)
        >>> result.to_dict("eval")["eval/length_mean"]
        15.0
    """

    returns: torch.Tensor
    lengths: torch.Tensor
    terminated: torch.Tensor

    @property
    def num_episodes(self) -> int:
        """Number of episodes."""
        return self.returns.numel()

    @property
    def mean(self) -> float:
        """Mean return."""
        return self.returns.double().mean().item()

    @property
    def std(self) -> float:
        """Population standard deviation of the returns, 0 for one episode."""
        return self.returns.double().std(correction=0).item()

    @property
    def min(self) -> float:
        """Smallest return."""
        return self.returns.min().item()

    @property
    def max(self) -> float:
        """Largest return."""
        return self.returns.max().item()

    @property
    def length_mean(self) -> float:
        """Mean length."""
        return self.lengths.double().mean().item()

    def to_dict(self, prefix: str = "eval") -> dict[str, float]:
        """Scalars for a logger.

        Args:
            prefix (str, optional): first part of the names. Defaults to ``"eval"``.

        Returns:
            dict[str, float]: ``return_mean``, ``return_std``, ``return_min``, ``return_max``,
            ``length_mean`` and ``terminated_fraction``, each after ``prefix/``.
        """
        return {
            f"{prefix}/return_mean": self.mean,
            f"{prefix}/return_std": self.std,
            f"{prefix}/return_min": self.min,
            f"{prefix}/return_max": self.max,
            f"{prefix}/length_mean": self.length_mean,
            f"{prefix}/terminated_fraction": self.terminated.double().mean().item(),
        }


@torch.no_grad()
def evaluate(
    env: EnvBase,
    policy: Callable[[TensorDictBase], TensorDictBase],
    num_episodes: int,
    *,
    exploration_type: ExplorationType = ExplorationType.DETERMINISTIC,
    max_steps: int | None = None,
    seed: int | None = None,
    return_key: NestedKey = "episode_reward",
    policy_device: torch.device | str | None = None,
) -> EvaluationResult:
    """Runs a policy for a number of complete episodes.

    Taking the first ``num_episodes`` that end would favour short ones, which end first. Instead
    each sub-environment contributes a number of episodes that is fixed beforehand:
    ``num_episodes / num_envs``, and one more in the first ``num_episodes % num_envs``. Each
    counts from its reset to its first done. Rows that are through go on, unrecorded, until the
    last one is.

    The policy runs in eval mode without gradients, and transforms that can be frozen
    (``freeze()`` and ``unfreeze()``, such as running normalisation) are; modes and flags are put
    back afterwards, also after an exception. The environment itself is reset and stepped: give
    it one of its own, not that of a collector, whose episodes would be cut unnoticed.

    Args:
        env (EnvBase): batched environment of batch size ``[num_envs]`` (or ``[]``) that writes
            the running sum of rewards in its ``next`` entry, see
            :class:`~torchrl.envs.RewardSum`.
        policy (Callable[[TensorDictBase], TensorDictBase]): writes the action.
        num_episodes (int): number of episodes, at least 1.

    Keyword Args:
        exploration_type (ExplorationType, optional): Defaults to
            ``ExplorationType.DETERMINISTIC``.
        max_steps (int, optional): ends any episode there, counting the return so far. Defaults
            to ``None``: a task without a time limit may then never end.
        seed (int, optional): seeds the environment first, so that every evaluation sees the same
            initial states. Defaults to ``None``, no seeding.
        return_key (NestedKey, optional): where the sum of rewards is. Defaults to
            ``"episode_reward"``: with RewardSum before any reward scaling, that is the return in
            the units of the task.
        policy_device (torch.device or str, optional): device of the policy, if it is not that of
            the environment. Defaults to ``None``.

    Returns:
        EvaluationResult: returns, lengths and kinds of end, each of shape ``[num_episodes]``.

    Raises:
        ValueError: if ``num_episodes`` or ``max_steps`` is below 1, if the batch size of the
            environment has more than one dimension, or if it does not write ``return_key``.

    Examples:
        >>> from torchrl.envs import (
        ...     Compose, PendulumEnv, RewardSum, StepCounter, TransformedEnv
        ... )
        >>> from torchrl.envs.utils import RandomPolicy
        >>> from torchrl_trudi.record import evaluate
        >>> env = TransformedEnv(PendulumEnv(), Compose(RewardSum(), StepCounter(5)))
        >>> result = evaluate(env, RandomPolicy(env.full_action_spec), num_episodes=3)
        >>> result.lengths
        tensor([5, 5, 5])
    """
    for argument, value in (("num_episodes", num_episodes), ("max_steps", max_steps)):
        if value is not None and value < 1:
            raise ValueError(f"{argument} must be at least 1, got {value}.")
    if len(env.batch_size) > 1:
        raise ValueError(f"expected a batch size [num_envs] or [], got {tuple(env.batch_size)}.")
    if return_key not in {*env.observation_spec.keys(True, True), *env.reward_keys}:
        raise ValueError(
            f"the environment does not write {return_key!r}; append torchrl.envs.RewardSum()."
        )
    with (
        _eval_mode(policy),
        _frozen_transforms(env),
        set_exploration_type(exploration_type),
    ):
        if seed is not None:
            env.set_seed(seed)
        if policy_device is not None:
            policy = _on_device(policy, policy_device, env.device)
        return _run(env, policy, num_episodes, max_steps, return_key)


def _run(
    env: EnvBase,
    policy: Callable[[TensorDictBase], TensorDictBase],
    num_episodes: int,
    max_steps: int | None,
    return_key: NestedKey,
) -> EvaluationResult:
    num_envs = env.batch_size.numel()
    rows = torch.arange(num_envs)
    finished = torch.zeros(num_envs, dtype=torch.int64)
    steps = torch.zeros(num_envs, dtype=torch.int64)
    returns = torch.zeros(num_episodes)
    lengths = torch.zeros(num_episodes, dtype=torch.int64)
    terminations = torch.zeros(num_episodes, dtype=torch.bool)

    tensordict = env.reset()
    # Slot of the episode a row is in: rows without a slot below num_episodes are through.
    while (rows + finished * num_envs < num_episodes).any():
        tensordict = env.step(policy(tensordict))
        steps += 1
        following = tensordict.get("next")
        if max_steps is not None:
            _cut(following, steps >= max_steps)
        done = following.get("done").reshape(num_envs).cpu()
        if done.any():
            slots = rows + finished * num_envs
            recorded = done & (slots < num_episodes)
            slots = slots[recorded]
            totals = following.get(return_key).reshape(num_envs).to(returns)
            returns[slots] = totals[recorded]
            lengths[slots] = steps[recorded]
            terminations[slots] = following.get("terminated").reshape(num_envs).cpu()[recorded]
            finished[done] += 1
            steps[done] = 0
        tensordict = env.maybe_reset(step_mdp(tensordict))
    return EvaluationResult(returns, lengths, terminations)


def _on_device(
    policy: Callable[[TensorDictBase], TensorDictBase],
    policy_device: torch.device | str,
    env_device: torch.device | None,
) -> Callable[[TensorDictBase], TensorDictBase]:
    def act(tensordict: TensorDictBase) -> TensorDictBase:
        return policy(tensordict.to(policy_device)).to(env_device or "cpu")

    return act


def _cut(following: TensorDictBase, mask: torch.Tensor) -> None:
    done = following.get("done")
    mask = mask.to(done.device).reshape(done.shape)
    following.set("done", done | mask)
    truncated = following.get("truncated", None)
    if truncated is not None:
        following.set("truncated", truncated | mask)


@contextlib.contextmanager
def _eval_mode(policy: Callable) -> Iterator[None]:
    if not isinstance(policy, nn.Module):
        yield
        return
    # Put back module by module: parts of a training policy can have been in eval mode.
    modes = {module: module.training for module in policy.modules()}
    try:
        policy.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def _frozen_transforms(env: EnvBase) -> Iterator[None]:
    # By protocol and not by class: holds for torchrl's VecNorm as well.
    thawed = [
        transform
        for transform in _transforms(env)
        if hasattr(transform, "freeze") and hasattr(transform, "unfreeze") and not transform.frozen
    ]
    try:
        for transform in thawed:
            transform.freeze()
        yield
    finally:
        for transform in thawed:
            transform.unfreeze()


def _transforms(env: EnvBase) -> list[Any]:
    found: list[Any] = []
    while isinstance(env, TransformedEnv):
        found += env.transform.modules()
        env = env.base_env
    return found

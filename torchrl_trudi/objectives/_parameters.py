"""The parameters of a loss with a policy, a critic and duals, as an optimiser wants them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tensordict import TensorDictParams
from torch import nn

from torchrl_trudi.objectives.trajectory_kl import TrajectoryKLProjection

__all__ = ["ActorCriticParameters"]


class ActorCriticParameters:
    """Part of the losses that hold a policy with its trust region, and a critic."""

    actor_network_params: TensorDictParams
    critic_network_params: TensorDictParams
    trajectory_kl: TrajectoryKLProjection

    def actor_parameters(self) -> Iterator[nn.Parameter]:
        """The policy's trainable parameters."""
        yield from _trainable(self.actor_network_params)

    def critic_parameters(self) -> Iterator[nn.Parameter]:
        """The critic's trainable parameters."""
        yield from _trainable(self.critic_network_params)

    def dual_parameters(self) -> Iterator[nn.Parameter]:
        """Trainable dual variables, in log space."""
        if isinstance(self.trajectory_kl.log_multiplier, nn.Parameter):
            yield self.trajectory_kl.log_multiplier

    def actor_param_groups(
        self, *, lr: float, dual_lr: float | None = None, weight_decay: float = 0.0
    ) -> list[dict[str, Any]]:
        """Optimiser groups of the actor's optimiser: the policy, and the duals without weight decay.

        Weight decay on a log-dual pulls it to 1, whatever the constraint says.

        Keyword Args:
            lr (float): learning rate of the policy.
            dual_lr (float, optional): learning rate of the duals. Defaults to ``lr``.
            weight_decay (float, optional): weight decay of the policy. Defaults to ``0.0``.

        Returns:
            list of dict: for ``torch.optim.Adam(loss.actor_param_groups(lr=3e-4))``.
        """
        groups = [{"params": list(self.actor_parameters()), "lr": lr, "weight_decay": weight_decay}]
        duals = list(self.dual_parameters())
        if duals:
            groups.append(
                {"params": duals, "lr": lr if dual_lr is None else dual_lr, "weight_decay": 0.0}
            )
        return groups

    def update_old_policy(self) -> None:
        """See :meth:`TrajectoryKLProjection.update_old_policy`."""
        self.trajectory_kl.update_old_policy()


def _trainable(params: TensorDictParams) -> Iterator[nn.Parameter]:
    for param in params.values(True, True):
        if isinstance(param, nn.Parameter) and param.requires_grad:
            yield param

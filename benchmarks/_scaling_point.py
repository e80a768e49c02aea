"""What a frame costs the learner at one point of the sweeps: acting, estimation, update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from _learner_parts import Sizes, make_batch, make_parts, move_policy, steps_beyond
from tensordict import TensorDict

from torchrl_trudi.objectives import SoftTDLambdaEstimator
from torchrl_trudi.trainers import TrainConfig
from torchrl_trudi.trainers.builders import build_update

PARTS = ("acting", "estimation", "update")


@dataclasses.dataclass(frozen=True)
class Point:
    """A point of the sweeps; the defaults are the Humanoid preset.

    Attributes:
        num_envs: environments that act in one call.
        minibatch: transitions of an update.
        num_steps: denoising steps ``N``.
        width: width of the networks.
        rollout_steps: steps of a rollout, per environment.
        epochs: passes over a rollout.
        obs: observation size.
        act: action size.
    """

    num_envs: int = 64
    minibatch: int = 256
    num_steps: int = 8
    width: int = 256
    rollout_steps: int = 32
    epochs: int = 4
    obs: int = 348
    act: int = 17

    @classmethod
    def preset(cls) -> Point:
        """The values of the training configuration."""
        config = TrainConfig()
        frames = config.collector.frames_per_batch
        return cls(
            num_envs=config.env.num_envs,
            minibatch=frames // config.optim.num_minibatches,
            num_steps=config.policy.num_steps,
            width=config.policy.hidden_size,
            rollout_steps=frames // config.env.num_envs,
            epochs=config.optim.num_epochs,
        )

    @property
    def sizes(self) -> Sizes:
        """The sizes of the networks."""
        return Sizes(self.obs, self.act, self.width, self.num_steps)


@dataclasses.dataclass(frozen=True)
class Learner:
    """What is timed at a point.

    Attributes:
        functions: one call of each part.
        frames: frames that a call serves. A frame is a row of as many updates as there are epochs.
        gate: fraction of the minibatch inside the trust region.
        steps_beyond: steps that the gate evaluates at the others.
    """

    functions: dict[str, Callable[[], object]]
    frames: dict[str, float]
    gate: float
    steps_beyond: float


def make_learner(point: Point, device: torch.device | None = None) -> Learner:
    """The learner at a point, on synthetic observations, half of the states inside the trust region.

    Args:
        point: the point.
        device: where it runs.
    """
    torch.manual_seed(0)
    actor, loss = make_parts(point.sizes, device=device)
    batch = make_batch(actor, point.minibatch)
    move_policy(loss, batch)
    # Steps of size zero: every repetition sees the same gate.
    config = TrainConfig()
    config.optim.lr = 0.0
    step = build_update(config, loss)
    estimator = SoftTDLambdaEstimator(
        gamma=0.99,
        lmbda=0.95,
        value_network=loss.critic_network,
        actor_network=actor,
        temperature=loss.get_temperature,
    )
    shape = (point.num_envs, point.rollout_steps)
    observations = torch.randn(shape[0], shape[1] + 1, point.obs, device=device)
    zeros = torch.zeros(*shape, 1, device=device)
    following = {
        "observation": observations[:, 1:],
        "reward": zeros,
        "done": zeros.bool(),
        "terminated": zeros.bool(),
    }
    rollout = TensorDict({"observation": observations[:, :-1], "next": following}, shape)
    states = TensorDict({"observation": observations[:, 0]}, shape[:1])

    @torch.no_grad()
    def acting() -> None:
        actor(states.copy())

    def estimation() -> None:
        estimator(rollout.copy())

    def update() -> None:
        step(batch)

    frames = (point.num_envs, point.num_envs * point.rollout_steps, point.minibatch / point.epochs)
    return Learner(
        functions=dict(zip(PARTS, (acting, estimation, update), strict=True)),
        frames=dict(zip(PARTS, frames, strict=True)),
        gate=loss.actor_loss(batch)["gate_fraction"].item(),
        steps_beyond=steps_beyond(loss, batch),
    )

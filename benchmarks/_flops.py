"""Multiply-adds of the learner's matrix products, per frame, from the sizes.

A network call costs its forward products; a backward pass costs the same again for the gradient of
the weights, and again for the gradient of the inputs, each only where somebody needs it. What is not
a matrix product (activations, norms, kernels, Adam) is left out, and so is the step embedding, which is
paid once per call and not per state. Columns of zeros that the output layer is padded with count as
nothing: they are no useful work. One multiply-add is two floating-point operations.
"""

from __future__ import annotations

from _learner_parts import Sizes


def score_row(s: Sizes) -> int:
    """The score network at one step of one state, without the observation's part."""
    return s.act * s.width + (s.num_layers - 2) * s.width**2 + s.width * s.act


def observation_part(s: Sizes) -> int:
    """The observation's part of the first layer, once per chain."""
    return s.obs * s.width


def chain(s: Sizes) -> int:
    """Drawing a chain: acting, per frame."""
    return observation_part(s) + s.num_steps * score_row(s)


def critic_value(s: Sizes) -> int:
    """Encoder and head of the critic."""
    hidden = (s.critic_layers - 1) * s.width**2
    return (s.obs + s.act) * s.width + hidden + hidden + s.width * s.num_bins


def critic_predictor(s: Sizes) -> int:
    """The critic's predictor of the next embedding."""
    return s.critic_layers * s.width**2


def estimation(s: Sizes, fresh: float = 1.0) -> float:
    """Value estimation, per frame.

    Args:
        s: the sizes.
        fresh: fraction of the next states at which a chain is drawn; less than 1 with
            ``reuse_actions=True``, where it is the fraction of rows that end an episode or the rollout.
    """
    return fresh * chain(s) + critic_value(s)


def critic_update(s: Sizes) -> int:
    """Forward and backward pass of the critic's loss, per row of a minibatch."""
    forward = critic_value(s) + critic_predictor(s)
    # Nobody needs the gradient of the critic's inputs.
    return 3 * forward - (s.obs + s.act) * s.width


def actor_update(
    s: Sizes,
    gate: float,
    *,
    steps_beyond: float | None = None,
    adjoint_steps: int | None = None,
    entropy_fraction: float = 1.0,
) -> float:
    """Forward and backward pass of the actor's loss, split by the gate, per row of a minibatch.

    Args:
        s: the sizes.
        gate: fraction of the states inside the trust region.
        steps_beyond: mean number of steps that the gate evaluates at the states beyond it, which it
            leaves once they have passed the bound. Defaults to all.
        adjoint_steps: ``num_adjoint_steps`` of adjoint matching; ``None`` is the pathwise gradient.
        entropy_fraction: as in the loss.
    """
    seen = s.num_steps if steps_beyond is None or adjoint_steps is not None else steps_beyond
    deciding = observation_part(s) + (gate * s.num_steps + (1 - gate) * seen) * score_row(s)
    # The critic's weights are fixed: only the gradient of its inputs.
    value = 2 * critic_value(s)
    if adjoint_steps is None:
        # The gradient of the latents runs through all steps, but not into x_0.
        inside = 3 * chain(s) - observation_part(s) - s.act * s.width + value
    else:
        inside = chain(s) + value + _scored(s, adjoint_steps)
    regressed = s.num_steps if adjoint_steps is None else adjoint_steps
    beyond = _scored(s, regressed) + entropy_fraction * chain(s)
    return deciding + gate * inside + (1 - gate) * beyond


def _scored(s: Sizes, steps: int) -> int:
    """Forward and backward pass at given latents, whose gradient nobody needs."""
    return 2 * observation_part(s) + steps * (3 * score_row(s) - s.act * s.width)


def update(s: Sizes, epochs: int, gate: float, **kwargs) -> float:
    """Updates of critic and actor, per frame.

    Args:
        s: the sizes.
        epochs: passes over the rollout: a frame is a row of as many minibatches.
        gate: see :func:`actor_update`, which takes the other arguments too.
        **kwargs: see :func:`actor_update`.
    """
    return epochs * (critic_update(s) + actor_update(s, gate, **kwargs))

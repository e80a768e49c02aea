"""The counted multiply-adds against those that PyTorch counts while the learner runs."""

from __future__ import annotations

import dataclasses

import _flops
import pytest
import torch
from _learner_parts import (
    Sizes,
    actor_total,
    make_batch,
    make_parts,
    move_policy,
    set_gate,
    steps_beyond,
)
from tensordict import TensorDict
from torch.utils.flop_counter import FlopCounterMode

from torchrl_trudi.objectives import SoftTDLambdaEstimator

BATCH = 256
# Multiples of 8 actions are not padded: only the step embedding separates the two counts.
SIZES = [Sizes(40, 16, 64), Sizes(11, 8, 32, num_steps=3, num_layers=4, critic_layers=3)]


def counted(function) -> float:
    """Multiply-adds of a call, per row."""
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops() / 2 / BATCH


def close(actual: float, expected: float, tolerance: float = 0.02) -> bool:
    return abs(actual / expected - 1) < tolerance


@pytest.mark.parametrize("sizes", SIZES, ids=str)
class TestCounts:
    def test_acting(self, sizes):
        actor, _ = make_parts(sizes)
        states = TensorDict({"observation": torch.randn(BATCH, sizes.obs)}, [BATCH])
        with torch.no_grad():
            assert close(_flops.chain(sizes), counted(lambda: actor(states)))

    @pytest.mark.parametrize("reuse", [False, True])
    def test_estimation(self, sizes, reuse):
        actor, loss = make_parts(sizes)
        rows = BATCH // 8
        data = make_batch(actor, BATCH).reshape(rows, 8)
        zeros = torch.zeros(rows, 8, 1)
        data["next"] = TensorDict(
            {
                "observation": torch.randn(rows, 8, sizes.obs),
                "reward": zeros,
                "done": zeros.bool(),
                "terminated": zeros.bool(),
            },
            [rows, 8],
        )
        estimator = SoftTDLambdaEstimator(
            gamma=0.99,
            lmbda=0.95,
            value_network=loss.critic_network,
            actor_network=actor,
            reuse_actions=reuse,
        )
        # The last of the eight rows has no next row.
        expected = _flops.estimation(sizes, 1 / 8 if reuse else 1.0)
        assert close(expected, counted(lambda: estimator(data)))

    def test_critic_update(self, sizes):
        actor, loss = make_parts(sizes)
        batch = make_batch(actor, BATCH)
        count = counted(lambda: loss.critic_loss(batch)["loss_critic"].backward())
        assert count == _flops.critic_update(sizes)

    @pytest.mark.parametrize("gate", [0.0, 0.5, 1.0])
    @pytest.mark.parametrize("adjoint_steps", [None, 2])
    def test_actor_update(self, sizes, gate, adjoint_steps):
        kwargs = {}
        if adjoint_steps is not None:
            kwargs = {"actor_gradient": "adjoint", "num_adjoint_steps": adjoint_steps}
        actor, loss = make_parts(sizes, **kwargs)
        batch = make_batch(actor, BATCH)
        move_policy(loss, batch)
        set_gate(loss, batch, gate)
        assert loss.actor_loss(batch)["gate_fraction"] == gate
        count = counted(lambda: actor_total(loss, batch).backward())
        seen = steps_beyond(loss, batch)
        expected = _flops.actor_update(sizes, gate, steps_beyond=seen, adjoint_steps=adjoint_steps)
        assert close(expected, count)
        # A pass over the chain more or less would be noticed.
        other = expected + _flops.chain(sizes)
        assert not close(other, count)


def test_entropy_of_some_states():
    sizes = SIZES[0]
    actor, loss = make_parts(sizes, entropy_fraction=0.25)
    batch = make_batch(actor, BATCH)
    move_policy(loss, batch)
    set_gate(loss, batch, 0.5)
    count = counted(lambda: actor_total(loss, batch).backward())
    expected = _flops.actor_update(
        sizes, 0.5, steps_beyond=steps_beyond(loss, batch), entropy_fraction=0.25
    )
    assert close(expected, count)


def test_padding_is_not_counted():
    """17 actions run as 24: the count of the useful products is a little lower."""
    sizes = Sizes()
    actor, _ = make_parts(sizes)
    states = TensorDict({"observation": torch.randn(BATCH, sizes.obs)}, [BATCH])
    with torch.no_grad():
        count = counted(lambda: actor(states))
    assert 0.97 < _flops.chain(sizes) / count < 1.0


@pytest.mark.parametrize("gate", [0.0, 0.5, 1.0])
def test_linear_in_the_number_of_steps_at_worst(gate):
    for low, high in ((1, 2), (2, 4), (4, 8), (8, 16)):
        few, many = (dataclasses.replace(Sizes(), num_steps=steps) for steps in (low, high))
        for count in (
            _flops.chain,
            _flops.estimation,
            lambda sizes: _flops.update(sizes, 4, gate),
        ):
            assert count(few) < count(many) <= 2 * count(few)


def test_epochs_multiply_the_update():
    assert _flops.update(Sizes(), 4, 0.5) == 4 * _flops.update(Sizes(), 1, 0.5)

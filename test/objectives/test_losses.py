"""The generic tests of every loss, see ``_loss_base``."""

from __future__ import annotations

import copy
import inspect
from typing import ClassVar

import pytest
import torch
from objectives._loss_base import LossModuleTestBase, assert_same, losses_of, total
from objectives._parts import (
    DTYPE,
    STEPS,
    gradients,
    make_actor,
    make_batch,
    make_critic,
    make_gaussian,
    make_states,
    nudge,
)
from tensordict import TensorDict
from torchrl.objectives import LossModule

from torchrl_trudi import objectives
from torchrl_trudi.objectives import TrajectoryKLProjection, TruDiLoss

RECORD = {
    "chain": ("denoising", "chain"),
    "loc": ("denoising", "loc"),
    "scale": ("denoising", "scale"),
    "noise": ("denoising", "noise"),
}


def moved_batch(actor, *batch) -> TensorDict:
    """A recorded batch, and the actor has moved since."""
    data = make_batch(actor, *batch)
    nudge(actor, 0.05)
    return data


class TrudiBase(LossModuleTestBase):
    loss_class = TruDiLoss
    default_keys: ClassVar = {
        "action": "action",
        "value": "state_action_value",
        "value_target": "value_target",
        "value_logits": ("critic", "logits"),
        "embedding": ("critic", "embedding"),
        "next_embedding": ("critic", "next_embedding"),
        "mask": "mask",
        "reward": "reward",
        "done": "done",
        "terminated": "terminated",
    }
    fixed_keys = ("action",)
    # The value's key is the critic's: the estimator refuses one that the critic does not write.
    estimator_keys: ClassVar = {
        name: name for name in ("value_target", "reward", "done", "terminated", "embedding")
    }
    estimators = ("soft_td_lambda",)
    draws = True
    make_policy = staticmethod(make_actor)
    # With this bound about half of the states of a batch are beyond it.
    region: ClassVar = {"eps": 3e-3}

    def build_loss(self, *, dtype=DTYPE, **kwargs):
        actor = self.make_policy(dtype=dtype)
        region = TrajectoryKLProjection(actor, **self.region)
        return TruDiLoss(actor, make_critic(dtype=dtype), trajectory_kl=region, **kwargs)

    def build_data(self, loss, *batch):
        actor = loss.actor_network
        data = moved_batch(actor, *batch)
        dtype = data["observation"].dtype
        data["value_target"] = 2 * torch.randn(*batch, 1, dtype=dtype)
        data["next", "critic", "embedding"] = torch.randn(*batch, 8, dtype=dtype)
        data["fresh"] = actor.module.draw_noise(batch)
        return data

    def evaluate(self, loss, data):
        return loss.actor_loss(data, noise=data["fresh"]).update(loss.critic_loss(data))

    def test_both_branches_are_taken(self):
        loss = self.build_loss()
        assert 0 < self.evaluate(loss, self.build_data(loss, 12))["gate_fraction"] < 1

    def test_shared_layers(self):
        """Of a layer in both networks, each loss moves its own use: they add up."""
        gradient = {}
        for shared in (True, False):
            torch.manual_seed(0)
            actor, critic = self.make_policy(), make_critic()
            network = getattr(actor.module, "score_network", None)
            layer = (actor.module.network if network is None else network).hidden[1]
            copied = layer if shared else copy.deepcopy(layer)
            critic.module.encoder[1] = copied
            region = TrajectoryKLProjection(actor, **self.region)
            loss = TruDiLoss(actor, critic, trajectory_kl=region)
            data = self.build_data(loss, 6)
            if not shared:
                copied.load_state_dict(layer.state_dict())
            count = sum(param is layer.weight for param in loss.parameters())
            assert count == 1
            out = self.evaluate(loss, data)
            for key in ("loss_actor", "loss_critic"):
                params = [layer.weight, copied.weight]
                gradient[shared, key] = gradients(out[key], params)
        for key, which in (("loss_actor", 0), ("loss_critic", 1)):
            mine = gradient[False, key]
            assert mine[which].abs().sum() > 0 and mine[1 - which].abs().sum() == 0
            torch.testing.assert_close(gradient[True, key][0], mine[which])

    def test_reduction_of_the_gated_form_is_that_of_the_dense(self):
        """The states are sorted by branch and must come back in the input's order."""
        for shape in ((12,), (3, 4)):
            outs, slopes = [], []
            for split in (True, False):
                torch.manual_seed(0)
                loss = self.build_loss(reduction="none", split_by_gate=split)
                data = self.build_data(loss, *shape)
                outs.append(self.evaluate(loss, data))
                weights = torch.linspace(1.0, 2.0, 12, dtype=DTYPE).reshape(shape)
                weighted = sum((weights * value).sum() for value in losses_of(outs[-1]).values())
                slopes.append(gradients(weighted, loss.parameters()))
            assert 0 < outs[0]["gate_fraction"] < 1
            assert_same(outs[0], outs[1])
            for gated, dense in zip(*slopes, strict=True):
                torch.testing.assert_close(gated, dense, rtol=1e-8, atol=1e-10)

    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    def test_reduction_with_a_mask(self, reduction):
        """Masked rows are zeros; the mean still divides by all rows."""
        loss = self.build_loss(reduction=reduction)
        data = self.build_data(loss, 4)
        rows = self.build_loss(reduction="none")
        rows.load_state_dict(loss.state_dict())
        expected = rows.critic_loss(data)["loss_critic"]
        data["mask"] = torch.tensor([[1.0], [0.0], [1.0], [0.5]], dtype=DTYPE)
        expected = expected * data["mask"].squeeze(-1)
        out = loss.critic_loss(data)["loss_critic"]
        reduced = {"mean": expected.sum() / 4, "sum": expected.sum(), "none": expected}
        torch.testing.assert_close(out, reduced[reduction])

    def test_reduction_of_the_loss_counts(self):
        """Not that of the trust region inside."""
        actor = self.make_policy()
        region = TrajectoryKLProjection(actor, reduction="none", **self.region)
        loss = TruDiLoss(actor, make_critic(), trajectory_kl=region)
        out = self.evaluate(loss, self.build_data(loss, 5))
        assert all(value.shape == () for value in out.exclude("kl_per_step").values())

    def test_reduction_none_needs_every_entropy(self):
        with pytest.raises(ValueError, match="entropy_fraction"):
            self.build_loss(reduction="none", entropy_fraction=0.5)

    def test_empty_critic_batch(self):
        loss = self.build_loss()
        with pytest.raises(ValueError, match="empty"):
            loss.critic_loss(self.build_data(loss, 3)[:0])

    def test_reset_is_a_new_policy(self):
        """The old policy is reset with it, and the duals are left alone."""
        loss = self.build_loss()
        nudge(loss)
        multiplier = loss.trajectory_kl.multiplier.clone()
        loss.reset_parameters_recursive()
        states = make_states(5)
        with torch.no_grad():
            loss.actor_network(states)
        assert loss.trajectory_kl(states)["kl"] < 1e-12
        assert torch.equal(loss.trajectory_kl.multiplier, multiplier)


class TestTruDiLoss(TrudiBase):
    """A diffusion policy with the pathwise gradient."""


class TestTruDiLossReplayed(TrudiBase):
    """The old policy's chain is made again from its noise."""

    make_policy = staticmethod(lambda **kwargs: make_actor(return_noise=True, **kwargs))
    region: ClassVar = {"old_policy": "replayed", "eps": 3e-3}

    def build_data(self, loss, *batch):
        # The record is there as well: the noise alone counts.
        data = super().build_data(loss, *batch)
        return data.exclude(*(("denoising", name) for name in ("chain", "loc", "scale")))


class TestTruDiLossGaussian(TrudiBase):
    make_policy = staticmethod(make_gaussian)
    region: ClassVar = {"eps": 6e-2}


class ProjectionBase(LossModuleTestBase):
    loss_class = TrajectoryKLProjection
    default_keys: ClassVar = RECORD
    draws = False
    options: ClassVar = {}

    def build_loss(self, *, dtype=DTYPE, **kwargs):
        actor = make_actor(dtype=dtype, return_noise=True)
        return TrajectoryKLProjection(actor, **{"eps": 3e-3, **self.options, **kwargs})

    def build_data(self, loss, *batch):
        data = moved_batch(loss.actor_network, *batch)
        actor = loss.actor_network
        data["fresh"] = torch.randn(
            *batch, loss.num_paths, STEPS + 1, actor.module.action_dim, dtype=actor.module.low.dtype
        )
        return data

    def test_shared_layers(self):
        """There is one network alone, and its parameters are registered once."""
        loss = self.build_loss()
        names = [name for name, _ in loss.named_parameters() if "log_multiplier" not in name]
        assert len(names) == len(list(loss.actor_network.parameters()))


class TestTrajectoryKLProjection(ProjectionBase):
    quick_compile = True


class TestTrajectoryKLProjectionLagrangian(ProjectionBase):
    options: ClassVar = {"mode": "lagrangian", "bound": "step"}


class TestTrajectoryKLProjectionPenalty(ProjectionBase):
    options: ClassVar = {"mode": "penalty", "kl": "full"}


class TestTrajectoryKLProjectionNone(ProjectionBase):
    options: ClassVar = {"mode": "none"}
    trains = False

    def test_reduction_rows_are_those_of_the_input(self):
        """Without a trust region there is nothing to add to any row."""
        loss = self.build_loss(reduction="none")
        out = losses_of(loss(self.build_data(loss, 5)))
        assert all(torch.equal(value, torch.zeros(5, dtype=DTYPE)) for value in out.values())


class TestTrajectoryKLProjectionTarget(ProjectionBase):
    options: ClassVar = {"old_policy": "target"}
    draws = True

    def evaluate(self, loss, data):
        kl = loss.path_kl(data, data["fresh"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(loss), "path_kl", lambda *_: kl)
            return loss(data)


class TestTrajectoryKLProjectionReplayed(ProjectionBase):
    options: ClassVar = {"old_policy": "replayed"}

    def build_data(self, loss, *batch):
        data = super().build_data(loss, *batch)
        return data.exclude(*(("denoising", name) for name in ("chain", "loc", "scale")))


def subclasses(cls) -> set[type]:
    found = {cls}
    for each in cls.__subclasses__():
        found |= subclasses(each)
    return found


def test_every_loss_has_its_tests():
    exported = {
        each
        for each in (getattr(objectives, name) for name in objectives.__all__)
        if inspect.isclass(each) and issubclass(each, LossModule)
    }
    tested = {
        each.loss_class for each in subclasses(LossModuleTestBase) if each.__name__[:4] == "Test"
    }
    assert exported and exported == tested


@pytest.mark.xfail(strict=True, reason="TensorDictParams takes an incomplete state as complete")
def test_state_dict_of_the_networks_is_strict():
    """Tells when a missing entry of a network is no longer passed over by tensordict."""
    region = TrajectoryKLProjection(make_actor())
    state = region.state_dict()
    key = next(key for key in state if key.endswith("output.weight"))
    with pytest.raises(RuntimeError, match="Missing key"):
        region.load_state_dict({k: v for k, v in state.items() if k != key}, strict=True)


def test_a_class_without_its_parts_is_refused():
    with pytest.raises(TypeError, match="TestNothing needs loss_class.*test_shared_layers"):
        type("TestNothing", (LossModuleTestBase,), {})
    with pytest.raises(TypeError, match="test_reduction"):
        type("TestWithout", (TestTruDiLoss,), {"test_reduction": None})


def test_total_is_what_is_trained():
    """The helper of these tests adds up all losses, and nothing else."""
    out = TensorDict({"loss_a": torch.ones(2), "loss_b": torch.ones(()), "kl": torch.ones(())})
    assert total(out) == 3

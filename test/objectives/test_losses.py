"""The generic tests of every loss, see ``_loss_base``."""

from __future__ import annotations

import copy
import inspect
from typing import ClassVar

import pytest
import torch
from objectives._loss_base import (
    LossModuleTestBase,
    assert_same,
    flat_name,
    losses_of,
    total,
)
from objectives._parts import (
    DTYPE,
    OBS,
    STEPS,
    gradients,
    make_actor,
    make_batch,
    make_critic,
    make_gaussian,
    make_rollout,
    make_states,
    nudge,
)
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torchrl.modules import MLP, ValueOperator
from torchrl.objectives import LossModule
from torchrl.objectives.utils import ValueEstimators
from torchrl.objectives.value import ValueEstimatorBase, VTrace

from torchrl_trudi import objectives
from torchrl_trudi.objectives import (
    DenoisingDistillationLoss,
    TrajectoryKLProjection,
    TruDiLoss,
    TruDiPPOLoss,
)

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


@pytest.mark.family
class TestTruDiLossBound(TrudiBase):
    """With the evidence bound of the recorded actions in the objective."""

    def build_loss(self, **kwargs):
        return super().build_loss(**{"elbo_coeff": 0.1, **kwargs})

    def build_data(self, loss, *batch):
        data = super().build_data(loss, *batch)
        data["back"] = torch.randn_like(data["fresh"][..., 1:, :])
        return data

    def evaluate(self, loss, data):
        out = loss.actor_loss(data, noise=data["fresh"], elbo_noise=data["back"])
        return out.update(loss.critic_loss(data))


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


def mse_critic(dtype=DTYPE) -> ValueOperator:
    """The value of a state as a number."""
    return ValueOperator(MLP(OBS, 1, num_cells=[8]).to(dtype), in_keys=["observation"])


def histogram_critic(dtype=DTYPE) -> TensorDictModuleBase:
    """The value of a state as a histogram."""
    return make_critic(action=0, in_keys=["observation"], predict_embedding=False, dtype=dtype)


class PPOBase(LossModuleTestBase):
    loss_class = TruDiPPOLoss
    default_keys: ClassVar = {
        "advantage": "advantage",
        "value_target": "value_target",
        "value": "state_value",
        "value_logits": ("critic", "logits"),
        "sample_log_prob": ("denoising", "path_log_prob"),
        "action": ("denoising", "chain"),
        "reward": "reward",
        "done": "done",
        "terminated": "terminated",
    }
    fixed_keys = ("action",)
    # The value's key is the critic's: the estimators refuse one that the critic does not write.
    estimator_keys: ClassVar = {
        name: name for name in ("advantage", "value_target", "reward", "done", "terminated")
    }
    # V-trace does not score the recorded sample, but another one, which a recorded chain has not.
    estimators = tuple(each for each in ValueEstimators if each is not ValueEstimators.VTrace)
    draws = False
    make_policy = staticmethod(make_actor)
    make_value = staticmethod(mse_critic)
    # With this bound about half of the states of a batch are beyond it.
    region: ClassVar = {"eps": 3e-3}

    def build_loss(self, *, dtype=DTYPE, **kwargs):
        actor = self.make_policy(dtype=dtype)
        region = TrajectoryKLProjection(actor, **self.region)
        # A standardised advantage is one of the batch, not of the row.
        settings = {"normalize_advantage": False, "entropy_coeff": 0.1, **kwargs}
        return TruDiPPOLoss(actor, self.make_value(dtype), trajectory_kl=region, **settings)

    def build_data(self, loss, *batch):
        actor = loss.actor_network
        data = make_rollout(actor, *batch)
        dtype = data["observation"].dtype
        for name in ("advantage", "value_target"):
            data[name] = torch.randn(*batch, 1, dtype=dtype)
        nudge(actor, 0.05)
        return data

    def test_both_branches_are_taken(self):
        loss = self.build_loss()
        out = loss(self.build_data(loss, 12))
        assert 0 < out["gate_fraction"] < 1

    def test_functional(self):
        """Upstream has the choice, which its arguments bring here; the trust region has not."""
        assert self.build_loss(functional=True).functional
        with pytest.raises(ValueError, match="functional=False"):
            self.build_loss(functional=False)

    def test_shared_layers(self):
        """Of a layer in both networks, each loss moves its own use: they add up."""
        gradient = {}
        for shared in (True, False):
            torch.manual_seed(0)
            actor, critic = self.make_policy(), self.make_value()
            network = getattr(actor.module, "score_network", None)
            layer = (actor.module.network if network is None else network).hidden[1]
            copied = layer if shared else copy.deepcopy(layer)
            if isinstance(critic, ValueOperator):
                critic.module[1] = copied
            else:
                critic.module.encoder[1] = copied
            region = TrajectoryKLProjection(actor, **self.region)
            loss = TruDiPPOLoss(actor, critic, trajectory_kl=region, normalize_advantage=False)
            data = self.build_data(loss, 6)
            if not shared:
                copied.load_state_dict(layer.state_dict())
            assert sum(param is layer.weight for param in loss.parameters()) == 1
            out = self.evaluate(loss, data)
            params = [layer.weight, copied.weight]
            gradient[shared, "actor"] = gradients(
                out["loss_objective"] + out["loss_trajectory_kl"], params
            )
            gradient[shared, "critic"] = gradients(out["loss_critic"], params)
        for key, which in (("actor", 0), ("critic", 1)):
            mine = gradient[False, key]
            assert mine[which].abs().sum() > 0 and mine[1 - which].abs().sum() == 0
            torch.testing.assert_close(gradient[True, key][0], mine[which])

    @pytest.mark.parametrize("value_type", estimators, ids=str)
    def test_estimates_with(self, value_type):
        """On a rollout, before it and inside of ``forward``, with the same numbers."""
        loss = self.build_loss().make_value_estimator(value_type, gamma=0.9)
        rollout = self.build_data(loss, 2, 5).exclude("advantage", "value_target")
        out = loss(rollout)
        loss.value_estimator(
            rollout,
            params=loss.critic_network_params.detach(),
            target_params=loss.target_critic_network_params,
        )
        for name in ("advantage", "value_target"):
            assert rollout[name].shape == (2, 5, 1) and rollout[name].isfinite().all()
            assert not rollout[name].requires_grad
        assert_same(out, loss(rollout))

    def test_v_trace_is_refused_in_each_form(self):
        loss = self.build_loss()
        built = VTrace(
            gamma=0.9, actor_network=loss.actor_network, value_network=loss.critic_network
        )
        for value_type in (ValueEstimators.VTrace, VTrace, built):
            with pytest.raises(NotImplementedError, match="VTrace"):
                loss.make_value_estimator(value_type)

    def test_make_value_estimator_gives_the_loss(self):
        loss = self.build_loss()
        assert loss.make_value_estimator(gamma=0.9) is loss
        estimator = loss.value_estimator
        assert isinstance(estimator, ValueEstimatorBase)
        assert loss.make_value_estimator(estimator) is loss and loss.value_estimator is estimator

    def test_a_call_without_advantage_or_without_what_comes_next(self):
        """``in_keys`` are those of both forms, either of which is enough."""
        loss = self.build_loss()
        data = self.build_data(loss, 2, 5)
        for few in (
            data.select(*loss.minibatch_keys),
            data.exclude("advantage", "value_target"),
        ):
            present = [key for key in loss.in_keys if few.get(key, None) is not None]
            assert len(present) < len(loss.in_keys)
            expected = loss(few)
            out = loss(**{flat_name(key): few.get(key) for key in present})
            for value, key in zip(out, loss.out_keys, strict=True):
                torch.testing.assert_close(value, expected[key])

    def test_losses_of_the_parts_do_not_change_the_input(self):
        loss = self.build_loss()
        data = self.build_data(loss, 4)
        before = data.clone()
        loss.actor_loss(data)
        loss.critic_loss(data)
        assert set(data.keys(True, True)) == set(before.keys(True, True))

    def test_empty_part(self):
        loss = self.build_loss()
        data = self.build_data(loss, 3)[:0]
        for part in (loss.actor_loss, loss.critic_loss):
            with pytest.raises(ValueError, match="empty"):
                part(data)

    def test_reduction_of_the_loss_counts(self):
        """Not that of the trust region inside."""
        actor = self.make_policy()
        region = TrajectoryKLProjection(actor, reduction="none", **self.region)
        loss = TruDiPPOLoss(actor, self.make_value(), trajectory_kl=region)
        out = loss(self.build_data(loss, 5))
        assert all(value.shape == () for value in losses_of(out).values())

    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    def test_reduction_with_a_mask(self, reduction):
        """Rows that a mask of torchrl marks as padding count in none of the losses."""
        loss = self.build_loss(reduction=reduction)
        data = self.build_data(loss, 5)
        valid = torch.tensor([True, False, True, True, False])
        rows = self.build_loss(reduction="none")
        rows.load_state_dict(loss.state_dict())
        expected = losses_of(rows(data))
        data["collector", "mask"] = valid.unsqueeze(-1)
        for key, value in losses_of(loss(data)).items():
            kept = torch.where(valid, expected[key], 0.0)
            reduced = {"mean": kept.sum() / 3, "sum": kept.sum(), "none": kept}[reduction]
            torch.testing.assert_close(value, reduced)

    def test_unknown_reduction_is_refused_early(self):
        with pytest.raises(ValueError, match="average"):
            self.build_loss(reduction="average")

    def test_state_has_the_policy_once(self):
        loss = self.build_loss()
        values = [value for value in loss.state_dict().values() if value.numel() > 1]
        assert len(values) == len({value.data_ptr() for value in values})
        assert loss.actor_network_params is loss.trajectory_kl.actor_network_params

    def test_reset_of_a_delayed_policy(self):
        """The proximal policy is that of the new one."""
        loss = self.build_loss(delay_actor=True)
        data = self.build_data(loss, 6)
        with pytest.warns(UserWarning, match="No target network updater"):
            out = loss(data)
        assert (out["mean_ratio"] - 1).abs() > 1e-6
        nudge(loss)
        multiplier = loss.trajectory_kl.multiplier.clone()
        loss.reset_parameters_recursive()
        old = loss._modules["target_actor_network_params"]
        for key, value in loss.actor_network_params.items(True, True):
            torch.testing.assert_close(old[key], value.data)
        assert torch.equal(loss.trajectory_kl.multiplier, multiplier)


class TestTruDiPPOLoss(PPOBase):
    """A diffusion policy with one ratio for the path, and a critic with a number."""


class TestTruDiPPOLossPerStep(PPOBase):
    """One ratio for each step, and a critic with a histogram."""

    make_policy = staticmethod(lambda **kwargs: make_actor(event_dims=1, **kwargs))
    make_value = staticmethod(histogram_critic)


class TestTruDiPPOLossGaussian(PPOBase):
    make_policy = staticmethod(make_gaussian)
    region: ClassVar = {"eps": 6e-2, "mode": "lagrangian"}


class TestTruDiPPOLossProjected(PPOBase):
    """The kernels of the loss are projected onto the bound."""

    region: ClassVar = {"eps": 3e-3, "mode": "projection", "share": "proportional"}

    def test_reset_of_a_delayed_policy(self):
        """There is none here."""
        with pytest.raises(ValueError, match="delay_actor"):
            self.build_loss(delay_actor=True)


class DistillationBase(LossModuleTestBase):
    loss_class = DenoisingDistillationLoss
    default_keys: ClassVar = {"chain": ("denoising", "chain"), "task": "task"}
    draws = False
    mode: ClassVar[str]
    num_steps: ClassVar[int] = STEPS

    def build_loss(self, *, dtype=DTYPE, **kwargs):
        teachers = [make_actor(dtype=dtype) for _ in range(3)]
        student = make_actor(dtype=dtype, num_steps=self.num_steps)
        settings = {"mode": self.mode, "task_weights": [1.0, 0.5, 2.0], **kwargs}
        return DenoisingDistillationLoss(student, teachers, **settings)

    def build_data(self, loss, *batch):
        data = moved_batch(loss.student_network, *batch)
        data["task"] = torch.arange(data.numel()).reshape(batch) % 3
        return data

    def test_shared_layers(self):
        """Teachers are copies: a layer that one shares with the student is trained in the student alone."""
        student = make_actor()
        loss = DenoisingDistillationLoss(student, [student], mode=self.mode)
        names = {name for name, _ in loss.named_parameters()}
        assert len(names) == len(list(student.parameters()))
        assert not any(name.startswith("teachers") for name in names)
        data = make_batch(student, 4)
        assert loss(data)["loss_distillation"].abs() < 1e-12
        nudge(student, 0.3)
        assert loss(data)["loss_distillation"] > 1e-6


@pytest.mark.family
class TestDenoisingDistillationLoss(DistillationBase):
    mode = "kl"


@pytest.mark.family
class TestDenoisingDistillationLossMean(DistillationBase):
    mode = "mean"


@pytest.mark.family
class TestDenoisingDistillationLossAction(DistillationBase):
    mode = "action"
    num_steps = 2


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

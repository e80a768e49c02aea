from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from objectives._parts import (
    ACTION,
    DTYPE,
    OBS,
    assert_all_close,
    draw_noise,
    end,
    gradients,
    linear_critic,
    literal_kl,
    literal_sample,
    make_actor,
    make_batch,
    make_critic,
    make_rollout,
    nudge,
)
from tensordict import TensorDict
from torchrl.envs import ExplorationType, set_exploration_type

from torchrl_trudi.modules import HLGaussValueOperator, StepSizes
from torchrl_trudi.objectives import TrajectoryKLProjection, TruDiLoss

ACTOR_LOSSES = ("loss_actor", "loss_temperature", "loss_kl_multiplier")


def make_loss(actor=None, critic=None, *, alpha=0.3, region=None, **kwargs) -> TruDiLoss:
    actor = make_actor() if actor is None else actor
    projection = TrajectoryKLProjection(actor, **(region or {}))
    critic = make_critic() if critic is None else critic
    return TruDiLoss(actor, critic, trajectory_kl=projection, init_temperature=alpha, **kwargs)


def make_transitions(actor, *batch) -> TensorDict:
    """A batch with everything that the loss reads."""
    data = make_batch(actor, *batch)
    dtype = data["observation"].dtype
    data["value_target"] = 2 * torch.randn(*batch, 1, dtype=dtype)
    data["next", "critic", "embedding"] = torch.randn(*batch, 8, dtype=dtype)
    return data


def total(out) -> torch.Tensor:
    return sum(value for key, value in out.items() if key.startswith("loss_"))


def bound_between(values) -> float:
    return values.detach().sort().values[len(values) // 2 - 1 :][:2].mean().item()


def literal_actor_loss(loss, data, noise, *, mode="switch"):
    """Section C, on linear Q: J, J_alpha, J_beta."""
    actor, critic = loss.actor_network, loss.critic_network.module
    action, running, log_prob = literal_sample(actor, data["observation"], noise)
    q = (data["observation"] * critic.c).sum(-1) + (action * critic.d).sum(-1)
    kl = literal_kl(actor, data).sum(-1)
    alpha, beta = loss.log_temperature.exp(), loss.trajectory_kl.log_multiplier.exp()
    eps = loss.trajectory_kl.eps
    objective = alpha.detach() * log_prob - q
    if mode == "switch":
        j = torch.where(kl < eps, objective, beta.detach() * kl).mean()
    elif mode == "none":
        j = objective.mean()
    else:
        j = (objective + beta.detach() * kl).mean()
    gap = ACTION * loss.target_entropy_scale - running.mean()
    j_alpha = (alpha * gap.detach()).sum()
    j_beta = -(beta * (kl - eps).mean().detach()).sum()
    return j, j_alpha, j_beta


class TestActorLoss:
    @pytest.mark.parametrize("mode", ["switch", "penalty", "lagrangian", "none"])
    def test_equals_the_formulas(self, mode):
        actor = make_actor()
        data, noise = make_batch(actor, 6), draw_noise(6)
        nudge(actor)
        eps = bound_between(literal_kl(actor, data).sum(-1))
        region = {"mode": mode, "eps": eps, "init_multiplier": 2.0}
        loss = make_loss(actor, linear_critic(), region=region, target_entropy_scale=0.5)
        out = loss.actor_loss(data, noise=noise)
        j, j_alpha, j_beta = literal_actor_loss(loss, data, noise, mode=mode)
        if mode in ("penalty", "none"):
            j_beta = torch.zeros((), dtype=DTYPE)
        expected = dict(zip(ACTOR_LOSSES, (j, j_alpha, j_beta), strict=True))
        for key, value in expected.items():
            torch.testing.assert_close(out[key], value, rtol=1e-10, atol=1e-12)
        params = [*actor.parameters(), *loss.dual_parameters()]
        assert_all_close(gradients(total(out), params), gradients(j + j_alpha + j_beta, params))

    def test_metrics(self):
        actor = make_actor()
        loss = make_loss(actor, linear_critic())
        data, noise = make_batch(actor, 6), draw_noise(6)
        out = loss.actor_loss(data, noise=noise)
        action, running, _ = literal_sample(actor, data["observation"], noise)
        torch.testing.assert_close(out["entropy"], -running.mean().detach())
        torch.testing.assert_close(out["temperature"], torch.tensor(0.3, dtype=DTYPE))
        saturated = (action.abs() > 0.98).to(DTYPE).mean()
        assert 0 < saturated < 1
        torch.testing.assert_close(out["saturation_fraction"], saturated)
        assert all(v.requires_grad == k.startswith("loss_") for k, v in out.items())

    def test_saturation_is_relative_to_the_box(self):
        from torchrl.data import Bounded

        actor = make_actor()
        boxed = make_actor(
            spec=Bounded(
                torch.tensor([-3.0, 2.0], dtype=DTYPE), torch.tensor([1.0, 8.0], dtype=DTYPE)
            )
        )
        unit, other = (
            make_loss(each, linear_critic()).actor_loss(make_batch(each, 50), noise=noise)
            for noise in [draw_noise(50)]
            for each in (actor, boxed)
        )
        assert unit["saturation_fraction"] > 0
        assert other["saturation_fraction"] > 0
        # Fresh scores are small, so that both chains are dominated by the same noise.
        gap = unit["saturation_fraction"] - other["saturation_fraction"]
        assert gap.abs() < 0.1

    def test_fresh_stochastic_sample_under_deterministic_exploration(self):
        actor = make_actor()
        loss = make_loss(actor, linear_critic())
        data = make_batch(actor, 4).exclude("noise")
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            first, second = (loss.actor_loss(data) for _ in range(2))
        assert first["entropy"] != second["entropy"]
        assert first["loss_actor"] != second["loss_actor"]

    def test_the_recorded_action_has_no_effect(self):
        loss = make_loss(critic=linear_critic())
        data, noise = make_batch(loss.actor_network, 4), draw_noise(4)
        before = loss.actor_loss(data, noise=noise)
        data["action"] = data["action"] + 1
        data["denoising", "log_prob"] += 1
        assert loss.actor_loss(data, noise=noise)["loss_actor"] == before["loss_actor"]

    def test_gradient_goes_through_the_action(self):
        """The pathwise gradient of -Q, by finite differences."""
        actor = make_actor()
        loss = make_loss(actor, linear_critic(), alpha=1e-8, region={"mode": "none"})
        data, noise = make_batch(actor, 4), draw_noise(4)
        weight = actor.module.score_network.output.bias
        grad = gradients(loss.actor_loss(data, noise=noise)["loss_actor"], [weight])[0]
        for i in range(ACTION):
            values = []
            for step in (1e-5, -1e-5):
                weight.data[i] += step
                values.append(loss.actor_loss(data, noise=noise)["loss_actor"].item())
                weight.data[i] -= step
            numeric = (values[0] - values[1]) / 2e-5
            assert abs(numeric) > 1e-3
            assert grad[i].item() == pytest.approx(numeric, rel=1e-4)

    def test_missing_recording(self):
        loss = make_loss()
        data = make_batch(loss.actor_network, 4).exclude("denoising")
        with pytest.raises(KeyError, match="recorded chain"):
            loss.actor_loss(data)

    def test_target_mode_needs_no_recording(self):
        loss = make_loss(region={"old_policy": "target", "num_paths": 2})
        data = make_batch(loss.actor_network, 4).select("observation")
        nudge(loss.actor_network)
        assert loss.actor_loss(data)["kl"] > 0
        loss.update_old_policy()
        assert loss.actor_loss(data)["kl"] < 1e-15

    def test_kl_noise(self):
        """The two chains have noise of their own."""
        loss = make_loss(region={"old_policy": "target"})
        data = make_batch(loss.actor_network, 4).select("observation")
        nudge(loss.actor_network)
        noise, other = draw_noise(4), draw_noise(4, 1)
        first = loss.actor_loss(data, noise=noise, kl_noise=other)
        second = loss.actor_loss(data, noise=draw_noise(4), kl_noise=other)
        assert first["kl"] == second["kl"] and first["entropy"] != second["entropy"]


class TestDuals:
    @pytest.mark.parametrize("scale", [0.5, 4.0, -30.0])
    def test_gradient_of_the_temperature(self, scale):
        """d J_alpha / d log alpha = alpha (A m + mean(-running))."""
        actor = make_actor()
        loss = make_loss(actor, target_entropy_scale=scale, alpha=0.5)
        data, noise = make_batch(actor, 5), draw_noise(5)
        out = loss.actor_loss(data, noise=noise)
        _, running, _ = literal_sample(actor, data["observation"], noise)
        gap = ACTION * scale - running.mean()
        grads = gradients(out["loss_temperature"], [loss.log_temperature, *actor.parameters()])
        torch.testing.assert_close(grads[0], (0.5 * gap).reshape(1).detach())
        assert all((grad == 0).all() for grad in grads[1:])
        # Too little entropy (gap < 0): a descent step raises the temperature.
        out["loss_temperature"].backward()
        torch.optim.SGD([loss.log_temperature], lr=1e-2).step()
        assert bool(loss.temperature > 0.5) == bool(gap < 0)

    def test_gradient_of_the_multiplier(self):
        actor = make_actor()
        data = make_batch(actor, 5)
        nudge(actor)
        loss = make_loss(actor, region={"init_multiplier": 0.25, "eps": 0.5})
        gap = literal_kl(actor, data).sum(-1).mean() - 0.5
        loss.actor_loss(data)["loss_kl_multiplier"].backward()
        grad = loss.trajectory_kl.log_multiplier.grad
        torch.testing.assert_close(grad, (-0.25 * gap).reshape(1).detach())

    def test_the_actor_loss_does_not_move_them(self):
        loss = make_loss(region={"mode": "lagrangian"})
        data = make_batch(loss.actor_network, 4)
        grads = gradients(loss.actor_loss(data)["loss_actor"], loss.dual_parameters())
        assert all((grad == 0).all() for grad in grads)

    def test_fixed_temperature(self):
        loss = make_loss(learn_temperature=False)
        assert "log_temperature" in dict(loss.named_buffers())
        out = loss.actor_loss(make_batch(loss.actor_network, 4))
        assert out["loss_temperature"] == 0 and not out["loss_temperature"].requires_grad
        assert list(loss.dual_parameters()) == [loss.trajectory_kl.log_multiplier]

    def test_optimiser_groups(self):
        loss = make_loss()
        actor, duals = loss.actor_param_groups(lr=1e-3, dual_lr=1e-2, weight_decay=0.1)
        assert actor["lr"] == 1e-3 and actor["weight_decay"] == 0.1
        assert duals["lr"] == 1e-2 and duals["weight_decay"] == 0.0
        expected = [loss.log_temperature, loss.trajectory_kl.log_multiplier]
        assert [id(p) for p in duals["params"]] == [id(p) for p in expected]
        assert {id(p) for p in actor["params"]} == {id(p) for p in loss.actor_parameters()}

    def test_dual_lr(self):
        def lr(**kwargs):
            return make_loss().actor_param_groups(lr=1e-3, **kwargs)[1]["lr"]

        assert (lr(), lr(dual_lr=0.0), lr(dual_lr=0.5)) == (1e-3, 0.0, 0.5)

    def test_weight_decay_leaves_them_alone(self):
        """With a gradient of zero, only the networks shrink."""
        loss = make_loss(alpha=0.01)
        optimizer = torch.optim.AdamW(loss.actor_param_groups(lr=0.1, weight_decay=0.5))
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.zeros_like(param)
        weight = loss.actor_network.module.score_network.input.weight
        before, alpha = weight.detach().clone(), loss.temperature.detach().clone()
        optimizer.step()
        assert torch.equal(loss.temperature, alpha)
        torch.testing.assert_close(weight.detach(), before * (1 - 0.1 * 0.5))

    def test_no_group_without_duals(self):
        loss = make_loss(learn_temperature=False, region={"mode": "penalty"})
        assert len(loss.actor_param_groups(lr=1e-3)) == 1


class TestCriticLoss:
    def test_equals_the_formulas(self):
        loss = make_loss(aux_coeff=0.75)
        nudge(loss.critic_network)
        data = make_transitions(loss.actor_network, 6)
        out = loss.critic_loss(data)
        critic = loss.critic_network.module
        _, logits, _, prediction = critic(data["observation"], data["action"])
        # HL-Gauss: the mass of N(y, sigma) in each bin, renormalised.
        width = 5.0 / 10
        edges = torch.linspace(-2 - width / 2, 3 + width / 2, 12, dtype=DTYPE)
        y = data["value_target"].clamp(-2.0, 3.0)
        cdf = torch.distributions.Normal(y, 0.75 * width).cdf(edges)
        probs = cdf.diff(dim=-1) / (cdf[:, -1:] - cdf[:, :1])
        cross_entropy = -(probs * logits.log_softmax(-1)).sum(-1).mean()
        error = (prediction - data["next", "critic", "embedding"]).square().mean(-1).mean()
        torch.testing.assert_close(out["loss_critic"], cross_entropy + 0.75 * error)
        torch.testing.assert_close(out["value_cross_entropy"], cross_entropy.detach())
        torch.testing.assert_close(out["auxiliary_error"], error.detach())
        expected = gradients(cross_entropy + 0.75 * error, loss.critic_parameters())
        assert_all_close(gradients(out["loss_critic"], loss.critic_parameters()), expected)
        assert out["target_clip_fraction"] == (y != data["value_target"]).to(DTYPE).mean()
        assert 0 < out["target_clip_fraction"] < 1

    def test_embedding_target_carries_no_gradient(self):
        loss = make_loss()
        data = make_transitions(loss.actor_network, 4)
        goal = data["next", "critic", "embedding"].requires_grad_()
        target = data["value_target"].requires_grad_()
        loss.critic_loss(data)["loss_critic"].backward()
        assert goal.grad is None and target.grad is None

    def test_mask(self):
        """Weights rows, and the mean still divides by the batch."""
        loss = make_loss()
        data = make_transitions(loss.actor_network, 4)
        data["mask"] = torch.tensor([[1.0], [0.0], [1.0], [0.0]], dtype=DTYPE)
        masked = loss.critic_loss(data)
        kept = loss.critic_loss(data[::2].exclude("mask"))
        for key in ("loss_critic", "value_cross_entropy", "auxiliary_error"):
            torch.testing.assert_close(masked[key], kept[key] / 2)
        data["mask"] = data["mask"].bool()
        torch.testing.assert_close(loss.critic_loss(data)["loss_critic"], masked["loss_critic"])

    def test_mask_under_another_key(self):
        loss = make_loss()
        data = make_transitions(loss.actor_network, 4)
        data["collector", "valid"] = torch.zeros(4, 1, dtype=torch.bool)
        assert loss.critic_loss(data)["loss_critic"] > 0
        loss.set_keys(mask=("collector", "valid"))
        assert loss.critic_loss(data)["loss_critic"] == 0

    def test_rows_without_a_next_embedding(self):
        loss = make_loss()
        data = make_transitions(loss.actor_network, 4)
        kept = loss.critic_loss(data[:2])["auxiliary_error"]
        data["next", "critic", "embedding"][2] = math.nan
        data["next", "critic", "embedding"][3, 0] = math.inf
        out = loss.critic_loss(data)
        torch.testing.assert_close(out["auxiliary_error"], kept / 2)
        grads = gradients(out["loss_critic"], loss.critic_parameters())
        assert all(grad.isfinite().all() for grad in grads)

    def test_without_next_embedding(self):
        loss = make_loss()
        data = make_transitions(loss.actor_network, 4).exclude("next")
        with pytest.raises(KeyError, match="value_estimator"):
            loss.critic_loss(data)
        loss = make_loss(aux_coeff=0.0)
        out = loss.critic_loss(data)
        assert out["auxiliary_error"] == 0
        torch.testing.assert_close(out["loss_critic"].detach(), out["value_cross_entropy"])

    def test_critic_without_predictor(self):
        loss = make_loss(critic=make_critic(predict_embedding=False))
        out = loss.critic_loss(make_transitions(loss.actor_network, 4))
        assert out["auxiliary_error"] == 0
        data = make_rollout(loss.actor_network, 2, 3)
        assert total(loss(data)).isfinite()

    def test_missing_target(self):
        loss = make_loss()
        with pytest.raises(KeyError, match="value_estimator"):
            loss.critic_loss(make_batch(loss.actor_network, 4))

    @pytest.mark.parametrize(
        "values, fraction", [([-2.0, 3.0], 0.0), ([-2.1, 3.0], 0.5), ([9.0, -9.0], 1.0)]
    )
    def test_clip_fraction(self, values, fraction):
        loss = make_loss()
        data = make_transitions(loss.actor_network, 2)
        data["value_target"] = torch.tensor(values, dtype=DTYPE).unsqueeze(-1)
        assert loss.critic_loss(data)["target_clip_fraction"] == fraction


class TestSeparation:
    def test_actor_loss_leaves_the_critic_alone(self):
        loss = make_loss()
        total(loss.actor_loss(make_batch(loss.actor_network, 4))).backward()
        assert all(p.grad is None for p in loss.critic_parameters())
        assert any(p.grad.abs().sum() > 0 for p in loss.actor_parameters())

    def test_critic_loss_leaves_the_actor_alone(self):
        loss = make_loss()
        loss.critic_loss(make_transitions(loss.actor_network, 4))["loss_critic"].backward()
        others = [*loss.actor_parameters(), *loss.dual_parameters()]
        assert all(p.grad is None for p in others)
        assert all(p.grad is not None for p in loss.critic_parameters())

    @pytest.mark.parametrize("mode", ["switch", "penalty"])
    @pytest.mark.parametrize("old_policy", ["recorded", "target"])
    @pytest.mark.parametrize("learned", [False, True])
    def test_parameters_are_partitioned(self, mode, old_policy, learned):
        sizes = StepSizes(3, learn="per_step", dtype=DTYPE) if learned else None
        actor = make_actor(step_sizes=sizes, learn_friction=learned, learn_prior=learned)
        loss = make_loss(actor, region={"mode": mode, "old_policy": old_policy})
        groups = [
            [id(p) for p in group()]
            for group in (loss.actor_parameters, loss.critic_parameters, loss.dual_parameters)
        ]
        together = [param for group in groups for param in group]
        assert len(together) == len(set(together))
        assert set(together) == {id(p) for p in loss.parameters()}
        assert set(groups[0]) == {id(p) for p in actor.parameters()}
        assert set(groups[1]) == {id(p) for p in loss.critic_network.parameters()}
        assert len(groups[2]) == (2 if mode == "switch" else 1)
        (group, *_) = loss.actor_param_groups(lr=1.0)
        assert [id(p) for p in group["params"]] == groups[0]


class TestForward:
    def test_is_both_losses(self):
        loss = make_loss()
        data = make_transitions(loss.actor_network, 5)
        torch.manual_seed(1)
        out = loss(data)
        torch.manual_seed(1)
        expected = loss.actor_loss(data).update(loss.critic_loss(data))
        assert set(out.keys()) == set(expected.keys()) == set(loss.out_keys)
        for key in loss.out_keys:
            assert torch.equal(out[key], expected[key])

    def test_runs_the_estimator_on_a_rollout(self):
        loss = make_loss()
        data = make_rollout(loss.actor_network, 2, 4)
        end(data, (0, 1), "terminated")
        keys = set(data.keys(True, True))
        torch.manual_seed(1)
        out = loss(data)
        assert set(data.keys(True, True)) == keys
        torch.manual_seed(1)
        prepared = loss.value_estimator(data.clone())
        expected = loss(prepared)
        assert out["auxiliary_error"] > 0
        for key in loss.out_keys:
            torch.testing.assert_close(out[key], expected[key])

    def test_batch_layout(self):
        loss = make_loss()
        data, noise = make_transitions(loss.actor_network, 2, 3), draw_noise(2, 3)
        nudge(loss.actor_network)
        flat = data.reshape(-1)
        together = loss.actor_loss(data, noise=noise).update(loss.critic_loss(data))
        expected = loss.actor_loss(flat, noise=noise.flatten(0, 1)).update(loss.critic_loss(flat))
        for key in loss.out_keys:
            torch.testing.assert_close(together[key], expected[key])
            assert together[key].shape == ((3,) if key == "kl_per_step" else ())

    def test_minibatches_average_to_the_batch(self):
        loss = make_loss()
        data, noise = make_transitions(loss.actor_network, 6), draw_noise(6)
        nudge(loss.actor_network)
        whole = loss.actor_loss(data, noise=noise).update(loss.critic_loss(data))
        parts = [
            loss.actor_loss(data[i : i + 2], noise=noise[i : i + 2]).update(
                loss.critic_loss(data[i : i + 2])
            )
            for i in (0, 2, 4)
        ]
        for key in ("loss_actor", "loss_critic", "kl", "entropy", "gate_fraction"):
            torch.testing.assert_close(torch.stack([p[key] for p in parts]).mean(), whole[key])

    def test_dispatch(self):
        loss = make_loss()
        data = make_transitions(loss.actor_network, 4)
        torch.manual_seed(1)
        expected = loss(data)
        torch.manual_seed(1)
        out = loss(
            **{"_".join((key,) if isinstance(key, str) else key): data[key] for key in loss.in_keys}
        )
        for key, value in zip(loss.out_keys, out, strict=True):
            torch.testing.assert_close(value, expected[key])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_dtype(self, dtype):
        loss = make_loss(make_actor(dtype=dtype), make_critic(dtype=dtype))
        data = make_transitions(loss.actor_network, 4)
        out = loss(data)
        assert {value.dtype for value in out.values()} == {dtype}
        total(out).backward()
        assert {p.grad.dtype for p in loss.parameters() if p.grad is not None} == {dtype}

    def test_cast(self):
        """``loss.double()`` of a float32 loss is a float64 loss, like ``loss.to(device)``."""
        torch.manual_seed(1)
        loss = make_loss(make_actor(dtype=torch.float32), make_critic(dtype=torch.float32))
        loss = loss.double()
        assert {value.dtype for value in loss.state_dict().values()} == {DTYPE}
        loss.make_value_estimator()
        out = loss(make_rollout(make_actor(dtype=DTYPE), 2, 3))
        assert {value.dtype for value in out.values()} == {DTYPE}
        total(out).backward()

    def test_state_value_critic_is_refused(self):
        critic = make_critic()
        with pytest.raises(ValueError, match="Q function"):
            make_loss(critic=HLGaussValueOperator(critic.module, in_keys=["observation"]))

    def test_settings_are_not_state(self):
        old, new = make_loss(aux_coeff=3.0), make_loss(aux_coeff=1.0)
        old.make_value_estimator(gamma=0.5, lmbda=0.5)
        new.make_value_estimator(gamma=0.9, lmbda=0.8)
        new.load_state_dict(old.state_dict())
        assert new.aux_coeff.item() == 1.0
        assert new.value_estimator.gamma.item() == pytest.approx(0.9)
        assert new.value_estimator.lmbda.item() == pytest.approx(0.8)


class TestKeys:
    def test_reach_loss_and_estimator(self):
        names = {"value_target": ("out", "target"), "reward": "r", "done": ("flag", "d")}
        loss = make_loss()
        data = make_rollout(loss.actor_network, 2, 4)
        torch.manual_seed(1)
        expected = loss(data.clone())
        loss.set_keys(**names)
        for role in ("reward", "done"):
            key = names[role]
            data.rename_key_(("next", role), ("next", *((key,) if isinstance(key, str) else key)))
        assert ("out", "target") in loss.in_keys and "value_target" not in loss.in_keys
        torch.manual_seed(1)
        out = loss(data)
        for key in loss.out_keys:
            torch.testing.assert_close(out[key], expected[key])
        assert loss.value_estimator(data)["out", "target"].shape == (2, 4, 1)

    def test_set_after_the_estimator(self):
        loss = make_loss()
        loss.make_value_estimator()
        loss.set_keys(value_target=("out", "target"))
        assert loss.value_estimator.tensor_keys.value_target == ("out", "target")

    def test_nested_action_and_other_critic_outputs(self):
        actor = make_actor(out_keys=[("agent", "action")])
        names = ["q", ("c", "logits"), ("c", "e"), ("c", "p")]
        critic = make_critic(in_keys=["observation", ("agent", "action")], out_keys=names)
        loss = make_loss(actor, critic)
        keys = loss.tensor_keys
        assert keys.action == ("agent", "action")
        written = [keys.value, keys.value_logits, keys.embedding, keys.next_embedding]
        assert written == names
        data = make_rollout(actor, 2, 4)
        out = loss(data)
        assert out["auxiliary_error"] > 0
        total(out).backward()
        assert all(p.grad is not None for p in loss.critic_parameters())

    def test_privileged_critic(self):
        actor = make_actor(in_keys=["proprio"])
        critic = make_critic(obs=4, in_keys=["state", "action"])
        loss = make_loss(actor, critic)
        assert {"proprio", "state"} <= set(loss.in_keys)
        data = make_transitions(make_actor(), 5)
        data["proprio"] = data["observation"]
        del data["observation"]
        data["state"] = torch.randn(5, 4, dtype=DTYPE)
        with torch.no_grad():
            actor(data)
        assert total(loss(data)).isfinite()

    def test_in_keys_are_enough(self):
        """What a loop has to keep in its buffer, with the next embedding."""
        loss = make_loss()
        data = make_transitions(loss.actor_network, 4)
        kept = data.select(*loss.in_keys, ("next", loss.tensor_keys.embedding))
        torch.manual_seed(1)
        expected = loss(data)
        torch.manual_seed(1)
        out = loss(kept)
        for key in loss.out_keys:
            torch.testing.assert_close(out[key], expected[key])

    def test_in_keys_follow_the_trust_region(self):
        loss = make_loss()
        assert ("denoising", "chain") in loss.in_keys
        loss.trajectory_kl.set_keys(chain="chain")
        assert "chain" in loss.in_keys

    def test_unknown_key(self):
        with pytest.raises(ValueError, match="valeu"):
            make_loss().set_keys(valeu="v")


class TestCopies:
    @pytest.mark.parametrize(
        "clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"]
    )
    def test_same_numbers_and_no_shared_memory(self, clone):
        loss = make_loss()
        data, noise = make_transitions(loss.actor_network, 4), draw_noise(4)
        nudge(loss)
        other = clone(loss)

        def losses(each):
            return each.actor_loss(data, noise=noise).update(each.critic_loss(data))

        before = losses(loss)
        nudge(loss)
        after = losses(other)
        for key in loss.out_keys:
            torch.testing.assert_close(after[key], before[key])
        total(after).backward()
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        optimizer.step()
        assert losses(other)["loss_critic"] != before["loss_critic"]

    @pytest.mark.parametrize("old_policy", ["recorded", "target"])
    def test_state_dict_round_trip(self, old_policy):
        loss, other = (make_loss(region={"old_policy": old_policy}) for _ in range(2))
        nudge(loss)
        result = other.load_state_dict(loss.state_dict())
        assert not result.missing_keys and not result.unexpected_keys
        data = make_rollout(make_actor(), 2, 3)
        outs = []
        for each in (loss, other):
            torch.manual_seed(1)
            outs.append(each(data))
        for key in loss.out_keys:
            torch.testing.assert_close(outs[0][key], outs[1][key])

    def test_state_dict_reaches_the_networks(self):
        """Also the buffers of the module that acts: frozen friction and step sizes."""
        loss, other = (make_loss(make_actor(learn_friction=False)) for _ in range(2))
        for key in ("friction_raw", "step_sizes.raw"):
            entry = f"trajectory_kl.actor_network_params.module.{key}"
            state = loss.state_dict()
            state[entry] = state[entry] + 0.5
            other.load_state_dict(state)
            buffer = other.actor_network.module.get_buffer(key)
            torch.testing.assert_close(buffer, state[entry])


class TestConstruction:
    @pytest.mark.parametrize(
        "wrong, word",
        [
            ({"init_temperature": 0.0}, "init_temperature"),
            ({"init_temperature": math.nan}, "init_temperature"),
            ({"aux_coeff": -1.0}, "aux_coeff"),
        ],
    )
    def test_wrong_arguments(self, wrong, word):
        with pytest.raises(ValueError, match=word):
            TruDiLoss(make_actor(), make_critic(), **wrong)

    def test_trust_region_of_another_actor(self):
        with pytest.raises(ValueError, match="same actor_network"):
            TruDiLoss(
                make_actor(), make_critic(), trajectory_kl=TrajectoryKLProjection(make_actor())
            )

    def test_default_trust_region(self):
        loss = TruDiLoss(make_actor(), make_critic())
        region = loss.trajectory_kl
        assert (region.mode, region.kl_type, region.bound) == ("switch", "simplified", "path")
        assert region.eps.item() == pytest.approx(0.1)
        assert region.multiplier.item() == pytest.approx(0.01)
        assert loss.temperature.item() == pytest.approx(0.01)
        assert loss.target_entropy_scale == 4.0
        assert loss.aux_coeff == 1.0

    def test_observation_size_mismatch_is_named(self):
        loss = make_loss(critic=make_critic(obs=OBS + 1))
        with pytest.raises(ValueError, match="summed size"):
            loss.actor_loss(make_batch(loss.actor_network, 3))

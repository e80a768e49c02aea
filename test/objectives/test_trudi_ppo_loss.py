"""The clipped objective on a recorded chain, against torchrl's and against formulas written out."""

from __future__ import annotations

import copy

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
    kernel,
    literal_kl,
    make_actor,
    make_batch,
    make_gaussian,
    make_rollout,
    make_states,
    mean_step,
    normal_log_prob,
    nudge,
)
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import MLP, PercentileValueNorm, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_trudi.modules import HLGaussCritic, HLGaussValueOperator
from torchrl_trudi.objectives import TrajectoryKLProjection, TruDiPPOLoss

ACTORS = {"diffusion": make_actor, "gaussian": make_gaussian}
LOSSES = ("loss_objective", "loss_trajectory_kl", "loss_kl_multiplier")


def mse_critic() -> ValueOperator:
    return ValueOperator(MLP(OBS, 1, num_cells=[8]).to(DTYPE), in_keys=["observation"])


def histogram_critic(**kwargs) -> HLGaussValueOperator:
    critic = HLGaussCritic(
        OBS,
        -2.0,
        3.0,
        num_bins=11,
        hidden_size=8,
        predict_embedding=False,
        dtype=DTYPE,
    )
    return HLGaussValueOperator(critic, ["observation"], **kwargs)


def make_data(actor, *batch: int, move: float = 0.1):
    """A recorded batch with advantages and targets, and the actor moved since."""
    data = make_batch(actor, *batch)
    data["advantage"] = torch.randn(*batch, 1, dtype=DTYPE)
    data["value_target"] = torch.randn(*batch, 1, dtype=DTYPE)
    nudge(actor, move)
    return data


def make_loss(actor, critic=None, mode="none", *, trust=None, **kwargs) -> TruDiPPOLoss:
    trust_region = TrajectoryKLProjection(actor, mode=mode, **(trust or {}))
    critic = mse_critic() if critic is None else critic
    return TruDiPPOLoss(actor, critic, trajectory_kl=trust_region, **kwargs)


def per_step_log_ratio(actor, data) -> torch.Tensor:
    """Of a denoising chain, step by step, ``[*B, N]``."""
    chain, out = data["denoising", "chain"], []
    for n in range(actor.num_steps):
        before, after = chain[..., n, :], chain[..., n + 1, :]
        new = normal_log_prob(
            after,
            mean_step(actor.module, data["observation"], before, n),
            kernel(actor.module, n)[1],
        )
        old = normal_log_prob(
            after, data["denoising", "loc"][..., n, :], data["denoising", "scale"][..., n, :]
        )
        out.append(new - old)
    return torch.stack(out, -1)


def clipped_gain(log_ratio, advantage, eps=0.2):
    ratio = log_ratio.exp()
    return torch.minimum(ratio * advantage, ratio.clamp(1 - eps, 1 + eps) * advantage)


class TestAgainstUpstream:
    @pytest.mark.parametrize("kind", ACTORS)
    @pytest.mark.parametrize("normalize", [True, False])
    def test_without_a_trust_region_it_is_clip_ppo(self, kind, normalize):
        actor, critic = ACTORS[kind](), mse_critic()
        data = make_data(actor, 64)
        settings = {"clip_epsilon": 0.3, "normalize_advantage": normalize, "entropy_coeff": 0.02}
        ours = make_loss(actor, critic, **settings)
        theirs = ClipPPOLoss(actor, critic, loss_critic_type="l2", critic_coeff=1.0, **settings)
        out, expected = ours(data), theirs(data)
        assert 0.05 < out["clip_fraction"] < 0.95
        assert_all_close(
            [out["loss_objective"]], [expected["loss_objective"] + expected["loss_entropy"]]
        )
        same = ("loss_critic", "entropy", "clip_fraction", "kl_approx", "ESS", "mean_ratio")
        for key in same:
            torch.testing.assert_close(
                out[key].squeeze(),
                expected[key].squeeze(),
                msg=lambda text, key=key: f"{key}: {text}",
            )
        torch.testing.assert_close(out["max_ratio"], expected["max_ratio"])
        torch.testing.assert_close(
            out["explained_variance"], expected["explained_variance"].squeeze()
        )
        params = list(actor.parameters())
        assert_all_close(
            gradients(out["loss_objective"], params),
            gradients(expected["loss_objective"] + expected["loss_entropy"], params),
        )

    def test_arguments_of_upstream(self):
        actor = make_actor()
        data = make_data(actor, 16)
        data["state_value"] = torch.randn(16, 1, dtype=DTYPE)
        loss = make_loss(actor, clip_value=0.2, max_importance_ratio=1.1, clip_epsilon=(0.1, 0.3))
        out = loss(data)
        assert {"value_clip_fraction", "loss_critic"} <= set(out.keys())
        assert loss.clip_epsilon_high == pytest.approx(0.3)

    def test_estimates_by_itself(self):
        actor = make_actor()
        data = make_rollout(actor, 2, 5)
        norm = PercentileValueNorm()
        loss = make_loss(actor, advantage_norm=norm)
        loss.make_value_estimator(gamma=0.9, lmbda=0.8)
        out = loss(data)
        assert out["loss_objective"].isfinite()
        assert "advantage" not in data


class TestFormulas:
    def test_per_step(self):
        actor = make_actor(event_dims=1)
        data = make_data(actor, 32, move=0.3)
        out = make_loss(actor, normalize_advantage=False)(data)
        log_ratio = per_step_log_ratio(actor, data)
        gain = clipped_gain(log_ratio, data["advantage"]).sum(-1)
        # The clip range is a float32 buffer.
        torch.testing.assert_close(out["loss_objective"], -gain.mean(), rtol=1e-6, atol=1e-8)
        outside = (log_ratio.exp() < 0.8) | (log_ratio.exp() > 1.2)
        assert 0 < outside.double().mean() < 1
        assert_all_close([out["clip_fraction"]], [outside.double().mean()])
        assert_all_close([out["max_ratio"]], [log_ratio.sum(-1).exp().max()])

    def test_both_forms_have_one_gradient_at_the_old_policy(self):
        actor = make_actor()
        data = make_data(actor, 16, move=0.0)
        steps = make_actor(event_dims=1)
        steps.load_state_dict(actor.state_dict())
        with torch.no_grad():
            record = steps(data.select("observation", "noise"))
        found = []
        for each, batch in ((actor, data), (steps, record)):
            batch["advantage"] = data["advantage"]
            batch["value_target"] = data["value_target"]
            out = make_loss(each, normalize_advantage=False)(batch)
            found.append(gradients(out["loss_objective"], each.parameters()))
        assert max(g.abs().max() for g in found[0]) > 1e-3
        assert_all_close(*found)

    @pytest.mark.parametrize("mode", ["switch", "lagrangian", "penalty", "none"])
    def test_trust_region(self, mode):
        actor = make_actor()
        data = make_data(actor, 64, move=0.05)
        settings = {"init_multiplier": 0.7, "kl": "simplified"}
        kl = literal_kl(actor, data).sum(-1)
        eps = float(kl.median())
        loss = make_loss(
            actor, mode=mode, trust={"eps": eps, **settings}, normalize_advantage=False
        )
        out = loss(data)
        objective = -clipped_gain(per_step_log_ratio(actor, data).sum(-1), data["advantage"][:, 0])
        expected = {
            "switch": torch.where(kl < eps, objective, 0.7 * kl),
            "lagrangian": objective + 0.7 * kl,
            "penalty": objective + 0.7 * kl,
            "none": objective,
        }[mode].mean()
        total = out["loss_objective"] + out["loss_trajectory_kl"]
        torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-8)
        grads = [gradients(each, actor.parameters()) for each in (total, expected)]
        for got, want in zip(*grads, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(out["kl"], kl.mean(), rtol=1e-6, atol=1e-8)
        if mode in ("switch", "lagrangian"):
            (dual,) = gradients(out["loss_kl_multiplier"], loss.dual_parameters())
            torch.testing.assert_close(dual[0], -0.7 * (kl.mean() - eps), rtol=1e-5, atol=1e-7)

    def test_entropy_is_inside_of_the_gate(self):
        """A state beyond the bound has the gradient of its KL alone."""
        actor = make_actor()
        data = make_data(actor, 16)
        for entropy in ("path", "surrogate"):
            loss = make_loss(
                actor, mode="switch", trust={"eps": 1e-12}, entropy=entropy, entropy_coeff=3.0
            )
            out = loss(data)
            assert out["gate_fraction"] == 0
            assert out["loss_objective"] == 0
            assert out["loss_trajectory_kl"] > 0

    def test_entropy_of_the_path(self):
        actor = make_actor()
        data = make_data(actor, 8)
        plain, bonus = make_loss(actor)(data), make_loss(actor, entropy_coeff=0.5)(data)
        entropy = sum(
            torch.distributions.Normal(0.0, kernel(actor.module, n)[1]).entropy().sum()
            for n in range(actor.num_steps)
        )
        assert_all_close([bonus["entropy"]], [entropy])
        assert_all_close([bonus["loss_objective"]], [plain["loss_objective"] - 0.5 * entropy])

    @pytest.mark.parametrize("event_dims", [1, 2])
    def test_surrogate_entropy_has_the_gradient_of_the_entropy(self, event_dims):
        """Of a Gaussian policy: that of its own Monte-Carlo estimate by reparametrisation."""
        torch.manual_seed(0)
        actor = make_gaussian(event_dims=event_dims)
        count = 200_000
        state = make_states(1)
        data = state.expand(count).contiguous()
        data["noise"] = draw_noise(count, num_steps=1)
        with torch.no_grad():
            actor(data)
        data["advantage"] = torch.zeros(count, 1, dtype=DTYPE)
        loss = make_loss(actor, entropy="surrogate", entropy_coeff=1.0, normalize_advantage=False)
        out = loss.actor_loss(data)
        _, _, fresh = actor.rsample(state.expand(count), draw_noise(count, num_steps=1))
        reference = fresh.log_prob.mean()
        assert out["entropy"] == pytest.approx(-float(reference), abs=0.02)
        got = torch.cat([g.flatten() for g in gradients(out["loss_objective"], actor.parameters())])
        want = torch.cat([g.flatten() for g in gradients(reference, actor.parameters())])
        assert want.norm() > 0.1
        assert (got - want).norm() < 0.1 * want.norm()


class TestCritic:
    def test_histogram(self):
        actor, critic = make_actor(), histogram_critic()
        data = make_data(actor, 16)
        data["value_target"][0] = 100.0
        loss = make_loss(actor, critic, critic_coeff=0.25)
        out = loss(data)
        logits = critic.module(data["observation"])[1]
        target = critic.support.probs(data["value_target"].squeeze(-1))
        expected = 0.25 * -(target * logits.log_softmax(-1)).sum(-1).mean()
        assert_all_close([out["loss_critic"]], [expected])
        assert_all_close(
            gradients(out["loss_critic"], critic.parameters()),
            gradients(expected, critic.parameters()),
        )
        beyond = ((data["value_target"] < -2) | (data["value_target"] > 3)).double().mean()
        assert out["target_clip_fraction"] == beyond
        value = critic.module.value(data["observation"]).detach()
        target = data["value_target"].squeeze(-1)
        explained = 1 - (target - value).var(correction=0) / target.var(correction=0)
        torch.testing.assert_close(out["explained_variance"], explained)

    @pytest.mark.parametrize("make_critic", [mse_critic, histogram_critic])
    def test_gae_bootstraps_where_it_should(self, make_critic):
        actor, critic = make_actor(), make_critic()
        data = make_rollout(actor, 3, 6)
        end(data, (0, 2), "terminated")
        end(data, (1, 3), "truncated")
        end(data, (2, 1), "both")
        loss = make_loss(actor, critic)
        loss.make_value_estimator(gamma=0.9, lmbda=0.8)
        assert isinstance(loss.value_estimator, GAE)
        loss.value_estimator(data)
        with torch.no_grad():
            value = critic(data.select("observation").clone())["state_value"]
            after = critic(data["next"].select("observation").clone())["state_value"]
        following = data["next"]
        advantage = torch.zeros(3, 1, dtype=DTYPE)
        for t in reversed(range(6)):
            alive = (~following["terminated"][:, t]).double()
            delta = following["reward"][:, t] + 0.9 * alive * after[:, t] - value[:, t]
            advantage = delta + 0.72 * (~following["done"][:, t]).double() * advantage
            # Upstream discounts with float32 factors.
            close = {"rtol": 1e-5, "atol": 1e-6}
            torch.testing.assert_close(data["advantage"][:, t], advantage, **close)
            target = data["value_target"][:, t]
            torch.testing.assert_close(target, advantage + value[:, t], **close)

    def test_none(self):
        actor = make_actor()
        loss = TruDiPPOLoss(actor, None, critic_coeff=0.0)
        data = make_data(actor, 4)
        assert "loss_critic" not in loss(data)
        with pytest.raises(RuntimeError, match="no critic"):
            loss(data.exclude("advantage"))


class TestUse:
    def test_the_chain_is_scored_once(self, monkeypatch):
        actor = make_actor()
        data = make_data(actor, 4)
        loss = make_loss(actor, mode="switch", entropy="surrogate", entropy_coeff=0.1)
        calls = []
        score = type(actor.module).kernels_along

        def counted(self, *args, **kwargs):
            calls.append(1)
            return score(self, *args, **kwargs)

        monkeypatch.setattr(type(actor.module), "kernels_along", counted)
        loss(data)
        assert len(calls) == 1

    def test_minibatch_keys_are_all_that_is_read(self):
        actor = make_actor()
        data = make_data(actor, 8)
        for critic in (mse_critic(), histogram_critic()):
            loss = make_loss(actor, critic, mode="switch", entropy="surrogate", entropy_coeff=0.1)
            few = data.select(*loss.minibatch_keys, strict=True)
            assert len(few.keys(True, True)) < len(data.keys(True, True))
            for key, value in loss(data).items():
                assert_all_close([loss(few)[key]], [value])

    def test_out_keys(self):
        actor = make_actor()
        data = make_data(actor, 8)
        data["state_value"] = data["value_target"]
        for loss in (
            make_loss(actor, mode="switch"),
            make_loss(actor, histogram_critic()),
            make_loss(actor, clip_value=0.2, log_explained_variance=False),
        ):
            assert sorted(loss.out_keys) == sorted(loss(data).keys())

    def test_parameters_are_one_set(self):
        actor = make_actor()
        loss = make_loss(actor, histogram_critic(), mode="switch")
        for each in (loss, copy.deepcopy(loss)):
            each = each.to(torch.float32)
            params = list(each.parameters())
            assert all(p.dtype == torch.float32 for p in params)
            own, region = each.actor_network_params, each.trajectory_kl.actor_network_params
            assert own is region
            groups = each.actor_param_groups(lr=1e-3, dual_lr=1e-2, weight_decay=0.1)
            assert groups[1] == {
                "params": [each.trajectory_kl.log_multiplier],
                "lr": 1e-2,
                "weight_decay": 0.0,
            }
            given = {id(p) for group in groups for p in group["params"]}
            given |= {id(p) for p in each.critic_parameters()}
            assert given == {id(p) for p in params}

    def test_settings_are_no_state(self):
        """A run that goes on with another clip range or weight gets it."""
        actor = make_actor()
        old = make_loss(actor, clip_epsilon=0.2, entropy_coeff=0.1, critic_coeff=0.5)
        new = make_loss(actor, clip_epsilon=0.3, entropy_coeff=0.2, critic_coeff=0.7)
        new.load_state_dict(old.state_dict())
        found = [
            float(getattr(new, name)) for name in ("clip_epsilon", "entropy_coeff", "critic_coeff")
        ]
        assert found == pytest.approx([0.3, 0.2, 0.7])
        assert new.to(torch.float64).clip_epsilon.dtype == torch.float64

    def test_learns_a_bandit(self):
        """The action moves to where the advantage is, and the trust region slows it down."""
        moved = {}
        for mode in ("none", "switch"):
            torch.manual_seed(0)
            actor = make_actor(num_steps=4)
            loss = make_loss(actor, mode=mode, trust={"eps": 0.01})
            optim = torch.optim.Adam(loss.actor_param_groups(lr=3e-3))
            state = make_states(1).expand(256).contiguous()
            for _ in range(20):
                with torch.no_grad():
                    data = actor(state.clone())
                data["advantage"] = -(data["action"] - 0.5).square().sum(-1, keepdim=True)
                for _ in range(4):
                    out = loss.actor_loss(data)
                    optim.zero_grad()
                    sum(out[key] for key in LOSSES).backward()
                    optim.step()
            moved[mode] = data["action"].mean(0)
        assert (moved["none"] - 0.5).norm() < 0.35  # it starts at 0
        distance = {mode: (0.5 - action).norm() for mode, action in moved.items()}
        assert distance["switch"] > distance["none"]


class TestErrors:
    def test_construction(self):
        actor, other = make_actor(), make_actor()
        with pytest.raises(ValueError, match="same actor_network"):
            TruDiPPOLoss(actor, mse_critic(), trajectory_kl=TrajectoryKLProjection(other))
        for old_policy in ("target", "replayed"):
            with pytest.raises(ValueError, match="old_policy='recorded'"):
                make_loss(actor, trust={"old_policy": old_policy})
        with pytest.raises(ValueError, match="entropy must be"):
            make_loss(actor, entropy="action")
        with pytest.raises(ValueError, match="functional=False"):
            make_loss(actor, functional=False)
        with pytest.raises(ValueError, match="histogram"):
            make_loss(actor, histogram_critic(), clip_value=0.2)
        q = TensorDictModule(nn.Identity(), in_keys=["action"], out_keys=["state_action_value"])
        with pytest.raises(ValueError, match="value of a state"):
            make_loss(actor, q)

    def test_batch(self):
        actor = make_actor()
        loss = make_loss(actor, histogram_critic())
        data = make_data(actor, 4)
        with pytest.raises(KeyError, match="advantage"):
            loss.actor_loss(data.exclude("advantage"))
        with pytest.raises(KeyError, match="value target"):
            loss.critic_loss(data.exclude("value_target"))
        with pytest.raises(KeyError, match="recorded loc"):
            loss(data.exclude(("denoising", "loc")))
        with pytest.raises(KeyError, match="log-prob"):
            loss(data.exclude(("denoising", "path_log_prob")))
        with pytest.raises(ValueError, match="empty"):
            loss(data[:0])
        with pytest.raises(KeyError, match="no rollout"):
            loss(data.exclude("advantage"))
        path = ("denoising", "path_log_prob")
        for key, shape in (
            ("advantage", (4,)),
            ("advantage", (4, 2)),
            ("value_target", (4, 4)),
            (path, (4, 1)),
            (("denoising", "loc"), (4, 1, ACTION)),
            (("denoising", "scale"), (4, 1, ACTION)),
        ):
            wrong = data.clone().set(key, torch.ones(shape, dtype=DTYPE))
            with pytest.raises(ValueError, match="must have the shape"):
                loss(wrong)
        for clip_epsilon in (0.0, -1.0, (0.1, -0.2)):
            with pytest.raises(ValueError, match="clip_epsilon must be positive"):
                make_loss(actor, clip_epsilon=clip_epsilon)


def test_action_size_is_that_of_the_parts():
    assert make_actor().module.action_dim == ACTION

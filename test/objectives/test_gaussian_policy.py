"""The losses with a Gaussian policy, against the formulas with torch.distributions."""

from __future__ import annotations

import pytest
import torch
from objectives._parts import (
    ACTION,
    DTYPE,
    assert_all_close,
    draw_noise,
    end,
    gradients,
    linear_critic,
    make_actor,
    make_batch,
    make_critic,
    make_gaussian,
    make_rollout,
    nudge,
)
from torch import distributions as D
from torch.distributions import kl_divergence
from torchrl.data import Bounded

from torchrl_trudi.modules import GaussianActor
from torchrl_trudi.objectives import SoftTDLambdaEstimator, TrajectoryKLProjection, TruDiLoss

LOSSES = ("loss_actor", "loss_temperature", "loss_kl_multiplier")
LOW, HIGH = torch.tensor([-3.0, 2.0], dtype=DTYPE), torch.tensor([1.0, 8.0], dtype=DTYPE)


def make_boxed() -> GaussianActor:
    return make_gaussian(spec=Bounded(LOW, HIGH, (ACTION,), dtype=DTYPE))


def moved_batch(actor, *batch):
    """A recorded batch, and the actor moved since."""
    data = make_batch(actor, *batch)
    nudge(actor, 0.1)
    return data


def gaussian(actor, data) -> D.Independent:
    return D.Independent(D.Normal(*actor.module.network(data["observation"])), 1)


def recorded(data) -> D.Independent:
    loc, scale = data["denoising", "loc"], data["denoising", "scale"]
    return D.Independent(D.Normal(loc[..., 0, :], scale[..., 0, :]), 1)


def literal_sample(actor, data, noise):
    """Action and its log-probability in units of the box's and of the unit box."""
    policy = gaussian(actor, data)
    latent = policy.mean + policy.stddev * noise[..., 1, :]
    tanh, affine = D.TanhTransform(), D.AffineTransform((HIGH + LOW) / 2, (HIGH - LOW) / 2)
    action = tanh(latent)
    unit = policy.log_prob(latent) - tanh.log_abs_det_jacobian(latent, action).sum(-1)
    return affine(action), unit - ((HIGH - LOW) / 2).log().sum(), unit


def simplified_kl(old, new):
    """Without the ratio of the variances; 1e-8 guards a vanishing scale."""
    return ((new.mean - old.mean) ** 2 / (2 * old.variance + 1e-8)).sum(-1)


def make_loss(actor, critic=None, *, region=None, **kwargs) -> TruDiLoss:
    projection = TrajectoryKLProjection(actor, **(region or {}))
    critic = linear_critic() if critic is None else critic
    return TruDiLoss(actor, critic, trajectory_kl=projection, init_temperature=0.3, **kwargs)


class TestActorLoss:
    @pytest.mark.parametrize("split", [True, False])
    @pytest.mark.parametrize("kl", [None, "full", "simplified"])
    @pytest.mark.parametrize("mode", ["switch", "penalty", "lagrangian", "none"])
    def test_equals_the_formulas(self, mode, kl, split):
        """Losses and gradients of REPPO's actor, written plainly on a linear Q."""
        actor = make_boxed()
        data, noise = moved_batch(actor, 10), draw_noise(10, num_steps=1)
        divergence = simplified_kl if kl == "simplified" else kl_divergence
        values = divergence(recorded(data), gaussian(actor, data))
        eps = values.median().item() * (1 + 1e-9)
        region = {"mode": mode, "eps": eps, "init_multiplier": 2.0, "kl": kl}
        loss = make_loss(actor, region=region, split_by_gate=split)
        out = loss.actor_loss(data, noise=noise)

        action, log_prob, unit = literal_sample(actor, data, noise)
        critic = loss.critic_network.module
        q = (data["observation"] * critic.c).sum(-1) + (action * critic.d).sum(-1)
        objective = 0.3 * log_prob - q
        penalty = 2.0 * values
        j = {
            "switch": torch.where(values < eps, objective, penalty),
            "none": objective,
        }.get(mode, objective + penalty).mean()
        alpha, beta = loss.log_temperature.exp(), loss.trajectory_kl.log_multiplier.exp()
        j_alpha = (alpha * (0.5 * ACTION - unit.mean()).detach()).sum()
        j_beta = -(beta * (values.mean() - eps).detach()).sum()
        if mode in ("penalty", "none"):
            j_beta = torch.zeros((), dtype=DTYPE)
        assert 0 < (values < eps).sum() < 10
        assert_all_close([out[key] for key in LOSSES], [j, j_alpha, j_beta])
        params = [*actor.parameters(), *loss.dual_parameters()]
        total = sum(out[key] for key in LOSSES)
        found, expected = gradients(total, params), gradients(j + j_alpha + j_beta, params)
        assert_all_close(found, expected)
        assert all(grad.abs().sum() > 0 for grad in found[: -len(list(loss.dual_parameters()))])
        torch.testing.assert_close(out["entropy"], -unit.mean().detach())
        torch.testing.assert_close(
            out["kl_full"], kl_divergence(recorded(data), gaussian(actor, data)).mean().detach()
        )

    @pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
    @pytest.mark.parametrize("shape", [(12,), (3, 4)], ids=str)
    @pytest.mark.parametrize("bound", ["path", "step"])
    def test_split_by_gate_equals_dense(self, share, shape, bound):
        actor, critic = make_boxed(), make_critic()
        data, noise = moved_batch(actor, *shape), draw_noise(*shape, num_steps=1)
        values = kl_divergence(recorded(data), gaussian(actor, data))
        eps = {0.0: 1e-12, 1.0: 1e6}.get(share, values.quantile(share).item())
        outs, grads = [], []
        for split in (True, False):
            loss = make_loss(
                actor, critic, region={"eps": eps, "bound": bound}, split_by_gate=split
            )
            out = loss.actor_loss(data, noise=noise)
            params = [*loss.actor_parameters(), *loss.dual_parameters()]
            outs.append(out)
            grads.append(gradients(sum(out[key] for key in LOSSES), params))
        gate = outs[0]["gate_fraction"].item()
        assert gate == share or 0.0 < gate < 1.0
        assert_all_close(outs[0].values(), (outs[1][key] for key, _ in outs[0].items()))
        assert_all_close(*grads)

    def test_forward_gives_all_losses(self):
        actor = make_boxed()
        loss = make_loss(actor, make_critic())
        out = loss(make_rollout(actor, 2, 5))
        assert set(out.keys()) == set(loss.out_keys)
        total = sum(value for key, value in out.items() if key.startswith("loss_"))
        params = [*loss.actor_parameters(), *loss.critic_parameters()]
        assert all(grad.abs().sum() > 0 for grad in gradients(total, params))

    def test_adjoint_gradient_is_refused(self):
        actor = make_boxed()
        with pytest.raises(ValueError, match="adjoint.*denoising chain.*GaussianModel.*pathwise"):
            TruDiLoss(actor, linear_critic(), actor_gradient="adjoint")
        loss = TruDiLoss(actor, linear_critic())
        data = make_batch(actor, 3)
        with pytest.raises(ValueError, match="adjoint.*GaussianModel"):
            loss.adjoint_target(data, data["denoising", "chain"][:, -1])


class TestDefaults:
    @pytest.mark.parametrize(
        "make, kl, scale", [(make_boxed, "full", 0.5), (make_actor, "simplified", 4.0)]
    )
    def test_follow_the_policy(self, make, kl, scale):
        loss = TruDiLoss(make(), linear_critic())
        assert (loss.trajectory_kl.kl_type, loss.target_entropy_scale) == (kl, scale)

    def test_can_be_set(self):
        actor = make_boxed()
        loss = make_loss(actor, region={"kl": "simplified"}, target_entropy_scale=1.5)
        assert (loss.trajectory_kl.kl_type, loss.target_entropy_scale) == ("simplified", 1.5)


class TestTrustRegion:
    @pytest.mark.parametrize("num_paths", [1, 3])
    def test_redrawn_paths_give_the_recorded_kl(self, num_paths):
        """The kernel depends on no latent: every path has the exact divergence."""
        actor = make_boxed()
        region = TrajectoryKLProjection(actor, old_policy="target", num_paths=num_paths)
        region.update_old_policy()
        data = moved_batch(actor, 6)
        kl = region.path_kl(data)
        expected = kl_divergence(recorded(data), gaussian(actor, data))
        assert kl.per_step.shape == (6, 1)
        torch.testing.assert_close(kl.kl, expected)
        torch.testing.assert_close(TrajectoryKLProjection(actor).path_kl(data).kl, expected)
        params = list(actor.parameters())
        assert_all_close(gradients(kl.kl.sum(), params), gradients(expected.sum(), params))

    def test_reverse(self):
        actor = make_boxed()
        region = TrajectoryKLProjection(actor, old_policy="target", direction="reverse")
        region.update_old_policy()
        data = moved_batch(actor, 6)
        expected = kl_divergence(gaussian(actor, data), recorded(data))
        torch.testing.assert_close(region.path_kl(data).kl, expected)

    def test_step_bound_is_the_path_bound(self):
        actor = make_boxed()
        data = moved_batch(actor, 6)
        outs = [TrajectoryKLProjection(actor, bound=bound)(data) for bound in ("path", "step")]
        assert_all_close(outs[0].values(), (outs[1][key] for key, _ in outs[0].items()))

    def test_the_full_kl_sees_the_scale(self):
        """A policy that changes its scale alone moves, and only the full form shows it."""
        actor = make_boxed()
        data = make_batch(actor, 6)
        with torch.no_grad():
            actor.module.network.output.bias[ACTION:] += 0.5
        full, simplified = (
            TrajectoryKLProjection(actor, kl=kl).path_kl(data).kl for kl in ("full", "simplified")
        )
        assert (full > 0.01).all() and (simplified < 1e-12).all()


@pytest.mark.parametrize("reuse", [False, True])
def test_soft_returns_use_the_exact_log_probability(reuse):
    actor, critic = make_boxed(), make_critic()
    estimator = SoftTDLambdaEstimator(
        gamma=0.9,
        lmbda=0.0,
        value_network=critic,
        actor_network=actor,
        temperature=0.4,
        reuse_actions=reuse,
    )
    data = make_rollout(actor, 3, 5)
    end(data, (1, 2), "terminated")
    estimator(data)
    following = data["next"]
    policy = gaussian(actor, following)
    center, half = (HIGH + LOW) / 2, (HIGH - LOW) / 2
    squash = [D.TanhTransform(), D.AffineTransform(center, half, 1)]
    log_prob = D.TransformedDistribution(policy, squash).log_prob(following["action"])
    within = torch.ones(3, 5, dtype=torch.bool)
    within[1, 2] = False
    torch.testing.assert_close(
        following["denoising", "log_prob"][within], log_prob[within], rtol=1e-8, atol=1e-8
    )
    if reuse:
        rows = within[:, :-1]
        assert torch.equal(following["action"][:, :-1][rows], data["action"][:, 1:][rows])
    soft = following["state_action_value"][..., 0] - 0.4 * (log_prob + half.log().sum())
    expected = following["reward"][..., 0] + 0.9 * torch.where(within, soft, 0.0)
    torch.testing.assert_close(data["value_target"][..., 0], expected, rtol=1e-8, atol=1e-8)

"""``TrajectoryKLProjection(mode="projection")``, alone and inside of TruDiLoss."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objectives._parts import (
    DTYPE,
    STEPS,
    assert_all_close,
    draw_noise,
    gradients,
    literal_kl,
    make_actor,
    make_batch,
    make_critic,
    make_gaussian,
    make_states,
    nudge,
)

from torchrl_trudi.modules import ChainActor, DenoisingPath, ProjectedModel, gaussian_kl
from torchrl_trudi.objectives import (
    ProjectedPathKL,
    TrajectoryKLProjection,
    TruDiLoss,
    TruDiPPOLoss,
)

EPS = 0.06
POLICIES = {"diffusion": make_actor, "gaussian": make_gaussian}


def make_projected(policy="diffusion", kl=None, eps=EPS, **kwargs) -> ChainActor:
    """An actor that acts projected; its network is where its anchor is."""
    plain = POLICIES[policy](**kwargs)
    names = ("return_chain", "return_dist_params", "return_log_prob", "return_noise")
    return ChainActor(
        ProjectedModel(plain.module, eps, kl=kl), noise_key="noise", **dict.fromkeys(names, True)
    )


def region(actor, **kwargs) -> TrajectoryKLProjection:
    model = actor.module
    if isinstance(model, ProjectedModel):
        kwargs.setdefault("kl", model.kl_type)
    return TrajectoryKLProjection(actor, mode="projection", **{"eps": EPS, **kwargs})


def record(data) -> tuple[torch.Tensor, ...]:
    return tuple(data["denoising", role] for role in ("chain", "loc", "scale"))


def literal_projection(loc_old, scale_old, loc, share: str) -> torch.Tensor:
    """Of the means in the simplified form."""
    kl = ((loc - loc_old) ** 2 / (2 * scale_old**2 + 1e-8)).sum(-1, keepdim=True)
    if share == "uniform":
        factor = (EPS / loc.shape[-2] / kl).sqrt()
    else:
        factor = (EPS / kl.sum(-2, keepdim=True)).sqrt()
    return loc_old + factor.clamp(max=1) * (loc - loc_old)


class TestRecordedKernels:
    """An actor that does not act projected: the loss projects around what was recorded."""

    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize("kl", ["simplified", "full"])
    @pytest.mark.parametrize("share", ["uniform", "proportional"])
    @settings(max_examples=6, deadline=None)
    @given(seed=st.integers(0, 2**16), move=st.floats(-3, 0.7).map(lambda x: 10**x))
    def test_the_bound_holds_on_every_state(self, policy, kl, share, seed, move):
        torch.manual_seed(seed)
        actor = POLICIES[policy]()
        data = make_batch(actor, 6)
        nudge(actor, move)
        loc, scale, found = region(actor, kl=kl, share=share).projected_kernels(data)
        _, loc_old, scale_old = record(data)
        literal = gaussian_kl(loc_old, scale_old, loc, scale, kl)
        torch.testing.assert_close(found.per_step, literal)
        assert (found.kl <= EPS * (1 + 1e-9)).all()
        assert (found.gap == 0).all()
        assert torch.equal(found.center, found.per_step.detach())
        network = actor.module.score(data["observation"], data["denoising", "chain"])
        unprojected = gaussian_kl(loc_old, scale_old, *network, kl)
        torch.testing.assert_close(found.unprojected, unprojected.detach())

    @pytest.mark.parametrize("share", ["uniform", "proportional"])
    def test_regression_written_out(self, share):
        actor = make_actor()
        data = make_batch(actor, 8)
        nudge(actor, 0.5)
        projection = region(actor, share=share, regression_coeff=3.0)
        found = projection.path_kl(data)
        chain, loc_old, scale_old = record(data)
        loc, scale = actor.module.score(data["observation"], chain)
        goal = literal_projection(loc_old, scale_old, loc, share).detach()
        expected = 3.0 * ((loc - goal) ** 2 / (2 * scale.detach() ** 2 + 1e-8)).sum((-1, -2))
        torch.testing.assert_close(found.regression, expected)
        assert (found.regression > 0).any()
        # Of the scale in the denominator, which is a goal, there is no gradient.
        assert_all_close(
            gradients(found.regression.sum(), actor.parameters()),
            gradients(expected.sum(), actor.parameters()),
        )

    def test_nothing_to_regress_inside(self):
        actor = make_actor()
        data = make_batch(actor, 8)
        nudge(actor, 1e-3)
        found = region(actor).path_kl(data)
        assert (found.regression == 0).all() and (found.kl > 0).all()
        assert all((g == 0).all() for g in gradients(found.regression.sum(), actor.parameters()))

    def test_combine_has_no_gate(self):
        actor = make_actor()
        data = make_batch(actor, 8)
        nudge(actor, 0.5)
        projection = region(actor)
        found = projection.path_kl(data)
        objective = torch.randn(8, dtype=DTYPE)
        assert torch.equal(projection.combine(objective, found), objective + found.regression)
        assert projection.multiplier_loss(found) == 0

    def test_forward(self):
        actor = make_actor()
        data = make_batch(actor, 8)
        nudge(actor, 0.5)
        projection = region(actor, regression_coeff=2.0)
        out = projection(data)
        assert set(out.keys()) == set(projection.out_keys)
        found = projection.path_kl(data)
        unprojected = literal_kl(actor, data).detach()
        expected = {
            "loss_trajectory_kl": found.regression.mean(),
            "loss_kl_multiplier": torch.zeros((), dtype=DTYPE),
            "kl": found.kl.mean(),
            "kl_max": found.kl.max(),
            "kl_projected_max": found.kl.max(),
            "kl_unprojected": unprojected.sum(-1).mean(),
            "gate_fraction": (unprojected < EPS / STEPS).all(-1).double().mean(),
            "anchor_gap": torch.zeros((), dtype=DTYPE),
            "regression": found.regression.mean(),
        }
        for key, value in expected.items():
            torch.testing.assert_close(out[key], value.detach())
            assert out[key].requires_grad == (key == "loss_trajectory_kl")
        assert out["kl"] < out["kl_unprojected"]

    def test_gate_fraction_of_a_proportional_share(self):
        actor = make_actor()
        data = make_batch(actor, 40)
        nudge(actor, 0.3)
        out = region(actor, share="proportional")(data)
        inside = literal_kl(actor, data).sum(-1) < EPS
        assert 0 < inside.sum() < 40
        torch.testing.assert_close(out["gate_fraction"], inside.double().mean())

    def test_a_surrogate_objective_on_projected_kernels(self):
        """One scoring pass gives the ratio, the bound and the regression."""
        actor = make_actor()
        data = make_batch(actor, 8)
        projection = region(actor, share="proportional")
        loc, scale, _ = projection.projected_kernels(data)
        chain = data["denoising", "chain"]
        old = data["denoising", "path_log_prob"]
        ratio = (DenoisingPath(loc, scale).log_prob(chain) - old).exp()
        torch.testing.assert_close(ratio, torch.ones_like(ratio))
        nudge(actor, 0.5)
        loc, scale, found = projection.projected_kernels(data)
        ratio = (DenoisingPath(loc, scale).log_prob(chain) - old).exp()
        loss = projection.combine(-ratio * torch.randn(8, dtype=DTYPE), found).mean()
        grads = gradients(loss, actor.parameters())
        assert all(g.isfinite().all() for g in grads) and max(g.abs().max() for g in grads) > 0

    def test_parts_are_the_whole(self):
        """``project`` and ``regression``, for a loss with a scoring pass of its own."""
        actor = make_actor()
        data = make_batch(actor, 8)
        nudge(actor, 0.5)
        projection = region(actor)
        chain, loc_old, scale_old = record(data)
        network = actor.module.score(data["observation"], chain)
        projected = projection.project(loc_old, scale_old, *network)
        loc, scale, found = projection.projected_kernels(data)
        torch.testing.assert_close(projected[0], loc)
        torch.testing.assert_close(projected[1], scale)
        torch.testing.assert_close(projection.regression(*projected, *network), found.regression)

    def test_other_modes_have_none(self):
        actor = make_actor()
        projection = TrajectoryKLProjection(actor)
        assert not set(projection.projection_metric_keys) & set(projection.out_keys)
        with pytest.raises(ValueError, match="needs mode='projection', got 'switch'"):
            projection.projected_kernels(make_batch(actor, 2))


@pytest.mark.parametrize("policy", POLICIES)
class TestActsProjected:
    def test_bound_around_the_anchor(self, policy):
        actor = make_projected(policy)
        nudge(actor.module.model, 0.5)
        data = make_batch(actor, 30)
        projection = region(actor)
        projection.update_old_policy()
        nudge(actor.module.model, 0.5)
        loc, scale, found = projection.projected_kernels(data)
        assert isinstance(found, ProjectedPathKL)
        assert (found.center <= EPS / actor.num_steps * (1 + 1e-9)).all()
        assert (found.unprojected > EPS / actor.num_steps).any()
        # The kernels are those with which the actor acts.
        again, spread = actor.module.score(data["observation"], data["denoising", "chain"])
        torch.testing.assert_close(loc, again)
        torch.testing.assert_close(scale, spread)

    def test_the_carry(self, policy):
        """pi_k acts, the anchor becomes its network, and the gap between the two is reported."""
        actor = make_projected(policy)
        projection = region(actor)
        kl = projection.kl_type
        nudge(actor.module.model, 0.5)
        data = make_batch(actor, 30)
        chain, loc_old, scale_old = record(data)
        # The policy that acted is the current one.
        assert projection(data)["kl"] < 1e-12
        network = [x.detach() for x in actor.module.model.score(data["observation"], chain)]
        gap = gaussian_kl(loc_old, scale_old, *network, kl)
        assert (gap > 1e-3).any()

        projection.update_old_policy()
        found = projection.path_kl(data)
        torch.testing.assert_close(found.gap, gap)
        torch.testing.assert_close(projection(data)["anchor_gap"], gap.sum(-1).mean())
        # Right after, nothing is projected: the network acts.
        assert (found.unprojected < 1e-12).all() and (found.regression == 0).all()
        torch.testing.assert_close(found.per_step.detach(), gap)
        again = actor.module.score(data["observation"], chain)
        for a, b in zip(again, network, strict=True):
            torch.testing.assert_close(a, b)

    def test_gap_of_a_network_inside_its_bound_is_zero(self, policy):
        actor = make_projected(policy)
        projection = region(actor)
        nudge(actor.module.model, 1e-3)
        data = make_batch(actor, 30)
        projection.update_old_policy()
        out = projection(data)
        assert out["anchor_gap"] < 1e-12 and out["gate_fraction"] == 1

    def test_replayed_equals_recorded(self, policy):
        """The old policy's copy has the anchor of then."""
        actor = make_projected(policy)
        projections = [region(actor, old_policy=name) for name in ("recorded", "replayed")]
        nudge(actor.module.model, 0.5)
        data = make_batch(actor, 6)
        projections[1].update_old_policy()
        nudge(actor.module.model, 0.5)
        recorded = projections[0].path_kl(data)
        for role in ("chain", "loc", "scale"):
            del data["denoising", role]
        replayed = projections[1].path_kl(data)
        for a, b in zip(recorded, replayed, strict=True):
            torch.testing.assert_close(a, b)
        assert (recorded.gap > 1e-6).any()

    def test_regression_closes_the_gap(self, policy):
        actor = make_projected(policy)
        projection = region(actor)
        nudge(actor.module.model, 0.3)
        data = make_batch(actor, 30)
        optim = torch.optim.Adam(actor.module.model.parameters(), lr=3e-3)
        before = projection(data)
        for _ in range(60):
            loss = projection(data)["loss_trajectory_kl"]
            optim.zero_grad()
            loss.backward()
            optim.step()
        after = projection(data)
        assert after["regression"] < 0.2 * before["regression"]
        assert after["kl_unprojected"] < before["kl_unprojected"]


def test_old_to_new_within_bound_and_gap():
    """With equal scales the root of the KL is a norm: the triangle inequality."""
    actor = make_projected(learn_friction=False)
    projection = region(actor)
    for _ in range(3):
        nudge(actor.module.model, 0.3)
        data = make_batch(actor, 40)
        projection.update_old_policy()
        nudge(actor.module.model, 0.3)
        found = projection.path_kl(data)
        limit = (math.sqrt(EPS) + found.gap.sum(-1).sqrt()).square()
        assert (found.kl <= limit + 1e-9).all() and (found.kl > EPS).any()


class TestTruDiLoss:
    def make_loss(self, actor, **kwargs):
        loss = TruDiLoss(actor, make_critic(), trajectory_kl=region(actor, **kwargs))
        return loss.make_value_estimator()

    @pytest.mark.parametrize("policy", POLICIES)
    def test_objective_plus_regression(self, policy):
        actor = make_projected(policy)
        loss = self.make_loss(actor, regression_coeff=2.0)
        data = make_batch(actor, 8)
        nudge(actor.module.model, 0.5)
        noise = draw_noise(8, num_steps=actor.num_steps)
        out = loss.actor_loss(data, noise=noise)
        assert set(loss.trajectory_kl.metric_keys) <= set(out.keys()) <= set(loss.out_keys)

        model, observation = actor.module, data["observation"]
        chain = model.sample(observation, noise)
        action = model.squash(chain.latents[:, -1])
        log_prob = model.model.log_prob(observation, chain).log_prob
        critic = copy.deepcopy(loss.critic_network)
        states = make_states(8).set("observation", observation).set("action", action)
        objective = loss.temperature.detach() * log_prob - critic.value(states)
        latents = data["denoising", "chain"]
        projected = [part.detach() for part in model.score(observation, latents)]
        network = model.model.score(observation, latents)
        regression = gaussian_kl(*projected, *network, loss.trajectory_kl.kl_type).sum(-1)
        expected = (objective + 2.0 * regression).mean()
        torch.testing.assert_close(out["loss_actor"], expected)
        params = list(loss.actor_parameters())
        assert_all_close(gradients(out["loss_actor"], params), gradients(expected, params))

    def test_the_anchor_is_not_trained(self):
        actor = make_projected()
        loss = self.make_loss(actor)
        anchor = {id(p) for p in actor.module.anchor.parameters()}
        owned = list(loss.actor_parameters())
        assert len(owned) == len(list(actor.module.model.parameters()))
        assert not anchor & {id(p) for p in owned}
        nudge(actor.module.model, 0.5)
        loss.actor_loss(make_batch(actor, 4))["loss_actor"].backward()
        assert all(p.grad is None for p in actor.module.anchor.parameters())
        assert any(p.grad.abs().sum() > 0 for p in owned)

    @pytest.mark.parametrize("old_policy", ["recorded", "replayed"])
    def test_state_dict_round_trip(self, old_policy):
        """A resumed run acts with the same projected policy."""
        actors = [make_projected(), make_projected()]
        losses = [self.make_loss(actor, old_policy=old_policy) for actor in actors]
        nudge(actors[0].module.model, 0.5)
        losses[0].update_old_policy()
        nudge(actors[0].module.model, 0.5)
        result = losses[1].load_state_dict(losses[0].state_dict())
        assert not result.missing_keys and not result.unexpected_keys
        states = make_states(5)
        states["noise"] = draw_noise(5)
        for a, b in zip(*(record(actor(states.clone())) for actor in actors), strict=True):
            torch.testing.assert_close(a, b)
        nudge(actors[1].module.model, 0.5)
        assert not torch.equal(*(next(actor.module.model.parameters()) for actor in actors))

    def test_update_of_the_old_policy_moves_the_anchor(self):
        actor = make_projected()
        loss = self.make_loss(actor)
        nudge(actor.module.model)
        loss.update_old_policy()
        new, old = actor.module.model.state_dict(), actor.module.anchor.state_dict()
        assert all(torch.equal(new[key], old[key]) for key in new)

    def test_needs_an_actor_that_acts_projected(self):
        actor = make_actor()
        with pytest.raises(ValueError, match="ChainActor\\(ProjectedModel"):
            TruDiLoss(actor, make_critic(), trajectory_kl=region(actor))
        projected = make_projected()
        with pytest.raises(ValueError, match="needs mode='projection', got 'switch'"):
            TruDiLoss(projected, make_critic())
        with pytest.raises(ValueError, match="adjoint"):
            TruDiLoss(
                projected,
                make_critic(),
                trajectory_kl=region(projected),
                actor_gradient="adjoint",
            )


def advantages(data):
    """The batch with an advantage for each state."""
    data["advantage"] = torch.randn(*data.shape, 1, dtype=DTYPE)
    return data


def literal_surrogate(projected, scale, data, event_dims: int) -> torch.Tensor:
    """The clipped objective of each state with kernels ``N(projected, scale)``, written out."""
    chain, loc_old, scale_old = record(data)
    after = chain[:, 1:]
    normal = torch.distributions.Normal
    log_ratio = (
        normal(projected, scale).log_prob(after) - normal(loc_old, scale_old).log_prob(after)
    ).sum(-1)
    if event_dims == 2:
        log_ratio = log_ratio.sum(-1, keepdim=True)
    ratio, advantage = log_ratio.exp(), data["advantage"]
    low, high = (torch.tensor(bound, dtype=torch.float32).double() for bound in (-0.2, 0.2))
    clipped = ratio.clamp(1 + low, 1 + high)
    return -torch.minimum(ratio * advantage, clipped * advantage).sum(-1)


class TestTruDiPPOLoss:
    """Ratio, entropy and KL are those of the projected kernels."""

    def make_loss(self, actor, *, trust=None, **kwargs):
        settings = {"critic_coeff": 0.0, "normalize_advantage": False, **kwargs}
        return TruDiPPOLoss(actor, trajectory_kl=region(actor, **(trust or {})), **settings)

    @pytest.mark.parametrize("event_dims", [1, 2])
    @pytest.mark.parametrize("share", ["uniform", "proportional"])
    def test_gradient_through_the_projection(self, share, event_dims):
        """Against the formula of the projected means, with the network's friction in their scale."""
        actor = make_actor(event_dims=event_dims)
        data = advantages(make_batch(actor, 24))
        nudge(actor, 0.2)
        loss = self.make_loss(
            actor, trust={"share": share, "regression_coeff": 2.0}, entropy_coeff=0.3
        )
        out = loss.actor_loss(data)
        chain, loc_old, scale_old = record(data)
        loc, scale = actor.module.score(data["observation"], chain)
        projected = literal_projection(loc_old, scale_old, loc, share)
        objective = literal_surrogate(projected, scale, data, event_dims)
        entropy = (
            torch.distributions.Normal(projected, scale.expand_as(loc)).entropy().sum((-1, -2))
        )
        gap = (projected.detach() - loc) ** 2 / (2 * scale.detach() ** 2 + 1e-8)
        expected = {
            "loss_objective": (objective - 0.3 * entropy).mean(),
            "loss_trajectory_kl": 2.0 * gap.sum((-1, -2)).mean(),
        }
        # Some states are inside, some beyond; some ratios are clipped, some are not.
        assert 0 < out["gate_fraction"] < 1 and 0 < out["clip_fraction"] < 1
        params = list(actor.parameters())
        for key, value in expected.items():
            # The clip range is rounded in log space.
            torch.testing.assert_close(out[key], value, rtol=1e-6, atol=1e-9)
            found, wanted = gradients(out[key], params), gradients(value, params)
            assert max(slope.abs().max() for slope in wanted) > 1e-3
            for slope, want in zip(found, wanted, strict=True):
                torch.testing.assert_close(slope, want, rtol=1e-5, atol=1e-8)
        kl = (projected - loc_old) ** 2 / (2 * scale_old**2 + 1e-8)
        torch.testing.assert_close(out["kl"], kl.sum((-1, -2)).mean().detach())
        assert out["loss_kl_multiplier"] == 0

    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize("kl", ["simplified", "full"])
    @pytest.mark.parametrize("share", ["uniform", "proportional"])
    def test_bound_of_the_used_kernels(self, policy, kl, share, monkeypatch):
        """However far the network is, on every state; and the ratio is that of these kernels."""
        actor = POLICIES[policy]()
        data = advantages(make_batch(actor, 16))
        nudge(actor, 3.0)
        loss = self.make_loss(actor, trust={"share": share, "kl": kl})
        used = []
        original = DenoisingPath.log_prob
        monkeypatch.setattr(
            DenoisingPath, "log_prob", lambda self, x: used.append(self) or original(self, x)
        )
        out = loss.actor_loss(data)
        (dist,) = used
        _, loc_old, scale_old = record(data)
        found = gaussian_kl(loc_old, scale_old, dist.loc, dist.scale, kl)
        assert (found.sum(-1) <= EPS * (1 + 1e-9)).all()
        assert out["kl_max"] <= EPS * (1 + 1e-9) and out["kl_unprojected"] > 10 * EPS
        torch.testing.assert_close(out["kl"], found.sum(-1).mean().detach())
        ratio = (
            original(dist, data["denoising", "chain"]) - data["denoising", "path_log_prob"]
        ).exp()
        torch.testing.assert_close(out["mean_ratio"], ratio.mean().detach())
        sum(out[key] for key in ("loss_objective", "loss_trajectory_kl")).backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in actor.parameters())

    @pytest.mark.parametrize("event_dims", [1, 2])
    @pytest.mark.parametrize("entropy", ["path", "surrogate"])
    def test_identity_inside(self, event_dims, entropy):
        """The numbers and gradients without a trust region, where nothing is projected."""
        actor = make_actor(event_dims=event_dims)
        data = advantages(make_batch(actor, 8))
        nudge(actor, 1e-3)
        settings = {"entropy": entropy, "entropy_coeff": 0.1}
        loss = self.make_loss(actor, **settings)
        plain = TruDiPPOLoss(
            actor,
            trajectory_kl=TrajectoryKLProjection(actor, mode="none"),
            critic_coeff=0.0,
            normalize_advantage=False,
            **settings,
        )
        out, expected = loss.actor_loss(data), plain.actor_loss(data)
        assert out["gate_fraction"] == 1 and out["loss_trajectory_kl"] == 0
        for key in ("loss_objective", "kl", "entropy", "ESS", "mean_ratio", "clip_fraction"):
            assert torch.equal(out[key], expected[key]), key
        params = list(actor.parameters())
        assert_all_close(
            gradients(out["loss_objective"], params), gradients(expected["loss_objective"], params)
        )

    @pytest.mark.parametrize("policy", POLICIES)
    def test_an_actor_that_acts_projected(self, policy):
        """Its own kernels: those that it acts with, around its anchor; no gradient of the anchor."""
        plain = POLICIES[policy]()
        actor = ChainActor(
            ProjectedModel(plain.module, EPS),
            noise_key="noise",
            return_chain=True,
            return_dist_params=True,
            return_path_log_prob=True,
        )
        loss = self.make_loss(actor)
        nudge(actor.module.model, 0.3)
        data = advantages(make_batch(actor, 24))
        # The policy that acted, beyond the bound of its network.
        out = loss.actor_loss(data)
        assert out["kl_unprojected"] > EPS and out["loss_trajectory_kl"] > 0
        torch.testing.assert_close(out["mean_ratio"], torch.ones((), dtype=DTYPE))

        # After the carry the ratio is not 1, by the gap.
        loss.update_old_policy()
        out = loss.actor_loss(data)
        assert out["anchor_gap"] > 1e-3 and out["loss_trajectory_kl"] == 0
        assert (out["mean_ratio"] - 1).abs() > 1e-6
        torch.testing.assert_close(out["kl"], out["anchor_gap"])

        nudge(actor.module.model, 1.0)
        out = loss.actor_loss(data)
        assert out["kl_projected_max"] <= EPS * (1 + 1e-9) < out["kl_unprojected"]
        chain, _, _ = record(data)
        network = actor.module.model.score(data["observation"], chain)
        loc, scale = actor.module.score(data["observation"], chain)
        expected = literal_surrogate(loc, scale, data, 2).mean()
        torch.testing.assert_close(out["loss_objective"], expected, rtol=1e-6, atol=1e-9)
        kind = loss.trajectory_kl.kl_type
        regression = gaussian_kl(loc.detach(), scale.detach(), *network, kind).sum(-1).mean()
        torch.testing.assert_close(out["loss_trajectory_kl"], regression)
        total = out["loss_objective"] + out["loss_trajectory_kl"]
        params = list(actor.module.model.parameters())
        for slope, want in zip(
            gradients(total, params), gradients(expected + regression, params), strict=True
        ):
            torch.testing.assert_close(slope, want, rtol=1e-5, atol=1e-8)
        total.backward()
        assert all(p.grad is None for p in actor.module.anchor.parameters())

    @pytest.mark.parametrize("acts_projected", [False, True])
    def test_the_networks_are_called_once(self, acts_projected, monkeypatch):
        plain = make_actor()
        record_all = {
            "return_chain": True,
            "return_dist_params": True,
            "return_path_log_prob": True,
        }
        actor = ChainActor(ProjectedModel(plain.module, EPS), noise_key="noise", **record_all)
        actor = actor if acts_projected else plain
        data = advantages(make_batch(actor, 4))
        loss = self.make_loss(actor, entropy="surrogate", entropy_coeff=0.1)
        calls = []
        score = type(plain.module).kernels_along
        monkeypatch.setattr(
            type(plain.module),
            "kernels_along",
            lambda self, *args, **kwargs: calls.append(self) or score(self, *args, **kwargs),
        )
        loss.actor_loss(data)
        model = actor.module
        assert calls == ([model.anchor, model.model] if acts_projected else [model])

    def test_regression_leads_back(self):
        """Without an advantage the network returns to the bound, and the objective does not push it."""
        actor = make_actor()
        data = make_batch(actor, 24)
        data["advantage"] = torch.zeros(24, 1, dtype=DTYPE)
        nudge(actor, 0.3)
        loss = self.make_loss(actor)
        before = loss.actor_loss(data)
        optim = torch.optim.Adam(loss.actor_param_groups(lr=3e-3))
        for _ in range(60):
            out = loss.actor_loss(data)
            optim.zero_grad()
            (out["loss_objective"] + out["loss_trajectory_kl"]).backward()
            optim.step()
        assert out["kl_unprojected"] < 0.5 * before["kl_unprojected"]

    def test_refused(self):
        actor = make_actor()
        with pytest.raises(ValueError, match="delay_actor"):
            self.make_loss(actor, delay_actor=True)
        with pytest.raises(ValueError, match="old_policy='recorded'"):
            self.make_loss(actor, trust={"old_policy": "replayed"})


class TestConstruction:
    @pytest.mark.parametrize(
        "wrong, word",
        [
            ({"old_policy": "target"}, "'recorded' or 'replayed', not 'target'"),
            ({"share": "fair"}, "share must be one of"),
            ({"share": "proportional", "bound": "step"}, "needs bound='path'"),
            ({"regression_coeff": -1.0}, "regression_coeff"),
            ({"regression_coeff": math.nan}, "regression_coeff"),
        ],
    )
    def test_wrong_arguments(self, wrong, word):
        with pytest.raises(ValueError, match=word):
            region(make_actor(), **wrong)

    def test_share_is_of_this_mode(self):
        with pytest.raises(ValueError, match="share='proportional' needs mode='projection'"):
            TrajectoryKLProjection(make_actor(), share="proportional")

    @pytest.mark.parametrize("mode", ["switch", "penalty", "lagrangian", "none"])
    def test_a_projected_actor_in_another_mode(self, mode):
        with pytest.raises(ValueError, match=f"needs mode='projection', got '{mode}'"):
            TrajectoryKLProjection(make_projected(), mode=mode, eps=EPS)

    def test_a_projected_actor_cannot_share_in_proportion(self):
        with pytest.raises(ValueError, match="does not know before the chain is made"):
            region(make_projected(), share="proportional")

    @pytest.mark.parametrize("other", [{"eps": 2 * EPS}, {"kl": "full"}])
    def test_another_bound_than_the_actor_s(self, other):
        with pytest.raises(ValueError, match="they must be the same"):
            region(make_projected(), **other)

    def test_takes_the_actor_s_kl(self):
        actor = make_projected(kl="full")
        projection = TrajectoryKLProjection(actor, mode="projection", eps=EPS)
        assert projection.kl_type == "full"

    def test_nothing_recorded(self):
        with pytest.raises(KeyError, match="recorded chain is not in the batch"):
            region(make_actor())(make_states(3))

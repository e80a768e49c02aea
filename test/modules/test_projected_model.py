from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objectives._parts import (
    ACTION,
    DTYPE,
    OBS,
    STEPS,
    draw_noise,
    gradients,
    kernel,
    literal_sample,
    make_actor,
    make_batch,
    make_gaussian,
    mean_step,
    nudge,
)

from torchrl_trudi.modules import (
    ChainActor,
    DenoisingChain,
    DenoisingModel,
    ProjectedModel,
    ScoreNetwork,
    gaussian_kl,
)

POLICIES = {"diffusion": make_actor, "gaussian": make_gaussian}
EPS = 0.06


def make(policy="diffusion", kl=None, eps=EPS, move=0.3, **kwargs) -> ProjectedModel:
    """A projected model whose trainable part has moved away from its anchor."""
    model = ProjectedModel(POLICIES[policy](**kwargs).module, eps, kl=kl)
    nudge(model.model, move)
    return model


def inputs(model, *batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    noise = draw_noise(*batch, num_steps=model.num_steps)
    return torch.randn(*batch, OBS, dtype=DTYPE), noise.to(model.low.dtype)


def share_of(model, observation, chain) -> torch.Tensor:
    """KL of every kernel of a chain from the anchor's, ``[*B, N]``."""
    old = model.anchor.score(observation, chain.latents)
    return gaussian_kl(*old, chain.loc, chain.scale, model.kl_type)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kl", ["simplified", "full"])
class TestBound:
    @settings(max_examples=15, deadline=None)
    @given(seed=st.integers(0, 2**16), move=st.floats(-3, 0.7).map(lambda x: 10**x))
    def test_every_step_of_every_chain(self, policy, kl, seed, move):
        torch.manual_seed(seed)
        model = make(policy, kl, move=move)
        observation, noise = inputs(model, 6)
        with torch.no_grad():
            for chain in (
                model.sample(observation, noise),
                model.sample_detached(observation, noise),
                model.deterministic_chain(observation),
            ):
                step = share_of(model, observation, chain)
                assert (step <= EPS / model.num_steps * (1 + 1e-9)).all()

    def test_projects_where_the_network_is_beyond(self, policy, kl):
        model = make(policy, kl)
        observation, noise = inputs(model, 50)
        chain = model.sample(observation, noise)
        network = DenoisingChain(chain.latents, *model.model.score(observation, chain.latents))
        beyond = share_of(model, observation, network) > EPS / model.num_steps
        assert beyond.any()
        step = share_of(model, observation, chain)
        torch.testing.assert_close(
            step[beyond], torch.full_like(step[beyond], EPS / model.num_steps)
        )
        torch.testing.assert_close(chain.loc[~beyond], network.loc[~beyond])

    def test_scoring_gives_the_kernels_of_sampling(self, policy, kl):
        model = make(policy, kl)
        observation, noise = inputs(model, 5)
        chain = model.sample(observation, noise)
        loc, scale = model.score(observation, chain.latents)
        torch.testing.assert_close(loc, chain.loc)
        torch.testing.assert_close(scale, chain.scale)
        noisy = chain.loc + chain.scale * noise[:, 1:]
        torch.testing.assert_close(chain.latents[:, 1:], noisy)

    def test_some_rows_and_steps(self, policy, kl):
        model = make(policy, kl)
        observation, noise = inputs(model, 5)
        latents = model.sample(observation, noise).latents
        kernels = model.kernels_along(observation, latents)
        loc, scale = kernels()
        rows, steps = torch.tensor([3, 0]), slice(0, 1)
        some_loc, some_scale = kernels(rows, steps)
        torch.testing.assert_close(some_loc, loc[rows, steps])
        scale = scale.expand_as(loc)[rows, steps]
        torch.testing.assert_close(some_scale.expand_as(some_loc), scale)

    def test_without_a_move_it_is_the_model(self, policy, kl):
        model = make(policy, kl, move=0.0)
        observation, noise = inputs(model, 5)
        for ours, theirs in (
            (model.sample(observation, noise), model.model.sample(observation, noise)),
            (
                model.deterministic_chain(observation),
                model.model.deterministic_chain(observation),
            ),
        ):
            torch.testing.assert_close(ours.latents, theirs.latents)
            torch.testing.assert_close(ours.loc, theirs.loc)
            torch.testing.assert_close(
                ours.scale.expand_as(ours.loc), theirs.scale.expand_as(ours.loc)
            )
            for a, b in zip(
                model.log_prob(observation, ours),
                model.model.log_prob(observation, theirs),
                strict=True,
            ):
                torch.testing.assert_close(a, b)

    def test_the_noise_free_chain_follows_the_projected_means(self, policy, kl):
        model = make(policy, kl)
        observation, _ = inputs(model, 5)
        chain = model.deterministic_chain(observation)
        assert torch.equal(chain.latents[:, 1:], chain.loc)
        loc, _ = model.score(observation, chain.latents)
        torch.testing.assert_close(loc, chain.loc)
        assert (chain.latents[:, 0] == 0).all()

    def test_gradient_by_finite_differences(self, policy, kl):
        """Through the whole chain: the anchor's mean depends on the latent, too."""
        model = make(policy, kl)
        observation, noise = inputs(model, 4)
        params = [p for p in model.parameters() if p.requires_grad]
        assert len(params) == len(list(model.model.parameters()))

        def objective():
            chain = model.sample(observation, noise)
            log_prob = model.log_prob(observation, chain).log_prob
            return (chain.latents[:, -1].tanh().square().sum(-1) + 0.1 * log_prob).sum()

        grads = gradients(objective(), params)
        direction = [torch.randn_like(p) for p in params]
        expected, h = [], 1e-6
        with torch.no_grad():
            for sign in (1, -1):
                for p, d in zip(params, direction, strict=True):
                    p.add_(sign * h * d)
                expected.append(objective())
                for p, d in zip(params, direction, strict=True):
                    p.sub_(sign * h * d)
        slope = sum((g * d).sum() for g, d in zip(grads, direction, strict=True))
        torch.testing.assert_close(
            slope, (expected[0] - expected[1]) / (2 * h), rtol=1e-5, atol=1e-7
        )

    def test_float32(self, policy, kl):
        model = make(policy, kl, dtype=torch.float32, move=2.0)
        observation, noise = inputs(model, 20)
        with torch.no_grad():
            chain = model.sample(observation.float(), noise)
            step = share_of(model, observation.float(), chain)
        assert (step <= EPS / model.num_steps + 1e-6).all()


class TestLiteral:
    def test_chain_step_by_step(self):
        """Simplified: mean_old + (mean - mean_old) * min(1, sqrt(share / KL)), the network's scale."""
        model = make()
        observation, noise = inputs(model, 6)
        chain = model.sample(observation, noise)
        x, share, moved = 2.5 * noise[:, 0], EPS / STEPS, 0
        for n in range(STEPS):
            old, new = (mean_step(part, observation, x, n) for part in (model.anchor, model.model))
            _, scale_old = kernel(model.anchor, n)
            _, scale = kernel(model.model, n)
            kl = ((new - old) ** 2 / (2 * scale_old**2 + 1e-8)).sum(-1, keepdim=True)
            mean = old + (new - old) * (share / kl).sqrt().clamp(max=1)
            moved += (kl > share).sum()
            torch.testing.assert_close(chain.loc[:, n], mean)
            x = mean + scale * noise[:, n + 1]
            torch.testing.assert_close(chain.latents[:, n + 1], x)
        assert moved > 0

    def test_log_prob_with_a_wide_bound(self):
        """Nothing is projected: the surrogate is that of the network's chain."""
        actor = make_actor()
        model = ProjectedModel(actor.module, eps=1e6)
        nudge(model.model)
        observation, noise = inputs(model, 5)
        chain = model.sample(observation, noise)
        action, _, log_prob = literal_sample(actor, observation, noise)
        torch.testing.assert_close(model.squash(chain.latents[:, -1]), action)
        torch.testing.assert_close(model.log_prob(observation, chain).log_prob, log_prob)


class TestAnchor:
    def test_stands_still_and_gets_no_gradient(self):
        model = make(move=0.0)
        before = copy.deepcopy(model.anchor.state_dict())
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        observation, noise = inputs(model, 4)
        model.sample(observation, noise).latents.sum().backward()
        optim.step()
        assert all(p.grad is None for p in model.anchor.parameters())
        after = model.anchor.state_dict()
        assert all(torch.equal(after[key], before[key]) for key in before)

    @pytest.mark.parametrize("policy", POLICIES)
    def test_update_copies_the_network_as_it_is(self, policy):
        model = make(policy)
        model.update_anchor()
        new, old = model.model.state_dict(), model.anchor.state_dict()
        assert new.keys() == old.keys() and all(torch.equal(new[key], old[key]) for key in new)
        assert not any(p.requires_grad for p in model.anchor.parameters())
        nudge(model.model)
        assert not torch.equal(*(next(part.parameters()) for part in (model.model, model.anchor)))

    def test_update_copies_buffers(self):
        model = make(learn_friction=False)
        model.model.friction_raw.add_(0.5)
        model.update_anchor()
        assert torch.equal(model.model.friction_raw, model.anchor.friction_raw)

    def test_state_dict_round_trip(self):
        model, other = make(), make(eps=2 * EPS)
        result = other.load_state_dict(model.state_dict())
        assert not result.missing_keys and not result.unexpected_keys
        assert any(key.startswith("anchor.") for key in model.state_dict())
        # A setting, not state.
        assert other.eps == 2 * EPS
        other.eps = model.eps
        observation, noise = inputs(model, 4)
        for a, b in zip(
            model.sample(observation, noise), other.sample(observation, noise), strict=True
        ):
            torch.testing.assert_close(a, b)


class TestConstruction:
    def test_takes_what_is_the_model_s(self):
        for policy, kl, scale in (("diffusion", "simplified", 4.0), ("gaussian", "full", 0.5)):
            model = make(policy)
            assert (model.kl_type, model.default_kl) == (kl, kl)
            assert model.default_target_entropy_scale == scale
            assert model.action_dim == ACTION and model.num_steps == model.model.num_steps

    def test_box(self):
        low = torch.tensor([-2.0, -1.0], dtype=DTYPE)
        network = ScoreNetwork(2, 3, hidden_size=8, dtype=DTYPE)
        model = ProjectedModel(DenoisingModel(network, 2, low=low, high=3.0, dtype=DTYPE))
        assert torch.equal(model.low, low) and model.high.tolist() == [3.0, 3.0]
        assert model.log_volume() == model.model.log_volume()

    def test_errors(self):
        module = make_actor().module
        for wrong in (0.0, -1.0, float("nan")):
            with pytest.raises(ValueError, match="eps must be positive"):
                ProjectedModel(module, wrong)
        with pytest.raises(ValueError, match="'half'"):
            ProjectedModel(module, kl="half")
        with pytest.raises(TypeError, match="projected already"):
            ProjectedModel(ProjectedModel(module))
        with pytest.raises(ValueError, match="noise must have shape"):
            model = ProjectedModel(module)
            model.sample(torch.zeros(2, OBS, dtype=DTYPE), torch.zeros(2, 1, ACTION, dtype=DTYPE))

    def test_in_an_actor(self):
        actor = ChainActor(make(), return_chain=True, return_dist_params=True, return_log_prob=True)
        data = make_batch(actor, 5)
        dist = actor.get_dist(data)
        torch.testing.assert_close(dist.loc, data["denoising", "loc"])
        torch.testing.assert_close(actor.build_dist_from_params(data).loc, dist.loc)

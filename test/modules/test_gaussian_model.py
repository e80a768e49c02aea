"""The tanh-Gaussian policy against torch.distributions and torchrl's TanhNormal."""

from __future__ import annotations

import math

import pytest
import torch
from torch import distributions as D
from torch import nn
from torchrl.modules import TanhNormal

from torchrl_trudi.modules import ChainModel, DenoisingChain, GaussianModel, GaussianNetwork

A, O = 2, 3  # noqa: E741
F64 = {"dtype": torch.float64}
BOX = {"low": torch.tensor([-3.0, 2.0], **F64), "high": torch.tensor([1.0, 8.0], **F64)}


@pytest.fixture
def make(randomize):
    def make(seed: int = 0, **kwargs) -> GaussianModel:
        network = GaussianNetwork(A, O, hidden_size=8, output_gain=1.0, **F64)
        return randomize(GaussianModel(network, A, **kwargs, **F64), seed=seed)

    return make


def observations(*batch: int) -> torch.Tensor:
    return torch.randn(*batch, O, **F64)


def tanh_gaussian(model, observation) -> D.TransformedDistribution:
    """The distribution of the action, from torch.distributions."""
    loc, scale = model.network(observation)
    center, half = (model.high + model.low) / 2, (model.high - model.low) / 2
    return D.TransformedDistribution(
        D.Independent(D.Normal(loc, scale), 1),
        [D.TanhTransform(), D.AffineTransform(center, half, event_dim=1)],
    )


class TestLogProb:
    @pytest.mark.parametrize("box", [{}, BOX], ids=["unit", "box"])
    @pytest.mark.parametrize("batch", [(), (7,), (2, 3)], ids=str)
    def test_is_that_of_the_action(self, box, batch, make):
        model, observation = make(**box), observations(*batch)
        chain = model.sample(observation)
        pieces = model.log_prob(observation, chain)
        action = model.squash(chain.latents[..., -1, :])
        expected = tanh_gaussian(model, observation).log_prob(action)
        torch.testing.assert_close(pieces.log_prob, expected, rtol=1e-8, atol=1e-8)
        upstream = TanhNormal(*model.network(observation), low=model.low, high=model.high)
        torch.testing.assert_close(pieces.log_prob, upstream.log_prob(action), rtol=1e-6, atol=1e-6)

    def test_pieces(self, make):
        model, observation = make(**BOX), observations(5)
        chain = model.sample(observation)
        log_prob, running, terminal, log_weight, log_det = model.log_prob(observation, chain)
        assert torch.equal(log_prob, running) and (terminal == 0).all()
        latent = D.Normal(chain.loc[:, 0], chain.scale[:, 0]).log_prob(chain.latents[:, 1]).sum(-1)
        torch.testing.assert_close(log_weight, -latent)
        torch.testing.assert_close(running, latent - log_det)
        # In units of the box it does not depend on the box.
        unit = make().log_prob(observation, chain).log_prob
        torch.testing.assert_close(log_prob + model.log_volume(), unit)
        torch.testing.assert_close(model.log_volume(), torch.tensor(math.log(2.0 * 3.0), **F64))

    def test_exact_where_tanh_saturates(self, make):
        """The latent is recorded: the rounded action, which is 1 here, is not inverted."""
        model, observation = make(), observations(4)
        latent = torch.full((4, 1, A), 25.0, **F64)
        loc, scale = model.kernel(observation)
        chain = DenoisingChain(torch.cat([latent, latent], -2), loc, scale)
        assert (model.squash(latent) == 1).all()
        # log(1 - tanh(x) ** 2) = log 4 - 2 x - 2 log(1 + exp(-2 x))
        expected = D.Normal(loc, scale).log_prob(latent).sum((-1, -2)) - A * (math.log(4) - 50)
        torch.testing.assert_close(model.log_prob(observation, chain).log_prob, expected)

    def test_density_integrates_to_one(self, make):
        """Over the box, in one dimension; and the entropy is minus its mean."""
        network = GaussianNetwork(1, O, hidden_size=8, output_gain=1.0, init_scale=0.6, **F64)
        model = GaussianModel(network, 1, low=-2.0, high=3.0, **F64)
        observation = observations(1)
        latent = torch.linspace(-9, 9, 20_001, **F64).reshape(-1, 1, 1)
        loc, scale = (part.expand(len(latent), 1, 1) for part in model.kernel(observation))
        chain = DenoisingChain(torch.cat([latent, latent], -2), loc, scale)
        density = model.log_prob(observation, chain).log_prob.exp()
        action = model.squash(latent[:, 0])[:, 0]
        torch.testing.assert_close(
            torch.trapezoid(density, action), torch.tensor(1.0, **F64), rtol=1e-6, atol=0
        )


class TestSampling:
    def test_shapes_and_noise(self, make):
        model, observation = make(), observations(2, 3)
        noise = torch.randn(2, 3, 2, A, **F64)
        latents, loc, scale = model.sample(observation, noise)
        assert latents.shape == (2, 3, 2, A) and loc.shape == scale.shape == (2, 3, 1, A)
        assert (latents[..., 0, :] == 0).all()
        mean, std = model.network(observation)
        torch.testing.assert_close(latents[..., 1, :], mean + std * noise[..., 1, :])
        assert torch.equal(loc[..., 0, :], mean) and torch.equal(scale[..., 0, :], std)
        with pytest.raises(ValueError, match=r"noise must have shape \(2, 3, 2, 2\), got"):
            model.sample(observation, noise[..., 1:, :])

    def test_generator(self, make):
        model, observation = make(), observations(4)
        first, second = (
            model.sample(observation, generator=torch.Generator().manual_seed(3)).latents
            for _ in range(2)
        )
        assert torch.equal(first, second)
        assert not torch.equal(first, model.sample(observation).latents)

    def test_moments(self, make):
        model = make()
        observation = observations(1).expand(40_000, O)
        latents, loc, scale = model.sample(observation)
        error = (latents[:, 1].mean(0) - loc[0, 0]) / scale[0, 0]
        assert error.abs().max() < 4 / 200
        torch.testing.assert_close(latents[:, 1].std(0), scale[0, 0], rtol=0.02, atol=0)

    def test_gradients(self, make):
        """The draw is differentiable, that of the frozen policy is not."""
        model, observation, noise = make(), observations(4), torch.randn(4, 2, A, **F64)
        weight = model.network.output.weight
        (grad,) = torch.autograd.grad(model.sample(observation, noise).latents.sum(), weight)
        loc, scale = model.network(observation)
        (expected,) = torch.autograd.grad((loc + scale * noise[:, 1]).sum(), weight)
        torch.testing.assert_close(grad, expected)
        frozen = model.sample_detached(
            observation, noise, initial_latent=torch.ones(4, A, **F64), step_sizes=None
        )
        assert not any(part.requires_grad for part in frozen)
        for part, other in zip(frozen, model.sample(observation, noise), strict=True):
            assert torch.equal(part, other)

    def test_deterministic_is_the_mean(self, make):
        model, observation = make(**BOX), observations(5)
        latents = model.sample_deterministic(observation)
        mean, std = model.network(observation)
        assert latents.shape == (5, 2, A)
        assert torch.equal(latents[:, 1], mean) and (latents[:, 0] == 0).all()
        chain = model.deterministic_chain(observation)
        assert torch.equal(chain.latents, latents) and torch.equal(chain.scale[:, 0], std)


class TestScoring:
    def test_kernels_do_not_depend_on_the_chain(self, make):
        model, other, observation = make(), make(seed=1), observations(5)
        latents = other.sample(observation).latents
        loc, scale = model.score(observation, latents)
        mean, std = model.network(observation)
        assert torch.equal(loc[:, 0], mean) and torch.equal(scale[:, 0], std)
        kernels = model.kernels_along(observation, latents)
        rows = torch.tensor([3, 0])
        for steps in (slice(0, 2), torch.zeros(2, 1, dtype=torch.long)):
            part = kernels(rows, steps)
            assert torch.equal(part[0], loc[rows]) and torch.equal(part[1], scale[rows])

    def test_chain_of_another_length(self, make):
        with pytest.raises(ValueError, match=r"\[\*B, 2, 2\], got \(5, 4, 2\)"):
            make().score(observations(5), torch.randn(5, 4, A, **F64))


class TestConstruction:
    def test_is_a_chain_of_one_step(self, make):
        model = make()
        assert isinstance(model, ChainModel)
        assert (model.num_steps, model.action_dim, model.step_sizes()) == (1, A, None)
        assert (model.default_kl, model.default_target_entropy_scale) == ("full", 0.5)

    def test_any_network_with_two_outputs(self):
        from tensordict.nn import NormalParamExtractor

        network = nn.Sequential(nn.Linear(O, 2 * A, **F64), NormalParamExtractor())
        model = GaussianModel(network, A, **F64)
        assert model.sample(observations(5)).latents.shape == (5, 2, A)

    @pytest.mark.parametrize(
        "options, message",
        [
            ({"action_dim": 0}, "at least 1, got 0"),
            ({"low": 1.0}, "needs low < high"),
            ({"high": math.inf}, "must be bounded, got high=inf"),
            ({"low": torch.zeros(3)}, r"low must be a scalar or have shape \[2\], got \(3,\)"),
        ],
    )
    def test_bad_options(self, options, message):
        with pytest.raises(ValueError, match=message):
            GaussianModel(GaussianNetwork(A, O), **({"action_dim": A} | options))

    def test_network_of_another_size(self):
        model = GaussianModel(GaussianNetwork(A, O, **F64), 3, **F64)
        with pytest.raises(ValueError, match=r"mean must have shape \[\*B, 3\], got \(5, 2\)"):
            model.sample(observations(5))

    def test_the_base_class_is_abstract(self):
        with pytest.raises(TypeError, match="abstract"):
            ChainModel(2, 1)

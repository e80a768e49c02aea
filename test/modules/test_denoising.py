"""The denoising chain against the formulas, written out with torch.distributions."""

from __future__ import annotations

import copy
import itertools
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributions as D
from torch.func import functional_call
from torchrl.testing import get_default_devices

from torchrl_trudi.modules import (
    DenoisingChain,
    DenoisingModel,
    DenoisingPath,
    ScoreNetwork,
    StepSizes,
)

N, A, O = 4, 2, 3  # noqa: E741
BOX = {"low": torch.tensor([-2.0, 0.1]), "high": torch.tensor([3.0, 0.4])}
OPTIONS = {
    "default": {},
    "one_step": {"num_steps": 1},
    "scalar_friction": {"friction": "scalar"},
    "fixed_friction": {"learn_friction": False},
    "linear_steps": {"steps": {"schedule": "linear", "learn": "shared"}},
    "constant_steps": {"steps": {"schedule": "constant"}},
    "per_step_sizes": {"steps": {"learn": "per_step"}},
    "init_std": {"init_std": 0.8},
    "learned_prior": {"learn_prior": True},
    "backward": {"backward": True},
    "box": BOX,
    "plain_network": {"plain": True, "backward": True},
    "deep_rms": {"network": {"num_layers": 5, "norm": "rms", "activation": "silu"}},
    "shallow": {"network": {"num_layers": 2, "norm": "none", "activation": "tanh"}},
    "wide": {"network": {"hidden_size": 33, "norm": "none", "activation": "mish"}},
    "everything": {
        "num_steps": 8,
        "friction": "scalar",
        "steps": {"schedule": "linear", "learn": "per_step"},
        "learn_prior": True,
        "backward": True,
        **BOX,
    },
}
with_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
PIECES = ("log_prob", "running", "terminal", "log_weight", "log_det")


def schedule_of(options: dict) -> str:
    return options.get("steps", {}).get("schedule", "cosine")


def draw(model: DenoisingModel, batch=(5,), device=None):
    observation = torch.randn(*batch, O, dtype=torch.float64, device=device)
    shape = (*batch, model.num_steps + 1, model.action_dim)
    return observation, torch.randn(shape, dtype=torch.float64, device=device)


def assert_close(actual, expected, tolerance=1e-11):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


class TestSampling:
    @pytest.mark.parametrize("device", get_default_devices())
    @with_options
    def test_equals_the_written_out_loop(self, options, device, make_model, literal_chain):
        model = make_model(device=device, **options)
        observation, noise = draw(model, device=device)
        expected = literal_chain(model, observation, noise, schedule=schedule_of(options))
        chain = model.sample(observation, noise)
        assert_close(chain.latents, expected.latents)
        assert_close(chain.loc, expected.loc)
        assert_close(chain.scale, expected.scale)
        assert_close(model.squash(chain.latents[..., -1, :]), expected.action)
        pieces = model.log_prob(observation, chain)
        for piece in PIECES:
            assert_close(getattr(pieces, piece), getattr(expected, piece), 1e-10)
        # The control matters: it is no comparison of uncontrolled chains.
        assert (model.drift(chain.latents[..., :1, :]) - chain.loc[..., :1, :]).abs().max() > 0.01

    @with_options
    def test_gradients_equal_the_written_out_loop(self, options, make_model, literal_chain):
        model = make_model(**options)
        observation, noise = draw(model)
        names, parameters = zip(*model.named_parameters(), strict=True)
        expected = literal_chain(model, observation, noise, schedule=schedule_of(options))
        expected = torch.autograd.grad(expected.log_prob.mean(), parameters)
        actual = model.log_prob(observation, model.sample(observation, noise)).log_prob.mean()
        actual = torch.autograd.grad(actual, parameters)
        for name, a, b in zip(names, actual, expected, strict=True):
            assert b.abs().max() > 0, name
            torch.testing.assert_close(
                a, b, atol=1e-9, rtol=1e-9, msg=lambda m, name=name: f"{name}: {m}"
            )

    @pytest.mark.parametrize("batch", [(), (1,), (2, 3), (0,)])
    def test_batch_shapes(self, batch, make_model, literal_chain):
        model = make_model(backward=True)
        observation, noise = draw(model, batch)
        chain = model.sample(observation, noise)
        assert chain.latents.shape == (*batch, N + 1, A)
        assert chain.loc.shape == (*batch, N, A)
        assert chain.scale.shape == (N, A)
        expected = literal_chain(model, observation, noise)
        assert_close(chain.latents, expected.latents)
        assert_close(model.score(observation, chain.latents)[0], expected.loc)
        for piece, value in model.log_prob(observation, chain)._asdict().items():
            assert value.shape == batch
            assert_close(value, getattr(expected, piece), 1e-10)
        assert_close(
            model.sample_deterministic(observation),
            literal_chain(model, observation, 0 * noise).latents,
        )

    def test_latents_are_means_plus_scaled_noise(self, make_model):
        model = make_model()
        observation, noise = draw(model)
        latents, loc, scale = model.sample(observation, noise)
        assert_close(latents[:, 1:] - loc, scale * noise[:, 1:])
        assert_close(latents[:, 0], 2.5 * noise[:, 0])

    def test_initial_latent_carries_no_gradient(self, make_model):
        model = make_model(learn_prior=True)
        observation, noise = draw(model)
        chain = model.sample(observation, noise.requires_grad_())
        assert not model.initial_latent(noise[:, 0]).requires_grad
        (gradient,) = torch.autograd.grad(chain.latents.sum(), noise)
        assert not gradient[:, 0].any()
        assert (gradient[:, 1:] != 0).all()
        # and so the last state depends on the prior through the drift alone
        mean = model.prior_mean
        (gradient,) = torch.autograd.grad(
            model.sample(observation, noise).latents[:, 0].sum() + 0 * mean.sum(), mean
        )
        assert not gradient.any()

    def test_noise_and_generators_reproduce(self, make_model):
        model = make_model()
        observation, noise = draw(model)
        assert torch.equal(
            model.sample(observation, noise).latents, model.sample(observation, noise).latents
        )

        def with_generator(seed):
            generator = torch.Generator().manual_seed(seed)
            return model.sample(observation, generator=generator).latents

        state = torch.get_rng_state()
        assert torch.equal(with_generator(1), with_generator(1))
        assert not torch.equal(with_generator(1), with_generator(2))
        assert torch.equal(state, torch.get_rng_state())  # the global generator is left alone
        torch.manual_seed(7)
        first, second = model.sample(observation).latents, model.sample(observation).latents
        torch.manual_seed(7)
        assert torch.equal(first, model.sample(observation).latents)
        assert (first != second).all()

    def test_drawn_noise_is_standard_normal_and_independent(self, make_model):
        noise = make_model().draw_noise((20_000,))
        assert noise.shape == (20_000, N + 1, A) and noise.dtype == torch.float64
        flat = noise.flatten(1)
        # five standard errors
        assert flat.mean(0).abs().max() < 5 / 20_000**0.5
        covariance = flat.T.cov() - torch.eye(flat.shape[1])
        assert covariance.abs().max() < 5 * (2 / 20_000) ** 0.5

    def test_default_dtype(self):
        model = DenoisingModel(ScoreNetwork(A, O, hidden_size=8), A)
        chain = model.sample(torch.randn(5, O))
        assert {x.dtype for x in chain} == {torch.float32}
        assert model.num_steps == 8
        (prior_mean, prior_std), friction = model.prior(), model.friction()
        assert torch.equal(prior_mean, torch.zeros(A)) and torch.equal(
            prior_std, torch.full((A,), 2.5)
        )
        torch.testing.assert_close(friction, torch.ones(A))

    def test_which_parts_are_learned(self, make_model):
        def own(**options):
            names = dict(make_model(**options).named_parameters())
            return {n for n in names if not n.startswith(("score_network.", "backward_network."))}

        assert own() == {"friction_raw"}
        assert own(learn_friction=False) == set()
        assert own(learn_prior=True) == {"friction_raw", "prior_mean", "prior_std_raw"}
        assert own(steps={"learn": "shared"}) == {"friction_raw", "step_sizes.raw"}
        assert make_model(friction="scalar").friction_raw.shape == (1,)
        assert make_model().friction_raw.shape == (A,)

    def test_learned_prior_starts_at_the_fixed_one(self):
        model = DenoisingModel(
            ScoreNetwork(A, O, hidden_size=8),
            A,
            learn_prior=True,
            init_std=1.7,
            dtype=torch.float64,
        )
        mean, std = model.prior()
        assert not mean.any()
        assert_close(std, torch.full((A,), 1.7, dtype=torch.float64))

    def test_vanishing_friction_stays_finite(self, make_model):
        model = make_model()
        with torch.no_grad():
            model.friction_raw.fill_(-1e6)
        assert all(x.isfinite().all() for x in model.kernel_coefficients())

    def test_sample_detached(self, make_model):
        model = make_model()
        observation, noise = draw(model)
        expected = model.sample(observation, noise)
        chain = model.sample_detached(observation, noise)
        for a, b in zip(chain, expected, strict=True):
            assert torch.equal(a, b)
        assert not chain.loc.requires_grad
        assert_close(
            model.sample_detached(
                observation, noise, initial_latent=expected.latents[:, 0]
            ).latents,
            expected.latents,
        )
        sizes = torch.full((N,), 0.2, dtype=torch.float64, requires_grad=True)
        other = model.sample_detached(observation, noise, step_sizes=sizes)
        with torch.no_grad():
            eta = 0.2 / model.friction()
            mean = chain.latents[:, 0] + eta * (
                model.drift(chain.latents[:, 0])
                + model.score_network(chain.latents[:, 0], observation, torch.zeros(5))
            )
        assert_close(other.loc[:, 0], mean)
        assert_close(other.scale, (2 * eta).sqrt().expand(N, A))
        # Gradients reach the step sizes through the noise scale alone: d sqrt(2 d / f) / dd.
        (gradient,) = torch.autograd.grad(other.latents[:, -1].sum(), sizes)
        expected = (noise[:, -1] * other.scale[-1].detach() / 0.4).sum()
        assert_close(gradient[-1], expected)
        assert not gradient[:-1].any()


class TestUncontrolled:
    """With zero control the chain is linear and Gaussian: its moments have closed forms."""

    @staticmethod
    def variance(model: DenoisingModel) -> torch.Tensor:
        """Exact variance of x_N: the chain is linear in its noises, so feed unit noises."""
        unit = torch.eye(model.num_steps + 1, dtype=torch.float64)[..., None].expand(-1, -1, A)
        observation = torch.zeros(len(unit), O, dtype=torch.float64)
        return model.sample(observation, unit).latents[:, -1].square().sum(0)

    @pytest.mark.parametrize("learn_prior", [False, True])
    def test_moments(self, learn_prior, make_model):
        model = make_model(learn_prior=learn_prior, num_steps=8)
        for parameter in model.score_network.output.parameters():
            torch.nn.init.zeros_(parameter)
        (mean, std), (eta, _) = model.prior(), model.kernel_coefficients()
        variance = std**2
        for n in range(8):
            variance = variance * (1 - eta[n] / std**2) ** 2 + 2 * eta[n]
        if not learn_prior:
            assert_close(self.variance(model), variance)
        # The prior mean is a fixed point.
        chain = model.sample_deterministic(torch.zeros(3, O, dtype=torch.float64))
        assert_close(chain, mean.expand(3, 9, A))

    def test_one_step_adds_eta_squared_over_the_variance(self, make_model):
        model = make_model(1)
        torch.nn.init.zeros_(model.score_network.output.weight)
        torch.nn.init.zeros_(model.score_network.output.bias)
        eta, _ = model.kernel_coefficients()
        assert_close(self.variance(model), 2.5**2 + eta[0] ** 2 / 2.5**2)

    def test_prior_is_invariant_in_the_small_step_limit(self):
        excess = []
        for num_steps in (8, 16, 32, 64):
            network = ScoreNetwork(A, O, hidden_size=4, output_gain=0.0, dtype=torch.float64)
            steps = StepSizes(num_steps, schedule="constant", dtype=torch.float64)
            model = DenoisingModel(network, A, num_steps, step_sizes=steps, dtype=torch.float64)
            excess.append((self.variance(model) - 2.5**2).abs().max().item())
        ratios = [a / b for a, b in itertools.pairwise(excess)]
        assert excess[-1] < 0.003 and all(1.9 < r < 2.1 for r in ratios)  # first order

    def test_uncontrolled_kernels_are_reversible_in_the_small_step_limit(self):
        """Detailed balance: then L is the exact log-density of the action, for every path."""
        gaps = []
        for num_steps in (16, 64):
            network = ScoreNetwork(A, O, hidden_size=4, output_gain=0.0, dtype=torch.float64)
            model = DenoisingModel(network, A, num_steps, dtype=torch.float64)
            observation, noise = draw(model, (512,))
            chain = model.sample(observation, noise)
            log_prob = model.log_prob(observation, chain).log_prob
            last = chain.latents[:, -1]
            exact = log_prior(last).sum(-1) - model.log_det(last)
            gaps.append((log_prob - exact).square().mean().sqrt().item())
        assert gaps[0] < 0.1 and gaps[1] < gaps[0] / 1.8

    def test_a_fresh_policy_is_the_squashed_prior(self):
        model = DenoisingModel(
            ScoreNetwork(A, O, dtype=torch.float64, hidden_size=64), A, dtype=torch.float64
        )
        observation, noise = draw(model)
        eta, scale = model.kernel_coefficients()
        x = 2.5 * noise[:, 0]
        for n in range(8):
            x = x * (1 - eta[n] / 2.5**2) + scale[n] * noise[:, n + 1]
        action = model.squash(model.sample(observation, noise).latents[:, -1])
        torch.testing.assert_close(action, x.tanh(), atol=1e-6, rtol=0)


class TestDeterministic:
    @with_options
    def test_equals_the_stochastic_chain_without_noise(self, options, make_model):
        model = make_model(**options)
        observation, noise = draw(model)
        latents = model.sample_deterministic(observation)
        assert_close(latents, model.sample(observation, 0 * noise).latents)
        start = model.initial_latent(noise[:, 0])
        noise[:, 1:] = 0
        assert_close(
            model.sample_deterministic(observation, start), model.sample(observation, noise).latents
        )

    def test_repeatable_and_draws_nothing(self, make_model):
        model = make_model(learn_prior=True)
        observation, _ = draw(model)
        state = torch.get_rng_state()
        first = model.sample_deterministic(observation)
        assert torch.equal(first, model.sample_deterministic(observation))
        assert torch.equal(state, torch.get_rng_state())
        assert_close(first[:, 0], model.prior_mean.expand(5, A))

    @pytest.mark.parametrize("score_scale", [0.0, 0.5, 2.0])
    def test_score_scale(self, score_scale, make_model, literal_chain):
        model = make_model()
        observation, noise = draw(model)
        start = noise[:, 0]
        expected = literal_chain(
            model, observation, 0 * noise, score_scale=score_scale, initial_latent=start
        )
        latents = model.sample_deterministic(observation, start, score_scale=score_scale)
        assert_close(latents, expected.latents)
        if score_scale == 0.0:
            eta, _ = model.kernel_coefficients()
            assert_close(latents[:, -1], start * (1 - eta / 2.5**2).prod(0))


class TestScoring:
    @with_options
    def test_equals_the_loop_at_any_states(self, options, make_model):
        model = make_model(**options)
        observation, noise = draw(model)
        latents = 3 * noise  # no chain of this model
        loc, scale = model.score(observation, latents)
        eta, std = model.kernel_coefficients()
        assert_close(scale, std)
        for n in range(model.num_steps):
            x = latents[:, n]
            step = torch.full((5,), float(n), dtype=torch.float64)
            control = model.score_network(x, observation, step)
            assert_close(loc[:, n], x + eta[n] * (model.drift(x) + control))

    @with_options
    def test_backward_kernels_at_any_states(self, options, make_model):
        model = make_model(**options)
        observation, noise = draw(model)
        latents = 3 * noise
        mean = model.backward_mean(observation, latents)
        eta, _ = model.kernel_coefficients()
        for n in range(model.num_steps):
            x = latents[:, n + 1]
            drift = model.drift(x)
            if model.backward_network is not None:
                step = torch.full((5,), n + 1.0, dtype=torch.float64)
                drift = drift + model.backward_network(x, observation, step)
            assert_close(mean[:, n], x + eta[n] * drift)

    def test_own_chain_gives_the_recorded_means(self, make_model):
        model = make_model(8)
        observation, noise = draw(model, (2, 3))
        chain = model.sample(observation, noise)
        loc, scale = model.score(observation, chain.latents)
        assert_close(loc, chain.loc, 1e-13)
        assert torch.equal(scale, chain.scale)

    def test_given_step_sizes(self, make_model):
        model = make_model()
        observation, noise = draw(model)
        sizes = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
        loc, scale = model.score(observation, noise, step_sizes=sizes)
        own_loc, own_scale = model.score(observation, noise)
        factor = sizes / model.step_sizes()
        x = noise[:, :-1]
        assert_close(loc - x, (own_loc - x) * factor[:, None])
        assert_close(scale, own_scale * factor.sqrt()[:, None])

    def test_one_network_call_scores_all_steps(self, make_model):
        model = make_model()
        observation, noise = draw(model)
        calls = []
        model.score_network.hidden.register_forward_hook(lambda *_: calls.append(1))
        model.score_network.step_embedding.register_forward_hook(lambda *_: calls.append("step"))
        model.score(observation, noise)
        assert calls == ["step", 1]
        calls.clear()
        model.sample(observation, noise)
        assert calls == ["step", *[1] * N]

    @pytest.mark.parametrize("shape", [(5, N, A), (5, N + 2, A), (5, N + 1, A + 1)])
    def test_wrong_chain(self, shape, make_model):
        with pytest.raises(ValueError, match=r"\[\*B, 5, 2\].*got \(5"):
            make_model().score(torch.zeros(5, O), torch.zeros(shape))


class TestGradients:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"learn_prior": True, "backward": True, "steps": {"learn": "shared"}, **BOX},
            {"friction": "scalar", "steps": {"learn": "per_step"}},
        ],
        ids=["default", "learned", "per_step"],
    )
    def test_finite_differences(self, options, make_model):
        """L and the action in every parameter, with x_0 held fixed."""
        network = {"hidden_size": 3, "num_frequencies": 2, "step_dim": 2}
        model = make_model(2, network=network, **options)
        observation, noise = draw(model, (2,))
        start = model.initial_latent(noise[:, 0])
        names = [name for name, _ in model.named_parameters()]

        class Wrapped(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.model = model

            def forward(self):
                mean, std = model.prior()
                first = ((start - mean) / std)[:, None]
                chain = model.sample(observation, torch.cat([first, noise[:, 1:]], 1))
                return model.log_prob(observation, chain).log_prob, model.squash(
                    chain.latents[:, -1]
                )

        wrapped = Wrapped()

        def outputs(*values):
            named = {f"model.{name}": v for name, v in zip(names, values, strict=True)}
            return functional_call(wrapped, named, ())

        values = [p.detach().clone().requires_grad_() for p in model.parameters()]
        assert torch.autograd.gradcheck(outputs, values, eps=1e-6, atol=1e-6, rtol=1e-5)

    def test_every_parameter_gets_a_gradient(self, make_model):
        model = make_model(**OPTIONS["everything"])
        observation, noise = draw(model)
        model.log_prob(observation, model.sample(observation, noise)).log_prob.sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


class TestLogProb:
    @with_options
    def test_forward_density_is_that_of_the_noise(self, options, make_model):
        """Sampling and scoring use the same density: no clamp, no other scale in between."""
        model = make_model(**options)
        observation, noise = draw(model)
        chain = model.sample(observation, noise)
        loc, scale = model.score(observation, chain.latents)
        log_prob = DenoisingPath(loc, scale).log_prob(chain.latents)
        expected = (
            D.Normal(0 * scale, 1 + 0 * scale).log_prob(noise[:, 1:]).sum((-2, -1))
            - scale.log().sum()
        )
        assert_close(log_prob, expected, 1e-9)

    @with_options
    def test_pieces_add_up(self, options, make_model):
        model = make_model(**options)
        observation, noise = draw(model)
        pieces = model.log_prob(observation, model.sample(observation, noise))
        assert_close(pieces.log_prob, pieces.running + pieces.terminal)
        assert_close(pieces.running, -(pieces.log_weight + pieces.log_det))


class TestSquash:
    @pytest.mark.parametrize("box", [{}, BOX, {"low": -3.0, "high": 0.5}], ids=str)
    def test_log_det_is_the_log_jacobian(self, box, make_model):
        model = make_model(**box)
        latent = torch.linspace(-5, 5, 22, dtype=torch.float64).reshape(11, A)
        jacobian = torch.func.vmap(torch.func.jacrev(model.squash))(latent)
        assert_close(model.log_det(latent), torch.logdet(jacobian), 1e-9)
        assert not (jacobian - torch.diag_embed(jacobian.diagonal(dim1=1, dim2=2))).any()

    def test_maps_to_the_box(self, make_model):
        model = make_model(**BOX)
        low, high = BOX["low"].double(), BOX["high"].double()
        infinite = torch.full((A,), math.inf, dtype=torch.float64)
        assert_close(model.squash(-infinite), low)
        assert_close(model.squash(infinite), high)
        assert_close(model.squash(0 * torch.ones(A).double()), (low + high) / 2)
        assert_close(
            model.squash(torch.full((A,), 0.5).double()),
            (low + high) / 2 + (high - low) / 2 * math.tanh(0.5),
        )

    @given(
        low=st.floats(-1e6, 1e6, width=32),
        size=st.floats(2.0**-10, 1e6, width=32),
        latent=st.floats(allow_nan=False, width=32),
    )
    def test_stays_in_the_closed_box_in_single_precision(self, low, size, latent):
        low = torch.tensor([low], dtype=torch.float32)
        high = low + size
        if not (low < high).all():
            return
        model = DenoisingModel(torch.nn.Identity(), 1, low=low, high=high, dtype=torch.float32)
        for x in (latent, -latent, 8.5, -8.5, 9.1, -9.1, 1e30, -1e30):
            action = model.squash(torch.tensor([x], dtype=torch.float32))
            assert (low <= action).all() and (action <= high).all()

    @pytest.mark.parametrize("low, high", [(-0.1, 0.3), (0.1, 0.7), (-1 / 3, 1e4), (-1.0, 1.0)])
    def test_extreme_latents(self, low, high):
        model = DenoisingModel(torch.nn.Identity(), 1, low=low, high=high)
        latent = torch.tensor([0.0, 5.0, 9.0, 20.0, 1e3, 1e10, 1e38])[:, None]
        latent = torch.cat([latent, -latent]).requires_grad_()
        action = model.squash(latent)
        assert (action >= model.low).all() and (action <= model.high).all()
        log_det = model.log_det(latent)
        assert log_det.isfinite().all()
        (gradient,) = torch.autograd.grad(log_det.sum(), latent)
        assert_close(gradient, -2 * latent.tanh().detach(), 1e-5)
        assert_close(
            log_det[4], torch.tensor(2 * (math.log(2) - 1e3) + math.log((high - low) / 2)), 1e-4
        )

    @pytest.mark.parametrize("low, high", [(-1e39, 1e39), (1.0, 1.0 + 1e-9)])
    def test_bounds_that_single_precision_cannot_hold(self, low, high):
        with pytest.raises(ValueError, match="box"):
            DenoisingModel(torch.nn.Identity(), 1, low=low, high=high, dtype=torch.float32)

    def test_widest_box(self):
        limit = torch.finfo(torch.float32).max
        model = DenoisingModel(torch.nn.Identity(), 1, low=-limit, high=limit, dtype=torch.float32)
        latent = torch.tensor([[0.0], [0.5], [-30.0]])
        assert model.squash(latent).isfinite().all() and model.log_det(latent).isfinite().all()


class TestState:
    @with_options
    def test_round_trip(self, options, make_model):
        source, target = make_model(seed=1, **options), make_model(seed=2, **options)
        observation, noise = draw(source)
        expected = source.sample(observation, noise)
        assert (target.sample(observation, noise).loc - expected.loc).abs().max() > 1e-3
        target.load_state_dict(source.state_dict())
        for a, b in zip(target.sample(observation, noise), expected, strict=True):
            assert torch.equal(a, b)

    @pytest.mark.parametrize("assign", [False, True])
    @pytest.mark.parametrize("boxes", [(BOX, {}), ({}, BOX), (BOX, {"low": -5.0, "high": 5.0})])
    def test_bounds_travel(self, boxes, assign, make_model):
        source, target = (make_model(**box) for box in boxes)
        holder = torch.nn.ModuleList([target])  # as part of a larger module
        state = {f"0.{key}": value for key, value in source.state_dict().items()}
        holder.load_state_dict(state, assign=assign)
        latent = torch.randn(7, A, dtype=torch.float64)
        assert torch.equal(target.squash(latent), source.squash(latent))
        assert torch.equal(target.log_det(latent), source.log_det(latent))

    @pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
    def test_copies(self, clone, make_model):
        model = make_model(**OPTIONS["everything"])
        other = clone(model)
        observation, noise = draw(model)
        expected = model.sample(observation, noise).latents
        assert torch.equal(other.sample(observation, noise).latents, expected)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert torch.equal(model.sample(observation, noise).latents, expected)
        # The copy still follows the bounds it loads.
        other.load_state_dict(
            make_model(**{**OPTIONS["everything"], "low": -1.0, "high": 1.0}).state_dict()
        )
        latent = torch.randn(7, A, dtype=torch.float64)
        assert torch.equal(other.squash(latent), latent.tanh())

    def test_bounds_do_not_alias_the_arguments(self):
        low = torch.full((A,), -2.0)
        model = DenoisingModel(torch.nn.Identity(), A, low=low)
        low.fill_(-9.0)
        assert torch.equal(model.low, torch.full((A,), -2.0))


class TestErrors:
    @pytest.mark.parametrize(
        "kwargs, message",
        [
            ({"action_dim": 0}, "at least 1, got 0 and 8"),
            ({"num_steps": 0}, "at least 1, got 2 and 0"),
            ({"friction": "matrix"}, "'per_dim' or 'scalar', got 'matrix'"),
            ({"init_std": 0.0}, "init_std must be positive, got 0.0"),
            ({"init_std": math.nan}, "init_std must be positive, got nan"),
            ({"step_sizes": StepSizes(5)}, "step_sizes are for 5 steps, the chain has 8"),
            ({"high": math.inf}, "must be bounded, got high=inf"),
            ({"low": torch.tensor([0.0, -math.inf])}, r"must be bounded, got low=\[0.0, -inf\]"),
            ({"low": math.nan}, "must be bounded, got low=nan"),
            ({"low": 1.0}, "low < high, got low=1.0, high=1.0"),
            ({"low": torch.tensor([0.0, 2.0])}, r"low < high, got low=\[0.0, 2.0\]"),
            ({"low": torch.zeros(3)}, r"low must be a scalar or have shape \[2\], got \(3,\)"),
            ({"high": torch.ones(1, 2)}, r"high must be a scalar or have shape \[2\]"),
        ],
    )
    def test_construction(self, kwargs, message):
        with pytest.raises(ValueError, match=message):
            DenoisingModel(ScoreNetwork(A, O, hidden_size=4), **({"action_dim": A} | kwargs))

    @pytest.mark.parametrize("shape", [(5, N, A), (4, N + 1, A), (5, N + 1, 1), (N + 1, A)])
    def test_noise_of_another_shape(self, shape, make_model):
        with pytest.raises(ValueError, match=r"noise must have shape \(5, 5, 2\), got"):
            make_model().sample(torch.zeros(5, O).double(), torch.zeros(shape).double())

    def test_observation_of_another_size(self, make_model):
        model = make_model()
        for method in (model.sample, model.sample_deterministic, model.sample_detached):
            with pytest.raises(ValueError, match="size 3, got 4"):
                method(torch.zeros(5, O + 1).double())


def trapezoid(values: torch.Tensor, grid: torch.Tensor, dim: int = -1) -> torch.Tensor:
    return torch.trapezoid(values, grid, dim=dim)


@pytest.fixture(scope="module")
def grid():
    return torch.linspace(-14, 14, 561, dtype=torch.float64)


@pytest.fixture(scope="module")
def observation():
    return torch.tensor([0.3, -1.2, 0.8], dtype=torch.float64)


@pytest.fixture(
    scope="module", params=[False, True], ids=["uncontrolled_backward", "learned_backward"]
)
def backward(request):
    return request.param


def log_prior(latent: torch.Tensor) -> torch.Tensor:
    return -0.5 * (latent / 2.5).square() - math.log(2.5 * (2 * math.pi) ** 0.5)


class TestDensityInOneDimension:
    """The surrogate against the true density of the action, by quadrature.

    With forward kernels F and backward kernels B, ``exp(L)`` is ``p_0 prod F / prod B`` over the
    Jacobian. Hence (1) its average over x_0..x_{N-1} drawn backwards from x_N is pi(a) exactly, and
    (2) ``E[L | a] = log pi(a) + KL(P(x_0.. | x_N) || prod B)``, which is at least log pi(a).
    """

    BOX = {"low": -0.5, "high": 2.0}  # noqa: RUF012

    def model(self, make_model, num_steps, backward):
        network = {"hidden_size": 16, "norm": "none", "activation": "tanh"}
        return make_model(
            num_steps, action_dim=1, network=network, backward=backward, seed=3, **self.BOX
        ).requires_grad_(False)

    @staticmethod
    def kernels(model, observation, grid, n):
        """log F_n(y | x) and log B_n(x | y), on the grid, [x, y]."""
        eta, std = model.kernel_coefficients()
        step = torch.full(grid.shape, float(n), dtype=torch.float64)
        tiled, x = observation.expand(len(grid), -1), grid[:, None]
        forward = x + eta[n] * (-x / 2.5**2 + model.score_network(x, tiled, step))
        back = -x / 2.5**2
        if model.backward_network is not None:
            back = back + model.backward_network(x, tiled, step + 1)
        log_forward = D.Normal(forward, std[n]).log_prob(grid)
        log_backward = D.Normal((x + eta[n] * back).T, std[n]).log_prob(x)
        return log_forward, log_backward

    @staticmethod
    def log_jacobian(latent, box=BOX):
        """log da/dx, by another formula than the library's."""
        return -2 * latent.cosh().log() + math.log((box["high"] - box["low"]) / 2)

    def joint(self, model, observation, grid):
        """exp(L), B and the density of x_1 on all pairs [x_0, x_1], for one step."""
        x0, x1 = torch.meshgrid(grid, grid, indexing="ij")
        latents = torch.stack([x0, x1], -1)[..., None]
        tiled = observation.expand(*latents.shape[:2], -1)
        loc, scale = model.score(tiled, latents)
        log_prob = model.log_prob(tiled, DenoisingChain(latents, loc, scale)).log_prob
        log_forward, log_backward = self.kernels(model, observation, grid, 0)
        prior = log_prior(grid)
        joint = (prior[:, None] + log_forward).exp()
        return log_prob, log_backward, joint

    def test_one_step(self, backward, observation, grid, make_model):
        model = self.model(make_model, 1, backward)
        log_prob, log_backward, joint = self.joint(model, observation, grid)
        density = trapezoid(joint, grid, dim=0)  # of x_1
        log_jacobian = self.log_jacobian(grid)
        assert trapezoid(density, grid).item() == pytest.approx(1, abs=1e-6)

        # exp(L) B |da/dx| is the joint of (x_0, x_1): a density, whose x_0 marginal is the prior.
        weighted = (log_prob + log_backward + log_jacobian).exp()
        total = trapezoid(trapezoid(weighted, grid), grid)
        assert total.item() == pytest.approx(1, abs=1e-6)
        assert_close(weighted, joint)
        inner = (grid.abs() < 6).nonzero().squeeze()
        assert_close(trapezoid(weighted, grid)[inner], log_prior(grid).exp()[inner], 1e-9)

        # (1) The backward average of exp(L) is the density of the action.
        average = trapezoid((log_prob + log_backward).exp(), grid, dim=0)
        action_density = density / log_jacobian.exp()
        assert_close(average[inner], action_density[inner], 1e-9)
        action = model.squash(grid[:, None]).squeeze(-1)
        assert trapezoid(average, action).item() == pytest.approx(1, abs=1e-2)

        # (2) E[L | a] exceeds log pi(a) by the KL from the posterior of x_0 to B.
        posterior = joint / density
        gap = trapezoid(posterior * (posterior.log() - log_backward), grid, dim=0)
        expected = trapezoid(posterior * log_prob, grid, dim=0)
        assert_close(expected[inner], (action_density.log() + gap)[inner], 1e-8)
        assert (gap[inner] > 0).all() and gap[inner].max() > 1e-2

    def propagate(self, model, observation, grid):
        """Density of x_N, and E[log p_0 + sum log F - log B] over paths, by quadrature."""
        density = log_prior(grid).exp()
        expectation = trapezoid(density * density.log(), grid)
        for n in range(model.num_steps):
            log_forward, log_backward = self.kernels(model, observation, grid, n)
            joint = density[:, None] * log_forward.exp()
            ratio = log_forward - log_backward
            expectation = expectation + trapezoid(trapezoid(joint * ratio, grid), grid)
            density = trapezoid(joint, grid, dim=0)
        return density, expectation

    def test_eight_steps(self, backward, observation, grid, make_model):
        model = self.model(make_model, 8, backward)
        density, expectation = self.propagate(model, observation, grid)
        assert trapezoid(density, grid).item() == pytest.approx(1, abs=1e-6)
        log_jacobian = trapezoid(density * self.log_jacobian(grid), grid)
        expected_surrogate = (expectation - log_jacobian).item()
        negative_entropy = (trapezoid(density * density.log(), grid) - log_jacobian).item()
        gap = expected_surrogate - negative_entropy
        assert gap > 0.01  # E[L] >= E[log pi], strictly for a control that is not the backward one

        # The library's chains have that expectation, and that density of the last latent.
        count = 20_000
        tiled = observation.expand(count, -1)
        noise = torch.randn(count, 9, 1, dtype=torch.float64)
        chain = model.sample(tiled, noise)
        log_prob = model.log_prob(tiled, chain).log_prob
        error = log_prob.std().item() / count**0.5
        assert error < gap / 5  # sharp enough to tell L from log pi
        assert abs(log_prob.mean().item() - expected_surrogate) < 5 * error
        cdf = torch.cumulative_trapezoid(density, grid)
        last = chain.latents[:, -1, 0].sort().values
        empirical = torch.searchsorted(last, grid[1:], right=True) / count
        assert (empirical - cdf).abs().max() < 1.95 / count**0.5  # Kolmogorov-Smirnov, p = 1e-3

    def test_backward_average_is_the_density_of_eight_steps(
        self, backward, observation, grid, make_model
    ):
        """(1) for a whole chain: importance sampling from the backward kernels."""
        model = self.model(make_model, 8, backward)
        density, _ = self.propagate(model, observation, grid)
        index = torch.tensor([(grid - end).abs().argmin() for end in (-2.0, 0.5, 3.0)])
        log_density = density[index].log() - self.log_jacobian(grid[index])
        shape = (4_000, 3)
        tiled = observation.expand(*shape, -1)
        latents = torch.zeros(*shape, 9, 1, dtype=torch.float64)
        latents[..., -1, 0] = grid[index]
        _, scale = model.kernel_coefficients()
        for n in reversed(range(8)):
            mean = model.backward_mean(tiled, latents)[..., n, :]
            latents[..., n, :] = mean + scale[n] * torch.randn(*shape, 1, dtype=torch.float64)
        loc, scale = model.score(tiled, latents)
        log_prob = model.log_prob(tiled, DenoisingChain(latents, loc, scale)).log_prob
        weights = (log_prob - log_density).exp()
        error = weights.std(0) / shape[0] ** 0.5
        assert (error < 0.06).all()
        assert ((weights.mean(0) - 1).abs() < 5 * error).all()

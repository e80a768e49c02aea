"""The HL-Gauss support and critic."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torchrl.testing import get_default_devices

from torchrl_trudi.modules import HLGaussCritic, HLGaussSupport

F64 = {"dtype": torch.float64}


def manual_probs(value: float, vmin: float, vmax: float, bins: int, ratio=0.75, eps=0.0):
    """Targets from the error function, one bin at a time."""
    width = (vmax - vmin) / (bins - 1)
    value = min(max(value, vmin), vmax)
    scaled = [
        math.erf((vmin - width / 2 + i * width - value) / (2**0.5 * ratio * width + eps))
        for i in range(bins + 1)
    ]
    total = scaled[-1] - scaled[0] + eps
    return torch.tensor([(b - a) / total for a, b in pairwise(scaled)], **F64)


class TestSupport:
    @pytest.mark.parametrize("device", get_default_devices())
    @pytest.mark.parametrize("value", [-3.0, -1.0, -0.97, 0.0, 0.123, 1.9, 2.0, 50.0])
    @pytest.mark.parametrize("ratio", [0.75, 2.0])
    def test_probs(self, value, ratio, device):
        support = HLGaussSupport(-1.0, 2.0, 21, sigma_ratio=ratio, device=device, **F64)
        probs = support.probs(torch.tensor([value], device=device, **F64))
        expected = manual_probs(value, -1.0, 2.0, 21, ratio)
        torch.testing.assert_close(probs[0].cpu(), expected, atol=1e-14, rtol=1e-12)

    def test_published_constants(self):
        support = HLGaussSupport(-10.0, 10.0, **F64)
        width = 20 / 150
        assert support.num_bins == 151 and support.sigma == pytest.approx(0.75 * width)
        assert support.centers[0] == -10 and support.centers[-1] == 10
        assert support.edges[0].item() == pytest.approx(-10 - width / 2)
        assert support.edges[-1].item() == pytest.approx(10 + width / 2)
        torch.testing.assert_close((support.edges[1:] + support.edges[:-1]) / 2, support.centers)

    @pytest.mark.parametrize("value", [-1.0, 0.3, 5.0])
    def test_eps_is_the_published_guard(self, value):
        support = HLGaussSupport(-1.0, 2.0, 21, eps=1e-3, **F64)
        probs = support.probs(torch.tensor(value, **F64))
        expected = manual_probs(value, -1.0, 2.0, 21, eps=1e-3)
        torch.testing.assert_close(probs, expected, atol=1e-14, rtol=1e-11)
        assert probs.sum() < 1 - 1e-4

    @given(
        vmin=st.floats(-1e3, 1e3),
        size=st.floats(1e-2, 1e3),
        bins=st.integers(2, 200),
        position=st.floats(-1.0, 2.0),
    )
    def test_a_distribution_near_its_value(self, vmin, size, bins, position):
        support = HLGaussSupport(vmin, vmin + size, bins, **F64)
        value = torch.tensor([vmin + position * size], **F64)
        probs = support.probs(value)
        assert (probs >= 0).all()
        torch.testing.assert_close(probs.sum(-1), torch.ones(1, **F64), atol=1e-9, rtol=0)
        width = size / (bins - 1)
        clipped = value.clamp(support.vmin, support.vmax)
        mean = support.value(probs.log())
        assert (mean - clipped).abs() < 0.5 * width  # truncation at the ends of the support
        inside = ((clipped - support.vmin) > 6 * width) & ((support.vmax - clipped) > 6 * width)
        if inside:
            assert (mean - clipped).abs() < 1e-4 * width

    def test_single_precision_sums_to_one(self):
        support = HLGaussSupport(0.0, 150.0)
        probs = support.probs(torch.linspace(-10, 160, 1001))
        assert probs.dtype == torch.float32 and (probs >= 0).all()
        torch.testing.assert_close(probs.sum(-1), torch.ones(1001), atol=1e-5, rtol=0)

    def test_out_of_range_is_clipped(self):
        support = HLGaussSupport(-1.0, 2.0, 21, **F64)
        outside = support.probs(torch.tensor([-1e9, 1e9, -math.inf, math.inf], **F64))
        ends = support.probs(torch.tensor([-1.0, 2.0, -1.0, 2.0], **F64))
        assert torch.equal(outside, ends)

    def test_clip_fraction(self):
        support = HLGaussSupport(-1.0, 2.0, 21)
        values = torch.tensor([[-1.0, 2.0], [-1.1, 2.1], [5.0, 0.0]])
        assert support.clip_fraction(values).item() == pytest.approx(0.5)
        assert support.clip_fraction(values[:1]) == 0

    def test_value_is_the_mean(self):
        support = HLGaussSupport(-1.0, 2.0, 4, **F64)  # centres -1, 0, 1, 2
        probs = torch.tensor([[0.1, 0.2, 0.3, 0.4], [1.0, 0.0, 0.0, 0.0]], **F64)
        value = support.value(probs.log() + 7.0)  # a shift of all logits changes nothing
        torch.testing.assert_close(value, torch.tensor([1.0, -1.0], **F64))

    @pytest.mark.parametrize("batch", [(), (5,), (2, 3)])
    def test_cross_entropy(self, batch):
        support = HLGaussSupport(-1.0, 2.0, 21, **F64)
        logits = torch.randn(*batch, 21, **F64)
        value = torch.rand(batch, **F64) * 4 - 1.5
        loss = support.cross_entropy(logits, value)
        assert loss.shape == batch
        rows = zip(loss.reshape(-1), logits.reshape(-1, 21), value.reshape(-1), strict=True)
        for one, row, y in rows:
            log_normaliser = math.log(sum(math.exp(v) for v in row.tolist()))
            target = manual_probs(y.item(), -1.0, 2.0, 21)
            expected = -sum(
                p * (v - log_normaliser) for p, v in zip(target.tolist(), row.tolist(), strict=True)
            )
            assert one.item() == pytest.approx(expected, rel=1e-10)
        torch.testing.assert_close(
            loss,
            F.cross_entropy(
                logits.reshape(-1, 21), support.probs(value).reshape(-1, 21), reduction="none"
            ).reshape(batch),
        )

    def test_cross_entropy_gradient_vanishes_at_the_target(self):
        support = HLGaussSupport(-1.0, 2.0, 21, **F64)
        value = torch.tensor([0.3, 1.0], **F64)
        logits = support.probs(value).log().requires_grad_()
        (gradient,) = torch.autograd.grad(support.cross_entropy(logits, value).sum(), logits)
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-12, rtol=0)
        logits = torch.randn(2, 21, **F64, requires_grad=True)
        (gradient,) = torch.autograd.grad(support.cross_entropy(logits, value).sum(), logits)
        torch.testing.assert_close(gradient, logits.softmax(-1) - support.probs(value))

    @pytest.mark.parametrize(
        "args, kwargs, message",
        [
            ((1.0, 1.0), {}, "finite vmin < vmax, got 1.0 and 1.0"),
            ((2.0, 1.0), {}, "finite vmin < vmax"),
            ((0.0, math.inf), {}, "finite vmin < vmax"),
            ((math.nan, 1.0), {}, "finite vmin < vmax"),
            ((0.0, 1.0, 1), {}, "num_bins must be at least 2, got 1"),
            ((0.0, 1.0), {"sigma_ratio": 0.0}, "sigma_ratio must be positive, got 0.0"),
        ],
    )
    def test_errors(self, args, kwargs, message):
        with pytest.raises(ValueError, match=message):
            HLGaussSupport(*args, **kwargs)


def make_critic(randomize, **kwargs):
    kwargs = {"hidden_size": 8, "num_bins": 21, **F64} | kwargs
    return randomize(HLGaussCritic(5, -1.0, 3.0, **kwargs), 0.1)


class TestCritic:
    @pytest.mark.parametrize("device", get_default_devices())
    def test_written_out(self, device, randomize):
        critic = make_critic(randomize, device=device)
        state = critic.state_dict()
        observation = torch.randn(4, 3, device=device, **F64)
        action = torch.randn(4, 2, device=device, **F64)

        def two_layers(x, part, first):
            x = F.linear(x, state[f"{part}.{first}.0.weight"], state[f"{part}.{first}.0.bias"])
            mean_square = x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps
            x = x / mean_square.sqrt() * state[f"{part}.{first}.1.weight"]
            x = x * torch.sigmoid(x)
            return F.linear(
                x, state[f"{part}.{first + 1}.weight"], state[f"{part}.{first + 1}.bias"]
            )

        value, logits, embedding, prediction = critic(observation, action)
        expected = two_layers(torch.cat([observation, action], -1), "encoder", 0)
        torch.testing.assert_close(embedding, expected)
        hidden = expected * torch.sigmoid(expected)
        torch.testing.assert_close(prediction, two_layers(hidden, "predictor", 1))
        expected = two_layers(hidden, "head", 1) + 40.9 * state["prior_logits"]
        torch.testing.assert_close(logits, expected)
        centers = torch.linspace(-1.0, 3.0, 21, device=device, **F64)
        torch.testing.assert_close(value, (expected.softmax(-1) * centers).sum(-1, keepdim=True))

    @pytest.mark.parametrize("vmin, vmax", [(-10.0, 10.0), (-5.0, 25.0), (-250.0, 100.0)])
    def test_a_fresh_critic_predicts_about_zero(self, vmin, vmax):
        critic = HLGaussCritic(5, vmin, vmax, hidden_size=64)
        value = critic(torch.randn(64, 5))[0]
        assert value.abs().max() < 0.5 * (vmax - vmin) / 150
        torch.testing.assert_close(
            critic.prior_logits.detach().double(),
            manual_probs(0.0, vmin, vmax, 151),
            atol=1e-5,
            rtol=0,
        )
        assert critic.prior_logits.requires_grad

    def test_without_predictor(self, randomize):
        critic = make_critic(randomize, predict_embedding=False)
        assert len(critic(torch.randn(4, 5, **F64))) == 3
        assert not any("predictor" in name for name in critic.state_dict())

    @pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
    @pytest.mark.parametrize("num_layers", [1, 2, 4])
    def test_shapes(self, batch, num_layers, randomize):
        critic = make_critic(randomize, num_layers=num_layers)
        value, logits, embedding, prediction = critic(torch.randn(*batch, 5, **F64))
        assert value.shape == (*batch, 1) and logits.shape == (*batch, 21)
        assert embedding.shape == prediction.shape == (*batch, 8)
        linears = [m for m in critic.modules() if isinstance(m, torch.nn.Linear)]
        assert len(linears) == 3 * num_layers

    def test_options(self, randomize):
        critic = make_critic(randomize, norm="layer", activation="relu", support_eps=1e-6)
        kinds = {type(m) for m in critic.modules()}
        assert torch.nn.LayerNorm in kinds and torch.nn.ReLU in kinds
        assert torch.nn.RMSNorm not in kinds and torch.nn.SiLU not in kinds
        assert critic.support.eps == 1e-6

    def test_every_parameter_gets_a_gradient(self, randomize):
        critic = make_critic(randomize)
        value, logits, _, prediction = critic(torch.randn(4, 5, **F64))
        target = torch.tensor([0.1, 0.5, 1.0, 2.0], **F64)
        loss = critic.support.cross_entropy(logits, target).mean() + prediction.square().mean()
        (loss + value.mean()).backward()
        for name, parameter in critic.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name

    def test_the_action_gradient_is_that_of_the_value(self, randomize):
        critic = make_critic(randomize)
        observation = torch.randn(4, 3, **F64)
        action = torch.randn(4, 2, **F64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda a: critic(observation, a)[0], action)

    def test_state_dict_round_trip(self, randomize):
        source, target = (
            make_critic(randomize),
            HLGaussCritic(5, -1.0, 3.0, hidden_size=8, num_bins=21, **F64),
        )
        target.load_state_dict(source.state_dict())
        x = torch.randn(4, 5, **F64)
        for a, b in zip(source(x), target(x), strict=True):
            assert torch.equal(a, b)

    @pytest.mark.parametrize(
        "args, kwargs, message",
        [
            ((0, 0.0, 1.0), {}, "in_dim must be at least 1, got 0"),
            ((5, 0.0, 1.0), {"hidden_size": 0}, "hidden_size must be at least 1"),
            ((5, 0.0, 1.0), {"num_layers": 0}, "num_layers must be at least 1"),
            ((5, 1.0, 0.0), {}, "vmin < vmax"),
            ((5, 0.0, 1.0), {"norm": "group"}, "Unknown norm 'group'"),
            ((5, 0.0, 1.0), {"activation": "sigmoid"}, "Unknown activation 'sigmoid'"),
        ],
    )
    def test_errors(self, args, kwargs, message):
        with pytest.raises(ValueError, match=message):
            HLGaussCritic(*args, **kwargs)

    def test_wrong_input_size(self, randomize):
        with pytest.raises(ValueError, match=r"summed size 5, got \[\(4, 3\), \(4, 3\)\]"):
            make_critic(randomize)(torch.zeros(4, 3, **F64), torch.zeros(4, 3, **F64))

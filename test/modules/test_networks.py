"""The score network against a plain MLP on the concatenated input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchrl.testing import get_default_devices

from torchrl_trudi.modules import ScoreNetwork, StepEmbedding
from torchrl_trudi.modules.networks import ACTIVATIONS

A, O = 2, 3  # noqa: E741
FUNCTIONS = {
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)),
    "silu": lambda x: x * torch.sigmoid(x),
    "relu": lambda x: x.clamp_min(0),
    "tanh": torch.tanh,
    "elu": lambda x: torch.where(x > 0, x, torch.expm1(x)),
    "mish": lambda x: x * torch.tanh(torch.log1p(x.exp())),
}


def norm(x: torch.Tensor, name: str, weight: torch.Tensor, bias: torch.Tensor | None):
    if name == "layer":
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias
    eps = torch.finfo(x.dtype).eps
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def plain_mlp(state, latent, observation, step, *, num_layers, norm_name, activation):
    """The network rebuilt from the state dict alone, on one concatenated input."""
    act = FUNCTIONS[activation]
    frequencies = torch.linspace(0.1, 100.0, len(state["step_embedding.phase"]), dtype=latent.dtype)
    angle = frequencies.to(latent) * step[..., None] + state["step_embedding.phase"]
    time = torch.cat([angle.sin(), angle.cos()], -1)
    time = time @ state["step_embedding.mlp.0.weight"].T + state["step_embedding.mlp.0.bias"]
    time = FUNCTIONS["gelu"](time)
    time = time @ state["step_embedding.mlp.2.weight"].T + state["step_embedding.mlp.2.bias"]
    x = torch.cat([latent, observation, time], -1)
    x = act(x @ state["input.weight"].T + state["input.bias"])
    for layer in range(num_layers - 2):
        linear, normed = f"hidden.{1 + 3 * layer}", f"hidden.{2 + 3 * layer}"
        x = x @ state[f"{linear}.weight"].T + state[f"{linear}.bias"]
        if norm_name != "none":
            x = norm(x, norm_name, state[f"{normed}.weight"], state.get(f"{normed}.bias"))
        x = act(x)
    return x @ state["output.weight"].T + state["output.bias"]


def make(randomize, **kwargs) -> ScoreNetwork:
    kwargs = {
        "hidden_size": 8,
        "num_frequencies": 5,
        "step_dim": 4,
        "dtype": torch.float64,
    } | kwargs
    return randomize(ScoreNetwork(A, O, **kwargs))


def inputs(batch=(5,), dtype=torch.float64, device=None):
    factory = {"dtype": dtype, "device": device}
    return (
        torch.randn(*batch, A, **factory),
        torch.randn(*batch, O, **factory),
        torch.randint(0, 8, batch, device=device).to(dtype),
    )


class TestScoreNetwork:
    @pytest.mark.parametrize("device", get_default_devices())
    @pytest.mark.parametrize("num_layers", [2, 3, 5])
    @pytest.mark.parametrize("norm_name", ["layer", "rms", "none"])
    def test_equals_the_plain_mlp(self, num_layers, norm_name, device, randomize):
        net = make(randomize, num_layers=num_layers, norm=norm_name, device=device)
        args = inputs(device=device)
        state = dict(net.named_parameters())
        expected = plain_mlp(
            state, *args, num_layers=num_layers, norm_name=norm_name, activation="gelu"
        )
        out = net(*args)
        torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
        assert out.std() > 0.1  # not a comparison of zeros
        weight = torch.randn_like(out)
        names, parameters = zip(*state.items(), strict=True)
        actual = torch.autograd.grad((out * weight).sum(), parameters)
        expected = torch.autograd.grad((expected * weight).sum(), parameters)
        for name, a, b in zip(names, actual, expected, strict=True):
            torch.testing.assert_close(
                a, b, atol=1e-11, rtol=1e-11, msg=lambda m, n=name: f"{n} {m}"
            )

    @pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
    def test_activations(self, activation, randomize):
        net = make(randomize, activation=activation)
        args = inputs()
        expected = plain_mlp(
            dict(net.named_parameters()),
            *args,
            num_layers=3,
            norm_name="layer",
            activation=activation,
        )
        torch.testing.assert_close(net(*args), expected, atol=1e-12, rtol=1e-12)

    def test_cached_projections(self, randomize):
        """One observation projection serves all steps, one step projection all samples."""
        net = make(randomize)
        latent, observation, _ = inputs((6,))
        steps = torch.arange(4, dtype=torch.float64)
        observation_part, step_part = net.project_observation(observation), net.project_steps(steps)
        chain = torch.randn(6, 4, A, dtype=torch.float64)
        together = net.forward_projected(chain, observation_part[:, None], step_part)
        for n in range(4):
            one = net(chain[:, n], observation, steps[n])
            torch.testing.assert_close(together[:, n], one, atol=1e-13, rtol=1e-12)
            cached = net.forward_projected(latent, observation_part, step_part[n])
            torch.testing.assert_close(cached, net(latent, observation, steps[n]))

    def test_large_batches(self, randomize):
        """The product with a padded output layer, and its gradient."""
        net = make(randomize)
        args = inputs((130,))
        target = torch.randn(130, A, dtype=torch.float64)
        whole = net(*args)
        rows = torch.cat([net(*(arg[i : i + 1] for arg in args)) for i in range(130)])
        torch.testing.assert_close(whole, rows, atol=1e-13, rtol=1e-12)
        grads = [
            torch.autograd.grad((out * target).sum(), list(net.parameters()))
            for out in (whole, rows)
        ]
        torch.testing.assert_close(*grads, atol=1e-12, rtol=1e-10)

    @pytest.mark.parametrize("batch", [(), (1,), (5,), (2, 3), (2, 0, 3)])
    def test_batch_shapes(self, batch, randomize):
        net = make(randomize)
        latent, observation, step = inputs(batch)
        out = net(latent, observation, step)
        assert out.shape == (*batch, A)
        rows = zip(latent.reshape(-1, A), observation.reshape(-1, O), step.reshape(-1), strict=True)
        for row, (x, s, n) in zip(out.reshape(-1, A), rows, strict=True):
            torch.testing.assert_close(row, net(x, s, n), atol=1e-13, rtol=1e-12)

    def test_step_is_an_integer_or_a_float(self, randomize):
        net = make(randomize)
        latent, observation, _ = inputs()
        a = net(latent, observation, torch.tensor(3))
        b = net(latent, observation, torch.full((5,), 3.0))
        assert torch.equal(a, net(latent, observation, torch.tensor(3.0, dtype=torch.float64)))
        torch.testing.assert_close(a, b)
        assert (a - net(latent, observation, torch.tensor(4))).abs().max() > 1e-3

    @pytest.mark.parametrize("norm_name", ["layer", "rms", "none"])
    def test_fresh_output_is_almost_zero(self, norm_name):
        net = ScoreNetwork(A, O, norm=norm_name)
        out = net(*inputs((64,), torch.float32))
        assert 0 < out.abs().max() < 1e-6
        assert not net.output.bias.any()

    def test_published_defaults(self):
        net = ScoreNetwork(A, O)
        shapes = {name: tuple(value.shape) for name, value in net.state_dict().items()}
        assert shapes == {
            "step_embedding.phase": (32,),
            "step_embedding.frequencies": (32,),
            "step_embedding.mlp.0.weight": (32, 64),
            "step_embedding.mlp.0.bias": (32,),
            "step_embedding.mlp.2.weight": (16, 32),
            "step_embedding.mlp.2.bias": (16,),
            "input.weight": (512, A + O + 16),
            "input.bias": (512,),
            "hidden.1.weight": (512, 512),
            "hidden.1.bias": (512,),
            "hidden.2.weight": (512,),
            "hidden.2.bias": (512,),
            "output.weight": (A, 512),
            "output.bias": (A,),
        }
        assert net.output_clip == 1e4
        bound = 1e-8 / 512**0.5
        assert 0.9 * bound < net.output.weight.abs().max() <= bound * (1 + 1e-6)

    def test_output_gain(self):
        torch.manual_seed(3)
        plain = ScoreNetwork(A, O, hidden_size=8, output_gain=1.0)
        torch.manual_seed(3)
        scaled = ScoreNetwork(A, O, hidden_size=8, output_gain=0.25)
        torch.testing.assert_close(scaled.output.weight, 0.25 * plain.output.weight)

    def test_output_clip(self, randomize):
        net = make(randomize, output_clip=0.5)
        free = make(randomize, output_clip=None)
        for network in (net, free):
            nn.init.constant_(network.output.bias, 3.0)
            network.output.bias.data[1] = -3.0
            network.output.weight.data.mul_(1e-3)
        args = inputs()
        expected = torch.tensor([0.5, -0.5], dtype=torch.float64).expand(5, A)
        assert torch.equal(net(*args), expected)
        torch.testing.assert_close(free(*args), 6 * expected, atol=0.02, rtol=0)
        net.output.bias.data.fill_(1e9)
        default = make(randomize)
        default.load_state_dict(net.state_dict())
        assert (default(*args) == 1e4).all()

    def test_errors(self, randomize):
        net = make(randomize)
        latent, _, step = inputs()
        with pytest.raises(ValueError, match=r"observations of size 3, got 7 \(shape \(5, 7\)\)"):
            net(latent, torch.zeros(5, 7, dtype=torch.float64), step)
        with pytest.raises(ValueError, match="num_layers must be at least 2, got 1"):
            ScoreNetwork(A, O, num_layers=1)
        for kwargs in ({"action_dim": 0}, {"obs_dim": 0}, {"hidden_size": 0}):
            name = next(iter(kwargs))
            with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
                ScoreNetwork(**({"action_dim": A, "obs_dim": O} | kwargs))
        with pytest.raises(ValueError, match="'batch'.*'layer', 'rms' or 'none'"):
            ScoreNetwork(A, O, norm="batch")
        with pytest.raises(ValueError, match="'swish'.*gelu"):
            ScoreNetwork(A, O, activation="swish")


class TestStepEmbedding:
    def test_features(self, randomize):
        embedding = randomize(StepEmbedding(32, 16, dtype=torch.float64))
        torch.testing.assert_close(
            embedding.frequencies, torch.linspace(0.1, 100.0, 32, dtype=torch.float64)
        )
        angle = 5 * embedding.frequencies + embedding.phase
        features = torch.cat([angle.sin(), angle.cos()])
        first, _, second = embedding.mlp
        hidden = F.gelu(F.linear(features, first.weight, first.bias))
        expected = F.linear(hidden, second.weight, second.bias)
        torch.testing.assert_close(embedding(torch.tensor(5)), expected, atol=1e-12, rtol=1e-12)

    def test_phase_is_learned_from_zero_and_frequencies_are_fixed(self):
        embedding = StepEmbedding()
        assert not embedding.phase.any() and embedding.phase.requires_grad
        assert "frequencies" in dict(embedding.named_buffers())

    def test_neighbouring_steps_differ(self):
        out = StepEmbedding()(torch.arange(8))
        assert out.shape == (8, 16)
        assert torch.pdist(out).min() > 1e-2

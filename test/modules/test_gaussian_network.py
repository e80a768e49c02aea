"""Mean and scale network of the Gaussian policy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchrl_trudi.modules import GaussianNetwork, ScoreNetwork

A, O = 2, 3  # noqa: E741
F64 = {"dtype": torch.float64}


def make(**kwargs) -> GaussianNetwork:
    return GaussianNetwork(A, O, **({"hidden_size": 8} | F64 | kwargs))


@pytest.mark.parametrize("batch", [(), (5,), (2, 3), (130,)], ids=str)
@pytest.mark.parametrize("num_layers", [2, 4])
def test_equals_the_formula(batch, num_layers, randomize):
    """Also where the output layer is padded, which it is from 128 rows on."""
    network = randomize(make(num_layers=num_layers, init_scale=0.7, min_scale=0.1))
    observation = torch.randn(*batch, O, **F64)
    loc, scale = network(observation)
    layers = [module for module in network.modules() if isinstance(module, nn.Linear)]
    norms = [module for module in network.modules() if isinstance(module, nn.LayerNorm)]
    assert (len(layers), len(norms)) == (num_layers, num_layers - 2)
    hidden = nn.functional.gelu(layers[0](observation))
    for layer, norm in zip(layers[1:-1], norms, strict=True):
        hidden = nn.functional.gelu(norm(layer(hidden)))
    out = hidden @ layers[-1].weight.T + layers[-1].bias
    shift = torch.tensor(0.7 - 0.1, **F64).expm1().log()
    torch.testing.assert_close(loc, out[..., :A], rtol=1e-10, atol=1e-12)
    # The shift is a float32 number.
    torch.testing.assert_close(
        scale, (1 + (out[..., A:] + shift).exp()).log() + 0.1, rtol=1e-6, atol=0
    )
    assert (scale > 0.1).all()


def test_a_fresh_policy_is_the_same_everywhere():
    loc, scale = make(init_scale=0.3)(10 * torch.randn(50, O, **F64))
    assert loc.abs().max() < 1e-6
    torch.testing.assert_close(scale, torch.full_like(scale, 0.3), rtol=1e-6, atol=0)


def test_the_scale_depends_on_the_state_and_has_a_floor(randomize):
    network = randomize(make(min_scale=0.2))
    assert network(torch.randn(9, O, **F64))[1].std(0).min() > 1e-3
    with torch.no_grad():
        network.output.bias[A:] = -1e4
    assert (network(torch.randn(9, O, **F64))[1] == 0.2).all()


def test_autocast():
    """The layers answer in the short type, the scale is computed in that of the observation."""
    network = make(dtype=torch.float32, output_gain=1.0)
    observation = torch.randn(50, O)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loc, scale = network(observation)
    assert loc.dtype == scale.dtype == torch.float32
    assert torch.equal(loc, loc.bfloat16().float())
    assert not torch.equal(scale, scale.bfloat16().float())
    torch.testing.assert_close(scale, network(observation)[1], rtol=0.02, atol=0)


def test_shares_its_shape_with_the_score_network():
    """Equal width means equal hidden layers."""
    options = {"num_layers": 4, "hidden_size": 8, "norm": "rms", "activation": "silu"}
    ours, other = GaussianNetwork(A, O, **options), ScoreNetwork(A, O, **options)
    assert str(ours.hidden) == str(other.hidden)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_layers": 1}, "num_layers must be at least 2, got 1"),
        ({"hidden_size": 0}, "hidden_size must be at least 1, got 0"),
        ({"norm": "batch"}, "Unknown norm 'batch'"),
        ({"activation": "gleu"}, "Unknown activation 'gleu'"),
        ({"init_scale": 0.01}, "min_scale < init_scale.*min_scale=0.01 and init_scale=0.01"),
        ({"min_scale": 0.0}, "0 < min_scale.*min_scale=0.0"),
        ({"init_scale": float("inf")}, "finite.*init_scale=inf"),
        ({"init_scale": float("nan")}, "finite.*init_scale=nan"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_observation_of_another_size():
    with pytest.raises(ValueError, match=r"observations of size 3, got 4 \(shape \(5, 4\)\)"):
        make()(torch.randn(5, 4, **F64))

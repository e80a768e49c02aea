"""The control of a chain with its constant parts hoisted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchrl_trudi.modules import ScoreNetwork, _control
from torchrl_trudi.modules._control import ChainControl

ACTION, OBS, STEPS = 2, 3, 4


class Plain(nn.Module):
    """A network without the projections."""

    def __init__(self, network: ScoreNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, latent, observation, step):
        return self.network(latent, observation, step)


@pytest.fixture(params=["projecting", "plain"])
def network(request):
    torch.manual_seed(0)
    net = ScoreNetwork(ACTION, OBS, hidden_size=8, output_gain=1.0, dtype=torch.float64)
    return net if request.param == "projecting" else Plain(net)


def control(network, *batch) -> tuple[ChainControl, torch.Tensor, torch.Tensor]:
    observation = torch.randn(*batch, OBS, dtype=torch.float64)
    steps = torch.arange(STEPS, dtype=torch.float64)
    latents = torch.randn(*batch, STEPS, ACTION, dtype=torch.float64)
    return ChainControl(network, observation, steps), observation, latents


@pytest.mark.parametrize("batch", [(), (5,), (2, 3), (0,)], ids=str)
def test_at_and_along(network, batch):
    hoisted, observation, latents = control(network, *batch)
    along = hoisted.along(latents)
    for n in range(STEPS):
        expected = network(latents[..., n, :], observation, torch.tensor(float(n)))
        torch.testing.assert_close(hoisted.at(latents[..., n, :], n), expected)
        torch.testing.assert_close(along[..., n, :], expected)


def test_some_steps_and_rows(network):
    hoisted, _, latents = control(network, 6)
    whole = hoisted.along(latents)
    torch.testing.assert_close(hoisted.along(latents[:, 1:3], slice(1, 3)), whole[:, 1:3])
    rows = torch.tensor([4, 0, 4])
    torch.testing.assert_close(hoisted.take(rows).along(latents[rows]), whole[rows])
    index = torch.stack([torch.randperm(STEPS)[:2] for _ in range(6)])
    gather = index.unsqueeze(-1).expand(-1, -1, ACTION)
    torch.testing.assert_close(
        hoisted.along(latents.gather(1, gather), index), whole.gather(1, gather)
    )


@pytest.mark.parametrize("indexed", [False, True])
def test_blocks(network, indexed, monkeypatch):
    """A batch that is cut into blocks, and its gradient."""
    hoisted, _, latents = control(network, 7)
    index = torch.stack([torch.randperm(STEPS) for _ in range(7)]) if indexed else slice(None)
    outs, grads, calls = [], [], []
    forward = hoisted._along
    monkeypatch.setattr(
        ChainControl,
        "_along",
        lambda self, *args: (calls.append(1), forward.__func__(self, *args))[1],
    )
    for rows in (2048, 3 * STEPS):
        monkeypatch.setattr(_control, "_BLOCK_ROWS", rows)
        outs.append(hoisted.along(latents, index))
        grads.append(
            torch.autograd.grad(
                outs[-1].square().sum(), list(network.parameters()), retain_graph=True
            )
        )
    assert len(calls) == 1 + 3
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(*grads)


def test_one_observation_for_many_chains(network, monkeypatch):
    """Broadcast, also where the batch is larger than a block."""
    monkeypatch.setattr(_control, "_BLOCK_ROWS", 2 * STEPS)
    hoisted, _, _ = control(network, 1)
    if not hoisted._projects:
        pytest.skip("repeats the observation itself")
    latents = torch.randn(7, STEPS, ACTION, dtype=torch.float64)
    rows = torch.cat([hoisted.along(row.unsqueeze(0)) for row in latents])
    torch.testing.assert_close(hoisted.along(latents), rows)

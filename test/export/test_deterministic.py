"""Deterministic exploration is a function of the observation alone."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import ExplorationType, set_exploration_type

from torchrl_trudi.modules import (
    ChainActor,
    DenoisingModel,
    GaussianModel,
    GaussianNetwork,
    ProjectedModel,
    ScoreNetwork,
)

pytestmark = pytest.mark.export


def make_model(kind, dtype):
    factory = {"hidden_size": 16, "output_gain": 1.0, "dtype": dtype}
    if kind == "gaussian":
        return GaussianModel(GaussianNetwork(2, 3, **factory), 2, dtype=dtype)
    model = DenoisingModel(ScoreNetwork(2, 3, **factory), 2, 4, dtype=dtype)
    return ProjectedModel(model) if kind == "projected" else model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (5, 2)], ids=str)
@pytest.mark.parametrize("kind", ["diffusion", "gaussian", "projected"])
def test_seeds_change_nothing(kind, shape, dtype):
    actor = ChainActor(make_model(kind, dtype))
    observation = torch.randn(*shape, 3, dtype=dtype)
    actions = {}
    for exploration in ("DETERMINISTIC", "RANDOM"):
        for seed in (1, 2):
            torch.manual_seed(seed)
            tensordict = TensorDict({"observation": observation}, shape)
            with torch.no_grad(), set_exploration_type(ExplorationType[exploration]):
                actions[exploration, seed] = actor(tensordict)["action"]
    one, two = actions["DETERMINISTIC", 1], actions["DETERMINISTIC", 2]
    assert one.shape == (*shape, 2) and one.dtype == dtype
    assert torch.equal(one, two)
    assert not torch.equal(actions["RANDOM", 1], actions["RANDOM", 2])

"""Any bounded box as action space, and a clear refusal of every other space."""

from __future__ import annotations

import math
import re

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    Unbounded,
)

from torchrl_trudi.envs import make_env
from torchrl_trudi.modules import (
    DenoisingChain,
    DiffusionActor,
    GaussianActor,
    GaussianNetwork,
    HLGaussCritic,
    HLGaussValueOperator,
    ScoreNetwork,
)
from torchrl_trudi.objectives import TruDiLoss, TruDiPPOLoss
from torchrl_trudi.trainers import ConfigError, validate
from torchrl_trudi.trainers.builders import build_env

OBS, SAMPLES = 2, 10_000
KINDS = ("diffusion", "gaussian")
each_kind = pytest.mark.parametrize("kind", KINDS)


def make_actor(kind, spec, dtype=torch.float32, width=4.0, **kwargs):
    """A policy that reaches both ends of its box."""
    action_dim = spec.shape[-1]
    sizes = {"hidden_size": 8, "output_gain": 1.0, "dtype": dtype}
    if kind == "gaussian":
        network = GaussianNetwork(action_dim, OBS, init_scale=width, **sizes)
        return GaussianActor(action_dim, network=network, spec=spec, dtype=dtype, **kwargs)
    network = ScoreNetwork(action_dim, OBS, **sizes)
    return DiffusionActor(
        action_dim, score_network=network, init_std=width, spec=spec, dtype=dtype, **kwargs
    )


def states(*batch, dtype=torch.float32) -> TensorDict:
    return TensorDict({"observation": torch.randn(*batch, OBS, dtype=dtype)}, batch)


def bounded(low, high, dtype) -> Bounded:
    low, high = (torch.tensor(bound, dtype=dtype) for bound in (low, high))
    return Bounded(low, high, dtype=dtype)


BOXES = {
    "asymmetric": ([0.1, -7.0, -3.0], [0.3, -6.9, 11.0]),
    # Neither is a number of float32, so that a rounded bound lies outside.
    "small-and-large": ([-1e-3, 0.0, -1e4 / 3], [1e-3, 1e-3 / 7, 1e4]),
    "far-from-zero": ([1e4 + 0.1, -1e4 - 0.1], [1e4 + 0.3, -1e4 + 0.1]),
}


@each_kind
@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spec_dtype", [torch.float32, torch.float64])
def test_every_sample_is_in_the_spec(kind, box, dtype, spec_dtype):
    low, high = BOXES[box]
    spec = bounded(low, high, spec_dtype)
    actor = make_actor(kind, spec, dtype, width=10.0)
    action = actor(states(SAMPLES, dtype=dtype))["action"]
    assert action.dtype == spec_dtype
    assert spec.expand(SAMPLES, len(low)).is_in(action)
    # And no part of the box is out of reach: the bounds themselves are met.
    width = spec.space.high - spec.space.low
    ulp = torch.finfo(torch.float32).eps * spec.space.high.abs().maximum(spec.space.low.abs())
    assert (action.amin(0) - spec.space.low <= 1e-2 * width + ulp).all()
    assert (spec.space.high - action.amax(0) <= 1e-2 * width + ulp).all()


@each_kind
def test_the_spec_of_a_batched_env(kind):
    low, high = torch.tensor([-1e-3, 2.0]), torch.tensor([1e-3, 1e4])
    spec = Bounded(low.expand(5, 2), high.expand(5, 2))
    actor = make_actor(kind, Composite(action=spec, shape=(5,)).get("action"))
    assert spec.is_in(actor(states(5))["action"])
    rows = Bounded(torch.arange(5.0)[:, None], 10 * torch.ones(5, 1))
    with pytest.raises(ValueError, match="must be the same for all rows of a batched spec"):
        make_actor(kind, rows)


REFUSED = {
    "Categorical": Categorical(3, shape=(1,)),
    "MultiCategorical": MultiCategorical([3, 2]),
    "OneHot": OneHot(3),
    "MultiOneHot": MultiOneHot([2, 3]),
    "Binary": Binary(3),
    "UnboundedContinuous": Unbounded((2,)),
    "BoundedDiscrete": Bounded(0, 5, (2,), dtype=torch.int64),
    # Below, above, and in one dimension.
    "BoundedContinuous": Bounded(torch.tensor([0.0, 0.0]), torch.tensor([1.0, math.inf])),
    "BoundedContinuous(": Bounded(torch.tensor([-math.inf]), torch.tensor([1.0])),
    "unbounded: BoundedContinuous": Bounded(torch.tensor([-math.inf]), torch.tensor([math.inf])),
}


@each_kind
@pytest.mark.parametrize("name", REFUSED)
def test_other_spaces_are_refused_by_name(kind, name):
    spec = REFUSED[name]
    for given in (spec, Composite(action=spec, shape=spec.shape[:-1])):
        with pytest.raises(NotImplementedError, match=rf"spec.*{re.escape(name)}"):
            cls = DiffusionActor if kind == "diffusion" else GaussianActor
            cls(spec.shape[-1], OBS, spec=given)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Discrete(3), r"Discrete\(3\); a Box"),
        (spaces.MultiDiscrete([2, 3]), r"MultiDiscrete\(\[2 3\]\); a Box"),
        (spaces.MultiBinary(2), r"MultiBinary\(2\); a Box"),
        (spaces.Box(np.zeros(2, np.float32), np.array([1.0, np.inf], np.float32)), "is unbounded"),
        (spaces.Box(-1.0, 1.0, (2, 3)), r"of shape \(2, 3\); a vector is needed"),
        (spaces.Box(-1.0, 1.0, ()), r"of shape \(\); a vector is needed"),
    ],
)
def test_a_task_with_such_a_space_is_refused(space, message):
    class Task(gymnasium.Env):
        action_space = space
        observation_space = spaces.Box(-1.0, 1.0, (2,))

    gymnasium.register("TestSpace-v0", Task)
    try:
        with pytest.raises(ValueError, match=f"the action space of 'TestSpace-v0' .*{message}"):
            make_env("TestSpace-v0", backend="gymnasium")
    finally:
        del gymnasium.registry["TestSpace-v0"]


@pytest.mark.filterwarnings("ignore:.*runs as vectorised Gymnasium")
def test_the_trainer_says_so_in_one_line():
    config = validate({"env": {"name": "CartPole-v1", "num_envs": 2}, "device": "cpu"})
    with pytest.raises(ConfigError) as error:
        build_env(config)
    (line,) = str(error.value).splitlines()
    assert line.startswith("env: the action space of 'CartPole-v1' is Discrete(2); a Box action")


# -- the density ---------------------------------------------------------------------------


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (0.1, 0.3), (-1e-3, 2e-3), (-1e4, 3e4)])
def test_the_density_of_a_gaussian_policy_integrates_to_one(low, high):
    """Over the box of one dimension, in the units of the action."""
    spec = bounded([low], [high], torch.float64)
    model = make_actor("gaussian", spec, torch.float64, width=0.7).module
    latent = torch.linspace(-9, 9, 20_001, dtype=torch.float64)[:, None]
    observation = torch.randn(1, OBS, dtype=torch.float64).expand(len(latent), OBS)
    loc, scale = model.kernel(observation)
    latents = torch.stack([torch.zeros_like(latent), latent], -2)
    density = model.log_prob(observation, DenoisingChain(latents, loc, scale)).log_prob.exp()
    action = model.squash(latent).squeeze(-1)
    assert torch.trapezoid(density, action).item() == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (0.1, 0.3), (-1e-3, 2e-3), (-1e4, 3e4)])
def test_the_surrogate_of_a_diffusion_policy_is_normalised(low, high):
    r"""``E[exp(-L)]`` over its paths is the size of the box.

    ``p_0 prod F exp(-L) = prod B |det|``; the backward kernels integrate to one over all latents but the
    last, and ``|det|`` over the last to the size of the box.
    """
    spec = bounded([low], [high], torch.float64)
    actor = make_actor("diffusion", spec, torch.float64, width=2.5)
    observation = torch.randn(1, OBS, dtype=torch.float64).expand(100_000, OBS)
    with torch.no_grad():
        _, _, log_prob = actor.rsample(TensorDict({"observation": observation}, [100_000]))
    size = (-log_prob.log_prob).exp() / (high - low)
    error = size.std() / math.sqrt(len(size))
    assert error < 0.02
    assert abs(size.mean() - 1) < 4 * error


@each_kind
def test_units_shift_the_log_prob_by_their_logarithm(kind):
    """The same noise in two boxes: the affine map's Jacobian, dimension by dimension."""
    low, high = [-1e-3, 2.0, -1e4], [3e-3, 2.5, 1e4]
    boxes = [([-1.0] * 3, [1.0] * 3), (low, high)]
    log_probs, actions = [], []
    noise = torch.randn(7, 9 if kind == "diffusion" else 2, 3, dtype=torch.float64)
    observation = states(7, dtype=torch.float64)
    for box in boxes:
        torch.manual_seed(0)
        actor = make_actor(kind, bounded(*box, torch.float64), torch.float64)
        action, _, log_prob = actor.rsample(observation, noise)
        actions.append(action)
        log_probs.append(log_prob.log_prob)
    low, high = (torch.tensor(bound, dtype=torch.float64) for bound in (low, high))
    torch.testing.assert_close(actions[1], low + (high - low) * (actions[0] + 1) / 2)
    shift = ((high - low) / 2).log().sum()
    torch.testing.assert_close(log_probs[1], log_probs[0] - shift)


# -- losses --------------------------------------------------------------------------------

RECORD = {"return_chain": True, "return_dist_params": True, "return_path_log_prob": True}


@each_kind
def test_a_critic_takes_actions_of_another_type(kind):
    """A float64 action space and a float32 policy, through an update."""
    spec = bounded([0.1, -1e-3], [0.3, 1e4], torch.float64)
    actor = make_actor(kind, spec, **RECORD)
    critic = HLGaussValueOperator(HLGaussCritic(OBS + 2, -1.0, 1.0, hidden_size=8))
    data = actor(states(4, 5))
    done = torch.zeros(4, 5, 1, dtype=torch.bool)
    following = {"reward": torch.ones(4, 5, 1), "done": done, "terminated": done.clone()}
    data["next"] = TensorDict({"observation": data["observation"], **following}, [4, 5])
    for reuse_actions in (False, True):
        loss = TruDiLoss(actor, critic)
        loss.make_value_estimator(reuse_actions=reuse_actions)
        losses = loss(data.detach().clone())
        assert sum(v for k, v in losses.items() if k.startswith("loss_")).dtype == torch.float32


@each_kind
@pytest.mark.parametrize("objective", ["pathwise", "surrogate"])
def test_saturation_is_a_count(kind, objective):
    spec = bounded([0.1, -1e-3], [0.3, 1e4], torch.float64)
    actor = make_actor(kind, spec, torch.float64, **RECORD)
    data = actor(states(300, dtype=torch.float64)).detach()
    noise = torch.randn(300, 9 if kind == "diffusion" else 2, 2, dtype=torch.float64)
    if objective == "pathwise":
        action = actor.rsample(data, noise)[0].detach()
        critic = HLGaussCritic(OBS + 2, -1.0, 1.0, hidden_size=8, dtype=torch.float64)
        out = TruDiLoss(actor, HLGaussValueOperator(critic)).actor_loss(data, noise=noise)
    else:
        action = data["action"]
        data["advantage"] = torch.randn(300, 1, dtype=torch.float64)
        out = TruDiPPOLoss(actor).actor_loss(data)
    low, high = spec.space.low, spec.space.high
    near = 0.01 * (high - low)
    count = ((action - low < near) | (high - action < near)).sum().item()
    assert 0 < count < action.numel()
    assert out["saturation_fraction"].item() == pytest.approx(count / action.numel(), rel=1e-12)

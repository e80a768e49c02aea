"""The evidence bound of final latents and the gap of the surrogate, against quadrature in one dimension."""

from __future__ import annotations

import pytest
import torch
from objectives._parts import (
    ACTION,
    DTYPE,
    OBS,
    STEPS,
    assert_all_close,
    draw_noise,
    gradients,
    kernel,
    make_actor,
    make_batch,
    make_critic,
    make_gaussian,
    make_states,
    mean_step,
    normal_log_prob,
    nudge,
)
from tensordict import TensorDict
from torch import nn

from torchrl_trudi.modules import (
    ChainActor,
    DiffusionActor,
    ProjectedModel,
    ScoreNetwork,
    StepSizes,
)
from torchrl_trudi.objectives import TrajectoryKLProjection, TruDiLoss, path_elbo, surrogate_gap
from torchrl_trudi.objectives import elbo as elbo_module
from torchrl_trudi.objectives import trudi as trudi_module

pytestmark = pytest.mark.family

GRID = torch.linspace(-20.0, 20.0, 2001, dtype=DTYPE).unsqueeze(-1)


class Bimodal(nn.Module):
    """A control that pulls to the nearer of two modes: the chain run backwards is not the prior's."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(gain, dtype=DTYPE))

    def forward(self, latent, observation, step):
        return self.gain * (2 * (2 * latent).tanh() - latent)


def one_dimensional(num_steps: int, network: nn.Module | None = None) -> DiffusionActor:
    torch.manual_seed(0)
    return DiffusionActor(
        1,
        score_network=Bimodal() if network is None else network,
        num_steps=num_steps,
        return_chain=True,
        dtype=DTYPE,
    )


@torch.no_grad()
def exact_log_density(actor, observation, final) -> torch.Tensor:
    """``log p(x_N | s)`` of one state, by propagating the density on a grid; ``final`` is ``[*, 1]``."""
    model, width = actor.module, GRID[1, 0] - GRID[0, 0]
    density = normal_log_prob(GRID, torch.zeros(1, dtype=DTYPE), model.prior()[1]).exp()
    states = observation.expand(len(GRID), -1)
    for n in range(model.num_steps):
        _, scale = kernel(model, n)
        mean = mean_step(model, states, GRID, n)
        goals = GRID if n < model.num_steps - 1 else final.reshape(-1, 1)
        step = torch.distributions.Normal(mean.T, scale).log_prob(goals).exp()
        density = step @ density * width
    return density.log().reshape(final.shape[:-1])


@torch.no_grad()
def exact_gap(actor, observation, count: int = 20_000) -> tuple[float, float]:
    """Mean of ``L - log p`` on the policy's chains, and its standard error."""
    data = TensorDict({"observation": observation.expand(count, -1)}, [count])
    _, chain, log_prob = actor.rsample(data)
    # Interpolated: the error is of the order of the grid's spacing squared, 4e-4.
    table, final = exact_log_density(actor, observation, GRID), chain.latents[:, -1, 0]
    place = (final - GRID[0, 0]) / (GRID[1, 0] - GRID[0, 0])
    below = place.floor().long()
    exact = table[below].lerp(table[below + 1], place - below) - log_prob.log_det
    gap = log_prob.log_prob - exact
    return gap.mean().item(), gap.std().item() / count**0.5


def test_the_quadrature_is_exact():
    """It integrates to one, and without a control it is that of a linear Gaussian chain."""
    state = torch.zeros(1, OBS, dtype=DTYPE)
    actor = one_dimensional(2)
    width = GRID[1, 0] - GRID[0, 0]
    total = exact_log_density(actor, state, GRID).exp().sum() * width
    torch.testing.assert_close(total, torch.tensor(1.0, dtype=DTYPE), rtol=0, atol=1e-9)
    actor = one_dimensional(2, Bimodal(0.0))
    variance = torch.tensor(2.5**2, dtype=DTYPE)
    for n in range(2):
        eta, scale = kernel(actor.module, n)
        variance = (1 - eta / 2.5**2) ** 2 * variance + scale**2
    points = torch.linspace(-5, 5, 7, dtype=DTYPE).unsqueeze(-1)
    expected = normal_log_prob(points, torch.zeros(1, dtype=DTYPE), variance.sqrt())
    torch.testing.assert_close(exact_log_density(actor, state, points), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("num_steps", [1, 2])
def test_estimates_against_quadrature(num_steps):
    actor = one_dimensional(num_steps)
    state = torch.zeros(1, OBS, dtype=DTYPE)
    data = actor(TensorDict({"observation": state.expand(24, -1)}, [24])).detach()
    final = data["denoising", "chain"][..., -1, :]
    exact = exact_log_density(actor, state, final) - actor.module.log_det(final)
    few, many = (surrogate_gap(actor, data, num_paths=m) for m in (4, 2000))
    # The importance-weighted estimate converges to the log-probability.
    torch.testing.assert_close(many.log_prob, exact, rtol=0, atol=0.25)
    assert (many.log_prob - exact).abs().mean() < 0.04
    assert (few.log_prob - exact).abs().mean() > (many.log_prob - exact).abs().mean()
    torch.testing.assert_close(many.gap, many.surrogate - many.log_prob)
    # The bound is one at every point, with one mean over its paths.
    assert (many.elbo < exact + 0.02).all() and (many.elbo < exact - 0.05).any()
    # On the policy's own chains the surrogate is on the other side.
    gap, error = exact_gap(actor, state)
    assert gap > 5 * error > 0


def test_the_gap_is_the_divergence_of_the_paths():
    """With one step: ``E[L] - E[log p] = KL(posterior || B)``, by quadrature over both latents."""
    actor = one_dimensional(1)
    model, state = actor.module, torch.zeros(1, OBS, dtype=DTYPE)
    x = torch.linspace(-14, 14, 701, dtype=DTYPE).unsqueeze(-1)
    width = x[1, 0] - x[0, 0]
    prior = normal_log_prob(x, torch.zeros(1, dtype=DTYPE), model.prior()[1])
    eta, scale = (part.detach() for part in kernel(model, 0))
    with torch.no_grad():
        mean = mean_step(model, state.expand(len(x), -1), x, 0)
    joint = prior + torch.distributions.Normal(mean.T, scale).log_prob(x)  # [x_1, x_0]
    marginal = (joint.exp() * width).sum(-1, keepdim=True).log()
    backward = torch.distributions.Normal(x - eta * x / 2.5**2, scale).log_prob(x.T)
    divergence = (joint.exp() * (joint - marginal - backward)).sum() * width**2
    gap, error = exact_gap(actor, state, 50_000)
    assert abs(gap - divergence.item()) < 4 * error + 1e-3


def test_the_gap_shrinks_where_the_bound_is_optimised():
    """Self-distillation on the policy's own samples, without any other objective."""
    torch.manual_seed(0)
    network = ScoreNetwork(1, OBS, hidden_size=16, output_gain=1.0, dtype=DTYPE)
    actor = one_dimensional(2, network)
    with torch.no_grad():
        network.output.weight.mul_(8)
    state = torch.zeros(1, OBS, dtype=DTYPE)
    before, _ = exact_gap(actor, state)
    data = TensorDict({"observation": state.expand(256, -1)}, [256])
    optim = torch.optim.Adam(actor.parameters(), lr=3e-3)
    for _ in range(120):
        with torch.no_grad():
            final = actor(data)["denoising", "chain"][..., -1, :]
        loss = -path_elbo(actor.module, data["observation"], final).elbo.mean()
        optim.zero_grad()
        loss.backward()
        optim.step()
    after, error = exact_gap(actor, state)
    assert before > 0.1 and -4 * error < after < 0.5 * before


# -- the formula -------------------------------------------------------------------


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("learn_prior", [False, True])
def test_the_formula_step_by_step(backward, learn_prior):
    torch.manual_seed(0)
    network = ScoreNetwork(ACTION, OBS, hidden_size=8, output_gain=1.0, dtype=DTYPE)
    actor = make_actor(backward_network=network if backward else None, learn_prior=learn_prior)
    nudge(actor)
    model = actor.module
    data = make_batch(actor, 2, 5)
    observation, final = data["observation"], data["denoising", "chain"][..., -1, :]
    noise = draw_noise(2, 5)[..., 1:, :]
    mean_0, std_0 = model.prior()
    x, latents, log_b = final, [final], 0.0
    for n in reversed(range(STEPS)):
        eta, scale = kernel(model, n)
        drift = (mean_0 - x) / std_0**2
        if backward:
            drift = drift + network(x, observation, torch.tensor(n + 1))
        mean = x + eta * drift
        before = mean + scale * noise[..., n, :]
        log_b = log_b + normal_log_prob(before, mean, scale)
        x = before
        latents.insert(0, x)
    log_f = 0.0
    for n in range(STEPS):
        eta, scale = kernel(model, n)
        control = model.score_network(latents[n], observation, torch.tensor(n))
        mean = latents[n] + eta * ((mean_0 - latents[n]) / std_0**2 + control)
        log_f = log_f + normal_log_prob(latents[n + 1], mean, scale)
    prior = normal_log_prob(x, mean_0, std_0)
    bound = path_elbo(model, observation, final, noise)
    expected = (log_f - log_b + prior, log_f, log_b, prior)
    assert_all_close(bound, expected)
    # The same number as the surrogate of that chain, without the squashing.
    chain, log_prob = model.sample_backward(observation, final, noise)
    torch.testing.assert_close(chain, torch.stack(latents, -2))
    torch.testing.assert_close(log_prob, log_b)
    assert_all_close(
        gradients(bound.elbo.sum(), model.parameters()),
        gradients(expected[0].sum(), model.parameters()),
    )


def test_the_network_learns_through_the_forward_steps_alone():
    actor = make_actor()
    nudge(actor)
    data = make_batch(actor, 6)
    observation, final = data["observation"], data["denoising", "chain"][..., -1, :]
    noise = draw_noise(6)[..., 1:, :]
    network = list(actor.module.score_network.parameters())
    bound = path_elbo(actor.module, observation, final, noise)
    assert_all_close(gradients(bound.elbo.sum(), network), gradients(bound.forward.sum(), network))
    # The noise scale has its part in the entropy of the backward draw.
    friction = [actor.module.friction_raw]
    assert gradients(bound.backward.sum(), friction)[0].abs().min() > 0


def test_gradient_of_friction_and_step_sizes():
    actor = make_actor(step_sizes=StepSizes(STEPS, learn="per_step", dtype=DTYPE))
    nudge(actor)
    model, data = actor.module, make_batch(actor, 3)
    final, noise = data["denoising", "chain"][..., -1, :], draw_noise(3)[..., 1:, :]
    names = [n for n, _ in model.named_parameters() if not n.startswith("score_network")]
    params = dict(model.named_parameters())
    assert len(names) == 2

    def call(*values):
        given = {**params, **dict(zip(names, values, strict=True))}
        with TensorDict(given).unflatten_keys(".").to_module(model):
            return path_elbo(model, data["observation"], final, noise).elbo

    values = tuple(params[n].detach().clone().requires_grad_() for n in names)
    assert torch.autograd.gradcheck(call, values)


# -- the loss ----------------------------------------------------------------------


def make_loss(actor, *, region=None, **kwargs) -> TruDiLoss:
    trust_region = TrajectoryKLProjection(actor, **(region or {}))
    return TruDiLoss(actor, make_critic(), trajectory_kl=trust_region, **kwargs)


@pytest.mark.parametrize("split", [True, False])
def test_the_loss_adds_the_bound_inside_the_trust_region(split):
    torch.manual_seed(0)
    actor = make_actor()
    data = make_batch(actor, 3, 4)
    nudge(actor, 0.05)
    region = {"eps": 3e-3}
    settings = {"region": region, "reduction": "none", "split_by_gate": split}
    torch.manual_seed(1)
    plain = make_loss(actor, **settings)
    torch.manual_seed(1)
    loss = make_loss(actor, elbo_coeff=0.3, **settings)
    noise, back = draw_noise(3, 4), draw_noise(3, 4)[..., 1:, :]
    base = plain.actor_loss(data, noise=noise)["loss_actor"]
    out = loss.actor_loss(data, noise=noise, elbo_noise=back)
    inside = loss.trajectory_kl.inside(loss.trajectory_kl.path_kl(data))
    assert 0 < out["gate_fraction"] < 1
    final = data["denoising", "chain"][..., -1, :]
    elbo = path_elbo(actor.module, data["observation"], final, back).elbo
    expected = torch.where(inside, base - 0.3 * elbo, base)
    assert_all_close([out["loss_actor"]], [expected])
    assert_all_close(
        gradients(out["loss_actor"].sum(), loss.actor_parameters()),
        gradients(expected.sum(), loss.actor_parameters()),
    )


@pytest.mark.parametrize("gradient", ["pathwise", "adjoint"])
def test_the_replayed_chain_ends_where_the_recorded_one_does(gradient):
    torch.manual_seed(0)
    actor = make_actor(return_noise=True)
    data = make_batch(actor, 6)
    noise, back, outs = draw_noise(6), draw_noise(6)[..., 1:, :], []
    for old_policy in ("recorded", "replayed"):
        for split in (True, False):
            torch.manual_seed(1)
            loss = make_loss(
                actor,
                region={"old_policy": old_policy},
                elbo_coeff=0.3,
                split_by_gate=split,
                actor_gradient=gradient,
            )
            given = data.select(*loss.in_keys, strict=False)
            outs.append(loss.actor_loss(given, noise=noise, elbo_noise=back)["loss_actor"])
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0])


def test_default_makes_no_call(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("The bound was evaluated.")

    for module in (elbo_module, trudi_module):
        monkeypatch.setattr(module, "path_elbo", refuse)
    actor = make_actor()
    data = make_batch(actor, 4)
    torch.manual_seed(1)
    make_loss(actor).actor_loss(data)
    after = torch.randn(3)
    torch.manual_seed(1)
    make_critic(), TrajectoryKLProjection(actor)
    draw_noise(4)
    # No random number more was drawn either.
    assert torch.equal(after, torch.randn(3))
    with pytest.raises(AssertionError, match="evaluated"):
        make_loss(actor, elbo_coeff=0.1).actor_loss(data)


# -- errors ------------------------------------------------------------------------


def test_errors_of_the_loss():
    with pytest.raises(ValueError, match="elbo_coeff"):
        make_loss(make_actor(), elbo_coeff=-1.0)
    with pytest.raises(ValueError, match="GaussianModel"):
        make_loss(make_gaussian(), elbo_coeff=0.1)
    with pytest.raises(ValueError, match="target"):
        make_loss(make_actor(), region={"old_policy": "target"}, elbo_coeff=0.1)
    actor = ChainActor(ProjectedModel(make_actor().module), return_chain=True)
    with pytest.raises(ValueError, match="ProjectedModel"):
        make_loss(actor, region={"mode": "projection"}, elbo_coeff=0.1)


def test_errors_of_the_functions():
    actor = make_actor()
    data = make_batch(actor, 2)
    with pytest.raises(ValueError, match="noise"):
        path_elbo(actor.module, data["observation"], data["action"], draw_noise(2))
    with pytest.raises(ValueError, match="num_paths"):
        surrogate_gap(actor, data, num_paths=0)
    with pytest.raises(ValueError, match="GaussianModel"):
        surrogate_gap(make_gaussian(), data)
    with pytest.raises(ValueError, match="empty"):
        surrogate_gap(actor, data[:0])


def test_a_chain_is_drawn_where_none_is_recorded():
    actor, states = make_actor(), make_states(3)
    torch.manual_seed(1)
    fresh = surrogate_gap(actor, states, 2)
    torch.manual_seed(1)
    latents = actor.module.sample(states["observation"]).latents
    recorded = surrogate_gap(actor, states.set(("denoising", "chain"), latents), 2)
    assert_all_close(fresh, recorded)

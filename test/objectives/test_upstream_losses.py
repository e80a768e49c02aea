"""torchrl's own losses take our actors; batched numbers equal a loop over the steps."""

from __future__ import annotations

import pytest
import torch
from objectives._loss_base import losses_of, total
from objectives._parts import (
    DTYPE,
    OBS,
    draw_noise,
    kernel,
    make_actor,
    make_batch,
    make_critic,
    make_gaussian,
    make_states,
    mean_step,
    nudge,
)
from tensordict import TensorDict
from torch.distributions import Normal, kl_divergence
from torchrl.objectives import (
    A2CLoss,
    ClipPPOLoss,
    KLPENPPOLoss,
    PPOLoss,
    ReinforceLoss,
    SoftUpdate,
)

from torchrl_trudi.modules import HLGaussCritic, HLGaussValueOperator
from torchrl_trudi.objectives import TrajectoryKLProjection

B = 6
OPTIONS = [{}, {"delay_actor": True}, {"functional": False}]
PPO = [(loss, options) for loss in (PPOLoss, ClipPPOLoss, KLPENPPOLoss) for options in OPTIONS]
ACTORS = {
    "diffusion per step": lambda: make_actor(event_dims=1),
    "diffusion": lambda: make_actor(event_dims=2),
    "gaussian": lambda: make_gaussian(event_dims=2),
    "gaussian per step": lambda: make_gaussian(event_dims=1),
}


# A2CLoss per step: see test_a2c_per_step.
OTHERS = [
    (loss, options, kind)
    for loss in (A2CLoss, ReinforceLoss)
    for options in OPTIONS[::2]
    for kind in ACTORS
    if loss is ReinforceLoss or "per step" not in kind
]


def named(value) -> str:
    if isinstance(value, str):
        return value
    return getattr(value, "__name__", None) or "-".join(map(str, value)) or "plain"


def make_value() -> HLGaussValueOperator:
    critic = HLGaussCritic(OBS, -2.0, 3.0, num_bins=11, hidden_size=8, dtype=DTYPE)
    return HLGaussValueOperator(critic, in_keys=["observation"])


def make_advantages(actor, *batch):
    data = make_batch(actor, *batch)
    data["advantage"] = torch.randn(*batch, 1, dtype=DTYPE)
    data["value_target"] = torch.randn(*batch, 1, dtype=DTYPE)
    return data


def build(loss_class, actor, **options):
    loss = loss_class(actor, make_value(), **options)
    if loss_class is ReinforceLoss:
        # It does not ask the actor which entry is its sample.
        loss.set_keys(action=actor.tensor_keys.chain)
    return loss


def assert_trains(loss, actor, out) -> None:
    losses = losses_of(out)
    assert len(losses) >= 2 and all(value.isfinite().all() for value in losses.values())
    total(out).backward()
    # Also of a functional loss the parameters are those of the actor.
    grads = [p.grad for p in actor.parameters() if p.grad is not None]
    assert len(grads) > 5 and all(grad.isfinite().all() for grad in grads)
    network = getattr(actor.module, "score_network", None) or actor.module.network
    assert network.output.weight.grad.abs().sum() > 0


@pytest.mark.filterwarnings("ignore:No target network updater")
@pytest.mark.parametrize("kind", ACTORS)
@pytest.mark.parametrize("loss_class, options", PPO, ids=named)
def test_likelihood_ratio_losses(loss_class, options, kind):
    actor = ACTORS[kind]()
    data = make_advantages(actor, B)
    loss = build(loss_class, actor, **options)
    assert loss.tensor_keys.action == actor.tensor_keys.chain
    assert loss.tensor_keys.sample_log_prob == actor.tensor_keys.path_log_prob
    # Of the same batched call the ratio is 1 to the last bit; the actor's own record was made step
    # by step and differs in the rounding.
    recorded = loss(data)
    data[actor.tensor_keys.path_log_prob] = actor.log_prob(data).detach()
    out = loss(data)
    assert out["kl_approx"] == 0
    torch.testing.assert_close(recorded["kl_approx"], out["kl_approx"], rtol=0, atol=1e-12)
    torch.testing.assert_close(out["loss_objective"], -data["advantage"].mean())
    if loss_class is ClipPPOLoss:
        assert out["clip_fraction"] == 0
        assert out["max_ratio"] == out["mean_ratio"] == 1
        # A fraction of the batch, or of each step's.
        torch.testing.assert_close(out["ESS"] * B, torch.full_like(out["ESS"], B))
    if loss_class is KLPENPPOLoss:
        assert out["kl"].abs().max() < 1e-12
    assert_trains(loss, actor, out)


@pytest.mark.parametrize("loss_class, options, kind", OTHERS, ids=named)
def test_policy_gradient_losses(loss_class, options, kind):
    actor = ACTORS[kind]()
    data = make_advantages(actor, B)
    loss = build(loss_class, actor, **options)
    out = loss(data)
    log_prob = actor.log_prob(data).reshape(B, -1)
    key = "loss_objective" if loss_class is A2CLoss else "loss_actor"
    torch.testing.assert_close(out[key], -(log_prob * data["advantage"]).mean())
    assert_trains(loss, actor, out)


@pytest.mark.xfail(strict=True, reason="A2CLoss multiplies every step with every advantage")
def test_a2c_per_step():
    """Tells when A2CLoss takes one log-probability per step, as PPO does."""
    actor = make_gaussian(event_dims=1)
    data = make_advantages(actor, B)
    out = build(A2CLoss, actor)(data)
    expected = -(actor.log_prob(data) * data["advantage"]).mean()
    torch.testing.assert_close(out["loss_objective"], expected)


@pytest.mark.parametrize("event_dims", [1, 2])
def test_delayed_actor_is_the_proximal_policy(event_dims):
    """The clip acts on the ratio to the delayed copy, which follows by an updater of torchrl."""
    actor = make_actor(event_dims=event_dims)
    data = make_advantages(actor, B)
    loss = build(ClipPPOLoss, actor, delay_actor=True, entropy_bonus=False)
    updater = SoftUpdate(loss, eps=0.5)
    proximal = actor.log_prob(data).detach()
    nudge(actor, 0.05)
    moved = actor.log_prob(data).detach()
    expected = (proximal - moved).mean()
    torch.testing.assert_close(loss(data)["kl_approx"], expected, rtol=1e-9, atol=1e-12)
    for _ in range(60):
        updater.step()
    assert loss(data)["kl_approx"].abs() < 1e-9


@pytest.mark.slow
def test_clip_ppo_compiles():
    torch._dynamo.reset()
    actor = make_actor()
    data = make_advantages(actor, B)
    loss = build(ClipPPOLoss, actor, entropy_bonus=False)
    out = torch.compile(loss, fullgraph=True, backend="eager")(data)
    for key, value in losses_of(loss(data)).items():
        torch.testing.assert_close(out[key], value)


@pytest.mark.slow
@pytest.mark.xfail(strict=True, reason="KLPENPPOLoss branches on the value of its KL")
def test_klpen_ppo_compiles():
    """Tells when KLPENPPOLoss can be compiled in one graph."""
    torch._dynamo.reset()
    actor = make_gaussian()
    loss = build(KLPENPPOLoss, actor, entropy_bonus=False)
    torch.compile(loss, fullgraph=True, backend="eager")(make_advantages(actor, B))


def test_clip_ppo_with_the_trust_region():
    """The recipe of docs/upstream.md: the losses of both are added, each with its own gradient."""
    actor = make_actor(event_dims=1)
    data = make_advantages(actor, B)
    ppo = build(ClipPPOLoss, actor, entropy_bonus=False)
    region = TrajectoryKLProjection(actor, mode="lagrangian", eps=1e-3)
    nudge(actor, 0.05)
    both = ppo(data).update(region(data))
    params = list(actor.parameters())

    def gradient(out):
        grads = torch.autograd.grad(total(out), params, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(params, grads, strict=True)]

    for joint, one, other in zip(
        gradient(both), gradient(ppo(data)), gradient(region(data)), strict=True
    ):
        torch.testing.assert_close(joint, one + other, rtol=1e-9, atol=1e-12)
    assert {"loss_objective", "loss_critic", "loss_trajectory_kl", "loss_kl_multiplier"} <= set(
        both.keys()
    )


class TestBatchedEqualsTheLoop:
    """One call for all steps of all states, against torch.distributions step by step."""

    def steps(self, actor, data):
        """The kernels of the actor at the recorded states."""
        chain = data["denoising", "chain"]
        for n in range(actor.num_steps):
            if hasattr(actor.module, "score_network"):
                loc = mean_step(actor.module, data["observation"], chain[..., n, :], n)
                scale = kernel(actor.module, n)[1].expand_as(loc)
            else:
                loc, scale = actor.module.network(data["observation"])
            yield Normal(loc, scale), chain[..., n + 1, :]

    @pytest.mark.parametrize("batch", [(5,), (2, 3)], ids=str)
    @pytest.mark.parametrize("kind", ACTORS)
    def test_path_log_prob_and_kl(self, kind, batch):
        actor = ACTORS[kind]()
        data = make_batch(actor, *batch)
        old = list(self.steps(actor, data))
        nudge(actor, 0.1)
        new = list(self.steps(actor, data))
        log_prob = torch.stack([dist.log_prob(x).sum(-1) for dist, x in new], -1)
        kl = torch.stack(
            [kl_divergence(p, q).sum(-1) for (p, _), (q, _) in zip(old, new, strict=True)], -1
        )
        if actor.event_dims == 2:
            log_prob, kl = log_prob.sum(-1), kl.sum(-1)
        dist, behaviour = actor.get_dist(data), actor.build_dist_from_params(data)
        exact = {"rtol": 1e-12, "atol": 1e-12}
        torch.testing.assert_close(actor.log_prob(data), log_prob, **exact)
        torch.testing.assert_close(dist.log_prob(data["denoising", "chain"]), log_prob, **exact)
        torch.testing.assert_close(kl_divergence(behaviour, dist), kl, **exact)
        region = TrajectoryKLProjection(actor, kl="full")
        torch.testing.assert_close(region.path_kl(data).kl, kl.reshape(*batch, -1).sum(-1), **exact)
        assert kl.min() > 0

    def test_acting_record_equals_the_batched_call(self):
        actor = make_actor(event_dims=1)
        data = make_batch(actor, 5)
        torch.testing.assert_close(
            data["denoising", "path_log_prob"], actor.log_prob(data), rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("kind", ACTORS)
def test_functional_call_over_stacked_parameters(kind):
    """Acting with given noise, distribution and log-probability of several policies at once."""
    actor = ACTORS[kind]()
    data = make_batch(actor, B)
    params = TensorDict.from_module(actor).data
    stack = torch.stack([params.apply(lambda x: x + 0.02 * torch.randn_like(x)) for _ in range(3)])
    states = make_states(B)
    noise = draw_noise(B, num_steps=actor.num_steps)

    def call(params, noise=noise):
        with params.to_module(actor):
            dist = actor.get_dist(data)
            inputs = states.copy()
            if noise is not None:
                inputs["noise"] = noise
            acted = actor(inputs)
            return (
                dist.loc,
                dist.scale.expand_as(dist.loc),
                dist.entropy(),
                actor.log_prob(data),
                acted["action"],
                acted["denoising", "chain"],
                acted["denoising", "log_prob"],
            )

    outs = torch.vmap(call, randomness="error")(stack)
    for k in range(3):
        for out, expected in zip(outs, call(stack[k]), strict=True):
            torch.testing.assert_close(out[k], expected, rtol=1e-12, atol=1e-12)
    # Noise of its own for each policy: equal policies act differently.
    same = torch.stack([params] * 3)
    actions = torch.vmap(lambda params: call(params, None)[4], randomness="different")(same)
    assert not torch.equal(actions[0], actions[1]) and not torch.equal(actions[1], actions[2])


def test_q_function_is_refused_by_name():
    """Upstream's losses want a state value: a Q function has no such output."""
    actor = make_actor()
    loss = ClipPPOLoss(actor, make_critic())
    with pytest.raises(KeyError, match="state_value"):
        loss(make_advantages(actor, B))

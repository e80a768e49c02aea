"""The cheaper forms of the actor's update against the dense one, and adjoint matching."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from objectives._parts import (
    ACTION,
    DTYPE,
    assert_all_close,
    draw_noise,
    gradients,
    linear_critic,
    make_actor,
    make_batch,
    make_critic,
    make_states,
    nudge,
)
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from torchrl_trudi.modules import DiffusionActor, ScoreNetwork
from torchrl_trudi.objectives import TrajectoryKLProjection, TruDiLoss

LOSSES = ("loss_actor", "loss_temperature", "loss_kl_multiplier")


def make_loss(actor, critic=None, *, region=None, **kwargs) -> TruDiLoss:
    projection = TrajectoryKLProjection(actor, **(region or {}))
    critic = make_critic() if critic is None else critic
    return TruDiLoss(actor, critic, trajectory_kl=projection, init_temperature=0.3, **kwargs)


def moved_batch(actor, *batch):
    """A recorded batch, and the actor moved since."""
    data = make_batch(actor, *batch)
    with torch.no_grad():
        nudge(actor, 0.05)
    return data


def all_gradients(loss, out):
    parameters = [*loss.actor_parameters(), *loss.dual_parameters()]
    return gradients(sum(out[key] for key in LOSSES), parameters)


class TestSplitByGate:
    @pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
    @pytest.mark.parametrize("shape", [(12,), (3, 4)], ids=str)
    @pytest.mark.parametrize("bound", ["path", "step"])
    def test_equal_to_the_dense_form(self, share, shape, bound):
        actor = make_actor()
        data, noise = moved_batch(actor, *shape), draw_noise(*shape)
        kl = TrajectoryKLProjection(actor, bound=bound).path_kl(data)
        values = kl.kl if bound == "path" else kl.per_step.max(-1).values * actor.num_steps
        eps = {0.0: 1e-12, 1.0: 1e6}.get(share, values.quantile(share).item())
        critic, outs, grads = make_critic(), [], []
        for split in (True, False):
            region = {"eps": eps, "bound": bound}
            loss = make_loss(actor, critic, region=region, split_by_gate=split)
            outs.append(loss.actor_loss(data, noise=noise))
            grads.append(all_gradients(loss, outs[-1]))
        gate = outs[0]["gate_fraction"].item()
        assert gate == share or 0.0 < gate < 1.0
        assert_all_close(outs[0].values(), (outs[1][key] for key, _ in outs[0].items()))
        assert_all_close(*grads)

    def test_the_same_noise_is_drawn(self):
        actor = make_actor()
        data = moved_batch(actor, 10)
        outs = []
        for split in (True, False):
            torch.manual_seed(3)
            outs.append(make_loss(actor, linear_critic(), split_by_gate=split).actor_loss(data))
        assert_all_close(outs[0].values(), (outs[1][key] for key, _ in outs[0].items()))

    @pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
    def test_each_state_has_a_graph_in_one_branch_only(self, share, monkeypatch):
        actor = make_actor()
        data = moved_batch(actor, 10)
        kl = TrajectoryKLProjection(actor).path_kl(data).kl
        eps = {0.0: 1e-12, 1.0: 1e6}.get(share, kl.median().item() * (1 + 1e-9))
        loss = make_loss(actor, region={"eps": eps})
        sizes = {True: 0, False: 0}
        network = actor.module.score_network
        forward = network.forward_projected

        def count(latent, *parts):
            out = forward(latent, *parts)
            sizes[out.requires_grad] += latent.shape[:-1].numel()
            return out

        monkeypatch.setattr(network, "forward_projected", count)
        per_step = TrajectoryKLProjection(actor).path_kl(data).per_step
        sizes.update({True: 0, False: 0})
        loss.actor_loss(data)
        # One pass with a graph for each state, and without one: the chain of those beyond the
        # bound, and the KL, two steps at a time, until a state is known to be beyond it.
        seen = per_step.cumsum(-1) < eps
        assert actor.num_steps == 3
        assert sizes[True] == 3 * 10
        beyond = 10 - int(seen[:, 2].sum())
        assert sizes[False] == 2 * 10 + int(seen[:, 1].sum()) + 3 * beyond

    @pytest.mark.parametrize("share", [0.0, 0.5])
    def test_entropy_of_some_states_is_unbiased(self, share):
        actor = make_actor()
        data, noise = moved_batch(actor, 12), draw_noise(12)
        kl = TrajectoryKLProjection(actor).path_kl(data).kl
        region = {"eps": {0.0: 1e-12, 0.5: kl.median().item() * (1 + 1e-9)}[share]}
        critic = linear_critic()

        def value(fraction):
            loss = make_loss(actor, critic, region=region, entropy_fraction=fraction)
            return loss.actor_loss(data, noise=noise)

        whole = value(1.0)
        torch.manual_seed(0)
        draws = [value(0.2) for _ in range(300)]
        for key in ("entropy", "loss_temperature"):
            values = torch.stack([out[key] for out in draws]).detach()
            error = values.std() / len(values) ** 0.5
            assert values.std() > 0
            assert (values.mean() - whole[key]).abs() < 4 * error
        for key in ("loss_actor", "loss_kl_multiplier", "kl", "gate_fraction"):
            assert_all_close(*([out[key] for out in pair] for pair in ([whole], draws[:1])))

    @pytest.mark.parametrize("split", [True, False])
    def test_no_states(self, split):
        actor = make_actor()
        loss = make_loss(actor, split_by_gate=split)
        with pytest.raises(ValueError, match=r"batch is empty: its shape is \(0,\)"):
            loss.actor_loss(make_batch(actor, 4)[:0])

    @pytest.mark.parametrize("fraction", [0.0, -0.1, 1.1, float("nan")])
    def test_entropy_of_no_states(self, fraction):
        with pytest.raises(ValueError, match=rf"in \(0, 1\], got {fraction}"):
            make_loss(make_actor(), entropy_fraction=fraction)

    @pytest.mark.parametrize("split", [True, False])
    def test_replayed_equals_recorded(self, split):
        """A batch that holds the noise alone."""
        actor, noise = make_actor(return_noise=True), draw_noise(10)
        data = make_batch(actor, 10)
        replaying = make_loss(
            actor, critic := make_critic(), region={"eps": 1e-3, "old_policy": "replayed"}
        )
        with torch.no_grad():
            nudge(actor, 0.05)
        kl = TrajectoryKLProjection(actor).path_kl(data).kl
        outs, grads = [], []
        for loss in (replaying, make_loss(actor, critic)):
            loss.split_by_gate = split
            loss.trajectory_kl.eps.copy_(kl.median() * (1 + 1e-9))
            batch = data.select(*loss.in_keys, strict=False)
            outs.append(loss.actor_loss(batch, noise=noise))
            grads.append(all_gradients(loss, outs[-1]))
        assert 0 < outs[0]["gate_fraction"] < 1
        assert_all_close(outs[0].values(), (outs[1][key] for key, _ in outs[0].items()))
        assert_all_close(*grads)

    @pytest.mark.parametrize("region", [{"mode": "lagrangian"}, {"old_policy": "target"}], ids=str)
    def test_left_out_elsewhere(self, region):
        assert not make_loss(make_actor(), region=region)._splits_by_gate()
        assert make_loss(make_actor())._splits_by_gate()


class LinearControl(nn.Module):
    """A control that is linear in the latent, with a gain for each step."""

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(num_steps, 1, dtype=DTYPE))

    def forward(self, latent, observation, step):
        return self.gain[step.long()] * latent


class TestAdjoint:
    def test_fixed_point_of_a_linear_quadratic_problem(self):
        """Repeated regression on the target finds the closed-form optimal control (Riccati)."""
        torch.manual_seed(0)
        num_steps, curvature, alpha, std = 5, 0.8, 0.5, 1.5
        control = LinearControl(num_steps)
        actor = DiffusionActor(
            1,
            score_network=control,
            num_steps=num_steps,
            init_std=std,
            learn_friction=False,
            dtype=DTYPE,
        )
        model = actor.module

        def value(observation, action):
            # Undoes the squashing: the terminal cost is quadratic in the latent.
            latent = torch.atanh(action)
            quadratic = 0.5 * curvature * latent.square().sum(-1)
            return -(quadratic + alpha * model.log_det(latent)).unsqueeze(-1)

        critic = TensorDictModule(
            value, in_keys=["observation", "action"], out_keys=["state_action_value"]
        )
        region = TrajectoryKLProjection(actor, mode="none")
        loss = TruDiLoss(
            actor, critic, trajectory_kl=region, init_temperature=alpha, actor_gradient="adjoint"
        )
        states = make_states(40_000, obs=1)
        for _ in range(8):
            with torch.no_grad():
                chain = actor.rsample(states)[1]
            target = loss.adjoint_target(states, chain.latents[:, -1])
            latent = chain.latents[:, :-1]
            control.gain.data[:] = (latent * target).mean(0) / latent.square().mean(0)

        eta = model.kernel_coefficients()[0][:, 0].tolist()
        second, gains = curvature / alpha - 1 / std**2, []
        for size in reversed(eta):
            keep = 1 - size / std**2
            gains.append(-2 * second * keep / (1 + 2 * size * second))
            second = keep**2 * second / (1 + 2 * size * second)
        expected = torch.tensor(gains[::-1], dtype=DTYPE)
        torch.testing.assert_close(control.gain.detach()[:, 0], expected, rtol=0.02, atol=0)

    def test_target_is_the_gradient_of_the_terminal_cost(self):
        actor, critic = make_actor(), linear_critic()
        loss = make_loss(actor, critic, actor_gradient="adjoint")
        states, final = make_states(4), torch.randn(4, ACTION, dtype=DTYPE)
        target = loss.adjoint_target(states, final)
        assert target.shape == (4, actor.num_steps, ACTION)
        assert not target.requires_grad
        # d/dx [log p_0 - log (1 - tanh^2)] - d tanh(x) / alpha, by hand.
        squashed = final.tanh()
        slope = -final / 2.5**2 + 2 * squashed
        slope = slope - critic.module.d * (1 - squashed.square()) / 0.3
        keep = 1 - actor.module.kernel_coefficients()[0].detach() / 2.5**2
        for n in range(actor.num_steps):
            expected = -2 * keep[n + 1 :].prod(0) * slope
            torch.testing.assert_close(target[:, n], expected)

    @pytest.mark.parametrize("mode", ["switch", "none"])
    def test_loss_is_the_path_kl_of_the_residual(self, mode):
        actor = make_actor()
        data, noise = make_batch(actor, 6), draw_noise(6)
        region = {"mode": mode, "eps": 1e6}
        loss = make_loss(actor, linear_critic(), region=region, actor_gradient="adjoint")
        chain = actor.rsample(data, noise)[1]
        target = loss.adjoint_target(data, chain.latents[:, -1])
        model, expected = actor.module, 0.0
        eta = model.kernel_coefficients()[0].detach()
        for n in range(actor.num_steps):
            control = model.score_network(
                chain.latents[:, n].detach(), data["observation"], torch.tensor(n)
            )
            expected = expected + (eta[n] / 4 * (control - target[:, n]).square()).sum(-1)
        out = loss.actor_loss(data, noise=noise)
        torch.testing.assert_close(out["loss_actor"], 0.3 * expected.mean())
        parameters = list(actor.module.score_network.parameters())
        names = {id(p): p for p in loss.actor_parameters()}
        actual = gradients(out["loss_actor"], names.values())
        assert_all_close(
            [g for g in actual if g.abs().max() > 0],
            [g for g in gradients(0.3 * expected.mean(), parameters) if g.abs().max() > 0],
        )

    def test_friction_gets_no_gradient(self):
        actor = make_actor()
        loss = make_loss(actor, region={"mode": "none"}, actor_gradient="adjoint")
        out = loss.actor_loss(make_batch(actor, 4))
        params = loss.actor_network_params
        friction = params.get(("module", "friction_raw"))
        (grad,) = gradients(out["loss_actor"], [friction])
        assert (grad == 0).all()

    def test_some_of_the_steps(self):
        actor = make_actor()
        data, noise = make_batch(actor, 5), draw_noise(5)
        region, critic = {"mode": "none"}, linear_critic()

        def value(num_steps):
            loss = make_loss(
                actor,
                critic,
                region=region,
                actor_gradient="adjoint",
                num_adjoint_steps=num_steps,
            )
            return loss.actor_loss(data, noise=noise)["loss_actor"].detach()

        whole = value(None)
        torch.testing.assert_close(value(actor.num_steps), whole)
        torch.manual_seed(0)
        draws = torch.stack([value(1) for _ in range(400)])
        error = draws.std() / len(draws) ** 0.5
        assert (draws.mean() - whole).abs() < 4 * error
        assert draws.std() > 0

    @pytest.mark.parametrize("bound", ["path", "step"])
    def test_some_of_the_steps_of_the_kl(self, bound):
        actor = make_actor()
        data, noise, critic = moved_batch(actor, 6), draw_noise(6), linear_critic()
        region = {"eps": 1e-9, "bound": bound}

        def value(num_steps, split=True):
            loss = make_loss(
                actor,
                critic,
                region=region,
                actor_gradient="adjoint",
                num_adjoint_steps=num_steps,
                split_by_gate=split,
            )
            out = loss.actor_loss(data, noise=noise).detach()
            assert out["gate_fraction"] == 0
            return out

        whole = value(None, split=False)
        for key, expected in whole.items():
            torch.testing.assert_close(value(actor.num_steps)[key], expected)
        torch.manual_seed(0)
        draws = torch.stack([value(1) for _ in range(400)])
        error = draws["loss_actor"].std() / len(draws) ** 0.5
        assert (draws["loss_actor"].mean() - whole["loss_actor"]).abs() < 4 * error
        # The logged KL and the multiplier's loss are those of all steps.
        for key in ("kl", "kl_per_step", "loss_kl_multiplier"):
            torch.testing.assert_close(draws[key][0], whole[key])

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"actor_gradient": "reinforce"}, "'pathwise' or 'adjoint', got 'reinforce'"),
            ({"num_adjoint_steps": 2}, "needs actor_gradient='adjoint'"),
            ({"actor_gradient": "adjoint", "num_adjoint_steps": 0}, r"in \[1, 3\], got 0"),
            ({"actor_gradient": "adjoint", "num_adjoint_steps": 4}, r"in \[1, 3\], got 4"),
        ],
    )
    def test_bad_options(self, kwargs, message):
        with pytest.raises(ValueError, match=message):
            make_loss(make_actor(), **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("num_adjoint_steps", [None, 2])
def test_adjoint_and_pathwise_reach_the_same_distribution(num_adjoint_steps):
    """A bandit with two equally good actions."""

    def value(observation, action):
        return sum(torch.exp(-((action - best) / 0.2).square()) for best in (-0.5, 0.5))

    critic = TensorDictModule(
        value, in_keys=["observation", "action"], out_keys=["state_action_value"]
    )

    def histogram(seed, **kwargs) -> torch.Tensor:
        """Frequencies of the actions of a trained policy, in 20 bins."""
        torch.manual_seed(seed)
        actor = DiffusionActor(
            1, score_network=ScoreNetwork(1, 1, hidden_size=32), learn_friction=False
        )
        region = TrajectoryKLProjection(actor, mode="none", old_policy="target")
        loss = TruDiLoss(
            actor,
            critic,
            trajectory_kl=region,
            init_temperature=0.25,
            learn_temperature=False,
            **kwargs,
        )
        num_updates = 600 if kwargs else 0
        optim = torch.optim.Adam(loss.actor_parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optim, 600)
        states = TensorDict({"observation": torch.zeros(256, 1)}, [256])
        for _ in range(num_updates):
            optim.zero_grad()
            loss.actor_loss(states)["loss_actor"].backward()
            optim.step()
            schedule.step()
        states = TensorDict({"observation": torch.zeros(20_000, 1)}, [20_000])
        with torch.no_grad():
            action = actor(states)["action"][:, 0]
        return torch.histc(action, 20, -1, 1) / len(action)

    def distance(first, second) -> float:
        """Total variation."""
        return 0.5 * (first - second).abs().sum().item()

    fresh, pathwise = histogram(0), histogram(0, actor_gradient="pathwise")
    adjoint = histogram(1, actor_gradient="adjoint", num_adjoint_steps=num_adjoint_steps)
    assert distance(fresh, pathwise) > 0.2
    assert distance(pathwise, adjoint) < 0.15
    # Which side has more of the mass depends on the seed; without that the two are closer.
    assert distance(*(h + h.flip(0) for h in (pathwise, adjoint))) / 2 < 0.08


def test_value_alone_is_that_of_the_critic():
    critic = make_critic()
    states = make_states(4).set("action", torch.randn(4, ACTION, dtype=DTYPE))
    expected = critic(states.clone())["state_action_value"].squeeze(-1)
    torch.testing.assert_close(critic.value(states), expected)
    assert set(states.keys()) == {"observation", "action"}


def test_naive_form_of_the_benchmark_is_the_same_function():
    """What the benchmark compares with: values and gradients, on the same old path."""
    benchmarks = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, benchmarks)
    try:
        import _naive_learner as naive
    finally:
        sys.path.remove(benchmarks)
    actor = make_actor()
    old_model = copy.deepcopy(actor.module)
    data, noise, old_noise = make_states(9), draw_noise(9), draw_noise(9)
    with torch.no_grad():
        old = naive.sample(old_model, data["observation"], old_noise)
        nudge(actor, 0.05)
    scale = old_model.kernel_coefficients()[1].detach()
    data["denoising"] = TensorDict(
        {
            "chain": torch.stack(old.latents, 1),
            "loc": torch.stack(old.means, 1),
            "scale": scale.expand(9, *scale.shape).clone(),
        },
        [9],
    )
    # Step sizes and frictions as they were, so that both compare kernels of the same widths.
    actor.module.friction_raw.data.copy_(old_model.friction_raw)
    kl = TrajectoryKLProjection(actor).path_kl(data).kl
    loss = make_loss(actor, region={"eps": kl.median().item() * (1 + 1e-9)})
    out = loss.actor_loss(data, noise=noise)
    expected = naive.actor_loss(loss, old_model, data, noise, old_noise)
    assert 0 < out["gate_fraction"] < 1
    torch.testing.assert_close(sum(out[key] for key in LOSSES), expected, rtol=1e-10, atol=1e-10)
    parameters = [*loss.actor_parameters(), *loss.dual_parameters()]
    for ours, theirs in zip(all_gradients(loss, out), gradients(expected, parameters), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)

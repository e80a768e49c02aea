from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objectives._parts import (
    DTYPE,
    OBS,
    STEPS,
    assert_all_close,
    draw_noise,
    gradients,
    kernel,
    literal_kl,
    make_actor,
    make_batch,
    make_states,
    mean_step,
    nudge,
)
from tensordict import TensorDict
from torch import nn
from torchrl.envs import ExplorationType, set_exploration_type
from torchrl.objectives import ClipPPOLoss

from torchrl_trudi.modules import HLGaussCritic, HLGaussValueOperator, StepSizes
from torchrl_trudi.objectives import PathKL, TrajectoryKLProjection


@pytest.fixture
def actor():
    return make_actor()


def between(values) -> float:
    """A bound that half of the values are inside of."""
    return values.detach().sort().values[len(values) // 2 - 1 :][:2].mean().item()


def given_kl(*rows, grad=False) -> PathKL:
    """A divergence of these numbers per state and step."""
    per_step = torch.tensor(rows, dtype=DTYPE, requires_grad=grad)
    return PathKL(per_step, per_step.detach())


class TestRecorded:
    def test_zero_and_ratio_one_right_after_recording(self, actor):
        data = make_batch(actor, 5)
        for kind in ("simplified", "full"):
            kl = TrajectoryKLProjection(actor, kl=kind).path_kl(data)
            assert kl.per_step.shape == (5, STEPS) and kl.kl.shape == (5,)
            # Sampling and scoring multiply the same matrices in another order.
            torch.testing.assert_close(kl.kl, torch.zeros_like(kl.kl), rtol=0, atol=1e-20)
        ratio = (actor.log_prob(data) - data["denoising", "path_log_prob"]).exp()
        torch.testing.assert_close(ratio, torch.ones_like(ratio))

    @pytest.mark.parametrize("kind", ["simplified", "full"])
    def test_positive_after_an_optimiser_step(self, actor, kind):
        data = make_batch(actor, 5)
        optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
        actor.rsample(data)[0].sum().backward()
        optimizer.step()
        assert (TrajectoryKLProjection(actor, kl=kind).path_kl(data).kl > 1e-8).all()

    @pytest.mark.parametrize("kind", ["simplified", "full"])
    def test_equals_a_loop_over_the_steps(self, actor, kind):
        data = make_batch(actor, 4)
        nudge(actor)
        kl = TrajectoryKLProjection(actor, kl=kind).path_kl(data)
        torch.testing.assert_close(kl.per_step, literal_kl(actor, data, kind))
        torch.testing.assert_close(kl.kl, literal_kl(actor, data, kind).sum(-1))
        torch.testing.assert_close(kl.per_step_full, literal_kl(actor, data, "full").detach())
        assert not kl.per_step_full.requires_grad

    def test_gradient_equals_that_of_the_loop(self, actor):
        data = make_batch(actor, 4)
        nudge(actor)
        for kind in ("simplified", "full"):
            kl = TrajectoryKLProjection(actor, kl=kind).path_kl(data)
            expected = gradients(literal_kl(actor, data, kind).sum(), actor.parameters())
            assert_all_close(gradients(kl.kl.sum(), actor.parameters()), expected)

    def test_friction_counts_in_full_only(self, actor):
        """The scale's part: N sum_i [log(r) + 1 / (2 r^2) - 1/2] with the ratio r of the scales."""
        actor.module.score_network.requires_grad_(False)
        actor.module.score_network.output.weight.zero_()
        data = make_batch(actor, 4)
        before = nn.functional.softplus(actor.module.friction_raw.data)
        actor.module.friction_raw.data += torch.tensor([0.5, -0.2], dtype=DTYPE)
        after = nn.functional.softplus(actor.module.friction_raw.data)
        ratio = (before / after).sqrt()
        spread = STEPS * (ratio.log() + 0.5 / ratio**2 - 0.5).sum()
        full = TrajectoryKLProjection(actor, kl="full").path_kl(data).per_step
        chain, loc = data["denoising", "chain"], data["denoising", "loc"]
        moved = []
        for n in range(STEPS):
            _, scale = kernel(actor.module, n)
            mean = mean_step(actor.module, data["observation"], chain[:, n], n)
            moved.append(((mean - loc[:, n]) ** 2 / (2 * scale**2)).sum(-1))
        torch.testing.assert_close(full.sum(-1), spread + torch.stack(moved).sum(0))

    def test_batch_layout(self, actor):
        data = make_batch(actor, 2, 3)
        nudge(actor)
        projection = TrajectoryKLProjection(actor)
        together = projection.path_kl(data)
        assert together.per_step.shape == (2, 3, STEPS)
        flat = projection.path_kl(data.reshape(-1))
        torch.testing.assert_close(together.per_step.reshape(-1, STEPS), flat.per_step)

    @pytest.mark.parametrize("role", ["chain", "loc", "scale"])
    def test_missing_entries_are_named_with_advice(self, actor, role):
        data = make_batch(actor, 3)
        del data["denoising", role]
        with pytest.raises(KeyError, match=rf"recorded {role} .*return_chain=True.*target"):
            TrajectoryKLProjection(actor)(data)

    @settings(max_examples=15, deadline=None, derandomize=True)
    @given(st.integers(0, 10_000), st.floats(0, 1))
    def test_never_negative(self, seed, scale):
        torch.manual_seed(seed)
        actor = make_actor()
        data = make_batch(actor, 3)
        nudge(actor, scale)
        for kind in ("simplified", "full"):
            assert (TrajectoryKLProjection(actor, kl=kind).path_kl(data).per_step > -1e-12).all()


class TestTarget:
    @pytest.mark.parametrize("kind", ["simplified", "full"])
    def test_equals_recorded_with_the_same_noise(self, actor, kind):
        nudge(actor)
        target = TrajectoryKLProjection(actor, kl=kind, old_policy="target")
        data = make_batch(actor, 4)
        nudge(actor)
        recorded = TrajectoryKLProjection(actor, kl=kind).path_kl(data)
        redrawn = target.path_kl(data.select("observation"), data["noise"].unsqueeze(-3))
        torch.testing.assert_close(redrawn.per_step, recorded.per_step)
        torch.testing.assert_close(redrawn.per_step_full, recorded.per_step_full)
        grads = gradients(recorded.kl.sum(), actor.parameters())
        assert_all_close(gradients(redrawn.kl.sum(), actor.parameters()), grads)

    def test_is_the_mean_over_paths(self, actor):
        projection = TrajectoryKLProjection(actor, old_policy="target", num_paths=3)
        single = TrajectoryKLProjection(actor, old_policy="target")
        nudge(actor)
        states, noise = make_states(4), draw_noise(4, 3)
        together = projection.path_kl(states, noise)
        alone = [single.path_kl(states, noise[:, k : k + 1]) for k in range(3)]
        for i in range(2):
            torch.testing.assert_close(together[i], torch.stack([kl[i] for kl in alone]).mean(0))
        assert (alone[0].kl != alone[1].kl).all()

    def test_fresh_paths_at_every_call(self, actor):
        projection = TrajectoryKLProjection(actor, old_policy="target")
        nudge(actor)
        states = make_states(4)
        assert (projection.path_kl(states).kl != projection.path_kl(states).kl).all()

    def test_reverse_equals_a_loop(self, actor):
        """KL(new || old) along one new path, with gradient through it."""
        old = copy.deepcopy(actor)
        projection = TrajectoryKLProjection(actor, direction="reverse", old_policy="target")
        nudge(actor)
        states, noise = make_states(4), draw_noise(4)
        observation, x, expected = states["observation"], 2.5 * noise[:, 0], []
        for n in range(STEPS):
            _, new_scale = kernel(actor.module, n)
            _, old_scale = kernel(old.module, n)
            new_mean = mean_step(actor.module, observation, x, n)
            old_mean = mean_step(old.module, observation, x, n)
            square = (new_scale**2 + (new_mean - old_mean) ** 2) / (2 * old_scale**2)
            expected.append((torch.log(old_scale / new_scale) + square - 0.5).sum(-1))
            x = new_mean + new_scale * noise[:, n + 1]
        expected = torch.stack(expected, -1)
        kl = projection.path_kl(states, noise)
        torch.testing.assert_close(kl.per_step, expected)
        grads = gradients(expected.sum(), actor.parameters())
        assert_all_close(gradients(kl.kl.sum(), actor.parameters()), grads)

    @pytest.mark.parametrize("direction", ["forward", "reverse"])
    def test_zero_after_an_update_of_the_old_policy(self, actor, direction):
        projection = TrajectoryKLProjection(
            actor, kl="full", direction=direction, old_policy="target"
        )
        nudge(actor)
        states = make_states(4)
        assert (projection.path_kl(states).kl > 1e-6).all()
        projection.update_old_policy()
        kl = projection.path_kl(states).kl
        torch.testing.assert_close(kl, torch.zeros_like(kl), rtol=0, atol=1e-20)

    def test_the_update_copies_buffers(self):
        actor = make_actor(learn_friction=False)
        projection = TrajectoryKLProjection(actor, kl="full", old_policy="target")
        target = projection.target_actor_network_params["module"]
        states = make_states(4)
        for buffer, key in (
            (actor.module.friction_raw, "friction_raw"),
            (actor.module.step_sizes.raw, ("step_sizes", "raw")),
        ):
            buffer.add_(0.5)
            assert not torch.equal(target[key], buffer)
            projection.update_old_policy()
            assert torch.equal(target[key], buffer)
            kl = projection.path_kl(states).kl
            torch.testing.assert_close(kl, torch.zeros_like(kl), rtol=0, atol=1e-20)

    def test_the_copy_is_one(self, actor):
        """The old policy stands still while the current one moves."""
        projection = TrajectoryKLProjection(actor, old_policy="target")
        before = projection.target_actor_network_params.data.clone()
        nudge(actor)
        after = projection.target_actor_network_params.data
        assert (before == after).all()

    def test_learned_step_sizes_are_no_divergence(self):
        """Both kernels use the current ones."""
        sizes = StepSizes(STEPS, learn="shared", dtype=DTYPE)
        actor = make_actor(step_sizes=sizes)
        projection = TrajectoryKLProjection(actor, kl="full", old_policy="target")
        sizes.raw.data.add_(0.5)
        kl = projection.path_kl(make_states(4)).kl
        torch.testing.assert_close(kl, torch.zeros_like(kl), rtol=0, atol=1e-20)

    def test_target_parameters_are_not_trained(self, actor):
        projection = TrajectoryKLProjection(actor, old_policy="target")
        names = [name for name, _ in projection.named_parameters()]
        assert names and not any("target" in name for name in names)
        assert len(names) == len(list(actor.parameters())) + 1
        target = projection.target_actor_network_params
        assert not any(x.requires_grad for x in target.values(True, True))

    def test_gradient_does_not_reach_the_old_policy(self, actor):
        projection = TrajectoryKLProjection(actor, old_policy="target")
        nudge(actor)
        target = projection.target_actor_network_params
        projection.path_kl(make_states(4)).kl.sum().backward()
        assert all(x.grad is None for x in target.values(True, True))
        assert actor.module.score_network.output.weight.grad.abs().sum() > 0

    def test_recorded_mode_has_no_copy(self, actor):
        projection = TrajectoryKLProjection(actor)
        assert not any("target" in key for key in projection.state_dict())
        before = copy.deepcopy(projection.state_dict())
        projection.update_old_policy()
        after = projection.state_dict()
        assert all(torch.equal(after[key], before[key]) for key in before)


class TestSwitch:
    def build(self, actor, **kwargs):
        return TrajectoryKLProjection(actor, eps=0.3, init_multiplier=2.0, **kwargs)

    def test_each_state_carries_one_branch(self, actor):
        objective = torch.tensor([5.0, 7.0, -1.0], dtype=DTYPE, requires_grad=True)
        kl = given_kl([0.1, 0.1, 0.05], [0.2, 0.2, 0.2], [0.0, 0.0, 0.0], grad=True)
        out = self.build(actor).combine(objective, kl)
        torch.testing.assert_close(out, torch.tensor([5.0, 1.2, -1.0], dtype=DTYPE))
        out.mean().backward()
        assert objective.grad.tolist() == pytest.approx([1 / 3, 0, 1 / 3])
        assert kl.per_step.grad.sum(-1).tolist() == pytest.approx([0, 3 * 2 / 3, 0])

    def test_gradient_in_the_parameters(self, actor):
        """J = mean(kl < eps ? o : beta kl) with kl and o written out."""
        data = make_batch(actor, 8)
        nudge(actor)
        literal = literal_kl(actor, data).sum(-1)
        bound = between(literal)
        projection = TrajectoryKLProjection(actor, eps=bound, init_multiplier=2.0)
        action, _, _ = actor.rsample(data, data["noise"])
        objective = (action**2).sum(-1)
        kl = projection.path_kl(data)
        total = projection.combine(objective, kl).mean()
        inside = literal < bound
        assert inside.sum() == 4
        beta = projection.multiplier.item()
        dense = torch.where(inside, objective, beta * literal).mean()
        torch.testing.assert_close(total, dense)
        assert_all_close(gradients(total, actor.parameters()), gradients(dense, actor.parameters()))
        # The same again without where(): sums over the two groups of states.
        split = (objective[inside].sum() + beta * literal[~inside].sum()) / 8
        assert_all_close(gradients(total, actor.parameters()), gradients(split, actor.parameters()))

    def test_the_bound_itself_is_outside(self, actor):
        projection = TrajectoryKLProjection(actor, eps=0.25)
        at, below = [0.125, 0.125, 0.0], [0.125, 0.125 - 1e-12, 0.0]
        assert projection.inside(given_kl(at, below)).tolist() == [False, True]

    def test_bound_per_step(self, actor):
        projection = self.build(actor, bound="step")
        assert projection.multiplier.shape == (STEPS,)
        # eps / N = 0.1: every step must hold, however small the sum.
        kl = given_kl([0.09, 0.09, 0.09], [0.0, 0.11, 0.0], [0.0, 0.0, 0.25], grad=True)
        assert projection.inside(kl).tolist() == [True, False, False]
        projection.log_multiplier.data = torch.tensor([1.0, 2.0, 3.0], dtype=DTYPE).log()
        objective = torch.tensor([5.0, 7.0, 9.0], dtype=DTYPE, requires_grad=True)
        out = projection.combine(objective, kl)
        torch.testing.assert_close(out, torch.tensor([5.0, 0.22, 0.75], dtype=DTYPE))
        out.sum().backward()
        assert objective.grad.tolist() == [1.0, 0.0, 0.0]
        torch.testing.assert_close(
            kl.per_step.grad,
            torch.tensor([[0, 0, 0], [1, 2, 3], [1, 2, 3]], dtype=DTYPE),
        )

    def test_bound_per_step_of_one_step_is_that_of_the_path(self):
        actor = make_actor(num_steps=1)
        data = make_batch(actor, 4)
        nudge(actor)
        path, step = (
            TrajectoryKLProjection(actor, bound=bound, eps=1e-4)(data) for bound in ("path", "step")
        )
        for key in ("loss_trajectory_kl", "loss_kl_multiplier", "gate_fraction"):
            torch.testing.assert_close(path[key], step[key])


class TestSplit:
    @pytest.mark.parametrize("bound", ["path", "step"])
    @pytest.mark.parametrize("kind", ["simplified", "full"])
    @pytest.mark.parametrize("complete", [False, True])
    @settings(max_examples=20, deadline=None)
    @given(seed=st.integers(0, 2**16), quantile=st.floats(0, 1), num_steps=st.integers(1, 5))
    def test_equals_the_whole_evaluation(self, bound, kind, complete, seed, quantile, num_steps):
        torch.manual_seed(seed)
        actor = make_actor(num_steps=num_steps)
        data = make_batch(actor, 9)
        nudge(actor, 0.05)
        region = TrajectoryKLProjection(actor, kl=kind, bound=bound)
        kl = PathKL(*(part.detach() for part in region.path_kl(data)))
        values = kl.kl if bound == "path" else kl.per_step.max(-1).values * num_steps
        # No state sits on the bound itself: the same products in another order differ in the last bit.
        region.eps.copy_(values.quantile(quantile) * (1 + 1e-9) + 1e-15)
        within, beyond, found = region.split(data, complete=complete)
        inside = region.inside(kl)
        assert within.tolist() == inside.nonzero().squeeze(-1).tolist()
        assert beyond.tolist() == (~inside).nonzero().squeeze(-1).tolist()
        order = torch.cat([within, beyond]) if complete else within
        assert not found.per_step.requires_grad
        for part, whole in zip(found, kl, strict=True):
            torch.testing.assert_close(part, whole[order], rtol=1e-10, atol=1e-16)

    def test_what_is_not_a_number_is_beyond(self, actor):
        data = make_batch(actor, 4)
        data["denoising", "loc"][2, 1, 0] = float("nan")
        within, beyond, _ = TrajectoryKLProjection(actor).split(data)
        assert within.tolist() == [0, 1, 3] and beyond.tolist() == [2]

    def test_nothing_recorded(self, actor):
        with pytest.raises(KeyError, match="recorded chain is not in the batch"):
            TrajectoryKLProjection(actor).split(make_states(3))


class TestOtherModes:
    kl = ([0.1, 0.1, 0.05], [0.2, 0.2, 0.2])

    @pytest.mark.parametrize("mode", ["penalty", "lagrangian"])
    def test_objective_plus_penalty(self, actor, mode):
        projection = TrajectoryKLProjection(actor, mode=mode, init_multiplier=2.0)
        objective, kl = torch.tensor([5.0, 7.0], dtype=DTYPE), given_kl(*self.kl, grad=True)
        out = projection.combine(objective, kl)
        torch.testing.assert_close(out, torch.tensor([5.5, 8.2], dtype=DTYPE))
        out.sum().backward()
        assert kl.per_step.grad.flatten().tolist() == pytest.approx([2.0] * 6)
        # No gradient reaches the multiplier this way.
        assert projection.log_multiplier.grad is None

    def test_none(self, actor):
        projection = TrajectoryKLProjection(actor, mode="none")
        objective = torch.tensor([5.0, 7.0], dtype=DTYPE)
        assert projection.combine(objective, given_kl(*self.kl)) is objective
        data = make_batch(actor, 4)
        nudge(actor)
        out = projection(data)
        assert out["loss_trajectory_kl"] == 0 and out["loss_kl_multiplier"] == 0
        assert out["kl"] > 0

    @pytest.mark.parametrize("mode", ["penalty", "none"])
    def test_fixed_multiplier(self, actor, mode):
        projection = TrajectoryKLProjection(actor, mode=mode, init_multiplier=0.5)
        assert "log_multiplier" in dict(projection.named_buffers())
        assert "log_multiplier" not in dict(projection.named_parameters())
        assert projection.multiplier_loss(given_kl(*self.kl)) == 0
        torch.testing.assert_close(projection.multiplier, torch.full((1,), 0.5, dtype=DTYPE))

    def test_penalty_is_the_sum_of_its_parts(self, actor):
        data = make_batch(actor, 4)
        nudge(actor)
        out = TrajectoryKLProjection(actor, mode="penalty", init_multiplier=3.0)(data)
        expected = 3.0 * literal_kl(actor, data).sum(-1).mean()
        torch.testing.assert_close(out["loss_trajectory_kl"], expected)


class TestMultiplier:
    @pytest.mark.parametrize("mode", ["switch", "lagrangian"])
    @pytest.mark.parametrize("eps, grows", [(0.1, True), (0.9, False)])
    def test_grows_where_the_bound_is_violated(self, actor, mode, eps, grows):
        projection = TrajectoryKLProjection(actor, mode=mode, eps=eps, init_multiplier=0.5)
        kl = given_kl([0.1, 0.1, 0.2], [0.2, 0.2, 0.2], grad=True)
        loss = projection.multiplier_loss(kl)
        torch.testing.assert_close(loss, torch.tensor(-0.5 * (0.5 - eps), dtype=DTYPE))
        loss.backward()
        assert kl.per_step.grad is None
        torch.testing.assert_close(
            projection.log_multiplier.grad, torch.tensor([-0.5 * (0.5 - eps)], dtype=DTYPE)
        )
        torch.optim.SGD([projection.log_multiplier], lr=0.1).step()
        assert bool(projection.multiplier > 0.5) == grows

    def test_one_per_step(self, actor):
        projection = TrajectoryKLProjection(actor, bound="step", eps=0.3, init_multiplier=0.5)
        kl = given_kl([0.05, 0.1, 0.3], [0.05, 0.1, 0.1])
        projection.multiplier_loss(kl).backward()
        torch.testing.assert_close(
            projection.log_multiplier.grad, -0.5 * torch.tensor([-0.05, 0.0, 0.1], dtype=DTYPE)
        )

    def test_is_positive_whatever_the_optimiser_does(self, actor):
        projection = TrajectoryKLProjection(actor)
        projection.log_multiplier.data.fill_(-50.0)
        assert projection.multiplier > 0


class TestForward:
    def test_metrics(self, actor):
        data = make_batch(actor, 6)
        nudge(actor)
        kl, full = literal_kl(actor, data), literal_kl(actor, data, "full")
        per_state = kl.sum(-1)
        bound = between(per_state)
        projection = TrajectoryKLProjection(actor, eps=bound, init_multiplier=0.25)
        out = projection(data)
        assert set(out.keys()) == set(projection.out_keys)
        expected = {
            "kl": per_state.mean(),
            "kl_full": full.sum(-1).mean(),
            "kl_per_step": kl.mean(0),
            "kl_max": per_state.max(),
            "gate_fraction": torch.tensor(0.5, dtype=DTYPE),
            "kl_multiplier": torch.tensor(0.25, dtype=DTYPE),
            "loss_kl_multiplier": -0.25 * (per_state.mean() - bound),
            "loss_trajectory_kl": 0.25 * per_state[per_state >= bound].sum() / 6,
        }
        for key, value in expected.items():
            torch.testing.assert_close(out[key], value, msg=lambda m, k=key: f"{k}: {m}")
            assert key.startswith("loss_") == out[key].requires_grad

    def test_with_another_actor_loss(self, actor):
        """Added to the outputs of torchrl's ClipPPOLoss, its gradient adds too."""
        critic = HLGaussValueOperator(
            HLGaussCritic(OBS, -2.0, 3.0, num_bins=11, hidden_size=8, dtype=DTYPE),
            in_keys=["observation"],
        )
        ppo = ClipPPOLoss(actor, critic, entropy_bonus=False)
        region = TrajectoryKLProjection(actor, mode="lagrangian", init_multiplier=1.0)
        data = make_batch(actor, 6)
        data["advantage"] = torch.randn(6, 1, dtype=DTYPE)
        data["value_target"] = torch.randn(6, 1, dtype=DTYPE)
        nudge(actor, 0.02)
        out = ppo(data).update(region(data))
        total = out["loss_objective"] + out["loss_critic"] + out["loss_trajectory_kl"]
        assert total.isfinite()
        params = list(actor.parameters())
        own = gradients(literal_kl(actor, data).sum(-1).mean(), params)
        objective = gradients(out["loss_objective"], params)
        assert max(grad.abs().max() for grad in objective) > 0
        assert_all_close(
            gradients(total, params), [a + b for a, b in zip(own, objective, strict=True)]
        )

    def test_flat_keys(self, actor):
        names = {"chain": "chain", "loc": "loc", "scale": ("old", "scale")}
        data = make_batch(actor, 4)
        for role, name in names.items():
            data.rename_key_(("denoising", role), name)
        nudge(actor)
        projection = TrajectoryKLProjection(actor)
        with pytest.raises(KeyError):
            projection(data)
        assert ("denoising", "chain") in projection.in_keys
        projection.set_keys(**names)
        assert projection.in_keys == ["observation", "chain", "loc", ("old", "scale")]
        assert projection(data)["kl"] > 0

    def test_keys_of_the_actor(self, actor):
        actor.set_keys(chain="chain", loc="loc", scale="scale")
        projection = TrajectoryKLProjection(actor)
        assert projection.in_keys == ["observation", "chain", "loc", "scale"]
        assert projection(make_batch(actor, 4))["kl"] < 1e-12

    def test_unknown_key(self, actor):
        with pytest.raises(ValueError, match="chian"):
            TrajectoryKLProjection(actor).set_keys(chian="chain")

    def test_dispatch(self, actor):
        data = make_batch(actor, 4)
        nudge(actor)
        projection = TrajectoryKLProjection(actor)
        expected = projection(data)
        parts = {f"denoising_{role}": data["denoising", role] for role in ("chain", "loc", "scale")}
        out = projection(observation=data["observation"], **parts)
        assert len(out) == len(projection.out_keys)
        for key, value in zip(projection.out_keys, out, strict=True):
            torch.testing.assert_close(value, expected[key])

    def test_dispatch_with_target(self, actor):
        projection = TrajectoryKLProjection(actor, old_policy="target")
        assert projection.in_keys == ["observation"]
        out = projection(observation=make_states(4)["observation"])
        assert len(out) == len(projection.out_keys)

    def test_input_is_not_changed(self, actor):
        data = make_batch(actor, 4)
        keys, before = set(data.keys(True, True)), data.clone()
        TrajectoryKLProjection(actor)(data)
        assert set(data.keys(True, True)) == keys and (data == before).all()


class TestConstruction:
    @pytest.mark.parametrize(
        "wrong, word",
        [
            ({"mode": "clip"}, "mode"),
            ({"kl": "half"}, "kl"),
            ({"direction": "sideways"}, "direction"),
            ({"bound": "action"}, "bound"),
            ({"old_policy": "new"}, "old_policy"),
            ({"eps": 0.0}, "eps"),
            ({"eps": math.nan}, "eps"),
            ({"init_multiplier": -1.0}, "init_multiplier"),
            ({"num_paths": 0, "old_policy": "target"}, "num_paths"),
            ({"num_paths": 2}, "num_paths=2.*target"),
            ({"direction": "reverse"}, "reverse.*target"),
        ],
    )
    def test_wrong_arguments(self, actor, wrong, word):
        with pytest.raises(ValueError, match=word):
            TrajectoryKLProjection(actor, **wrong)

    @pytest.mark.parametrize("old_policy", ["recorded", "target"])
    def test_state_dict_round_trip(self, actor, old_policy):
        projection = TrajectoryKLProjection(actor, old_policy=old_policy, eps=0.5)
        nudge(projection)
        torch.manual_seed(1)
        other = TrajectoryKLProjection(make_actor(), old_policy=old_policy, eps=0.5)
        result = other.load_state_dict(projection.state_dict())
        assert not result.missing_keys and not result.unexpected_keys
        data = make_batch(make_actor(), 4)
        outs = []
        for each in (projection, other):
            torch.manual_seed(2)
            outs.append(each(data))
        for key in projection.out_keys:
            torch.testing.assert_close(outs[0][key], outs[1][key])

    def test_settings_are_not_state(self, actor):
        """A checkpoint does not bring back the settings of then."""
        old = TrajectoryKLProjection(actor, mode="penalty", eps=0.5, init_multiplier=0.2)
        new = TrajectoryKLProjection(actor, mode="penalty", eps=0.1, init_multiplier=0.3)
        new.load_state_dict(old.state_dict())
        assert new.eps.item() == pytest.approx(0.1)
        assert new.multiplier.item() == pytest.approx(0.3)

    def test_old_policy_carries_no_gradient(self, actor):
        data = actor(make_batch(actor, 4).select("observation"))
        assert data["denoising", "loc"].requires_grad
        per_step = TrajectoryKLProjection(actor).path_kl(data).per_step
        grads = torch.autograd.grad(per_step.sum(), data["denoising", "loc"], allow_unused=True)
        assert grads == (None,)

    @pytest.mark.parametrize("old_policy", ["recorded", "target"])
    def test_deepcopy(self, actor, old_policy):
        projection = TrajectoryKLProjection(actor, old_policy=old_policy)
        nudge(projection)
        other, data = copy.deepcopy(projection), make_batch(make_actor(), 4)
        torch.manual_seed(2)
        before = projection(data)
        nudge(projection)
        torch.manual_seed(2)
        after = other(data)
        for key in projection.out_keys:
            torch.testing.assert_close(after[key], before[key])

    def test_float32(self):
        actor = make_actor(dtype=torch.float32)
        data = make_batch(actor, 4)
        nudge(actor)
        out = TrajectoryKLProjection(actor)(data)
        assert {value.dtype for value in out.values()} == {torch.float32}
        expected = literal_kl(actor, data).sum(-1).mean()
        torch.testing.assert_close(out["kl"], expected.detach(), rtol=1e-4, atol=1e-6)

    def test_shared_scale(self, actor):
        """A shared scale [N, A] need not be expanded."""
        data = make_batch(actor, 4)
        nudge(actor)
        expected = TrajectoryKLProjection(actor, kl="full").path_kl(data).kl
        row = data["denoising", "scale"][0].clone()
        data["denoising", "scale"] = row.expand(4, *row.shape)
        kl = TrajectoryKLProjection(actor, kl="full").path_kl(TensorDict(data, [4])).kl
        torch.testing.assert_close(kl, expected)


class TestReplayed:
    @pytest.fixture
    def noisy(self):
        return make_actor(return_noise=True, return_chain=False, return_dist_params=False)

    def record(self, actor, *batch):
        """States with the noise, and the whole record of the same chain."""
        with torch.no_grad():
            data = actor(make_states(*batch))
        whole = data.copy()
        whole.update(TrajectoryKLProjection(actor, old_policy="replayed").replay(data))
        return data, whole

    @pytest.mark.parametrize("kind", ["simplified", "full"])
    @pytest.mark.parametrize("batch", [(5,), (2, 3)], ids=str)
    def test_equals_recorded(self, noisy, kind, batch):
        region = TrajectoryKLProjection(noisy, kl=kind, old_policy="replayed")
        data, whole = self.record(noisy, *batch)
        assert set(data["denoising"].keys()) == {"noise", "log_prob", "path_log_prob"}
        final = whole["denoising", "chain"][..., -1, :]
        torch.testing.assert_close(noisy.module.squash(final), data["action"])
        nudge(noisy, 0.05)
        kl, expected = (
            r.path_kl(d)
            for r, d in ((region, data), (TrajectoryKLProjection(noisy, kl=kind), whole))
        )
        assert expected.kl.min() > 1e-4
        for ours, theirs in zip(kl, expected, strict=True):
            torch.testing.assert_close(ours, theirs)
        # The batch is left as it was.
        assert set(data["denoising"].keys()) == {"noise", "log_prob", "path_log_prob"}

    def test_the_noise_free_chain(self, noisy):
        with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
            data = noisy(make_states(4))
        assert (data["denoising", "noise"] == 0).all()
        whole = TrajectoryKLProjection(noisy, old_policy="replayed").replay(data)
        action = noisy.module.squash(whole["denoising", "chain"][:, -1])
        torch.testing.assert_close(action, data["action"])

    def test_follows_the_old_policy_of_the_last_update(self, noisy):
        region = TrajectoryKLProjection(noisy, old_policy="replayed")
        nudge(noisy, 0.05)
        with torch.no_grad():
            data = noisy(make_states(4))
        assert region.path_kl(data).kl.max() > 1e-4
        region.update_old_policy()
        torch.testing.assert_close(
            region.path_kl(data).kl, torch.zeros(4, dtype=DTYPE), rtol=0, atol=1e-20
        )

    def test_other_keys(self, noisy):
        noisy.set_keys(noise="eps")
        region = TrajectoryKLProjection(noisy, old_policy="replayed")
        assert region.in_keys == ["observation", "eps"]
        with torch.no_grad():
            data = noisy(make_states(4))
        assert region.path_kl(data.select("observation", "eps")).kl.shape == (4,)

    def test_nothing_recorded(self, noisy):
        region = TrajectoryKLProjection(noisy, old_policy="replayed")
        with pytest.raises(KeyError, match="recorded noise is not in the batch.*return_noise=True"):
            region.path_kl(make_states(3))

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from objectives._parts import (
    DTYPE,
    OBS,
    STEPS,
    assert_all_close,
    draw_noise,
    end,
    gradients,
    linear_critic,
    literal_return,
    literal_sample,
    make_actor,
    make_critic,
    make_rollout,
    nudge,
)
from tensordict import TensorDict
from torchrl.objectives import ValueEstimators
from torchrl.objectives.value import GAE

from torchrl_trudi.modules import HLGaussCritic, HLGaussValueOperator
from torchrl_trudi.objectives import SOFT_TD_LAMBDA, SoftTDLambdaEstimator, TruDiLoss


@pytest.fixture
def actor():
    return make_actor()


def make_estimator(actor, critic=None, **kwargs):
    critic = linear_critic() if critic is None else critic
    options = {"gamma": 0.9, "lmbda": 0.8, "temperature": 0.3, **kwargs}
    return SoftTDLambdaEstimator(value_network=critic, actor_network=actor, **options)


def fix_noise(monkeypatch, actor, noise):
    """Let the actor draw these numbers, in this order, however many it asks for at once."""
    rows = noise.reshape(-1, *noise.shape[-2:])
    drawn = [0]

    def draw(batch_shape, generator=None):
        start, count = drawn[0], torch.Size(batch_shape).numel()
        drawn[0] = (start + count) % len(rows)
        return rows[start : start + count].reshape(*batch_shape, *rows.shape[1:])

    monkeypatch.setattr(actor.module, "draw_noise", draw)


def literal_targets(actor, critic, data, noise, gamma=0.9, lmbda=0.8, alpha=0.3):
    """Targets of a rollout [E, T], one environment after the other."""
    out = []
    with torch.no_grad():
        for row, row_noise in zip(data, noise, strict=True):
            state = row["next", "observation"]
            action, _, log_prob = literal_sample(actor, state, row_noise)
            value = critic(TensorDict({"observation": state, "action": action}, [len(state)]))
            columns = [row["next", key].squeeze(-1) for key in ("reward", "terminated")]
            out.append(
                literal_return(
                    gamma,
                    lmbda,
                    alpha,
                    value["state_action_value"].squeeze(-1).tolist(),
                    log_prob.tolist(),
                    columns[0].tolist(),
                    columns[1].tolist(),
                    row["next", "truncated"].squeeze(-1).tolist(),
                )
            )
    return torch.tensor(out, dtype=DTYPE).unsqueeze(-1)


class TestTargets:
    def test_equal_the_literal_ones(self, monkeypatch, actor):
        nudge(actor)
        data, noise, critic = make_rollout(actor, 3, 6), draw_noise(3, 6), make_critic()
        for index, kind in (((0, 2), "terminated"), ((1, 1), "truncated"), ((2, 4), "both")):
            end(data, index, kind)
        expected = literal_targets(actor, critic, data, noise)
        fix_noise(monkeypatch, actor, noise)
        make_estimator(actor, critic)(data)
        torch.testing.assert_close(data["value_target"], expected)

    def test_what_is_written(self, monkeypatch, actor):
        data, noise, critic = make_rollout(actor, 2, 3), draw_noise(2, 3), make_critic()
        fix_noise(monkeypatch, actor, noise)
        out = make_estimator(actor, critic)(data)
        assert out is data
        following = data["next"]
        action, _, log_prob = literal_sample(actor, following["observation"], noise)
        torch.testing.assert_close(following["action"], action)
        torch.testing.assert_close(following["denoising", "log_prob"], log_prob)
        expected = critic(following.select("observation", "action"))
        for key in ("state_action_value", ("critic", "embedding")):
            torch.testing.assert_close(following[key], expected[key])
        assert not any(x.requires_grad for x in data.values(True, True))

    def test_one_sequence(self, monkeypatch, actor):
        data, noise = make_rollout(actor, 5), draw_noise(5)
        end(data, 2, "truncated")
        expected = literal_targets(actor, linear_critic(), data[None], noise[None])[0]
        fix_noise(monkeypatch, actor, noise)
        make_estimator(actor)(data)
        assert data["value_target"].shape == (5, 1)
        torch.testing.assert_close(data["value_target"], expected)

    def test_two_batch_dimensions(self, actor):
        data = make_rollout(actor, 2, 3, 4)
        make_estimator(actor)(data)
        assert data["value_target"].shape == (2, 3, 4, 1)

    def test_time_is_the_dimension_of_that_name(self, monkeypatch, actor):
        """A rollout [T, E] whose first dimension is named ``time``."""
        data, noise = make_rollout(actor, 3, 5), draw_noise(3, 5)
        end(data, (1, 2), "truncated")
        expected = literal_targets(actor, linear_critic(), data, noise)
        data = data.transpose(0, 1).contiguous()
        data.names = ["time", None]
        fix_noise(monkeypatch, actor, noise.transpose(0, 1).contiguous())
        make_estimator(actor)(data)
        torch.testing.assert_close(data["value_target"].transpose(0, 1), expected)

    def test_no_batch_dimension_is_refused(self, actor):
        with pytest.raises(RuntimeError, match="rollout"):
            make_estimator(actor)(make_rollout(actor, 2)[0])

    def test_without_termination_flag_an_end_is_terminal(self, monkeypatch, actor):
        data, noise = make_rollout(actor, 1, 4), draw_noise(1, 4)
        end(data, (0, 1), "terminated")
        expected = literal_targets(actor, linear_critic(), data, noise)
        del data["next", "terminated"]
        fix_noise(monkeypatch, actor, noise)
        make_estimator(actor)(data)
        torch.testing.assert_close(data["value_target"], expected)

    def test_stochastic_whatever_the_exploration_type(self, actor):
        """Two calls differ, although the loss runs its estimator under DETERMINISTIC."""
        loss = TruDiLoss(actor, make_critic())
        data = make_rollout(actor, 2, 4)
        first, second = (loss.value_estimator(data.clone())["next", "action"] for _ in range(2))
        assert not torch.equal(first, second)

    def test_other_keys(self, monkeypatch, actor):
        data, noise = make_rollout(actor, 2, 4), draw_noise(2, 4)
        end(data, (0, 1), "terminated")
        end(data, (1, 2), "truncated")
        expected = literal_targets(actor, linear_critic(), data, noise)
        for key in ("reward", "done", "terminated"):
            data.rename_key_(("next", key), ("next", "agent", key))
        fix_noise(monkeypatch, actor, noise)
        estimator = make_estimator(actor)
        names = {key: ("agent", key) for key in ("reward", "done", "terminated")}
        estimator.set_keys(**names, value_target=("out", "target"))
        estimator(data)
        torch.testing.assert_close(data["out", "target"], expected)

    def test_dispatch(self, actor):
        data = make_rollout(actor, 2, 4)
        estimator = make_estimator(actor)
        torch.manual_seed(1)
        expected = estimator(data.clone())["value_target"]
        torch.manual_seed(1)
        keywords = {
            "_".join((key,) if isinstance(key, str) else key): data[key]
            for key in estimator.in_keys
        }
        out = estimator(**keywords)
        torch.testing.assert_close(out, expected)


class TestTrueNextState:
    def targets(self, actor, data):
        torch.manual_seed(3)
        return make_estimator(actor)(data.clone())["value_target"]

    def test_the_observation_after_a_reset_has_no_effect(self, actor):
        for kind in ("terminated", "truncated"):
            data = make_rollout(actor, 1, 5)
            end(data, (0, 2), kind)
            before = self.targets(actor, data)
            data["observation"][0, 3] += 10
            assert torch.equal(self.targets(actor, data), before)

    def test_the_final_observation_of_a_truncated_episode_has(self, actor):
        data = make_rollout(actor, 1, 5)
        end(data, (0, 2), "truncated")
        before = self.targets(actor, data)
        data["next", "observation"][0, 2] += 10
        changed = (self.targets(actor, data) != before)[0, :, 0].tolist()
        assert changed == [True, True, True, False, False]

    def test_that_of_a_terminated_episode_has_not(self, actor):
        data = make_rollout(actor, 1, 5)
        end(data, (0, 2), "terminated")
        before = self.targets(actor, data)
        data["next", "observation"][0, 2] += 10
        assert torch.equal(self.targets(actor, data), before)

    def test_privileged_critic(self):
        """Actor and critic see different entries, and both are taken from the next state."""
        actor = make_actor(in_keys=["proprio"])
        critic = linear_critic(("sim", "state"))
        data = TensorDict({"proprio": torch.randn(2, 4, OBS, dtype=DTYPE)}, [2, 4])
        data["sim", "state"] = torch.randn(2, 4, 3, dtype=DTYPE)
        flags = torch.zeros(2, 4, 1, dtype=torch.bool)
        data["next"] = data.clone().apply(torch.randn_like)
        data["next"].update(
            {"reward": torch.randn(2, 4, 1, dtype=DTYPE), "done": flags, "terminated": flags}
        )
        estimator = make_estimator(actor, critic, gamma=1.0, lmbda=0.0)
        root = [key for key in estimator.in_keys if "next" not in key]
        assert root == ["proprio", ("sim", "state")]
        torch.manual_seed(0)
        estimator(data)
        torch.manual_seed(0)
        following = data["next"]
        # The estimator flattens time; randn draws the same numbers in either shape.
        noise = actor.module.draw_noise((8,)).reshape(2, 4, STEPS + 1, -1)
        action, _, log_prob = literal_sample(actor, following["proprio"], noise)
        value = critic.module(following["sim", "state"], action)
        expected = following["reward"] - 0.3 * log_prob.unsqueeze(-1) + value
        torch.testing.assert_close(data["value_target"], expected.detach())

    def test_missing_next_observation_is_named(self, actor):
        data = make_rollout(actor, 2, 3)
        del data["next", "observation"]
        with pytest.raises(KeyError, match="observation"):
            make_estimator(actor)(data)


class TestNaNNextState:
    def test_of_a_terminal_step_is_harmless(self, actor):
        critic = make_critic()
        loss = TruDiLoss(actor, critic)
        data = make_rollout(actor, 2, 4)
        end(data, (0, 1), "terminated")
        end(data, (1, 3), "both")
        torch.manual_seed(5)
        expected = loss.value_estimator(data.clone())["value_target"]
        data["next", "observation"][0, 1, 0] = math.nan
        data["next", "observation"][1, 3] = math.nan
        torch.manual_seed(5)
        loss.value_estimator(data)
        torch.testing.assert_close(data["value_target"], expected)
        missing = data["next", "critic", "embedding"].isnan()
        assert missing.all(-1).nonzero().tolist() == [[0, 1], [1, 3]]
        assert missing.any(-1).nonzero().tolist() == [[0, 1], [1, 3]]

        out = loss.critic_loss(data.reshape(-1))
        assert out["loss_critic"].isfinite()
        grads = gradients(out["loss_critic"], loss.critic_parameters())
        assert all(grad.isfinite().all() for grad in grads)
        # The rows count as zero in the mean.
        both = critic(data.select("observation", "action"))["critic", "next_embedding"]
        error = (both - data["next", "critic", "embedding"]).square().mean(-1)
        torch.testing.assert_close(out["auxiliary_error"], error.nansum().detach() / 8)

    def test_of_another_step_is_an_error(self, actor):
        for kind in (None, "truncated"):
            data = make_rollout(actor, 2, 4)
            if kind is not None:
                end(data, (1, 2), kind)
            data["next", "observation"][1, 2, 0] = math.nan
            with pytest.raises(ValueError, match=r"not finite at 1 steps.*\[\[1, 2\]\]"):
                make_estimator(actor)(data)

    def test_in_the_critic_entry_alone(self):
        actor = make_actor(in_keys=["proprio"])
        data = make_rollout(make_actor(), 1, 3)
        data["proprio"] = data["observation"].clone()
        data["next", "proprio"] = data["next", "observation"].clone()
        data["next", "observation"][0, 1] = math.nan
        with pytest.raises(ValueError, match="not finite"):
            make_estimator(actor, linear_critic())(data)
        end(data, (0, 1), "terminated")
        make_estimator(actor, linear_critic())(data)
        assert data["value_target"].isfinite().all()


class TestChunks:
    @pytest.mark.parametrize("size", [1, 3, 4, 8, 100])
    def test_same_targets(self, monkeypatch, actor, size):
        data, noise, critic = make_rollout(actor, 2, 4), draw_noise(2, 4), make_critic()
        fix_noise(monkeypatch, actor, noise)
        whole = make_estimator(actor, critic)(data.clone())
        sizes = []
        hook = critic.module.encoder.register_forward_hook(
            lambda _, args, out: sizes.append(len(args[0]))
        )
        parts = make_estimator(actor, critic, chunk_size=size)(data.clone())
        hook.remove()
        assert max(sizes) <= size and sum(sizes) == 8
        for key in ("value_target", ("next", "action"), ("next", "critic", "embedding")):
            torch.testing.assert_close(parts[key], whole[key])


class TestTemperature:
    def shift(self, loss, data):
        """How far the temperature moves the targets."""
        torch.manual_seed(2)
        return loss.value_estimator(data.clone())["value_target"]

    def test_follows_the_loss(self, actor):
        """The target is affine in alpha."""
        loss, data = TruDiLoss(actor, linear_critic(), init_temperature=0.5), None
        data = make_rollout(actor, 2, 3)
        at = {}
        for alpha in (0.5, 1.0, 2.0):
            loss.log_temperature.data.fill_(math.log(alpha))
            at[alpha] = self.shift(loss, data)
        assert (at[1.0] != at[0.5]).all()
        torch.testing.assert_close(at[2.0] - at[1.0], 2 * (at[1.0] - at[0.5]))
        assert not at[2.0].requires_grad

    @pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
    def test_of_a_copied_loss(self, actor, clone):
        loss, data = TruDiLoss(actor, linear_critic()), make_rollout(actor, 2, 3)
        loss.make_value_estimator(gamma=0.9)
        other, before = clone(loss), self.shift(loss, data)
        torch.testing.assert_close(self.shift(other, data), before)
        other.log_temperature.data.add_(3.0)
        assert torch.equal(self.shift(loss, data), before)
        assert not torch.allclose(self.shift(other, data), before)

    def test_number_and_function(self, actor):
        assert make_estimator(actor, temperature=0.25).temperature == 0.25
        alpha = torch.tensor(0.5, requires_grad=True)
        value = make_estimator(actor, temperature=lambda: 2 * alpha).temperature
        assert value == 1.0 and not value.requires_grad


class TestNetworks:
    def test_are_not_registered_twice(self, actor):
        """The estimator of a loss adds no parameter and no entry of the state dict."""
        loss = TruDiLoss(actor, make_critic())
        names = {name for name, _ in loss.named_parameters()}
        loss.make_value_estimator()
        assert {name for name, _ in loss.named_parameters()} == names

    def test_follow_an_update_of_the_loss(self, actor):
        loss = TruDiLoss(actor, linear_critic(), init_temperature=1e-9)
        data = make_rollout(actor, 2, 3)

        def targets():
            torch.manual_seed(2)
            return loss.value_estimator(data.clone())["value_target"]

        first = targets()
        for params in (loss.critic_parameters(), loss.actor_parameters()):
            for param in params:
                param.data.add_(0.3)
            second = targets()
            assert not torch.allclose(first, second)
            first = second

    @pytest.mark.parametrize(
        "clone",
        [
            "deepcopy",
            "pickle",
        ],
    )
    def test_follow_an_update_of_a_copied_loss(self, actor, clone):
        loss, data = TruDiLoss(actor, linear_critic()), make_rollout(actor, 2, 3)
        loss.make_value_estimator()
        other = copy.deepcopy(loss) if clone == "deepcopy" else pickle.loads(pickle.dumps(loss))
        for original, param in (
            *zip(loss.actor_parameters(), other.actor_parameters(), strict=True),
            *zip(loss.critic_parameters(), other.critic_parameters(), strict=True),
        ):
            original.data.add_(0.3)
            param.data.add_(0.3)
        out = []
        for each in (loss, other):
            torch.manual_seed(0)
            out.append(each.value_estimator(data.clone())["value_target"])
        torch.testing.assert_close(out[1], out[0])

    def test_params_and_target_params(self, actor):
        critic, data = linear_critic(), make_rollout(actor, 2, 3)
        params = TensorDict.from_module(critic)
        zero, estimator = params.data.clone().zero_(), make_estimator(actor, critic)
        for kwargs in ({"params": zero}, {"params": params, "target_params": zero}):
            out = estimator(data.clone(), **kwargs)
            assert (out["next", "state_action_value"] == 0).all()
        out = estimator(data.clone(), params=zero, target_params=params)
        assert (out["next", "state_action_value"] != 0).all()
        assert (critic.module.c != 0).all()


class TestConstruction:
    def test_registered(self, actor):
        loss = TruDiLoss(actor, make_critic())
        by_name = loss.make_value_estimator("soft_td_lambda", gamma=0.5, lmbda=0.25)
        assert by_name is loss
        first = loss.value_estimator
        assert isinstance(first, SoftTDLambdaEstimator)
        assert (first.gamma, first.lmbda) == (0.5, 0.25)
        loss.make_value_estimator(SoftTDLambdaEstimator, gamma=0.75, lmbda=0.5)
        assert loss.value_estimator is not first
        assert (loss.value_estimator.gamma, loss.value_estimator.lmbda) == (0.75, 0.5)
        assert loss.value_estimator.actor_network is actor
        own = make_estimator(actor, loss.critic_network)
        loss.make_value_estimator(own)
        assert loss.value_estimator is own
        assert loss.value_type is SoftTDLambdaEstimator

    def test_default(self, actor):
        loss = TruDiLoss(actor, make_critic())
        assert isinstance(loss.value_estimator, SoftTDLambdaEstimator)
        assert loss.default_value_estimator == SOFT_TD_LAMBDA
        torch.testing.assert_close(loss.value_estimator.gamma.item(), 0.99, rtol=1e-6, atol=0)
        torch.testing.assert_close(loss.value_estimator.lmbda.item(), 0.95, rtol=1e-6, atol=0)

    def test_hyperparameters_reach_it(self, actor):
        loss = TruDiLoss(actor, make_critic())
        loss.make_value_estimator(gamma=0.9, lmbda=0.5, chunk_size=7, mask_terminal_entropy=False)
        assert loss.value_estimator.chunk_size == 7
        assert loss.value_estimator.mask_terminal_entropy is False

    def test_published_entropy_term(self, monkeypatch, actor):
        """Without the mask, a terminal target is r - gamma alpha L'."""
        data, noise = make_rollout(actor, 1, 1), draw_noise(1, 1)
        end(data, (0, 0), "terminated")
        fix_noise(monkeypatch, actor, noise)
        make_estimator(actor, mask_terminal_entropy=False)(data)
        _, _, log_prob = literal_sample(actor, data["next", "observation"], noise)
        expected = data["next", "reward"] - 0.9 * 0.3 * log_prob.unsqueeze(-1)
        torch.testing.assert_close(data["value_target"], expected.detach())
        make_estimator(actor)(data)
        torch.testing.assert_close(data["value_target"], data["next", "reward"])

    @pytest.mark.parametrize("name", [ValueEstimators.GAE, ValueEstimators.TD0, "gae"])
    def test_upstream_estimators_by_name_are_refused(self, actor, name):
        loss = TruDiLoss(actor, make_critic())
        with pytest.raises(NotImplementedError, match="soft_td_lambda"):
            loss.make_value_estimator(name)

    def test_upstream_estimators_by_class_are_refused(self, actor):
        loss = TruDiLoss(actor, make_critic())
        with pytest.raises(NotImplementedError):
            loss.make_value_estimator(GAE, gamma=0.9, lmbda=0.9)

    @pytest.mark.parametrize(
        "wrong", [{"gamma": 1.1}, {"gamma": -0.1}, {"lmbda": 2}, {"chunk_size": 0}]
    )
    def test_wrong_arguments(self, actor, wrong):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            make_estimator(actor, **wrong)


def test_upstream_gae_with_a_state_value():
    """A state-value critic with a histogram serves torchrl's GAE as it is."""
    critic = HLGaussValueOperator(
        HLGaussCritic(OBS, -2.0, 3.0, num_bins=11, hidden_size=8, dtype=DTYPE),
        in_keys=["observation"],
    )
    assert critic.value_key == "state_value"
    nudge(critic)
    data = make_rollout(make_actor(), 2, 5)
    end(data, (0, 2), "terminated")
    end(data, (1, 1), "truncated")
    GAE(gamma=0.5, lmbda=0.75, value_network=critic)(data)
    with torch.no_grad():
        value, following = (
            critic(TensorDict({"observation": x}, x.shape[:-1]))["state_value"].squeeze(-1)
            for x in (data["observation"], data["next", "observation"])
        )
    expected = torch.tensor(
        [
            literal_return(
                0.5,
                0.75,
                0.0,
                following[i].tolist(),
                [0.0] * 5,
                data["next", "reward"][i, :, 0].tolist(),
                data["next", "terminated"][i, :, 0].tolist(),
                data["next", "truncated"][i, :, 0].tolist(),
            )
            for i in range(2)
        ],
        dtype=DTYPE,
    )
    # GAE's advantage is the TD(lambda) return minus the value.
    assert_all_close([data["advantage"].squeeze(-1)], [expected - value])
    assert_all_close([data["value_target"].squeeze(-1)], [expected])


class TestReuse:
    """The next row's recorded action as the draw at the next state."""

    @pytest.fixture
    def data(self, actor):
        nudge(actor)
        data = make_rollout(actor, 3, 6)
        for index, kind in (((0, 2), "terminated"), ((1, 1), "truncated"), ((2, 4), "both")):
            end(data, index, kind)
        return data

    def test_equal_the_literal_ones(self, monkeypatch, actor, data):
        critic, fresh = make_critic(), draw_noise(3, 6)
        own = data["next", "done"].squeeze(-1).clone()
        own[:, -1] = True
        # The noise that the next row's action was made of, or fresh.
        noise = torch.where(own[..., None, None], fresh, data["noise"].roll(-1, 1))
        expected = literal_targets(actor, critic, data, noise)
        fix_noise(monkeypatch, actor, fresh[own])
        make_estimator(actor, critic, reuse_actions=True)(data)
        torch.testing.assert_close(data["value_target"], expected)
        following = data["next"]
        assert torch.equal(
            following["action"][:, :-1][~own[:, :-1]], data["action"][:, 1:][~own[:, :-1]]
        )
        states = following.select("observation", "action")
        torch.testing.assert_close(
            following["critic", "embedding"], critic(states)["critic", "embedding"]
        )

    def test_chains_are_drawn_where_episodes_or_the_rollout_end(self, monkeypatch, actor, data):
        sizes = []
        draw = actor.module.draw_noise
        monkeypatch.setattr(
            actor.module,
            "draw_noise",
            lambda shape, *a: sizes.append(shape.numel()) or draw(shape, *a),
        )
        make_estimator(actor, reuse_actions=True)(data)
        assert sizes == [3 + 3]  # last rows, and ends

    def test_time_need_not_be_the_last_dimension(self, monkeypatch, actor, data):
        noise = draw_noise(6)
        monkeypatch.setattr(actor.module, "draw_noise", lambda shape, *a: noise[: shape.numel()])
        make_estimator(actor, reuse_actions=True)(data)
        swapped = data.exclude("value_target").transpose(0, 1).contiguous()
        swapped.names = ["time", None]
        order = (data["next", "done"].squeeze(-1) | (torch.arange(6) == 5)).nonzero()
        rank = order[:, 1] * 3 + order[:, 0]
        again = noise[rank.argsort()]
        monkeypatch.setattr(actor.module, "draw_noise", lambda shape, *a: again[: shape.numel()])
        make_estimator(actor, reuse_actions=True)(swapped)
        torch.testing.assert_close(swapped["value_target"].transpose(0, 1), data["value_target"])

    def test_in_chunks(self, actor, data):
        torch.manual_seed(0)
        whole = make_estimator(actor, reuse_actions=True)(data.clone())["value_target"]
        for chunk in (1, 4, 100):
            torch.manual_seed(0)
            estimator = make_estimator(actor, reuse_actions=True, chunk_size=chunk)
            assert estimator(data.clone())["value_target"].shape == whole.shape

    def test_keys(self, actor):
        recorded = [("denoising", name) for name in ("chain", "loc", "scale")]
        keys = make_estimator(actor, reuse_actions=True).in_keys
        assert ("denoising", "log_prob") in keys and not set(recorded).intersection(keys)
        actor.return_log_prob = False
        assert set(recorded) < set(make_estimator(actor, reuse_actions=True).in_keys)
        assert not set(recorded).intersection(make_estimator(actor).in_keys)

    @pytest.mark.parametrize("name", ["chain", "loc", "scale", "log_prob"])
    def test_missing_entries(self, actor, data, name):
        actor.return_log_prob = name == "log_prob"
        with pytest.raises(KeyError, match=rf"reuse_actions=True needs .*'{name}'"):
            make_estimator(actor, reuse_actions=True)(data.exclude(("denoising", name)))

    def test_recorded_log_prob_stands_for_the_chain(self, actor, data):
        targets = []
        for recorded in (True, False):
            actor.return_log_prob = recorded
            torch.manual_seed(5)
            batch = data.exclude(*([("denoising", "chain")] if recorded else []))
            targets.append(make_estimator(actor, reuse_actions=True)(batch)["value_target"])
        torch.testing.assert_close(*targets)

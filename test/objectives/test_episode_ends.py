"""Ends of episodes: every estimator that we ship or recommend, on every way to make an environment.

The traps of upstream's estimators that we know are in :class:`TestUpstreamTraps`, and for users in
docs/upstream.md. When one of those tests fails, upstream has changed: the docs want an update.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objectives._counting import LIMIT, PATHS, registered
from objectives._parts import literal_return
from tensordict import TensorDict, pad
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import Bounded
from torchrl.objectives.value import GAE, TD0Estimator, TD1Estimator, TDLambdaEstimator

from torchrl_trudi.modules import ChainActor, GaussianModel
from torchrl_trudi.modules.chain_model import DenoisingChain, PathLogProb
from torchrl_trudi.objectives import SoftTDLambdaEstimator

pytestmark = pytest.mark.truncation

GAMMA, LMBDA, TEMPERATURE = 0.9, 0.8, 0.3
ENDS = ("none", "terminated", "truncated", "both")


class KnownLogProb(GaussianModel):
    """A Gaussian policy that says that its log-probability is ``(1 + s) / 4``."""

    def log_prob(self, observation: torch.Tensor, chain: DenoisingChain) -> PathLogProb:
        out = super().log_prob(observation, chain)
        return out._replace(log_prob=log_prob(observation[..., 0]))


def log_prob(state):
    return (1 + state) / 4


class Spread(nn.Module):
    """Mean 0 and scale 1, whatever the state."""

    def forward(self, observation):
        return torch.zeros_like(observation), torch.ones_like(observation)


def make_actor() -> ChainActor:
    model = KnownLogProb(Spread(), action_dim=1)
    return ChainActor(model, spec=Bounded(-1.0, 1.0, (1,)), return_log_prob=True)


def state_value(offset: float = 0.0, function: Callable | None = None) -> TensorDictModule:
    """``V(s) = s``, or another function."""
    function = function or (lambda observation: observation + offset)
    return TensorDictModule(function, in_keys=["observation"], out_keys=["state_value"])


def action_value(function: Callable = lambda observation, action: observation) -> TensorDictModule:
    """``Q(s, a) = s``, or another function."""
    keys = ["observation", "action"]
    return TensorDictModule(function, in_keys=keys, out_keys=["state_action_value"])


def soft(**kwargs):
    def make(gamma=GAMMA, value=None):
        critic = action_value() if value is None else action_value(lambda s, a: value(s))
        return SoftTDLambdaEstimator(
            gamma=gamma,
            lmbda=LMBDA,
            value_network=critic,
            actor_network=make_actor(),
            temperature=TEMPERATURE,
            **kwargs,
        )

    return make


def upstream(cls, **kwargs):
    def make(gamma=GAMMA, value=None):
        return cls(gamma=gamma, value_network=state_value(function=value), **kwargs)

    return make


# Estimator, its lambda (TD(0) and TD(1) are the two ends) and its temperature.
ESTIMATORS = {
    "soft": (soft(), LMBDA, TEMPERATURE),
    "soft-reuse": (soft(reuse_actions=True), LMBDA, TEMPERATURE),
    "soft-chunks": (soft(chunk_size=4), LMBDA, TEMPERATURE),
    "gae": (upstream(GAE, lmbda=LMBDA), LMBDA, 0.0),
    "gae-vectorized": (upstream(GAE, lmbda=LMBDA, vectorized=True), LMBDA, 0.0),
    "gae-loop": (upstream(GAE, lmbda=LMBDA, vectorized=False), LMBDA, 0.0),
    "td0": (upstream(TD0Estimator), 0.0, 0.0),
    "td1": (upstream(TD1Estimator), 1.0, 0.0),
    "tdlambda": (upstream(TDLambdaEstimator, lmbda=LMBDA), LMBDA, 0.0),
    "tdlambda-loop": (upstream(TDLambdaEstimator, lmbda=LMBDA, vectorized=False), LMBDA, 0.0),
}


@functools.cache
def make(name: str, **kwargs):
    """An estimator by its name."""
    return ESTIMATORS[name][0](**kwargs)


each_estimator = pytest.mark.parametrize("name", ESTIMATORS)


def estimate(name: str, data: TensorDict, **kwargs) -> torch.Tensor:
    """Targets ``[E, T]`` of a rollout, which is left as it is."""
    out = make(name, **kwargs)(data.clone())
    if "state_value" in out:
        # Upstream: the advantage is that of the same target.
        torch.testing.assert_close(out["advantage"], out["value_target"] - out["state_value"])
    return out["value_target"].squeeze(-1)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Upstream keeps its gamma in float32."""
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6, check_dtype=False)


def literal(name: str, data: TensorDict) -> torch.Tensor:
    """The same from the steps' counts alone: the observation under ``next`` is not looked at."""
    _, lmbda, temperature = ESTIMATORS[name]
    targets = []
    for row in data.reshape(-1, data.shape[-1]):
        following = row["observation"].squeeze(-1) + 1
        flags = [row["next", key].squeeze(-1).tolist() for key in ("terminated", "truncated")]
        reward = row["next", "reward"].squeeze(-1).tolist()
        columns = (following.tolist(), log_prob(following).tolist(), reward, *flags)
        targets.append(literal_return(GAMMA, lmbda, temperature, *columns))
    return torch.tensor(targets, dtype=data["next", "reward"].dtype).reshape(data.shape)


# -- every estimator on every way to make an environment --------------------------------


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(path, marks=pytest.mark.slow if path == "gymnasium-async" else ())
        for path in PATHS
    ],
)
def batches(request) -> list[TensorDict]:
    """What a collector returns: several episodes in each batch, some over the edge of a batch."""
    torch.manual_seed(0)
    with registered():
        env = PATHS[request.param](0)
        frames = 23 * max(1, env.batch_size.numel())
        collector = Collector(
            env,
            make_actor(),
            frames_per_batch=frames,
            total_frames=3 * frames,
            auto_register_policy_transforms=False,
        )
        collected = [batch.clone() for batch in collector]
        collector.shutdown(raise_on_error=False)
    return collected


def test_final_observations_are_those_of_the_episode(batches):
    data = torch.cat(batches, -1)
    count, following = data["observation"], data["next"]
    assert torch.equal(following["observation"], count + 1)
    assert torch.equal(following["reward"], 1 + count / 2)
    assert torch.equal(following["done"], following["terminated"] | following["truncated"])
    after = torch.where(following["done"], 0.0, count + 1)
    assert torch.equal(count[..., 1:, :], after[..., :-1, :])


def test_every_kind_of_end_is_there(batches):
    data = torch.cat(batches, -1)["next"]
    terminated, truncated = data["terminated"], data["truncated"]
    for kind in (terminated & truncated, terminated & ~truncated, truncated & ~terminated):
        assert kind.any()
    for batch in batches:
        assert (batch["next", "done"].sum(-2) > 1).all()
    assert not all(batch["next", "done"][..., -1, :].all() for batch in batches)


@each_estimator
def test_targets(batches, name):
    for batch in batches:
        assert_close(estimate(name, batch), literal(name, batch))


@each_estimator
def test_a_cut_at_the_limit_bootstraps_from_the_final_state(batches, name):
    """``r + gamma * 5``, and the reward alone if the episode terminated in the same step."""
    _, _, temperature = ESTIMATORS[name]
    for batch in batches:
        target, following = estimate(name, batch), batch["next"]
        cut = (following["truncated"] & ~following["terminated"]).squeeze(-1)
        reward = following["reward"].squeeze(-1)
        bonus = GAMMA * (LIMIT - temperature * log_prob(LIMIT))
        assert_close(target[cut], reward[cut] + bonus)
        end = following["terminated"].squeeze(-1)
        assert_close(target[end], reward[end])


# -- the value of a constant reward ------------------------------------------------------


def constant_reward(kind: str, length: int = 10, rows: int = 2, episodes: int = 3) -> TensorDict:
    """Whole episodes of a constant reward 1, counted in the observation."""
    count = torch.arange(length, dtype=torch.float64).repeat(episodes).expand(rows, -1)
    count = count.unsqueeze(-1).contiguous()
    done = count == length - 1
    none = torch.zeros_like(done)
    flags = {key: done if kind in (key, "both") else none for key in ("terminated", "truncated")}
    following = {"observation": count + 1, "reward": torch.ones_like(count), "done": done, **flags}
    batch = count.shape[:2]
    return TensorDict({"observation": count, "next": TensorDict(following, batch)}, batch)


def recorded(data: TensorDict) -> TensorDict:
    """With what the actor records."""
    data = data.clone()
    data["action"] = torch.zeros_like(data["observation"])
    data["denoising", "log_prob"] = log_prob(data["observation"]).squeeze(-1)
    return data


@each_estimator
@pytest.mark.parametrize("kind", ["terminated", "truncated", "both"])
def test_constant_reward(name, kind, monkeypatch):
    """The true values are a fixed point: of an endless task, though it is cut, or of ten steps."""
    monkeypatch.setattr(SoftTDLambdaEstimator, "temperature", 0.0)
    gamma, length = 0.95, 10

    def value(state):
        if kind == "truncated":
            return torch.full_like(state, 1 / (1 - gamma))
        return (1 - gamma ** (length - state)) / (1 - gamma)

    data = recorded(constant_reward(kind, length))
    target = estimate(name, data, gamma=gamma, value=value)
    assert_close(target, value(data["observation"]).squeeze(-1))
    first = 1 / (1 - gamma) if kind == "truncated" else (1 - gamma**length) / (1 - gamma)
    assert target[0, 0].item() == pytest.approx(first, rel=1e-6)


# -- any pattern of ends -----------------------------------------------------------------


@st.composite
def rollouts(draw) -> TensorDict:
    """Rollouts ``[E, T]`` with any ends and random numbers."""
    rows, steps = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    kinds = st.lists(st.sampled_from(ENDS), min_size=rows * steps, max_size=rows * steps)
    ends = [ENDS.index(kind) for kind in draw(kinds)]
    ends = torch.tensor(ends).reshape(rows, steps, 1)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal():
        return torch.randn(rows, steps, 1, dtype=torch.float64, generator=generator)

    observation, done = normal(), ends > 0
    final = normal()
    # Within an episode the next state is the next row's.
    last = torch.zeros_like(done)
    last[:, -1] = True
    following = torch.where(done | last, final, observation.roll(-1, 1))
    return recorded(
        TensorDict(
            {
                "observation": observation,
                "next": {
                    "observation": following,
                    "reward": normal(),
                    "done": done,
                    "terminated": (ends == 1) | (ends == 3),
                    "truncated": ends >= 2,
                },
            },
            [rows, steps],
        ),
    )


quickly = settings(max_examples=6, deadline=None)


def episodes(done: torch.Tensor) -> list[slice]:
    """Where the episodes of one row are; the last need not have ended."""
    edges = [0, *(done.squeeze(-1).nonzero().squeeze(-1) + 1).tolist()]
    edges += [len(done)] if edges[-1] < len(done) else []
    return [slice(start, stop) for start, stop in itertools.pairwise(edges)]


@quickly
@given(data=rollouts())
def test_each_episode_has_the_targets_it_has_alone(data):
    for name in ESTIMATORS:
        target = estimate(name, data)
        for row, row_target in zip(data, target, strict=True):
            for part in episodes(row["next", "done"]):
                assert_close(row_target[part], estimate(name, row[None, part])[0])


@quickly
@given(data=rollouts(), random=st.randoms(use_true_random=False))
def test_rows_do_not_see_each_other(data, random):
    order = torch.tensor(random.sample(range(len(data)), len(data)))
    for name in ESTIMATORS:
        assert_close(estimate(name, data[order]), estimate(name, data)[order])


@quickly
@given(data=rollouts())
def test_what_follows_an_end_changes_nothing_before_it(data):
    other = data.clone()
    after = (data["next", "done"].cumsum(1) - data["next", "done"].long()) > 0
    for key in ("observation", ("next", "observation"), ("next", "reward")):
        other[key] = torch.where(after, -100 - 3 * other[key], other[key])
    other, before = recorded(other), ~after.squeeze(-1)
    for name in ESTIMATORS:
        assert_close(estimate(name, other)[before], estimate(name, data)[before])


@quickly
@given(data=rollouts())
def test_the_final_observation_of_a_terminal_step_is_not_used(data):
    """Whatever it is: another number, or the NaN of a task that has none."""
    terminated = data["next", "terminated"]
    for junk in (1e6, float("nan")):
        other = data.clone()
        following = other["next", "observation"]
        other["next", "observation"] = following.masked_fill(terminated, junk)
        for name in ESTIMATORS:
            assert_close(estimate(name, other), estimate(name, data))


@quickly
@given(data=rollouts())
def test_termination_wins_over_truncation(data):
    other = data.clone()
    other["next", "truncated"] = data["next", "truncated"] & ~data["next", "terminated"]
    for name in ESTIMATORS:
        assert_close(estimate(name, other), estimate(name, data))


# -- traps ---------------------------------------------------------------------------------


class TestUpstreamTraps:
    """What upstream's estimators do at ends of episodes that a user would not expect.

    Each test shows the trap, with the right number beside it. For users: docs/upstream.md.
    """

    @staticmethod
    def rollout(*ends: str) -> TensorDict:
        """One row that counts from 0 in each episode; ``ends[t]`` says how step ``t`` ends."""
        count, counts = 0.0, []
        for kind in ends:
            counts.append(count)
            count = count + 1 if kind == "none" else 0.0
        state = torch.tensor(counts)[None, :, None]
        terminated, truncated = (
            torch.tensor([kind in (flag, "both") for kind in ends])[None, :, None]
            for flag in ("terminated", "truncated")
        )
        following = {
            "observation": state + 1,
            "reward": torch.ones_like(state),
            "terminated": terminated,
            "truncated": truncated,
            "done": terminated | truncated,
        }
        shape = [1, len(ends)]
        return TensorDict({"observation": state, "next": TensorDict(following, shape)}, shape)

    def test_shifted_gives_up_the_last_steps(self):
        """``shifted=True`` makes room for a final state by dropping a step at the end of the row."""
        data = self.rollout("none", "truncated", "none", "truncated", "none", "none")
        right = GAE(gamma=GAMMA, lmbda=LMBDA, value_network=state_value())(data.clone())
        out = GAE(gamma=GAMMA, lmbda=LMBDA, value_network=state_value(), shifted=True)(data)
        valid = out["shifted_valid"].flatten()
        assert valid.tolist() == [True, True, True, True, False, False]
        gap = (out["value_target"] - right["value_target"]).abs().flatten()
        assert gap[valid].max() < 1e-6
        assert gap[~valid].min() > 0.1

    @pytest.mark.parametrize("estimator", ["gae", "td0", "td1", "tdlambda"])
    def test_a_missing_final_state_is_taken_for_the_one_before(self, estimator):
        """A NaN in the final observation of a truncated step bootstraps from ``V(s_t)``, silently."""
        data = self.rollout("none", "none", "truncated")
        data["next", "observation"][0, 2] = float("nan")
        target = make(estimator)(data)["value_target"][0, 2, 0]
        assert target == pytest.approx(1 + GAMMA * 2)  # of the state of step 2: the final one is 3

    @pytest.mark.parametrize("estimator", ["gae", "td0", "td1", "tdlambda"])
    def test_where_a_final_state_is_missing_no_value_is_written(self, estimator):
        """A NaN anywhere, and ``state_value``, which a value clip reads, stays away."""
        data = self.rollout("none", "none", "terminated")
        data["next", "observation"][0, 2] = float("nan")
        assert "state_value" not in make(estimator)(data)

    @pytest.mark.parametrize("estimator", ["gae", "td0", "td1", "tdlambda"])
    def test_an_infinite_state_after_termination_spoils_the_targets(self, estimator):
        """The value is multiplied by zero there, and ``0 * inf`` is NaN."""
        data = self.rollout("none", "none", "terminated")
        data["next", "observation"][0, 2] = float("inf")
        assert make(estimator)(data.clone())["value_target"][0, 2].isnan()
        ours = make("soft")(recorded(data))["value_target"][0, 2]
        assert ours == 1

    def test_ours_refuses_a_missing_final_state(self):
        data = self.rollout("none", "none", "truncated")
        data["next", "observation"][0, 2] = float("nan")
        with pytest.raises(ValueError, match="not finite at 1 steps that are not terminal"):
            make("soft")(data)

    @pytest.mark.parametrize("estimator", ["gae", "td0", "td1", "tdlambda"])
    def test_without_the_terminated_flag_a_cut_is_terminal(self, estimator):
        data = self.rollout("none", "none", "truncated")
        del data["next", "terminated"]
        assert make(estimator)(data)["value_target"][0, 2, 0] == 1

    def test_padding_counts_as_data(self):
        """``Collector(split_trajs=True)`` pads with zeros, in which an unfinished episode goes on."""
        data = self.rollout("none", "none", "none")
        gae = GAE(gamma=GAMMA, lmbda=LMBDA, value_network=state_value(offset=2.0))
        right = gae(data.clone())["value_target"][0, 2, 0]
        assert right == pytest.approx(1 + GAMMA * 5)
        padded = gae(pad(data, [0, 0, 0, 2]))["value_target"][0, 2, 0]
        assert abs(padded - right) > 0.1

    def test_ours_refuses_padding(self):
        data = pad(self.rollout("none", "none", "none"), [0, 0, 0, 2])
        data["collector", "mask"] = torch.tensor([[True, True, True, False, False]])
        with pytest.raises(ValueError, match="padded"):
            make("soft")(data)
